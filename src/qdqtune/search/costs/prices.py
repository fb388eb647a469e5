"""Prices of units and conversions, learned from the layer reports of a few builds.

Every build prices every unit at once, in the state that its placement puts the unit in:

    float      no pair on its inputs                                      c0, or c0 + g with pairs on its outputs
    fed        pairs on some or all inputs, none on its weights           c0 + g
    quantized  pairs on all inputs, and on all uses of its outputs        c1
    handing    pairs on all inputs, not on all uses of its outputs        c1 + o
    mixed      anything else: says nothing about the unit

A float unit whose weights are stored in fewer bits has a price for each weight format in place of c0: no neighbour sees
it. g says that pairs disturb a float unit: they part what the engine would fuse, or an engine moves a Q in front of
operators that hand values on and runs those in a poor way. A quantized unit may cost e more behind float units than
behind quantized ones, since engines lay 8-bit tensors out in another way than floats. A Q that runs by itself behind a
float unit is the price q of its tensor, a DQ that runs in front of a float unit its price d. Conversions that run
although the units on both sides are quantized belong to the unit that did not absorb them. What was never seen is
guessed low, so that it is tried: prices of equal units are shared, conversions follow a + b * bytes, and what a unit
costs more beside floats or pairs is the share of its float time that units of the same operators have shown. Before
that, what earlier runs have learned of equal units counts (`priors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np

from qdqtune.search.costs.attribution import BuildTimes
from qdqtune.search.costs.observations import Behind, Conversion, Observations, State, UnitKey, bytes_of, observe
from qdqtune.search.costs.priors import DISTURBED, NO_PRIOR, PriceKey, Prior, digest, neighbours_digest
from qdqtune.search.costs.units import Decision, Partition, Unit, kind_of
from qdqtune.types import WeightFormat

WITHIN: tuple[Behind, ...] = ("quantized", "both")
BEHIND: tuple[Behind, ...] = ("float",)

UNMEASURED_SHARE = 0.25
"""An unseen quantized unit is hoped to take this share of its float time."""

EXTRAS = ("disturbed", "behind_float", "handing")
"""Fields of a price that are guessed from other kinds of units."""

LOW_QUANTILE = 0.25
"""Which quantile of these is taken, since what is guessed too high is never tried."""


@dataclass(frozen=True)
class Price:
    """A unit in ms."""

    as_float: float
    as_quantized: float
    disturbed: float = 0.0
    """Extra of a float unit that reads a quantized tensor, or writes one that a quantized unit reads."""
    behind_float: float = 0.0
    """Extra of a quantized unit for each tensor that it reads from a float unit."""
    handing: float = 0.0
    """Extra of a quantized unit for each output that is not stored quantized: less than zero where storing takes time,
    as where an engine moves the Q behind a Concat into the units in front of it, which then run two."""
    seen: bool = False
    """Whether its quantized price was measured, in this run or an earlier one."""
    stored: Mapping[WeightFormat, float] = field(default_factory=dict)
    """As a float unit whose weights are stored so, in place of `as_float`."""
    guessed: frozenset[str] = frozenset()
    """Which of `EXTRAS`, and which weight formats by name, no build has shown."""

    def raised(self, ms: float) -> Price:
        """The price with all that no build has shown higher by so much."""
        extras = {name: getattr(self, name) + ms for name in EXTRAS if name in self.guessed}
        stored = {way: paid + ms * (way.name in self.guessed) for way, paid in self.stored.items()}
        return replace(self, as_quantized=self.as_quantized + ms * (not self.seen), stored=stored, **extras)


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
    guessed: frozenset[tuple[Conversion, str]] = frozenset()
    """Conversions of tensors that no build has shown."""

    @cached_property
    def raised(self) -> Costs:
        """The same prices, with all that no build has shown higher by the time of the float model: what comes out
        otherwise by them rests on a guess."""
        more = self.float_ms or 1.0
        q, d = (
            {t: ms + more * ((op, t) in self.guessed) for t, ms in paid.items()}
            for op, paid in (("quantize", self.quantize), ("dequantize", self.dequantize))
        )
        return replace(self, prices=tuple(p.raised(more) for p in self.prices), quantize=q, dequantize=d)

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
            way = None if self.partition.is_fed(unit, decision) else decision.format_of.get(unit.number)
            plain = price.as_float if way is None else price.stored.get(way, price.as_float)
            return plain + (price.disturbed if amid_pairs else 0.0)
        leaving = sum(t not in decision.stored for t in unit.outputs if t in self.partition.edges)
        extra = price.behind_float * sum(t not in decision.stored for t in entering)
        return price.as_quantized + extra + price.handing * leaving

    def cheapest_float(
        self, unit: int, charge: Callable[[WeightFormat], float] = lambda _: 0.0
    ) -> tuple[float, WeightFormat | None]:
        """The least ms of a unit in float, and how its weights are stored then; `charge` is what a weight format
        adds."""
        price = self.prices[unit]
        if not price.stored:
            return price.as_float, None
        ways = [(price.as_float, None), *((ms + charge(s), s) for s, ms in price.stored.items())]
        return min(ways, key=lambda way: way[0])

    def of_tensor(self, tensor: str, decision: Decision) -> float:
        """The predicted ms of the conversions of one tensor."""
        if tensor in decision.stored:
            floats = sum(u is None or u not in decision.quantized for u in self.partition.users[tensor])
            return self.dequantize[tensor] * (floats if self.per_consumer else min(floats, 1))
        return self.quantize[tensor] if self._is_read(tensor, decision) else 0.0

    def _is_read(self, tensor: str, decision: Decision) -> bool:
        """Whether a quantized unit reads a tensor."""
        partition = self.partition
        return tensor in partition.edges and any(u in decision.quantized for u in partition.users[tensor])


def learn(partition: Partition, builds: Sequence[BuildTimes], prior: Prior = NO_PRIOR) -> Costs:
    """Prices from the builds so far, the first of them the float model's; a later build counts before an earlier one,
    being nearer to the solution. What no build has shown is as in earlier runs."""
    partition, samples = observe(partition, builds)
    return _priced(partition, samples, prior)


def learned_prior(partition: Partition, builds: Sequence[BuildTimes]) -> Prior:
    """What the builds so far have shown, for later runs."""
    partition, samples = observe(partition, builds)
    seen = {key: median(sampled) for key, sampled in samples.units.items() if sampled}
    floats: dict[str, float] = {}
    for where in ("quantized", "float"):  # behind the graph's inputs alone, all that is stored is in 8 bits
        floats |= {kind: ms for (kind, how, b), ms in seen.items() if (how, b) == ("float", where) and ms > 0}
    taken: dict[PriceKey, float] = {
        (k, how, b): ms / floats[k] for (k, how, b), ms in seen.items() if k in floats and how != "float"
    }
    taken |= {(k, DISTURBED, ""): ms / floats[k] for k, ms in samples.disturbed.items() if k in floats}
    found = NO_PRIOR
    for known in reversed(_known_as(partition)):
        shares: dict[PriceKey, float] = {(digest(known[k]), how, b): share for (k, how, b), share in taken.items()}
        operators = {digest(known[u.kind]): operators_of(u, partition) for u in partition.units if u.kind in floats}
        conversions = {
            (op, _between(partition, tensor, known)): (bytes_of(partition.model, tensor), ms)
            for op, paid in (("quantize", samples.quantize), ("dequantize", samples.dequantize))
            for tensor, ms in paid.items()
        }
        found = found.updated(Prior(shares, operators, conversions, per_consumer=samples.per_consumer))
    return found


def _known_as(partition: Partition) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """By kind, what it is known as in other runs, where equal units need not be told apart as they are here: in models
    of the same sizes, and in those of others."""
    kinds = {unit.kind: unit.nodes for unit in partition.units}
    same, others = (
        {kind: kind_of(partition.model, nodes, sized=sized) for kind, nodes in kinds.items()} for sized in (True, False)
    )
    return same, others


def operators_of(unit: Unit, partition: Partition) -> str:
    """The operators of a unit's nodes, in their order."""
    return ",".join(partition.model.nodes[n].op for n in unit.nodes)


