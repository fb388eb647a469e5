"""Prices of units (nodes run as one kernel) and conversions (Q, DQ), learned from the layer reports of a few builds.

Every build prices every unit at once, in the state that its placement puts the unit in:

    float      no pair on its inputs                                as_float; + disturbed with pairs on its outputs
    fed        pairs on some or all inputs, none on its weights     as_float + disturbed
    quantized  pairs on all inputs, and on all uses of its outputs  as_quantized
    handing    pairs on all inputs, not on all uses of its outputs  as_quantized + handing for each such output
    mixed      anything else: not used for a price

A float unit whose weights have a weight format has a price for each format (`by_format`) in place of as_float; it does
not depend on its neighbours. `disturbed` is what pairs cost a float unit: they split what the engine would fuse, or the
engine moves a Q in front of operators that only pass values on and runs those in a slower way. A quantized unit may
cost `behind_float` more behind float units than behind quantized ones, since engines use another memory layout for
8-bit tensors. A Q that runs by itself behind a float unit is the price `quantize` of its tensor, a DQ that runs in
front of a float unit its price `dequantize`.
Conversions that run although the units on both sides are quantized belong to the unit that did not absorb them.

Prices that no build has measured are guessed low, so that the search tries them: equal units share prices, conversions
take a + b * bytes, and the `EXTRAS` are the same share of float time as in other units with the same operators.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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
from qdqtune.types import Edge, Placement, WeightFormat

State = Literal["float", "fed", "handing", "mixed", "quantized"]
Behind = Literal["quantized", "both", "float"]
Conversion = Literal["quantize", "dequantize"]

RANKS: Sequence[State] = ("float", "fed", "handing", "mixed", "quantized")
"""The states of a unit, from the least quantized to the most."""

UNEQUAL = 1.5
"""Equal units whose times differ by more than this factor do not do equal work; smaller differences are noise of the
measurement. Chosen, not measured."""

NEGLIGIBLE = 1e-3
"""Share of the float build's time below which two layer times do not count as different. Chosen, not measured."""


def state(unit: Unit, partition: Partition, placement: Placement) -> State:
    """The state of a unit in a placement, as `prices` describes them."""
    placed = placement.edges
    if not placed.isdisjoint(unit.inner):
        return "mixed"  # the engine cannot run it as one kernel
    entering = [e in placed for e in unit.inputs]
    weights = [e in placed for e in unit.weights]
    if not any(entering):
        return "float"
    if weights and not any(weights):
        return "fed"
    if not all(entering) or not all(weights):
        return "mixed" if weights else "fed"
    leaving = [e in placed for t in unit.outputs for e in partition.edges.get(t, ())]
    return "quantized" if all(leaving) else "handing"


def behind(unit: Unit, partition: Partition, stored: Container[str]) -> Behind:
    """What a unit reads: tensors stored in 8 bits, floats, or both; "quantized" also if it reads graph inputs alone."""
    found = {t in stored for t in partition.storable(unit)}
    return "both" if len(found) > 1 else "float" if found == {False} else "quantized"


def stored_in(partition: Partition, placement: Placement, states: Sequence[State]) -> frozenset[str]:
    """The tensors that stay in 8 bits: with pairs on all their edges, written by a unit in state quantized."""
    of, all_paired = partition.producer, placement.edges.issuperset
    return frozenset(
        t for t, es in partition.edges.items() if t in of and states[of[t]] == "quantized" and all_paired(es)
    )


UnitKey = tuple[str, str, Behind]
"""Kind of unit; its state, or the name of the weight format of its weights; and what it reads."""


@dataclass
class Observations:
    """Measured times of units by kind, and of conversions by tensor. Each entry comes from the latest build that has
    it."""

    units: dict[UnitKey, list[float]] = field(default_factory=dict)
    disturbed: dict[str, float] = field(default_factory=dict)
    """By kind, the extra ms of a float unit that reads or writes tensors with pairs."""
    quantize: dict[str, float] = field(default_factory=dict)
    dequantize: dict[str, float] = field(default_factory=dict)
    sizes: list[tuple[float, float]] = field(default_factory=list)
    """Bytes and ms of all conversions that ran."""
    medians: dict[UnitKey, list[float]] = field(default_factory=dict)
    """By key, the median of each build that has it: their spread is the doubt about a price."""
    per_consumer: bool = False
    """Whether a build ran several DQs of one tensor, one for each consumer."""


