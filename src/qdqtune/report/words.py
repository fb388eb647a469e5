"""How figures and counts are told to people, the same way everywhere: durations, counts, decibels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdqtune.types import Placement


def duration(seconds: float) -> str:
    """Hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def samples(count: int, is_held_out: bool) -> str:
    """The samples that outputs were compared on."""
    which = "held-out sample" if is_held_out else "sample"
    return f"{count} {which}{'s' * (count != 1)}{' (every fifth)' * is_held_out}"


def placed(placement: Placement) -> str:
    """How much of a model a placement quantizes."""
    stored = len(placement.compressed)
    weights = f"{stored} {'weight is' if stored == 1 else 'weights are'} stored in fewer bits"
    if stored and not placement.edges:
        return weights
    edges = len(placement)
    return f"{edges} {'edge carries' if edges == 1 else 'edges carry'} a pair{f', {weights}' if stored else ''}"


def rewrites_gave(summary: Mapping[str, Any]) -> tuple[float, float | None]:
    """The share of its time that rewrites left to a model, where that was measured, and what the placement left of
    this; None where there is none, and all that the proof has measured is theirs."""
    if not summary["edges"] and not summary.get("weights"):
        return summary["ratio"], None
    return summary["rewrites"]["gave"], summary["rewrites"]["placement_gave"]


def decibels(sqnr_db: float | None) -> str:
    """An output SQNR; None where nothing is lost."""
    return "exact" if sqnr_db is None else f"{sqnr_db:.1f} dB"
