"""Region search: rules for the whole model first, then one pattern after the other, in all its instances.

Phase 1 measures the placements of rules, of an imported Q/DQ model and of the pattern cache. Phase 2 takes the best of
these and, for each pattern in the order of its work, tries what the other placements have there, no pairs, and all
pairs. Phase 3 flips a few insertion points of a pattern at random. Changes that win alone are also tried together.
Weights that may be stored in fewer bits are tried in each weight format, pattern by pattern, in place of the pairs
around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, islice
from operator import not_

import numpy as np

from qdqtune.graph.model import Model
from qdqtune.graph.operators import work
from qdqtune.placement.possible import consistent
from qdqtune.search import best_of, ratios_to_float
from qdqtune.search.costs.noise import DOUBT, Noise
from qdqtune.search.costs.units import FormatShares
from qdqtune.search.regions import patterns
from qdqtune.search.regions.patterns import Pattern
from qdqtune.search.regions.region import Point, Scheme
from qdqtune.timing.ratios import Plan, judge
from qdqtune.types import Edge, Placement, Proposal, Trial, WeightFormat

WITHIN_LIMITS = "within the limits"
"""The origin of placements that are estimated to hold the limits on accuracy."""
LIMIT_TRIES = 6
"""How often placements with that origin are proposed: each build improves the estimate of noise. Chosen, not
measured."""

BATCH = 4
"""Proposals at a time. All of a batch are compared with the same placement, so they can be measured in any order."""


@dataclass(frozen=True)
class Config:
    """Parameters of region search, with the names and defaults of NVIDIA ModelOpt's autotuner."""

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
    """See the module. `seeds` are whole-model placements by name, in the order in which they are tried.

    `cached` holds schemes of earlier runs by pattern digest, fastest first. Where accuracy is limited, `noise`
    estimates it, and `within` gives a placement for a sum of noise. `width` is how many to propose at a time, if more
    than `BATCH`; `format_shares` are the weight formats that weights may have.
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
    within: Callable[[float], Placement] = lambda _: Placement()
    width: int = BATCH
    format_shares: FormatShares = field(default_factory=dict)

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        """See `Strategy`."""
        tried = {t.placement.digest for t in history} | {Placement().digest}
        spent: dict[str, int] = {}
        for trial in history:
            spent[trial.proposal.pattern] = spent.get(trial.proposal.pattern, 0) + 1
        fresh = self._fresh(self._ideas(history), tried, spent)
        return tuple(islice(fresh, max(BATCH, self.width)))

    def variations(
        self, pattern: Pattern, best: Placement, parents: Sequence[Placement], number: int
    ) -> Iterator[Proposal]:
        """Proposals for one pattern, for callers with a loop of their own: as the seeds have it on top of `best`, then
        flips of the `parents`. `number` is that of the next trial. Earlier trials are not considered."""
        alone = replace(self, patterns=(pattern,))
        flipped = (idea for parent in parents for idea in alone._mutations(parent, number))
        return self._fresh(chain(alone._alternatives(best, list(self.seeds.items())), flipped), set(), {})

    def _fresh(self, ideas: Iterator[Proposal], tried: set[str], spent: dict[str, int]) -> Iterator[Proposal]:
        """The ideas that were not measured yet, each placement once, within the number of schemes per pattern."""
        for idea in ideas:
            placement = consistent(self.model, idea.placement)
            if placement.digest in tried:
                continue
            if idea.pattern and spent.get(idea.pattern, 0) >= self.config.schemes_per_region:
                continue
            tried.add(placement.digest)
            spent[idea.pattern] = spent.get(idea.pattern, 0) + 1
            yield Proposal(idea.origin, placement, idea.pattern)

    def _ideas(self, history: Sequence[Trial]) -> Iterator[Proposal]:
        seeds = {"pattern cache": self._from_cache(), **self.seeds}
        suggestions = {name: c for name, p in seeds.items() if (c := consistent(self.model, p))}
        waiting = [name for name, p in suggestions.items() if not any(t.placement == p for t in history)]
        for name in waiting:
            yield Proposal(name, suggestions[name])
        if waiting:
            return  # patterns vary the best suggestion: wait until it is known
        best = best_of(history)
        ranked = self._ranked(suggestions, history)
        ideas = chain(
            self._merged_winners(history, best), self._alternatives(best, ranked), self._mutations(best, len(history))
        )
        if self.noise is None:
            yield from ideas
            return
        if sum(t.proposal.origin == WITHIN_LIMITS for t in history) < LIMIT_TRIES:
            yield from (Proposal(WITHIN_LIMITS, self.within(level)) for level in self.noise.levels(history))
        yield from (idea for idea in ideas if self._may_hold(consistent(self.model, idea.placement), history))

    def _may_hold(self, placement: Placement, history: Sequence[Trial]) -> bool:
        """Whether a placement may hold the limits on noise; up to `DOUBT` times the allowed sum where it is not
        simulated."""
        noise = self.noise
        if noise is None or noise.bound(history) is not None:
            return noise is None or noise.fits(placement, history)
        return noise.summed(placement) <= DOUBT * noise.allowed(history)

    def _from_cache(self) -> Placement:
        """The fastest cached scheme of every pattern that has one."""
        edges: set[Edge] = set()
        stored: dict[Edge, WeightFormat] = {}
        for pattern in self.patterns:
            for scheme in islice(self.cached.get(pattern.digest, ()), 1):
                edges |= self._edges(pattern, scheme.points)
                stored |= self._stored(pattern, scheme)
        return _placement(edges, stored)

    def _ranked(self, suggestions: Mapping[str, Placement], history: Sequence[Trial]) -> list[tuple[str, Placement]]:
        """The measured suggestions by their ratio to the float model, the fastest first."""
        ratios = ratios_to_float(history, self.plan)
        known = [(name, p) for name, p in suggestions.items() if p in ratios]
        return sorted(known, key=lambda item: ratios[item[1]])

    def _merged_winners(self, history: Sequence[Trial], best: Placement) -> Iterator[Proposal]:
        """Changes of patterns that were faster than an earlier best but not accepted, on top of the present best."""
        for trial in reversed(history[-2 * max(BATCH, self.width) :]):
            ratio = judge(trial, self.plan)
            if trial.proposal.pattern and not trial.accepted and ratio is not None and ratio.verdict == "faster":
                if trial.holds is False:
                    continue
                added, removed = trial.placement - trial.against, trial.against - trial.placement
                yield Proposal("merged winners", (best - removed) | added)

    def _alternatives(self, best: Placement, ranked: Sequence[tuple[str, Placement]]) -> Iterator[Proposal]:
        """Every pattern as another suggestion has it: the first alternative for all patterns, then the second, and so
        on.

        Patterns with much work come first, so composites before the regions inside them. The suggestion that ranks
        second comes first, then those with the fewest pairs: if the best one loses somewhere, it is mostly by
        quantizing too much.
        """
        ordered = sorted(self.patterns, key=lambda p: (-self._work(p), p.digest))
        domains = {p.digest: self._domain(p) for p in ordered}
        fewest_first = sorted(ranked[2:], key=lambda item: len(item[1]))
        first, later = self._weight_options()
        options = [(f"as {name}", p) for name, p in (*ranked[1:2], *fewest_first[:1])]
        options += [("float", Placement()), *first]
        options += [(f"as {name}", p) for name, p in (*fewest_first[1:], *ranked[:1])]
        options += [("all", Placement(self.possible)), *later]
        for name, other in options:
            for pattern in ordered:
                domain = domains[pattern.digest]
                yield Proposal(name, _within(best, domain, other), pattern.digest)
        for pattern in ordered:
            for scheme in self.cached.get(pattern.digest, ()):
                other = _placement(self._edges(pattern, scheme.points), self._stored(pattern, scheme))
                yield Proposal("cached", _within(best, domains[pattern.digest], other), pattern.digest)

    def _weight_options(self) -> tuple[list[tuple[str, Placement]], list[tuple[str, Placement]]]:
        """Placements with all weights in one weight format, by name: first the fastest format with 4 bits and the
        fastest with 8, then the others."""
        shares: dict[WeightFormat, list[float]] = {}
        for each in self.format_shares.values():
            for weight_format, share in each.items():
                shares.setdefault(weight_format, []).append(share)
        ordered = sorted(shares, key=lambda s: (sum(shares[s]) / len(shares[s]), s.name))
        best = {bits: next(s for s in ordered if s.bits == bits) for bits in {s.bits for s in ordered}}
        options = [
            (f"weights as {s.name}", Placement.of((), ((e, s) for e, each in self.format_shares.items() if s in each)))
            for s in ordered
        ]
        chosen = [s in best.values() for s in ordered]
        return list(compress(options, chosen)), list(compress(options, map(not_, chosen)))

    def _mutations(self, best: Placement, number: int) -> Iterator[Proposal]:
        """Random flips of a few insertion points of one pattern in every instance; the random numbers depend on `seed`
        and the trial number alone."""
        rng = np.random.default_rng((self.seed, number))
        movable = [p for p in self.patterns if p.points]
        if not movable:
            return
        weights = np.array([1e-9 + self._work(p) for p in movable]) ** 0.5
        for _ in range(self.config.maximum_generation_attempts):
            pattern = movable[int(rng.choice(len(movable), p=weights / weights.sum()))]
            count = int(rng.integers(1, 1 + min(self.config.maximum_mutations, len(pattern.points))))
            flipped = [pattern.points[int(i)] for i in rng.choice(len(pattern.points), count, replace=False)]
            edges, stored = set(best.edges), dict(best.weight_formats)
            for point in flipped:
                own = self._edges(pattern, [point])
                able = self._formats_of(pattern, point)
                turn = int(rng.integers(1 + len(able))) if able else 0
                if turn == 0:
                    edges = edges - own if own <= edges else edges | own
                    continue
                fresh = patterns.stored(pattern, [(point, able[turn - 1])])
                is_so = all(stored.get(e) == s for e, s in fresh.items())
                edges -= own
                stored = {e: s for e, s in stored.items() if e not in fresh} | ({} if is_so else fresh)
            yield Proposal("mutated", _placement(edges, stored), pattern.digest)

    def _formats_of(self, pattern: Pattern, point: Point) -> list[WeightFormat]:
        """The weight formats that the weights of a point may have in every instance."""
        if not self.format_shares:
            return []
        first, *others = [self.format_shares.get(e, {}) for edges in pattern.edges.values() for e in edges[point]] or [
            {}
        ]
        return [s for s in first if all(s in other for other in others)]

    def _stored(self, pattern: Pattern, scheme: Scheme) -> dict[Edge, WeightFormat]:
        """The weight formats of a scheme by edge, as far as the weights may have them."""
        return {
            e: s
            for e, s in patterns.stored(pattern, scheme.weight_formats).items()
            if s in self.format_shares.get(e, {})
        }

    def _edges(self, pattern: Pattern, points: Sequence[Point] | frozenset[Point]) -> frozenset[Edge]:
        """The edges of some insertion points of a pattern, over all instances."""
        chosen = frozenset(points)
        parts = (e for edges in pattern.edges.values() for point, e in edges.items() if point in chosen)
        return frozenset().union(*parts) & self.possible

    def _domain(self, pattern: Pattern) -> frozenset[Edge]:
        """Every possible edge that a node of the pattern reads or writes, in all instances, and its weights."""
        inside = {n for r in pattern.instances for n in r.all_nodes()}
        names = {self.model.nodes[n].name for n in inside}
        made = {t for n in inside for t in self.model.nodes[n].outputs}
        weights = (e for e in self.format_shares if e.node in names)
        return frozenset(e for e in self.possible if e.node in names or e.tensor in made).union(weights)

    def _work(self, pattern: Pattern) -> float:
        """The work of a pattern: multiplications of products, elements of other operators."""
        return sum(work(self.model, self.model.nodes[n]) for r in pattern.instances for n in r.all_nodes())


def _placement(edges: Iterable[Edge], weight_formats: Mapping[Edge, WeightFormat]) -> Placement:
    """A placement of pairs, and of weight formats where no pair stands."""
    own = frozenset(edges)
    return Placement.of(own, ((e, s) for e, s in weight_formats.items() if e not in own))


def _within(best: Placement, domain: frozenset[Edge], other: Placement) -> Placement:
    """The best placement with another one's pairs and weight formats on the edges of `domain`."""
    weight_formats = {e: s for e, s in best.weight_formats.items() if e not in domain}
    weight_formats |= {e: s for e, s in other.weight_formats.items() if e in domain}
    return _placement((best.edges - domain) | (other.edges & domain), weight_formats)