def observe(partition: Partition, builds: Sequence[BuildTimes]) -> tuple[Partition, Observations]:
    """The observations of some builds, the float model's first; and the partition, with kinds split where the float
    build took unequal time for equal units."""
    before = partition.spent(builds[0].nodes)
    partition, found = _split_kinds(partition, before, sum(builds[0].nodes.values())), Observations()
    for times in builds:
        _add_build(found, partition, times, before)
    return partition, found


def _split_kinds(parts: Partition, before: Sequence[float], float_ms: float) -> Partition:
    """The same units, with kinds split where the float build took unequal time for units of one kind.

    The time of some operators depends on the values: a softmax over masked scores works on subnormal numbers.
    """
    kinds: dict[str, list[tuple[float, Unit]]] = {}
    for unit in parts.units:
        kinds.setdefault(unit.kind, []).append((before[unit.number], unit))
    units = list(parts.units)
    for alike in kinds.values():
        ordered = sorted(alike, key=lambda pair: (pair[0], pair[1].number))
        group, last = 0, ordered[0][0]
        for spent, unit in ordered:
            group += spent > UNEQUAL * last and spent - last > NEGLIGIBLE * float_ms
            last = spent
            units[unit.number] = replace(unit, kind=f"{unit.kind} {group}") if group else unit
    return replace(parts, units=tuple(units))


def _add_build(found: Observations, partition: Partition, times: BuildTimes, before: Sequence[float]) -> None:
    """Add the times of a build to `found`; `before` are the times of the units in the float build."""
    states = [state(u, partition, times.placement) for u in partition.units]
    stored = stored_in(partition, times.placement, states)
    paired: dict[str, list[Edge]] = {}
    for edge in times.placement.edges & partition.possible:
        paired.setdefault(edge.tensor, []).append(edge)
    took = partition.spent(times.nodes)
    paid = _charged_dequantizations(
        partition, times, paired, states, [a / b if b > 0 else 0.0 for a, b in zip(took, before, strict=True)]
    )
    fresh: dict[UnitKey, list[float]] = {}
    more: dict[str, list[float]] = {}
    for unit, how, spent in zip(partition.units, states, took, strict=True):
        if how in ("quantized", "handing"):
            spent += paid.get(unit.number, 0.0)
            if how == "quantized":
                spent += sum(times.quantize.get(t, 0.0) for t in unit.outputs)
        given = any(t in paired for t in unit.outputs)
        if (chosen := partition.format_in(unit, times.placement)) is not None:
            # A DQ of weights that runs by itself counts for the unit.
            spent += sum(times.dequantize.get(e.tensor, 0.0) for e in partition.weight_only_edges(unit))
            if how == "float":
                fresh.setdefault((unit.kind, chosen.name, "float"), []).append(spent)
        elif how == "fed" or (how == "float" and given):
            more.setdefault(unit.kind, []).append(spent - before[unit.number])
        elif how != "mixed" and not (how == "float" and times.placement):  # float prices are those of the float build
            fresh.setdefault((unit.kind, how, behind(unit, partition, stored)), []).append(spent)
    found.units |= fresh
    found.disturbed |= {kind: max(0.0, median(ms)) for kind, ms in more.items()}
    for key, ms in fresh.items():
        found.medians.setdefault(key, []).append(median(ms))
    found.per_consumer |= any(n > 1 for n in times.copies.values())
    for op, seen in (("quantize", times.quantize), ("dequantize", times.dequantize)):
        for tensor, spent in seen.items():
            if tensor in partition.edges:
                each = spent / times.copies[tensor] if op == "dequantize" else spent
                getattr(found, op)[tensor] = each
                found.sizes.append((bytes_of(partition.model, tensor), each))
    for tensor, op in _absorbed(partition, times, states):
        getattr(found, op)[tensor] = 0.0


def _absorbed(partition: Partition, times: BuildTimes, states: Sequence[State]) -> Iterator[tuple[str, Conversion]]:
    """Conversions between a float and a quantized unit without a layer of their own: a kernel converts while it reads
    or writes."""
    placed = times.placement.edges
    for tensor, edges in partition.edges.items():
        read = {states[partition.owner[e.node]] for e in edges if e.node and e in placed}
        made = states[partition.producer[tensor]] if tensor in partition.producer else "float"
        if made in ("float", "fed", "handing") and read & {"quantized", "handing"} and tensor not in times.quantize:
            yield tensor, "quantize"
        if made == "quantized" and read & {"float", "fed"} and tensor not in times.dequantize:
            yield tensor, "dequantize"


