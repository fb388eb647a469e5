"""Measures placements on the engine (rounds, outputs, layers, metric), or takes results from the state file. Each
device has a worker, which builds candidates' files and times them in the same rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from threading import Lock

import numpy as np

from qdqtune.engines import builds_for
from qdqtune.engines.pool import WorkerPool
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BaselineFailed, EngineRefused, Failure, rewording
from qdqtune.graph.saving import ConstantFile, save
from qdqtune.numerics.accuracy import accuracy, check_finite, is_finite
from qdqtune.numerics.metrics import Metric, measure
from qdqtune.numerics.scores import Score, Scores, scores_of
from qdqtune.placement.insertion import Inserter
from qdqtune.search.costs.rule_costs import RuleCosts, left_nodes
from qdqtune.timing.limits import Limits, failure
from qdqtune.timing.race import race_candidates, taking_rounds
from qdqtune.timing.ratios import Plan, is_cut_short, judge
from qdqtune.tuning.store import Caveat, FloatRecord, Store, job_of
from qdqtune.types import Accuracy, Array, CostsByRule, Layer, Measurement, Placement, Proposal, Sample, Times, Trial


class Candidates:
    """Files of one model's placements, in the folder of `constants`, written when needed. Thread-safe."""

    def __init__(self, inserter: Inserter, constants: ConstantFile) -> None:
        self.folder = constants.path.parent
        self._inserter, self._constants = inserter, constants
        self._lock = Lock()

    def file(self, placement: Placement) -> Path:
        """The file of a placement; its constants are external data that all candidates share."""
        path = self.folder / f"{placement.digest}.onnx"
        with self._lock:
            if not path.exists():
                self._constants.save(self._inserter.insert(placement), path)
        return path

    def write_whole(self, placement: Placement, path: Path) -> None:
        save(self._inserter.insert(placement), path)


NO_NODES = Failure("build", "the provider runs no node of the model: do its options name a chip that it knows?")

BRIEF_LOOKS = (1,)
"""The numbers of rounds for a candidate that goes to the proof at once: just enough to see whether that is worthwhile.
Chosen, not measured."""

PROFILED = (4, 12, 400)
"""Inferences profiled for a layer report: least, usual and most. Chosen, not measured."""

PROFILED_SECONDS = (0.05, 0.5)
"""Seconds that the profiled inferences take in all (least, most); short layers need many. Chosen, not measured."""


@dataclass(frozen=True)
class ByRule:
    """Judging candidates where the engine is a simulator, whose times mean nothing: by the estimated `costs`.
    `reference` computes the float model's outputs on the CPU."""

    costs: RuleCosts
    reference: Callable[[], list[dict[str, Array]]]


@dataclass(frozen=True)
class Conditions:
    """How candidates are measured: schedule of rounds, samples, and the user's metric. `scores` are outputs that the
    user declared as class scores; a build takes about `model_bytes` of memory. With `by_rule` nothing is timed."""

    plan: Plan
    samples: Sequence[Sample]
    seed: int
    limits: Limits = field(default_factory=Limits)
    evaluation: Metric | None = None
    scores: Sequence[str] = ()
    copies: frozenset[str] = frozenset()
    model_bytes: int = 0
    by_rule: ByRule | None = None


UNTIMED = Failure("run", "not timed")
"""The result of a candidate that is not timed yet, or of a file of which only the outputs are compared."""


@dataclass(frozen=True)
class Batch:
    """What the candidates of a batch share: the float model's outputs as `reference`, the class `scores` in them, and
    the `deadline` (by `time.monotonic`) at which comparisons stop. `is_brief`: they run few rounds only."""

    reference: Sequence[dict[str, Array]]
    scores: Scores
    deadline: float | None = None
    is_brief: bool = False

    def is_late(self, seconds: float = 0.0) -> bool:
        """Whether work of so many seconds would end after the deadline."""
        return self.deadline is not None and time.monotonic() + seconds > self.deadline


@dataclass(frozen=True)
class Entrant:
    """A candidate that was built, its trial so far, and its outputs on the samples; None if rounds give them."""

    trial: Trial
    build: Handle
    outputs: list[dict[str, Array]] | None


