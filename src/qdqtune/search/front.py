"""Front search: placements that trade latency for accuracy, from the fastest to the most exact.

When the first builds of a cut search have priced every unit, a price on noise gives one placement each: the optimum of
time plus price times noise, which no other placement beats in both as far as prices and sums of noise are right. Of
these the one is built next that lies farthest from all that was built, so that the builds spread over the front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qdqtune.measurement.timing import Plan
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.optimum import cut, cut_holding, decision_of
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.units import Decision
from qdqtune.search.cut import CutSearch
from qdqtune.types import Placement, Proposal, Trial

POINTS = 8
"""The most points of a front that are proven."""

PRICES = np.logspace(-3, 8, 45)
"""Prices on noise, as multiples of the one at which the noise of the fastest placement costs as much as its time."""

BEYOND = 10.0
"""How many times the noise that a limit allows is still of interest."""

GAIN = 0.985
"""A placement is worth a build if it is predicted to take at most this share of the float model's time."""

LOUD = 100.0
"""The SQNR in dB beyond which more makes no difference."""

DECADE = 0.5
"""Share of the float model's time that counts as much as a factor of ten in noise: how far apart two points are."""

EACH = 3
"""Builds that a point more takes: its own, and two of the proof."""


@dataclass(frozen=True)
class Point:
    """A measured placement: its median ratio to the float model over all that it was compared with, and its trial."""

    ratio: float
    trial: Trial

    def beats(self, other: Point) -> bool:
        """Whether it is at least as good in both, and better in one."""
        mine, theirs = (self.ratio, -self.trial.exactness), (other.ratio, -other.trial.exactness)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def undominated(history: Sequence[Trial], plan: Plan) -> tuple[Point, ...]:
    """What was measured, faster than float, and is beaten by nothing else in both; the fastest first."""
    ratios = ratios_to_float(history, plan)
    last = {t.placement: t for t in history if t.placement in ratios and t.accuracy is not None}
    points = [Point(ratios[p], t) for p, t in last.items() if ratios[p] < 1]
    return tuple(sorted((p for p in points if not any(o.beats(p) for o in points)), key=lambda p: p.ratio))


def spread(points: Sequence[Point], count: int) -> tuple[Point, ...]:
    """At most `count` of the points, the two ends among them and the others far from each other; in their order."""
    if len(points) <= count:
        return tuple(points)
    where = np.array([(p.ratio / DECADE, -min(p.trial.exactness, LOUD) / 10) for p in points])
    chosen = [0, len(points) - 1]
    while len(chosen) < count:
        distances = np.abs(where[:, None] - where[chosen][None]).max(axis=2).min(axis=1)
        chosen.append(int(distances.argmax()))
    return tuple(points[i] for i in sorted(chosen))


def named(points: Sequence[Point]) -> dict[str, Point]:
    """The points by name, after their SQNR: 24db, or 24db-2 where that is taken."""
    found: dict[str, Point] = {}
    for point in points:
        stem = "exact" if point.trial.sqnr_db is None else f"{point.trial.sqnr_db:.0f}db"
        name, number = stem, 1
        while name in found:
            number += 1
            name = f"{stem}-{number}"
        found[name] = point
    return found


@dataclass(frozen=True)
class FrontSearch:
    """See the module. `by_cut` knows the noise of every value; `builds` is what search and proof may spend together."""

    by_cut: CutSearch
    noise: Noise
    builds: int

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        """See `Strategy`. The first batch is that of the cut; then the optimum that is foretold to hold the limits, and
        then one point after the other, or as many as the cut's `width` far from each other."""
        if first := self.by_cut.first(history):
            return first
        left = self.builds - 2 - sum(t.builds for t in history) - self._proof(history)
        if left < 0:
            return ()
        costs = self.by_cut.costs(history)
        tried = {t.placement for t in history} | {Placement()}
        bound = self.noise.bound(history)
        if bound is not None and not any(t.proposal.origin == "cut" for t in history):
            proposal = self.by_cut.proposal("cut", costs, cut_holding(costs, self.noise, bound))
            if proposal.placement not in tried:
                return (proposal,)
        placed = {costs.partition.placement(d): d for d in self._path(costs)}
        fresh = {p: self._point(costs, d, p) for p, d in placed.items() if p not in tried}
        known = [self._point(costs, decision_of(costs, p), p) for p in tried]
        chosen: list[Decision] = []
        while fresh and len(chosen) < min(self.by_cut.width, 1 + left // EACH):
            points = np.array(known)
            farthest = max(fresh, key=lambda p: float(np.abs(points - fresh[p]).max(axis=1).min()))
            known.append(fresh.pop(farthest))
            chosen.append(placed[farthest])
        return tuple(self.by_cut.proposal("front", costs, decision) for decision in chosen)

    def _proof(self, history: Sequence[Trial]) -> int:
        """Builds of the proof if one point more is found: two of the user's file, and two of each point."""
        return 2 + 2 * min(POINTS, len(undominated(history, self.by_cut.plan)) + 1)

    def _path(self, costs: Costs) -> Iterator[Decision]:
        """The optima of rising prices on noise while they are worth a build: none that is far beyond a limit, since the
        first builds show what lies there."""
        fastest = cut(costs)
        loudest = self.noise.predicted(costs.partition.placement(fastest))
        most = np.inf if self.noise.limit is None else BEYOND * self.noise.limit
        if loudest <= most:
            yield fastest
        for price in PRICES * costs.total(fastest) / loudest if loudest > 0 else ():
            decision = cut(costs, self.noise, float(price))
            if costs.total(decision) > GAIN * self.by_cut.float_ms or not decision.quantized:
                return
            if self.noise.predicted(costs.partition.placement(decision)) <= most:
                yield decision

    def _point(self, costs: Costs, decision: Decision, placement: Placement) -> tuple[float, float]:
        """Where a placement lies: its share of the float model's time, and its noise in decades."""
        noise = self.noise.predicted(placement)
        return costs.total(decision) / self.by_cut.float_ms / DECADE, float(np.log10(max(noise, 1e-9)))
