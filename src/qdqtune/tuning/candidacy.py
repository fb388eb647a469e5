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
from qdqtune.search.front import GAIN, Offer, Point, Spot, farthest, undominated
from qdqtune.tuning.budget import builds_of
from qdqtune.tuning.folder import BASELINE, FRONT
from qdqtune.tuning.proof import insist, known
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import PROOF_BUILDS
from qdqtune.tuning.store import Record, pack_accuracy, pack_result, unpack_accuracy, unpack_result
from qdqtune.types import Accuracy, Failure, Measurement, Placement, Proposal, Trial


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


class Candidacy:
    """See the module. `written` are the files of all that were met, `builds` what that took."""

    def __init__(self, history: Sequence[Trial], run: Run, offers: Sequence[Offer]) -> None:
        self._history, self._run, self._offers = history, run, offers
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

    def excuse(self, count: int) -> str:
        """Why there are no more points, in a sentence."""
        slow = sum(not entry.is_faster(self._run) for entry in self.entries)
        reasons = {"did not prove faster than float": slow, "lost to others": len(self.entries) - slow - count}
        lost = " and ".join(f"{number} {what}" for what, number in reasons.items() if number > 0)
        met = f"of {len(self.entries)} candidates that met your model {lost}" if lost else ""
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
        unbeaten, ratios = undominated(self._history, plan), ratios_to_float(self._history, plan)
        best = best_of(self._history)
        first = [Point(ratios[best], t) for t in self._history if t.accepted and t.placement == best]
        waiting = [p for p in (*first, *unbeaten[:1]) if p.trial.placement not in met]
        if waiting:
            return waiting[0]
        slow = min((e.thought.ratio for e in self.entries if not e.is_faster(self._run)), default=1.0)
        points = (p for p in unbeaten if p.trial.placement not in met and p.ratio < slow)
        offers = (o for o in self._offers if o.placement not in met and o.spot.ratio < slow)
        taken = [entry.spot(self._run) for entry in self.entries]
        candidates: list[Point | Offer] = [*points, *offers]
        return farthest(candidates, taken)

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
        seen = self._seen(point.placement)
        if isinstance(seen, Failure) or isinstance(result, Failure):
            result = seen if isinstance(seen, Failure) else result
            trial = replace(trial, result=result)
        else:
            trial = replace(trial, result=result, accuracy=seen, holds=self._run.limits.is_exact_enough(seen))
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
        record = known(run.store, key, files)
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
            seen = self._looked_at(handle)
            run.store.put(_seen_key(placement), pack_result(seen) if isinstance(seen, Failure) else pack_accuracy(seen))
        result = compare(rounds_of(run.runner, opponent.handle, handle, plan, run.settings.seed + number), plan)
        run.runner.unload(handle)
        return result

    def _looked_at(self, handle: Handle) -> Accuracy | Failure:
        outputs = self._run.runner.outputs(handle, self._run.subject.accuracy)
        if isinstance(outputs, Failure):
            return outputs
        if not is_finite(outputs):
            return Failure("output", "the outputs hold NaN or infinite values")
        return accuracy(self._run.bench.reference(), outputs)

    def _seen(self, placement: Placement) -> Accuracy | Failure:
        record = self._run.store.get(_seen_key(placement))
        if record is None:
            return Failure("build", "the engine does not build its file")
        return Failure(**record["failure"]) if "failure" in record else unpack_accuracy(record)


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
