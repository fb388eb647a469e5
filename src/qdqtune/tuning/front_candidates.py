"""Finds and compares candidates for a front: placements that the search has built, and others that its prices predict.

First the best placement of the search is compared with the user's file, on as many pairs of builds as without a front.
Then one build of each further candidate is compared with one build of the user's file, always the candidate farthest
from those before in time and accuracy. More are chosen in place of those that are slower or beaten. While builds are
left, candidates that may ship or are undecided get a second pair, and undecided ones get more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from qdqtune.engines.runner import Handle
from qdqtune.errors import EngineRefused, Failure
from qdqtune.graph.saving import data_of
from qdqtune.numerics.accuracy import accuracy, check_finite
from qdqtune.search import best_of, ratios_to_float
from qdqtune.search.front import (
    DISTANCE_UNITS,
    NEAR,
    NEAREST,
    TARGET_POINTS,
    FrontSearch,
    MeasuredPoint,
    PredictedPoint,
    Tradeoff,
    farthest,
    is_too_noisy,
    undominated,
)
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import PAIRS, Plan, Ratio, as_many_pairs_as_needed, on_these_builds, ratio, wants_builds
from qdqtune.tuning.budget import builds_of
from qdqtune.tuning.comparison import Comparer, SharedBuilds
from qdqtune.tuning.contexts import Context
from qdqtune.tuning.folder import BASELINE, FRONT
from qdqtune.tuning.records import PointRecord
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import PROOF_BUILDS
from qdqtune.tuning.shipping import LOOKS, judged_together
from qdqtune.tuning.trial_worker import profiled_runs
from qdqtune.types import EQUAL_DB, Layer, Measurement, Placement, Proposal, Trial

SIMULATED = 72
"""How many predicted points are simulated at most in a run. Chosen, not measured."""

OBVIOUS = 0.8
"""A candidate that takes at most this share of the float model's time is expected to prove faster on one build. Chosen,
not measured."""


# ---------------------------------------------------------------- decisions: pure functions of values


@dataclass(frozen=True)
class FrontTerms:
    """What a run demands of its front.

    `plan` is that of the proof, `builds` is the number left after the search. `rewrites_ratio` is the ratio of the
    search's float model to the user's file. `kept` is a placement that counts as unbeaten, because the search chose it
    by the user's metric.
    """

    plan: Plan
    limits: Limits
    builds: int
    rewrites_ratio: float = 1.0
    kept: Placement | None = None


@dataclass(frozen=True)
class FrontCandidate:
    """A placement whose file was compared with the user's.

    `expected` is the trade-off that the search or its prices predicted, `tradeoff` what the comparisons show, with the
    ratio to the float model of the search. `measured` are the rounds of each pair of builds, `seems` their ratio, None
    where one failed. `is_exact`: its outputs hold the limits. `is_new`: the search had not built it.
    """

    trial: Trial
    expected: Tradeoff
    measured: tuple[Measurement | Failure, ...]
    seems: Ratio | None
    tradeoff: Tradeoff
    is_exact: bool
    is_new: bool

    @property
    def placement(self) -> Placement:
        return self.trial.placement

    @property
    def is_faster(self) -> bool:
        """Whether its builds so far are faster than the user's file."""
        return self.seems is not None and self.seems.verdict == "faster"

    @property
    def is_slower(self) -> bool:
        """Whether its builds so far are slower than the user's file, or one failed."""
        return self.seems is None or self.seems.verdict == "slower"

    @property
    def is_obvious(self) -> bool:
        """Whether it is expected to prove faster on one build."""
        return self.seems is not None and self.seems.median <= OBVIOUS

    @property
    def taken(self) -> tuple[Tradeoff, ...]:
        """Trade-offs that other candidates are to be far from: its own, and if it is not faster the expected one."""
        return (self.tradeoff,) if self.is_faster else (self.tradeoff, self.expected)


def judged(
    trial: Trial, expected: Tradeoff, measured: Sequence[Measurement | Failure], terms: FrontTerms, *, is_new: bool
) -> FrontCandidate:
    """The candidate of a trial, judged by its pairs of builds so far."""
    ratios = [ratio(m, terms.plan) for m in measured if isinstance(m, Measurement)]
    seems = on_these_builds(ratios) if len(ratios) == len(measured) else None
    is_known = seems is not None and trial.accuracy is not None
    tradeoff = Tradeoff(seems.median / terms.rewrites_ratio, trial.exactness) if seems and is_known else expected
    return FrontCandidate(
        trial, expected, tuple(measured), seems, tradeoff, terms.limits.is_exact_enough(trial.accuracy), is_new
    )