def _charged_dequantizations(
    partition: Partition,
    times: BuildTimes,
    paired: Mapping[str, Sequence[Edge]],
    states: Sequence[State],
    slowness: Sequence[float],
) -> Mapping[int, float]:
    """By unit, the ms of the DQs that it is charged for. A DQ that ran is charged to the consumer that is the least
    quantized, judged by its state and then by its slowness (its time over that in the float build): the others absorbed
    theirs. `paired` are the edges with pairs by tensor."""
    paid: dict[int, float] = {}
    for tensor, spent in times.dequantize.items():
        edges = paired.get(tensor, ())
        users = {partition.owner[e.node] for e in edges if e.node}
        copies = max(0, times.copies[tensor] - sum(e.is_graph_output for e in edges))
        for user in nsmallest(copies, users, key=lambda u: (RANKS.index(states[u]), -slowness[u], u)):
            paid[user] = paid.get(user, 0.0) + spent / times.copies[tensor]
    return paid


def bytes_of(model: Model, tensor: str) -> float:
    """The bytes of a tensor of floats; 0 where its shape is not known."""
    info = model.tensors.get(tensor)
    if info is None or info.shape is None:
        return 0.0
    return elements(model, tensor) * float(onnx.helper.tensor_dtype_to_np_dtype(info.dtype).itemsize)


WITHIN: tuple[Behind, ...] = ("quantized", "both")
"""What a unit behind quantized units reads, as in `UnitKey`; the first with a measurement counts."""
BEHIND: tuple[Behind, ...] = ("float",)
"""What a unit behind float units reads, as in `UnitKey`."""

UNMEASURED_SHARE = 0.25
"""The guessed share of its float time that a quantized unit takes, where no equal unit was measured. Low, so that it is
tried; chosen, not measured."""

LOW_QUANTILE = 0.25
"""An extra of a kind without a measurement is this quantile of those of kinds with the same operators: a low guess is
tried and corrected by its build, one that is too high never is. Chosen, not measured."""

EXTRAS = ("disturbed", "behind_float", "handing")
"""Fields of a price that are guessed from other kinds of units."""

Extras = Mapping[str, float | None]
"""The extras of a price in ms by name (`EXTRAS`); None where they are not known."""


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
    """Extra ms of a quantized unit for each output that it writes as floats. Negative where storing in 8 bits takes
    longer: an engine may move the Q behind a Concat to each input of the Concat."""
    seen: bool = False
    """Whether its quantized price was measured."""
    by_format: Mapping[WeightFormat, float] = field(default_factory=dict)
    """By weight format, the ms as a float unit with its weights in that format, in place of `as_float`."""
    guessed: frozenset[str] = frozenset()
    """The names of those `EXTRAS` and weight formats that no build has measured."""

    def raised(self, ms: float) -> Price:
        """The price with all times that no build has measured raised by `ms`."""
        extras = {name: getattr(self, name) + ms for name in EXTRAS if name in self.guessed}
        by_format = {s: paid + ms * (s.name in self.guessed) for s, paid in self.by_format.items()}
        return replace(self, as_quantized=self.as_quantized + ms * (not self.seen), by_format=by_format, **extras)


@dataclass(frozen=True)
class Costs:
    """Prices in ms for every unit (by number) and every tensor that crosses a border between units."""

    partition: Partition
    prices: tuple[Price, ...]
    quantize: Mapping[str, float]
    dequantize: Mapping[str, float]
    per_consumer: bool = False
    """Whether each consumer of a tensor has a DQ of its own."""
    doubt: Mapping[str, float] = field(default_factory=dict)
    """By kind of unit, how many ms builds differ in prices that should be equal, summed over the states."""
    guessed: frozenset[tuple[Conversion, str]] = frozenset()
    """Conversions that no build has measured."""

    @cached_property
    def raised(self) -> Costs:
        """The same prices, with everything that no build has measured raised by the time of the float model: a result
        that changes with them depends on a guess."""
        more = self.float_ms or 1.0
        quantize, dequantize = (
            {t: ms + more * ((op, t) in self.guessed) for t, ms in paid.items()}
            for op, paid in (("quantize", self.quantize), ("dequantize", self.dequantize))
        )
        return replace(
            self, prices=tuple(p.raised(more) for p in self.prices), quantize=quantize, dequantize=dequantize
        )

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
        if not price.by_format:
            return price.as_float, None
        choices = [(price.as_float, None), *((ms + charge(s), s) for s, ms in price.by_format.items())]
        return min(choices, key=lambda choice: choice[0])

    def of_tensor(self, tensor: str, decision: Decision) -> float:
        if tensor in decision.stored:
            floats = sum(u is None or u not in decision.quantized for u in self.partition.users[tensor])
            return self.dequantize[tensor] * (floats if self.per_consumer else min(floats, 1))
        return self.quantize[tensor] if self._is_read(tensor, decision) else 0.0

    def _is_read(self, tensor: str, decision: Decision) -> bool:
        partition = self.partition
        return tensor in partition.edges and any(u in decision.quantized for u in partition.users[tensor])


