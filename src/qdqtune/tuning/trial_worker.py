"""Writes files of candidates, holds their builds on a device, and times them there, each against another placement."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from threading import Lock

import numpy as np

from qdqtune.engines.execution import Check
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import EngineRefused, Failure, rewording
from qdqtune.graph.saving import ConstantFile, save
from qdqtune.numerics.accuracy import accuracy, check_finite, is_finite
from qdqtune.numerics.metrics import Metric
from qdqtune.numerics.scores import Scores
from qdqtune.placement.insertion import Inserter
from qdqtune.search.costs.rule_costs import RuleCosts, left_nodes
from qdqtune.timing.limits import Limits
from qdqtune.timing.pairing import compare_builds, fresh_builds, rounds_of
from qdqtune.timing.ratios import Plan, compare, judge, settled
from qdqtune.types import Array, CostsByRule, Layer, Measurement, Placement, Proposal, Sample, Trial


class Candidates:
    """Files of one model's placements, each written when it is first asked for, in the folder of `constants`. Several
    threads may ask."""

    def __init__(self, inserter: Inserter, constants: ConstantFile) -> None:
        self.folder = constants.path.parent
        self._inserter, self._constants = inserter, constants
        self._lock = Lock()
        self._used: Counter[Placement] = Counter()

    def file(self, placement: Placement) -> Path:
        """A small file of the placement that refers to the constants which all candidates share."""
        path = self.folder / f"{placement.digest}.onnx"
        with self._lock:
            if not path.exists():
                self._constants.save(self._inserter.insert(placement), path)
        return path

    def keep(self, placement: Placement) -> Path:
        """The file of a placement, which exists until `drop` was called as often as this."""
        with self._lock:
            self._used[placement] += 1
        return self.file(placement)

    def drop(self, placement: Placement) -> None:
        """Delete the file, unless another caller keeps it."""
        with self._lock:
            self._used[placement] -= 1
            if self._used[placement] <= 0:
                (self.folder / f"{placement.digest}.onnx").unlink(missing_ok=True)

    def write_whole(self, placement: Placement, path: Path) -> None:
        """Write a placement as a self-contained file."""
        save(self._inserter.insert(placement), path, self._constants)


class Loaded:
    """Builds of one model's placements on one device, each made when it is first asked for."""

    def __init__(self, runner: Runner, candidates: Candidates) -> None:
        self._candidates = candidates
        self._runner = runner
        self._loaded: dict[Placement, Handle] = {}

    def load(self, placement: Placement, log_name: str) -> Handle:
        """The build of a placement, made now if there is none; what the engine prints then goes to that log."""
        if placement not in self._loaded:
            file = self._candidates.keep(placement)
            try:
                self._loaded[placement] = self._runner.load(file, log_name)
            except EngineRefused:
                self._candidates.drop(placement)
                raise
        return self._loaded[placement]

    def drop(self, placement: Placement) -> None:
        """Unload a placement and delete its file, if it is loaded."""
        if placement in self._loaded:
            self._runner.unload(self._loaded.pop(placement))
            self._candidates.drop(placement)

    def keep_only(self, placement: Placement) -> None:
        """Unload every placement but this one."""
        for other in [p for p in self._loaded if p != placement]:
            self.drop(other)


NO_NODES = Failure("build", "the provider runs no node of the model: do its options name a chip that it knows?")

BRIEF_ROUNDS = 2
"""Rounds of a candidate for which time is short from the start: they say whether a proof is worth its time. Chosen, not
measured."""

PROFILED = (4, 12, 400)
"""Inferences behind a layer report: the least, the usual number, and the most. Chosen, not measured."""

PROFILED_SECONDS = (0.05, 1.0)
"""Seconds of all inferences behind a layer report (least, most): short layers need many. Chosen, not measured."""


@dataclass(frozen=True)
class ByRule:
    """How candidates are judged on an engine whose times mean nothing: by `costs`. `reference` gives the outputs of the
    float model on the samples, as the CPU computes them."""

    costs: RuleCosts
    reference: Callable[[], list[dict[str, Array]]]


