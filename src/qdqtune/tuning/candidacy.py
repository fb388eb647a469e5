"""Who may be a point of the front: what the search has found, and what prices foretell between.

What the search would ship proves itself first, on as many pairs of builds as without a front. Then one after the other
meets a build of the user's file, which all have in common, the one next that lies farthest from all that were met. What
does not seem faster there, or is beaten by others, makes room for another. What may ship meets a second build, as does
what one does not tell faster, and what two do not more of them, where builds are left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from qdqtune.engines import threads_of
from qdqtune.engines.runner import Handle
from qdqtune.errors import writing
from qdqtune.graph.saving import data_of
from qdqtune.numerics.accuracy import accuracy, is_finite
from qdqtune.search import best_of, ratios_to_float
from qdqtune.search.front import (
    APART,
    ENOUGH,
    GAIN,
    NEAR,
    NEAREST,
    FrontSearch,
    MeasuredPoint,
    PredictedPoint,
    Tradeoff,
    farthest,
    is_beyond,
    undominated,
)
from qdqtune.timing.pairing import as_many_pairs_as_needed
from qdqtune.timing.ratios import PAIRS, Ratio, on_these_builds, ratio
from qdqtune.tuning.budget import builds_of
from qdqtune.tuning.folder import FRONT
from qdqtune.tuning.meeting import LOOKS, Opponents, confirmed
from qdqtune.tuning.records import PointRecord
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import PROOF_BUILDS
from qdqtune.tuning.threads import Place
from qdqtune.tuning.trial_worker import profiled_runs
from qdqtune.types import EQUAL_DB, Failure, Measurement, Placement, Proposal, Trial

OBVIOUS = 0.8
"""A point that takes at most this share of the float model's time is expected to be told faster by one build."""

SIMULATED = 72
"""Offers that are simulated at most."""


@dataclass(frozen=True)
class Entry:
    """A placement that has met the user's file: its trial, where it was thought to lie, and the rounds of each pair."""

    trial: Trial
    thought: Tradeoff
    measured: tuple[Measurement | Failure, ...]
    is_fresh: bool
    """Whether no search had built it."""

    def seems(self, run: Run) -> Ratio | None:
        """What its pairs of builds say of themselves; None if it failed."""
        parts = [ratio(m, run.settings.proof_plan) for m in self.measured if isinstance(m, Measurement)]
        return on_these_builds(parts) if len(parts) == len(self.measured) else None

    def is_faster(self, run: Run) -> bool:
        """Whether its builds so far are."""
        seems = self.seems(run)
        return seems is not None and seems.verdict == "faster"

    def is_slower(self, run: Run) -> bool:
        """Whether they are slower than the user's file, or failed."""
        seems = self.seems(run)
        return seems is None or seems.verdict == "slower"

    def tradeoff(self, run: Run) -> Tradeoff:
        """Where they show it, as the search has it: beside the float model that it began with, rewrites and all."""
        seems = self.seems(run)
        if seems is None or self.trial.accuracy is None:
            return self.thought
        return Tradeoff(seems.median / run.found.gave, self.trial.exactness)

    def tradeoffs(self, run: Run) -> tuple[Tradeoff, ...]:
        """What nothing else needs to be near to: where it is, and where it was thought to be if it is no point."""
        return (self.tradeoff(run),) if self.is_faster(run) else (self.tradeoff(run), self.thought)


