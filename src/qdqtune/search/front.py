"""Front search: placements that trade latency for accuracy, from the fastest to the most exact.

The search itself is that of the cut, so that what it finds is there as well. Then a price on noise gives one placement
each: the optimum of time plus price times noise, which no other placement beats in both as far as prices and sums of
noise are right. Where two neighbours of these lie far apart, parts of what tells them apart lie between. They are
offered without a build of their own: the proof, which builds every point anyway, shows where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Protocol, TypeVar

import numpy as np

from qdqtune.search import best_of, ratios_to_float
from qdqtune.search.costs.decisions import decision_of, other
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.optimum import cut
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.units import Decision
from qdqtune.search.cut import CutSearch
from qdqtune.timing.ratios import Plan
from qdqtune.types import EQUAL_DB, Placement, Proposal, Trial

MAX_POINTS = 8
"""The most points of a front that are proven."""

TARGET_POINTS = 6
"""How many points a front is to have."""

SPARE_BUILDS = 2
"""Builds that are kept for points in place of those that do not prove themselves."""

MIN_SEARCH_BUILDS = 6
"""Builds that the search has in any case: the float model's, those that price every unit, and the optimum."""

USUAL_SEARCH_BUILDS = 8
"""Builds that a search without a front has: where fewer have found nothing to ship, this one goes on as long."""

NOISE_PRICES = np.logspace(-3, 8, 45)
"""Prices on noise, as multiples of the one at which the noise of the fastest placement costs as much as its time."""

MAX_EXCESS_NOISE = 10.0
"""How many times the noise that a limit allows is still of interest."""

WORTHWHILE_RATIO = 0.96
"""A placement is worth a build if it is predicted to take at most this share of the float model's time: smaller gains
are hardly proven on two pairs of builds."""

MAX_DB = 100.0
"""The SQNR in dB beyond which more makes no difference."""

DECADE_SHARE = 0.5
"""Share of the float model's time that counts as much as a factor of ten in noise: how far apart two points are."""

DISTANCE_UNITS = (0.05, 2.0)
"""Two points are one apart if their times differ by this share, and their SQNR by so many dB: less of either, and luck
decides whether one beats the other."""

NEAR, NEAREST = 0.25, 0.03
"""Points nearer to each other than this share of `DISTANCE_UNITS` are one point; the second where a front would have
too few."""

STRETCHES = 6
"""Into how many parts what tells two neighbours apart is divided."""

FLIPPED_UNITS = 16
"""How many units are decided the other way in each optimum."""

MAX_CANDIDATES = 24
"""How many placements are offered at once."""

SIMILAR_SUMS = 2
"""From how many known placements it is learned how far sums of noise are off: those whose sums are the nearest."""

SCALE_RANGE = (0.5, 2.0)
"""How far what builds gain may be from what prices foretell, to be believed of others."""


@dataclass(frozen=True)
class Tradeoff:
    """Where a placement lies, or is foretold to lie: its share of the float model's time, and its SQNR in dB."""

    ratio: float
    db: float

    def apart(self, other: Tradeoff) -> float:
        """How far two are from each other: as far as the nearer of both counts."""
        share, db = DISTANCE_UNITS
        predicted_ratios = abs(np.log(self.ratio / other.ratio)) / share
        return float(min(predicted_ratios, abs(min(self.db, MAX_DB) - min(other.db, MAX_DB)) / db))

    def beats(self, other: Tradeoff) -> bool:
        """Whether it is at least as good in both, and better in one."""
        return self != other and self.ratio <= other.ratio and self.db >= other.db


@dataclass(frozen=True)
class PredictedPoint:
    """A placement that no build has seen, and where it is foretold to lie."""

    placement: Placement
    tradeoff: Tradeoff
    is_simulated: bool = False
    """Whether its noise was simulated, and not summed up."""

    @property
    def noise(self) -> float:
        """The SQNR as relative noise."""
        return float(10 ** (-self.tradeoff.db / 10))


class HasTradeoff(Protocol):
    """What lies somewhere."""

    @property
    def tradeoff(self) -> Tradeoff:
        """Where."""


T = TypeVar("T", bound=HasTradeoff)


def farthest(candidates: Iterable[T], taken: Sequence[Tradeoff], near: float = NEAREST) -> T | None:
    """The one that is farthest from all that is taken; None if each is `near` to one of these."""
    found = max(candidates, key=lambda o: min((o.tradeoff.apart(t) for t in taken), default=np.inf), default=None)
    return found if found is not None and all(found.tradeoff.apart(t) >= near for t in taken) else None