def learn(partition: Partition, builds: Sequence[BuildTimes]) -> Costs:
    """Prices from the builds so far, the float model's first. Later builds take precedence, since they are nearer to
    the solution."""
    partition, observed = observe(partition, builds)
    fixed, per_byte = _fitted_line(observed.sizes)
    guessed = set[tuple[Conversion, str]]()

    def conversion(tensor: str, op: Conversion, seen: Mapping[str, float]) -> float:
        if tensor in seen:
            return seen[tensor]
        guessed.add((op, tensor))
        return fixed + per_byte * bytes_of(partition.model, tensor)

    medians = {key: median(times) for key, times in observed.units.items() if times}
    quantize = {t: conversion(t, "quantize", observed.quantize) for t in partition.edges}
    dequantize = {t: conversion(t, "dequantize", observed.dequantize) for t in partition.edges}
    kinds = {unit.kind: unit for unit in partition.units}
    prices_of = {kind: _kind_prices(unit, medians, observed) for kind, unit in kinds.items()}
    corrections = _format_corrections(partition, observed)
    known: list[tuple[Price, Extras]] = []
    for unit in partition.units:
        own = prices_of[unit.kind]
        by_format = _format_times(partition, unit, own.as_float, medians, corrections)
        unseen = frozenset(s.name for s in by_format if (unit.kind, s.name, "float") not in medians)
        quantized, extras = _split_price(partition, unit, own, dequantize)
        seen = own.inside is not None or own.outside is not None
        known.append((Price(own.as_float, quantized, seen=seen, by_format=by_format, guessed=unseen), extras))
    doubt: dict[str, float] = {}
    for (kind, _, _), times in observed.medians.items():
        doubt[kind] = doubt.get(kind, 0.0) + max(times) - min(times)
    prices = _completed(partition, known)
    return Costs(partition, prices, quantize, dequantize, observed.per_consumer, doubt, frozenset(guessed))


def _split_price(
    partition: Partition, unit: Unit, own: _KindPrices, dequantize: Mapping[str, float]
) -> tuple[float, Extras]:
    """The quantized time of a unit, and its extras, from the times of its kind in each state; see the module."""
    seen = own.outside if own.inside is None else own.inside
    entering, leaving = partition.storable(unit), sum(t in partition.edges for t in unit.outputs)
    behind_float = None if own.behind_floats is None else own.behind_floats / max(1, len(entering))
    for_floats = (behind_float or 0.0) * len(entering)
    if seen is None:
        quantized = UNMEASURED_SHARE * own.as_float
    else:
        quantized = max(0.0, seen - for_floats) if own.inside is None else seen
    disturbed, handing = own.disturbed, None
    if own.handing is not None:
        more = own.handing - quantized - (for_floats if own.handing_inside is None else 0.0)
        is_real = seen is not None and unit.weights  # without weights it may as well run in float behind DQs
        handing = max(-quantized if is_real else 0.0, more) / max(1, leaving)
        if not unit.weights and entering:  # then this is the time of a float unit behind DQs as well
            conversions = sum(dequantize[t] for t in entering)
            disturbed = max(disturbed or 0.0, own.handing - own.as_float - conversions)
    return quantized, {"disturbed": disturbed, "behind_float": behind_float, "handing": handing}


class _KindPrices(NamedTuple):
    """The times of a kind of unit in ms by state; None where no build has measured it."""

    as_float: float
    inside: float | None
    """Quantized, behind quantized units."""
    outside: float | None
    """Quantized, behind float units."""
    handing_inside: float | None
    """Handing, behind quantized units."""
    handing: float | None
    behind_floats: float | None
    """The extra time behind float units, in state quantized or handing."""
    disturbed: float | None


