"""Equal parts of a graph."""
