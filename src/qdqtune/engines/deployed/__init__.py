"""Scripts that run a model without qdqtune, as settings.json beside them says. `tune` copies one to deploy/run.py."""
