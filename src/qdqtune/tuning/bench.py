"""The bench: what the engine says of a candidate. Every answer is kept in the store, and never asked for twice."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

import numpy as np

from qdqtune.engines.runner import Runner
from qdqtune.errors import BaselineFailed, EngineFailure
from qdqtune.measurement.accuracy import accuracy, is_finite
from qdqtune.measurement.limits import Limits
from qdqtune.measurement.metric import Evaluation, evaluate
from qdqtune.measurement.pairing import fresh_pair, rounds_of, start_inferences
from qdqtune.measurement.timing import Plan, Ratio, compare, judge
from qdqtune.tuning.candidates import Candidates
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
from qdqtune.types import Accuracy, Array, Failure, Layer, Measurement, Placement, Proposal, Sample, Trial

FUTILE = 0.997
"""A candidate whose median ratio is no better than this at a look is not worth more rounds."""


PROFILED = (12, 400)
"""The least and the most inferences behind a layer report."""

PROFILED_SECONDS = 0.05
"""How long they are to take in all, where that is within these numbers: short layers need many."""


FORETOLD = frozenset({"cut", "front", "polish"})
"""Origins of candidates whose ratio prices have predicted: records of earlier versions do not hold what it was."""


@dataclass(frozen=True)
class Conditions:
    """How candidates are measured: in which rounds, on which samples, and by which metric of the user's.

    `limits` say which wins are worth a check, `check_wins` whether any is.
    """

    plan: Plan
    samples: Sequence[Sample]
    seed: int
    limits: Limits = field(default_factory=Limits)
    evaluation: Evaluation | None = None
    check_wins: bool = True


@dataclass(frozen=True)
class _FloatRun:
    """The float model's outputs on the samples, and the seconds of one inference and of its build."""

    outputs: Sequence[dict[str, Array]]
    seconds: float
    build_seconds: float


