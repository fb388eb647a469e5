"""Which of two models is faster, decided under noise, and whether a candidate holds the user's limits."""
