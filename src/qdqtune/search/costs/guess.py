"""A first guess within a limit on noise, for searches that know no layer times: a cut with prices that fit no engine
exactly and none badly.

Compute operators run in 8 bits in less than half their time, all others gain nothing, and every border costs what it
takes to go over a tensor once. So the guess is made of stretches that are worth their borders.
"""

from __future__ import annotations

from collections.abc import Callable

from qdqtune.graph import operators
from qdqtune.graph.model import Model
from qdqtune.graph.operators import elements, work
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.optimum import cut_within
from qdqtune.search.costs.prices import Costs, Price
from qdqtune.search.costs.units import Unit, partition, usual_groups
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
    # Prices in elements that are copied.
    border = {tensor: elements(model, tensor) for tensor in parts.edges}
    costs = Costs(parts, tuple(_price(model, unit) for unit in parts.units), quantize=border, dequantize=border)

    def guess(allowed: float) -> Placement:
        return parts.placement(cut_within(costs, noise, allowed))

    return guess


def _price(model: Model, unit: Unit) -> Price:
    nodes = [model.nodes[n] for n in unit.nodes]
    copied = sum(work(model, n) for n in nodes if n.op not in operators.COMPUTE)
    computed = ELEMENTS * sum(work(model, n) for n in nodes if n.op in operators.COMPUTE)
    return Price(copied + computed, copied + QUANTIZED * computed)
