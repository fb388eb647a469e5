"""Which of two models is faster, and whether one is accurate enough."""