class TrialWorker:
    """Measures candidates on one device; times from different devices are never compared.

    All workers share the files `candidates`. `number` makes the names of their logs differ.
    """

    def __init__(self, runner: Runner, candidates: Candidates, conditions: Conditions, number: int = 0) -> None:
        self.runner = runner
        self._candidates = candidates
        self._builds: dict[Placement, Handle] = {}
        self._mark = f"-{number + 1}" if number else ""
        self._conditions = conditions
        self._costs: dict[Placement, float] = {}

    def load(self, placement: Placement, log_name: str) -> Handle:
        """The build of a placement, made if there is none; then the engine's output goes to that log."""
        file = self._candidates.file(placement)  # written again if another worker has deleted it
        if placement not in self._builds:
            self._builds[placement] = self.runner.load(file, log_name)
        return self._builds[placement]

    def drop(self, placement: Placement) -> None:
        """Unload a placement, if it is loaded, and delete its file, which can be written again."""
        if placement in self._builds:
            handle = self._builds.pop(placement)
            self.runner.unload(handle)
            handle.path.unlink(missing_ok=True)

    def keep_only(self, placement: Placement) -> None:
        for other in [p for p in self._builds if p != placement]:
            self.drop(other)

    def trials(self, untimed: Sequence[Trial], batch: Batch) -> list[Trial]:
        """Measure candidates in the same rounds, all against the same opponent. `untimed` are their trials without
        results; those that the deadline leaves no time for are left out at the end. Builds that cannot be accepted are
        unloaded."""
        trials = dict[int, Trial]()
        entrants = list[Entrant]()
        by_rule, begun = self._conditions.by_rule, time.monotonic()
        if by_rule is None:
            self._opponent(untimed[0].against)
        for count, trial in enumerate(untimed):
            if count and batch.is_late((time.monotonic() - begun) / count * 2):  # its build, and rounds of all of them
                break
            try:
                build = self.load(trial.placement, f"trial_{trial.number:03}")
                if by_rule is not None:
                    trials[trial.number] = self._ruled(trial, build, batch, by_rule)
                elif self.runner.starts_processes:
                    entrants.append(Entrant(trial, build, None))
                else:
                    entrants.append(Entrant(trial, build, self._outputs(build)))
            except EngineRefused as refused:
                trials[trial.number] = replace(trial, result=refused.failure)
                self.drop(trial.placement)
        for trial in self._raced(entrants, batch) if entrants else ():
            trials[trial.number] = trial
            measured = judge(trial, self._conditions.plan)
            is_slower = measured is None or measured.verdict == "slower" or measured.median > 1
            if is_slower or not self._conditions.limits.is_exact_enough(trial.accuracy):  # it cannot be accepted
                self.drop(trial.placement)
        return [trials[trial.number] for trial in untimed if trial.number in trials]

    def _outputs(self, build: Handle) -> list[dict[str, Array]]:
        outputs = self.runner.outputs(build, self._conditions.samples)
        check_finite(outputs)
        return outputs

    def _raced(self, entrants: Sequence[Entrant], batch: Batch) -> list[Trial]:
        """The trials of candidates timed in one race. If the engine fails there, each is raced alone, as one of them is
        to blame; but not after the deadline, if a later session may try again."""
        trials = list[Trial]()
        try:
            times = self._times(entrants, batch)
        except EngineRefused as refused:
            for entrant in entrants:
                if len(entrants) == 1 or (refused.is_transient and batch.is_late()):
                    trials.append(replace(entrant.trial, result=refused.failure))
                else:
                    trials += self._raced([entrant], batch)
            return trials
        for place, entrant in enumerate(entrants, 1):
            try:
                trials.append(self._trial(entrant, times.pair(0, place), batch))
            except EngineRefused as refused:
                trials.append(replace(entrant.trial, result=refused.failure))
        return trials

    def _times(self, entrants: Sequence[Entrant], batch: Batch) -> Times:
        conditions, begun = self._conditions, time.monotonic()
        handles = [self._opponent(entrants[0].trial.against), *(entrant.build for entrant in entrants)]
        samples = conditions.samples if entrants[0].outputs is None else ()
        plan = replace(conditions.plan, looks=BRIEF_LOOKS) if batch.is_brief else conditions.plan
        take = taking_rounds(self.runner, handles, plan, conditions.seed, samples)

        def is_late() -> bool:
            return batch.is_late(time.monotonic() - begun)  # the next look takes about as long as all before

        return race_candidates(take, len(handles), plan, is_late)

    def _trial(self, entrant: Entrant, result: Measurement, batch: Batch) -> Trial:
        outputs = self._outputs(entrant.build) if entrant.outputs is None else entrant.outputs
        layers: tuple[Layer, ...] | None = None
        if entrant.trial.proposal.wants_layers and not (batch.is_brief or batch.is_late()):
            try:
                layers = self.runner.layers(entrant.build, profiled_runs(float(np.median(result.b))))
            except EngineRefused as refused:
                if refused.is_transient:
                    raise
                layers = ()
        closeness = accuracy(batch.reference, outputs, batch.scores)
        return replace(entrant.trial, result=result, accuracy=closeness, layers=layers)

    def _ruled(self, trial: Trial, candidate: Handle, batch: Batch, by_rule: ByRule) -> Trial:
        outputs: list[dict[str, Array]] = []
        for sample in self._conditions.samples:  # a simulator takes up to a minute for each
            outputs += self.runner.outputs(candidate, [sample])
            closeness = accuracy(batch.reference, outputs, batch.scores)
            if self._conditions.limits.is_surely_missed(closeness) or not is_finite(outputs[-1:]):
                break
        check_finite(outputs)
        layers = self.runner.layers(candidate, 1)
        computed = [name for layer in layers if layer.kind != "quantize" for name in layer.nodes]
        if computed and left_nodes(layers).issuperset(computed):
            raise EngineRefused(NO_NODES)
        self._costs[trial.placement] = cost = by_rule.costs.cost(trial.placement, layers)
        if trial.against not in self._costs:
            try:
                others = self.runner.layers(self._opponent(trial.against), 1)
            except EngineRefused:  # of the float model: each of its nodes counts as one that runs elsewhere
                others = ()
            self._costs[trial.against] = by_rule.costs.cost(trial.against, others)
        result = CostsByRule(self._costs[trial.against], cost)
        return replace(trial, result=result, accuracy=closeness, layers=layers)

    def _opponent(self, placement: Placement) -> Handle:
        with rewording("the engine does not build the best model so far again"):  # it has built it before
            return self.load(placement, f"best{self._mark}")