class Bench:
    """Measures placements of one model against each other. Its answers may be asked for in any order."""

    def __init__(self, runner: Runner, candidates: Candidates, store: Store, conditions: Conditions) -> None:
        self._runner, self._candidates, self._store, self._conditions = runner, candidates, store, conditions
        self.deadline: float | None = None
        """By this time of `time.monotonic` comparisons decide with what they have."""

    @property
    def float_build_seconds(self) -> float:
        """How long the engine took to build the float model.

        Raises:
            BaselineFailed: it cannot build or run it.
        """
        return self._float_run.build_seconds

    @property
    def float_seconds(self) -> float:
        """Seconds of one inference of the float model, roughly.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        return self._float_run.seconds

    @property
    def trial_seconds(self) -> float:
        """What one candidate takes at the least, if it is as fast as the float model: its build, its outputs, the first
        look of its comparison, and its layers.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        seconds, plan = self.float_seconds, self._conditions.plan
        inferences = len(self._conditions.samples) + profiled_runs(seconds) + start_inferences(plan)
        return self.float_build_seconds + inferences * seconds + 4 * max(seconds, plan.slot_seconds) * plan.looks[0]

    def measure(self, number: int, proposal: Proposal, against: Placement) -> tuple[Trial, bool]:
        """Time a candidate against another placement; and whether the result was in the store.

        A win is repeated at once on another build of both files: one build may be fast by the luck of its memory
        layout, and stays so in every round. A win that misses the limit on SQNR is repeated only when another run
        allows more, and one of a search that learns from layers never: it makes too few candidates for luck.

        Raises:
            BaselineFailed: the engine cannot run the float model.
            EngineFailure: the engine refuses the other placement, which it has built before.
        """
        key = job_key("trial", proposal.placement, against)
        record = self._store.get(key)
        if (
            record is not None
            and proposal.wants_layers
            and record.get("layers") is None
            and "samples" in record["result"]
        ):
            record = None  # measured by a search that did not ask for them
        trial = (
            self._measured(number, proposal, against)
            if record is None
            else remembered(number, proposal, against, record)
        )
        unchecked = self._needs_check(trial)
        if unchecked:
            trial = replace(trial, check=self._checked(trial))
        if record is None or unchecked:
            self._store.put(key, _record(trial))
        if not self._may_be_taken(trial):
            self._candidates.drop(proposal.placement)
        return trial, record is not None and not unchecked

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
            handle = self._candidates.load(placement, f"metric_{placement.digest}")
            value = handle if isinstance(handle, Failure) else evaluate(evaluation, self._runner, handle)
            record = self._store.put(key, pack_result(value) if isinstance(value, Failure) else {"value": value})
        if "failure" not in record:
            return float(record["value"])
        known = record["failure"]  # earlier versions kept the reason alone
        return Failure("run", known) if isinstance(known, str) else Failure(**known)

    def float_layers(self) -> tuple[Layer, ...]:
        """The layer report of the float build; empty if the engine has none.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        record = self._store.get("layers")
        if record is None:
            runs = profiled_runs(self._float_run.seconds)
            handle = self._candidates.load(Placement(), "baseline")
            layers = handle if isinstance(handle, Failure) else self._runner.layers(handle, runs)
            told = (
                {"layers": [], **pack_result(layers)}
                if isinstance(layers, Failure)
                else {"layers": pack_layers(layers)}
            )
            record = self._store.put("layers", told)
        return unpack_layers(record["layers"])

    def layers(self, placement: Placement) -> tuple[Layer, ...] | None:
        """The layer report of a placement that was measured; None if the engine gives none.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        if not placement.edges:
            return self.float_layers() or None
        packed, key = pack_placement(placement), f"layers:{placement.digest}"
        records = (record for record in self._store.records() if record.get("placement") == packed)
        if found := next((record["layers"] for record in records if record.get("layers")), None):
            return unpack_layers(found)
        record = self._store.get(key)
        if record is None:
            runs = profiled_runs(self._float_run.seconds)
            handle = self._candidates.load(placement, "final_layers")
            layers = handle if isinstance(handle, Failure) else self._runner.layers(handle, runs)
            told = pack_result(layers) if isinstance(layers, Failure) else {"layers": pack_layers(layers)}
            record = self._store.put(key, told)
        return unpack_layers(record["layers"]) if "layers" in record else None

    def reference(self) -> Sequence[dict[str, Array]]:
        """The float model's outputs on the samples.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        return self._float_run.outputs

    def repeatability(self) -> Accuracy:
        """The float model's outputs against those of the same build once more: what no candidate can exceed.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        record = self._store.get("repeated")
        if record is None:
            first = self.reference()
            handle = self._candidates.load(Placement(), "baseline")
            again = handle if isinstance(handle, Failure) else self._runner.outputs(handle, self._conditions.samples)
            if isinstance(again, Failure):
                raise BaselineFailed(f"the engine cannot run the float model again: {again.reason}")
            record = self._store.put("repeated", pack_accuracy(accuracy(first, again)))
        return unpack_accuracy(record)

    @cached_property
    def _float_run(self) -> _FloatRun:
        handle = self._candidates.load(Placement(), "baseline")
        if isinstance(handle, Failure):
            raise BaselineFailed(f"the engine cannot run the float model: {handle.reason}")
        outputs = self._runner.outputs(handle, self._conditions.samples)
        if isinstance(outputs, Failure):
            raise BaselineFailed(f"the engine cannot run the float model: {outputs.reason}")
        timed = self._runner.rounds(handle, handle, 1, seed=0, first_round=0, slot_seconds=0.0, warmup=0)
        if isinstance(timed, Failure):
            raise BaselineFailed(f"the engine cannot time the float model: {timed.reason}")
        if not is_finite(outputs):
            raise BaselineFailed("the float model's outputs hold NaN or infinite values on the calibration data")
        return _FloatRun(outputs, timed.a[0], handle.build_seconds)

    def _measured(self, number: int, proposal: Proposal, against: Placement) -> Trial:
        reference, conditions = self.reference(), self._conditions
        opponent = self._candidates.load(against, "best")
        if isinstance(opponent, Failure):  # it was built before, so the candidate is not to blame
            raise EngineFailure(f"the engine does not build the best model so far again: {opponent.reason}")
        candidate = self._candidates.load(proposal.placement, f"trial_{number:03}")
        if isinstance(candidate, Failure):
            return Trial(number, proposal, against, candidate)
        outputs = self._runner.outputs(candidate, conditions.samples)
        if isinstance(outputs, Failure):
            return Trial(number, proposal, against, outputs)
        if not is_finite(outputs):
            return Trial(number, proposal, against, Failure("output", "the outputs hold NaN or infinite values"))
        rounds = rounds_of(self._runner, opponent, candidate, conditions.plan, conditions.seed)
        begun = time.monotonic()
        result = compare(rounds, conditions.plan, decided=lambda r: _settled(r) or self._is_late(begun))
        if isinstance(result, Failure):
            return Trial(number, proposal, against, result)
        runs = profiled_runs(float(np.median(result.b)))
        layers = self._runner.layers(candidate, runs) if proposal.wants_layers else None
        if isinstance(layers, Failure) and layers.is_transient:
            return Trial(number, proposal, against, layers)
        report = () if isinstance(layers, Failure) else layers
        return Trial(number, proposal, against, result, accuracy=accuracy(reference, outputs), layers=report)

    def _is_late(self, begun: float) -> bool:
        """Whether the next look of a comparison would end too late: it takes about as long as all before it."""
        now = time.monotonic()
        return self.deadline is not None and now + (now - begun) > self.deadline

    def _may_be_taken(self, trial: Trial) -> bool:
        """Whether its build is kept until the batch is judged: a win, or what is no slower and may be more exact."""
        measured = judge(trial, self._conditions.plan)
        is_even = measured is not None and measured.verdict == "undecided" and measured.median <= 1
        return self._won(trial) or (is_even and self._conditions.limits.is_exact_enough(trial.accuracy))

    def _won(self, trial: Trial) -> bool:
        """Whether a trial is a win as far as it was measured."""
        conditions = self._conditions
        measured = judge(trial, conditions.plan)
        is_faster = measured is not None and measured.verdict == "faster"
        return is_faster and conditions.limits.is_exact_enough(trial.accuracy)

    def _needs_check(self, trial: Trial) -> bool:
        is_one_of_many = self._conditions.check_wins and not trial.proposal.wants_layers
        return is_one_of_many and trial.check is None and self._won(trial)

    def _checked(self, trial: Trial) -> Measurement | Failure:
        files = self._candidates.file(trial.against), self._candidates.file(trial.placement)
        plan, seed = self._conditions.plan, self._conditions.seed + 1
        return fresh_pair(self._runner, *files, plan, seed, f"trial_{trial.number:03}", _settled)


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


def profiled_runs(seconds: float) -> int:
    """Inferences for a layer report of a model that takes so many seconds each."""
    least, most = PROFILED
    return most if seconds * most <= PROFILED_SECONDS else max(least, ceil(PROFILED_SECONDS / seconds))


def job_key(job: str, placement: Placement, against: Placement) -> str:
    """The name of a job: a hash of its content, so that jobs may run in any order and be found again."""
    return job + ":" + hashlib.sha256(f"{placement.digest}:{against.digest}".encode()).hexdigest()[:16]


def _settled(measured: Ratio) -> bool:
    return measured.verdict != "undecided" or measured.median > FUTILE
