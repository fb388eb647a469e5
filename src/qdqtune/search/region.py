"""Region search: placements by rule for the whole model first, then one pattern after the other, changed in all its
instances.

Phase 1 measures placements by rules, of an imported Q/DQ model and of the pattern cache. Phase 2 takes the best of them
and tries for each pattern, those with the most work first, what the other placements have there, no pairs, and all
pairs. Phase 3 mutates the fastest schemes of a pattern by flipping a few insertion points at random, until each pattern
has had its number of schemes. Changes that win alone are also tried together. Weight formats only come from phase 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice

import numpy as np

from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import COMPUTE, work
from qdqtune.placement.possible import compute_edges, consistent
from qdqtune.search import best_of, ratios_to_float
from qdqtune.search.by_latency import placement_within
from qdqtune.search.costs.output_noise import DOUBT, Noise
from qdqtune.search.regions.discovery import Point, Scheme
from qdqtune.search.regions.patterns import Pattern
from qdqtune.timing.ratios import Plan, judge
from qdqtune.types import Edge, Placement, Proposal, Trial

MUTATED = "mutated"
"""The origin of placements with a few insertion points of a pattern changed at random."""
WITHIN_LIMITS = "within the limits"
"""The origin of placements estimated to meet the accuracy limits."""
LIMIT_TRIES = 6
"""How many `WITHIN_LIMITS` placements are proposed: each build improves the estimate of noise. Chosen, not measured."""

BATCH = 4
"""Proposals in a batch, all compared with the same placement, so that they can be measured in any order."""


@dataclass(frozen=True)
class Config:
    """Parameters of region search, with names and defaults of NVIDIA ModelOpt's autotuner."""

    maximum_sequence_region_size: int = 10
    minimum_topdown_search_size: int = 10
    top_percent_to_mutate: float = 0.1
    minimum_schemes_to_mutate: int = 10
    maximum_mutations: int = 3
    maximum_generation_attempts: int = 100
    pattern_cache_minimum_distance: int = 4
    pattern_cache_max_entries_per_pattern: int = 32
    schemes_per_region: int = 50

    def __post_init__(self) -> None:
        sizes = self.maximum_sequence_region_size, self.minimum_topdown_search_size
        counts = self.maximum_mutations, self.maximum_generation_attempts, self.pattern_cache_max_entries_per_pattern
        if min(*sizes, *counts) < 1:
            raise ValueError("sizes and counts are at least 1")
        if self.schemes_per_region < 0:
            raise ValueError("schemes_per_region is at least 0")


