"""Cut search: price every unit from layer reports, take the exact optimum of the prices as a minimum cut, build it,
read its layers, and cut again.

Let x_u say that unit u runs quantized, s_t that its output t is stored in 8 bits, r_t that 8-bit values of t exist,
a_t that all its consumers run quantized, w_u that u reads or writes a tensor of which 8-bit values exist. The predicted
time is

    sum_u  c0_u (1 - x_u) + c1_u x_u
  + sum_u  g_u w_u (1 - x_u)        a float unit among pairs
         + e_u x_u (1 - s_t)        for each t that u reads: a quantized unit behind a float one
         + o_u x_u (1 - s_t)        for each t that u writes: it hands a float over
  + sum_t  q_t r_t (1 - s_t)        a Q runs behind a float
         + d_t s_t (1 - a_t)        a DQ runs in front of float consumers; or
         + sum_v d_t s_t (1 - x_v)  one in front of each, where the engine does so
    with  s_t <= x_u,  x_v <= r_t,  a_t <= x_v,  s_t <= w_v,  r_t <= w_u

and each term charges one yes against one no, so that a minimum cut is the exact optimum over all placements.

Where accuracy is limited, a price lambda on noise comes on top:

  + lambda sum_v n_v y_v            value v is rounded, which brings noise n_v to the outputs
    with  r_t <= y_v,  s_t <= y_v  for each tensor t that holds v,  x_u <= y_v  for each weight v of u

The lowest price at which the optimum keeps within the noise that the limits allow is found by bisection. How much the
sum may be is learned from the builds (`strategies.noise`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, islice

import numpy as np

from qdqtune.graph.model import Model
from qdqtune.measurement.timing import Plan, judge
from qdqtune.search import best_of
from qdqtune.search.costs.mincut import Problem, solve
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.prices import (
    Costs,
    Priced,
    Times,
    attribute,
    group_cost,
    inner_pairs,
    is_stored,
    learn,
    state,
)
from qdqtune.search.costs.units import Partition, Unit, fusion_groups, inner_edges, kind_of, partition, split
from qdqtune.types import Edge, Layer, Placement, Proposal, Trial

Group = tuple[str, ...]

POLISH = 3
"""Kinds of units that one build of the polish decides otherwise; its layers price each of them by itself."""

BISECTIONS = 20

CLOSE = 0.02
"""A decision is worth a build of its own if the other way is predicted to cost at most this share of the best, or twice
that where builds disagree about the prices."""


@dataclass(frozen=True)
class Decision:
    """A placement as the cut made it: which units run quantized, which tensors stay in 8 bits, and the predicted ms."""

    quantized: frozenset[int]
    stored: frozenset[str]
    predicted_ms: float


@dataclass(frozen=True)
class CutSearch:
    """See the module. `float_layers` is the report of the float build; `seeds` are placements to price besides, and
    `spares` those to price when the prices lead no further."""

    model: Model
    possible: frozenset[Edge]
    float_layers: Sequence[Layer]
    seeds: Mapping[str, Placement] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    noise: Noise | None = None
    spares: Mapping[str, Placement] = field(default_factory=dict)

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        """See `Strategy`. The first batch prices every unit: as the engine fuses, apart, and as the seeds have it."""
        tried = {t.placement for t in history} | {Placement()}
        first = {p.placement: p for p in self._first if p.placement not in tried}
        if first:
            return tuple(first.values())
        rest = (p for p in self._later(self.costs(history), history) if p.placement not in tried)
        return tuple(islice(rest, 1))

    @cached_property
    def float_ms(self) -> float:
        """Sum of the float build's layer times."""
        return sum(layer.time_ms or 0.0 for layer in self.float_layers)

    @cached_property
    def groups(self) -> list[Group]:
        """Node names that the float build runs as one kernel, more than one together."""
        return fusion_groups(self.model, self.float_layers)

    @cached_property
    def _first(self) -> tuple[Proposal, ...]:
        """Everything quantized, as coarse units and as single nodes; and the seeds."""
        whole = {}
        for name, groups in (("fused units", self.groups), ("single nodes", [])):
            parts = partition(self.model, self.possible, groups)
            whole[name] = _placement(parts, everything(parts))
        return tuple(_named(whole | dict(self.seeds)))

    def _later(self, costs: Costs, history: Sequence[Trial]) -> Iterator[Proposal]:
        """The optimum of what is known (if it was built already, the prices are at a fixed point), what is near to the
        best placement, and the spares."""
        allowed = np.inf if self.noise is None else self.noise.allowed(history)

        @cache
        def optimum(level: float) -> Decision:
            return cut(costs) if self.noise is None else cut_within(costs, self.noise, level)

        for level in (np.inf,) if self.noise is None else self.noise.levels(history):
            predicted = optimum(level).predicted_ms / self.float_ms
            yield Proposal("cut", _placement(costs.partition, optimum(level)), predicted=predicted, wants_layers=True)
        failed = {t.placement for t in history if judge(t, self.plan) is None}
        stuck = _placement(costs.partition, optimum(allowed)) in failed
        for proposal in chain(self._polish(costs, history, stuck=stuck), _named(self.spares)):
            if self.noise is None or self.noise.predicted(proposal.placement) <= allowed:
                yield proposal

    def _polish(self, costs: Costs, history: Sequence[Trial], *, stuck: bool) -> Iterator[Proposal]:
        """The best placement with its closest decisions made otherwise: a few kinds of units together, so that the
        build prices each of them anew, and then each kind alone. Prices that builds disagree about come first.

        `stuck`: no prices lead further, since what they led to fails; then every kind is tried, the nearest first.
        """
        best = best_of(history)
        ratio = next(b.ratio for b in self.builds(history) if b.placement == best)
        base = decision_of(costs, best)
        close = CLOSE * ratio * self.float_ms
        ranked: list[tuple[float, str]] = []
        for kind, loss in margins(costs, base).items():
            doubt = min(2 * costs.doubt.get(kind, 0.0), close)
            if stuck or loss <= doubt + close:
                ranked.append((loss - doubt, kind))
        kinds = [kind for _, kind in sorted(ranked)]
        groups = [kinds[i : i + POLISH] for i in range(0, len(kinds), POLISH)]
        for group in (*groups, *([kind] for kind in kinds)):
            other = flip(costs, base, group)
            predicted = ratio + (other.predicted_ms - base.predicted_ms) / self.float_ms
            yield Proposal("polish", _placement(costs.partition, other), predicted=predicted, wants_layers=True)

    def builds(self, history: Sequence[Trial]) -> list[Priced]:
        """The float build and every candidate with a report and a ratio, in order."""
        ratios = {Placement(): 1.0}
        found = [Priced(Placement(), tuple(self.float_layers))]
        for trial in history:
            measured = judge(trial, self.plan)
            if measured is not None and trial.against in ratios:
                ratios[trial.placement] = ratios[trial.against] * measured.median
                if trial.layers:
                    found.append(Priced(trial.placement, trial.layers, ratios[trial.placement]))
        return found

    def costs(self, history: Sequence[Trial]) -> Costs:
        """Prices of the units that the builds so far suggest. Where builds disagree, a later one counts; of the first
        ones, which no prices led to, a faster one."""
        floats, *others = self.builds(history)
        first = {t.placement for t in history if t.proposal.predicted is None}
        guesses = sorted((b for b in others if b.placement in first), key=lambda build: -build.ratio)
        ordered = (floats, *guesses, *(b for b in others if b.placement not in first))
        times = [attribute(self.model, build, self.float_ms) for build in ordered]
        parts = partition(self.model, self.possible, list(self._units(times)))
        return learn(parts, times)

    def _units(self, times: Sequence[Times]) -> Iterator[Group]:
        """The float build's groups, each divided as it ran fastest when it was quantized; equal groups alike."""
        options: dict[str, dict[frozenset[int], list[float]]] = {}
        members = [(group, inner_edges(self.model, group, self.possible), self._kind(group)) for group in self.groups]
        for group, edges, kind in members:
            for build in times:
                spent = group_cost(self.model, group, build)
                if spent is not None:
                    pairs = inner_pairs(edges, build.placement)
                    chosen = frozenset(i for i, e in enumerate(edges) if e in pairs)
                    options.setdefault(kind, {}).setdefault(chosen, []).append(spent)
        for group, edges, kind in members:
            prices = options.get(kind, {})
            best = min(prices, key=lambda o: (min(prices[o]), len(o), sorted(o)), default=frozenset[int]())
            yield from split(self.model, group, {edges[i] for i in best})

    def _kind(self, group: Group) -> str:
        return kind_of(self.model, tuple(self.model.index_of[name] for name in group))


