"""How close outputs are to the float model's, as text: the same wherever people read of it."""

from __future__ import annotations

from qdqtune.types import Accuracy


def decibels(sqnr_db: float | None) -> str:
    """An output SQNR in dB; None means that outputs are equal."""
    return "exact" if sqnr_db is None else f"{sqnr_db:.1f} dB"


def integers_differ(sqnr_db: float | None, equal: float | None) -> bool:
    """Whether integers in outputs are all that differs, so that no ratio in dB tells of it; `equal` is their share."""
    return sqnr_db is None and equal is not None and equal < 1


def closeness(sqnr_db: float | None, equal: float | None) -> str:
    """How close outputs are: in dB; or the share of `equal` integers, where these alone differ and have no dB."""
    return f"{equal:.1%} of the integers equal" if integers_differ(sqnr_db, equal) else decibels(sqnr_db)


def closeness_cell(sqnr_db: float | None, equal: float | None) -> str:
    """The same for a column of ratios in dB; empty where integers alone differ."""
    return "" if integers_differ(sqnr_db, equal) else decibels(sqnr_db).removesuffix(" dB")


def slice_cell(accuracy: Accuracy | None) -> str:
    """The worst slice of an output, for example: boxes[:, :, 3] 17.5 dB; empty where none tells anything."""
    if accuracy is None or accuracy.slice_name is None:
        return ""
    return f"{accuracy.slice_name} {decibels(accuracy.slice_db)}{' (lost)' if accuracy.slice_is_lost else ''}"


def closeness_of(accuracy: Accuracy) -> str:
    """All of it, for example: 24.1 dB (18.3 to 31.0 over 16 samples), 99.0% of the best classes equal."""
    shares = (accuracy.agreement, "integers"), (accuracy.top1, "best classes")
    parts = [f"{share:.1%} of the {what} equal" for share, what in shares if share is not None]
    if integers_differ(accuracy.sqnr_db, accuracy.agreement):
        return ", ".join(parts)
    most = "equal" if accuracy.highest_db is None else f"{accuracy.highest_db:.1f}"
    is_spread = accuracy.samples > 1 and accuracy.sqnr_db is not None
    spread = f" ({accuracy.lowest_db:.1f} to {most} over {accuracy.samples} samples)" if is_spread else ""
    return ", ".join([f"{decibels(accuracy.sqnr_db)}{spread}", *parts])
