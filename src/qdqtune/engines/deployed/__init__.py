"""Scripts that run a model without qdqtune, by the settings.json beside them: each becomes deploy/run.py of a run."""
