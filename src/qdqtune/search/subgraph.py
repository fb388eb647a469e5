"""Subgraph search: puts the groups that gained alone together, and tries them on the whole model.

The first build quantizes all of these groups. Then come placements by rules, and optima of the costs that these builds
show, since engines fuse across the groups of the float build in 8 bits. If all groups together do not win, they are
added to the best placement in batches, the largest expected savings first, and a batch that loses is halved. b bad
groups among n take b log n builds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice

from qdqtune.search import best_of, untried
from qdqtune.search.costs.decisions import cut_holding, cut_within
from qdqtune.search.costs.output_noise import RESERVE, Noise
from qdqtune.search.costs.profiles import GroupSelection
from qdqtune.search.costs.units import Partition, format_in
from qdqtune.search.cut import CUT, CutSearch
from qdqtune.search.region import WITHIN_LIMITS
from qdqtune.types import Placement, Proposal, Trial

CHANGE = "change "
"""The beginning of the origins of batches."""

OPTIMUM_BUILDS = 4
"""The most optima that are built; each build improves the costs."""


@dataclass(frozen=True)
class SubgraphSearch:
    """Subgraph search (see the module). `seeds` are further placements to try, in this order. Without `incremental`,
    only all groups together are tried. `by_cut` finds the optimum of the costs that builds show, with groups split and
    joined as they ran fastest."""

    selection: GroupSelection
    seeds: Mapping[str, Placement] = field(default_factory=dict)
    incremental: bool = True
    by_cut: CutSearch | None = None

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        """See `Strategy`: one proposal at a time, as each result decides the next."""
        every = Proposal("all groups", self.all_accepted, predicted=self.selection.ratio, wants_layers=True)
        seeds = self.seeds if self.incremental else {}
        fixed = [every, *(Proposal(name, placement, wants_layers=True) for name, placement in seeds.items())]
        whole = [t for t in history if not t.proposal.origin.startswith(CHANGE)]
        optima: Iterable[Proposal] = ()
        if (
            self.by_cut is not None
            and self.incremental
            and sum(t.proposal.origin == CUT for t in whole) < OPTIMUM_BUILDS
        ):
            optima = self.by_cut.optima(whole)
        if proposals := tuple(islice(untried(chain(fixed, optima), history), 1)):
            return proposals
        return self._next_batch(history, whole) if self.incremental else ()

    @property
    def parts(self) -> Partition:
        return self.selection.parts

    @cached_property
    def all_accepted(self) -> Placement:
        return self.selection.placement()

    @cached_property
    def savings(self) -> Mapping[int, float]:
        """The ms that each accepted group is expected to save, largest first."""
        return dict(sorted(self.selection.savings().items(), key=lambda item: (-item[1], item[0])))

    def _next_batch(self, history: Sequence[Trial], whole: Sequence[Trial]) -> Sequence[Proposal]:
        """The next batch of groups without a result; batches and their halves follow from the results so far, and the
        first one from the best of the `whole` placements."""
        if any(t.placement == self.all_accepted and t.accepted for t in whole):
            return ()
        trials = {t.placement: t for t in history}
        base = best_of(whole)
        pending = [[n for n in self.savings if self._differs(n, base, self.all_accepted)]]
        while pending:
            batch, *pending = pending
            placement = self.mixed(base, self.all_accepted, batch)
            trial = trials.get(placement)
            if trial is None and placement != base and placement:
                first = self.parts.model.nodes[self.parts.units[batch[0]].nodes[0]].name
                more = f" and {len(batch) - 1} more groups" if len(batch) > 1 else ""
                return (Proposal(f"{CHANGE}{first}{more}", placement, wants_layers=True),)
            if trial is not None and trial.accepted and trial.against == base:
                base = placement
            elif len(batch) > 1:
                pending = [batch[: len(batch) // 2], batch[len(batch) // 2 :], *pending]
        return ()

    def _differs(self, number: int, a: Placement, b: Placement) -> bool:
        """Whether two placements treat a group differently, or only one stores an output of the group in 8 bits."""
        unit = self.parts.units[number]
        own = any((e in a) != (e in b) for e in (*unit.inputs, *unit.weights, *unit.inner))
        own = own or format_in(unit, a) != format_in(unit, b)
        leaving = [self.parts.edges[t] for t in self.parts.leaving(unit)]
        return own or any(all(e in a for e in edges) != all(e in b for e in edges) for edges in leaving)

    def mixed(self, base: Placement, other: Placement, groups: Collection[int]) -> Placement:
        """`base` with some groups as another placement has them.

        If both groups beside an edge come from one placement, it decides. Else a pair stands if the reader runs in 8
        bits and its placement has the pair, or if the writer's placement stores the tensor in 8 bits.
        """
        parts = self.parts
        source = [other if unit.number in groups else base for unit in parts.units]
        views = {p: parts.decision(p) for p in (base, other)}
        edges = set()
        for edge in parts.possible:
            reader = parts.owner[edge.node] if edge.node else parts.producer[edge.tensor]
            mine, theirs = source[reader], source[parts.producer.get(edge.tensor, reader)]
            stands = edge in mine
            if mine != theirs:
                stands = (stands and reader in views[mine].quantized) or edge.tensor in views[theirs].stored
            if stands:
                edges.add(edge)
        paired = {edge.node for edge in edges}
        weight_only = base.weight_only | other.weight_only
        own = ((e, s) for e, s in weight_only if source[parts.owner[e.node]].weight_formats.get(e) == s)
        return Placement.of(edges, ((e, s) for e, s in own if e.node not in paired))


def with_quiet_seeds(search: SubgraphSearch, noise: Noise | None) -> SubgraphSearch:
    """The search with further seeds: optima of its costs at the allowed noise; without simulation, at two shares of
    it."""
    if noise is None or noise.limit is None:
        return search
    costs, seeds = search.selection.costs, dict(search.seeds)
    if (bound := noise.bound(())) is not None:
        return replace(search, seeds=seeds | {WITHIN_LIMITS: search.parts.placement(cut_holding(costs, noise, bound))})
    for share in (RESERVE, RESERVE / 2):
        quiet = search.parts.placement(cut_within(costs, noise, share * noise.limit))
        seeds[f"{WITHIN_LIMITS}, {share:.0%} of the noise"] = quiet
    return replace(search, seeds=seeds)