@dataclass(frozen=True)
class Conditions:
    """How candidates are measured: by which plan, on which samples, and by which metric of the user's.

    With `check_wins` a win that holds the `limits` is repeated. `scores` are the outputs that the user names as such.
    With `by_rule` nothing is timed.
    """

    plan: Plan
    samples: Sequence[Sample]
    seed: int
    limits: Limits = field(default_factory=Limits)
    evaluation: Metric | None = None
    check_wins: bool = True
    scores: Sequence[str] = ()
    by_rule: ByRule | None = None

    def won(self, trial: Trial) -> bool:
        """Whether a trial is faster and holds the limits, as far as it was measured."""
        measured = judge(trial, self.plan)
        is_faster = measured is not None and measured.verdict == "faster"
        return is_faster and self.limits.is_exact_enough(trial.accuracy)

    def may_be_taken(self, trial: Trial) -> bool:
        """Whether a candidate may be accepted, so that its build is kept until the batch is judged."""
        measured = judge(trial, self.plan)
        is_slower = measured is None or measured.verdict == "slower" or measured.median > 1
        return not is_slower and self.limits.is_exact_enough(trial.accuracy)

    def needs_check(self, trial: Trial) -> bool:
        """Whether a win is to be repeated on second builds. Not in a search that learns from layers: it makes too few
        candidates to win by luck."""
        is_one_of_many = self.check_wins and not trial.proposal.wants_layers
        return is_one_of_many and trial.check is None and self.won(trial)


@dataclass(frozen=True)
class TrialJob:
    """One candidate, and the placement that it is timed `against`. `known` is its trial of an earlier run, if only the
    check of its win is missing."""

    number: int
    proposal: Proposal
    against: Placement
    known: Trial | None = None


@dataclass(frozen=True)
class Batch:
    """What the trials of a batch share: the outputs of the float model as `reference`, the `scores` of classes in them,
    and the time of `time.monotonic` at which comparisons end with the rounds that they have."""

    reference: Sequence[dict[str, Array]]
    scores: Scores
    deadline: float | None = None