def _between(partition: Partition, tensor: str, known: Mapping[str, str]) -> str:
    """What a tensor's conversions stand between, in equal models the same; see `_known_as`."""

    def kind(number: int | None) -> str:
        return "" if number is None else known[partition.units[number].kind]

    return neighbours_digest(kind(partition.producer.get(tensor)), map(kind, partition.users[tensor]))


@dataclass(frozen=True)
class _PriorLookup:
    """What earlier runs have shown of a partition: in models of the same sizes, or else in those of others."""

    partition: Partition
    prior: Prior

    @cached_property
    def _known_as(self) -> Sequence[Mapping[str, str]]:
        return _known_as(self.partition) if self.prior else ()

    @cached_property
    def _digests(self) -> Sequence[Mapping[str, str]]:
        return [{kind: digest(text) for kind, text in known.items()} for known in self._known_as]

    def share(self, unit: Unit, how: str, *where: str) -> float | None:
        """The share of its float time that a unit took, in the first of these places in which one has run so."""
        keys = ((known[unit.kind], how, w) for known in self._digests for w in where)
        return next((self.prior.shares[key] for key in keys if key in self.prior.shares), None)

    def conversion(self, tensor: str, op: Conversion, size: float) -> float | None:
        """The ms of a tensor's conversion, as many bytes as `size` says."""
        for known in self._known_as:
            if (paid := self.prior.conversions.get((op, _between(self.partition, tensor, known)))) is not None:
                before, ms = paid
                return ms * size / before if before > 0 else ms
        return None

    def guessed(self, unit: Unit) -> float:
        """The share of a unit of which nobody has seen any like it."""
        operators, where = operators_of(unit, self.partition), ("quantized", "both", "float")
        keys = ((operators, "quantized", w) for w in where)
        return next((self.prior.by_operators[key] for key in keys if key in self.prior.by_operators), UNMEASURED_SHARE)