class Candidacy:
    """See the module. `written` are the files of all that were met."""

    def __init__(self, history: Sequence[Trial], run: Run, search: FrontSearch | None) -> None:
        self._history, self._run, self._search = history, run, search
        self._opponents = Opponents(run, Place(threads_of(run.settings.engine), run.runner))
        self._heard: dict[Placement, float] = {}
        self.entries: list[Entry] = []
        self.written: dict[Placement, Path] = {}

    @property
    def builds(self) -> int:
        """What all meetings took."""
        return self._opponents.builds

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Those of what no search had built."""
        return tuple(entry.trial for entry in self.entries if entry.is_fresh and entry.trial.placement)

    def met(self) -> list[Entry]:
        """Those that are left in the end.

        Raises:
            BaselineFailed: the engine does not build the float model again.
            OutputError: a file cannot be written.
        """
        known = -1
        with self._opponents:
            while known < len(self.entries):  # what needs no further build leaves room for others
                known = len(self.entries)
                while self._has_room() and (point := self._next()) is not None:
                    self.entries.append(self._usual(self._entry(point)))
                self._meet_again()
        return self._standing()

    def _meet_again(self) -> None:
        """Further pairs of builds of what those so far do not tell."""
        begun = time.monotonic()
        for few, many in pairwise(LOOKS):
            if self._run.budget.lacks((many - few) * (time.monotonic() - begun)):
                break
            waiting = self._undecided(few, many)
            for number in range(few, many):
                waiting = [self._put(self._met_again(entry, number)) for entry in waiting]

    def _usual(self, entry: Entry) -> Entry:
        """What the search would ship has met as many builds as it needs and there is room for."""
        plan, begun = self._run.settings.proof_plan, time.monotonic()
        if entry.trial.placement != best_of(self._history):
            return entry

        def measure(numbers: Sequence[int]) -> list[Measurement] | Failure:
            nonlocal entry
            for number in numbers:
                entry = self._met_again(entry, number) if number else entry
            failed = next((m for m in entry.measured if isinstance(m, Failure)), None)
            return failed or [m for m in entry.measured[numbers[0] :] if isinstance(m, Measurement)]

        def is_enough(ratios: Sequence[Ratio]) -> bool:
            is_late = self._run.budget.lacks(time.monotonic() - begun)
            return is_late or self._left - self._elsewhere(1, PAIRS) < 2 * len(ratios)  # the next look takes as many

        as_many_pairs_as_needed(measure, plan, is_enough)
        return entry

    def _met_again(self, entry: Entry, number: int) -> Entry:
        result = self._opponents.meet(number, entry.trial.placement, self.written[entry.trial.placement])
        return replace(entry, measured=(*entry.measured, result))

    def _put(self, entry: Entry) -> Entry:
        """In place of what is known of it."""
        same = [e.trial.placement for e in self.entries].index(entry.trial.placement)
        self.entries[same] = entry
        return entry

    def _undecided(self, few: int, many: int) -> list[Entry]:
        """Those that a `few` pairs of builds do not tell faster, the nearest to it first, behind what may ship and has
        met fewer builds than that takes: as many as there are builds for `many` pairs of each."""
        standing = self._standing()
        told = zip(standing, confirmed([e.measured for e in standing], self._run.settings.proof_plan), strict=True)
        known = [(entry, met.ratio) for entry, met in told if met is not None and len(entry.measured) == few]
        waiting = [(found.high, entry) for entry, found in known if found.verdict == "undecided" and found.high]
        first = [entry for entry in self._shippable() if len(entry.measured) == few < PAIRS]
        ordered = [*first, *(e for _, e in sorted(waiting, key=itemgetter(0)) if e not in first)]
        opened = sum(not self._opponents.is_open(number) for number in range(few, many))
        return ordered[: max(0, (self._left - self._for_threads(standing) - opened) // (many - few))]

    def _shippable(self) -> list[Entry]:
        """Those that hold the limits and may be the fastest that do."""
        holding = [e for e in self._standing() if self._run.limits.is_exact_enough(e.trial.accuracy)]
        least = min((e.tradeoff(self._run).ratio for e in holding), default=0.0)
        return [e for e in holding if e.tradeoff(self._run).ratio <= least * (1 + APART[0])]

    def excuse(self, count: int, elsewhere: int) -> str:
        """Why there are no more points than so many, in a sentence. `elsewhere` are those that failed only at another
        number of threads."""
        slow = sum(not entry.is_faster(self._run) for entry in self.entries)
        reasons = {
            "did not prove faster than float": slow,
            "did not hold at another number of threads (--deploy-threads)": elsewhere,
            "lost to others or on a second pair of builds": len(self.entries) - slow - elsewhere - count,
        }
        of_each = [(number, what) for what, number in reasons.items() if number > 0]
        is_single = len(self.entries) == 1
        lost = ", ".join(what if is_single else f"{number} {what}" for number, what in of_each)
        sources = {"of the search": sum(not e.is_fresh for e in self.entries), "made for the front": len(self.trials)}
        came = ", ".join(f"{number} {what}" for what, number in sources.items() if number)
        many = f"of {len(self.entries)} candidates that met your model ({came})"
        met = lost and f"{'the only candidate' if is_single else many} {lost}"
        rest = f"prices foretell no others that differ and take at most {GAIN:.1%} of the float model's time"
        if (is_late := self._run.budget.is_late) or self._next() is not None:
            is_timed = self._run.settings.time_budget is not None and (is_late or self._has_builds())
            ended = "--time-budget" if is_timed else f"--builds {self._run.settings.builds}"
            rest = f"{ended} has no room for {'others' if self.entries else 'any'}: give more"
        return f"the front has {count} point{'s' * (count != 1)}: {'; '.join(filter(None, (met, rest)))}"

    def _has_room(self) -> bool:
        """Whether there are builds, and time, for one more."""
        met = len(self._standing()) if self._run.settings.time_budget is None else len(self.entries)
        return self._has_builds() and met < self._run.budget.points

    def _has_builds(self) -> bool:
        """Whether one more can be met beside what is to come, on two builds where one is not enough."""
        standing = self._standing()
        again = [*self._shippable(), *(entry for entry in standing if not self._is_obvious(entry))]
        waiting = {entry.trial.placement for entry in again if len(entry.measured) < PAIRS}
        holds = any(self._run.limits.is_exact_enough(entry.trial.accuracy) for entry in standing)
        least = 0 if holds or not self.entries else PROOF_BUILDS  # the usual proof, where no point can ship
        opened = sum(not self._opponents.is_open(number) for number in range(PAIRS))
        return opened + 1 + len(waiting) + 1 + self._for_threads(standing, 1) + least <= self._left

    def _for_threads(self, standing: Sequence[Entry], others: int = 0) -> int:
        """Builds that points take at other numbers of threads, and so many others of which nothing is known."""
        clear = sum(map(self._is_obvious, standing))
        return self._elsewhere(clear, 1) + self._elsewhere(len(standing) + others - clear, PAIRS)

    def _is_obvious(self, entry: Entry) -> bool:
        seems = entry.seems(self._run)
        return seems is not None and seems.median <= OBVIOUS

    @property
    def _left(self) -> int:
        """Builds that search and meetings have left."""
        return (
            self._run.settings.builds - 1 - self._run.found.builds - builds_of(self._history) - self._opponents.builds
        )

    def _elsewhere(self, count: int, pairs: int) -> int:
        """Builds that so many points take at other numbers of threads, with those of the user's file that they meet."""
        return (len(self._run.settings.thread_counts) - 1) * (count + bool(count)) * pairs

    def _next(self) -> MeasuredPoint | PredictedPoint | None:
        """What the search would ship, the fastest that nothing beats, then what is farthest from all that were met."""
        plan, met = self._run.settings.plan, {entry.trial.placement for entry in self.entries}
        most, ratios = self._run.limits.max_noise, ratios_to_float(self._history, plan)
        unbeaten = [p for p in undominated(self._history, plan) if not is_beyond(_noise(p.trial), most)]
        best = best_of(self._history)
        first = [MeasuredPoint(ratios[best], t) for t in self._history if t.accepted and t.placement == best]
        fastest = [p for p in unbeaten[:1] if all(p.tradeoff.apart(f.tradeoff) >= NEAR for f in first)]
        waiting = [p for p in (*first, *fastest) if p.trial.placement not in met]
        if waiting:
            return waiting[0]
        if self._run.subject.rewrites.names and Placement() not in met:
            return PredictedPoint(Placement(), Tradeoff(1.0, EQUAL_DB), is_simulated=True)
        history = [*self._history, *self.trials]
        times = () if self._search is None else self._search.times(history)
        points = [p for p in unbeaten if p.trial.placement not in met]
        while True:
            before = len(self._heard)  # what was simulated says more of the others
            offers = () if self._search is None else self._search.offers(times, history, self._heard)
            found = self._far([*points, *offers])
            if found is not None or len(self._heard) == before:
                return found

    def _far(self, candidates: Sequence[MeasuredPoint | PredictedPoint]) -> MeasuredPoint | PredictedPoint | None:
        """The one that is farthest from all that were met, and by all that is known not beaten."""
        standing = [entry.tradeoff(self._run) for entry in self._standing()]
        near = NEAR if len(standing) >= ENOUGH else NEAREST
        taken = [tradeoff for entry in self.entries for tradeoff in entry.tradeoffs(self._run)]
        good = [*(c.tradeoff for c in candidates if isinstance(c, MeasuredPoint)), *standing]
        left = list(candidates)
        while True:
            left = [c for c in left if isinstance(c, MeasuredPoint) or not any(g.beats(c.tradeoff) for g in good)]
            found = farthest(left, taken, near)
            if not isinstance(found, PredictedPoint) or found.is_simulated:
                return found
            left.remove(found)
            left += filter(None, [self._foretold(found)])

    def _foretold(self, offer: PredictedPoint) -> PredictedPoint | None:
        """The offer with its noise as simulated; None if it is too noisy, or enough were simulated."""
        if self._search is None or len(self._heard) >= SIMULATED:
            return None
        known = self._search.foretold(offer)
        self._heard[offer.placement] = known.tradeoff.db
        return None if is_beyond(known.noise, self._search.noise.limit) else known

    def _standing(self) -> list[Entry]:
        """Those that prove faster and are not beaten. What the search took stays where a metric decides: what beats it
        may miss that."""
        faster = [(e, e.tradeoff(self._run)) for e in self.entries if e.is_faster(self._run)]
        stays = best_of(self._history) if self._run.limits.max_drop is not None else None
        return [e for e, s in faster if e.trial.placement == stays or not any(o.beats(s) for _, o in faster)]

    def _entry(self, point: MeasuredPoint | PredictedPoint) -> Entry:
        """Write the file of a point, and let it meet the user's once."""
        file = self._write(point.placement)
        if isinstance(point, MeasuredPoint):
            return Entry(point.trial, point.tradeoff, (self._opponents.meet(0, point.placement, file),), is_fresh=False)
        proposal = Proposal("front", point.placement, predicted=point.tradeoff.ratio)
        number = len(self._history) + len(self.trials) + 1
        trial = Trial(number, proposal, Placement(), Failure("run", "not measured yet"))
        seen, store = point.placement.digest, self._run.store

        def look(handle: Handle) -> None:
            store.put(self._looked_at(handle, seen))

        is_known = store.get(PointRecord, seen) is not None
        result = self._opponents.meet(0, point.placement, file, None if is_known else look)
        known = store.get(PointRecord, seen)
        if known is not None and known.accuracy is not None and isinstance(result, Measurement):
            holds = self._run.limits.is_exact_enough(known.accuracy)
            beside = _slower(result, self._run.found.gave)
            trial = replace(trial, result=beside, accuracy=known.accuracy, holds=holds, layers=known.layers)
        else:
            result = result if known is None or known.failure is None else known.failure
            trial = replace(trial, result=result)
        if point.placement:
            self._run.bench.keep(trial)
        return Entry(trial, point.tradeoff, (result,), is_fresh=True)

    def _write(self, placement: Placement) -> Path:
        """A file of its own, under a name that says nothing yet."""
        file = self._run.output.claim(self._run.settings.output_dir / FRONT / f"{placement.digest}.onnx")
        self._run.output.claim(data_of(file))
        self._run.candidates.write_whole(placement, file)
        self.written[placement] = file
        return file

    def _looked_at(self, handle: Handle, of: str) -> PointRecord:
        """How exact a build is, and what its layers take, from which prices learn."""
        runner, bench = self._run.runner, self._run.bench
        outputs = runner.outputs(handle, self._run.subject.accuracy)
        if isinstance(outputs, Failure):
            return PointRecord(of=of, failure=outputs)
        if not is_finite(outputs):
            return PointRecord(of=of, failure=Failure("output", "the outputs hold NaN or infinite values"))
        layers = runner.layers(handle, profiled_runs(bench.floats.seconds))
        told = () if isinstance(layers, Failure) else layers
        return PointRecord(of=of, accuracy=accuracy(bench.floats.outputs, outputs), layers=told)


def _slower(met: Measurement, by: float) -> Measurement:
    """What met the user's file, as if it had met a model that takes so many times as long."""
    return Measurement(tuple(by * seconds for seconds in met.a), met.b, tuple(_slower(part, by) for part in met.parts))


def _noise(trial: Trial) -> float:
    return 0.0 if trial.accuracy is None else trial.accuracy.noise


def move_model(file: Path, target: Path, run: Run, placement: Placement) -> None:
    """Give a written placement another name; one whose constants lie in a file of their own, named after it, is written
    again."""
    if data_of(file).exists():
        run.output.claim(data_of(target))
        run.candidates.write_whole(placement, target)
        return
    with writing(target):
        file.replace(target)