@dataclass(frozen=True)
class MeasuredPoint:
    """A measured placement: its median ratio to the float model over all that it was compared with, and its trial."""

    ratio: float
    trial: Trial

    @property
    def placement(self) -> Placement:
        """What was measured."""
        return self.trial.placement

    @property
    def tradeoff(self) -> Tradeoff:
        """Where it was measured."""
        return Tradeoff(self.ratio, self.trial.exactness)

    def beats(self, other: MeasuredPoint) -> bool:
        """Whether it is at least as good in both, and better in one."""
        return self.tradeoff.beats(other.tradeoff)


def undominated(history: Sequence[Trial], plan: Plan) -> tuple[MeasuredPoint, ...]:
    """What was measured, faster than float, and is beaten by nothing else in both; the fastest first."""
    ratios = ratios_to_float(history, plan)
    last = {t.placement: t for t in history if t.placement in ratios and t.accuracy is not None}
    points = [MeasuredPoint(ratios[p], t) for p, t in last.items() if ratios[p] < 1]
    return tuple(sorted((p for p in points if not any(o.beats(p) for o in points)), key=lambda p: p.ratio))


def spread(points: Sequence[MeasuredPoint], count: int) -> tuple[MeasuredPoint, ...]:
    """At most `count` of the points, the two ends among them and the others far from each other; in their order."""
    if len(points) <= count:
        return tuple(points)
    where = np.array([(p.ratio / DECADE_SHARE, -min(p.trial.exactness, MAX_DB) / 10) for p in points])
    chosen = [0, len(points) - 1]
    while len(chosen) < count:
        distances = np.abs(where[:, None] - where[chosen][None]).max(axis=2).min(axis=1)
        chosen.append(int(distances.argmax()))
    return tuple(points[i] for i in sorted(chosen))


def named(points: Sequence[MeasuredPoint]) -> dict[str, MeasuredPoint]:
    """The points by name, after their SQNR: 24db, or 24db-2 where that is taken."""
    found: dict[str, MeasuredPoint] = {}
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
    """See the module. `by_cut` knows the noise of every value; `builds` is what search and proof may spend together, at
    so many numbers of threads as `thread_counts` says."""

    by_cut: CutSearch
    noise: Noise
    builds: int
    thread_counts: int = 1

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        """See `Strategy`: what the cut proposes, until the builds are left that the proof of the points takes."""
        points = TARGET_POINTS if self.builds < 2 * (2 + 2 * MAX_POINTS) else MAX_POINTS
        proof = self.thread_counts * 2 * (1 + points) + SPARE_BUILDS
        least = MIN_SEARCH_BUILDS if best_of(history) else min(USUAL_SEARCH_BUILDS, self.builds)
        most = max(least, self.builds - proof)
        left = most - 1 - sum(t.builds for t in history)
        return self.by_cut.propose(history)[: max(0, left)]

    def candidates(
        self,
        predicted_ratios: Sequence[tuple[Placement, float]],
        history: Sequence[Trial],
        simulated_db: Mapping[Placement, float],
    ) -> tuple[PredictedPoint, ...]:
        """The placements of `predicted_ratios` that may be points of the front, far from each other, at most
        `MAX_CANDIDATES`. `simulated_db` has the SQNR of those that were simulated; that of others is estimated from the
        noise of their values."""
        chosen = list[PredictedPoint]()
        best = unbeaten(self._within_noise(predicted_ratios, history, simulated_db))
        while len(chosen) < MAX_CANDIDATES and (found := farthest(best, [o.tradeoff for o in chosen])) is not None:
            chosen.append(found)
        return tuple(chosen)

    def simulated(self, offer: PredictedPoint) -> PredictedPoint:
        """The offer with its noise as simulated."""
        return replace(
            offer, tradeoff=Tradeoff(offer.tradeoff.ratio, _db(self.noise.expected(offer.placement))), is_simulated=True
        )

    def predicted_ratios(self, history: Sequence[Trial]) -> tuple[tuple[Placement, float], ...]:
        """What is worth a build and had none, and the share of the float model's time that prices foretell of it, as
        far as builds have shown those to be off."""
        costs = self.by_cut.costs(history)
        path, scale = self._optima_by_noise_price(costs), self._scale(costs, history)
        tried = {t.placement for t in history} | {Placement()}
        built = tuple(decision_of(costs, p.placement) for p in undominated(history, self.by_cut.plan))
        decisions = dict.fromkeys((*path, *between(costs, path), *flipped(costs, (*path, *built))))
        ratios = ((d, 1 - scale * (1 - costs.total(d) / costs.float_ms)) for d in decisions)
        worth = ((costs.partition.placement(d), ratio) for d, ratio in ratios if ratio <= WORTHWHILE_RATIO)
        return tuple((placement, ratio) for placement, ratio in worth if placement not in tried)

    def _within_noise(
        self,
        predicted_ratios: Sequence[tuple[Placement, float]],
        history: Sequence[Trial],
        simulated_db: Mapping[Placement, float],
    ) -> Iterator[PredictedPoint]:
        known = {t.placement: t.exactness for t in history if t.sqnr_db is not None}
        summed_db = self._summed_db({**simulated_db, **known})
        for placement, ratio in predicted_ratios:
            db = simulated_db.get(placement)
            offer = PredictedPoint(
                placement, Tradeoff(ratio, summed_db(placement) if db is None else db), db is not None
            )
            if not is_too_noisy(offer.noise, self.noise.limit):
                yield offer

    def _scale(self, costs: Costs, history: Sequence[Trial]) -> float:
        """What builds have gained, as a multiple of what their layers' prices add up to."""
        gains = []
        for placement, ratio in ratios_to_float(history, self.by_cut.plan).items():
            simulated = costs.total(decision_of(costs, placement)) / costs.float_ms
            if placement and simulated <= WORTHWHILE_RATIO:
                gains.append((1 - ratio) / (1 - simulated))
        return float(np.clip(np.median(gains), *SCALE_RANGE)) if gains else 1.0

    def _summed_db(self, known: Mapping[Placement, float]) -> Callable[[Placement], float]:
        """The SQNR of a placement by its sum, from that of known ones in dB."""
        sums = np.array([_db(self.noise.summed(placement)) for placement in known])
        off = np.array(list(known.values())) - sums

        def level(placement: Placement) -> float:
            summed = _db(self.noise.summed(placement))
            like = np.argsort(np.abs(sums - summed), kind="stable")[:SIMILAR_SUMS]
            return summed + (float(off[like].mean()) if len(like) else 0.0)

        return level

    def _optima_by_noise_price(self, costs: Costs) -> tuple[Decision, ...]:
        """The optima of rising prices on noise, each once, the float model at their end. Between two prices that have
        the same optimum all others have it, too."""
        fastest = cut(costs)
        loudest = self.noise.summed(costs.partition.placement(fastest))
        if loudest <= 0:
            return fastest, Decision()
        prices = NOISE_PRICES * costs.total(fastest) / loudest

        def within(low: int, first: Decision, high: int, last: Decision) -> Iterator[Decision]:
            if first != last and high - low > 1:
                middle = (low + high) // 2
                decision = cut(costs, self.noise, float(prices[middle]))
                yield from within(low, first, middle, decision)
                yield decision
                yield from within(middle, decision, high, last)

        return tuple(dict.fromkeys((fastest, *within(-1, fastest, len(prices), Decision()), Decision())))


