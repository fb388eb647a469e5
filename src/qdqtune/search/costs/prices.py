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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nsmallest
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
import onnx

from qdqtune.graph.model import Model
from qdqtune.graph.operators import elements
from qdqtune.search.costs.attribution import BuildTimes
from qdqtune.search.costs.units import Decision, Partition, Unit
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
    seen: bool = False
    """Whether its quantized price was measured."""
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
    cautious: Costs | None = None

    @property
    def raised(self) -> Costs:
        """The same prices, with every guess raised by the time of the float model: a result that changes with them
        depends on a guess."""
        return self.cautious or self

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
        price, entering = self.prices[unit.number], self.partition.storable(unit)
        if unit.number not in decision.quantized:
            amid_pairs = any(t in decision.stored for t in entering) or any(
                self._is_read(t, decision) for t in unit.outputs
            )
            chosen = None if self.partition.is_fed(unit, decision) else decision.format_of.get(unit.number)
            plain = price.as_float if chosen is None else price.by_format.get(chosen, price.as_float)
            return plain + (price.disturbed if amid_pairs else 0.0)
        leaving = sum(t not in decision.stored for t in unit.outputs if t in self.partition.edges)
        extra = price.behind_float * sum(t not in decision.stored for t in entering)
        return price.as_quantized + extra + price.handing * leaving

    def cheapest_float(
        self, unit: int, charge: Callable[[WeightFormat], float] = lambda _: 0.0
    ) -> tuple[float, WeightFormat | None]:
        """The least ms of a unit in float, and the weight format for it; `charge` gives the ms a weight format adds."""
        price = self.prices[unit]
        choices: list[tuple[float, WeightFormat | None]] = [(price.as_float, None)]
        choices += [(ms + charge(weight_format), weight_format) for weight_format, ms in price.by_format.items()]
        return min(choices, key=lambda choice: choice[0])

    def of_tensor(self, tensor: str, decision: Decision) -> float:
        """The predicted ms of the conversions of a tensor."""
        if tensor in decision.stored:
            floats = sum(u is None or u not in decision.quantized for u in self.partition.users[tensor])
            return self.dequantize[tensor] * (floats if self.per_consumer else min(floats, 1))
        return self.quantize[tensor] if self._is_read(tensor, decision) else 0.0

    def _is_read(self, tensor: str, decision: Decision) -> bool:
        partition = self.partition
        return tensor in partition.edges and any(u in decision.quantized for u in partition.users[tensor])


# ---------------------------------------------------------------- what builds show


class Equation(NamedTuple):
    """What a quantized unit did in a build: how many of its outputs, and of its inputs from units, were floats."""

    handed: int
    floats: int


@dataclass
class Observations:
    """Measured ms by kind of unit, and of conversions by tensor. Each entry comes from the latest build that has it."""

    as_float: dict[str, float] = field(default_factory=dict)
    equations: dict[str, dict[Equation, float]] = field(default_factory=dict)
    disturbed: dict[str, float] = field(default_factory=dict)
    by_format: dict[tuple[str, str], float] = field(default_factory=dict)
    quantize: dict[str, float] = field(default_factory=dict)
    dequantize: dict[str, float] = field(default_factory=dict)
    sizes: list[tuple[float, float]] = field(default_factory=list)
    """Bytes and ms of all conversions that ran."""
    per_consumer: bool = False
    """Whether a build ran several DQs of one tensor, one for each consumer."""


def learn(partition: Partition, builds: Sequence[BuildTimes]) -> Costs:
    """Prices from the builds so far, the float model's first. Later builds take precedence, since they are nearer to
    the solution."""
    before = partition.spent(builds[0].nodes)
    partition, observed = _split_kinds(partition, before, sum(builds[0].nodes.values())), Observations()
    by_kind: dict[str, list[float]] = {}
    for unit in partition.units:
        by_kind.setdefault(unit.kind, []).append(before[unit.number])
    observed.as_float = {kind: median(times) for kind, times in by_kind.items()}
    for times in builds:
        _add_build(observed, partition, times, before)
    costs = _priced(partition, observed, 0.0)
    return replace(costs, cautious=_priced(partition, observed, costs.float_ms or 1.0))


def _split_kinds(parts: Partition, before: Sequence[float], float_ms: float) -> Partition:
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


