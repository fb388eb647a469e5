"""The minimum cut of the prices, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from qdqtune.search.costs.mincut import Problem, solve
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.samples import state, stored_in
from qdqtune.search.costs.units import Decision, Partition, Unit
from qdqtune.types import Placement, WeightFormat

BISECTIONS = 20

FORETOLD_BISECTIONS = 8
"""As many where each placement on the way is simulated, which takes longer than a cut."""

RAISES = 20
"""How often a price on noise is raised, eightfold each time: what brings noise at all has one long before."""

NEAR_LIMIT = 0.9
"""Share of the limit, foretold so, from which on closer is not worth the next simulation: 0.5 dB."""


EVEN = 0.01
"""What is foretold to take longer by no more than this share takes as long: builds of one file differ by that."""

RESTS = 1e-3
"""A sum that changes by this share of what its guessed parts change by rests on one of them."""

STEPS = 6
"""Cuts that look for what brings less noise and takes as long."""


def everything(parts: Partition) -> Decision:
    """All units that can have a pair run quantized, and all their outputs are stored so."""
    able = frozenset(u.number for u in parts.units if u.inputs)
    return Decision(able, frozenset(t for t in parts.edges if parts.producer.get(t) in able))


def cut_within(costs: Costs, noise: Noise, allowed: float) -> Decision:
    """The optimum of the prices at the lowest price on noise that keeps its sum within what is allowed."""
    return _cheapest(costs, noise, allowed, noise.predicted, BISECTIONS, allowed)[0]


def cut_holding(costs: Costs, noise: Noise, limit: float) -> Decision:
    """The optimum at the lowest price on noise at which the outputs are foretold to hold a limit on it; or what is
    foretold to take as long and brings less."""
    found, price = _cheapest(costs, noise, limit, noise.brought, FORETOLD_BISECTIONS, NEAR_LIMIT * limit)
    most, quiet, low, high = (1 + EVEN) * costs.total(found), found, price, 0.0
    for _ in range(STEPS if found != Decision() else 0):
        middle = np.sqrt(low * high) if low and high else high / 8 or 8 * low or EVEN * costs.float_ms / limit
        decision = cut(costs, noise, middle)
        if costs.total(decision) <= most:
            quiet, low = decision, middle
        else:
            high = middle
    return quiet if noise.brought(costs.partition.placement(quiet)) <= limit else found


def _cheapest(
    costs: Costs, noise: Noise, allowed: float, amount: Callable[[Placement], float], bisections: int, enough: float
) -> tuple[Decision, float]:
    """`enough` noise ends the search for more within what is allowed. Where none of it has a price, because the noise
    of single values does not tell where that of a placement comes from, nothing is quantized. The price comes too."""

    def at(price: float) -> tuple[Decision, float]:
        decision = cut(costs, noise, price)
        return decision, amount(costs.partition.placement(decision))

    found, brought = at(0.0)
    if brought <= allowed:
        return found, 0.0
    total = costs.float_ms
    low, high = 0.0, total / allowed  # where all the noise that is allowed costs as much as the whole float model
    found, brought = at(high)
    for _ in range(RAISES):
        if brought <= allowed:
            break
        low, high = high, high * 8
        found, brought = at(high)
    else:
        return Decision(), high
    for _ in range(bisections):
        if brought >= enough:
            break
        middle = np.sqrt(low * high) if low else high / 8
        decision, noisy = at(middle)
        if noisy <= allowed:
            found, brought, high = decision, noisy, middle
        else:
            low = middle
    return found, high


def cut(costs: Costs, noise: Noise | None = None, price: float = 0.0) -> Decision:
    """The optimum of the prices, that of noise in ms included."""
    formulation = formulate(costs, noise, price)
    return formulation.decision(solve(formulation.problem))


@dataclass(frozen=True)
class Formulation:
    """Prices as a minimum cut, and the numbers of its decisions to run a unit quantized, and to store a tensor."""

    problem: Problem
    runs: Sequence[int]
    stored: Mapping[str, int]
    ways: Mapping[int, WeightFormat]
    parts: Partition

    def decision(self, answers: Sequence[bool]) -> Decision:
        """What an assignment says of units and tensors."""
        quantized = frozenset(unit for unit, number in enumerate(self.runs) if answers[number])
        stored = (tensor for tensor, number in self.stored.items() if answers[number])
        found = Decision.of(quantized, stored)
        able = (u for u in self.parts.units if u.number in self.ways and u.number not in quantized)
        ways = ((u.number, self.ways[u.number]) for u in able if not self.parts.is_fed(u, found))
        return replace(found, ways=frozenset(ways))


def formulate(costs: Costs, noise: Noise | None = None, price: float = 0.0) -> Formulation:
    """`Costs.total`, and a price on noise, as a minimum cut: a unit in float takes the least of its ways to be so."""
    parts, problem = costs.partition, Problem()
    priced = list(zip(parts.units, costs.prices, strict=True))
    floats = [costs.way(u.number, _charge(parts, u, noise, price, costs.float_ms)) for u in parts.units]
    runs = [
        problem.decision(ms, p.as_quantized if u.inputs else np.inf)
        for (u, p), (ms, _) in zip(priced, floats, strict=True)
    ]
    disturbed = [problem.decision() for _ in parts.units]
    for amid, run, own in zip(disturbed, runs, costs.prices, strict=True):
        problem.charge(amid, run, own.disturbed)
    ways = {number: way for number, (_, way) in enumerate(floats) if way is not None}
    fed = {number: problem.decision() for number in ways}
    for number, plain in fed.items():  # behind a stored tensor its weights stay floats
        problem.charge(plain, runs[number], costs.prices[number].as_float - floats[number][0])
    stored = {tensor: problem.decision() for tensor in parts.edges}
    rounding = [(run, e.tensor) for run, u in zip(runs, parts.units, strict=True) for e in u.weights]
    for tensor, kept in stored.items():
        producer, users = parts.producer.get(tensor), parts.users[tensor]
        exists = problem.decision()
        rounding += [(kept, tensor), (exists, tensor)]
        problem.charge(exists, kept, costs.quantize[tensor])
        if producer is None:
            problem.if_yes[kept] = np.inf  # a graph input comes as a float
        else:
            problem.charge(kept, runs[producer], np.inf)
            handing = costs.prices[producer].handing  # below zero, storing is charged to the other side of the sum
            problem.charge(runs[producer], kept, max(0.0, handing))
            problem.if_yes[runs[producer]] = max(0.0, problem.if_yes[runs[producer]] + min(0.0, handing))
            problem.if_yes[kept] += max(0.0, -handing)
            problem.charge(exists, disturbed[producer], np.inf)
        if not costs.per_consumer:
            absorbed = problem.decision(if_yes=np.inf if None in users else 0.0)
            problem.charge(kept, absorbed, costs.dequantize[tensor])
        for user in users:
            if user is None:
                problem.if_yes[kept] += costs.dequantize[tensor] if costs.per_consumer else 0.0
                continue
            problem.charge(runs[user], exists, np.inf)
            if costs.per_consumer:
                problem.charge(kept, runs[user], costs.dequantize[tensor])
            else:
                problem.charge(absorbed, runs[user], np.inf)
            if producer is not None:
                problem.charge(kept, disturbed[user], np.inf)
                if user in fed:
                    problem.charge(kept, fed[user], np.inf)
                problem.charge(runs[user], kept, costs.prices[user].behind_float)
    if noise is not None and price > 0:
        _charge_noise(problem, rounding, noise, price, costs.float_ms)
    return Formulation(problem, runs, stored, ways, parts)


def _charge(
    parts: Partition, unit: Unit, noise: Noise | None, price: float, most: float
) -> Callable[[WeightFormat], float]:
    """What the noise of a unit's weights costs in each weight format."""

    def charge(weight_format: WeightFormat) -> float:
        if noise is None or price <= 0:
            return 0.0
        return sum(min(price * noise.of_weight(e, weight_format), most) for e in parts.compressible(unit))

    return charge


