"""Who may be a point of the front: what the search has found, and what prices foretell between. One after the other
meets the user's file on a fresh build of both, the one next that lies farthest from all that were met. What does not
prove faster there, or is beaten by others, makes room for another; what is left meets a second pair of builds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from qdqtune.engines.runner import Handle
from qdqtune.errors import BaselineFailed, writing
from qdqtune.graph.files import data_of
from qdqtune.graph.loading import files_of
from qdqtune.graph.stamps import content
from qdqtune.measurement.accuracy import accuracy, is_finite
from qdqtune.measurement.pairing import rounds_of
from qdqtune.measurement.timing import compare, ratio
from qdqtune.search import best_of, ratios_to_float
from qdqtune.search.front import (
    ENOUGH,
    GAIN,
    NEAR,
    NEAREST,
    FrontSearch,
    Offer,
    Point,
    Spot,
    farthest,
    is_beyond,
    undominated,
)
from qdqtune.tuning.budget import builds_of
from qdqtune.tuning.folder import BASELINE, FRONT
from qdqtune.tuning.meeting import insist, known
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import PROOF_BUILDS
from qdqtune.tuning.station import profiled_runs
from qdqtune.tuning.store import (
    Record,
    pack_accuracy,
    pack_layers,
    pack_result,
    unpack_accuracy,
    unpack_layers,
    unpack_result,
)
from qdqtune.types import Failure, Measurement, Placement, Proposal, Trial

WORTH = 0.98
"""What is foretold to take at most this share of the time of all that was met comes first, as a search would go on."""

TRIES = 2
"""How often."""

SIMULATED = 4
"""Offers that are simulated at most until the next one is chosen."""


@dataclass(frozen=True)
class Entry:
    """A placement that has met the user's file: its trial, where it was thought to lie, and the rounds of each pair."""

    trial: Trial
    thought: Spot
    measured: tuple[Measurement | Failure, ...]
    is_fresh: bool
    """Whether no search had built it."""

    def is_faster(self, run: Run) -> bool:
        """Whether its first pair of builds proves it faster."""
        first = self.measured[0]
        return isinstance(first, Measurement) and ratio(first, run.settings.proof_plan).verdict == "faster"

    def spot(self, run: Run) -> Spot:
        """Where its first pair of builds shows it."""
        first = self.measured[0]
        if isinstance(first, Failure) or self.trial.accuracy is None:
            return self.thought
        return Spot(ratio(first, run.settings.proof_plan).median, self.trial.exactness)

    def spots(self, run: Run) -> tuple[Spot, ...]:
        """What nothing else needs to be near to: where it is, and where it was thought to be if it is no point."""
        return (self.spot(run),) if self.is_faster(run) else (self.spot(run), self.thought)


