"""Why each node of a tuned model runs as it does, and what the other decision would have cost: the values, and their
sums. `evidence` finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Why = Literal[
    "faster", "slower", "close", "placement", "inaccurate", "no kernel", "failed", "unproven", "untried", "unsupported",
    "excluded", "no time",
]  # fmt: skip
"""What decided: prices or measurements ("faster", "slower"; "close": they hardly differ), the placement as a whole
against the prices ("placement"), damage to the outputs, an engine without such a kernel, or that refused the candidate,
no candidate that was proven, none that tried it, no pair can stand there, the user, or that the node takes no time."""

IN_WORDS: Mapping[Why, str] = {
    "faster": "faster so",
    "slower": "8 bits take longer",
    "close": "both ways take about the same time",
    "placement": "part of a placement that was measured as a whole",
    "inaccurate": "8 bits would do too much to the outputs",
    "no kernel": "the engine runs it in float, with pairs as well",
    "failed": "the engine refused a candidate with it in 8 bits",
    "unproven": "no candidate proved faster",
    "untried": "no candidate tried it",
    "unsupported": "no pair can stand there",
    "excluded": "excluded by the user",
    "no time": "takes no time of its own",
}


@dataclass(frozen=True)
class Explanation:
    """Why one node runs as it does. Times in ms are of its whole unit, conversions at its borders included.

    `precision` is what the engine's report says of the shipped build where there is one, else what the pairs mean.
    `other_ms` is what the unit would take with the other decision, all else as it is; `measured` says whether a build
    ran it so. Where a time is None, `unknown` says why.
    """

    node: str
    op: str
    unit: tuple[str, ...]
    quantized: bool
    precision: str
    why: Why
    reason: str
    ms: float | None
    other_ms: float | None
    measured: bool
    unknown: str = ""

    @property
    def margin_ms(self) -> float | None:
        """What the other decision would cost more; below 0 if prices say that it would save time."""
        return None if self.ms is None or self.other_ms is None else self.other_ms - self.ms

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self) | {"unit": list(self.unit), "margin_ms": self.margin_ms}


@dataclass(frozen=True)
class Tally:
    """Nodes with one reason: how many, what their units take, and what these would take with the other decision."""

    quantized: bool
    why: Why
    nodes: int
    ms: float | None
    other_ms: float | None
    example: str

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def tally(rows: Sequence[Explanation]) -> tuple[Tally, ...]:
    """The rows by decision and reason, first what takes the most time; each unit counts once."""
    groups: dict[tuple[bool, Why], list[Explanation]] = {}
    for row in rows:
        groups.setdefault((row.quantized, row.why), []).append(row)
    tallies = []
    for (quantized, why), members in groups.items():
        units = {row.unit: row for row in members}.values()
        known = [(row.ms, row.other_ms) for row in units if row.ms is not None and row.other_ms is not None]
        spent = [row.ms for row in units if row.ms is not None]
        largest = max(members, key=lambda row: row.ms or 0.0)
        other_ms = sum(o for _, o in known) if known and len(known) == len(units) else None
        tallies.append(Tally(quantized, why, len(members), sum(spent) if spent else None, other_ms, largest.node))
    return tuple(sorted(tallies, key=lambda t: (-(t.ms or 0.0), -t.nodes, t.why)))
