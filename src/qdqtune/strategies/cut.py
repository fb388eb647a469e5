"""Cut search: price every unit from layer reports, take the exact optimum of the prices as a minimum cut, build it,
read its layers, and cut again.

Let x_u say that unit u runs quantized, s_t that its output t is stored in 8 bits, r_t that 8-bit values of t exist.
The predicted time is

    sum_u  c0_u (1 - x_u) + c1_u x_u
  + sum_t  o_u x_u (1 - s_t)         the unit hands a float over
         + q_t r_t (1 - s_t)         a Q runs behind a float
         + sum_v d_t s_t (1 - x_v)   a DQ runs in front of each float consumer v
    with  s_t <= x_u,  x_v <= r_t

and each term charges one yes against one no, so that a minimum cut is the exact optimum over all placements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from qdqtune.graph import Model
from qdqtune.strategies.costs import Costs, Priced, Times, attribute, group_cost, inner_pairs, learn
from qdqtune.strategies.mincut import Problem, solve
from qdqtune.strategies.units import Partition, fusion_groups, inner_edges, kind_of, partition, split
from qdqtune.timing import Plan, judge
from qdqtune.types import Edge, Layer, Placement, Proposal, Trial

Group = tuple[str, ...]

POLISH = 3
"""Candidates kept back for the polish, at most: the cut itself comes first."""


@dataclass(frozen=True)
class Decision:
    """A placement as the cut made it: which units run quantized, which tensors stay in 8 bits, and the predicted ms."""

    quantized: frozenset[int]
    stored: frozenset[str]
    predicted_ms: float


@dataclass(frozen=True)
class CutSearch:
    """See the module. `float_layers` is the report of the float build; `seeds` are placements to price besides."""

    model: Model
    possible: frozenset[Edge]
    float_layers: Sequence[Layer]
    seeds: Mapping[str, Placement] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    seed: int = 0

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        """See `Strategy`. The first batch prices every unit: as the engine fuses, apart, and as the seeds have it."""
        tried = {t.placement for t in history} | {Placement()}
        for ideas in (self._first(), self._cut(history), self._polish(history)):
            fresh: dict[Placement, Proposal] = {}
            for idea in ideas:
                if idea.placement not in tried:
                    fresh.setdefault(idea.placement, idea)
            if fresh:
                return tuple(fresh.values())
        return ()

    @cached_property
    def float_ms(self) -> float:
        """Sum of the float build's layer times."""
        return sum(layer.time_ms or 0.0 for layer in self.float_layers)

    @cached_property
    def groups(self) -> list[Group]:
        """Node names that the float build runs as one kernel, more than one together."""
        return fusion_groups(self.model, self.float_layers)

    def _first(self) -> Iterator[Proposal]:
        """Everything quantized, as coarse units and as single nodes; and the seeds."""
        for name, groups in (("fused units", self.groups), ("single nodes", [])):
            parts = partition(self.model, self.possible, groups)
            yield Proposal(name, _placement(parts, everything(parts)))
        for name, placement in self.seeds.items():
            yield Proposal(name, placement)

    def _cut(self, history: Sequence[Trial]) -> Iterator[Proposal]:
        """The optimum of what is known; nothing if it was built already, for then the search is at a fixed point."""
        costs = self.costs(history)
        decision = cut(costs)
        yield Proposal("cut", _placement(costs.partition, decision), predicted=decision.predicted_ms / self.float_ms)

    def _polish(self, history: Sequence[Trial]) -> Iterator[Proposal]:
        """Flips of the units whose decision was closest, all together, then by halves."""
        costs = self.costs(history)
        decision = cut(costs)
        close = sorted((abs(m), kind) for kind, m in margins(costs, decision).items())
        kinds = [kind for _, kind in close[: 2 * POLISH]]
        queue = [kinds]
        while queue:
            part = queue.pop(0)
            if not part:
                continue
            flipped = flip(costs, decision, part)
            placement = _placement(costs.partition, flipped)
            yield Proposal("polish", placement, predicted=flipped.predicted_ms / self.float_ms)
            half = len(part) // 2
            queue += [part[:half], part[half:]] if half else []

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
        """Prices of the units that the builds so far suggest."""
        times = [attribute(self.model, build, self.float_ms) for build in self.builds(history)]
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


def everything(parts: Partition) -> Decision:
    """All units that can have a pair run quantized, and all their outputs are stored so."""
    able = frozenset(u.number for u in parts.units if u.inputs)
    return Decision(able, frozenset(t for t in parts.edges if parts.producer.get(t) in able), 0.0)


def cut(costs: Costs) -> Decision:
    """The optimum of the prices."""
    parts, problem = costs.partition, Problem()
    runs = [problem.decision(costs.as_float[u.number], costs.as_quantized[u.number] if u.inputs else np.inf)
            for u in parts.units]  # fmt: skip
    stored: dict[str, int] = {}
    for tensor, edges in parts.edges.items():
        producer = parts.producer.get(tensor)
        users = [None if e.is_graph_output else parts.owner[e.node] for e in edges]
        exists = problem.decision()
        stored[tensor] = problem.decision(if_yes=costs.dequantize[tensor] * users.count(None))
        problem.charge(exists, stored[tensor], costs.quantize[tensor])
        if producer is None:
            problem.if_yes[stored[tensor]] = np.inf  # a graph input comes as a float
        else:
            problem.charge(stored[tensor], runs[producer], np.inf)
            leaving = max(1, sum(t in parts.edges for t in parts.units[producer].outputs))
            problem.charge(runs[producer], stored[tensor], costs.handing[producer] / leaving)
        for user in users:
            if user is not None:
                problem.charge(stored[tensor], runs[user], costs.dequantize[tensor])
                problem.charge(runs[user], exists, np.inf)
    answers = solve(problem)
    quantized = frozenset(u.number for u in parts.units if answers[runs[u.number]])
    kept = frozenset(t for t, number in stored.items() if answers[number])
    return Decision(quantized, kept, costs.total(quantized, kept))


def margins(costs: Costs, decision: Decision) -> dict[str, float]:
    """By kind of unit, what it would cost in ms to decide otherwise for one unit of it, all else as it is."""
    found: dict[str, float] = {}
    for unit in costs.partition.units:
        if unit.inputs and costs.as_float[unit.number] > 0:
            other = _flipped(costs, decision, [unit.number])
            found[unit.kind] = found.get(unit.kind, 0.0) + other.predicted_ms - decision.predicted_ms
    return found


def flip(costs: Costs, decision: Decision, kinds: Collection[str]) -> Decision:
    """The decision with all units of some kinds the other way."""
    return _flipped(costs, decision, [u.number for u in costs.partition.units if u.kind in kinds and u.inputs])


def _flipped(costs: Costs, decision: Decision, units: Sequence[int]) -> Decision:
    quantized = decision.quantized ^ frozenset(units)
    stored = {t for t in decision.stored if costs.partition.producer.get(t) in quantized}
    for number in units:
        if number in quantized:
            stored.update(t for t in costs.partition.units[number].outputs if t in costs.partition.edges)
    return Decision(quantized, frozenset(stored), costs.total(quantized, stored))


def _placement(parts: Partition, decision: Decision) -> Placement:
    return parts.placement(decision.quantized, decision.stored)