def trial_seconds(plan: Plan, floats: FloatRecord, judged: int, profiled: int) -> float:
    """Estimated least seconds for measuring a candidate as fast as the float model: building it, running `judged`
    samples, the first look of its comparison, and profiling its layers in `profiled` inferences."""
    turn, start = floats.turn_seconds, floats.start_seconds
    comparison = 2 * (plan.warmup_seconds(turn, start) + plan.round_seconds(turn, start) * plan.looks[0])
    builds = (2 if profiled else 1) * floats.build_seconds  # many engines build once more for a layer report
    return builds + judged * floats.seconds + profiled * turn + start + comparison


def profiled_runs(seconds: float) -> int:
    """How many inferences to profile of a model whose inferences take so many seconds."""
    (least, enough, most), (short, long) = PROFILED, PROFILED_SECONDS
    if seconds * most <= short:
        return most
    return max(ceil(short / seconds), min(enough, max(least, ceil(long / seconds))))


FLOAT = Placement()

CANNOT_RUN = "the engine cannot run the float model", BaselineFailed

TOGETHER = 2 * 2**30
"""Bytes of models that are built and raced together at most, but at least one. Chosen, not measured."""


class Bench:
    """Measures placements on all devices of a run, and takes from the state file what it has."""

    def __init__(self, pool: WorkerPool[TrialWorker], store: Store, conditions: Conditions) -> None:
        self._pool, self._store, self._conditions = pool, store, conditions
        self._first = pool.first
        self.asked_metrics = set[Placement]()
        """Placements for which this session has computed the user's metric. Earlier sessions do not count: after a
        failure they may have needed it for others."""
        self.deadline: float | None = None
        """The time (by `time.monotonic`) at which comparisons stop with the rounds that they have."""

    @property
    def model_bytes(self) -> int:
        return self._conditions.model_bytes

    @property
    def trial_seconds(self) -> float:
        """Estimated least seconds for measuring a candidate as fast as the float model."""
        samples = self._conditions.samples
        return trial_seconds(self._conditions.plan, self.floats, len(samples), profiled_runs(self.floats.seconds))

    @property
    def brief_seconds(self) -> float:
        """The same for a candidate with few rounds and no layer report."""
        plan = replace(self._conditions.plan, looks=BRIEF_LOOKS)
        return trial_seconds(plan, self.floats, len(self._conditions.samples), 0)

    def measured(
        self,
        number: int,
        proposals: Sequence[Proposal],
        against: Placement,
        *,
        is_brief: bool = False,
        is_recorded: bool = False,
    ) -> Generator[tuple[Trial, bool]]:
        """Race candidates against the placement `against`, on all devices in parallel, as many per race as memory
        allows. Yields the trials in the order of the proposals, numbered from `number`, each with whether the state
        file had its result; those that the deadline leaves no time to build are left out at the end. `is_brief`: there
        is time for a few rounds only. `is_recorded` as in `known`.

        Results are stored at once. Closing the iterator stops running measurements.
        """
        asked = [Trial(place, proposal, against, UNTIMED) for place, proposal in enumerate(proposals, number)]
        done = {
            trial.number: known for trial in asked if (known := self.known(trial, is_recorded=is_recorded)) is not None
        }
        recalled = set(done)
        untimed = [trial for trial in asked if trial.number not in recalled]
        with closing(self._answers(untimed, is_brief=is_brief)) as results:
            # The user's metric runs on the first device after each trial: measure the whole batch before.
            is_gathered = len(self._pool) > 1 and self._conditions.evaluation is not None
            fresh = iter(list(results)) if is_gathered else results
            for place in range(number, number + len(proposals)):
                while place not in done:
                    trial = next(fresh, None)
                    if trial is None:
                        return
                    done[trial.number] = trial
                yield done.pop(place), place in recalled

    def _answers(self, untimed: Sequence[Trial], *, is_brief: bool) -> Generator[Trial]:
        if not untimed:
            return
        batch = Batch(self.reference, self.scores, self.deadline, is_brief)
        each = max(1, self._conditions.model_bytes) * builds_for(self._runner.mix)
        size = max(1, min(ceil(len(untimed) / len(self._pool)), TOGETHER // each - 1))
        races = [untimed[first : first + size] for first in range(0, len(untimed), size)]
        ask = [partial(TrialWorker.trials, untimed=race, batch=batch) for race in races]
        with closing(self._pool.results(ask)) as results:
            for _, trials in results:
                for trial in trials:
                    failed = failure(trial)
                    is_lost = failed is not None and failed.is_transient
                    stored = replace(trial, number=0)
                    self._store.put(f"trial:{job_of(trial)}", stored, on_disk=not is_lost, order="deterministic")
                yield from trials

    def known(self, asked: Trial, *, is_recorded: bool = False) -> Trial | None:
        """The trial as the state file has it; None if it lacks it, or if more is to be measured. `is_recorded`: of a
        batch that an earlier session proposed, where it is not built again for layers alone."""
        trial, wants_layers = self._store.get(f"trial:{job_of(asked)}", Trial), asked.proposal.wants_layers
        if trial is None or (wants_layers and not is_recorded and trial.layers is None and failure(trial) is None):
            return None  # or it was measured by a search that did not ask for layers
        judged = trial.accuracy or Accuracy()
        if judged.at_most_db is not None and not self._conditions.limits.is_surely_missed(judged):
            return None  # or its outputs were not compared any further, as they missed a limit that was higher
        if isinstance(trial.result, Measurement) and is_cut_short(trial.result, self._conditions.plan):
            return None  # or by one that had less time
        return replace(trial, number=asked.number, proposal=asked.proposal)

    def keep_only(self, placement: Placement) -> None:
        for worker in self._pool:
            worker.keep_only(placement)

    def stand_alone(self) -> None:
        """End all workers but the first, which measures alone from now on, and starts anew if it was lost."""
        for worker in self._pool:
            if worker is not self._first:
                worker.runner.close()
        self._pool = WorkerPool([self._first])

    def metric(self, placement: Placement) -> Score:
        """The user's metric of a placement, on the engine.

        Raises:
            EngineRefused: it cannot be computed, see `metrics.evaluate`.
        """
        evaluation = self._conditions.evaluation
        assert evaluation is not None  # it is asked for with `evaluate`, `labels` or `metric` only
        self.asked_metrics.add(placement)
        build = partial(self._worker.load, placement, f"metric_{placement.digest}")
        return self._metric(placement.digest, evaluation, build)

    def _metric(self, of: str, evaluation: Metric, build: Callable[[], Handle]) -> Score:
        floats = partial(self._worker.load, FLOAT, "baseline")
        key = metric_key(evaluation, of)
        return self._store.memo(key, Score, lambda: measure(evaluation, self._runner, build(), floats))

    def given_file(self, file: Path, fixed: Sample) -> tuple[Accuracy, Score | None]:
        """The accuracy of the user's own Q/DQ file, compared with the float model, and the user's metric of it (None
        without one, or if it fails). `fixed` are values of inputs that the samples lack.

        Raises:
            EngineRefused: the engine does not run the file, or outputs are not finite.
        """
        evaluation = self._conditions.evaluation
        judged = len(self._conditions.samples)
        exactness = self._store.memo(
            f"given:{judged} samples",
            Accuracy,
            lambda: accuracy(self.reference, self._outputs_of(file, fixed), self.scores),
        )
        if evaluation is None:
            return exactness, None
        with ExitStack() as stack, suppress(EngineRefused):
            build = partial(self._runner.loaded, file, "given_outputs")
            return exactness, self._metric("given", evaluation, lambda: stack.enter_context(build()))
        return exactness, None

    def float_file(self, file: Path, given: Path, fixed: Sample) -> Accuracy:
        """The accuracy of the float model as we wrote it to `file`, compared with the user's file `given`.

        Raises:
            EngineRefused: the engine does not run one of the files, or outputs are not finite.
        """

        def measured() -> Accuracy:
            reference = self._outputs_of(given, fixed)
            scores = scores_of(reference, self._conditions.scores, self._conditions.copies)
            return accuracy(reference, self._outputs_of(file, {}), scores)

        return self._store.memo(f"float file:{len(self._conditions.samples)} samples", Accuracy, measured)

    def _outputs_of(self, file: Path, fixed: Sample) -> list[dict[str, Array]]:
        samples = [{**sample, **fixed} for sample in self._conditions.samples]
        outputs = [{name: one[name] for name in self.reference[0]} for one in self._runner.outputs_of(file, samples)]
        check_finite(outputs)
        return outputs

    def layers(
        self, placement: Placement = FLOAT, lacks: Callable[[float], bool] = lambda _: False
    ) -> tuple[Layer, ...]:
        """The layer report of the float model, or of a measured placement. Empty if the engine has none or fails, or if
        `lacks`, called with the seconds that one takes, says that the run has too little time."""
        floats = self.floats
        runs = profiled_runs(floats.seconds)
        caveat = Caveat(is_hurried=lacks(floats.build_seconds + 2 * runs * floats.seconds))
        if caveat.is_hurried:
            runs = 1

        def profiled() -> tuple[Layer, ...]:
            handle = self._worker.load(placement, "final_layers" if placement else "baseline")
            return self._runner.layers(handle, runs)

        key = f"layers:{placement.digest if placement else ''}"
        trials = self._store.values("trial:", Trial).values() if placement else ()
        measured = next((t.layers for t in trials if t.placement == placement and t.layers), None)
        if measured is None and not self._store.has(key) and lacks(floats.build_seconds + 2 * runs * floats.seconds):
            return ()
        try:
            return measured or self._store.memo(key, tuple[Layer, ...], profiled, caveat)
        except EngineRefused:
            return ()

    @property
    def _worker(self) -> TrialWorker:
        return self._pool.first

    @property
    def _runner(self) -> Runner:
        return self._worker.runner

    @cached_property
    def floats(self) -> FloatRecord:
        """The float model's build and first inferences, measured when the run began. Raises BaselineFailed."""
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
                calls = self._runner.timed(handle, 1, self._conditions.plan.turn_seconds).seconds[0][0]
            mix = self._runner.mix
            untimed = 1.5 if len(mix) > builds_for(mix) else 1.0
            seconds, turn = sum(w.share * each for w, each in zip(mix, calls, strict=True)), untimed * sum(calls)
            build, start = handle.build_seconds, self._runner.start_seconds
        return FloatRecord(
            seconds=seconds,
            turn_seconds=turn,
            build_seconds=build,
            start_seconds=start,
            kinds=tuple(a.dtype.kind for name, a in outputs[0].items() if name not in self.scores.copies),
            scores=replace(self.scores, best={}),
        )

    @cached_property
    def reference(self) -> list[dict[str, Array]]:
        """The float model's outputs on the samples; on a simulator, as the CPU computes them."""
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
        """Those outputs of the float model that are class scores, with their best classes."""
        return scores_of(self.reference, self._conditions.scores, self._conditions.copies)


def metric_key(metric: Metric, of: str = FLOAT.digest) -> str:
    """The metric's key in the state file; `of` is the digest of a placement, or names a file."""
    return f"metric:{metric.digest}:{of}"
