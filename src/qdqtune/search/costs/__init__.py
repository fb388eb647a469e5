"""The price model of placements, and its exact optimum as a minimum cut."""