class Candidacy:
    """See the module. `written` are the files of all that were met, `builds` what that took."""

    def __init__(self, history: Sequence[Trial], run: Run, search: FrontSearch | None) -> None:
        self._history, self._run, self._search = history, run, search
        self.entries: list[Entry] = []
        self.written: dict[Placement, Path] = {}
        self.builds = 0

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Those of what no search had built."""
        return tuple(entry.trial for entry in self.entries if entry.is_fresh)

    def met(self) -> list[Entry]:
        """Those that are left in the end, each with both of its pairs of builds.

        Raises:
            BaselineFailed: the engine does not build the float model again.
            OutputError: a file cannot be written.
        """
        with _Opponent(self._run, 0) as opponent:
            while self._has_room() and (point := self._next()) is not None:
                self.entries.append(self._entry(point, opponent))
        left = self._standing()
        self.builds = sum(1 + count for count in (len(self.entries), len(left)) if count)
        with _Opponent(self._run, 1) as opponent:
            return [replace(e, measured=(*e.measured, self._meet(e.trial, 1, opponent))) for e in left]

    def excuse(self, count: int, elsewhere: int) -> str:
        """Why there are no more points than so many, in a sentence. `elsewhere` are those that failed only at another
        number of threads."""
        slow = sum(not entry.is_faster(self._run) for entry in self.entries)
        reasons = {
            "did not prove faster than float": slow,
            "are slower at another number of threads (--deploy-threads)": elsewhere,
            "lost to others or on a second pair of builds": len(self.entries) - slow - elsewhere - count,
        }
        lost = ", ".join(f"{number} {what}" for what, number in reasons.items() if number > 0)
        many = f"of {len(self.entries)} candidates that met your model"
        met = "" if not lost else f"{many} {lost}" if len(self.entries) > 1 else f"the only candidate: {lost}"
        if self._next() is None:
            rest = f"prices foretell no others that differ and take at most {GAIN:.1%} of the float model's time"
        else:
            rest = f"--builds {self._run.settings.builds} has no room for others: give more"
        return f"the front has {count} point{'s' * (count != 1)}: {'; '.join(filter(None, (met, rest)))}"

    def _has_room(self) -> bool:
        """Whether one more can be met on two builds beside what is to come."""
        settings, standing = self._run.settings, self._standing()
        most = settings.builds - 1 - builds_of(self._history)
        holds = any(self._run.limits.is_exact_enough(entry.trial.accuracy) for entry in standing)
        least = 0 if holds or not self.entries else PROOF_BUILDS  # the usual proof, where no point can ship
        needed = (1 + len(self.entries)) + 1 + (1 + len(standing)) + 1 + least
        limit = self._run.budget.points
        met = len(standing) if settings.time_budget is None else len(self.entries)
        return needed <= most and met < limit

    def _next(self) -> Point | Offer | None:
        """What the search would ship, the fastest that nothing beats, then what is farthest from all that were met."""
        plan, met = self._run.settings.plan, {entry.trial.placement for entry in self.entries}
        most, ratios = self._run.limits.max_noise, ratios_to_float(self._history, plan)
        unbeaten = [p for p in undominated(self._history, plan) if not is_beyond(_noise(p.trial), most)]
        best = best_of(self._history)
        first = [Point(ratios[best], t) for t in self._history if t.accepted and t.placement == best]
        fastest = [p for p in unbeaten[:1] if all(p.spot.apart(f.spot) >= NEAR for f in first)]
        waiting = [p for p in (*first, *fastest) if p.trial.placement not in met]
        if waiting:
            return waiting[0]
        offers = list(self._search.offers([*self._history, *self.trials])) if self._search is not None else []
        if (faster := self._faster(offers)) is not None:
            return faster
        points, standing = [p for p in unbeaten if p.trial.placement not in met], self._standing()
        near = NEAR if len(standing) >= ENOUGH else NEAREST
        good = [*(p.spot for p in points), *(e.spot(self._run) for e in standing)]
        candidates: list[Point | Offer] = [*points, *offers]
        taken = [spot for entry in self.entries for spot in entry.spots(self._run)]
        for _ in range(SIMULATED):
            candidates = [c for c in candidates if isinstance(c, Point) or not any(g.beats(c.spot) for g in good)]
            found = farthest(candidates, taken, near)
            if not isinstance(found, Offer) or found.is_foretold:
                return found
            candidates.remove(found)
            candidates += filter(None, [self._foretold(found)])
        return farthest([c for c in candidates if isinstance(c, Point) or c.is_foretold], taken, near)

    def _foretold(self, offer: Offer) -> Offer | None:
        return None if self._search is None else self._search.foretold(offer)

    def _faster(self, offers: Sequence[Offer]) -> Offer | None:
        """What holds the limit and is faster than all that was met, as far as prices have learned by now."""
        limit, tried, least = self._run.limits.min_sqnr, 0, 1.0
        for entry in self.entries:
            tried += entry.is_fresh and entry.thought.ratio <= WORTH * least
            least = min(least, entry.spot(self._run).ratio if entry.is_faster(self._run) else 1.0)
        able = sorted((o for o in offers if o.spot.ratio <= WORTH * least), key=lambda o: o.spot.ratio)
        for offer in able[:SIMULATED] if tried < TRIES else ():
            known = self._foretold(offer)
            if known is not None and (limit is None or known.spot.db >= limit):
                return known
        return None

    def _standing(self) -> list[Entry]:
        """Those that prove faster and are not beaten. What the search took stays where a metric decides: what beats it
        may miss that."""
        faster = [(e, e.spot(self._run)) for e in self.entries if e.is_faster(self._run)]
        stays = best_of(self._history) if self._run.limits.max_drop is not None else None
        return [e for e, s in faster if e.trial.placement == stays or not any(o.beats(s) for _, o in faster)]

    def _entry(self, point: Point | Offer, opponent: _Opponent) -> Entry:
        """Write the file of a point, and let it meet the user's once."""
        if isinstance(point, Point):
            self._write(point.trial.placement)
            return Entry(point.trial, point.spot, (self._meet(point.trial, 0, opponent),), is_fresh=False)
        proposal = Proposal("front", point.placement, predicted=point.spot.ratio)
        number = len(self._history) + len(self.trials) + 1
        self._write(point.placement)
        trial = Trial(number, proposal, Placement(), Failure("run", "not measured yet"))
        result = self._meet(trial, 0, opponent)
        seen = self._run.store.get(_seen_key(point.placement)) or {}
        if "sqnr_db" in seen and isinstance(result, Measurement):
            known, layers = unpack_accuracy(seen), unpack_layers(seen.get("layers", []))
            holds = self._run.limits.is_exact_enough(known)
            trial = replace(trial, result=result, accuracy=known, holds=holds, layers=layers)
        else:
            result = Failure(**seen["failure"]) if "failure" in seen else result
            trial = replace(trial, result=result)
        self._run.bench.keep(trial)
        return Entry(trial, point.spot, (result,), is_fresh=True)

    def _write(self, placement: Placement) -> None:
        """A file of its own, under a name that says nothing yet."""
        file = self._run.output.claim(self._run.settings.output_dir / FRONT / f"{placement.digest}.onnx")
        self._run.output.claim(data_of(file))
        self._run.candidates.write_whole(placement, file)
        self.written[placement] = file

    def _meet(self, trial: Trial, number: int, opponent: _Opponent) -> Measurement | Failure:
        """The rounds of one pair of fresh builds, from the store where it has them."""
        run, placement = self._run, trial.placement
        files: Record = {"files": [content(files_of(f)) for f in (run.settings.model, self.written[placement])]}
        key = f"front:{placement.digest}:{number}"
        record = known(run.store, key, files, run.settings.proof_plan.looks[0])
        unseen = trial.accuracy is None and number == 0 and run.store.get(_seen_key(placement)) is None
        if record is None or unseen:
            result = insist(partial(self._fresh, placement, number, opponent, unseen))
            record = run.store.put(key, pack_result(result) | files)
        return unpack_result(record)

    def _fresh(self, placement: Placement, number: int, opponent: _Opponent, unseen: bool) -> Measurement | Failure:
        run, plan = self._run, self._run.settings.proof_plan
        handle = run.runner.load(self.written[placement], f"front_{number}_{placement.digest}", fresh=True)
        if isinstance(handle, Failure):
            return handle
        if unseen:
            run.store.put(_seen_key(placement), self._looked_at(handle))
        result = compare(rounds_of(run.runner, opponent.handle, handle, plan, run.settings.seed + number), plan)
        run.runner.unload(handle)
        return result

    def _looked_at(self, handle: Handle) -> Record:
        """How exact a build is, and what its layers take, from which prices learn."""
        runner, bench = self._run.runner, self._run.bench
        outputs = runner.outputs(handle, self._run.subject.accuracy)
        if isinstance(outputs, Failure):
            return pack_result(outputs)
        if not is_finite(outputs):
            return pack_result(Failure("output", "the outputs hold NaN or infinite values"))
        layers = runner.layers(handle, profiled_runs(bench.float_seconds))
        told = [] if isinstance(layers, Failure) else pack_layers(layers)
        return pack_accuracy(accuracy(bench.reference(), outputs)) | {"layers": told}


