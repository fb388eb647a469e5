"""What a person sees of a finished run: one HTML file that needs nothing else."""