def _named(placements: Mapping[str, Placement]) -> Iterator[Proposal]:
    return (Proposal(name, placement, wants_layers=True) for name, placement in placements.items())


def everything(parts: Partition) -> Decision:
    """All units that can have a pair run quantized, and all their outputs are stored so."""
    able = frozenset(u.number for u in parts.units if u.inputs)
    return Decision(able, frozenset(t for t in parts.edges if parts.producer.get(t) in able), 0.0)


def cut_within(costs: Costs, noise: Noise, allowed: float) -> Decision:
    """The optimum of the prices at the lowest price on noise that keeps its sum within what is allowed."""

    def at(price: float) -> tuple[Decision, bool]:
        decision = cut(costs, noise, price)
        return decision, noise.predicted(_placement(costs.partition, decision)) <= allowed

    found, fits = at(0.0)
    if fits:
        return found
    total = sum(costs.as_float)
    low, high = 0.0, total / allowed  # where all the noise that is allowed costs as much as the whole float model
    found, fits = at(high)
    while not fits:
        low, high = high, high * 8
        found, fits = at(high)
    for _ in range(BISECTIONS):
        middle = np.sqrt(low * high) if low else high / 8
        decision, fits = at(middle)
        found, low, high = (decision, low, middle) if fits else (found, middle, high)
    return found