def _charge_noise(
    problem: Problem, rounding: Sequence[tuple[int, str]], noise: Noise, price: float, most: float
) -> None:
    """Charge each value once if any of the decisions that round one of its tensors is yes; `most` forbids as well as
    any higher price, and keeps the others exact."""
    rounded: dict[str, int] = {}
    for decision, tensor in rounding:
        value = noise.value(tensor)
        if alone := noise.of_value(value):
            if value not in rounded:
                rounded[value] = problem.decision(if_yes=min(price * alone, most))
            problem.charge(decision, rounded[value], np.inf)


def decision_of(costs: Costs, placement: Placement) -> Decision:
    """The decision that a placement comes nearest to; the cheaper one where it can be read in two ways."""
    parts = costs.partition
    decision = nearest(parts, placement)
    for unit in parts.units:
        if unit.number not in decision.quantized and state(unit, parts, placement) == "handing":
            tensors = [e.tensor for e in unit.inputs]
            decision = min(
                decision,
                replace(decision, quantized=decision.quantized | {unit.number}),
                key=lambda d: costs.of_unit(unit, d) + sum(costs.of_tensor(t, d) for t in tensors),
            )
    return decision


def nearest(parts: Partition, placement: Placement) -> Decision:
    """The units that a placement makes run quantized, at least in part, and the tensors that it keeps in 8 bits.

    A unit without weights that reads such tensors and hands floats over counts as a float one behind DQs.
    """
    states = [state(u, parts, placement) for u in parts.units]
    stored = stored_in(parts, placement, states)
    ways = ((u.number, way) for u in parts.units if (way := parts.way(u, placement)) is not None)

    def runs(unit: Unit) -> bool:
        how = states[unit.number]
        if how == "handing":
            return bool(unit.weights) or any(e.tensor not in stored for e in unit.inputs)
        return how in ("quantized", "mixed")

    return Decision.of((unit.number for unit in parts.units if runs(unit)), stored, ways)