def _priced(partition: Partition, samples: Observations, prior: Prior) -> Costs:
    fixed, per_byte = _line(samples.sizes or prior.sizes)
    earlier, guessed = _PriorLookup(partition, prior), set[tuple[Conversion, str]]()

    def conversion(tensor: str, op: Conversion, seen: Mapping[str, float]) -> float:
        if tensor in seen:
            return seen[tensor]
        if (before := earlier.conversion(tensor, op, sizes[tensor])) is not None:
            return before
        guessed.add((op, tensor))
        return fixed + per_byte * sizes[tensor]

    medians = {key: median(sampled) for key, sampled in samples.units.items() if sampled}
    kinds = {unit.kind: unit for unit in partition.units}
    shown = {kind: _kind_prices(unit, medians, samples, earlier) for kind, unit in kinds.items()}
    sizes = {t: bytes_of(partition.model, t) for t in partition.edges}
    quantize = {t: conversion(t, "quantize", samples.quantize) for t in partition.edges}
    dequantize = {t: conversion(t, "dequantize", samples.dequantize) for t in partition.edges}
    corrections, known = _corrections(partition, samples), []
    for unit in partition.units:
        own, entering = shown[unit.kind], partition.storable(unit)
        c0, seen = own.as_float, own.outside if own.inside is None else own.inside
        e1 = None if own.more is None else own.more / max(1, len(entering))
        there = (e1 or 0.0) * len(entering)
        c1 = own.guessed * c0 if seen is None else max(0.0, seen - there) if own.inside is None else seen
        leaving = sum(t in partition.edges for t in unit.outputs)
        g, o = own.disturbed, None
        if own.handed is not None:
            more = own.handed - c1 - (there if own.handed_inside is None else 0.0)
            is_real = seen is not None and unit.weights  # without weights it may as well run in float behind DQs
            o = max(-c1 if is_real else 0.0, more) / max(1, leaving)
            if not unit.weights and entering:  # the same build as a float unit behind DQs
                g = max(g or 0.0, own.handed - c0 - sum(dequantize[t] for t in entering))
        stored = _stored(partition, unit, c0, medians, corrections)
        ways = frozenset(s.name for s in stored if (unit.kind, s.name, "float") not in medians)
        known.append(_PartialPrice(Price(c0, c1, seen=seen is not None, stored=stored, guessed=ways), g, e1, o))
    prices = _completed(partition, known)
    doubt: dict[str, float] = {}
    for (kind, _, _), told in samples.medians.items():
        doubt[kind] = doubt.get(kind, 0.0) + max(told) - min(told)
    per_consumer = samples.per_consumer or prior.per_consumer
    return Costs(partition, prices, quantize, dequantize, per_consumer, doubt, frozenset(guessed))


class _KindPrices(NamedTuple):
    """What builds, or else earlier runs, have shown of a kind of unit, in ms; None where none has."""

    as_float: float
    inside: float | None
    """Quantized, behind quantized units."""
    outside: float | None
    """Quantized, behind float units."""
    handed_inside: float | None
    handed: float | None
    more: float | None
    """What it takes more behind float units, quantized or handing."""
    disturbed: float | None
    guessed: float
    """The share of its float time that it is hoped to take where nothing was seen."""


