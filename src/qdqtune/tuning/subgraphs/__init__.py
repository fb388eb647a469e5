"""Fusion groups as models of their own, timed alone."""
