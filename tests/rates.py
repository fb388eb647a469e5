"""Judges how often something happened."""

from scipy.special import bdtrc


def plausible(hits: int, count: int, rate: float) -> bool:
    """Whether so many hits can come from a rate of at most `rate`: else the chance is less than one in a million."""
    return hits == 0 or bool(bdtrc(hits - 1, count, rate) > 1e-6)
