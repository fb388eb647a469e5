"""Search by rule: the cheapest placement by `search.costs.rule_costs` that holds the limits on accuracy.

For engines with 16 bits that do not tell what each node takes. Where builds are timed, the fastest counts; on
simulators the cheapest by rule. Builds also show which nodes the engine leaves
to others, and the outputs as it computes them. First everything in 8 bits is built, then everything in 16. If the first
holds the limits and leaves no node, nothing is cheaper. Else the cheapest placements at a price on noise lie between
the two, and the price is found as in cut mode: by the noise on ONNX Runtime, or by sums of noise whose size builds
tell. By the noise on ONNX Runtime, parts go to fewer bits, in groups and then one by one, as long as it holds; the
result is built.

At the end parts of the best placement get fewer bits, those first that save the most for the noise they bring: several
at once, then one by one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from operator import ge

from qdqtune.search import best_of
from qdqtune.search.costs.decisions import CLOSE_TO_LIMIT, SIMULATED_BISECTIONS, optimum_within
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.rule_costs import SIXTEEN, W8A8, W8A16, W16A16, Labels, RuleCosts
from qdqtune.timing.limits import failure
from qdqtune.types import Placement, Proposal, Trial

ALL_8, ALL_16, BY_RULE, NARROWED = "8 bits", "16 bits", "cut by rule", "narrowed"
"""Origins of proposals: everything in 8 bits, and in 16; the cheapest at a price on noise, or what became of it on ONNX
Runtime; the best so far with a part in fewer bits."""

QUIETER = 0.95
"""A placement is quieter than one that missed the limit if its sum of noise is at most this share of that. Chosen, not
measured."""

AIMS = 6
"""The most placements at a price on noise that are built. Chosen, not measured."""

FRUITLESS = 4
"""After so many failures in a row the search ends. Chosen, not measured."""

FIRST_HALVINGS = 3
"""An eighth of the parts get fewer bits at once. Chosen, not measured."""

REFUSED = re.compile(r"OpType:(\w+)")
"""How ONNX Runtime names the operator that an execution provider has refused."""


Idea = tuple[str, Labels]
"""The origin of a proposal, and its labels."""


@dataclass(frozen=True)
class RuleSearch:
    """The search (see the module). `is_timed`: builds are timed, and parts may be faster in floats."""

    costs: RuleCosts
    noise: Noise
    is_timed: bool = False

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        costs = self.learned(history)
        tried = {t.placement for t in history} | {Placement()}
        for origin, labels in self._ideas(costs, history):
            placement = costs.placement(labels)
            if placement not in tried:
                return (Proposal(origin, placement, wants_layers=True),)
        return ()

    def _ideas(self, costs: RuleCosts, history: Sequence[Trial]) -> Iterator[Idea]:
        narrow, wide = costs.everywhere(W8A8), costs.everywhere(W16A16)
        yield ALL_8, narrow
        held = {t.placement: t.holds is True and failure(t) is None for t in history}
        leaves, is_enough = any(costs.off.values()), held.get(costs.placement(narrow))
        if is_enough is None or (is_enough and not leaves):
            return
        if not set(SIXTEEN).isdisjoint(wide):
            yield ALL_16, wide
        if all(failure(t) is not None for t in history[-FRUITLESS:]) and len(history) >= FRUITLESS:
            return
        float_too = leaves or not held.get(costs.placement(wide)) or self.is_timed
        yield from self._within_limits(costs, history, float_too=float_too)
        yield from self._narrowed(costs, history)

    def learned(self, history: Sequence[Trial]) -> RuleCosts:
        """The costs with what builds have shown: nodes that run elsewhere, operators that are refused in 16 bits."""
        refused = set(self.costs.refused)
        for trial in history:
            failed = failure(trial)
            if failed is not None:
                refused |= self.costs.in_16_bits(REFUSED.findall(failed.reason), trial.placement)
        costs = replace(self.costs, refused=frozenset(refused))
        return costs.learned((t.placement, t.layers) for t in history if t.layers)

    # ------------------------------------------------ within the limits

    def _within_limits(self, costs: RuleCosts, history: Sequence[Trial], *, float_too: bool) -> Iterator[Idea]:
        """The cheapest placement whose noise on ONNX Runtime should hold the limit here; without that noise those at
        several guesses of the sum of noise that does. All are cheaper than the best so far."""
        if sum(t.proposal.origin == BY_RULE for t in history) >= AIMS:
            return
        noise = self.noise.corrected(history)
        bound = noise.bound(history)
        best = best_of(history)
        most = costs.total(costs.labels(best)) if best else inf
        amount = noise.summed if bound is None else noise.expected
        missed = (noise.summed(t.placement) for t in history if t.holds is False and failure(t) is None)
        quieter = QUIETER * min(missed, default=inf)
        levels = (bound,) if bound is not None else [min(level, quieter) for level in noise.levels(history)]
        for allowed in filter(None, levels):
            optimum = optimum_within(
                lambda price: costs.cheapest(noise, price, float_too=float_too),
                lambda labels: amount(costs.placement(labels)),
                allowed=allowed,
                first=costs.total(costs.everywhere(W16A16)) / allowed,
                bisections=SIMULATED_BISECTIONS,
                enough=CLOSE_TO_LIMIT * allowed,
            )
            if optimum is None:
                continue
            labels = costs.labels(costs.placement(optimum[0]))
            if bound is not None:
                labels = self._lowered(costs, labels, noise, bound)
            if costs.total(labels) < most:
                yield BY_RULE, labels

    def _lowered(self, costs: RuleCosts, labels: Labels, noise: Noise, limit: float) -> Labels:
        """The labels with as many parts in fewer bits as the noise on ONNX Runtime allows: large groups of parts first,
        those with the least noise in front, then neighbours."""
        for fewer in (W8A8, W8A16, W16A16):
            single = [noise.summed(costs.placement(_with(labels, (n,), fewer))) for n in range(len(labels))]
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
                        if is_cheaper and noise.expected(costs.placement(changed)) <= limit:
                            labels = changed
                        else:
                            left += group
                    able, size = left, _half(size)
        return labels

    # ------------------------------------------------ one part after the other

    def _narrowed(self, costs: RuleCosts, history: Sequence[Trial]) -> Iterator[Idea]:
        """The best placement with parts in fewer bits, those first that save the most for the noise they bring: an
        eighth of them together, a sixteenth, and so on; then neighbours, which convert nothing between them: half of
        the parts, a quarter, and so on; then each alone. Without those that miss the limit if their noise exceeds that
        on ONNX Runtime by as much as the best one's does, or that have nowhere more bits than one that missed it."""
        if not (best := best_of(history)):
            return
        limit, simulate = self.noise.limit, self.noise.simulate
        expected = simulate(best) if simulate is not None and limit is not None else None
        measured = next((t.accuracy.noise for t in history if t.placement == best and t.accuracy is not None), 0.0)
        most = limit * expected / measured if limit and expected and measured else inf
        base = costs.labels(best)
        before, noisy = costs.total(base), self.noise.summed(best)
        ranked: list[tuple[float, int, Labels]] = []
        for number, (part, label) in enumerate(zip(costs.parts, base, strict=True)):
            for fewer in range(label):
                if not costs.allows(part, fewer):
                    continue
                labels = _with(base, (number,), fewer)
                saved = before - costs.total(labels)
                more = max(self.noise.summed(costs.placement(labels)) - noisy, 1e-12)
                if saved > 0:
                    ranked.append((-saved / more, number, labels))
        single = [labels for *_, labels in sorted(ranked)]
        together = list[Labels]()
        for halvings in range(FIRST_HALVINGS, len(single).bit_length()):
            changes = single[: len(single) >> halvings]
            together.append(tuple(next((c[n] for c in changes if c[n] != own), own) for n, own in enumerate(base)))
        missed = [costs.labels(t.placement) for t in history if t.proposal.origin == NARROWED and t.holds is False]
        for labels in (*together, *_neighbours(base, costs.everywhere(W8A8)), *single):
            is_hopeless = any(all(map(ge, other, labels)) for other in missed)
            if costs.total(labels) >= before or is_hopeless:
                continue
            noise = simulate(costs.placement(labels)) if simulate is not None and isfinite(most) else None
            if noise is None or noise <= most:
                yield NARROWED, labels


def _neighbours(labels: Labels, fewest: Labels) -> Iterator[Labels]:
    """The labels with the `fewest` bits for half of the parts, which follow each other, then for a quarter, and so on
    down to two."""
    size = _half(len(labels))
    while size > 1:
        for first in range(0, len(labels), size):
            last = first + size
            yield (*labels[:first], *map(min, labels[first:last], fewest[first:last]), *labels[last:])
        size = _half(size)


def _half(size: int) -> int:
    return (size + 1) // 2 if size > 1 else 0


def _with(labels: Labels, numbers: Collection[int], label: int) -> Labels:
    return tuple(label if number in numbers else own for number, own in enumerate(labels))