def _add_build(observed: Observations, partition: Partition, times: BuildTimes, before: Sequence[float]) -> None:
    """Add the times of a build; `before` are the times of the units in the float build."""
    states = [state(u, partition, times.placement) for u in partition.units]
    stored = stored_in(partition, times.placement, states)
    took = partition.spent(times.nodes)
    paid = _charged_dequantizations(partition, times, states, took, before)
    equations: dict[tuple[str, Equation], list[float]] = {}
    disturbed: dict[str, list[float]] = {}
    by_format: dict[tuple[str, str], list[float]] = {}
    for unit, how, spent in zip(partition.units, states, took, strict=True):
        entering, leaving = partition.storable(unit), [t for t in unit.outputs if t in partition.edges]
        chosen = partition.format_in(unit, times.placement)
        if chosen is not None:
            if how == "float":  # a DQ of weights that runs by itself counts for the unit
                converted = sum(times.dequantize.get(e.tensor, 0.0) for e in partition.weight_only_edges(unit))
                by_format.setdefault((unit.kind, chosen.name), []).append(spent + converted)
        elif how in ("quantized", "handing"):
            own = sum(times.quantize.get(t, 0.0) for t in leaving) if how == "quantized" else 0.0
            equation = Equation(sum(t not in stored for t in leaving), sum(t not in stored for t in entering))
            equations.setdefault((unit.kind, equation), []).append(spent + own + paid.get(unit.number, 0.0))
            if how == "handing" and not unit.weights and equation.floats < len(entering):
                disturbed.setdefault(unit.kind, []).append(spent - before[unit.number])  # as well a float behind DQs
        elif how == "float" and not times.paired.isdisjoint((*(e.tensor for e in unit.inputs), *unit.outputs)):
            disturbed.setdefault(unit.kind, []).append(spent - before[unit.number])
    for (kind, equation), each in equations.items():
        observed.equations.setdefault(kind, {})[equation] = median(each)
    observed.disturbed |= {kind: max(0.0, median(each)) for kind, each in disturbed.items()}
    observed.by_format |= {key: median(each) for key, each in by_format.items()}
    _add_conversions(observed, partition, times, states)


def _add_conversions(observed: Observations, partition: Partition, times: BuildTimes, states: Sequence[State]) -> None:
    """Add the Qs and DQs that ran, and those without a layer of their own: a kernel converts while it reads or
    writes."""
    observed.per_consumer |= any(copies > 1 for copies in times.copies.values())
    for tensor, edges in partition.edges.items():
        size = bytes_of(partition.model, tensor)
        read = {states[partition.owner[e.node]] for e in edges if e.node and e in times.placement}
        made = states[partition.producer[tensor]] if tensor in partition.producer else "float"
        if tensor in times.quantize:
            observed.quantize[tensor] = times.quantize[tensor]
            observed.sizes.append((size, times.quantize[tensor]))
        elif made in ("float", "handing") and not read.isdisjoint(("quantized", "handing")):
            observed.quantize[tensor] = 0.0
        if tensor in times.dequantize:
            observed.dequantize[tensor] = times.dequantize[tensor] / times.copies[tensor]
            observed.sizes.append((size, observed.dequantize[tensor]))
        elif made == "quantized" and "float" in read:
            observed.dequantize[tensor] = 0.0


def _charged_dequantizations(
    partition: Partition,
    times: BuildTimes,
    states: Sequence[State],
    took: Sequence[float],
    before: Sequence[float],
) -> Mapping[int, float]:
    """By unit, the ms of the DQs that it is charged for. A DQ that ran is charged to the consumer that is the least
    quantized, judged by its state and then by its time over that in the float build: the others absorbed theirs."""
    paid: dict[int, float] = {}
    for tensor, spent in times.dequantize.items():
        edges = [e for e in partition.possible_of.get(tensor, ()) if e in times.placement]
        users = {partition.owner[e.node] for e in edges if e.node}
        copies = max(0, times.copies[tensor] - sum(e.is_graph_output for e in edges))

        def order(user: int) -> tuple[int, float, int]:
            slowness = took[user] / before[user] if before[user] > 0 else 0.0
            return RANKS.index(states[user]), -slowness, user

        for user in nsmallest(copies, users, key=order):
            paid[user] = paid.get(user, 0.0) + spent / times.copies[tensor]
    return paid


def bytes_of(model: Model, tensor: str) -> float:
    """The bytes of a tensor of floats; 0 where its shape is not known."""
    info = model.tensors.get(tensor)
    if info is None or info.shape is None:
        return 0.0
    return elements(model, tensor) * float(onnx.helper.tensor_dtype_to_np_dtype(info.dtype).itemsize)


# ---------------------------------------------------------------- from observations to prices


class Solution(NamedTuple):
    """The quantized time of a kind in ms, and its extras for all outputs and for each input; None if not known."""

    quantized: float | None
    behind_float: float | None
    handing: float | None


