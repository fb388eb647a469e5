"""How figures and counts are told to people, the same way everywhere: durations, counts, decibels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qdqtune.placement.reading import count_pairs
from qdqtune.types import Placement


def counted(count: int, what: str) -> str:
    """So many of something, in the plural if they are."""
    return f"{count} {what}{'s' * (count != 1)}"


def title(model: Path) -> str:
    """What a model is called in titles: by its file, and by its folder too where the file is called model.onnx."""
    folder = model.absolute().parent.name
    return f"{folder}/{model.name}" if model.name == "model.onnx" and folder else model.name


def builds(search: int, rewrites: int = 0, proof: int = 0) -> str:
    """Engine builds: those of the search, counted as --builds counts them, and those beside it."""
    besides = {"for rewrites": rewrites, "for the proof": proof}
    return " and ".join([str(search), *(f"{number} {what}" for what, number in besides.items() if number)])


def built(summary: Mapping[str, Any]) -> str:
    """The builds of a finished run, of which its summary counts those for rewrites with the search's."""
    rewrites = summary.get("rewrites", {}).get("builds", 0)
    return builds(summary["builds"] - rewrites, rewrites, summary["proof_builds"])


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
    pairs = count_pairs(placement)
    return f"{pairs} tensor{'s' * (pairs != 1)} with a Q/DQ pair{f', {weights}' if stored else ''}"


def rewrites_gave(summary: Mapping[str, Any]) -> tuple[float, float | None]:
    """The share of its time that rewrites left to a model, where that was measured, and what the placement left of
    this; None where there is none, and all that the proof has measured is theirs."""
    if not summary["edges"] and not summary.get("weights"):
        return summary["ratio"], None
    return summary["rewrites"]["gave"], summary["rewrites"]["placement_gave"]


def decibels(sqnr_db: float | None) -> str:
    """An output SQNR; None where nothing is lost."""
    return "exact" if sqnr_db is None else f"{sqnr_db:.1f} dB"
