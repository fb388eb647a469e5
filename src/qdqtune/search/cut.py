"""Cut search: learn the cost of units from layer reports, build the cheapest decision (a minimum cut), and repeat.

Let x_u say that unit u runs quantized, s_t that its output t is stored in 8 bits, r_t that 8-bit values of t exist, a_t
that all its consumers run quantized, w_u that u reads or writes a tensor of which 8-bit values exist. The predicted
time, of prices with the names of the fields of `Price` and `Costs`, is

    sum_u  as_float_u (1 - x_u) + as_quantized_u x_u
  + sum_u  disturbed_u w_u (1 - x_u)         a float unit among pairs
         + behind_float_u x_u (1 - s_t)      for each t that u reads: a quantized unit behind a float one
         + handing_u x_u (1 - s_t)           for each t that u writes: it writes floats
  + sum_t  quantize_t r_t (1 - s_t)          a Q runs behind a float unit
         + dequantize_t s_t (1 - a_t)        a DQ runs in front of float consumers
    with  s_t <= x_u,  x_v <= r_t,  a_t <= x_v,  s_t <= w_v,  r_t <= w_u

and each term charges one yes against one no, so that a minimum cut is the exact optimum over all placements.

Where accuracy is limited, a price lambda on noise is added:

  + lambda sum_v n_v y_v            value v is rounded, which brings noise n_v to the outputs
    with  r_t <= y_v,  s_t <= y_v  for each tensor t that holds v,  x_u <= y_v  for each weight v of u

The lowest price whose optimum keeps within the allowed noise is found by bisection. How large the sum of noise may be
is learned from the builds (`search.costs.output_noise`).

Where an engine has weight-only kernels, as_float_u is replaced by the least of u's float time and of its times in each
weight format, and with lambda each has its noise on top. This does not depend on neighbours, so the cut stays exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from math import inf

import numpy as np

from qdqtune.graph.model import Model
from qdqtune.search import best_of, products_left_in_float, ratios_to_float, untried
from qdqtune.search.costs.attribution import BuildTimes, attribute, group_ms, with_float_times
from qdqtune.search.costs.decisions import cut, cut_holding, cut_within, everything, flip, margins
from qdqtune.search.costs.output_noise import RESERVE, Noise
from qdqtune.search.costs.prices import Costs, learn
from qdqtune.search.costs.units import (
    Decision,
    FormatShares,
    Group,
    expected_share,
    fusion_groups,
    inner_edges,
    kind_of,
    partition,
    shares_by_bytes,
    split,
    weights_by_family,
)
from qdqtune.timing.ratios import Plan, judge
from qdqtune.types import Edge, Layer, Measurement, Placement, Proposal, Trial

CUT = "cut"
"""The origin of proposals that are the optimum of learned costs."""

USUAL_SHARE = 0.6
"""With pairs, matrix products usually take at most this share of their float time. Chosen, not measured."""

POLISHED_KINDS = 3
"""How many kinds of units one build of `_polish` flips; its layers show the cost of each."""

FUSED_UNITS = "fused units"
"""The origin of the proposal that quantizes everything, in the groups that the engine fuses in float."""

ONLY_PRICES = frozenset({"compute", FUSED_UNITS})
"""Origins of proposals of the first batch that seldom ship: they serve to learn costs."""

BUILD_SPREAD = 0.1
"""Fallbacks predicted to be slower than the best by this share are skipped: builds of a file differ by less."""

CLOSE_SHARE = 0.02
"""A decision is close, and the opposite one worth a build, if that should cost at most this share of the best time.
Chosen, not measured."""


@dataclass(frozen=True)
class CutSearch:
    """Cut search (see the module). `float_layers` is the layer report of the float build; `seeds` are placements to
    build first, `fallbacks` those to build when the optimum does not change any more. `width` is how many to propose at
    a time: the optimum, then placements close to the best one, so that each build shows other costs. `format_shares`
    are the weight formats that weights may have. `is_hurried`: there is time for few candidates only.

    With several numbers of threads, costs are means over all calls, and each of `contexts` has the weights of a
    measurement's parts for one number (see `types.Measurement`); a placement must be slower than float in none.
    """

    model: Model
    possible: frozenset[Edge]
    float_layers: Sequence[Layer]
    _: KW_ONLY
    seeds: Mapping[str, Placement] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    noise: Noise | None = None
    fallbacks: Mapping[str, Placement] = field(default_factory=dict)
    width: int = 1
    format_shares: FormatShares = field(default_factory=dict)
    contexts: Sequence[Sequence[float]] = ()
    is_hurried: bool = False

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        """See `Strategy`. The first batch shows the cost of every unit: the seeds, and everything quantized in the
        groups that the engine fuses in float. Once a build shows that there are no 8-bit kernels, only weight formats
        remain."""
        if self.possible and any(products_left_in_float(trial, self.model, self.plan) for trial in history):
            return replace(self, possible=frozenset(), seeds={}, fallbacks={}).propose(history)
        if self.noise is not None and not any(trial.holds is False for trial in history):
            return replace(self, noise=None).propose(history)  # what single tensors do is not asked before a miss
        first = self._first_batch(history)
        if self.is_hurried and "static" in self.seeds:  # pairs as a usual quantizer places them price nearly all units
            # A seed may have weight formats that are not in `format_shares`.
            slow = {p.origin for p in first if p.origin not in self.seeds and self._is_slow_format(p.placement)}
            first = tuple(p for p in first if p.origin not in ONLY_PRICES | slow)
        if proposals := tuple(untried(first, history)):
            return proposals
        later = self._later_proposals(self.costs(history), history)
        return tuple(islice(untried(later, history), self.width))

    @cached_property
    def float_ms(self) -> float:
        return sum(layer.time_ms or 0.0 for layer in self.float_layers)

    @cached_property
    def groups(self) -> list[Group]:
        return fusion_groups(self.model, self.float_layers)

    def _first_batch(self, history: Sequence[Trial]) -> tuple[Proposal, ...]:
        """Weight formats for all weights, the seeds, and everything quantized in fused units. Placements that may ship
        come first, in case time runs out; weight formats come last if predicted to gain less than pairs usually do."""
        bits = self._weight_placements(history)
        rest = {name: p for name, p in bits.items() if self._is_slow_format(p)}
        parts = partition(self.model, self.possible, self.groups)
        first = {n: p for n, p in bits.items() if n not in rest} | dict(self.seeds)
        return tuple(_named(first | {FUSED_UNITS: parts.placement(everything(parts))} | rest))

    def _is_slow_format(self, placement: Placement) -> bool:
        """Whether a placement is weight formats alone that are predicted to gain less than Q/DQ pairs usually do."""
        return not placement.edges and expected_share(self.format_shares, placement) >= USUAL_SHARE

    def _weight_placements(self, history: Sequence[Trial]) -> dict[str, Placement]:
        """Placements without pairs, by name: all weights in one family of weight formats, without families that miss
        the limits. If one does, the mixture with the fewest bytes that meets them is added."""
        judged = {trial.placement: trial.holds is not False for trial in history}
        bits = weights_by_family(self.format_shares)
        held = {name: p for name, p in bits.items() if (judged[p] if p in judged else self._may_hold(p))}
        if held == bits or self.noise is None or self.noise.limit is None:
            return bits
        costs = replace(self, format_shares=shares_by_bytes(self.format_shares)).costs(())
        floats = tuple(replace(price, as_quantized=inf) for price in costs.prices)
        decision = cut_within(replace(costs, prices=floats), self.noise, RESERVE * self.noise.limit)
        mixed = costs.partition.placement(decision)
        if mixed and self._may_hold(mixed) and mixed not in held.values():
            return {"weights in fewer bits": mixed} | held
        return held

    def _may_hold(self, placement: Placement) -> bool:
        return self.noise is None or self.noise.fits(placement, ())

    def _later_proposals(self, costs: Costs, history: Sequence[Trial]) -> Iterator[Proposal]:
        """After the first batch: the optimum by learned costs (already built if nothing changes any more), placements
        near the best one, and the fallbacks."""
        optima = []
        for raised in (True, False) if self.is_hurried else (False,):  # a cut that builds on guesses is often slow
            prices = self.costs(history, raised=True) if raised else costs
            for decision in self._optima(prices, history, raised=raised):
                optima.append(self._proposal(costs, decision))
                yield optima[-1]
        yield from sorted(self._first_batch(history), key=lambda p: p.origin in ONLY_PRICES)
        failed = {t.placement for t in history if judge(t, self.plan) is None}
        stuck = any(proposal.placement in failed for proposal in optima)
        slowest = (1 + BUILD_SPREAD) * costs.ms(best_of(history))
        for proposal in chain(self._polish(costs, history, stuck=stuck), _named(self.fallbacks)):
            placement = proposal.placement
            is_slow = proposal.predicted is None and costs.ms(placement) > slowest
            if (stuck or not is_slow) and (self.noise is None or self.noise.fits(placement, history)):
                yield proposal

    def _optima(self, costs: Costs, history: Sequence[Trial], *, raised: bool = False) -> Iterator[Decision]:
        """Optimal decisions by learned costs. With several contexts there are also those by the costs of each, and
        those predicted to be slower than float in none come first. `raised`: costs that no build shows are raised."""
        if not self.contexts:
            yield from self._optima_of(costs, history)
            return
        apart = []
        for shares in self.contexts:
            search = replace(self, float_layers=_layers_at(shares, self.float_layers), contexts=())
            known = [_trial_at(shares, trial) for trial in history]
            apart.append((search, known, search.costs(known, raised=raised)))
        found = dict.fromkeys(costs.partition.placement(decision) for decision in self._optima_of(costs, history))
        for search, known, own in apart:
            found |= dict.fromkeys(own.partition.placement(decision) for decision in search._optima_of(own, known))

        def is_slower(placement: Placement) -> bool:
            return any(own.ms(placement) > search.float_ms for search, _, own in apart)

        for placement in sorted(found, key=is_slower):
            yield costs.partition.decision(placement)

    def _optima_of(self, costs: Costs, history: Sequence[Trial]) -> Iterator[Decision]:
        """The optimal decisions within the limits on noise: by simulated noise, or one for each guess of the allowed
        sum."""
        if self.noise is None:
            yield cut(costs)
        elif (bound := self.noise.bound(history)) is not None:
            yield cut_holding(costs, self.noise.corrected(history), bound)
        else:
            for level in self.noise.levels(history):
                yield cut_within(costs, self.noise, level)

    def _polish(self, costs: Costs, history: Sequence[Trial], *, stuck: bool) -> Iterator[Proposal]:
        """The best placement with its closest decisions reversed: a few kinds of units together, so that the build
        shows their costs, and then each kind alone.

        `stuck`: optima only lead to builds that fail; then every kind is tried, the closest first.
        """
        best = best_of(history)
        ratio = ratios_to_float(history, self.plan)[best]
        base = costs.partition.decision(best)
        close = CLOSE_SHARE * ratio * self.float_ms
        losses = sorted((loss, kind) for kind, loss in margins(costs, base).items())
        kinds = [kind for loss, kind in losses if stuck or loss <= close]
        groups = [kinds[i : i + POLISHED_KINDS] for i in range(0, len(kinds), POLISHED_KINDS)]
        for group in (*groups, *([kind] for kind in kinds)):
            other = flip(costs, base, group)
            predicted = ratio + (costs.total(other) - costs.total(base)) / self.float_ms
            yield Proposal("polish", costs.partition.placement(other), predicted=predicted, wants_layers=True)

    def optima(self, history: Sequence[Trial]) -> Iterator[Proposal]:
        """The optimum of costs learned from any builds, if predicted to beat the best so far by more than
        `CLOSE_SHARE`."""
        costs = self.costs(history)
        most = (1 - CLOSE_SHARE) * costs.ms(best_of(history))
        for decision in self._optima(costs, history):
            if costs.total(decision) < most:
                yield self._proposal(costs, decision)

    def _proposal(self, costs: Costs, decision: Decision) -> Proposal:
        predicted, placement = costs.total(decision) / self.float_ms, costs.partition.placement(decision)
        return Proposal(CUT, placement, predicted=predicted, wants_layers=True)

    def costs(self, history: Sequence[Trial], *, raised: bool = False, cuts: Collection[Edge] = ()) -> Costs:
        """Learn costs for the float build's fusion groups, each split as it ran fastest, and at the edges `cuts`."""
        ratios = ratios_to_float(history, self.plan)
        floats = attribute(self.model, Placement(), self.float_layers, self.float_ms)
        times = [floats]
        for trial in sorted(history, key=lambda trial: -ratios.get(trial.placement, 0.0)):  # the fastest count most
            if trial.layers and trial.placement in ratios:
                ms = ratios[trial.placement] * self.float_ms
                build = attribute(self.model, trial.placement, trial.layers, ms)
                times.append(with_float_times(self.model, build, floats))
        groups: Iterable[Group] = self._units(times)
        if cuts:
            groups = chain.from_iterable(split(self.model, group, cuts) for group in groups)
        parts = partition(self.model, self.possible, groups, self.format_shares)
        return learn(parts, times, raised=raised)

    @cached_property
    def _members(self) -> list[tuple[Group, tuple[Edge, ...], str]]:
        members = []
        for group in self.groups:
            kind = kind_of(self.model, tuple(self.model.index_of[name] for name in group))
            members.append((group, inner_edges(self.model, group, self.possible), kind))
        return members

    def _units(self, times: Sequence[BuildTimes]) -> Iterator[Group]:
        """The float build's groups, each split by pairs inside as groups of its kind ran fastest, or whole."""
        least = defaultdict[str, dict[frozenset[int], float]](dict)  # by kind, for each set of inner edges with pairs
        for group, edges, kind in self._members:
            for build in times:
                spent = group_ms(self.model, group, build)
                if spent is not None:
                    chosen = frozenset(i for i, e in enumerate(edges) if e in build.placement)
                    least[kind][chosen] = min(spent, least[kind].get(chosen, spent))
        for group, edges, kind in self._members:
            splits = sorted((spent, len(chosen), sorted(chosen)) for chosen, spent in least[kind].items())
            best = splits[0][2] if splits else []
            yield from split(self.model, group, {edges[i] for i in best if i < len(edges)})


def _layers_at(shares: Sequence[float], layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Layers with their times under one context's weights; the mean time where a layer has no parts."""
    return tuple(
        replace(layer, time_ms=float(np.dot(shares, layer.parts)), parts=()) if layer.parts else layer
        for layer in layers
    )


def _trial_at(shares: Sequence[float], trial: Trial) -> Trial:
    result, layers = trial.result, None if trial.layers is None else _layers_at(shares, trial.layers)
    if isinstance(result, Measurement) and result.parts:
        result = result.mean(shares)
    return replace(trial, result=result, layers=layers)


def _named(placements: Mapping[str, Placement]) -> Iterator[Proposal]:
    return (Proposal(name, placement, wants_layers=True) for name, placement in placements.items())
