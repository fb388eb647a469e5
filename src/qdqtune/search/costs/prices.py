"""Prices of units (nodes run as one kernel) and conversions (Q, DQ), learned from the layer reports of a few builds.

The time of a unit in a build is a sum of its prices:

    float      as_float + disturbed, if it reads or writes tensors with pairs
    quantized  as_quantized + behind_float for each float that it reads + handing for each that it writes

So every build gives an equation for every unit that its placement does not quantize in part; equal units share their
prices, and of equal equations the latest counts. They are solved by non-negative least squares. `disturbed`: pairs
split what the engine would fuse, or the engine moves a Q in front of operators that only pass values on and runs those
in a slower way. `behind_float`: engines use another memory layout for 8-bit tensors. `handing` may be below zero: an
engine may move the Q behind a Concat to each input of the Concat.

A Q that runs by itself behind a float unit is the price `quantize` of its tensor, a DQ that runs in front of a float
unit its price `dequantize`. Conversions that run although the units on both sides are quantized belong to the unit that
did not absorb them. A float unit whose weights have a weight format has a price for each format in place of as_float.

What no equation tells is guessed low, so that the search tries it: conversions take a + b * bytes, and the rest is the
same share of float time as in other units with the same operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nsmallest
from statistics import median
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import onnx

from qdqtune.graph.model import Model
from qdqtune.graph.operators import elements
from qdqtune.search.costs.attribution import BuildTimes
from qdqtune.search.costs.units import Decision, Partition, Unit, format_in, is_fed
from qdqtune.types import Placement, WeightFormat

State = Literal["float", "handing", "mixed", "quantized"]

RANKS: Sequence[State] = ("float", "handing", "mixed", "quantized")
"""The states of a unit, from the least quantized to the most."""

UNEQUAL = 1.5
"""Equal units whose times differ by more than this factor do not do equal work; smaller differences are noise of the
measurement. Chosen, not measured."""

NEGLIGIBLE = 1e-3
"""Share of the float build's time below which two layer times do not count as different. Chosen, not measured."""

UNMEASURED_SHARE = 0.25
"""The guessed share of its float time that a quantized unit takes, where no equal unit was measured. Low, so that it is
tried; chosen, not measured."""

LOW_QUANTILE = 0.25
"""A price without a measurement is this quantile of those of kinds with the same operators: a low guess is tried and
corrected by its build, one that is too high never is. Chosen, not measured."""

DRAWN = 1e-4
"""How strongly `behind_float` is drawn to zero, so that equations that do not tell it apart leave it out."""


def state(unit: Unit, partition: Partition, placement: Placement) -> State:
    """The state of a unit in a placement: "quantized" if all that it reads and writes has pairs, "handing" if not all
    that it writes, "mixed" if pairs stand inside it or not on all that it reads."""
    placed = placement.edges
    if not placed.isdisjoint(unit.inner):
        return "mixed"  # the engine cannot run it as one kernel
    entering = [e in placed for e in unit.inputs]
    weights = [e in placed for e in unit.weights]
    if not any(entering) or (weights and not any(weights)):
        return "float"
    if not all(entering) or not all(weights):
        return "mixed" if weights else "float"
    leaving = [e in placed for t in unit.outputs for e in partition.edges.get(t, ())]
    return "quantized" if all(leaving) else "handing"


def stored_in(partition: Partition, placement: Placement, states: Sequence[State]) -> frozenset[str]:
    """The tensors that stay in 8 bits: with pairs on all their edges, written by a unit in state quantized."""
    of, all_paired = partition.producer, placement.edges.issuperset
    return frozenset(
        t for t, es in partition.edges.items() if t in of and states[of[t]] == "quantized" and all_paired(es)
    )


@dataclass(frozen=True)
class Price:
    """The times of a unit in ms."""

    as_float: float
    as_quantized: float
    disturbed: float = 0.0
    """Extra ms of a float unit that reads a quantized tensor, or writes one that a quantized unit reads."""
    behind_float: float = 0.0
    """Extra ms of a quantized unit for each tensor that it reads from a float unit."""
    handing: float = 0.0
    """Extra ms of a quantized unit for each output that it writes as floats."""
    by_format: Mapping[WeightFormat, float] = field(default_factory=dict)
    """By weight format, the ms as a float unit with its weights in that format, in place of `as_float`."""