def margins(costs: Costs, decision: Decision) -> dict[str, float]:
    """By kind of unit, what it would cost in ms to decide otherwise for one unit of it, all else as it is; summed over
    its units."""
    sums: dict[str, float] = {}
    for unit in costs.partition.units:
        if unit.inputs and costs.prices[unit.number].as_float > 0:
            sums[unit.kind] = sums.get(unit.kind, 0.0) + margin(costs, decision, unit)
    return sums


def margin(costs: Costs, decision: Decision, unit: Unit) -> float:
    """What it would cost in ms to decide otherwise for one unit, all else as it is."""
    parts = costs.partition
    leaving = [t for t in unit.outputs if t in parts.edges]
    near = {user for t in leaving for user in parts.users[t] if user is not None}
    near |= {parts.producer[t] for t in parts.storable(unit)}
    units = [parts.units[n] for n in {unit.number} | near]
    tensors = {*leaving, *(e.tensor for e in unit.inputs)}

    def cost(decided: Decision) -> float:
        return sum(costs.of_unit(u, decided) for u in units) + sum(costs.of_tensor(t, decided) for t in tensors)

    return cost(other(parts, decision, [unit.number], usual_ways(costs, [unit.number]))) - cost(decision)


def is_shown_by(costs: Costs, decision: Decision, unit: Unit) -> bool:
    """Whether builds have shown every price that the margin of a unit depends on."""
    return abs(margin(costs.raised, decision, unit) - margin(costs, decision, unit)) < RESTS * (costs.float_ms or 1.0)


def usual_ways(costs: Costs, units: Iterable[int]) -> dict[int, WeightFormat]:
    """The cheapest weight formats of the weights of some units in float; none for those that are cheapest with
    floats."""
    return {number: way for number in units if (way := costs.way(number)[1]) is not None}


def flip(costs: Costs, decision: Decision, kinds: Collection[str]) -> Decision:
    """The decision with all units of some kinds the other way."""
    units = [u.number for u in costs.partition.units if u.kind in kinds and u.inputs]
    return other(costs.partition, decision, units, usual_ways(costs, units))


def other(
    parts: Partition,
    decision: Decision,
    units: Collection[int],
    ways: Mapping[int, WeightFormat] = MappingProxyType({}),
) -> Decision:
    """A decision with some units the other way: what units store that become quantized, and all else as it was; those
    that become float have their weights as in `ways`. What a unit with stored weights reads stays a float for it."""
    changed = decision.quantized ^ frozenset(units)
    kept = {n: way for n, way in decision.ways if n not in changed}
    kept |= {n: ways[n] for n in units if n not in changed and n in ways}
    written = (t for n in units if n in changed for t in parts.units[n].outputs if t in parts.edges)
    fresh = {t for t in written if kept.keys().isdisjoint(parts.users[t])}
    lost = {t for n in units if n not in changed for t in parts.units[n].outputs}
    return Decision.of(changed, (decision.stored | fresh) - lost, kept.items())
