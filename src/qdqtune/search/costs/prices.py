"""Prices of units and conversions, learned from the layer reports of a few builds.

Every build prices every unit at once, in the state that its placement puts the unit in:

    float      no pair on its inputs                                      c0, or c0 + g with pairs on its outputs
    fed        pairs on some or all inputs, none on its weights           c0 + g
    quantized  pairs on all inputs, and on all uses of its outputs        c1
    handing    pairs on all inputs, not on all uses of its outputs        c1 + o
    mixed      anything else: says nothing about the unit

A float unit whose weights are stored in fewer bits has a price for each storage in place of c0: no neighbour sees it.
g says that pairs disturb a float unit: they part what the engine would fuse, or an engine moves a Q in front of
operators that hand values on and runs those in a poor way. A quantized unit may cost e more behind float units than
behind quantized ones, since engines lay 8-bit tensors out in another way than floats. A Q that runs by itself behind a
float unit is the price q of its tensor, a DQ that runs in front of a float unit its price d. Conversions that run
although the units on both sides are quantized belong to the unit that did not absorb them. What was never seen is
guessed low, so that it is tried: prices of equal units are shared, conversions follow a + b * bytes, and what a unit
costs more beside floats or pairs is the share of its float time that units of the same operators have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
import onnx

from qdqtune.graph.model import Model
from qdqtune.graph.operators import elements
from qdqtune.search.costs.attribution import Times
from qdqtune.search.costs.units import Decision, Partition, Unit
from qdqtune.types import Placement, Storage

State = Literal["float", "fed", "handing", "mixed", "quantized"]
Behind = Literal["quantized", "both", "float"]
Conversion = Literal["quantize", "dequantize"]

RUNNING: tuple[State, ...] = ("quantized", "handing")

HOPE = 0.25
"""An unseen quantized unit is hoped to take this share of its float time."""

EXTRAS = ("disturbed", "behind_float", "handing")
"""Fields of a price that are guessed from other kinds of units."""

LOW = 0.25
"""Which quantile of these is taken, since what is guessed too high is never tried."""

UNEQUAL = 1.5
"""Equal units whose times differ by this factor do not do equal work; less is noise."""

NEGLIGIBLE = 1e-3
"""Of the float build's time: below, two layers' times are not told apart."""


def state(unit: Unit, partition: Partition, placement: Placement) -> State:
    """What a placement makes of a unit."""
    if any(e in placement for e in unit.inner):
        return "mixed"  # not the unit any more
    entering = [e in placement for e in unit.inputs]
    weights = [e in placement for e in unit.weights]
    if not any(entering):
        return "float"
    if weights and not any(weights):
        return "fed"
    if not all(entering) or not all(weights):
        return "mixed" if weights else "fed"
    leaving = [e in placement for t in unit.outputs for e in partition.edges.get(t, ())]
    return "quantized" if all(leaving) else "handing"


def behind(unit: Unit, partition: Partition, placement: Placement) -> Behind:
    """Whether the tensors that a unit reads are stored quantized: by pairs on all their edges, behind a unit that runs
    quantized. Tensors that come from no unit say nothing."""
    stored = [is_stored(t, partition, placement) for t in partition.storable(unit)]
    return "quantized" if all(stored) else "both" if any(stored) else "float"


def is_stored(tensor: str, partition: Partition, placement: Placement) -> bool:
    """Whether a tensor that a unit writes stays in 8 bits."""
    producer = partition.units[partition.producer[tensor]]
    return state(producer, partition, placement) == "quantized" and all(e in placement for e in partition.edges[tensor])


Sample = tuple[str, str, Behind]
"""Kind of unit, its state or the name of the storage of its weights, and what it reads."""


@dataclass
class _Samples:
    """Prices seen so far, those of the latest build that has any. Units are known by kind."""

    units: dict[Sample, list[float]] = field(default_factory=dict)
    disturbed: dict[str, float] = field(default_factory=dict)
    """By kind, what a float unit takes more among pairs."""
    quantize: dict[str, float] = field(default_factory=dict)
    dequantize: dict[str, float] = field(default_factory=dict)
    sizes: list[tuple[float, float]] = field(default_factory=list)
    medians: dict[Sample, list[float]] = field(default_factory=dict)
    per_consumer: bool = False


@dataclass(frozen=True)
class Price:
    """A unit in ms. `seen`: its quantized price was measured."""

    as_float: float
    as_quantized: float
    disturbed: float = 0.0
    """Extra of a float unit that reads a quantized tensor, or writes one that a quantized unit reads."""
    behind_float: float = 0.0
    """Extra of a quantized unit for each tensor that it reads from a float unit."""
    handing: float = 0.0
    """Extra of a quantized unit for each output that is not stored quantized."""
    seen: bool = False
    stored: Mapping[Storage, float] = field(default_factory=dict)
    """As a float unit whose weights are stored so, in place of `as_float`."""


@dataclass(frozen=True)
class Costs:
    """Prices in ms for every unit (by number) and every tensor that crosses a border."""

    partition: Partition
    prices: tuple[Price, ...]
    quantize: Mapping[str, float]
    dequantize: Mapping[str, float]
    per_consumer: bool = False
    """Whether each consumer of a tensor has a DQ of its own."""
    doubt: Mapping[str, float] = field(default_factory=dict)
    """By kind, how far apart builds that should price a unit of it alike have priced it."""

    @cached_property
    def float_ms(self) -> float:
        """The predicted ms of the float model."""
        return sum(price.as_float for price in self.prices)

    def total(self, decision: Decision) -> float:
        """The predicted ms of a decision."""
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
            way = None if self.partition.is_fed(unit, decision) else decision.way.get(unit.number)
            plain = price.as_float if way is None else price.stored.get(way, price.as_float)
            return plain + (price.disturbed if amid_pairs else 0.0)
        leaving = sum(t not in decision.stored for t in unit.outputs if t in self.partition.edges)
        extra = price.behind_float * sum(t not in decision.stored for t in entering)
        return price.as_quantized + extra + price.handing * leaving

    def way(self, unit: int, charge: Callable[[Storage], float] = lambda _: 0.0) -> tuple[float, Storage | None]:
        """The least ms of a unit in float, and how its weights are stored then; `charge` is what a storage adds."""
        price = self.prices[unit]
        ways = [(price.as_float, None), *((ms + charge(s), s) for s, ms in price.stored.items())]
        return min(ways, key=lambda way: way[0])

    def of_tensor(self, tensor: str, decision: Decision) -> float:
        """The predicted ms of the conversions of one tensor."""
        if tensor in decision.stored:
            floats = sum(u is None or u not in decision.quantized for u in self.partition.users(tensor))
            return self.dequantize[tensor] * (floats if self.per_consumer else min(floats, 1))
        return self.quantize[tensor] if self._is_read(tensor, decision) else 0.0

    def _is_read(self, tensor: str, decision: Decision) -> bool:
        """Whether a quantized unit reads a tensor."""
        partition = self.partition
        return tensor in partition.edges and any(u in decision.quantized for u in partition.users(tensor))


def learn(partition: Partition, builds: Sequence[Times]) -> Costs:
    """Prices from the builds so far, the first of them the float model's; a later build counts before an earlier one,
    being nearer to the solution."""
    partition = _told_apart(partition, builds[0])
    samples = _Samples()
    for times in builds:
        _take(samples, partition, times, builds[0])
    return _priced(partition, samples)


def _told_apart(parts: Partition, floats: Times) -> Partition:
    """The same units, equal ones of a kind each only where the float build took equal time for them.

    The time of some operators depends on the values: a softmax over masked scores works on subnormal numbers.
    """
    kinds: dict[str, list[tuple[float, Unit]]] = {}
    for unit in parts.units:
        kinds.setdefault(unit.kind, []).append((_spent(unit, parts, floats), unit))
    negligible = NEGLIGIBLE * sum(floats.nodes.values())
    units = list(parts.units)
    for alike in kinds.values():
        ordered = sorted(alike, key=lambda pair: (pair[0], pair[1].number))
        group, last = 0, ordered[0][0]
        for spent, unit in ordered:
            group += spent > UNEQUAL * last and spent - last > negligible
            last = spent
            units[unit.number] = replace(unit, kind=f"{unit.kind} {group}") if group else unit
    return replace(parts, units=tuple(units))


def _take(samples: _Samples, partition: Partition, times: Times, floats: Times) -> None:
    states = [state(u, partition, times.placement) for u in partition.units]
    paid = _conversions(partition, times, floats, states)
    fresh: dict[Sample, list[float]] = {}
    more: dict[str, list[float]] = {}
    for unit, how in zip(partition.units, states, strict=True):
        spent = _spent(unit, partition, times)
        if how in ("quantized", "handing"):
            spent += paid.get(unit.number, 0.0)
            if how == "quantized":
                spent += sum(times.quantize.get(t, 0.0) for t in unit.outputs)
        given = any(e in times.placement for t in unit.outputs for e in partition.reading.get(t, ()))
        before = _spent(unit, partition, floats)
        if (way := partition.way(unit, times.placement)) is not None:
            # A DQ of weights that no kernel drew in runs for the unit alone.
            spent += sum(times.dequantize.get(e.tensor, 0.0) for e in partition.compressible(unit))
            if how == "float":
                fresh.setdefault((unit.kind, way.name, "float"), []).append(spent)
        elif how == "fed" or (how == "float" and given and spent > UNEQUAL * before):
            more.setdefault(unit.kind, []).append(spent - before)
        elif how != "mixed":
            fresh.setdefault((unit.kind, how, behind(unit, partition, times.placement)), []).append(spent)
    samples.units |= fresh
    samples.disturbed |= {kind: max(0.0, median(ms)) for kind, ms in more.items()}
    for key, ms in fresh.items():
        samples.medians.setdefault(key, []).append(median(ms))
    samples.per_consumer |= any(n > 1 for n in times.copies.values())
    for op, seen in (("quantize", times.quantize), ("dequantize", times.dequantize)):
        for tensor, spent in seen.items():
            if tensor in partition.edges:
                each = spent / times.copies[tensor] if op == "dequantize" else spent
                getattr(samples, op)[tensor] = each
                samples.sizes.append((_bytes(partition.model, tensor), each))
    for tensor, op in _absorbed(partition, times, states):
        getattr(samples, op)[tensor] = 0.0


def _absorbed(partition: Partition, times: Times, states: Sequence[State]) -> Iterator[tuple[str, Conversion]]:
    """Conversions between a float and a quantized unit that no layer ran by itself: a kernel did them on the way."""
    for tensor, edges in partition.edges.items():
        read = {states[partition.owner[e.node]] for e in edges if e.node and e in times.placement}
        made = states[partition.producer[tensor]] if tensor in partition.producer else "float"
        if made in ("float", "fed", "handing") and read & {"quantized", "handing"} and tensor not in times.quantize:
            yield tensor, "quantize"
        if made == "quantized" and read & {"float", "fed"} and tensor not in times.dequantize:
            yield tensor, "dequantize"


def _spent(unit: Unit, partition: Partition, times: Times) -> float:
    return sum(times.nodes.get(partition.model.nodes[n].name, 0.0) for n in unit.nodes)


def _conversions(partition: Partition, times: Times, floats: Times, states: Sequence[State]) -> Mapping[int, float]:
    """DQs that ran by unit. Each is for the sake of the consumer that is the least quantized, judged by its state and
    then by its time compared with its time in the float build: the others absorbed theirs."""
    ranks = ("float", "fed", "handing", "mixed", "quantized")
    paid: dict[int, float] = {}
    for tensor, spent in times.dequantize.items():
        edges = [e for e in partition.reading.get(tensor, ()) if e in times.placement]
        users = sorted(
            {partition.owner[e.node] for e in edges if e.node},
            key=lambda u: (ranks.index(states[u]), -_slowness(partition.units[u], partition, times, floats), u),
        )
        copies = times.copies[tensor] - sum(e.is_graph_output for e in edges)
        for user in users[: max(copies, 0)]:
            paid[user] = paid.get(user, 0.0) + spent / times.copies[tensor]
    return paid


def _slowness(unit: Unit, partition: Partition, times: Times, floats: Times) -> float:
    before = _spent(unit, partition, floats)
    return _spent(unit, partition, times) / before if before > 0 else 0.0


def _priced(partition: Partition, samples: _Samples) -> Costs:
    fixed, per_byte = _line(samples.sizes)

    def conversion(tensor: str, seen: Mapping[str, float]) -> float:
        return seen.get(tensor, fixed + per_byte * _bytes(partition.model, tensor))

    medians = {key: median(sampled) for key, sampled in samples.units.items() if sampled}

    def price(unit: Unit, how: State, *where: Behind) -> float | None:
        return next((medians[key] for w in where if (key := (unit.kind, how, w)) in medians), None)

    dequantize = {t: conversion(t, samples.dequantize) for t in partition.edges}
    corrections, known = _corrections(partition, samples), []
    for unit in partition.units:
        c0 = price(unit, "float", "float", "quantized") or 0.0
        seen = price(unit, "quantized", "quantized", "both", "float")
        c1 = HOPE * c0 if seen is None else seen
        entering = partition.storable(unit)
        apart = [(price(unit, how, "float"), price(unit, how, "quantized", "both")) for how in RUNNING]
        more = max((a - b for a, b in apart if a is not None and b is not None), default=None)
        e1 = None if more is None else max(0.0, more) / max(1, len(entering))
        handed = price(unit, "handing", "quantized", "both", "float")
        leaving = sum(t in partition.edges for t in unit.outputs)
        o = None if handed is None else max(0.0, handed - c1) / max(1, leaving)
        g = samples.disturbed.get(unit.kind)
        if handed is not None and not unit.weights and entering:  # the same build as a float unit behind DQs
            g = max(g or 0.0, handed - c0 - sum(dequantize[t] for t in entering))
        stored = _stored(partition, unit, c0, medians, corrections)
        known.append(_Known(Price(c0, c1, seen=seen is not None, stored=stored), g, e1, o))
    prices = _completed(partition, known)
    quantize = {t: conversion(t, samples.quantize) for t in partition.edges}
    doubt: dict[str, float] = {}
    for (kind, _, _), told in samples.medians.items():
        doubt[kind] = doubt.get(kind, 0.0) + max(told) - min(told)
    return Costs(partition, prices, quantize, dequantize, samples.per_consumer, doubt)


class _Known(NamedTuple):
    """The price of a unit, and the extras of it that builds have shown; None where none has."""

    price: Price
    disturbed: float | None
    behind_float: float | None
    handing: float | None


def _completed(partition: Partition, known: Sequence[_Known]) -> tuple[Price, ...]:
    """Prices with all their extras. What no build has shown of a kind is what the others of the same operators have
    shown, as a share of their float time: a kernel that takes no 8 bits, or gives no floats, does so in no shape."""
    names = [tuple(partition.model.nodes[n].op for n in unit.nodes) for unit in partition.units]
    shares: dict[tuple[tuple[str, ...], str], dict[str, float]] = {}
    for unit, operators, one in zip(partition.units, names, known, strict=True):
        for extra in EXTRAS:
            ms: float | None = getattr(one, extra)
            if ms is not None and one.price.as_float > 0:
                shares.setdefault((operators, extra), {})[unit.kind] = ms / one.price.as_float

    usual = {key: float(np.quantile(list(alike.values()), LOW)) for key, alike in shares.items()}

    def completed(operators: tuple[str, ...], one: _Known, extra: str) -> float:
        ms: float | None = getattr(one, extra)
        return one.price.as_float * usual.get((operators, extra), 0.0) if ms is None else ms

    prices = []
    for operators, one in zip(names, known, strict=True):
        disturbed, behind_float, handing = (completed(operators, one, extra) for extra in EXTRAS)
        prices.append(replace(one.price, disturbed=disturbed, behind_float=behind_float, handing=handing))
    return tuple(prices)


def _corrections(partition: Partition, samples: _Samples) -> Mapping[int, float]:
    """By bits, what units that store their weights so have taken over what their products alone had promised."""
    sums: dict[int, list[float]] = {}
    for unit in {u.kind: u for u in partition.units if partition.compressible(u)}.values():
        floats = samples.units.get((unit.kind, "float", "float"), [])
        for storage in partition.storages(unit):
            seen = samples.units.get((unit.kind, storage.name, "float"))
            if seen and floats:
                own = sums.setdefault(storage.bits, [0.0, 0.0])
                own[0] += float(np.median(seen))
                own[1] += float(np.median(floats)) * partition.share(unit, storage)
    return {bits: real / promised for bits, (real, promised) in sums.items() if promised > 0}


def _stored(
    partition: Partition, unit: Unit, as_float: float, medians: Mapping[Sample, float], corrections: Mapping[int, float]
) -> dict[Storage, float]:
    """The ms of a float unit by how its weights are stored: measured, or as its products take alone, corrected by what
    builds have shown of others with as many bits."""
    found = {}
    for storage in partition.storages(unit):
        guess = as_float * partition.share(unit, storage) * corrections.get(storage.bits, 1.0)
        found[storage] = medians.get((unit.kind, storage.name, "float"), guess)
    return found


def _line(sizes: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """a and b of a + b * bytes, both at least zero; zeros if nothing was seen."""
    points = np.array(list(sizes)).reshape(-1, 2)
    if len(points) == 0:
        return 0.0, 0.0
    per_byte = float(np.median(points[:, 1] / np.maximum(points[:, 0], 1)))
    if np.ptp(points[:, 0]) == 0:
        return 0.0, per_byte
    slope, offset = np.polyfit(points[:, 0], points[:, 1], 1)
    return (max(0.0, float(offset)), float(slope)) if slope > 0 else (float(points[:, 1].mean()), 0.0)


def _bytes(model: Model, tensor: str) -> float:
    info = model.tensors.get(tensor)
    if info is None or info.shape is None:
        return 0.0
    return elements(model, tensor) * float(onnx.helper.tensor_dtype_to_np_dtype(info.dtype).itemsize)
