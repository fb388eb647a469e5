"""Positions of marks in the charts of a report, computed from values: in % of the width, or in px of the height."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from qdqtune.explanation.report import Point, Strip
from qdqtune.timing.ratios import Ratio
from qdqtune.types import EQUAL_DB

OUTSIDE = 0.02
"""Share of the rounds at either end that may lie outside the axis; they are drawn at its end."""

FINE = 1000
"""Width of the box in which the dots of a comparison are drawn, in SVG units."""

LANES = (5, 11, 2, 8, 13, 4, 10, 7)
"""Heights at which dots are drawn by turns, so that they do not hide each other."""

MOST_DOTS = 96
"""Most dots of one comparison; of more rounds, some are left out at equal distances."""


@dataclass(frozen=True)
class Axis:
    """A range of values over a width."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """The position of a value in % of the width; that of the nearer end if it lies outside."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(max(share, 0.0), 1.0), 2)

    def ticks(self, most: int = 6) -> tuple[float, ...]:
        """Round values that divide the axis into at most `most` steps."""
        rough = (self.high - self.low) / most
        power = 10 ** math.floor(math.log10(rough))
        step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return tuple(round(n * step, 10) for n in range(first, math.floor(self.high / step + 1e-9) + 1))


def spanning(values: Iterable[float], pad: float = 0.06) -> Axis:
    """An axis that holds all values, with a margin."""
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    room = pad * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low - room, high + room)


def ends(speed: Ratio) -> tuple[float, ...]:
    """The median of a speed and the known ends of its interval."""
    return tuple(v for v in (speed.low, speed.median, speed.high) if v is not None)


def of_strips(strips: Sequence[Strip]) -> Axis:
    """One axis for the speeds of several comparisons, which includes the speed 1."""
    values = [1.0]
    for strip in strips:
        values += [*ends(strip.speed), *np.quantile(strip.rounds, [OUTSIDE, 1 - OUTSIDE]).tolist()]
    return spanning(values)


def dots(strip: Strip, axis: Axis) -> str:
    """The rounds as an SVG path in a box of FINE by 16: strokes without length, whose round ends look like dots."""
    chosen = np.linspace(0, len(strip.rounds) - 1, min(len(strip.rounds), MOST_DOTS)).round().astype(int)
    places = (round(axis.place(strip.rounds[i]) * FINE / 100) for i in chosen)
    return "".join(f"M{x} {LANES[i % len(LANES)]}h0" for i, x in enumerate(places))


@dataclass(frozen=True)
class Scatter:
    """The axes of a chart with speed to the right and output SQNR upwards."""

    x: Axis
    y: Axis
    height: int

    def down(self, sqnr_db: float | None) -> float:
        """The distance of a point from the upper edge, in px."""
        shown = self.y.high if sqnr_db is None or sqnr_db >= EQUAL_DB else sqnr_db  # equal outputs at the top
        return round(self.height * (1 - self.y.place(shown) / 100), 1)


def scatter(points: Sequence[Point], floor_db: float | None, height: int = 260) -> Scatter:
    """Axes that hold all points, a speed of 1 and the asked SQNR."""
    x = spanning([1.0, *(v for p in points for v in ends(p.speed))], 0.08)
    levels = [p.sqnr_db for p in points if p.sqnr_db is not None and p.sqnr_db < EQUAL_DB]
    levels += [] if floor_db is None else [floor_db]
    y = spanning(levels or [0.0, 40.0], 0.15)
    return Scatter(x, Axis(max(y.low, 0.0) if min(levels or [0.0]) >= 0 else y.low, y.high), height)
