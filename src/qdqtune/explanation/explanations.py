"""Explanations of nodes as values, with the words for each kind of reason and each origin of a candidate.

The module `reasons_by_measurement` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qdqtune.types import WeightFormat

Why = Literal[
    "faster", "slower", "placement", "inaccurate", "no kernel", "elsewhere", "unproven", "unsupported", "no time"
]  # fmt: skip
"""What decided, in this order: prices or measurements; the placement as a whole, measured or the cheapest by rule; the
accuracy of the outputs, which takes float or 16 bits; that the engine has no such kernel, or leaves the node to another
execution provider; that no candidate was proven faster; that no pair can stand there, or the user wants none; or that
the node takes no time."""

IN_WORDS: Mapping[Why, str] = {
    "faster": "faster so",
    "slower": "8 bits alone there take longer",
    "placement": "part of the placement that ships",
    "inaccurate": "8 bits would do too much to the outputs",
    "no kernel": "the engine does not run it in 8 bits, with pairs as well",
    "elsewhere": "the engine leaves it to another execution provider",
    "unproven": "no candidate proved faster",
    "unsupported": "no pair can stand there, or you have excluded it",
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
    "dynamic quantization": "products with scales found at run time, and no pairs",
    "weights in fewer bits": "weights of products in several formats, and no pairs",
    "imported": "the pairs of your Q/DQ model",
    "within the limits": "the least noise for what prices of operators suggest",
    "mutated": "region search",
    "cached": "the pattern cache",
    "merged winners": "the winners of region search together",
    "8 bits": "everything in 8 bits",
    "16 bits": "everything in 16 bits",
    "cut by rule": "the cheapest by rule at a price on noise",
    "narrowed": "the best before it with a part in fewer bits",
}
"""Origins of candidates, in words."""

START_ORIGINS = ("compute", "residual", "islands", "static", "everything")
"""Origins that are names of START_PLACEMENTS (`placement.start_placements`)."""


def origin_in_words(origin: str) -> str:
    return ORIGINS.get(origin, f"the rule {origin!r}" if origin in START_ORIGINS else f"the candidate {origin!r}")


@dataclass(frozen=True)
class Explanation:
    """Why one node runs in float or in 8 bits. Times are in ms, and of its whole unit.

    `ms` is the time of the unit in the shipped model, conversions included (each counts with one unit), and `float_ms`
    its time in the float model. Summed over all units they give the measured latencies. `margin_ms` is the extra time
    of the whole model if this unit alone had the opposite decision (`otherwise`); below 0 if it would save time.
    `measured` is False where that time is partly a guess. A time is None where it is unknown.

    `precision` is that of the engine's report on the shipped build, or else follows from the pairs. `weight_format` is
    the weight format of its weights where these alone are quantized, "" if there are none.
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
    weight_format: str = ""
    otherwise: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A dict that JSON can hold."""
        return asdict(self) | {"unit": list(self.unit)}


@dataclass(frozen=True)
class Tally:
    """The nodes with one decision and reason: how many, and the times of their units in the shipped and in the float
    model. `margin_ms` is the extra time of the model if all had the opposite decision; `measured` is False where that
    is partly a guess. `family` is that of their weight format, "" where there is none."""

    quantized: bool
    why: Why
    nodes: int
    ms: float | None
    float_ms: float | None
    margin_ms: float | None
    measured: bool
    example: str
    family: str = ""

    @property
    def runs_in(self) -> str:
        if self.family:
            return "8 bits, dynamic" if self.family.startswith("d") else f"{self.family[1:]}-bit weights"
        if self.why == "elsewhere":
            return "elsewhere"
        if self.quantized and self.why == "inaccurate":
            return "16 bits"
        return "8 bits" if self.quantized and self.why != "no kernel" else "float"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tally(rows: Sequence[Explanation], together: Callable[[Sequence[Explanation]], float | None]) -> tuple[Tally, ...]:
    """The sums of rows with equal decision and reason, the longest time first. Each unit counts once.

    `together` gives the extra time of the model in ms if all units of some rows had the opposite decision, or None.
    """
    groups: dict[tuple[bool, str, Why], list[Explanation]] = {}
    for row in rows:
        family = WeightFormat.named(row.weight_format).family if row.weight_format else ""
        groups.setdefault((row.quantized, family, row.why), []).append(row)
    tallies = []
    for (quantized, family, why), members in groups.items():
        units = tuple({row.unit: row for row in members}.values())
        ms, float_ms = total(row.ms for row in units), total(row.float_ms for row in units)
        more = together(units) if all(row.margin_ms is not None for row in units) else None
        largest, shown = max(members, key=lambda row: row.ms or 0.0).node, all(row.measured for row in units)
        tallies.append(Tally(quantized, why, len(members), ms, float_ms, more, shown, largest, family))
    return tuple(sorted(tallies, key=lambda t: (-(t.ms or 0.0), -t.nodes, t.why)))


def total(times: Iterable[float | None]) -> float | None:
    """The sum of the known times; None if none is known."""
    known = [ms for ms in times if ms is not None]
    return sum(known) if known else None
