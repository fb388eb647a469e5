"""Chooses which units (groups of nodes run as one kernel) to quantize, at the least predicted time.

The optimum is a minimum cut. Under a limit on noise, a price on noise (ms per unit of relative noise) is raised until
the optimum meets the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.table import Table, solve
from qdqtune.search.costs.units import Decision, Partition, Unit, is_fed
from qdqtune.types import Placement, WeightFormat

T = TypeVar("T")


def margins(costs: Costs, decision: Decision) -> dict[str, float]:
    """For each kind of unit, the ms added by flipping one unit between quantized and float, summed over the kind."""
    sums: dict[str, float] = {}
    for unit in costs.partition.units:
        if unit.inputs and costs.prices[unit.number].as_float > 0:
            sums[unit.kind] = sums.get(unit.kind, 0.0) + margin(costs, decision, unit)
    return sums


def margin(costs: Costs, decision: Decision, unit: Unit) -> float:
    """The ms added by flipping one unit between quantized and float, all else unchanged."""
    parts = costs.partition
    units = [parts.units[n] for n in parts.near(unit)]
    tensors = {*parts.leaving(unit), *(e.tensor for e in unit.inputs)}

    def cost(decided: Decision) -> float:
        return sum(costs.of_unit(u, decided) for u in units) + sum(costs.of_tensor(t, decided) for t in tensors)

    return cost(other(parts, decision, [unit.number], cheapest_formats(costs, [unit.number]))) - cost(decision)


def cheapest_formats(costs: Costs, units: Iterable[int]) -> dict[int, WeightFormat]:
    """The cheapest weight format of each unit if it runs in float; absent if float weights are cheapest."""
    return {number: chosen for number in units if (chosen := costs.cheapest_float(number)[1]) is not None}


def flip(costs: Costs, decision: Decision, kinds: Collection[str]) -> Decision:
    """The decision with all units of some kinds flipped between quantized and float."""
    units = [u.number for u in costs.partition.units if u.kind in kinds and u.inputs]
    return other(costs.partition, decision, units, cheapest_formats(costs, units))


def other(
    parts: Partition,
    decision: Decision,
    units: Collection[int],
    weight_formats: Mapping[int, WeightFormat] = MappingProxyType({}),
) -> Decision:
    """The decision with some units flipped between quantized and float. Units that become quantized write 8 bits,
    unless a reader has a weight format; units that become float get their format from `weight_formats`."""
    changed = decision.quantized ^ frozenset(units)
    kept = {n: chosen for n, chosen in decision.weight_formats if n not in changed}
    kept |= {n: weight_formats[n] for n in units if n not in changed and n in weight_formats}
    stored = set(decision.stored)
    for number in units:
        leaving = parts.leaving(parts.units[number])
        if number in changed:
            stored.update(t for t in leaving if kept.keys().isdisjoint(parts.users[t]))
        else:
            stored.difference_update(leaving)
    return Decision.of(changed, stored, kept.items())


BISECTIONS = 20

SIMULATED_BISECTIONS = 5
"""Fewer steps if each placement is simulated, which takes longer than a cut."""

RAISES = 20
"""How often a price on noise is multiplied by eight at most; it excludes all noise long before."""

CLOSE_TO_LIMIT = 0.9
"""Bisection stops when noise is above this share of the limit (0.5 dB below): closer is not worth the time."""


LEAST_NOISE = 1e-12

STEP_SHARES = (0.2, 0.8)
"""The smallest and the largest step of the bisection, as shares of the interval of prices. Chosen, not measured."""

EQUAL_TIME = 0.01
"""Predicted times within this share count as equal, as builds of one file differ that much."""

QUIET_CUTS = 6
"""How many cuts are tried to find a decision with less noise that takes equal time. Chosen, not measured."""


def everything(parts: Partition) -> Decision:
    """Quantize every unit whose inputs can have pairs, with outputs in 8 bits."""
    able = frozenset(u.number for u in parts.units if u.inputs)
    return Decision(able, frozenset(t for t in parts.edges if parts.producer.get(t) in able))


def cut_within(costs: Costs, noise: Noise, allowed: float) -> Decision:
    """The fastest decision found whose summed noise is at most `allowed`, by raising the price on noise; of those with
    equal time the least noisy."""
    found, price = _cheapest(costs, noise, allowed, noise.summed, BISECTIONS, allowed)
    return _quietest(costs, noise, found, price, allowed, noise.summed)


def cut_holding(costs: Costs, noise: Noise, limit: float) -> Decision:
    """`cut_within`, with the noise that is expected of the whole placement. As that takes long to find, the first price
    to try is the one at which sums hold the limit, if they err as they do for the fastest placement."""
    fastest, first = costs.partition.placement(cut(costs)), inf
    if (expected := noise.expected(fastest)) > limit:
        allowed = noise.summed(fastest) * limit / expected
        first = _cheapest(costs, noise, allowed, noise.summed, BISECTIONS, allowed)[1] if allowed > 0 else inf
    found, price = _cheapest(costs, noise, limit, noise.expected, SIMULATED_BISECTIONS, CLOSE_TO_LIMIT * limit, first)
    return _quietest(costs, noise, found, price, limit, noise.expected)


def _quietest(
    costs: Costs, noise: Noise, found: Decision, price: float, limit: float, amount: Callable[[Placement], float]
) -> Decision:
    """The least noisy decision found that takes as long as `found`, the optimum at a `price` on noise."""
    if found == Decision():
        return found
    most, quiet, low, high = (1 + EQUAL_TIME) * costs.total(found), found, price, 0.0
    for _ in range(QUIET_CUTS):
        middle = np.sqrt(low * high) if low and high else high / 8 or 8 * low or EQUAL_TIME * costs.float_ms / limit
        decision = cut(costs, noise, middle)
        if costs.total(decision) <= most:
            quiet, low = decision, middle
        else:
            high = middle
    return quiet if amount(costs.partition.placement(quiet)) <= limit else found


def _cheapest(
    costs: Costs,
    noise: Noise,
    allowed: float,
    amount: Callable[[Placement], float],
    bisections: int,
    enough: float,
    first: float = inf,
) -> tuple[Decision, float]:
    """The optimum whose noise, as `amount` measures it, is at most `allowed`, and its price on noise. Quantizes nothing
    if no price achieves that, because noise of single tensors does not explain that of placements."""
    return optimum_within(
        lambda price: cut(costs, noise, price),
        lambda decision: amount(costs.partition.placement(decision)),
        allowed=allowed,
        # At the other price the allowed noise costs the float model's time.
        first=first if 0 < first < inf else costs.float_ms / allowed,
        bisections=bisections,
        enough=enough,
    ) or (Decision(), inf)


def optimum_within(
    at: Callable[[float], T],
    amount: Callable[[T], float],
    *,
    allowed: float,
    first: float,
    bisections: int,
    enough: float,
) -> tuple[T, float] | None:
    """The optimum `at` the lowest price on noise with which its noise is at most `allowed`, and that price; None if
    there is none. `first` is a guess of the price; the bisection stops early when noise is above `enough`."""
    optimum = at(0.0)
    if amount(optimum) <= allowed:
        return optimum, 0.0
    low, high, too_much = 0.0, first, inf
    for _ in range(RAISES):
        optimum = at(high)
        noise = amount(optimum)
        if noise <= allowed:
            break
        low, high, too_much = high, high * 8, noise
    else:
        return None
    for _ in range(bisections):
        if noise >= enough:
            break
        middle = high / 8
        if low:  # as if the logarithm of noise fell evenly with that of the price
            fall = np.log(too_much / max(noise, LEAST_NOISE))
            share = np.clip(np.log(too_much / (0.5 * (enough + allowed))) / fall, *STEP_SHARES)
            middle = low * float((high / low) ** share)
        tried = at(middle)
        if (found := amount(tried)) <= allowed:
            optimum, noise, high = tried, found, middle
        else:
            low, too_much = middle, found
    return optimum, high


def cut(costs: Costs, noise: Noise | None = None, price: float = 0.0) -> Decision:
    """The decision with the least sum of `Costs.total` and `price` ms per unit of relative noise: the optimum of a
    table (`search.costs.table`) with two labels, float and 8 bits.

    The table has a part for each unit (does it run in 8 bits?) and tensor (is it stored in 8 bits?), and auxiliary
    parts that get the label 8 bits as soon as one of certain others has it: a reader needs a tensor in 8 bits
    (`exists`), a unit has pairs beside it (`amid`), a float unit reads a stored tensor and loses its weight format
    (`fed`), a tensor's values are rounded (`rounded`). Float units have their cheapest weight format. The charge for
    the noise of one value is capped at the float model's time, which already excludes the value: larger numbers would
    cost precision.
    """
    parts, prices, table, most = costs.partition, costs.prices, Table(), costs.float_ms
    noise = noise if price > 0 else None
    runs, formats = list[int](), dict[int, WeightFormat]()
    for unit, own in zip(parts.units, prices, strict=True):
        charges = {}
        if noise is not None:
            for way in own.by_format:
                charges[way] = sum(min(price * noise.of_weight(e, way), most) for e in unit.weight_only)
        ms, chosen = costs.cheapest_float(unit.number, charges)
        # Handing below zero is charged for storing instead.
        quantized = own.as_quantized + sum(min(0.0, own.handing) for _ in parts.leaving(unit))
        runs.append(table.part(ms, max(0.0, quantized) if unit.inputs else inf))
        if chosen is not None:
            formats[unit.number] = chosen
    amid = [table.part(0.0, 0.0) for _ in runs]
    fed = {number: table.part(0.0, 0.0) for number in formats}
    for run, near, own in zip(runs, amid, prices, strict=True):
        table.convert(run, [near], 0.0, own.disturbed)
    for number, plain in fed.items():
        table.convert(runs[number], [plain], 0.0, prices[number].as_float - table.costs[runs[number]][0])
    outside = table.part(0.0, inf)
    rounding = [(run, e.tensor) for run, u in zip(runs, parts.units, strict=True) for e in u.weights]
    kept_parts = dict[str, int]()
    for tensor in parts.edges:
        producer, users = parts.producer.get(tensor), [user for user in parts.users[tensor] if user is not None]
        if producer is None:
            kept = table.part(0.0, inf)  # a graph input comes as a float
        else:
            kept = table.part(0.0, max(0.0, -prices[producer].handing))
            table.convert(runs[producer], [kept], 0.0, inf)
            table.convert(kept, [runs[producer]], 0.0, max(0.0, prices[producer].handing))
        kept_parts[tensor] = kept
        exists = table.part(0.0, 0.0)
        table.convert(kept, [exists], 0.0, costs.quantize[tensor])
        rounding += [(kept, tensor), (exists, tensor)]
        readers = [runs[user] for user in users]
        for reader in readers:
            table.convert(exists, [reader], 0.0, inf)
        if len(users) < len(parts.users[tensor]):
            readers.append(outside)
        table.convert(kept, readers, costs.dequantize[tensor], 0.0)
        if producer is None:
            continue
        table.convert(amid[producer], [exists], 0.0, inf)
        for user in users:
            table.convert(amid[user], [kept], 0.0, inf)
            table.convert(kept, [runs[user]], 0.0, prices[user].behind_float)
            if user in fed:
                table.convert(fed[user], [kept], 0.0, inf)
    rounded: dict[str, int] = {}
    for part, tensor in rounding:
        value = tensor if noise is None else noise.value(tensor)
        alone = 0.0 if noise is None else price * noise.of_value(value)
        if alone:
            if value not in rounded:
                rounded[value] = table.part(0.0, min(alone, most))
            table.convert(rounded[value], [part], 0.0, inf)
    labels = solve(table)
    decision = Decision.of(
        (unit for unit, number in enumerate(runs) if labels[number]),
        (tensor for tensor, number in kept_parts.items() if labels[number]),
    )
    floats = (parts.units[number] for number in formats if number not in decision.quantized)
    kept_formats = ((unit.number, formats[unit.number]) for unit in floats if not is_fed(unit, decision))
    return replace(decision, weight_formats=frozenset(kept_formats))
