"""The proof: the files that may ship meet the user's own on fresh builds, and what is not faster does not ship.

A file has to hold at every number of threads that it is deployed with: it ships if it is slower at none of them, and
faster at one.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from qdqtune.engines.build_queue import Urgency
from qdqtune.errors import BaselineFailed, writing
from qdqtune.graph.loading import data_files, load
from qdqtune.graph.saving import data_of
from qdqtune.search import ratios_to_float
from qdqtune.system.writing import atomic_write, rename_all
from qdqtune.timing.pairing import FRESH, begin_pairs
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning import advice
from qdqtune.tuning.folder import BASELINE, FINAL
from qdqtune.tuning.meeting import Confirmed, confirm
from qdqtune.tuning.records import Shipped
from qdqtune.tuning.run import Run
from qdqtune.tuning.threads import SLOWER, Place, places
from qdqtune.types import Failure, Mix, Placement, Trial

REWRITES_ALONE = "no pair is worth its time here: what ships is the float model with its rewrites"

FINALISTS = 2
"""Placements that may try to prove themselves."""

MOST_FINALISTS = 5
"""The same where those before were faster, but slower at another number of threads."""

CLEAR = 0.95
"""A share of the float model's time that builds do not differ by."""


@dataclass(frozen=True)
class Standing:
    """How a file stands to the float model at a number of threads, None where the engine has none; seconds per
    inference are medians. `by_workload` says the same of each of several workloads, by its place in the mix."""

    threads: int | None
    ratio: Ratio
    float_seconds: float
    seconds: float
    by_workload: tuple[Standing, ...] = ()

    @classmethod
    def of(cls, threads: int | None, met: Confirmed) -> Self:
        """What two files that met say."""
        return cls(threads, met.ratio, met.a_seconds, met.b_seconds, tuple(cls.of(threads, p) for p in met.parts))

    @property
    def is_slower(self) -> bool:
        """Whether it is, or seems to be by more than nobody would notice."""
        return self.ratio.verdict == "slower" or (self.ratio.verdict == "undecided" and self.ratio.median > SLOWER)

    @property
    def row(self) -> dict[str, Any]:
        """For machines."""
        return {"threads": self.threads} | self.figures

    @property
    def figures(self) -> dict[str, Any]:
        """Its ratio and its times, for machines."""
        return {
            "ratio": self.ratio.median,
            "low": self.ratio.low,
            "high": self.ratio.high,
            "verdict": self.ratio.verdict,
            "baseline_ms": 1e3 * self.float_seconds,
            "final_ms": 1e3 * self.seconds,
        }


def foremost(standings: Sequence[Standing]) -> Standing:
    """Where a result is told from: the first place where it is faster, or the first of all."""
    return next((one for one in standings if one.ratio.verdict == "faster"), standings[0])


