"""What a report says, as values: made from records or from the result of a command, and shown by one template.

Times are in ms. A speed is how many times as fast something runs: 2.0 takes half the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Speed:
    """Times as fast, with the ends of the interval that holds the true value; an end is None where none is known."""

    median: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The answer, first: one sentence, what it means, and the speed that it speaks of."""

    headline: str
    meaning: str
    good: bool
    speed: Speed | None = None
    against: str = ""


@dataclass(frozen=True)
class Fact:
    """A number or a name worth knowing, with a hint of what it means."""

    name: str
    value: str
    hint: str = ""


@dataclass(frozen=True)
class Node:
    """A node of the model: whether it reads 8-bit values, and why so, where that is known."""

    name: str
    op: str
    quantized: bool
    why: str = ""


@dataclass(frozen=True)
class Group:
    """Nodes that the engine runs together, by number, with the views of their results; or all that it computes in
    advance ("folded"), or that computes nothing but shapes ("shapes"). Times are as the engine told them of profiled
    inferences; None where it told none. `conversion_ms` is what the pairs at its borders cost in the tuned model.

    `error_db` is the output SQNR that rounding what the group writes alone would leave; None if it was not measured.
    """

    nodes: tuple[int, ...]
    label: str
    precision: Literal["8 bit", "float", "folded", "shapes"]
    float_ms: float | None
    tuned_ms: float | None
    conversion_ms: float
    error_db: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """Groups `first` to `last` (which it leaves out) under one name, in blocks of its own where they are many."""

    label: str
    first: int
    last: int
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Map:
    """The model: nodes, the groups that they form, who reads from whom (numbers of groups), and blocks of groups."""

    nodes: tuple[Node, ...]
    groups: tuple[Group, ...]
    flows: tuple[tuple[int, int], ...]
    blocks: tuple[Block, ...]
    tuned: str
    """What the second time of a group is of: the tuned model, or a candidate that did not ship."""
    before: str = "float"
    """What the first time of a group is of: the float model, or what rewrites have made of it."""


@dataclass(frozen=True)
class Strip:
    """The rounds of one comparison, each as times as fast, and what they say together."""

    name: str
    rounds: tuple[float, ...]
    speed: Speed


@dataclass(frozen=True)
class Candidate:
    """A candidate of the search. `strip` compares it with the best of its time, `speed` is against the float model;
    `ships` says that its placement is that of optimized_final.onnx."""

    number: int
    origin: str
    outcome: Literal["accepted", "faster", "undecided", "slower", "inaccurate", "failed"]
    told: str
    strip: Strip | None
    speed: float | None
    sqnr_db: float | None
    tensors: int
    builds: int
    seconds: float | None
    ships: bool = False


@dataclass(frozen=True)
class Point:
    """A placement by speed and accuracy; `sqnr_db` None where outputs are equal. Proven ones met fresh builds."""

    name: str
    speed: Speed
    sqnr_db: float | None
    shipped: bool
    proven: bool
    holds: bool


@dataclass(frozen=True)
class Bar:
    """A row of the bars of time: a group by number (None for all the others), the first of so many `groups` that are
    alike, and its first node; conversions apart."""

    name: str
    node: str
    group: int | None
    float_ms: float
    tuned_ms: float | None
    conversion_ms: float
    quantized: bool = False
    groups: int = 1


@dataclass(frozen=True)
class Listing:
    """A table, for what has no picture: names of columns, rows of texts; which columns hold numbers."""

    title: str
    lead: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    late: bool = False
    """Whether it stands behind the pictures."""


@dataclass(frozen=True)
class Report:
    """All of it, section by section; a section that is empty is left out."""

    title: str
    kind: str
    verdict: Verdict
    facts: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()
    bars_lead: str = ""
    map: Map | None = None
    points: tuple[Point, ...] = ()
    floor_db: float | None = None
    proof: tuple[Strip, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    listings: tuple[Listing, ...] = ()
    circumstances: tuple[Fact, ...] = ()
    commands: tuple[Fact, ...] = ()
