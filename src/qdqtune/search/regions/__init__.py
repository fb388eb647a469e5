"""Regions of a graph, and patterns of equal regions."""
