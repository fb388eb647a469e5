"""Decides which of two models is faster despite noise, and whether a candidate meets the user's accuracy limits."""