@dataclass(frozen=True)
class Costs:
    """Prices in ms for every unit (by number) and every tensor that crosses a border between units."""

    partition: Partition
    prices: tuple[Price, ...]
    quantize: Mapping[str, float]
    dequantize: Mapping[str, float]
    per_consumer: bool = False
    """Whether each consumer of a tensor has a DQ of its own."""

    @cached_property
    def float_ms(self) -> float:
        """The predicted ms of the float model."""
        return sum(price.as_float for price in self.prices)

    def total(self, decision: Decision) -> float:
        return sum(self.of_unit(u, decision) for u in self.partition.units) + sum(
            self.of_tensor(t, decision) for t in self.partition.edges
        )

    def of_unit(self, unit: Unit, decision: Decision) -> float:
        """The predicted ms of one unit, without conversions that run by themselves."""
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
        """The least ms of a unit in float, and the weight format for it; `charges` are the ms that formats add."""
        price = self.prices[unit]
        choices: list[tuple[float, WeightFormat | None]] = [(price.as_float, None)]
        choices += [(ms + charges.get(way, 0.0), way) for way, ms in price.by_format.items()]
        return min(choices, key=lambda choice: choice[0])

    def of_tensor(self, tensor: str, decision: Decision) -> float:
        """The predicted ms of the conversions of a tensor."""
        if tensor in decision.stored:
            floats = sum(u is None or u not in decision.quantized for u in self.partition.users[tensor])
            return self.dequantize[tensor] * (floats if self.per_consumer else min(floats, 1))
        return self.quantize[tensor] if self._is_read(tensor, decision) else 0.0

    def _is_read(self, tensor: str, decision: Decision) -> bool:
        return any(user in decision.quantized for user in self.partition.users[tensor])


# ---------------------------------------------------------------- what builds show


class Equation(NamedTuple):
    """What a quantized unit did in a build: how many of its outputs, and of its inputs from units, were floats."""

    handed: int
    floats: int


Fact = Equation | WeightFormat | Literal["disturbed"]
"""What a time of a kind of unit is of: of a quantized unit, of a float one with a weight format, or what a float unit
amid pairs takes more."""


def learn(partition: Partition, builds: Sequence[BuildTimes], *, raised: bool = False) -> Costs:
    """Prices from the builds so far, the float model's first. Later builds take precedence, since they are nearer to
    the solution. `raised`: with every guess raised by the time of the float model, so that a result that changes
    depends on a guess."""
    before = partition.spent(builds[0].nodes)
    observations = Observations(_with_split_kinds(partition, before, sum(builds[0].nodes.values())), before)
    for times in builds:
        observations.add(times)
    costs = observations.priced(0.0)
    return observations.priced(costs.float_ms or 1.0) if raised else costs


def _with_split_kinds(parts: Partition, before: Sequence[float], float_ms: float) -> Partition:
    """The same units, with kinds split where the float build took unequal time for units of one kind.

    The time of some operators depends on the values: a softmax over masked scores works on subnormal numbers.
    """
    units = list(parts.units)
    last: dict[str, tuple[float, int]] = {}
    for unit in sorted(parts.units, key=lambda unit: (before[unit.number], unit.number)):
        spent = before[unit.number]
        least, group = last.get(unit.kind, (spent, 0))
        group += spent > UNEQUAL * least and spent - least > NEGLIGIBLE * float_ms
        last[unit.kind] = spent, group
        units[unit.number] = replace(unit, kind=f"{unit.kind} {group}") if group else unit
    return replace(parts, units=tuple(units))


