"""What the loop asks of a mode, and what a mode has to say at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qdqtune.search import Strategy
from qdqtune.search.costs.decisions import UnitPrice
from qdqtune.tuning.observer import Observer
from qdqtune.types import Placement, Trial


@dataclass(frozen=True)
class GroupOutcome:
    """A row of subgraph mode's table: one group. Times in ms; those alone leave out the conversions at its border.

    `scheme` is the one that was accepted, or else the best one; None if there is none. `gain_in_model` is what the
    group takes less in the whole model as decided, conversions included; None where the engine reports no layers.
    """

    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    kind: int | None
    """Number of the kind; equal groups have the same. None if the group was not timed."""
    scheme: str | None
    float_ms: float
    quantized_ms: float | None
    gain_in_model: float | None
    kept: bool
    why: str

    @property
    def gain_alone(self) -> float | None:
        """What the scheme saved alone."""
        return None if self.quantized_ms is None else self.float_ms - self.quantized_ms


@dataclass(frozen=True)
class Recorded:
    """What a mode knows at the end of a run.

    `rows` are for people, the largest first: one type a mode, for which the command line has a table. `summary` goes
    into summary.json, `files` hold JSON by name of file beside it.
    """

    rows: Sequence[UnitPrice] | Sequence[GroupOutcome] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Mode(Protocol):
    """A mode made ready for one run: all that it measures before the search is done."""

    @property
    def strategy(self) -> Strategy:
        """What proposes."""

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Who hears of the search besides the caller, and before."""

    def record(self, history: Sequence[Trial], final: Placement) -> Recorded:
        """What is known when the search has ended and `final` ships; may write files of its own."""
