"""Front search: placements that trade latency for accuracy, from the fastest to the most accurate.

First it works as cut search does, so that the fastest placement is found. Further points are predicted: for each price
on noise, the placement with the least time plus price times noise is one that no other beats in both, as far as costs
and sums of noise are right. The same placements with one unit flipped are candidates too. Those farthest from all
measured points are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qdqtune.search import ratios_to_float
from qdqtune.search.costs.decisions import cut, other
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.units import Decision
from qdqtune.search.cut import CutSearch
from qdqtune.timing.ratios import Plan
from qdqtune.types import EQUAL_DB, Placement, Proposal, Trial, sqnr_of

MAX_POINTS = 8
"""At most so many points of a front are timed in the proof. Chosen, not measured."""

TARGET_POINTS = 6
"""The number of points that a front should have. Chosen, not measured."""

CUT_BUILDS = 8
"""Candidates of cut search to measure before points are predicted: they show the cost of every unit."""

NOISE_PRICES = np.logspace(-3, 8, 45)
"""Prices on noise, relative to that at which the fastest placement's noise costs as much as its time."""

MAX_EXCESS_NOISE = 10.0
"""Points with more than this multiple of the allowed noise are left out. Chosen, not measured."""

WORTHWHILE_RATIO = 0.96
"""A placement is built if predicted to take at most this share of float's time: smaller gains are hardly proven."""

MAX_DB = 100.0
"""SQNRs above this (in dB) count as equal. Chosen, not measured."""

DECADE_SHARE = 0.5
"""For distances of points, this share of float's time counts as much as a tenfold noise. Chosen, not measured."""

DISTANCE_UNITS = (0.05, 2.0)
"""Two points have distance one if their times differ by this share and their SQNRs by so many dB; below, chance decides
which one is better."""

NEAR, NEAREST = 0.25, 0.03
"""Points nearer to each other than `NEAR` count as one; than `NEAREST`, if the front has too few points."""

FLIPPED_UNITS = 16
"""How many units are flipped in each optimum, one at a time. Chosen, not measured."""


@dataclass(frozen=True)
class Tradeoff:
    """Latency relative to the float model, and SQNR in dB, measured or predicted."""

    ratio: float
    db: float

    def apart(self, other: Tradeoff) -> float:
        """The distance of two points in `DISTANCE_UNITS`: the smaller of the distances in time and in SQNR."""
        share, db = DISTANCE_UNITS
        in_time = abs(np.log(self.ratio / other.ratio)) / share
        return float(min(in_time, abs(min(self.db, MAX_DB) - min(other.db, MAX_DB)) / db))

    def beats(self, other: Tradeoff) -> bool:
        """Whether this point is at least as good in both, and better in one."""
        return self != other and self.ratio <= other.ratio and self.db >= other.db


def farthest(candidates: Mapping[Placement, Tradeoff], taken: Sequence[Tradeoff], near: float) -> Placement | None:
    """The candidate with the largest distance to all `taken` points; None if that is below `near`."""
    distances = {p: min((point.apart(t) for t in taken), default=np.inf) for p, point in candidates.items()}
    chosen = max(distances, key=distances.__getitem__, default=None)
    return chosen if chosen is not None and distances[chosen] >= near else None


def undominated(history: Sequence[Trial], plan: Plan) -> dict[Placement, Tradeoff]:
    """The measured placements that are faster than float and that no other beats, the fastest first."""
    ratios = ratios_to_float(history, plan)
    last = {t.placement: t for t in history if t.placement in ratios and t.accuracy is not None}
    return unbeaten({p: Tradeoff(ratios[p], t.exactness) for p, t in last.items() if ratios[p] < 1})


