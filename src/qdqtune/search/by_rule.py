"""Search by rule, for engines that have 16-bit integers and report no times of nodes: finds the placement with the
least estimated cost (`search.costs.rule_costs`) that meets the accuracy limits. If builds are timed, the fastest counts
instead.

Builds show the engine's outputs, and which nodes it leaves to another processor. First everything in 8 bits is built,
then everything in 16. If 8 bits meet the limits and leave no node, nothing is cheaper. Else a price on noise is raised
until the cheapest placement meets the limit, by noise simulated on ONNX Runtime, or by sums of single tensors' noise
that builds calibrate. With simulation, parts of it then go to fewer bits while the limit holds, in groups and one by
one, and the result is built.

At the end parts of the best placement get fewer bits, several at once and then one by one, those first that save the
most for the noise they add.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf, isfinite
from operator import ge

from qdqtune.search import best_of, untried
from qdqtune.search.costs.decisions import CLOSE_TO_LIMIT, SIMULATED_BISECTIONS, optimum_within
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.rule_costs import SIXTEEN, W8A8, W8A16, W16A16, Labels, RuleCosts
from qdqtune.timing.limits import failure
from qdqtune.types import Proposal, Trial

ALL_8, ALL_16, BY_RULE, NARROWED = "8 bits", "16 bits", "cut by rule", "narrowed"
"""Origins of proposals: everything in 8 bits; everything in 16; the cheapest at a price on noise, maybe lowered in bits
by simulation; the best so far with some parts in fewer bits."""

QUIETER = 0.95
"""After a placement missed the limit, others need a sum of noise of at most this share of its. Chosen, not measured."""

AIMS = 6
"""The most placements found with a price on noise that are built. Chosen, not measured."""

FRUITLESS = 4
"""The search ends after so many failures in a row. Chosen, not measured."""

FIRST_HALVINGS = 3
"""At first an eighth (three halvings) of the parts get fewer bits at once. Chosen, not measured."""

REFUSED = re.compile(r"OpType:(\w+)")
"""Finds the operator that an execution provider refused in ONNX Runtime's message."""


@dataclass(frozen=True)
class RuleSearch:
    """Search by rule (see the module). `is_timed`: builds are timed, and parts may be faster in float."""

    costs: RuleCosts
    noise: Noise
    is_timed: bool = False

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        costs = self.learned(history)
        ideas = self._ideas(costs, history)
        proposals = (Proposal(origin, costs.placement(labels), wants_layers=True) for origin, labels in ideas)
        return tuple(islice(untried(proposals, history), 1))

    def _ideas(self, costs: RuleCosts, history: Sequence[Trial]) -> Iterator[tuple[str, Labels]]:
        """Origins of proposals, with the bits of each part."""
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
        yield from ((BY_RULE, labels) for labels in self._within_limits(costs, history, float_too=float_too))
        yield from ((NARROWED, labels) for labels in self._narrowed(costs, history))

    def learned(self, history: Sequence[Trial]) -> RuleCosts:
        """The costs, updated by builds: nodes that ran on another processor, operators refused in 16 bits."""
        refused = set(self.costs.refused)
        for trial in history:
            failed = failure(trial)
            if failed is not None:
                refused |= self.costs.in_16_bits(REFUSED.findall(failed.reason), trial.placement)
        costs = replace(self.costs, refused=frozenset(refused))
        return costs.learned((t.placement, t.layers) for t in history if t.layers)

    # ------------------------------------------------ within the limits

    def _within_limits(self, costs: RuleCosts, history: Sequence[Trial], *, float_too: bool) -> Iterator[Labels]:
        """The cheapest placement expected to meet the limits, by simulated noise; or without simulation one for each of
        several guesses of the allowed sum of noise. All are cheaper than the best so far."""
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
                yield labels

    def _lowered(self, costs: RuleCosts, labels: Labels, noise: Noise, limit: float) -> Labels:
        """The labels with as many parts in fewer bits as simulated noise allows: tries large groups of parts first,
        once sorted by noise and once as neighbours."""
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

    def _narrowed(self, costs: RuleCosts, history: Sequence[Trial]) -> Iterator[Labels]:
        """The best placement with parts in fewer bits: first an eighth of the parts, those that save most for the noise
        they add, then a sixteenth, and so on; then runs of neighbours, which need no conversion between them: half of
        the parts, a quarter, and so on; then each part alone. Left out are those that should miss the limit by
        simulated noise, scaled as measured on the best one, and those with nowhere more bits than one that missed."""
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
                yield labels


def _neighbours(labels: Labels, fewest: Labels) -> Iterator[Labels]:
    """The labels with the `fewest` bits in a run of consecutive parts: each half, each quarter, and so on."""
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