class _Opponent:
    """A fresh build of the user's file, made when somebody needs it; of the float model as we write it where the engine
    does not run that. A context manager."""

    def __init__(self, run: Run, number: int) -> None:
        self._run, self._number = run, number
        self._handle: Handle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._handle is not None:
            self._run.runner.unload(self._handle)

    @property
    def handle(self) -> Handle:
        """The build.

        Raises:
            BaselineFailed: the engine does not build the float model again.
        """
        for found in self._tries() if self._handle is None else ():
            if not isinstance(found, Failure):
                self._handle = found
                break
            if found.is_transient:
                raise BaselineFailed(f"the engine does not build the float model again: {found.reason}")
        if self._handle is None:
            raise BaselineFailed("the engine does not build the float model again")
        return self._handle

    def _tries(self) -> Iterator[Handle | Failure]:
        settings, runner = self._run.settings, self._run.runner
        for file, name in ((settings.model, "given"), (settings.output_dir / BASELINE, "baseline")):
            yield runner.load(file, f"front_{self._number}_{name}", fresh=True)


def _noise(trial: Trial) -> float:
    return 0.0 if trial.accuracy is None else trial.accuracy.noise


def _seen_key(placement: Placement) -> str:
    return f"seen:{placement.digest}"


def move_model(file: Path, target: Path, run: Run, placement: Placement) -> None:
    """Give a written placement another name; one whose constants lie in a file of their own, named after it, is written
    again."""
    if data_of(file).exists():
        run.output.claim(data_of(target))
        run.candidates.write_whole(placement, target)
        return
    with writing(target):
        file.replace(target)
