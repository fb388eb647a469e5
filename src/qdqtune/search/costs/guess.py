"""A first guess within a limit on noise, for searches that know no layer times: a cut with prices that fit no engine
exactly and none badly.

Compute operators run in 8 bits in less than half their time, all others gain nothing, and every border costs what it
takes to go over a tensor once. So the guess is made of stretches that are worth their borders.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qdqtune.graph import operators
from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import work
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.optimum import cut_within
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.units import Partition, Unit, partition, usual_groups
from qdqtune.types import Edge, Placement

ELEMENTS = 0.2
"""Elements that are copied in the time of one multiplication."""

QUANTIZED = 0.4
"""Share of its float time that a compute operator takes in 8 bits."""


def guesses(model: Model, possible: frozenset[Edge], noise: Noise | None) -> Callable[[float], Placement]:
    """The guess for a sum of noise that is allowed; the float model if nothing is known about noise."""
    if noise is None:
        return lambda _: Placement()
    parts = partition(model, possible, usual_groups(model, possible))
    costs = _presumed(parts)

    def guess(allowed: float) -> Placement:
        decision = cut_within(costs, noise, allowed)
        return parts.placement(decision.quantized, decision.stored)

    return guess


def _presumed(parts: Partition) -> Costs:
    """Prices in elements that are copied."""
    model = parts.model
    copied = [sum(work(model, n) for n in _nodes(model, u) if n.op not in operators.COMPUTE) for u in parts.units]
    computed = [
        ELEMENTS * sum(work(model, n) for n in _nodes(model, u) if n.op in operators.COMPUTE) for u in parts.units
    ]
    nothing = (0.0,) * len(parts.units)
    border = {tensor: _elements(model, tensor) for tensor in parts.edges}
    return Costs(
        partition=parts,
        as_float=tuple(a + b for a, b in zip(copied, computed, strict=True)),
        as_quantized=tuple(a + QUANTIZED * b for a, b in zip(copied, computed, strict=True)),
        disturbed=nothing,
        behind_float=nothing,
        handing=nothing,
        quantize=border,
        dequantize=border,
        per_consumer=False,
        seen=frozenset(),
    )


def _nodes(model: Model, unit: Unit) -> list[Node]:
    return [model.nodes[n] for n in unit.nodes]


def _elements(model: Model, tensor: str) -> float:
    """Size of a tensor; an unknown dimension counts as 1."""
    info = model.tensors.get(tensor)
    return float(np.prod([d or 1 for d in (info.shape if info else None) or ()]))