def promising(candidates: Collection[FrontCandidate], kept: Placement | None) -> list[FrontCandidate]:
    """The candidates that are faster than the user's file and that no other one beats; `kept` counts as unbeaten."""
    faster = [c for c in candidates if c.is_faster]
    return [c for c in faster if c.placement == kept or not any(o.tradeoff.beats(c.tradeoff) for o in faster)]


def may_ship(points: Sequence[FrontCandidate]) -> list[FrontCandidate]:
    """Of promising candidates, those that hold the limits and are as fast as the fastest of these, or nearly so."""
    holding = [c for c in points if c.is_exact]
    least = min((c.tradeoff.ratio for c in holding), default=0.0)
    return [c for c in holding if c.tradeoff.ratio <= least * (1 + DISTANCE_UNITS[0])]


def to_compare_again(
    candidates: Collection[FrontCandidate], terms: FrontTerms, few: int, many: int, *, spent: int, to_open: int
) -> list[FrontCandidate]:
    """The candidates to compare on `many` pairs of builds that were compared on `few`: those that may ship and need a
    second pair, then those that `few` pairs do not decide, the nearest to a decision first. Only as many as builds are
    left for, where `spent` were used so far and the user's file has to be built `to_open` times."""
    points = promising(candidates, terms.kept)
    together = zip(points, judged_together([c.measured for c in points], terms.plan), strict=True)
    known = [(c, found.ratio) for c, found in together if found is not None and len(c.measured) == few]
    undecided = [(r.high or r.median, c) for c, r in known if r.verdict == "undecided"]
    first = [c for c in may_ship(points) if len(c.measured) == few < PAIRS]
    ordered = [*first, *(c for _, c in sorted(undecided, key=lambda pair: pair[0]) if c not in first)]
    room = terms.builds - spent - to_open
    return ordered[: max(0, room // (many - few))]


def has_builds_for_another(
    candidates: Collection[FrontCandidate], terms: FrontTerms, *, spent: int, to_open: int
) -> bool:
    """Whether builds are left for one more candidate beside what the others still need: a second pair where one is not
    enough, and the usual proof if no point may ship."""
    points = promising(candidates, terms.kept)
    again = [*may_ship(points), *(c for c in points if not c.is_obvious)]
    waiting = {c.placement for c in again if len(c.measured) < PAIRS}
    is_usual = bool(candidates) and not any(c.is_exact for c in points)
    needed = to_open + 1 + len(waiting) + 1
    return needed + (PROOF_BUILDS if is_usual else 0) <= terms.builds - spent


# ---------------------------------------------------------------- finding and comparing them


ByPlacement = dict[Placement, FrontCandidate]
"""All candidates that were compared with the user's file, in the order in which they were chosen."""


def compare_candidates(history: Sequence[Trial], run: Run, search: FrontSearch | None) -> FrontCandidates:
    """Compare candidates with the user's file until there are enough points, or builds or time are spent."""
    settings = run.settings
    terms = FrontTerms(
        plan=settings.proof_plan,
        limits=run.limits,
        builds=settings.builds - 1 - run.found.builds - builds_of(history),
        rewrites_ratio=run.found.ratio,
        kept=best_of(history) if run.limits.max_drop is not None else None,
    )
    finder, candidates = PointFinder(history, run, terms, search), ByPlacement()
    context = Context(None, run.runner, run.runner.mix)
    shared = SharedBuilds(Comparer.of(run), context, settings.model, settings.output_dir / BASELINE)
    comparing = _Comparing(run, terms, shared)
    with shared:
        known = -1
        while known < len(candidates):  # candidates that are decided leave builds for others
            known = len(candidates)
            while comparing.has_room(candidates) and (point := finder.next(candidates)) is not None:
                number = len(history) + len(_new_trials(candidates.values())) + 1
                candidate = comparing.first(point, number)
                is_favourite = candidate.placement == best_of(history)
                candidates[candidate.placement] = comparing.as_without_front(candidate) if is_favourite else candidate
            comparing.again(candidates)
    has_builds = comparing.has_builds(candidates)
    return FrontCandidates(candidates, comparing.files, shared.builds, has_builds, finder)


@dataclass(frozen=True)
class FrontCandidates:
    """All candidates that were compared with the user's file, their files, and the builds that the comparisons took.
    `has_builds`: builds were left for another candidate."""

    by_placement: ByPlacement
    files: dict[Placement, Path]
    builds: int
    has_builds: bool
    finder: PointFinder

    @property
    def promising(self) -> list[FrontCandidate]:
        """The candidates that may become points of the front."""
        return promising(self.by_placement.values(), self.finder.terms.kept)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials of candidates that the search had not built."""
        return _new_trials(self.by_placement.values())

    def has_more(self) -> bool:
        return self.finder.next(self.by_placement) is not None


def _new_trials(candidates: Iterable[FrontCandidate]) -> tuple[Trial, ...]:
    return tuple(c.trial for c in candidates if c.is_new and c.placement)


@dataclass(frozen=True)
class PointFinder:
    """Chooses which point is compared next. `simulated` keeps the SQNR in dB of points that were simulated."""

    history: Sequence[Trial]
    run: Run
    terms: FrontTerms
    search: FrontSearch | None
    simulated: dict[Placement, float] = field(default_factory=dict)

    def next(self, candidates: ByPlacement) -> MeasuredPoint | PredictedPoint | None:
        """The point to compare next, the first of these that is no candidate yet: the best placement of the search, the
        fastest that no other beats, the rewritten float model, the point that is farthest from all candidates. None if
        every point is near a candidate."""
        plan = self.run.settings.plan
        most, ratios = self.run.limits.max_noise, ratios_to_float(self.history, plan)
        unbeaten = [p for p in undominated(self.history, plan) if not is_too_noisy(_noise(p.trial), most)]
        best = best_of(self.history)
        first = [MeasuredPoint(ratios[best], t) for t in self.history if t.accepted and t.placement == best]
        fastest = [p for p in unbeaten[:1] if all(p.tradeoff.apart(f.tradeoff) >= NEAR for f in first)]
        waiting = [p for p in (*first, *fastest) if p.placement not in candidates]
        if waiting:
            return waiting[0]
        if self.run.subject.changes and Placement() not in candidates:
            return PredictedPoint(Placement(), Tradeoff(1.0, EQUAL_DB), is_simulated=True)
        history = [*self.history, *_new_trials(candidates.values())]
        times = () if self.search is None else self.search.predicted_ratios(history)
        points = [p for p in unbeaten if p.placement not in candidates]
        while True:
            before = len(self.simulated)  # each simulated SQNR corrects predictions for the others
            offers = () if self.search is None else self.search.candidates(times, history, self.simulated)
            found = self._farthest([*points, *offers], candidates)
            if found is not None or len(self.simulated) == before:
                return found

    def _farthest(
        self, offers: Sequence[MeasuredPoint | PredictedPoint], candidates: ByPlacement
    ) -> MeasuredPoint | PredictedPoint | None:
        """The offer farthest from all candidates that nothing measured beats; predicted ones are simulated before."""
        points = [c.tradeoff for c in promising(candidates.values(), self.terms.kept)]
        near = NEAR if len(points) >= TARGET_POINTS else NEAREST
        taken = [tradeoff for candidate in candidates.values() for tradeoff in candidate.taken]
        good = [*(o.tradeoff for o in offers if isinstance(o, MeasuredPoint)), *points]
        left = list(offers)
        while True:
            left = [o for o in left if isinstance(o, MeasuredPoint) or not any(g.beats(o.tradeoff) for g in good)]
            found = farthest(left, taken, near)
            if not isinstance(found, PredictedPoint) or found.is_simulated:
                return found
            left.remove(found)
            left += filter(None, [self._simulated(found)])

    def _simulated(self, offer: PredictedPoint) -> PredictedPoint | None:
        """The point with its simulated SQNR; None if it is too noisy, or `SIMULATED` points were simulated."""
        if self.search is None or len(self.simulated) >= SIMULATED:
            return None
        known = self.search.simulated(offer)
        self.simulated[offer.placement] = known.tradeoff.db
        return None if is_too_noisy(known.noise, self.search.noise.limit) else known


@dataclass(frozen=True)
class _Comparing:
    """Writes the `files` of candidates and compares them with the user's file, in the context of the search."""

    run: Run
    terms: FrontTerms
    shared: SharedBuilds
    files: dict[Placement, Path] = field(default_factory=dict)

    def has_room(self, candidates: ByPlacement) -> bool:
        """Whether builds and time are left for one more candidate, and the front may get one more point."""
        points = promising(candidates.values(), self.terms.kept)
        many = len(points) if self.run.settings.time_budget is None else len(candidates)
        return self.has_builds(candidates) and many < self.run.budget.points

    def has_builds(self, candidates: ByPlacement) -> bool:
        to_open = self._to_open(range(PAIRS))
        return has_builds_for_another(candidates.values(), self.terms, spent=self.shared.builds, to_open=to_open)

    def _to_open(self, numbers: Sequence[int]) -> int:
        return sum(not self.shared.is_open(number) for number in numbers)

    def again(self, candidates: ByPlacement) -> None:
        """Compare candidates on further pairs of builds where those so far do not decide, look by look."""
        begun = time.monotonic()
        for few, many in pairwise(LOOKS):
            if self.run.budget.lacks((many - few) * (time.monotonic() - begun)):
                break
            spent, to_open = self.shared.builds, self._to_open(range(few, many))
            chosen = to_compare_again(candidates.values(), self.terms, few, many, spent=spent, to_open=to_open)
            for number in range(few, many):
                for placement in [c.placement for c in chosen]:
                    known = candidates[placement]
                    candidates[placement] = self._with(known, (*known.measured, self._measured(number, placement)))

    def as_without_front(self, candidate: FrontCandidate) -> FrontCandidate:
        """Compare a candidate on as many pairs of builds as without a front, while builds and time are left."""
        begun, measured = time.monotonic(), list(candidate.measured)

        def measure(numbers: Sequence[int]) -> list[Measurement]:
            measured.extend(self._measured(number, candidate.placement) for number in numbers if number)
            for one in measured:
                if isinstance(one, Failure):
                    raise EngineRefused(one)
            return [m for m in measured[numbers[0] :] if isinstance(m, Measurement)]

        def wants_more(ratios: Sequence[Ratio]) -> bool:
            is_late = self.run.budget.lacks(time.monotonic() - begun)
            left = self.terms.builds - self.shared.builds
            can_follow = not is_late and left >= 2 * len(ratios)  # the next look takes as many
            return can_follow and wants_builds(ratios, self.terms.plan)

        with suppress(EngineRefused):  # the failure is among what was measured
            as_many_pairs_as_needed(measure, self.terms.plan, wants_more)
        return self._with(candidate, measured)

    def _with(self, known: FrontCandidate, measured: Sequence[Measurement | Failure]) -> FrontCandidate:
        return judged(known.trial, known.expected, measured, self.terms, is_new=known.is_new)

    def _measured(self, number: int, placement: Placement) -> Measurement | Failure:
        return self._outcome(number, placement, None)

    def _outcome(
        self, number: int, placement: Placement, look: Callable[[Handle], None] | None
    ) -> Measurement | Failure:
        try:
            return self.shared.compare(number, placement.digest, self.files[placement], look)
        except EngineRefused as refused:
            return refused.failure

    def first(self, point: MeasuredPoint | PredictedPoint, number: int) -> FrontCandidate:
        """Write the file of a point and compare it on one pair of builds. If the search has not built it, a new trial
        gets this `number`."""
        placement = point.placement
        self._write(placement)
        if isinstance(point, MeasuredPoint):
            measured = (self._measured(0, placement),)
            return judged(point.trial, point.tradeoff, measured, self.terms, is_new=False)
        proposal = Proposal("front", placement, predicted=point.tradeoff.ratio)
        trial = Trial(number, proposal, Placement(), Failure("run", "not measured yet"))
        store, key = self.run.store, f"point:{placement.digest}"

        def look(handle: Handle) -> None:
            with suppress(EngineRefused):
                store.memo(key, PointRecord, lambda: self._point(handle))

        result = self._outcome(0, placement, None if store.has(key) else look)
        known: PointRecord | None = None
        try:
            known = store.get(key, PointRecord)
        except EngineRefused as refused:
            result = refused.failure
        if known is not None and isinstance(result, Measurement):
            holds = self.run.limits.on_outputs(known.accuracy)
            against_float = _with_scaled_a(result, self.terms.rewrites_ratio)
            trial = replace(trial, result=against_float, accuracy=known.accuracy, holds=holds, layers=known.layers)
        else:
            trial = replace(trial, result=result)
        if placement:
            self.run.bench.keep(trial)
        return judged(trial, point.tradeoff, (result,), self.terms, is_new=True)

    def _write(self, placement: Placement) -> None:
        """Write the file of a placement, named by its digest until the points get names."""
        file = self.run.output.claim(self.run.settings.output_dir / FRONT / f"{placement.digest}.onnx")
        self.run.output.claim(data_of(file))
        self.run.candidates.write_whole(placement, file)
        self.files[placement] = file

    def _point(self, handle: Handle) -> PointRecord:
        """The accuracy of a build, and its layers, from which the search learns prices."""
        runner, bench = self.run.runner, self.run.bench
        layers = tuple[Layer, ...]()
        outputs = runner.outputs(handle, self.run.subject.accuracy)
        check_finite(outputs)
        try:
            layers = runner.layers(handle, profiled_runs(bench.floats.seconds))
        except EngineRefused as refused:
            if refused.is_transient:
                raise
        return PointRecord(accuracy=accuracy(bench.reference, outputs, bench.scores), layers=layers)


def _with_scaled_a(measured: Measurement, by: float) -> Measurement:
    parts = tuple(_with_scaled_a(part, by) for part in measured.parts)
    return Measurement(tuple(by * seconds for seconds in measured.a), measured.b, parts)


def _noise(trial: Trial) -> float:
    return 0.0 if trial.accuracy is None else trial.accuracy.noise