def cut(costs: Costs, noise: Noise | None = None, price: float = 0.0) -> Decision:
    """The optimum of the prices, that of noise in ms included; what it predicts is time alone."""
    problem, runs, stored = problem_of(costs, noise, price)
    answers = solve(problem)
    quantized = frozenset(u for u, number in enumerate(runs) if answers[number])
    kept = frozenset(t for t, number in stored.items() if answers[number])
    return Decision(quantized, kept, costs.total(quantized, kept))


def problem_of(
    costs: Costs, noise: Noise | None = None, price: float = 0.0
) -> tuple[Problem, list[int], dict[str, int]]:
    """`Costs.total`, and a price on noise, as a minimum cut; the numbers of the decisions to run a unit quantized, and
    to store a tensor."""
    parts, problem = costs.partition, Problem()
    runs = [problem.decision(costs.as_float[u.number], costs.as_quantized[u.number] if u.inputs else np.inf)
            for u in parts.units]  # fmt: skip
    disturbed = [problem.decision() for _ in parts.units]
    for amid, run, more in zip(disturbed, runs, costs.disturbed, strict=True):
        problem.charge(amid, run, more)
    stored = {tensor: problem.decision() for tensor in parts.edges}
    rounding = [(run, e.tensor) for run, u in zip(runs, parts.units, strict=True) for e in u.weights]
    for tensor, kept in stored.items():
        producer, users = parts.producer.get(tensor), parts.users(tensor)
        exists = problem.decision()
        rounding += [(kept, tensor), (exists, tensor)]
        problem.charge(exists, kept, costs.quantize[tensor])
        if producer is None:
            problem.if_yes[kept] = np.inf  # a graph input comes as a float
        else:
            problem.charge(kept, runs[producer], np.inf)
            problem.charge(runs[producer], kept, costs.handing[producer])
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
                problem.charge(runs[user], kept, costs.behind_float[user])
    if noise is not None and price > 0:
        _charge_noise(problem, rounding, noise, price, sum(costs.as_float))
    return problem, runs, stored


