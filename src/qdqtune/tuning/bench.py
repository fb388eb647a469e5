"""Measures placements on the engine (rounds, outputs, layers, metric), or takes what the store has already."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache, cached_property, partial
from math import ceil
from pathlib import Path

from qdqtune.engines import builds_for
from qdqtune.engines.pool import WorkerPool
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BaselineFailed, EngineRefused, rewording
from qdqtune.numerics.accuracy import accuracy, check_finite, is_finite
from qdqtune.numerics.label_metrics import Score
from qdqtune.numerics.metrics import Metric, measure
from qdqtune.numerics.scores import Scores, scores_of
from qdqtune.timing.limits import failure
from qdqtune.timing.ratios import Plan, is_cut_short
from qdqtune.tuning.records import (
    FloatRecord,
    Outcome,
    TrialRecord,
    job_of,
)
from qdqtune.tuning.store import Store
from qdqtune.tuning.trial_worker import (
    BRIEF_LOOKS,
    Batch,
    Conditions,
    TrialJob,
    TrialWorker,
    profiled_runs,
    trial_seconds,
)
from qdqtune.types import Accuracy, Array, Layer, Placement, Proposal, Sample, Trial

FLOAT = Placement()

CANNOT_RUN = "the engine cannot run the float model", BaselineFailed

TOGETHER = 2 * 2**30
"""Bytes of the models whose builds race together, at most; at least one candidate races. Chosen, not measured."""

REPEATED = 2
"""Samples on which the float model is run again. Chosen, not measured."""


class Bench:
    """Measures placements of one model, in any order."""

    def __init__(self, pool: WorkerPool[TrialWorker], store: Store, conditions: Conditions) -> None:
        self._pool, self._store, self._conditions = pool, store, conditions
        self._first = pool.first
        self._asked_metrics = set[Placement]()
        self.deadline: float | None = None
        """The time of `time.monotonic` at which comparisons end with the rounds that they have."""

    @property
    def trial_seconds(self) -> float:
        """The least seconds that a candidate takes if it is as fast as the float model."""
        return self._trial_seconds(self._conditions.plan, profiled_runs(self.floats.seconds))

    @property
    def brief_seconds(self) -> float:
        """The same for a candidate that is timed in few rounds, without a layer report."""
        return self._trial_seconds(replace(self._conditions.plan, looks=BRIEF_LOOKS), 0)

    def _trial_seconds(self, plan: Plan, profiled: int) -> float:
        floats, judged = self.floats, len(self._conditions.samples)
        parts = floats.build_seconds, floats.seconds, floats.turn_seconds, judged, floats.start_seconds
        return trial_seconds(plan, *parts, profiled)

    def measured(
        self, number: int, proposals: Sequence[Proposal], against: Placement, *, is_brief: bool = False
    ) -> Generator[tuple[Trial, bool]]:
        """Race candidates against another placement, on all devices side by side, as many in a race as fit into memory
        beside each other. Gives the trials in the order of the proposals, numbered from `number`, each with whether its
        result was in the store.
        `is_brief`: there is time for a few rounds only.

        Results are stored at once. Closing the iterator ends the measurements that are running.

        Raises:
            BaselineFailed: the engine cannot run the float model.
            EngineFailure: the engine refuses the other placement, which it has built before.
        """
        done: dict[int, tuple[Trial, bool]] = {}
        jobs: list[TrialJob] = []
        for place, proposal in enumerate(proposals):
            known = self._known(number + place, proposal, against)
            if known is not None:
                done[place] = known, True
            else:
                jobs.append(TrialJob(number + place, proposal, against))
        with closing(self._answers(jobs, is_brief=is_brief)) as results:
            # The user's metric runs on the first device after each trial: measure the whole batch before.
            is_gathered = len(self._pool) > 1 and self._conditions.evaluation is not None
            fresh = iter(list(results)) if is_gathered else results
            for place in range(len(proposals)):
                while place not in done:
                    trial = next(fresh)
                    done[trial.number - number] = trial, False
                yield done.pop(place)

    def _answers(self, jobs: Sequence[TrialJob], *, is_brief: bool) -> Generator[Trial]:
        if not jobs:
            return
        batch = Batch(self.reference, self.scores, self.deadline, is_brief)
        each = max(1, self._conditions.model_bytes) * builds_for(self._runner.mix)
        size = max(1, min(ceil(len(jobs) / len(self._pool)), TOGETHER // each - 1))
        races = [jobs[first : first + size] for first in range(0, len(jobs), size)]
        ask = [partial(TrialWorker.trials, jobs=race, batch=batch) for race in races]
        with closing(self._pool.results(ask)) as results:
            for _, trials in results:
                for trial in trials:
                    self._keep(trial)
                yield from trials

    def _known(self, number: int, proposal: Proposal, against: Placement) -> Trial | None:
        record = self._store.get(_key(proposal.placement, against), TrialRecord)
        if record is None or (proposal.wants_layers and record.layers is None and record.result.failure is None):
            return None  # or it was measured by a search that did not ask for layers
        if record.accuracy.at_most_db is not None and not self._conditions.limits.is_surely_missed(record.accuracy):
            return None  # or its outputs were not compared any further, as they missed a limit that was higher
        rounds = record.result.samples
        if rounds is not None and is_cut_short(rounds, self._conditions.plan):
            return None  # or by one that had less time, or whose plan was content with fewer rounds
        return remembered(number, proposal, against, record)

    def keep_only(self, placement: Placement) -> None:
        """Free all builds on all devices but those of this placement."""
        for worker in self._pool:
            worker.keep_only(placement)

    def stand_alone(self) -> None:
        """End all workers but the first, which measures alone from now on. If it was lost, it starts again in the place
        of one that ends."""
        for worker in self._pool:
            if worker is not self._first:
                worker.runner.close()
        self._pool = WorkerPool([self._first])

    def _keep(self, trial: Trial) -> None:
        """Store a trial, in place of what an earlier run has stored of it."""
        record = TrialRecord(
            origin=trial.proposal.origin,
            pattern=trial.proposal.pattern,
            predicted=trial.proposal.predicted,
            against=trial.against.digest,
            placement=trial.placement,
            accuracy=trial.accuracy or Accuracy(),
            result=Outcome.of(trial.result),
            layers=trial.layers,
        )
        failed = failure(trial)
        is_lost = failed is not None and failed.is_transient
        self._store.put(_key(trial.placement, trial.against), record, on_disk=not is_lost, order="deterministic")

    def metric(self, placement: Placement) -> Score:
        """The user's metric of a placement, on the engine.

        Raises:
            EngineRefused: there is none, see `metrics.evaluate`.
            BadOption: the user's function fails, or no output fits the labels.
        """
        evaluation = self._conditions.evaluation
        assert evaluation is not None  # it is asked for with `evaluate`, `labels` or `metric` only
        self._asked_metrics.add(placement)
        build = partial(self._worker.load, placement, f"metric_{placement.digest}")
        return self._metric(placement.digest, evaluation, build)

    def _metric(self, of: str, evaluation: Metric, build: Callable[[], Handle]) -> Score:
        floats = partial(self._worker.load, FLOAT, "baseline")
        return self._store.memo(
            f"metric:{evaluation.digest}:{of}", Score, lambda: measure(evaluation, self._runner, build(), floats)
        )

    def asked_metric(self, placement: Placement) -> bool:
        """Whether this session has asked for the user's metric of a placement. What an earlier one left does not count:
        after a failure it may have asked for others."""
        return placement in self._asked_metrics

    def given_file(self, file: Path, fixed: Sample) -> tuple[Accuracy, Score | None]:
        """How near the outputs of the user's own Q/DQ file are to the float model's, and the user's metric of it, None
        without one, or if it fails. `fixed` are inputs that samples lack.

        Raises:
            EngineRefused: the engine does not run the file, or outputs are not finite.
            BadOption: the user's function fails.
            BaselineFailed: the engine cannot run the float model.
        """
        evaluation = self._conditions.evaluation
        with ExitStack() as stack:

            @cache
            def build() -> Handle:
                handle = self._runner.load(file, "given_outputs")
                stack.callback(self._runner.unload, handle)
                return handle

            exactness = self._store.memo(
                f"given:{len(self._conditions.samples)} samples", Accuracy, lambda: self._given_accuracy(build(), fixed)
            )
            if evaluation is None:
                return exactness, None
            try:
                return exactness, self._metric("given", evaluation, build)
            except EngineRefused:
                return exactness, None

    def float_file(self, file: Path, given: Path, fixed: Sample) -> Accuracy:
        """How near the outputs of the float model, as it was written to `file`, are to those of the user's own.

        Raises:
            EngineRefused: the engine does not run one of the files, or outputs are not finite.
        """

        def measured() -> Accuracy:
            outputs = []
            for one, inputs in ((given, fixed), (file, {})):
                handle = self._runner.load(one, f"{one.stem}_outputs", fresh=True)
                try:
                    outputs.append(self._outputs(handle, inputs))
                finally:
                    self._runner.unload(handle)
            reference, others = outputs
            return accuracy(reference, others, scores_of(reference, self._conditions.scores))

        return self._store.memo(f"float file:{len(self._conditions.samples)} samples", Accuracy, measured)

    def _given_accuracy(self, handle: Handle, fixed: Sample) -> Accuracy:
        return accuracy(self.reference, self._outputs(handle, fixed), self.scores)

    def _outputs(self, handle: Handle, fixed: Sample) -> list[dict[str, Array]]:
        samples = [{**sample, **fixed} for sample in self._conditions.samples]
        outputs = [{name: one[name] for name in self.reference[0]} for one in self._runner.outputs(handle, samples)]
        check_finite(outputs)
        return outputs

    def layers(self, placement: Placement = FLOAT) -> tuple[Layer, ...]:
        """The layer report of the float model, or of a placement that was measured; empty if the engine has none."""
        key = f"layers:{placement.digest if placement else ''}"

        def profiled() -> tuple[Layer, ...]:
            runs = profiled_runs(self.floats.seconds)
            handle = self._worker.load(placement, "final_layers" if placement else "baseline")
            return self._runner.layers(handle, runs)

        try:
            if not self._store.get(key, tuple[Layer, ...]) and placement:
                trials = self._store.values("trial:", TrialRecord).values()
                known = (t.layers for t in trials if t.placement == placement and t.layers)
                if (layers := next(known, None)) is not None:
                    return layers
            return self._store.memo(key, tuple[Layer, ...], profiled)
        except EngineRefused:
            return ()

    def repeatability(self) -> Accuracy:
        """The float model's outputs against those of the same build run again: no candidate can be more exact."""

        def again() -> Accuracy:
            samples = self._conditions.samples[:REPEATED]
            with rewording("the engine cannot run the float model again", BaselineFailed):
                outputs = self._runner.outputs(self._worker.load(Placement(), "baseline"), samples)
            reference, scores = self.reference[: len(samples)], self.scores.first(len(samples))
            return accuracy(reference, outputs, scores)

        return self._store.memo("repeatability", Accuracy, again)

    @property
    def _worker(self) -> TrialWorker:
        return self._pool.first

    @property
    def _runner(self) -> Runner:
        return self._worker.runner

    @cached_property
    def floats(self) -> FloatRecord:
        """The float model as it was built and run when the run began.

        Raises:
            BadOption: an output that the user names as scores holds none.
            BaselineFailed: the engine cannot build or run it.
        """
        calls = ",".join(f"{call.threads}:{call.share:.3f}" for call in self._runner.mix)
        key = f"float:{len(self._conditions.samples)} samples, {calls}"
        return self._store.memo(key, FloatRecord, self._measured_float)

    def _measured_float(self) -> FloatRecord:
        begun = time.monotonic()
        outputs = self.reference
        if self._conditions.by_rule is not None:
            each = (time.monotonic() - begun) / len(outputs)
            seconds, turn, build, start = each, each, each, 0.0
        else:
            with rewording(*CANNOT_RUN):
                handle = self._worker.load(FLOAT, "baseline")
            with rewording("the engine cannot time the float model", BaselineFailed):
                calls = self._runner.timed(handle, 1).seconds[0][0]
            mix = self._runner.mix
            untimed = 1.5 if len(mix) > builds_for(mix) else 1.0
            seconds, turn = sum(w.share * each for w, each in zip(mix, calls, strict=True)), untimed * sum(calls)
            build, start = handle.build_seconds, self._runner.start_seconds(handle)
        return FloatRecord(
            seconds=seconds,
            turn_seconds=turn,
            build_seconds=build,
            start_seconds=start,
            kinds=tuple(array.dtype.kind for array in outputs[0].values()),
            axis=dict(self.scores.axis),
            classes=dict(self.scores.classes),
            why_no_scores=self.scores.why_not,
        )

    @cached_property
    def reference(self) -> list[dict[str, Array]]:
        """The outputs of the float model on the samples; where times mean nothing, as the CPU computes them."""
        if (by_rule := self._conditions.by_rule) is not None:
            with rewording("ONNX Runtime cannot run the float model", BaselineFailed):
                outputs = by_rule.reference()
        else:
            with rewording(*CANNOT_RUN):
                outputs = self._runner.outputs(self._worker.load(FLOAT, "baseline"), self._conditions.samples)
        if not is_finite(outputs):
            raise BaselineFailed("the float model's outputs hold NaN or infinite values on the calibration data")
        return outputs

    @cached_property
    def scores(self) -> Scores:
        """The scores of classes among the float model's outputs, with the best classes. Raises as `floats`."""
        return scores_of(self.reference, self._conditions.scores)


def _key(placement: Placement, against: Placement) -> str:
    return f"trial:{job_of(placement.digest, against.digest)}"


def remembered(number: int, proposal: Proposal, against: Placement, record: TrialRecord) -> Trial:
    """Make a trial of its proposal and its record."""
    known = record.accuracy if record.result.failure is None else None
    return Trial(number, proposal, against, record.result.result, known, record.layers)


def trial_of(number: int, record: TrialRecord, against: Placement) -> Trial:
    """Make a trial of its record alone, for reading a finished run: the proposal has what the record holds of it."""
    learned = record.layers is not None
    proposal = Proposal(record.origin, record.placement, record.pattern, record.predicted, learned)
    return remembered(number, proposal, against, record)