def _solved(unit: Unit, equations: Mapping[Equation, float], leaving: int, guess: float) -> Solution:
    """The solution of the equations of a unit's kind with `leaving` outputs; `guess` is its quantized time if none of
    them tells it."""
    if not equations:
        return Solution(None, None, None)
    from scipy.optimize import nnls  # slow to import

    handed = [equation.handed / max(1, leaving) for equation in equations]
    floats = [equation.floats for equation in equations]
    rows = [[1 - share, share, behind] for share, behind in zip(handed, floats, strict=True)]
    times = np.array([*equations.values(), 0.0])
    stored, giving, behind_float = nnls(np.array([*rows, [0.0, 0.0, DRAWN * max(1, *floats)]]), times)[0].tolist()
    known = stored if min(handed) < 1 else None
    least = -np.inf if unit.weights else 0.0  # without weights it may as well run in float behind DQs
    return Solution(
        known,
        behind_float if any(floats) else None,
        max(least, giving - (guess if known is None else known)) if max(handed) > 0 else None,
    )


def _priced(partition: Partition, observed: Observations, surplus: float) -> Costs:
    """The prices that the observations tell; what they do not is guessed, plus a `surplus`."""
    operators = [",".join(partition.model.nodes[n].op for n in unit.nodes) for unit in partition.units]
    solutions: dict[str, Solution] = {}
    shares: dict[tuple[str, str], list[float]] = {}
    for unit, name in zip(partition.units, operators, strict=True):
        if unit.kind in solutions:
            continue
        as_float, leaving = observed.as_float[unit.kind], sum(t in partition.edges for t in unit.outputs)
        solution = _solved(unit, observed.equations.get(unit.kind, {}), leaving, UNMEASURED_SHARE * as_float)
        solutions[unit.kind] = solution
        extras = {
            "behind_float": solution.behind_float,
            "handing": solution.handing,
            "disturbed": observed.disturbed.get(unit.kind),
        }
        for extra, ms in extras.items():
            if ms is not None and as_float > 0:
                shares.setdefault((name, extra), []).append(ms / as_float)

    def usual(name: str, extra: str, as_float: float) -> float:
        known = shares.get((name, extra))
        share = 0.0 if known is None else max(0.0, float(np.quantile(known, LOW_QUANTILE)))
        return as_float * share + surplus

    corrections = _format_corrections(partition, observed)
    prices = []
    for unit, name in zip(partition.units, operators, strict=True):
        as_float, leaving = observed.as_float[unit.kind], sum(t in partition.edges for t in unit.outputs)
        quantized, behind_float, handing = solutions[unit.kind]
        disturbed = observed.disturbed.get(unit.kind)
        by_format = {}
        for weight_format in partition.weight_formats(unit):
            correction = corrections.get(weight_format.family, 1.0)
            guess = as_float * partition.share(unit, weight_format) * correction + surplus
            by_format[weight_format] = observed.by_format.get((unit.kind, weight_format.name), guess)
        prices.append(
            Price(
                as_float,
                as_quantized=UNMEASURED_SHARE * as_float + surplus if quantized is None else quantized,
                disturbed=usual(name, "disturbed", as_float) if disturbed is None else disturbed,
                behind_float=usual(name, "behind_float", as_float) if behind_float is None else behind_float,
                handing=(usual(name, "handing", as_float) if handing is None else handing) / max(1, leaving),
                seen=quantized is not None,
                by_format=by_format,
            )
        )
    fixed, per_byte = _fitted_line(observed.sizes)
    guesses = {t: fixed + per_byte * bytes_of(partition.model, t) + surplus for t in partition.edges}
    quantize = {t: observed.quantize.get(t, guess) for t, guess in guesses.items()}
    dequantize = {t: observed.dequantize.get(t, guess) for t, guess in guesses.items()}
    return Costs(partition, tuple(prices), quantize, dequantize, observed.per_consumer)


def _fitted_line(sizes: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of the line a + b * bytes that fits the ms of conversions, both at least zero; zeros without data."""
    if not sizes:
        return 0.0, 0.0
    from scipy.optimize import nnls  # slow to import

    points = np.array(sizes)
    fixed, per_byte = nnls(np.column_stack([np.ones(len(points)), points[:, 0]]), points[:, 1])[0]
    return float(fixed), float(per_byte)


def _format_corrections(partition: Partition, observed: Observations) -> Mapping[str, float]:
    """By the family of weight formats: the measured time of units with such weights, divided by the time predicted from
    their products alone."""
    sums: dict[str, list[float]] = {}
    for unit in {u.kind: u for u in partition.units if partition.weight_only_edges(u)}.values():
        for weight_format in partition.weight_formats(unit):
            measured = observed.by_format.get((unit.kind, weight_format.name))
            if measured is not None:
                own = sums.setdefault(weight_format.family, [0.0, 0.0])
                own[0] += measured
                own[1] += observed.as_float[unit.kind] * partition.share(unit, weight_format)
    return {family: real / promised for family, (real, promised) in sums.items() if promised > 0}
