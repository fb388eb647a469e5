"""The contents of a report as values, made of a finished run. One template shows them.

Times are in ms. A speed is a factor: 2.0 takes half the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qdqtune.timing.ratios import Ratio


@dataclass(frozen=True)
class Speed:
    """A speed with the ends of its interval; an end is None where it is unknown."""

    median: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, ratio: Ratio) -> Speed:
        """The inverse of a ratio of times, with the ends of the interval swapped."""
        return cls(1 / ratio.median, *(None if end is None else 1 / end for end in (ratio.high, ratio.low)))


@dataclass(frozen=True)
class Headline:
    """The answer in one sentence, what it means, and the speed against the float model that it is about."""

    headline: str
    meaning: str
    good: bool
    speed: Speed | None = None


@dataclass(frozen=True)
class Fact:
    """A named number or text, with a hint of what it means."""

    name: str
    value: str
    hint: str = ""


@dataclass(frozen=True)
class MapNode:
    """A node of the model, with the state of its unit, and why (see `units.Explanation`)."""

    name: str
    op: str
    state: str
    why: str = ""


@dataclass(frozen=True)
class MapGroup:
    """Nodes, by number, that the engine runs together, with reshapes of their results; or all nodes that it computes
    in advance, or that compute shapes alone. Times come from profiled inferences; None where the engine
    gives none. `conversion_ms` is the time of the pairs at the group's borders in the tuned model.

    `error_db` is the output SQNR if only the results of this group were rounded; None if it was not measured.
    """

    nodes: tuple[int, ...]
    label: str
    state: str
    float_ms: float | None
    tuned_ms: float | None
    conversion_ms: float
    error_db: float | None


@dataclass(frozen=True)
class MapBlock:
    """The groups from `first` up to, not including, `last` under one name; many groups form inner blocks."""

    label: str
    first: int
    last: int
    blocks: tuple[MapBlock, ...] = ()


@dataclass(frozen=True)
class Map:
    """A model as a map: nodes, groups of them, pairs of groups of which the second reads from the first, and blocks."""

    nodes: tuple[MapNode, ...]
    groups: tuple[MapGroup, ...]
    flows: tuple[tuple[int, int], ...]
    blocks: tuple[MapBlock, ...]
    tuned: str
    """The name of what ships, which `tuned_ms` of groups is about; empty if that is the float model."""
    before: str = "float"
    """The model that `float_ms` of groups is about: float, or rewritten float."""


@dataclass(frozen=True)
class Strip:
    """The rounds of one comparison as speeds, one for each, and the speed that follows from all rounds."""

    name: str
    rounds: tuple[float, ...]
    speed: Speed


Came = Literal["accepted", "faster", "undecided", "slower", "inaccurate", "failed", "costlier"]


@dataclass(frozen=True)
class Candidate:
    """A candidate of the search. `strip` compares it with the best candidate before it, `speed` is against the float
    model. "costlier": by rule, where nothing is timed. `ships`: its placement is that of optimized_final.onnx."""

    number: int
    origin: str
    outcome: Came
    told: str
    strip: Strip | None
    speed: float | None
    sqnr_db: float | None
    tensors: int
    seconds: float | None
    ships: bool = False


@dataclass(frozen=True)
class Point:
    """A placement with its speed and accuracy; `sqnr_db` is None where outputs are equal. `proven`: on fresh builds."""

    name: str
    speed: Speed
    sqnr_db: float | None
    shipped: bool
    proven: bool
    holds: bool


@dataclass(frozen=True)
class Bar:
    """A row of the chart of times: one group, or several that are alike, of which `group` is the number of the first
    and `node` its first node; `group` is None for the sum of all others. `tuned_ms` is without conversions."""

    name: str
    node: str
    group: int | None
    float_ms: float
    tuned_ms: float | None
    conversion_ms: float


@dataclass(frozen=True)
class Report:
    """A whole report, section by section; empty sections are left out."""

    title: str
    verdict: Headline
    facts: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()
    bars_lead: str = ""
    map: Map | None = None
    points: tuple[Point, ...] = ()
    floor_db: float | None = None
    has_accuracy: bool = True
    proof: tuple[Strip, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    circumstances: tuple[Fact, ...] = ()
    commands: tuple[Fact, ...] = ()