class TrialWorker:
    """Measures candidates on one device: times of two devices are never compared.

    Workers share `candidates`, which are files; `number` distinguishes the names of their logs.
    """

    def __init__(self, runner: Runner, candidates: Candidates, conditions: Conditions, number: int = 0) -> None:
        self.runner = runner
        self.loaded = Loaded(runner, candidates)
        self._mark = f"-{number + 1}" if number else ""
        self._candidates, self._conditions = candidates, conditions
        self._costs: dict[Placement, float] = {}

    def checking(self, check: Check) -> AbstractContextManager[None]:
        return self.runner.checking(check)

    def trial(self, job: TrialJob, batch: Batch) -> Trial:
        """Time a candidate.

        A win is repeated at once on another build of both files: one build may be fast by the luck of its memory
        layout, and stays so in every round.

        Raises:
            EngineFailure: the engine refuses the other placement, which it has built before.
        """
        trial = job.known or self._fresh(job, batch)
        if self._conditions.needs_check(trial):
            try:
                trial = replace(trial, check=self._checked(trial))
            except EngineRefused as refused:
                trial = replace(trial, check=refused.failure)
        if not self._conditions.may_be_taken(trial):
            self.loaded.drop(trial.placement)
        return trial

    def _fresh(self, job: TrialJob, batch: Batch) -> Trial:
        by_rule = self._conditions.by_rule
        try:
            return self._measured(job, batch) if by_rule is None else self._ruled(job, batch, by_rule)
        except EngineRefused as refused:
            return Trial(job.number, job.proposal, job.against, refused.failure)

    def _measured(self, job: TrialJob, batch: Batch) -> Trial:
        conditions = self._conditions
        with rewording("the engine does not build the best model so far again"):  # it has built it before
            opponent = self._opponent(job)
        candidate = self.loaded.load(job.proposal.placement, f"trial_{job.number:03}")
        outputs: list[dict[str, Array]] = []
        if not self.runner.start_seconds(candidate):  # else rounds give outputs, too
            outputs = self.runner.outputs(candidate, conditions.samples)
            check_finite(outputs)
        samples = () if outputs else conditions.samples
        rounds = rounds_of(self.runner, opponent, candidate, conditions.plan, conditions.seed, samples)
        begun = time.monotonic()
        is_brief = batch.deadline is not None and begun > batch.deadline
        plan = replace(conditions.plan, looks=(BRIEF_ROUNDS,)) if is_brief else conditions.plan
        result = compare(rounds, plan, decided=lambda r: settled(r) or _is_late(begun, batch.deadline))
        if not outputs:
            outputs = self.runner.outputs(candidate, conditions.samples)
            check_finite(outputs)
        layers: tuple[Layer, ...] | None = None
        if job.proposal.wants_layers:
            try:
                layers = self.runner.layers(candidate, profiled_runs(float(np.median(result.b))))
            except EngineRefused as refused:
                if refused.is_transient:
                    raise
                layers = ()
        exactness = accuracy(batch.reference, outputs, batch.scores)
        return Trial(job.number, job.proposal, job.against, result, accuracy=exactness, layers=layers)

    def _ruled(self, job: TrialJob, batch: Batch, by_rule: ByRule) -> Trial:
        """A candidate with its outputs, its layers, and its costs by rule; nothing is timed."""
        candidate = self.loaded.load(job.proposal.placement, f"trial_{job.number:03}")
        outputs = self._deciding(candidate, batch)
        check_finite(outputs)
        layers = self.runner.layers(candidate, 1)
        computed = [name for layer in layers if layer.kind != "quantize" for name in layer.nodes]
        if computed and left_nodes(layers).issuperset(computed):
            raise EngineRefused(NO_NODES)
        self._costs[job.proposal.placement] = cost = by_rule.costs.cost(job.proposal.placement, layers)
        result = CostsByRule(self._cost_of(job.against, job, by_rule), cost)
        exactness = accuracy(batch.reference, outputs, batch.scores)
        return Trial(job.number, job.proposal, job.against, result, accuracy=exactness, layers=layers)

    def _deciding(self, candidate: Handle, batch: Batch) -> list[dict[str, Array]]:
        """The outputs on all samples, or on the first ones if they show that the limit on the SQNR is missed: a
        simulator takes up to a minute for each."""
        outputs: list[dict[str, Array]] = []
        for sample in self._conditions.samples:
            outputs += self.runner.outputs(candidate, [sample])
            known = accuracy(batch.reference, outputs, batch.scores)
            if self._conditions.limits.is_surely_missed(known) or not is_finite(outputs[-1:]):
                break
        return outputs

    def _cost_of(self, placement: Placement, job: TrialJob, by_rule: ByRule) -> float:
        """The cost of the placement that a candidate is compared with, once its layers are known. Where the engine does
        not run it, which is possible for the float model only, each of its nodes counts as one that runs elsewhere."""
        if placement not in self._costs:
            try:
                layers = self.runner.layers(self._opponent(job), 1)
            except EngineRefused:
                layers = ()
            self._costs[placement] = by_rule.costs.cost(placement, layers)
        return self._costs[placement]

    def _checked(self, trial: Trial) -> Measurement:
        files = self._candidates.file(trial.against), self._candidates.file(trial.placement)
        with fresh_builds(self.runner, *files, f"trial_{trial.number:03}{self._mark}") as pair:
            plan, seed = self._conditions.plan, self._conditions.seed + 1
            return compare_builds(self.runner, *pair, plan, seed, settled)

    def _opponent(self, job: TrialJob) -> Handle:
        return self.loaded.load(job.against, f"best{self._mark}")


def trial_seconds(
    plan: Plan, build: float, seconds: float, turn: float, judged: int, start: float, profiled: int
) -> float:
    """The least seconds that a candidate takes which is as fast as the float model: its build, its outputs on `judged`
    samples, the first look of its comparison and its layers in so many `profiled` inferences. A build of the float
    model takes `build` seconds, an inference `seconds`, and its part in a round `turn`. With `start` (see
    `Plan.round_seconds`), rounds give outputs.
    """
    comparison = plan.warmup_seconds(turn, start) + plan.round_seconds(turn, start) * plan.looks[0]
    return build + judged * seconds + profiled * turn + start + comparison


def profiled_runs(seconds: float) -> int:
    """The number of inferences for a layer report of a model that takes so many seconds each."""
    (least, enough, most), (short, long) = PROFILED, PROFILED_SECONDS
    if seconds * most <= short:
        return most
    return max(ceil(short / seconds), min(enough, max(least, ceil(long / seconds))))


def _is_late(begun: float, deadline: float | None) -> bool:
    """Whether the next look of a comparison would end too late: it takes about as long as all before."""
    now = time.monotonic()
    return deadline is not None and now + (now - begun) > deadline