def _kind_prices(unit: Unit, medians: Mapping[UnitKey, float], observed: Observations) -> _KindPrices:
    def price(state: State, *reads: Behind) -> float | None:
        return next((medians[key] for b in reads if (key := (unit.kind, state, b)) in medians), None)

    as_float = price("float", "float", "quantized") or 0.0
    inside, outside = price("quantized", *WITHIN), price("quantized", *BEHIND)
    handing_inside, handing = price("handing", *WITHIN), price("handing", *WITHIN, *BEHIND)
    pairs = ((outside, inside), (price("handing", *BEHIND), handing_inside))
    more = max((max(0.0, a - b) for a, b in pairs if a is not None and b is not None), default=None)
    if more is None and ((outside is not None and inside is None) or (handing is not None and handing_inside is None)):
        more = 0.0  # the time behind floats is all that is known: nothing is added to it
    disturbed = observed.disturbed.get(unit.kind)
    return _KindPrices(as_float, inside, outside, handing_inside, handing, more, disturbed)


def _operators_of(unit: Unit, partition: Partition) -> str:
    return ",".join(partition.model.nodes[n].op for n in unit.nodes)


def _completed(partition: Partition, known: Sequence[tuple[Price, Extras]]) -> tuple[Price, ...]:
    """Prices with all their extras. An extra without a measurement is the share of float time that it takes in other
    kinds of units with the same operators: whether a kernel reads 8 bits or writes floats does not depend on shapes."""
    names = [_operators_of(unit, partition) for unit in partition.units]
    shares: dict[tuple[str, str], dict[str, float]] = {}
    for unit, operators, (price, extras) in zip(partition.units, names, known, strict=True):
        for name, ms in extras.items():
            if ms is not None and price.as_float > 0:
                shares.setdefault((operators, name), {})[unit.kind] = ms / price.as_float
    usual = {key: max(0.0, float(np.quantile(list(alike.values()), LOW_QUANTILE))) for key, alike in shares.items()}

    def completed(operators: str, price: Price, extras: Extras) -> Price:
        disturbed, behind_float, handing = (
            price.as_float * usual.get((operators, name), 0.0) if (ms := extras[name]) is None else ms
            for name in EXTRAS
        )
        guessed = price.guessed | {name for name, ms in extras.items() if ms is None}
        return replace(price, disturbed=disturbed, behind_float=behind_float, handing=handing, guessed=guessed)

    return tuple(completed(operators, *one) for operators, one in zip(names, known, strict=True))


def _format_corrections(partition: Partition, observed: Observations) -> Mapping[str, float]:
    """By the family of weight formats: the measured time of units with such weights, divided by the time predicted from
    their products alone."""
    sums: dict[str, list[float]] = {}
    for unit in {u.kind: u for u in partition.units if partition.weight_only_edges(u)}.values():
        floats = observed.units.get((unit.kind, "float", "float"), [])
        for weight_format in partition.weight_formats(unit):
            seen = observed.units.get((unit.kind, weight_format.name, "float"))
            if seen and floats:
                own = sums.setdefault(weight_format.family, [0.0, 0.0])
                own[0] += float(np.median(seen))
                own[1] += float(np.median(floats)) * partition.share(unit, weight_format)
    return {family: real / promised for family, (real, promised) in sums.items() if promised > 0}


def _format_times(
    partition: Partition,
    unit: Unit,
    as_float: float,
    medians: Mapping[UnitKey, float],
    corrections: Mapping[str, float],
) -> dict[WeightFormat, float]:
    """The ms of a float unit by weight format: measured, or else predicted from its products alone and multiplied by
    the correction for formats of its family."""
    found = {}
    for weight_format in partition.weight_formats(unit):
        guess = as_float * partition.share(unit, weight_format) * corrections.get(weight_format.family, 1.0)
        found[weight_format] = medians.get((unit.kind, weight_format.name, "float"), guess)
    return found


def _fitted_line(sizes: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of the line a + b * bytes that fits the ms of conversions, both at least zero; zeros without data."""
    points = np.array(list(sizes)).reshape(-1, 2)
    if len(points) == 0:
        return 0.0, 0.0
    per_byte = float(np.median(points[:, 1] / np.maximum(points[:, 0], 1)))
    if np.ptp(points[:, 0]) == 0:
        return 0.0, per_byte
    slope, offset = np.polyfit(points[:, 0], points[:, 1], 1)
    return (max(0.0, float(offset)), float(slope)) if slope > 0 else (float(points[:, 1].mean()), 0.0)
