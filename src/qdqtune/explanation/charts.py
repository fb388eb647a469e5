"""Positions of marks in the charts of a report, computed from values: in % of the width, or in px of the height."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from qdqtune.explanation.report import Point
from qdqtune.timing.ratios import Ratio
from qdqtune.types import EQUAL_DB


@dataclass(frozen=True)
class Axis:
    low: float
    high: float

    def place(self, value: float) -> float:
        """The position of a value in % of the width; 0 or 100 if it lies outside."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(max(share, 0.0), 1.0), 2)

    def ticks(self, most: int = 6) -> tuple[float, ...]:
        """Round values that divide the axis into at most `most` steps."""
        rough = (self.high - self.low) / most
        power = 10 ** math.floor(math.log10(rough))
        step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return tuple(round(n * step, 10) for n in range(first, math.floor(self.high / step + 1e-9) + 1))


def spanning(values: Iterable[float], pad: float) -> Axis:
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    room = pad * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low - room, high + room)


def of_speeds(speeds: Iterable[Ratio], pad: float = 0.06) -> Axis:
    """An axis for 1 and for speeds, with those ends of their intervals that are known."""
    ends = chain(*((speed.low, speed.median, speed.high) for speed in speeds))
    return spanning([1.0, *(end for end in ends if end is not None)], pad)


@dataclass(frozen=True)
class Scatter:
    x: Axis
    y: Axis
    height: int

    def down(self, sqnr_db: float | None) -> float:
        """The distance of a point from the upper edge, in px."""
        shown = self.y.high if sqnr_db is None or sqnr_db >= EQUAL_DB else sqnr_db  # equal outputs at the top
        return round(self.height * (1 - self.y.place(shown) / 100), 1)


def scatter(points: Sequence[Point], floor_db: float | None, height: int = 260) -> Scatter:
    """Axes that include all points, a speed of 1 and the required SQNR."""
    x = of_speeds(point.speed for point in points)
    levels = [p.sqnr_db for p in points if p.sqnr_db is not None and p.sqnr_db < EQUAL_DB]
    levels += [] if floor_db is None else [floor_db]
    y = spanning(levels or [0.0, 40.0], 0.15)
    return Scatter(x, Axis(max(y.low, 0.0) if min(levels or [0.0]) >= 0 else y.low, y.high), height)
