"""Learns what units (nodes run as one kernel) and conversions (Q, DQ) cost in ms, from the layer reports of a few
builds.

The time of a unit in a build is a sum of its prices:

    float      as_float + disturbed, if it reads or writes tensors with pairs
    quantized  as_quantized + behind_float for each float that it reads + handing for each that it writes

So every build gives an equation for every unit that it quantizes wholly or not at all; equal units share their prices,
and of equal equations that of the fastest build counts. They are solved by non-negative least squares. `disturbed`:
pairs break a fusion, or the engine moves a Q in front of operators that only move data and then runs these more slowly.
`behind_float`: engines use another memory layout for 8-bit tensors. `handing` may be below zero: an engine may move the
Q behind a Concat to each input of the Concat.

A Q that runs by itself behind a float unit is the price `quantize` of its tensor, a DQ that runs in front of a float
unit its price `dequantize`. A conversion that runs although both sides are quantized is charged to the unit that should
have absorbed it. A float unit whose weights have a weight format has a price for each format in place of as_float.

What no equation determines is guessed low, so that the search tries it: little time in 8 bits, no extra time beside
floats, and for a conversion the mean time per element of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from qdqtune.graph.model import Model
from qdqtune.graph.operators import elements
from qdqtune.search.costs.attribution import BuildTimes
from qdqtune.search.costs.units import Decision, Partition, State, Unit, format_in, is_fed, state, stored_in
from qdqtune.types import Placement, WeightFormat

UNMEASURED_SHARE = 0.25
"""Guessed time of a quantized unit relative to float, if no equal unit was measured. Low, so that it is tried; chosen,
not measured."""

DRAWN = 1e-4
"""Weight of an equation `behind_float` = 0, which leaves it at zero where the builds do not determine it."""


@dataclass(frozen=True)
class Price:
    as_float: float
    as_quantized: float
    disturbed: float = 0.0
    """Extra ms of a float unit that reads a quantized tensor, or writes one for a quantized unit."""
    behind_float: float = 0.0
    """Extra ms of a quantized unit for each tensor that it reads from a float unit."""
    handing: float = 0.0
    """Extra ms of a quantized unit for each output that it writes as floats."""
    by_format: Mapping[WeightFormat, float] = field(default_factory=dict)
    """For each weight format, the ms of the unit in float with its weights in that format, in place of `as_float`."""


@dataclass(frozen=True)
class Costs:
    """Costs in ms of every unit (by number), and of Q and DQ on every tensor between units."""

    partition: Partition
    prices: tuple[Price, ...]
    quantize: Mapping[str, float]
    dequantize: Mapping[str, float]

    @cached_property
    def float_ms(self) -> float:
        return sum(price.as_float for price in self.prices)

    def ms(self, placement: Placement) -> float:
        return self.total(self.partition.decision(placement))

    def total(self, decision: Decision) -> float:
        of_units = sum(self.of_unit(u, decision) for u in self.partition.units)
        return of_units + sum(self.of_tensor(t, decision) for t in self.partition.edges)

    def of_unit(self, unit: Unit, decision: Decision) -> float:
        """The predicted ms of one unit, without separate Q and DQ kernels."""
        price = self.prices[unit.number]
        if unit.number in decision.quantized:
            floats = sum(t not in decision.stored for t in unit.storable)
            handed = sum(t not in decision.stored for t in self.partition.leaving(unit))
            return price.as_quantized + price.behind_float * floats + price.handing * handed
        amid_pairs = is_fed(unit, decision) or any(self._is_read(t, decision) for t in self.partition.leaving(unit))
        chosen = None if is_fed(unit, decision) else decision.format_of.get(unit.number)
        plain = price.as_float if chosen is None else price.by_format.get(chosen, price.as_float)
        return plain + (price.disturbed if amid_pairs else 0.0)

    def cheapest_float(
        self, unit: int, charges: Mapping[WeightFormat, float] = MappingProxyType({})
    ) -> tuple[float, WeightFormat | None]:
        """The least ms of a unit in float, and the weight format for it; `charges` are ms to add for each format."""
        price = self.prices[unit]
        choices: list[tuple[float, WeightFormat | None]] = [(price.as_float, None)]
        choices += [(ms + charges.get(way, 0.0), way) for way, ms in price.by_format.items()]
        return min(choices, key=lambda choice: choice[0])

    def of_tensor(self, tensor: str, decision: Decision) -> float:
        """The predicted ms of separate Q and DQ kernels on a tensor."""
        if tensor in decision.stored:
            is_converted = any(u is None or u not in decision.quantized for u in self.partition.users[tensor])
            return self.dequantize[tensor] if is_converted else 0.0
        return self.quantize[tensor] if self._is_read(tensor, decision) else 0.0

    def _is_read(self, tensor: str, decision: Decision) -> bool:
        return any(user in decision.quantized for user in self.partition.users[tensor])


# ---------------------------------------------------------------- from builds to prices


class Equation(NamedTuple):
    """The state of a quantized unit in a build: the share of its outputs that it wrote as floats, and how many inputs
    it read as floats from other units."""

    handed: float
    floats: int


Fact = Equation | WeightFormat | Literal["disturbed"]
"""What a measured time is about: a quantized unit, a float unit with a weight format, or the extra time of a float unit
next to pairs."""


def learn(parts: Partition, builds: Sequence[BuildTimes], *, raised: bool = False) -> Costs:
    """Learn costs from builds: the float model's first, then others; of equal equations that of the last build counts.
    `raised`: every guess is raised by the float model's time, so that a changed result shows dependence on a guess."""
    before = parts.spent(builds[0].nodes)
    floats = defaultdict[str, list[float]](list)
    for unit in parts.units:
        floats[unit.kind].append(before[unit.number])
    as_float = {kind: median(times) for kind, times in floats.items()}
    shown = {kind: dict[Fact, float]() for kind in floats}
    quantize, dequantize = dict[str, float](), dict[str, float]()
    for times in builds:
        states = [state(u, parts, times.placement) for u in parts.units]
        for (kind, fact), each in _unit_times(parts, times, states, before).items():
            shown[kind][fact] = median(each)
        _add_conversions(parts, times, states, quantize, dequantize)
    surplus = (sum(as_float[unit.kind] for unit in parts.units) or 1.0) if raised else 0.0
    by_kind = {kind: _price(as_float[kind], facts, surplus) for kind, facts in shown.items()}
    prices = []
    for unit in parts.units:
        price, facts = by_kind[unit.kind], shown[unit.kind]
        formats = {s: facts.get(s, price.as_float * parts.share(unit, s) + surplus) for s in parts.weight_formats(unit)}
        prices.append(replace(price, handing=price.handing / max(1, len(parts.leaving(unit))), by_format=formats))
    each_ms = per_element(parts.model, *quantize.items(), *dequantize.items())
    guesses = {t: each_ms * elements(parts.model, t) + surplus for t in parts.edges}
    return Costs(parts, tuple(prices), guesses | quantize, guesses | dequantize)


