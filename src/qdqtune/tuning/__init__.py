"""One run: settings, subject, loop, proof, state and records."""