def between(costs: Costs, path: Sequence[Decision]) -> Iterator[Decision]:
    """Between neighbours of a path, and between each of it and its end: the units that only the first of both runs in 8
    bits are divided in the order of the graph, and stretches of these parts stay so."""
    for first, second in (*pairwise(path), *((decision, path[-1]) for decision in path[:-2])):
        units = sorted(first.quantized - second.quantized)
        ends = sorted({round(i * len(units) / STRETCHES) for i in range(STRETCHES + 1)})
        for start, stop in combinations(ends, 2):
            if stop - start < len(units):
                yield other(costs.partition, first, [*units[:start], *units[stop:]])


def flipped(costs: Costs, path: Sequence[Decision]) -> Iterator[Decision]:
    """Each decision of a path with one of the units that take the most time the other way."""
    parts = costs.partition
    able = sorted((u.number for u in parts.units if u.inputs), key=lambda n: (-costs.prices[n].as_float, n))[
        :FLIPPED_UNITS
    ]
    for decision in path:
        for number in able:
            yield other(parts, decision, [number])


def is_too_noisy(noise: float, limit: float | None) -> bool:
    """Whether so much noise is too far beyond the limit to be of interest."""
    return limit is not None and noise > MAX_EXCESS_NOISE * limit


def unbeaten(candidates: Iterable[PredictedPoint]) -> tuple[PredictedPoint, ...]:
    """Those that no other one is foretold to beat, the fastest first."""
    known = tuple(candidates)
    kept = (o for o in known if not any(other.tradeoff.beats(o.tradeoff) for other in known))
    return tuple(sorted(kept, key=lambda o: o.tradeoff.ratio))


def _db(noise: float) -> float:
    """Relative noise as an SQNR."""
    return float(-10 * np.log10(noise)) if noise > 0 else EQUAL_DB
