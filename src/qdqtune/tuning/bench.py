"""The bench: what the engine says of a candidate. Every answer is kept in the store, and never asked for twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial

from qdqtune.engines.ahead import Need
from qdqtune.engines.crew import Crew
from qdqtune.engines.runner import Runner, insist
from qdqtune.errors import BaselineFailed
from qdqtune.measurement.accuracy import accuracy, is_finite
from qdqtune.measurement.metric import evaluate
from qdqtune.tuning.candidates import Loaded
from qdqtune.tuning.station import Conditions, Job, Station, profiled_runs, trial_seconds
from qdqtune.tuning.store import (
    Record,
    Store,
    pack_accuracy,
    pack_layers,
    pack_placement,
    pack_result,
    unpack_accuracy,
    unpack_layers,
    unpack_placement,
    unpack_result,
)
from qdqtune.types import Accuracy, Array, Failure, Layer, Placement, Proposal, Trial

FLOAT = Placement()

FORETOLD = frozenset({"cut", "front", "polish"})
"""Origins of candidates whose ratio prices have predicted: records of earlier versions do not hold what it was."""


@dataclass(frozen=True)
class FloatRun:
    """The float model's outputs on the samples, and the seconds of its build and, roughly, of one inference.

    `turn_seconds` are those of a fourth of a round of two builds like it: one inference, or one of each workload, and
    half of one more for that the shapes change.
    """

    outputs: Sequence[dict[str, Array]]
    seconds: float
    turn_seconds: float
    build_seconds: float


class Bench:
    """Measures placements of one model against each other. Its answers may be asked for in any order."""

    def __init__(self, crew: Crew[Station], store: Store, conditions: Conditions) -> None:
        self._crew, self._store, self._conditions = crew, store, conditions
        self.deadline: float | None = None
        """By this time of `time.monotonic` comparisons decide with what they have."""

    @property
    def trial_seconds(self) -> float:
        """What one candidate takes at the least, if it is as fast as the float model; its outputs are foretold as well
        where they have a limit to hold.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        floats, judged = self.floats, len(self._conditions.samples) * (2 if self._conditions.limits.are_set else 1)
        return trial_seconds(self._conditions.plan, floats.build_seconds, floats.seconds, floats.turn_seconds, judged)

    def measured(
        self, number: int, proposals: Sequence[Proposal], against: Placement, foresee: Callable[[], None] = lambda: None
    ) -> Generator[tuple[Trial, bool]]:
        """Time candidates against another placement, side by side where there are several devices; and whether each
        result was in the store. They come in the order of the proposals, `number` is that of the first. `foresee` may
        begin further builds ahead.

        What is measured is written as it comes. Closing the iterator ends what is under way.

        Raises:
            BaselineFailed: the engine cannot run the float model.
            EngineFailure: the engine refuses the other placement, which it has built before.
        """
        done: dict[int, tuple[Trial, bool]] = {}
        jobs: list[Job] = []
        for place, proposal in enumerate(proposals):
            known = self._known(number + place, proposal, against)
            if known is not None and not self._conditions.needs_check(known):
                done[place] = known, True
            else:
                jobs.append(Job(number + place, proposal, against, known))
        with closing(self._answers(jobs, foresee)) as answers:
            # The user's metric asks the first device about each trial: then a batch is measured to its end before that.
            is_gathered = len(self._crew) > 1 and self._conditions.evaluation is not None
            fresh = iter(list(answers)) if is_gathered else answers
            for place in range(len(proposals)):
                while place not in done:
                    trial = next(fresh)
                    done[trial.number - number] = trial, False
                yield done.pop(place)

    def _answers(self, jobs: Sequence[Job], foresee: Callable[[], None]) -> Generator[Trial]:
        """What the engine says of each job, as it comes."""
        if not jobs:
            return
        reference = self.floats.outputs
        if self._runner.ahead.count:
            self.begin((job.proposal.placement for job in jobs[1:]), Need.NOW)  # the first is built here
            foresee()
        ask = [partial(Station.trial, job=job, reference=reference, deadline=self.deadline) for job in jobs]
        with closing(self._crew.answers(ask)) as answers:
            for _, trial in answers:
                self._store.put(job_key("trial", trial.placement, trial.against), _record(trial))
                yield trial

    def begin(self, placements: Iterable[Placement], need: Need) -> None:
        """Have these built ahead, and nothing else that is as urgent."""
        self._runner.ahead.withdraw(need)
        for placement in placements:
            self._loaded.begin(placement, need)

    def _known(self, number: int, proposal: Proposal, against: Placement) -> Trial | None:
        """What an earlier run has measured of a candidate."""
        record = self._store.get(job_key("trial", proposal.placement, against))
        if record is None or (proposal.wants_layers and record.get("layers") is None and "samples" in record["result"]):
            return None  # or it was measured by a search that did not ask for layers
        return remembered(number, proposal, against, record)

    def keep_only(self, placement: Placement) -> None:
        """Free all builds on all devices but those of this placement."""
        for station in self._crew:
            station.loaded.keep_only(placement)

    def stand_alone(self) -> None:
        """End all workers but the first, so that nothing runs beside what it measures."""
        for station in list(self._crew)[1:]:
            station.runner.close()

    def keep(self, trial: Trial) -> None:
        """Remember a trial that was measured elsewhere."""
        key = job_key("trial", trial.placement, trial.against)
        if self._store.get(key) is None:
            self._store.put(key, _record(trial))

    def metric(self, placement: Placement) -> float | Failure:
        """The user's metric of a placement, on the engine.

        Raises:
            BadOption: the user's function fails.
        """
        evaluation = self._conditions.evaluation
        assert evaluation is not None  # nobody asks without --evaluate
        key = f"metric:{evaluation.digest}:{placement.digest}"
        record = self._store.get(key)
        if record is None:
            handle = self._loaded.load(placement, f"metric_{placement.digest}")
            value = handle if isinstance(handle, Failure) else evaluate(evaluation, self._runner, handle)
            record = self._store.put(key, pack_result(value) if isinstance(value, Failure) else {"value": value})
        if "failure" not in record:
            return float(record["value"])
        known = record["failure"]  # earlier versions kept the reason alone
        return Failure("run", known) if isinstance(known, str) else Failure(**known)

    def layers(self, placement: Placement = FLOAT) -> tuple[Layer, ...]:
        """The layer report of the float model, or of a placement that was measured; empty if the engine has none.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        packed, key = pack_placement(placement), f"layers:{placement.digest}" if placement else "layers"
        told = (r for r in self._store.records() if r["key"] == key or (placement and r.get("placement") == packed))
        if (record := next((r for r in told if r.get("layers")), self._store.get(key))) is None:
            handle = self._loaded.load(placement, "final_layers" if placement else "baseline")
            runs = profiled_runs(self.floats.seconds)
            layers = handle if isinstance(handle, Failure) else self._runner.layers(handle, runs)
            failure = pack_result(layers) if isinstance(layers, Failure) else {}
            shown = [] if isinstance(layers, Failure) else pack_layers(layers)
            record = self._store.put(key, {"layers": shown, **failure})
        return unpack_layers(record.get("layers", ()))

    def repeatability(self) -> Accuracy:
        """The float model's outputs against those of the same build once more: what no candidate can exceed.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        record = self._store.get("repeated")
        if record is None:
            first = self.floats.outputs
            handle = self._loaded.load(Placement(), "baseline")
            again = handle if isinstance(handle, Failure) else self._runner.outputs(handle, self._conditions.samples)
            if isinstance(again, Failure):
                raise BaselineFailed(f"the engine cannot run the float model again: {again.reason}")
            record = self._store.put("repeated", pack_accuracy(accuracy(first, again)))
        return unpack_accuracy(record)

    @property
    def _runner(self) -> Runner:
        return self._crew.first.runner

    @property
    def _loaded(self) -> Loaded:
        return self._crew.first.loaded

    @cached_property
    def floats(self) -> FloatRun:
        """What a build of the float model has shown.

        Raises:
            BaselineFailed: the engine cannot build or run it.
        """
        refused = "the engine cannot run the float model", BaselineFailed
        handle = insist(self._loaded.load(Placement(), "baseline"), *refused)
        outputs = insist(self._runner.outputs(handle, self._conditions.samples), *refused)
        rounds = self._runner.rounds(handle, handle, 1, seed=0, first_round=0, slot_seconds=0.0, warmup=0)
        timed = insist(rounds, "the engine cannot time the float model", BaselineFailed)
        if not is_finite(outputs):
            raise BaselineFailed("the float model's outputs hold NaN or infinite values on the calibration data")
        turn = 1.5 * sum(part.a[0] for part in timed.parts) or timed.a[0]
        return FloatRun(outputs, timed.a[0], turn, handle.build_seconds)


