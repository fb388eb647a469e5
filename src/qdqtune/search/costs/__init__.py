"""The price model, and its exact optimum."""