def rows_of(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """What summary.json tells of numbers of threads: nothing of an engine that has none."""
    return [one.row for one in standings if one.threads is not None]


def rows_by_workload(standings: Sequence[Standing], mix: Mix) -> list[dict[str, Any]]:
    """What summary.json tells of several workloads: their names and shares, and how each stands where the result is
    told from; no more where nothing was proven."""
    named = [{"name": w.name, "share": w.share} for w in mix]
    if not standings:
        return named
    return [row | one.figures for row, one in zip(named, foremost(standings).by_workload, strict=False)]


def lost(standings: Sequence[Standing], mix: Mix) -> Iterator[str]:
    """A line for each workload that is slower in what ships, where that is worst."""
    for number, workload in enumerate(mix if standings and standings[0].by_workload else ()):
        alone = [(one.by_workload[number], one.threads) for one in standings]
        worst, threads = max(alone, key=lambda pair: pair[0].ratio.median)
        if worst.is_slower:
            at = f" at {threads} thread{'s' * (threads != 1)}" if threads is not None and len(standings) > 1 else ""
            yield (
                f"{workload.name} alone ({workload.share:.0%} of the calls) got slower: {worst.ratio.speedup} the "
                f"speed of float{at}; the others gain more than it loses"
            )


def is_held(standings: Sequence[Standing]) -> bool:
    """Whether a file is slower nowhere, and faster somewhere."""
    return not any(one.is_slower for one in standings) and foremost(standings).ratio.verdict == "faster"


@dataclass(frozen=True)
class Proof:
    """What ships ("tuned", "baseline", or "given": a copy of the user's file), and how it compares.

    `ratio` is the final file's to the float model, `to_given` that to the user's file where this has pairs already, or
    inputs that were fixed; both None where nothing is proven. Seconds per inference are medians. `standings` tell the
    same for each number of threads.
    """

    shipped: Shipped
    placement: Placement
    ratio: Ratio | None
    to_given: Ratio | None
    float_seconds: float
    final_seconds: float
    notes: tuple[str, ...]
    builds: int
    standings: tuple[Standing, ...] = ()


@dataclass(frozen=True)
class _Meeting:
    """A file against the float model and against the user's own file; the latter None if the engine does not run it."""

    standing: Standing
    to_given: Ratio | None
    builds: int
    note: str = ""


@dataclass
class _Contest:
    """What happened so far to placements that tried to prove themselves."""

    run: Run
    places: Sequence[Place]
    pairs_hold: bool
    """Whether the user's file has pairs, and may ship as it is: then it is to be beaten, too."""
    notes: dict[str, None] = field(default_factory=dict)
    builds: int = 0
    seconds: float = 0.0
    """What the last one took."""
    vetoed: bool = False
    """Whether one was faster, but slower at another number of threads."""
    idle: Placement | None = None
    """The first that held, though by what rewrites gave: without its pairs the model seems to be as fast."""
    last: Sequence[_Meeting] = ()

    @property
    def is_rewritten(self) -> bool:
        """Whether the float model is another one than the user's, and may ship without pairs if that is faster."""
        return bool(self.run.subject.rewrites.names)

    def tried(self, placement: Placement) -> bool:
        """Write a placement's file and let it meet the others; whether it ships."""
        begun, builds = time.monotonic(), self.builds
        _unproven(placement, self.run)
        self.last = list(self._meetings(placement))
        self.seconds = time.monotonic() - begun
        self.run.given.check()
        standings = [met.standing for met in self.last]
        if not placement and not self.is_rewritten:
            return False
        if is_held(standings) and (not (self.pairs_hold or _is_folded(self.run)) or self._beats_given()):
            if placement == self.idle:  # its meetings are known
                self.builds = builds
                return True
            if self._pairs_pay(placement):
                return True
            self.idle = placement
            return False
        self._explain(placement, standings)
        return False

    def _pairs_pay(self, placement: Placement) -> bool:
        """Whether a rewritten model is faster with its pairs than without: they round, and are not to ship for what
        rewrites gave. Measured where the two are near each other, if there is time for that."""
        standings = [met.standing for met in self.last]
        best = standings.index(foremost(standings))
        near = standings[best].ratio.median > CLEAR * self.run.found.gave
        if not placement or not self.is_rewritten or not near or self.run.budget.lacks(self.seconds):
            return True
        baseline, final = self.run.settings.output_dir / BASELINE, _unproven(placement, self.run)
        met = confirm(f"alone:{placement.digest}", baseline, final, self.run, self.places[best])
        if isinstance(met, Failure):
            raise BaselineFailed(f"the engine failed on the finished files: {met.reason}")
        self.builds += met.builds
        if met.ratio.verdict != "faster":
            speed = f"{met.ratio.speedup} the speed without its pairs"
            self.notes[f"a candidate of {len(placement)} edges did not prove more than its rewrites: {speed}"] = None
        return met.ratio.verdict == "faster"

    def _meetings(self, placement: Placement) -> Iterator[_Meeting]:
        """Place by place, until one says no, or there is no time to win at another one; the float model is no other
        one at other threads."""
        found, is_won = self.places if placement or self.is_rewritten else self.places[:1], False
        begun = time.monotonic()
        for number, place in enumerate(found):
            if number and not is_won and self.run.budget.lacks((time.monotonic() - begun) / number):
                return
            met = _meet(placement, self.run, place, is_won=is_won)
            self.builds += met.builds
            self.notes |= {met.note: None} if met.note else {}
            yield met
            if met.standing.is_slower:
                return
            is_won = is_won or met.standing.ratio.verdict == "faster"

    def _beats_given(self) -> bool:
        known = [met.to_given for met in self.last if met.to_given is not None]
        return not known or (any(r.verdict == "faster" for r in known) and all(r.verdict != "slower" for r in known))

    def _explain(self, placement: Placement, standings: Sequence[Standing]) -> None:
        edges = f"a candidate of {len(placement)} edges" if placement else "the float model with its rewrites"
        first, end = foremost(standings), standings[-1]
        if first is not end and first.ratio.verdict == "faster" and end.is_slower:
            self.vetoed = True
            there, here = f"{end.threads} threads", f"{first.threads} thread{'s' * (first.threads != 1)}"
            note = f"{edges} is no gain where it may run: {first.ratio.speedup} the speed of float at {here}, but "
            self.notes[f"{note}{end.ratio.speedup} at {there}"] = None
            return
        known = [met.to_given for met in self.last if met.to_given is not None]
        if is_held(standings) and known:  # faster than float, but not than the user's file
            slowest, name = max(known, key=lambda ratio: ratio.median), self.run.settings.model.name
            self.notes[f"{edges} did not prove faster than {name}: {advice.unproven(slowest, name)}"] = None
            return
        self.notes[f"{edges} did not prove faster on fresh builds: {advice.unproven(first.ratio)}"] = None


def prove(history: Sequence[Trial], run: Run) -> Proof:
    """Write the files that may ship, and pair them as they lie on disk.

    The search's favourite is flattered by its luck. Where it does not prove itself, the one before it gets a chance;
    where it is only slower at another number of threads, so do other candidates that were faster than float. In the end
    the float model as we write it meets the user's file, and is not to be slower either, unless there is no time for
    that; where it was rewritten and is faster it ships, and else the user's file does. A placement whose gain is its
    rewrites' ships only if they alone do not prove it.

    Raises:
        BaselineFailed: the engine fails on a finished file.
        OutputError: a file cannot be written.
    """
    settings, folder = run.settings, run.settings.output_dir
    run.candidates.write_whole(Placement(), folder / BASELINE)
    pairs_hold = settings.from_qdq and not any(t.proposal.origin == "imported" and t.holds is False for t in history)
    with places(settings.engine, settings.thread_counts, run.runner, run.subject.mix) as found:
        contest = _Contest(run, found, pairs_hold)
        for placement in _finalists(history, contest):
            if contest.tried(placement):
                contest.notes |= {} if placement else {REWRITES_ALONE: None}
                _move(_unproven(placement, run), folder / FINAL)
                return _proof(placement, contest)
            if placement != contest.idle:  # a whole model, which nobody needs any more
                shutil.rmtree(_unproven(placement, run).parent)
    met = contest.last[0] if contest.last else None
    is_slower = met is not None and met.to_given is not None and met.to_given.verdict == "slower"
    is_given = pairs_hold if settings.from_qdq else is_slower or contest.is_rewritten
    copy_model(settings.model if is_given else folder / BASELINE, folder / FINAL)
    kept: Shipped = "given" if is_given else "baseline"
    seconds = run.bench.floats.seconds if met is None else met.standing.float_seconds
    return Proof(kept, Placement(), None, None, seconds, seconds, tuple(contest.notes), contest.builds)


def _proof(placement: Placement, contest: _Contest) -> Proof:
    """Of what has just proven itself."""
    best = foremost([met.standing for met in contest.last])
    given = next(met.to_given for met in contest.last if met.standing is best)
    standings = tuple(met.standing for met in contest.last)
    return Proof(
        "tuned",
        placement,
        best.ratio,
        given if contest.run.settings.from_qdq or _is_folded(contest.run) else None,
        best.float_seconds,
        best.seconds,
        tuple(contest.notes),
        contest.builds,
        standings,
    )


def _finalists(history: Sequence[Trial], contest: _Contest) -> Iterator[Placement]:
    """Those that were accepted, the last one first; behind candidates that only another number of threads has stopped
    the others that hold the limits and were clearly faster than float, the fastest first; and the float model. None
    that there is no time for. In the end the one whose gain is its rewrites' gets another chance."""
    run = contest.run
    is_bounded = run.settings.time_budget is not None
    if is_bounded and not history:
        return
    accepted = [t.placement for t in reversed(history) if t.accepted]
    ratios = ratios_to_float(history, run.settings.plan)
    held = {t.placement: ratios[t.placement] for t in history if t.placement in ratios and t.holds is not False}
    others = [p for p in sorted(held, key=held.__getitem__) if p and held[p] < CLEAR]
    first = accepted[: 1 if is_bounded else FINALISTS]
    queue = list(dict.fromkeys([*first, *others]))[:MOST_FINALISTS]
    for number, placement in enumerate(queue):
        if (number >= len(first) and not contest.vetoed) or contest.idle is not None:
            break
        if number and run.budget.lacks(contest.seconds):
            return
        yield placement
    if not run.budget.lacks(contest.seconds) and not _is_folded(run):
        yield Placement()
    if contest.idle is not None:
        yield contest.idle


def _is_folded(run: Run) -> bool:
    """Whether the float model that the search has met is the user's with inputs fixed, and else as it was: what that
    gave is none of the pairs'."""
    return bool(run.settings.fix_inputs) and not run.subject.rewrites.names


def begin_proof(placement: Placement, run: Run) -> None:
    """Have the file of a placement built ahead that may ship, if it has pairs, and of no other."""
    run.runner.build_queue.withdraw(Urgency.BEST)
    if placement and not run.settings.front:
        begin_pairs(run.runner, _unproven(placement, run), FRESH, Urgency.BEST)


def _unproven(placement: Placement, run: Run) -> Path:
    """The file that is to prove itself, written once: it moves to its place when it has."""
    path = run.candidates.folder / placement.digest / FINAL
    if not path.exists():
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        run.candidates.write_whole(placement, path)
    return path


def _meet(placement: Placement, run: Run, place: Place, *, is_won: bool) -> _Meeting:
    """A float file of the user's is the float model: only beside pairs, where inputs were fixed, or where the engine
    does not run it as it is, the baseline that we write takes its place."""
    settings, final = run.settings, _unproven(placement, run)
    given = confirm(f"given:{placement.digest}", settings.model, final, run, place, is_won=is_won)
    to_given, note = (None, given.reason) if isinstance(given, Failure) else (given.ratio, "")
    if isinstance(given, Confirmed) and not settings.from_qdq and not _is_folded(run):
        return _Meeting(Standing.of(place.threads, given), given.ratio, given.builds)
    if note:
        note = f"the engine does not run {settings.model.name} as it is, so it was not compared: {note}"
    beside = confirm(f"proof:{placement.digest}", settings.output_dir / BASELINE, final, run, place, is_won=is_won)
    if isinstance(beside, Failure):
        raise BaselineFailed(f"the engine failed on the finished files: {beside.reason}")
    builds = beside.builds + (given.builds if isinstance(given, Confirmed) else 0)
    return _Meeting(Standing.of(place.threads, beside), to_given, builds, note)


def _move(source: Path, target: Path) -> None:
    """Move a model of ours, with the file of its constants where it has one."""
    with writing(target):
        both = [(data_of(source), data_of(target)), (source, target)]
        rename_all([(old, new) for old, new in both if old.exists()], source.with_name("replaced"))


def copy_model(source: Path, target: Path) -> None:
    """Copy a model to another folder or name, and the external data that it refers to. The copy is loaded before it
    gets its name.

    Raises:
        BadModel: it cannot be loaded.
        OutputError: it cannot be written.
    """
    data = data_files(source)
    missing = [
        p for p in data if not ((target.parent / p).exists() and (target.parent / p).samefile(source.parent / p))
    ]
    with atomic_write(target) as fresh:
        shutil.copyfile(source, fresh)
        for place in missing:
            copy = fresh.parent / place
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.parent / place, copy)
        if len(missing) == len(data):  # else the others lie beside the target
            load(fresh)