def _record(trial: Trial) -> Record:
    """What the store is to remember of a trial."""
    return {
        "origin": trial.proposal.origin,
        "pattern": trial.proposal.pattern,
        "predicted": trial.proposal.predicted,
        "against": trial.against.digest,
        "placement": pack_placement(trial.placement),
        **pack_accuracy(trial.accuracy or Accuracy()),
        "result": pack_result(trial.result),
        "check": None if trial.check is None else pack_result(trial.check),
        "layers": None if trial.layers is None else pack_layers(trial.layers),
    }


def remembered(number: int, proposal: Proposal, against: Placement, record: Record) -> Trial:
    """What the store remembers of a trial."""
    check = None if record["check"] is None else unpack_result(record["check"])
    layers = None if record.get("layers") is None else unpack_layers(record["layers"])
    result = unpack_result(record["result"])
    known = None if isinstance(result, Failure) else unpack_accuracy(record)
    return Trial(number, proposal, against, result, check, known, layers)


def trial_of(number: int, record: Record, against: Placement) -> Trial:
    """A candidate from its record alone, for who looks at a run without searching on."""
    origin, learned = record["origin"], record.get("layers") is not None
    predicted = record.get("predicted", 1.0 if origin in FORETOLD else None)
    proposal = Proposal(origin, unpack_placement(record["placement"]), record["pattern"], predicted, learned)
    return remembered(number, proposal, against, record)


def job_key(job: str, placement: Placement, against: Placement) -> str:
    """The name of a job: a hash of its content, so that jobs may run in any order and be found again."""
    return job + ":" + hashlib.sha256(f"{placement.digest}:{against.digest}".encode()).hexdigest()[:16]
