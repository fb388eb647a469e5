"""Why each node of a tuned model runs as it does, and what the other decision would have cost: the values, and their
sums. `why` finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qdqtune.types import WeightFormat

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


ORIGINS: Mapping[str, str] = {
    "cut": "the cut of the prices",
    "front": "the cut at a price on noise",
    "polish": "the cut with its closest decisions made otherwise",
    "fused units": "pairs wherever they can stand, around what the engine fuses",
    "single nodes": "pairs wherever they can stand, around every node",
    "weights in 4 bits": "weights of products in 4 bits, and no pairs",
    "weights in 8 bits": "weights of products in 8 bits, and no pairs",
    "weights in fewer bits": "weights of products in 4 bits, the loudest in 8, and no pairs",
    "earlier run": "what an earlier run has found for this model",
    "imported": "the pairs of your Q/DQ model",
    "within the limits": "the least noise for what prices of operators suggest",
    "mutated": "region search",
    "cached": "the pattern cache",
    "merged winners": "the winners of region search together",
}
"""Where placements come from, in words."""

RULED = ("compute", "residual", "islands", "static", "everything")

NOT_TAKEN = {
    "faster": "but did not ship",
    "slower": "which is slower",
    "undecided": "which is not clearly faster",
    "inaccurate": "but missed the limits on accuracy",
    "failed": "but failed",
}
"""What came of a candidate that did not ship."""


@dataclass(frozen=True)
class Explanation:
    """Why one node runs as it does. Times in ms are of its whole unit.

    `ms` is what the unit took in what shipped, each conversion counted with one unit, and `float_ms` what it took in
    the float model: over all units they add up to the latencies that were measured. `margin_ms` is what the whole model
    would take more if this unit alone were decided the other way, `otherwise`, conversions around it included; below 0
    if that would save time. `measured` says whether builds have shown all that this rests on, or some of it is guessed.
    Where a time is None, `unknown` says why.

    `precision` is what the engine's report says of the shipped build where there is one, else what the pairs mean.
    `weight_format` is how the unit's weights are stored where they alone are in fewer bits, "" if they are not.
    """

    node: str
    op: str
    unit: tuple[str, ...]
    quantized: bool
    precision: str
    why: Why
    reason: str
    ms: float | None
    float_ms: float | None
    margin_ms: float | None
    measured: bool
    unknown: str = ""
    weight_format: str = ""
    otherwise: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self) | {"unit": list(self.unit)}


@dataclass(frozen=True)
class Tally:
    """Nodes with one reason: how many, what their units took in what shipped and in the float model, and what the model
    would take more if all of them were decided otherwise; `measured` if builds have shown each of them so. `bits` are
    those of weights that alone are stored in fewer, None where there are none."""

    quantized: bool
    why: Why
    nodes: int
    ms: float | None
    float_ms: float | None
    margin_ms: float | None
    measured: bool
    example: str
    bits: int | None = None

    @property
    def runs_in(self) -> str:
        """What the nodes run in, in words."""
        if self.bits is not None:
            return f"{self.bits}-bit weights"
        return "8 bits" if self.quantized and self.why != "no kernel" else "float"

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def tally(rows: Sequence[Explanation], together: Callable[[Sequence[Explanation]], float | None]) -> tuple[Tally, ...]:
    """The rows by decision and reason, first what takes the most time; each unit counts once.

    `together` says what units take more, in ms, if all of them are decided otherwise; None where nobody knows.
    """
    groups: dict[tuple[bool, int | None, Why], list[Explanation]] = {}
    for row in rows:
        bits = WeightFormat.named(row.weight_format).bits if row.weight_format else None
        groups.setdefault((row.quantized, bits, row.why), []).append(row)
    tallies = []
    for (quantized, bits, why), members in groups.items():
        units = tuple({row.unit: row for row in members}.values())
        ms, float_ms = total(row.ms for row in units), total(row.float_ms for row in units)
        more = together(units) if all(row.margin_ms is not None for row in units) else None
        largest, shown = max(members, key=lambda row: row.ms or 0.0).node, all(row.measured for row in units)
        tallies.append(Tally(quantized, why, len(members), ms, float_ms, more, shown, largest, bits))
    return tuple(sorted(tallies, key=lambda t: (-(t.ms or 0.0), -t.nodes, t.why)))


def total(times: Iterable[float | None]) -> float | None:
    """Of the times that are known; None where none is."""
    known = [ms for ms in times if ms is not None]
    return sum(known) if known else None
