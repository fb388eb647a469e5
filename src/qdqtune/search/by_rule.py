"""Search by rule: the cheapest placement by `search.costs.rule_costs` that holds the limits on accuracy.

For engines with 16 bits that do not tell what each node takes. Where builds are timed, the fastest counts, and the
rates of bytes follow from the times; on simulators the cheapest by rule. Builds also show which nodes the engine leaves
to others, and the outputs as it computes them. First everything in 8 bits is built, then everything in 16. If the first
holds the limits and leaves no node, nothing is cheaper. Else the cheapest placements at rising prices on noise lie
between the two. The cheapest of them whose outputs hold the limit when ONNX Runtime computes them goes from there to
fewer bits, in groups of parts and then in single ones, as long as it holds; the result is built. Outputs of the engine
differ from these by its own rounding, so where it misses the limit, or has room left, the limit for ONNX Runtime
follows.

Where that says nothing, the cheapest placements are built by bisection: the noise that sums predict is right in order,
if not in size. If nothing holds, an engine may compute an operator badly that ONNX Runtime computes well: each kind of
operator alone becomes float where all else has 16 bits, then together those that this helped. Once that holds the
limits, these stay float, and the search begins again.

At the end parts of the best placement get fewer bits, those first that save the most for the noise they bring: several
at once, then one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import isfinite, sqrt
from operator import ge

import numpy as np

from qdqtune.search import best_of, ratios_to_float
from qdqtune.search.costs.rule_costs import FLOAT, SIXTEEN, W8A8, W8A16, W16A16, Labels, NoiseOfBits, RuleCosts
from qdqtune.timing.limits import failure
from qdqtune.timing.ratios import Plan
from qdqtune.types import Placement, Proposal, Trial

ALL_8, ALL_16, BY_RULE, FLOATS, NARROWED = "8 bits", "16 bits", "cut by rule", "operators in floats", "narrowed"
"""Origins of proposals: everything in 8 bits, and in 16; the cheapest at a price on noise, or what became of it on ONNX
Runtime; 16 bits but for some kinds of operators; the best so far with a part in fewer bits."""

HELPED = 0.8
"""An operator is to blame if the noise without its pairs is at most this share of that with them. Chosen, not
measured."""

AIMS = 6
"""The most placements from ONNX Runtime that are built. Chosen, not measured."""

FRUITLESS = 4
"""After so many failures in a row the search ends. Chosen, not measured."""

PRICES = 48
"""How many prices on noise are tried, from one at which noise does not matter to one at which nothing else does.
Chosen, not measured."""

DECADES = 12
"""The prices span so many powers of ten. Chosen, not measured."""

RESERVE = 0.9
"""The share of the limit on noise that the first placement between 8 and 16 bits aims at. Chosen, not measured."""

FIRST_HALVINGS = 3
"""An eighth of the parts get fewer bits at once. Chosen, not measured."""

REFUSED = re.compile(r"OpType:(\w+)")
"""How ONNX Runtime names the operator that an execution provider has refused."""


@dataclass(frozen=True)
class RuleSearch:
    """The search (see the module). `limit` is the most noise that the limit on the SQNR allows, None if there is
    none. `simulate` gives the noise of a placement on ONNX Runtime, None if it is not known. `plan` tells how times are
    judged; None where nothing is timed."""

    costs: RuleCosts
    noise: NoiseOfBits
    limit: float | None = None
    simulate: Callable[[Placement], float | None] = lambda placement: None
    plan: Plan | None = None

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        tried = {t.placement for t in history} | {Placement()}
        for proposal in self._proposals(history):
            if proposal.placement not in tried:
                return (proposal,)
        return ()

    def _proposals(self, history: Sequence[Trial]) -> Iterator[Proposal]:
        costs = self.learned(history)
        yield self._proposal(costs, ALL_8, costs.everywhere(W8A8))
        by_placement = {t.placement: t for t in history}
        first = by_placement.get(costs.placement(costs.everywhere(W8A8)))
        leaves = any(costs.off.values())
        if first is None:
            return
        if first.holds is True and failure(first) is None and not leaves:
            return
        wide = costs.everywhere(W16A16)
        if not set(SIXTEEN).isdisjoint(wide):
            yield self._proposal(costs, ALL_16, wide)
        widest = by_placement.get(costs.placement(wide))
        is_short = widest is None or widest.holds is not True or failure(widest) is not None
        if all(failure(t) is not None for t in history[-FRUITLESS:]) and len(history) >= FRUITLESS:
            return
        float_too = leaves or is_short or self.plan is not None
        alike = [t for t in history if costs.keeps_floats(t.placement)]
        path = cache(partial(self._path, costs, float_too=float_too))
        yield from self._simulated(costs, alike, path)
        yield from self._between(costs, alike, path)
        yield from self._without_operators(costs, history, wide)
        yield from self._narrowed(costs, history)

    def learned(self, history: Sequence[Trial]) -> RuleCosts:
        """The costs with what builds have shown: nodes that run elsewhere, operators that are refused in 16 bits, and
        what bytes cost in time."""
        failed = ((t.placement, found.reason) for t in history if (found := failure(t)) is not None)
        refused = (self.costs.in_16_bits(REFUSED.findall(reason), placement) for placement, reason in failed)
        costs = replace(self.costs, refused=self.costs.refused.union(*refused), floats=self._floats(history))
        costs = costs.learned((t.placement, t.layers) for t in history if t.layers)
        return costs if self.plan is None else costs.fitted(ratios_to_float(history, self.plan))

    def _floats(self, history: Sequence[Trial]) -> frozenset[tuple[int, ...]]:
        """The parts in floats of the first placement that holds the limits as some operators are in floats."""
        held = (t.placement for t in history if t.proposal.origin == FLOATS and t.holds and failure(t) is None)
        if (placement := next(held, None)) is None:
            return frozenset()
        labels = zip(self.costs.parts, self.costs.labels(placement), strict=True)
        return frozenset(part.nodes for part, label in labels if label == FLOAT)

    def _proposal(self, costs: RuleCosts, origin: str, labels: Labels) -> Proposal:
        return Proposal(origin, costs.placement(labels), wants_layers=True)

    # ------------------------------------------------ on ONNX Runtime

    def _simulated(
        self, costs: RuleCosts, history: Sequence[Trial], path_of: Callable[[], list[Labels]]
    ) -> Iterator[Proposal]:
        """The cheapest placement that is found with as much noise on ONNX Runtime as should hold the limit here."""
        built = [t for t in history if t.proposal.origin == BY_RULE and failure(t) is None]
        if self.limit is None or len(built) >= AIMS:
            return
        aim = self._expected(built, self.limit)
        path = path_of()
        low, high = 0, len(path) - 1
        while low < high:
            middle = (low + high) // 2
            if (noise := self.simulate(costs.placement(path[middle]))) is None:
                return
            low, high = (low, middle) if noise <= aim else (middle + 1, high)
        yield self._proposal(costs, BY_RULE, self._lowered(costs, path[high], aim))

    def _expected(self, built: Sequence[Trial], limit: float) -> float:
        """The noise on ONNX Runtime with which the limit should just hold, as these trials show."""
        known = [(found, t) for t in built if t.accuracy is not None and (found := self.simulate(t.placement))]
        if not known:
            return RESERVE * limit
        quiet = max((found for found, t in known if t.holds), default=0.0)
        loud = min((found for found, t in known if not t.holds and found > quiet), default=0.0)
        if quiet and loud:
            return sqrt(quiet * loud)
        found, last = known[-1]
        measured = (last.accuracy.noise if last.accuracy is not None else 0.0) or limit
        return RESERVE * limit * found / (measured if last.holds else max(measured, limit))

    def _lowered(self, costs: RuleCosts, labels: Labels, aim: float) -> Labels:
        """The labels with as many parts in fewer bits as the noise on ONNX Runtime allows: large groups of parts first,
        those with the least noise in front, then neighbours."""
        for fewer in (W8A8, W8A16, W16A16):
            single = [costs.noise(_with(labels, (n,), fewer), self.noise) for n in range(len(labels))]
            for order in (single.__getitem__, int):
                able = [n for n, part in enumerate(costs.parts) if labels[n] > fewer and costs.allows(part, fewer)]
                able.sort(key=order)
                size = len(able)
                while size:
                    left: list[int] = []
                    for first in range(0, len(able), size):
                        group = able[first : first + size]
                        changed = _with(labels, group, fewer)
                        is_cheaper = costs.total(changed) < costs.total(labels)
                        noise = self.simulate(costs.placement(changed)) if is_cheaper else np.inf
                        if noise is None:
                            return labels
                        labels, left = (changed, left) if noise <= aim else (labels, [*left, *group])
                    able, size = left, size // 2
        return labels

    # ------------------------------------------------ between 8 and 16 bits

    def _between(
        self, costs: RuleCosts, history: Sequence[Trial], path_of: Callable[[], list[Labels]]
    ) -> Iterator[Proposal]:
        """The cheapest placements at several prices on noise that are cheaper than the best so far and are expected to
        be quieter than all that miss the limits; the one first that is expected to hold them with the least reserve,
        then the middle one."""
        judged = [(costs.noise(costs.labels(t.placement), self.noise), t) for t in history if failure(t) is None]
        noisiest = min((noise for noise, t in judged if t.holds is False and t.layers), default=np.inf)
        best = best_of(history)
        most = costs.total(costs.labels(best)) if best else np.inf
        tried = {t.placement for t in history} | {Placement()}
        able = [
            labels
            for labels in path_of()
            if costs.total(labels) < most
            and costs.noise(labels, self.noise) < noisiest
            and costs.placement(labels) not in tried
        ]
        if not able:
            return
        chosen, aim = len(able) // 2, self._aim(judged)
        if aim is not None and not any(t.proposal.origin == BY_RULE for t in history):
            chosen = next((n for n, labels in enumerate(able) if costs.noise(labels, self.noise) <= aim), chosen)
        yield self._proposal(costs, BY_RULE, able[chosen])

    def _path(self, costs: RuleCosts, *, float_too: bool) -> list[Labels]:
        """The cheapest labels at rising prices on noise, each once, from the cheapest to the quietest."""
        whole = costs.noise(costs.everywhere(W8A8), self.noise)
        if whole <= 0:
            return [costs.cheapest(self.noise, 0.0, float_too=float_too)]
        top = np.log10(costs.total(costs.everywhere(W16A16)) / whole) + DECADES / 2
        prices = (0.0, *np.logspace(top - DECADES, top, PRICES))
        found = (costs.cheapest(self.noise, float(price), float_too=float_too) for price in prices)
        return list(dict.fromkeys(costs.labels(costs.placement(labels)) for labels in found))

    def _aim(self, judged: Sequence[tuple[float, Trial]]) -> float | None:
        """The sum of noise at which the limit should just hold: between those of 8 and of 16 bits, as both were
        measured; None if these do not tell."""
        by_origin = {t.proposal.origin: (noise, t.accuracy.noise) for noise, t in judged if t.accuracy is not None}
        if self.limit is None or ALL_8 not in by_origin or ALL_16 not in by_origin:
            return None
        (narrow, loud), (wide, quiet) = by_origin[ALL_8], by_origin[ALL_16]
        share = (RESERVE * self.limit - quiet) / (loud - quiet) if loud > quiet else -1.0
        return wide + share * (narrow - wide) if 0 < share < 1 else None

    # ------------------------------------------------ operators in floats

    def _without_operators(self, costs: RuleCosts, history: Sequence[Trial], wide: Labels) -> Iterator[Proposal]:
        """Where nothing holds the limits: the widest placement with one kind of operator in floats, for each kind, the
        cheapest first; then with the one that helped most and others, as far as these help, too. What an operator reads
        becomes float with it: between pairs it would compute in 16 bits."""
        noise = {t.placement: t.accuracy.noise for t in history if t.accuracy is not None}
        all_wide = noise.get(costs.placement(wide))
        if all_wide is None or any(t.holds and failure(t) is None for t in history):
            return
        kinds: dict[str, set[int]] = {}
        for number, part in enumerate(costs.parts):
            makers = {maker for edge in part.reads if (maker := costs.maker.get(edge.tensor)) is not None}
            for node in part.nodes if wide[number] != FLOAT else ():
                kinds.setdefault(costs.model.nodes[node].op, set()).update({number} | makers)
        changed = sorted((_with(wide, numbers, FLOAT) for numbers in kinds.values()), key=costs.total)
        for labels in changed:
            yield self._proposal(costs, FLOATS, labels)
        alone = [(left, labels) for labels in changed if (left := noise.get(costs.placement(labels))) is not None]
        helped = [(left, labels) for left, labels in sorted(alone) if left <= HELPED * all_wide]
        for fewest, least in helped[:1]:
            for _, labels in helped[1:]:
                both = tuple(FLOAT if FLOAT in each else each[0] for each in zip(least, labels, strict=True))
                yield self._proposal(costs, FLOATS, both)
                if (left := noise.get(costs.placement(both), np.inf)) <= HELPED * fewest:
                    fewest, least = left, both

    # ------------------------------------------------ one part after the other

    def _narrowed(self, costs: RuleCosts, history: Sequence[Trial]) -> Iterator[Proposal]:
        """The best placement with parts in fewer bits, those first that save the most for the noise they bring: an
        eighth of them together, a sixteenth, and so on; then neighbours, which convert nothing between them: half of
        the parts, a quarter, and so on; then each alone. Without those that miss the limit if their noise exceeds that
        on ONNX Runtime by as much as the best one's does, or that have nowhere more bits than one that missed it."""
        if not (best := best_of(history)):
            return
        expected = self.simulate(best) if self.limit is not None else None
        measured = next((t.accuracy.noise for t in history if t.placement == best and t.accuracy is not None), 0.0)
        most = self.limit * expected / measured if self.limit and expected and measured else np.inf
        base = costs.labels(best)
        before, noisy = costs.total(base), costs.noise(base, self.noise)
        ranked: list[tuple[float, int, Labels]] = []
        for number, (part, label) in enumerate(zip(costs.parts, base, strict=True)):
            for fewer in range(label):
                if not costs.allows(part, fewer):
                    continue
                labels = _with(base, (number,), fewer)
                saved = before - costs.total(labels)
                more = max(costs.noise(labels, self.noise) - noisy, 1e-12)
                if saved > 0:
                    ranked.append((-saved / more, number, labels))
        single = [labels for *_, labels in sorted(ranked)]
        together = [single[: len(single) >> halvings] for halvings in range(FIRST_HALVINGS, len(single).bit_length())]
        merged = (
            tuple(next((c[n] for c in changes if c[n] != own), own) for n, own in enumerate(base))
            for changes in (*together, *([labels] for labels in single))
        )
        missed = [costs.labels(t.placement) for t in history if t.proposal.origin == NARROWED and t.holds is False]
        ordered = list(merged)
        ordered[len(together) : len(together)] = _neighbours(base, costs.everywhere(W8A8))
        for labels in ordered:
            is_hopeless = any(all(map(ge, other, labels)) for other in missed)
            if costs.total(labels) >= before or is_hopeless:
                continue
            proposal = self._proposal(costs, NARROWED, labels)
            noise = self.simulate(proposal.placement) if isfinite(most) else None
            if noise is None or noise <= most:
                yield proposal


def _neighbours(labels: Labels, fewest: Labels) -> Iterator[Labels]:
    """The labels with the `fewest` bits for half of the parts, which follow each other, then for a quarter, and so on
    down to two."""
    size = len(labels) // 2
    while size > 1:
        for first in range(0, len(labels), size):
            last = first + size
            yield (*labels[:first], *map(min, labels[first:last], fewest[first:last]), *labels[last:])
        size //= 2


def _with(labels: Labels, numbers: Collection[int], label: int) -> Labels:
    return tuple(label if number in numbers else own for number, own in enumerate(labels))
