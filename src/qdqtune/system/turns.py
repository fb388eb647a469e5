"""How long a model runs in its turn of a round."""

from __future__ import annotations

import math
from dataclasses import dataclass

LONG = 0.04
"""Seconds from which on inferences have one turn in a round, as disturbances average out. Chosen, not measured."""


@dataclass(frozen=True)
class Turn:
    """A turn of a model: `runs` back-to-back inferences, each of `seconds` on the slower of both models. In a round
    each has `per_round`: two, A B B A, so that drift cancels; one if inferences are long or turns start a process."""

    runs: int
    per_round: int
    seconds: float
    start: float = 0.0  # seconds to start the process of a turn; 0 if turns start none

    @classmethod
    def of(cls, seconds: float, least: float, start: float = 0.0) -> Turn:
        """The turn that lasts at least `least` seconds, for inferences of `seconds`."""
        return cls(max(1, math.ceil(least / (seconds or 1))), 1 if start or seconds >= LONG else 2, seconds, start)

    @property
    def round_seconds(self) -> float:
        """Seconds of a round, if both models take `seconds`."""
        return 2 * self.per_round * (self.runs * self.seconds + self.start)
