"""Which trial of a batch becomes the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qdqtune.timing.ratios import Plan, Ratio, judge, overlap
from qdqtune.types import Trial

ALIKE = 1.01
"""Medians within this factor, whose intervals overlap, cannot be told apart."""


def is_alike(ratio: Ratio, fastest: Ratio) -> bool:
    """Whether a ratio cannot be told apart from that of the fastest."""
    return ratio.median <= ALIKE * fastest.median and overlap(ratio, fastest)


def accepted(trials: Sequence[Trial], plan: Plan, best: Trial | None = None) -> list[Trial]:
    """The trials of one batch, the fastest of those that won marked as accepted; the most accurate of those that
    cannot be told apart from it. Where none won against the `best` so far, one that is more accurate, and not slower as
    far as the rounds can tell."""
    judged = [(ratio, t) for t in trials if t.holds is True and (ratio := judge(t, plan))]
    alike = [(ratio, t) for ratio, t in judged if ratio.verdict == "faster"]
    if alike:
        fastest, _ = min(alike, key=lambda pair: (pair[0].median, -pair[1].number))
        alike = [(r, t) for r, t in alike if is_alike(r, fastest)]
    elif best is not None:
        even = [(r, t) for r, t in judged if r.verdict == "undecided" and r.median <= 1]
        alike = [(r, t) for r, t in even if round(t.exactness) > round(best.exactness)]
    if not alike:
        return list(trials)
    # Whole dB: less is no reason to prefer one to another.
    _, chosen = min(alike, key=lambda pair: (-round(pair[1].exactness), pair[0].median, -pair[1].number))
    return [replace(t, accepted=t is chosen) for t in trials]