def _charge_noise(
    problem: Problem, rounding: Sequence[tuple[int, str]], noise: Noise, price: float, most: float
) -> None:
    """Charge each value once if any of the decisions that round one of its tensors is yes; `most` forbids as well as
    any higher price, and keeps the others exact."""
    rounded: dict[str, int] = {}
    for decision, tensor in rounding:
        value = noise.value(tensor)
        if alone := noise.alone.get(value):
            if value not in rounded:
                rounded[value] = problem.decision(if_yes=min(price * alone, most))
            problem.charge(decision, rounded[value], np.inf)


def decision_of(costs: Costs, placement: Placement) -> Decision:
    """The decision that a placement comes nearest to; the cheaper one where it can be read in two ways."""
    parts = costs.partition
    quantized, stored = nearest(parts, placement)
    for unit in parts.units:
        if unit.number not in quantized and state(unit, parts, placement) == "handing":
            either = quantized | {unit.number}
            change = [costs.of_unit(unit, q, stored) + sum(costs.of_tensor(e.tensor, q, stored) for e in unit.inputs)
                      for q in (either, quantized)]  # fmt: skip
            quantized = either if change[0] < change[1] else quantized
    return Decision(quantized, stored, costs.total(quantized, stored))


def nearest(parts: Partition, placement: Placement) -> tuple[frozenset[int], frozenset[str]]:
    """The units that a placement makes run quantized, at least in part, and the tensors that it keeps in 8 bits.

    A unit without weights that reads such tensors and hands floats over counts as a float one behind DQs.
    """
    states = {u.number: state(u, parts, placement) for u in parts.units}
    stored = frozenset(t for t in parts.edges if t in parts.producer and is_stored(t, parts, placement))
    quantized = frozenset(
        u.number for u in parts.units
        if states[u.number] in ("quantized", "mixed")
        or (states[u.number] == "handing" and (u.weights or any(e.tensor not in stored for e in u.inputs)))
    )  # fmt: skip
    return quantized, stored


def margins(costs: Costs, decision: Decision) -> dict[str, float]:
    """By kind of unit, what it would cost in ms to decide otherwise for one unit of it, all else as it is; summed over
    its units."""
    found: dict[str, float] = {}
    for unit in costs.partition.units:
        if unit.inputs and costs.as_float[unit.number] > 0:
            found[unit.kind] = found.get(unit.kind, 0.0) + margin(costs, decision, unit)
    return found


def margin(costs: Costs, decision: Decision, unit: Unit) -> float:
    """What it would cost in ms to decide otherwise for one unit, all else as it is."""
    parts = costs.partition
    quantized, stored = other(parts, decision.quantized, decision.stored, [unit.number])
    leaving = [t for t in unit.outputs if t in parts.edges]
    near = {user for t in leaving for user in parts.users(t) if user is not None}
    near |= {parts.producer[t] for t in parts.storable(unit)}
    units = [parts.units[n] for n in {unit.number} | near]
    tensors = {*leaving, *(e.tensor for e in unit.inputs)}
    return sum(
        sign * (sum(costs.of_unit(u, q, s) for u in units) + sum(costs.of_tensor(t, q, s) for t in tensors))
        for sign, q, s in ((1, quantized, stored), (-1, decision.quantized, decision.stored))
    )


def flip(costs: Costs, decision: Decision, kinds: Collection[str]) -> Decision:
    """The decision with all units of some kinds the other way."""
    units = [u.number for u in costs.partition.units if u.kind in kinds and u.inputs]
    quantized, stored = other(costs.partition, decision.quantized, decision.stored, units)
    return Decision(quantized, stored, costs.total(quantized, stored))


def other(
    parts: Partition, quantized: frozenset[int], stored: frozenset[str], units: Collection[int]
) -> tuple[frozenset[int], frozenset[str]]:
    """A decision with some units the other way: what units store that become quantized, and all else as it was."""
    changed = quantized ^ frozenset(units)
    fresh = {t for n in units if n in changed for t in parts.units[n].outputs if t in parts.edges}
    lost = {t for n in units if n not in changed for t in parts.units[n].outputs}
    return changed, (stored | fresh) - lost


def _placement(parts: Partition, decision: Decision) -> Placement:
    return parts.placement(decision.quantized, decision.stored)
