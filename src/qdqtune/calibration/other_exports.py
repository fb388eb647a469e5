"""Signs that a calibration cache is of another export of the same network, in which numbers name other tensors.

An exporter numbers the tensors that have no name (`123`, `onnx::Conv_45`). Another version of it, or of the network's
code, counts otherwise: the entries then fall on other tensors, with plausible scales.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from qdqtune.calibration.scales import Range
from qdqtune.graph.model import Model
from qdqtune.graph.operators import CLAMPS, CONVOLUTIONS, MOVERS, is_float

NUMBERED = re.compile(r"([A-Za-z_.:]*)(\d{1,9})")
"""A name that an exporter has made of a number, with an operator or none in front."""

TRIED_ENTRIES = 200
"""Entries whose differences to the model's numbers are tried as shifts: a few thousand tensors make a million
differences."""

TRIED_SHIFTS = 20
"""The most frequent of these differences are counted over all entries."""

LEAST_TENSORS = 3
"""Fewest tensors that say anything of a cache."""

CLEAR_GAIN, SMALL_SHARE = 0.05, 0.1
"""Share of names that a shift has to make fit beyond those that fit, and share of names or relations that is no
accident. Chosen, not measured."""

TOLERANCE = 2.0
"""By what factor the range of a result may exceed that of its input where it holds no other values: entropy calibration
clips each tensor for itself."""

LEAST_CORRELATION, LEAST_SPREAD = 0.5, 0.3
"""Correlation of the logarithms of given and seen ranges below which they contradict each other, where the seen ones
and the given ones differ by so much of a standard deviation. Chosen, not measured."""

BOUNDED = frozenset({"HardSigmoid", "Sigmoid", "Softmax", "Tanh", "Erf"})
"""Operators whose results lie between -1 and 1."""


@dataclass(frozen=True)
class Shift:
    """The number to add to those in the names of a cache so that more fit; `is_clear` if that is no accident."""

    by: int
    is_clear: bool

    def __str__(self) -> str:
        return f"names fit if each number is {'raised' if self.by > 0 else 'lowered'} by {abs(self.by)}"


def shift_of(names: Collection[str], tensors: Collection[str]) -> Shift | None:
    """The number to add to those in `names` of a cache so that most of them are `tensors`; None if most are without.
    For a cache and the file that it was made for, simplified or not, no other number fits better than 0.
    """
    entries, own = _numbers(names), _numbers(tensors)
    by_kind: dict[str, list[int]] = {}
    for kind, number in own:
        by_kind.setdefault(kind, []).append(number)
    some = sorted(entries)[:: 1 + len(entries) // TRIED_ENTRIES]
    tried = Counter(m - n for kind, n in some for m in by_kind.get(kind, ()))
    near = sorted((by for by, _ in tried.most_common(TRIED_SHIFTS)), key=abs)
    fits = {by: sum((kind, n + by) in own for kind, n in entries) for by in (0, *near)}
    best = max(fits, key=fits.__getitem__)
    gain = fits[best] - fits[0]
    if gain <= 0 or fits[best] < max(LEAST_TENSORS, min(len(entries), len(own)) / 2):
        return None
    return Shift(best, gain >= max(LEAST_TENSORS, CLEAR_GAIN * len(entries)))


def doubts(
    names: Collection[str], ranges: Mapping[str, Range], model: Model, tensors: Collection[str], shift: Shift | None
) -> list[str]:
    """Signs of another export in the `names` of a cache, and in the `ranges` that it gives `tensors` of a model."""
    told = [] if shift is None else [str(shift)]
    fixed = {t for n in model.nodes if n.op in CONVOLUTIONS for t in n.inputs[1:] if t in model.constants}
    fixed.update(name for name in model.constants if not is_float(model, name))
    strange = sorted(name for name in fixed.intersection(names) if NUMBERED.fullmatch(name))
    if len(strange) >= LEAST_TENSORS:
        told.append(f"{len(strange)} entries name filters or integers, as {strange[0]!r}")
    entries, own = _numbers(names), _numbers(tensors)
    kinds = {kind for kind, _ in entries} & {kind for kind, _ in own}
    missing = min(sum(kind in kinds for kind, _ in one) for one in (entries - own, own - entries))
    if missing >= max(LEAST_TENSORS, SMALL_SHARE * len(own)):
        told.append(f"{missing} numbered tensors or more are in the cache only, and as many in the model only")
    limits = list(_limits(model, ranges))
    wider = [t for t, limit in limits if ranges[t].magnitude > TOLERANCE * limit]
    if len(wider) >= max(LEAST_TENSORS, SMALL_SHARE * len(limits)):
        told.append(f"{len(wider)} of {len(limits)} ranges are wider than their operator can give, as {wider[0]!r}")
    return told


def contradiction(given: Mapping[str, Range], seen: Mapping[str, Range]) -> str:
    """A note if the ranges of a cache are hardly related to those that samples show; else empty."""
    both = [t for t, r in given.items() if t in seen and r.magnitude > 0 and seen[t].magnitude > 0]
    logs = np.log([[given[t].magnitude, seen[t].magnitude] for t in both]).reshape(-1, 2)
    if len(both) < 3 * LEAST_TENSORS or min(logs.std(axis=0)) < LEAST_SPREAD:
        return ""
    related = float(np.corrcoef(logs.T)[0, 1])
    return "" if related >= LEAST_CORRELATION else f"its ranges are hardly related to those on samples ({related:.2f})"


def _numbers(names: Collection[str]) -> set[tuple[str, int]]:
    return {(m[1], int(m[2])) for n in names if (m := NUMBERED.fullmatch(n))}


def _limits(model: Model, ranges: Mapping[str, Range]) -> Iterator[tuple[str, float]]:
    """Tensors with a range, and the largest absolute value that their operator can give."""
    for node in model.nodes:
        if node.domain or not node.outputs or node.outputs[0] not in ranges:
            continue
        if node.op in BOUNDED:
            yield node.outputs[0], 1.0
        elif node.op in (MOVERS | CLAMPS) - {"Resize"} and node.inputs[0] in ranges:
            yield node.outputs[0], ranges[node.inputs[0]].magnitude
