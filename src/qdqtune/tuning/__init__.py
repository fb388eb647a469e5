"""One run of `tune`: settings, the loaded model, the search loop, the proof, the state file and the results."""