def _kind_prices(
    unit: Unit, medians: Mapping[UnitKey, float], samples: Observations, earlier: _PriorLookup
) -> _KindPrices:
    def measured(how: State, *where: Behind) -> float | None:
        return next((medians[key] for w in where if (key := (unit.kind, how, w)) in medians), None)

    def price(how: State, *where: Behind) -> float | None:
        own = measured(how, *where)
        share = earlier.share(unit, how, *where) if own is None else None
        return own if share is None else share * as_float

    as_float = measured("float", "float", "quantized") or 0.0
    inside, outside = price("quantized", *WITHIN), price("quantized", *BEHIND)
    handed_inside, handed = price("handing", *WITHIN), price("handing", *WITHIN, *BEHIND)
    apart = ((outside, inside), (price("handing", *BEHIND), handed_inside))
    more = max((max(0.0, a - b) for a, b in apart if a is not None and b is not None), default=None)
    if more is None and ((outside is not None and inside is None) or (handed is not None and handed_inside is None)):
        more = 0.0  # what was seen is what it takes behind floats, and nothing comes on top of that
    disturbed = samples.disturbed.get(unit.kind)
    if disturbed is None and (share := earlier.share(unit, DISTURBED, "")) is not None:
        disturbed = as_float * share
    return _KindPrices(as_float, inside, outside, handed_inside, handed, more, disturbed, earlier.guessed(unit))


class _PartialPrice(NamedTuple):
    """The price of a unit, and the extras of it that builds have shown; None where none has."""

    price: Price
    disturbed: float | None
    behind_float: float | None
    handing: float | None


def _completed(partition: Partition, known: Sequence[_PartialPrice]) -> tuple[Price, ...]:
    """Prices with all their extras. What no build has shown of a kind is what the others of the same operators have
    shown, as a share of their float time: a kernel that takes no 8 bits, or gives no floats, does so in no shape."""
    names = [tuple(partition.model.nodes[n].op for n in unit.nodes) for unit in partition.units]
    shares: dict[tuple[tuple[str, ...], str], dict[str, float]] = {}
    for unit, operators, one in zip(partition.units, names, known, strict=True):
        for extra in EXTRAS:
            ms: float | None = getattr(one, extra)
            if ms is not None and one.price.as_float > 0:
                shares.setdefault((operators, extra), {})[unit.kind] = ms / one.price.as_float

    usual = {key: max(0.0, float(np.quantile(list(alike.values()), LOW_QUANTILE))) for key, alike in shares.items()}

    def completed(operators: tuple[str, ...], one: _PartialPrice, extra: str) -> float:
        ms: float | None = getattr(one, extra)
        return one.price.as_float * usual.get((operators, extra), 0.0) if ms is None else ms

    prices = []
    for operators, one in zip(names, known, strict=True):
        disturbed, behind_float, handing = (completed(operators, one, extra) for extra in EXTRAS)
        guessed = one.price.guessed | {extra for extra in EXTRAS if getattr(one, extra) is None}
        prices.append(
            replace(one.price, disturbed=disturbed, behind_float=behind_float, handing=handing, guessed=guessed)
        )
    return tuple(prices)


def _corrections(partition: Partition, samples: Observations) -> Mapping[int, float]:
    """By bits, what units that store their weights so have taken over what their products alone had promised."""
    sums: dict[int, list[float]] = {}
    for unit in {u.kind: u for u in partition.units if partition.compressible(u)}.values():
        floats = samples.units.get((unit.kind, "float", "float"), [])
        for weight_format in partition.weight_formats(unit):
            seen = samples.units.get((unit.kind, weight_format.name, "float"))
            if seen and floats:
                own = sums.setdefault(weight_format.bits, [0.0, 0.0])
                own[0] += float(np.median(seen))
                own[1] += float(np.median(floats)) * partition.share(unit, weight_format)
    return {bits: real / promised for bits, (real, promised) in sums.items() if promised > 0}


def _stored(
    partition: Partition,
    unit: Unit,
    as_float: float,
    medians: Mapping[UnitKey, float],
    corrections: Mapping[int, float],
) -> dict[WeightFormat, float]:
    """The ms of a float unit by how its weights are stored: measured, or as its products take alone, corrected by what
    builds have shown of others with as many bits."""
    found = {}
    for weight_format in partition.weight_formats(unit):
        guess = as_float * partition.share(unit, weight_format) * corrections.get(weight_format.bits, 1.0)
        found[weight_format] = medians.get((unit.kind, weight_format.name, "float"), guess)
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
