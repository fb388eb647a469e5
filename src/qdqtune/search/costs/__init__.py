"""Estimated costs of placements, and the placement with the least cost, found as a minimum cut."""