@dataclass(frozen=True)
class RegionSearch:
    """Region search (see the module). `seeds` are whole-model placements by name, tried in this order.

    `cached` has schemes of earlier runs by pattern digest, fastest first. `noise` estimates noise, under accuracy
    limits. Batches have `width` proposals, or `BATCH` if that is more.
    """

    model: Model
    patterns: Sequence[Pattern]
    possible: frozenset[Edge]
    seeds: Mapping[str, Placement]
    cached: Mapping[str, Sequence[Scheme]] = field(default_factory=dict)
    config: Config = Config()
    plan: Plan = field(default_factory=Plan)
    seed: int = 0
    noise: Noise | None = None
    width: int = BATCH

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        tried = {t.placement for t in history} | {Placement()}
        spent = Counter(t.proposal.pattern for t in history)
        return tuple(islice(self._ideas(history, tried, spent), max(BATCH, self.width)))

    def variations(
        self, pattern: Pattern, best: Placement, parents: Sequence[Placement], number: int
    ) -> Iterator[Proposal]:
        """Proposals for one pattern, for callers with their own loop: `best` with the pattern as each seed has it, then
        mutations of the `parents`, fastest first. `number` is that of the next trial, and seeds the random numbers."""
        alternatives = replace(self, patterns=(pattern,))._alternatives(best, list(self.seeds.items()))
        mutated = self._mutated(pattern, parents, np.random.default_rng((self.seed, number)))
        return self._fresh(chain(alternatives, mutated), set(), Counter())

    def _fresh(
        self,
        ideas: Iterable[Proposal],
        tried: set[Placement],
        spent: Counter[str],
        may_hold: Callable[[Placement], bool] = lambda _: True,
    ) -> Iterator[Proposal]:
        """The proposals not measured yet, each placement once, up to the number of schemes per pattern; they are added
        to `tried` and `spent`. Ends after `maximum_generation_attempts` mutations that `may_hold` refused."""
        refused = 0
        for idea in ideas:
            if self._is_done(idea.pattern, spent) or (placement := consistent(self.model, idea.placement)) in tried:
                continue
            if not may_hold(placement):
                refused += idea.origin == MUTATED
                if refused == self.config.maximum_generation_attempts:
                    return
                continue
            tried.add(placement)
            spent[idea.pattern] += 1
            yield Proposal(idea.origin, placement, idea.pattern)

    def _is_done(self, pattern: str, spent: Counter[str]) -> bool:
        return pattern != "" and spent[pattern] >= self.config.schemes_per_region

    def _ideas(self, history: Sequence[Trial], tried: set[Placement], spent: Counter[str]) -> Iterator[Proposal]:
        seeds = {**self.from_cache(), **self.seeds}
        suggestions = {name: c for name, p in seeds.items() if (c := consistent(self.model, p))}
        waiting = [Proposal(name, p) for name, p in suggestions.items() if p not in tried]
        yield from self._fresh(waiting, tried, spent)
        if waiting:
            return  # patterns vary the best suggestion: wait until it is known
        best, ratios = best_of(history), ratios_to_float(history, self.plan)
        measured = [(name, p) for name, p in suggestions.items() if p in ratios]
        measured.sort(key=lambda item: ratios[item[1]])
        ideas = chain(
            self._merged_winners(history, best),
            self._alternatives(best, measured),
            self._mutations(best, history, spent),
        )
        noise = self.noise
        if noise is not None and sum(t.proposal.origin == WITHIN_LIMITS for t in history) < LIMIT_TRIES:
            quiet = (placement_within(self.model, self.possible, noise, level) for level in noise.levels(history))
            yield from self._fresh((Proposal(WITHIN_LIMITS, placement) for placement in quiet), tried, spent)
        yield from self._fresh(ideas, tried, spent, lambda placement: self._may_hold(placement, history))

    def _may_hold(self, placement: Placement, history: Sequence[Trial]) -> bool:
        """Whether a placement may meet the limits on noise; without simulation, at up to `DOUBT` times the allowed
        sum."""
        noise = self.noise
        if noise is None:
            return True
        if noise.bound(history) is not None:
            return noise.fits(placement, history)
        return noise.summed(placement) <= DOUBT * noise.allowed(history)

    def from_cache(self) -> dict[str, Placement]:
        """The placement with the fastest cached scheme of each pattern, by its origin; empty without any."""
        edges: set[Edge] = set()
        for pattern in self.patterns:
            for scheme in self.cached.get(pattern.digest, ())[:1]:
                edges |= self._edges(pattern, scheme)
        placement = consistent(self.model, Placement(frozenset(edges)))
        return {"pattern cache": placement} if placement else {}

    def _merged_winners(self, history: Sequence[Trial], best: Placement) -> Iterator[Proposal]:
        """The current best with changes of patterns that recently won against an earlier best, but were not
        accepted."""
        for trial in reversed(history[-2 * max(BATCH, self.width) :]):
            ratio = judge(trial, self.plan)
            is_faster = ratio is not None and ratio.verdict == "faster" and trial.holds is not False
            if trial.proposal.pattern and not trial.accepted and is_faster:
                added, removed = trial.placement - trial.against, trial.against - trial.placement
                yield Proposal("merged winners", (best - removed) | added)

    def _alternatives(self, best: Placement, ranked: Sequence[tuple[str, Placement]]) -> Iterator[Proposal]:
        """The best placement with one pattern as another suggested placement has it: the first alternative for each
        pattern, then the second, and so on.

        Patterns with much work come first, so composites before regions inside them. The second-best suggestion comes
        first, then those with the fewest pairs, as the best one mostly loses by quantizing too much.
        """
        ordered = sorted(self.patterns, key=lambda p: (-self._work(p), p.digest))
        domains = {p.digest: self._domain(p) for p in ordered}
        best_first = [(f"as {name}", placement) for name, placement in ranked]
        fewest_first = sorted(best_first[2:], key=lambda item: len(item[1]))
        options = [*best_first[1:2], *fewest_first[:1], ("float", Placement())]
        options += [*fewest_first[1:], *best_first[:1], ("all", Placement(self.possible))]
        for name, other in options:
            for pattern in ordered:
                domain = domains[pattern.digest]
                yield Proposal(name, _with_part_of(best, domain, other), pattern.digest)
        for pattern in ordered:
            for scheme in self.cached.get(pattern.digest, ()):
                other = Placement(self._edges(pattern, scheme))
                yield Proposal("cached", _with_part_of(best, domains[pattern.digest], other), pattern.digest)

    def _mutations(self, best: Placement, history: Sequence[Trial], spent: Counter[str]) -> Iterator[Proposal]:
        """Mutations of patterns drawn at random, weighted by work, until none is left. Random numbers only depend on
        `seed` and the number of trials."""
        rng = np.random.default_rng((self.seed, len(history)))
        ratios = ratios_to_float(history, self.plan)
        able = {p.digest: p for p in self.patterns if p.points and not self._is_done(p.digest, spent)}
        weights = {digest: (1e-9 + self._work(p)) ** 0.5 for digest, p in able.items()}
        parents = {digest: self._parents(p, best, history, ratios) for digest, p in able.items()}
        mutated = {digest: self._mutated(p, parents[digest], rng) for digest, p in able.items()}
        while mutated:
            shares = np.array([weights[digest] for digest in mutated])
            digest = list(mutated)[int(rng.choice(len(mutated), p=shares / shares.sum()))]
            idea = None if self._is_done(digest, spent) else next(mutated[digest], None)
            if idea is None:
                del mutated[digest]
            else:
                yield idea

    def _parents(
        self, pattern: Pattern, best: Placement, history: Sequence[Trial], ratios: Mapping[Placement, float]
    ) -> Iterator[Placement]:
        """The placements that mutations of a pattern start from: the best one, and the best one with the pattern as in
        each of its fastest measured schemes."""
        own = [t.placement for t in history if t.proposal.pattern == pattern.digest and t.holds is not False]
        measured = sorted((p for p in own if p in ratios), key=lambda p: ratios[p])
        config, domain = self.config, self._domain(pattern)
        most = max(config.minimum_schemes_to_mutate, int(config.top_percent_to_mutate * len(measured)))
        parents = dict.fromkeys([best, *(_with_part_of(best, domain, other) for other in measured)])
        yield from islice(parents, most)

    def _mutated(self, pattern: Pattern, parents: Iterable[Placement], rng: np.random.Generator) -> Iterator[Proposal]:
        """Placements that differ from one of the `parents`, mostly an early one, in a few random insertion points of a
        pattern, in every instance."""
        known, points, config = list(parents), pattern.points, self.config
        if not points:
            return
        ranks = 1 / np.arange(1, 1 + len(known))
        seen = set[tuple[int, frozenset[Point]]]()
        for _ in range(config.maximum_generation_attempts):
            parent = int(rng.choice(len(known), p=ranks / ranks.sum()))
            count = int(rng.integers(1, 1 + min(config.maximum_mutations, len(points))))
            chosen = frozenset(points[int(i)] for i in rng.choice(len(points), count, replace=False))
            if (parent, chosen) not in seen:
                seen.add((parent, chosen))
                yield Proposal(MUTATED, self._turned(pattern, known[parent], chosen), pattern.digest)

    def _turned(self, pattern: Pattern, parent: Placement, points: Iterable[Point]) -> Placement:
        """`parent` with pairs added on these insertion points of a pattern, or removed from points that have all. The
        other input of a compute operator gets its pair too."""
        fresh, gone = set[Edge](), set[Edge]()
        for point in points:
            own = self._edges(pattern, [point])
            if own <= parent.edges:
                gone |= own
            else:
                fresh |= own | {self._others[e] for e in own if e in self._others}
        return parent.paired((parent.edges | fresh) - gone)

    @cached_property
    def _others(self) -> Mapping[Edge, Edge]:
        """For each of the two inputs of a compute operator the other one: a pair on only one is useless."""
        computing = (compute_edges(n, self.possible) for n in self.model.nodes if n.op in COMPUTE)
        both = [tuple(edges) for edges in computing if len(edges) == 2]
        return {one: other for a, b in both for one, other in ((a, b), (b, a))}

    def _edges(self, pattern: Pattern, points: Iterable[Point]) -> frozenset[Edge]:
        chosen = frozenset(points)
        parts = (edges[point] for edges in pattern.edges.values() for point in chosen & edges.keys())
        return frozenset().union(*parts) & self.possible

    def _domain(self, pattern: Pattern) -> frozenset[Edge]:
        """The edges that nodes of the pattern read, and the possible edges that they write, in all instances."""
        read, written = set[Edge](), set[str]()
        for node in self._nodes(pattern):
            read.update(node.into)
            written.update(node.outputs)
        return frozenset(read).union(e for e in self.possible if e.tensor in written)

    def _nodes(self, pattern: Pattern) -> list[Node]:
        return [self.model.nodes[n] for region in pattern.instances for n in region.all_nodes()]

    def _work(self, pattern: Pattern) -> float:
        return sum(work(self.model, node) for node in self._nodes(pattern))


def _with_part_of(best: Placement, domain: frozenset[Edge], other: Placement) -> Placement:
    """The best placement, but with the pairs and weight formats of `other` on the edges of `domain`."""
    rest = Placement.of(best.edges - domain, (each for each in best.weight_only if each[0] not in domain))
    return rest | Placement.of(other.edges & domain, (each for each in other.weight_only if each[0] in domain))