class Observations:
    """What builds show of the units of a partition, which took the times `before` in the float build, and of
    conversions. Each entry comes from the latest build that has it."""

    def __init__(self, partition: Partition, before: Sequence[float]) -> None:
        self._partition, self._before = partition, before
        floats = defaultdict[str, list[float]](list)
        for unit in partition.units:
            floats[unit.kind].append(before[unit.number])
        self._as_float = {kind: median(times) for kind, times in floats.items()}
        self._ms = {kind: dict[Fact, float]() for kind in floats}
        self._quantize: dict[str, float] = {}
        self._dequantize: dict[str, float] = {}
        self._sizes: list[tuple[float, float]] = []  # bytes and ms of all conversions that ran
        self._per_consumer = False

    def add(self, times: BuildTimes) -> None:
        """Add the times of a build."""
        parts = self._partition
        states = [state(u, parts, times.placement) for u in parts.units]
        stored = stored_in(parts, times.placement, states)
        took = parts.spent(times.nodes)
        paid = self._charged_dequantizations(times, states, took)
        shown = defaultdict[tuple[str, Fact], list[float]](list)
        for unit, how, spent in zip(parts.units, states, took, strict=True):
            leaving, more = parts.leaving(unit), spent - self._before[unit.number]
            chosen = format_in(unit, times.placement)
            if chosen is not None:
                if how == "float":  # a DQ of weights that runs by itself counts for the unit
                    converted = sum(times.dequantize.get(e.tensor, 0.0) for e in unit.weight_only)
                    shown[unit.kind, chosen].append(spent + converted)
            elif how in ("quantized", "handing"):
                own = sum(times.quantize.get(t, 0.0) for t in leaving) if how == "quantized" else 0.0
                equation = Equation(sum(t not in stored for t in leaving), sum(t not in stored for t in unit.storable))
                shown[unit.kind, equation].append(spent + own + paid.get(unit.number, 0.0))
                if how == "handing" and not unit.weights and equation.floats < len(unit.storable):
                    shown[unit.kind, "disturbed"].append(more)  # as well a float behind DQs
            elif how == "float" and not times.paired.isdisjoint((*(e.tensor for e in unit.inputs), *unit.outputs)):
                shown[unit.kind, "disturbed"].append(more)
        for (kind, fact), each in shown.items():
            self._ms[kind][fact] = max(0.0, median(each)) if fact == "disturbed" else median(each)
        self._add_conversions(times, states)

    def _add_conversions(self, times: BuildTimes, states: Sequence[State]) -> None:
        """Add the Qs and DQs that ran, and those without a layer of their own: a kernel converts while it reads or
        writes."""
        parts = self._partition
        self._per_consumer |= any(copies > 1 for copies in times.copies.values())
        for tensor, edges in parts.edges.items():
            size = bytes_of(parts.model, tensor)
            read = {states[parts.owner[e.node]] for e in edges if e.node and e in times.placement}
            made = states[parts.producer[tensor]] if tensor in parts.producer else "float"
            if tensor in times.quantize:
                self._quantize[tensor] = times.quantize[tensor]
                self._sizes.append((size, times.quantize[tensor]))
            elif made in ("float", "handing") and not read.isdisjoint(("quantized", "handing")):
                self._quantize[tensor] = 0.0
            if tensor in times.dequantize:
                self._dequantize[tensor] = times.dequantize[tensor] / times.copies[tensor]
                self._sizes.append((size, self._dequantize[tensor]))
            elif made == "quantized" and "float" in read:
                self._dequantize[tensor] = 0.0

    def _charged_dequantizations(
        self, times: BuildTimes, states: Sequence[State], took: Sequence[float]
    ) -> Mapping[int, float]:
        """By unit, the ms of the DQs that it is charged for. A DQ that ran is charged to the consumer that is the least
        quantized, judged by its state and then by its time over that in the float build: the others absorbed theirs."""
        parts, before, paid = self._partition, self._before, defaultdict[int, float](float)

        def order(user: int) -> tuple[int, float, int]:
            slowness = took[user] / before[user] if before[user] > 0 else 0.0
            return RANKS.index(states[user]), -slowness, user

        for tensor, spent in times.dequantize.items():
            edges = [e for e in parts.possible_of.get(tensor, ()) if e in times.placement]
            users = {parts.owner[e.node] for e in edges if e.node}
            copies = max(0, times.copies[tensor] - sum(e.is_graph_output for e in edges))
            for user in nsmallest(copies, users, key=order):
                paid[user] += spent / times.copies[tensor]
        return paid

    # ------------------------------------------------ from observations to prices

    def priced(self, surplus: float) -> Costs:
        """The prices that the observations tell; what they do not is guessed, plus a `surplus`."""
        parts = self._partition
        operators = [",".join(parts.model.nodes[n].op for n in unit.nodes) for unit in parts.units]
        known: dict[str, dict[str, float]] = {}
        shares = defaultdict[tuple[str, str], list[float]](list)
        for unit, name in zip(parts.units, operators, strict=True):
            if unit.kind not in known:
                known[unit.kind] = self._solved(unit)
                as_float = self._as_float[unit.kind]
                for extra, ms in known[unit.kind].items() if as_float > 0 else ():
                    shares[name, extra].append(ms / as_float)
        usual = {key: max(0.0, float(np.quantile(each, LOW_QUANTILE))) for key, each in shares.items()}
        corrections = self._format_corrections()
        prices = []
        for unit, name in zip(parts.units, operators, strict=True):
            as_float, solved = self._as_float[unit.kind], known[unit.kind]
            extras: dict[str, float] = {}
            for extra in ("disturbed", "behind_float", "handing"):
                extras[extra] = solved.get(extra, as_float * usual.get((name, extra), 0.0) + surplus)
            extras["handing"] /= max(1, len(parts.leaving(unit)))
            by_format = {}
            for weight_format in parts.weight_formats(unit):
                correction = corrections.get(weight_format.family, 1.0)
                guess = as_float * parts.share(unit, weight_format) * correction + surplus
                by_format[weight_format] = self._ms[unit.kind].get(weight_format, guess)
            quantized = solved.get("quantized", UNMEASURED_SHARE * as_float + surplus)
            prices.append(Price(as_float, quantized, **extras, by_format=by_format))
        fixed, per_byte = _fitted_line(self._sizes)
        guesses = {t: fixed + per_byte * bytes_of(parts.model, t) + surplus for t in parts.edges}
        return Costs(parts, tuple(prices), guesses | self._quantize, guesses | self._dequantize, self._per_consumer)

    def _solved(self, unit: Unit) -> dict[str, float]:
        """What the equations of a unit's kind tell: its quantized time in ms, the extras for all outputs (`handing`)
        and for each input (`behind_float`); and what it takes more when disturbed."""
        shown = self._ms[unit.kind]
        solved: dict[str, float] = {"disturbed": shown["disturbed"]} if "disturbed" in shown else {}
        equations = {fact: ms for fact, ms in shown.items() if isinstance(fact, Equation)}
        if not equations:
            return solved
        from scipy.optimize import nnls  # slow to import

        handed = [equation.handed / max(1, len(self._partition.leaving(unit))) for equation in equations]
        floats = [equation.floats for equation in equations]
        rows = [[1 - share, share, behind] for share, behind in zip(handed, floats, strict=True)]
        times = np.array([*equations.values(), 0.0])
        stored, giving, behind_float = nnls(np.array([*rows, [0.0, 0.0, DRAWN * max(1, *floats)]]), times)[0].tolist()
        if min(handed) < 1:
            solved["quantized"] = stored
        if any(floats):
            solved["behind_float"] = behind_float
        if max(handed) > 0:
            least = -np.inf if unit.weights else 0.0  # without weights it may as well run in float behind DQs
            quantized = solved.get("quantized", UNMEASURED_SHARE * self._as_float[unit.kind])
            solved["handing"] = max(least, giving - quantized)
        return solved

    def _format_corrections(self) -> Mapping[str, float]:
        """By the family of weight formats: the measured time of units with such weights, divided by the time predicted
        from their products alone."""
        measured, promised = defaultdict[str, float](float), defaultdict[str, float](float)
        for unit in {u.kind: u for u in self._partition.units if u.weight_only}.values():
            for weight_format in self._partition.weight_formats(unit):
                if weight_format in self._ms[unit.kind]:
                    share = self._partition.share(unit, weight_format)
                    measured[weight_format.family] += self._ms[unit.kind][weight_format]
                    promised[weight_format.family] += self._as_float[unit.kind] * share
        return {family: measured[family] / ms for family, ms in promised.items() if ms > 0}


def bytes_of(model: Model, tensor: str) -> float:
    """The bytes of a tensor of floats; 0 where its shape is not known."""
    info = model.tensors.get(tensor)
    if info is None or info.shape is None:
        return 0.0
    return elements(model, tensor) * float(onnx.helper.tensor_dtype_to_np_dtype(info.dtype).itemsize)


def _fitted_line(sizes: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of the line a + b * bytes that fits the ms of conversions, both at least zero; zeros without data."""
    if not sizes:
        return 0.0, 0.0
    from scipy.optimize import nnls  # slow to import

    points = np.array(sizes)
    fixed, per_byte = nnls(np.column_stack([np.ones(len(points)), points[:, 0]]), points[:, 1])[0]
    return float(fixed), float(per_byte)