def spread(points: Mapping[Placement, Tradeoff], count: int) -> tuple[Placement, ...]:
    """At most `count` points, in their order: the first, the last, and others far from each other."""
    placements = tuple(points)
    if len(points) <= count:
        return placements
    where = np.array([(p.ratio / DECADE_SHARE, -min(p.db, MAX_DB) / 10) for p in points.values()])
    chosen = [0, len(points) - 1]
    while len(chosen) < count:
        distances = np.abs(where[:, None] - where[chosen][None]).max(axis=2).min(axis=1)
        chosen.append(int(distances.argmax()))
    return tuple(placements[i] for i in sorted(chosen))


@dataclass(frozen=True)
class FrontSearch:
    """Front search (see the module). `noise` is the noise estimate that `by_cut` uses as well."""

    by_cut: CutSearch
    noise: Noise

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        if len(history) < CUT_BUILDS and (proposals := self.by_cut.propose(history)):
            return proposals[: CUT_BUILDS - len(history)]
        measured = undominated(history, self.by_cut.plan)
        taken = list(measured.values())
        near = NEAR if len(measured) >= TARGET_POINTS else NEAREST
        predicted = self._predicted(history, measured)
        points = {
            p: point for p, point in unbeaten(predicted).items() if not any(other.beats(point) for other in taken)
        }
        chosen = list[Placement]()
        while len(chosen) < self.by_cut.width and (placement := farthest(points, taken, near)) is not None:
            chosen.append(placement)
            taken.append(points[placement])
        return [Proposal("front", p, predicted=points[p].ratio, wants_layers=True) for p in chosen]

    def _predicted(self, history: Sequence[Trial], measured: Iterable[Placement]) -> dict[Placement, Tradeoff]:
        """Placements not built yet that are predicted to be fast and exact enough for a build."""
        costs = self.by_cut.costs(history)
        path = (*self._optima_by_noise_price(costs), *map(costs.partition.decision, measured))
        points = dict[Placement, Tradeoff]()
        for placement in map(costs.partition.placement, (*path, *flipped(costs, path))):
            ratio, noise = costs.ms(placement) / costs.float_ms, self.noise.summed(placement)
            if ratio <= WORTHWHILE_RATIO and not is_too_noisy(noise, self.noise.limit):
                db = sqnr_of(noise)
                points[placement] = Tradeoff(ratio, EQUAL_DB if db is None else db)
        for trial in history:
            points.pop(trial.placement, None)
        return points

    def _optima_by_noise_price(self, costs: Costs) -> tuple[Decision, ...]:
        """The optima for rising prices on noise, each once, the float model last. Between two prices with the same
        optimum no others are computed."""
        fastest = cut(costs)
        most_noise = self.noise.summed(costs.partition.placement(fastest))
        if most_noise <= 0:
            return fastest, Decision()
        prices = NOISE_PRICES * costs.total(fastest) / most_noise

        def within(low: int, first: Decision, high: int, last: Decision) -> Iterator[Decision]:
            if first != last and high - low > 1:
                middle = (low + high) // 2
                decision = cut(costs, self.noise, float(prices[middle]))
                yield from within(low, first, middle, decision)
                yield decision
                yield from within(middle, decision, high, last)

        return tuple(dict.fromkeys((fastest, *within(-1, fastest, len(prices), Decision()), Decision())))


def flipped(costs: Costs, path: Sequence[Decision]) -> Iterator[Decision]:
    """The decisions of a path, each with one of the slowest units flipped between quantized and float."""
    parts = costs.partition
    able = sorted((u.number for u in parts.units if u.inputs), key=lambda n: (-costs.prices[n].as_float, n))
    for decision in path:
        for number in able[:FLIPPED_UNITS]:
            yield other(parts, decision, [number])


def is_too_noisy(noise: float, limit: float | None) -> bool:
    return limit is not None and noise > MAX_EXCESS_NOISE * limit


def unbeaten(points: Mapping[Placement, Tradeoff]) -> dict[Placement, Tradeoff]:
    """The points that no other beats, the fastest first."""
    kept = [(p, point) for p, point in points.items() if not any(other.beats(point) for other in points.values())]
    return dict(sorted(kept, key=lambda item: item[1].ratio))
