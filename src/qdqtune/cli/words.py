"""How figures are told to people, the same way everywhere: speed as times as fast, durations, decibels."""

from __future__ import annotations


def speed(ratio: float) -> str:
    """How many times as fast something is that takes `ratio` of the time."""
    return f"{1 / ratio:.2f}x"


def duration(seconds: float) -> str:
    """Hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def decibels(sqnr_db: float | None) -> str:
    """An output SQNR; None where nothing is lost."""
    return "exact" if sqnr_db is None else f"{sqnr_db:.1f} dB"