def _unit_times(
    parts: Partition, times: BuildTimes, states: Sequence[State], before: Sequence[float]
) -> Mapping[tuple[str, Fact], list[float]]:
    """For each kind of unit and fact, the measured ms in a build. A separate conversion that no float unit needs is
    charged to the units that could have absorbed it: a Q to the writer of the tensor, a DQ to its readers."""
    stored, took = stored_in(parts, times.placement, states), parts.spent(times.nodes)
    paid = defaultdict[int, float](float)
    for tensor, spent in times.dequantize.items():
        readers = {parts.owner[e.node] for e in parts.model.edges(tensor) if e.node and e in times.placement}
        if all(states[reader] != "float" for reader in readers):
            paid.update({reader: paid[reader] + spent / len(readers) for reader in readers})
    shown = defaultdict[tuple[str, Fact], list[float]](list)
    for unit, how, spent in zip(parts.units, states, took, strict=True):
        leaving, chosen = parts.leaving(unit), format_in(unit, times.placement)
        if chosen is not None:
            if how == "float":  # a DQ of weights that runs by itself counts for the unit
                converted = sum(times.dequantize.get(e.tensor, 0.0) for e in unit.weight_only)
                shown[unit.kind, chosen].append(spent + converted)
        elif how in ("quantized", "handing"):
            handed = sum(t not in stored for t in leaving) / max(1, len(leaving))
            equation = Equation(handed, sum(t not in stored for t in unit.storable))
            own = sum(times.quantize.get(t, 0.0) for t in leaving) if how == "quantized" else 0.0
            shown[unit.kind, equation].append(spent + own + paid[unit.number])
        elif how == "float" and not times.paired.isdisjoint((*(e.tensor for e in unit.inputs), *unit.outputs)):
            shown[unit.kind, "disturbed"].append(spent - before[unit.number])
    return shown


def _add_conversions(
    parts: Partition,
    times: BuildTimes,
    states: Sequence[State],
    quantize: dict[str, float],
    dequantize: dict[str, float],
) -> None:
    """Add the measured ms of the Qs and DQs in a build, 0 for those without a layer of their own (a kernel converts
    while it reads or writes)."""
    for tensor, edges in parts.edges.items():
        read = {states[parts.owner[e.node]] for e in edges if e.node and e in times.placement}
        made = states[parts.producer[tensor]] if tensor in parts.producer else "float"
        if tensor in times.quantize:
            quantize[tensor] = times.quantize[tensor]
        elif made in ("float", "handing") and not read.isdisjoint(("quantized", "handing")):
            quantize[tensor] = 0.0
        if tensor in times.dequantize:
            dequantize[tensor] = times.dequantize[tensor]
        elif made == "quantized" and "float" in read:
            dequantize[tensor] = 0.0


def _price(as_float: float, facts: Mapping[Fact, float], surplus: float) -> Price:
    """The costs of a kind of unit, without weight formats; `handing` is for all its outputs together. Guesses are
    raised by `surplus` ms."""
    price = Price(as_float, UNMEASURED_SHARE * as_float + surplus, surplus, surplus, surplus)
    if "disturbed" in facts:
        price = replace(price, disturbed=max(0.0, facts["disturbed"]))
    equations = {fact: ms for fact, ms in facts.items() if isinstance(fact, Equation)}
    if not equations:
        return price
    from scipy.optimize import nnls  # slow to import

    rows = [[1 - equation.handed, equation.handed, equation.floats] for equation in equations]
    most_floats = max(equation.floats for equation in equations)
    rows.append([0.0, 0.0, DRAWN * max(1, most_floats)])
    stored, giving, behind_float = nnls(np.array(rows), np.array([*equations.values(), 0.0]))[0].tolist()
    if any(equation.handed < 1 for equation in equations):
        price = replace(price, as_quantized=stored)
    if most_floats:
        price = replace(price, behind_float=behind_float)
    if any(equation.handed for equation in equations):
        price = replace(price, handing=giving - price.as_quantized)
    return price


def per_element(model: Model, *conversions: tuple[str, float]) -> float:
    """Mean ms per element of the conversions that took time, given as (tensor, ms); 0 if there are none."""
    ran = [(elements(model, tensor), ms) for tensor, ms in conversions if ms > 0]
    return sum(ms for _, ms in ran) / max(1.0, sum(count for count, _ in ran))
