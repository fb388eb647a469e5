"""Writes files of candidates, holds their builds on a device, and times them there, each against another placement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from threading import Lock

import numpy as np

from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import EngineRefused, Failure, rewording
from qdqtune.graph.saving import ConstantFile, save
from qdqtune.numerics.accuracy import accuracy, check_finite, is_finite
from qdqtune.numerics.metrics import Metric
from qdqtune.numerics.scores import Scores
from qdqtune.placement.insertion import Inserter
from qdqtune.search.costs.rule_costs import RuleCosts, left_nodes
from qdqtune.timing.limits import Limits
from qdqtune.timing.race import decided_candidates, race, taking_rounds
from qdqtune.timing.ratios import Plan, judge
from qdqtune.types import (
    Array,
    CostsByRule,
    Layer,
    Measurement,
    Placement,
    Proposal,
    Sample,
    Times,
    Trial,
)


class Candidates:
    """Files of one model's placements, each written when it is first asked for, in the folder of `constants`. Several
    threads may ask."""

    def __init__(self, inserter: Inserter, constants: ConstantFile) -> None:
        self.folder = constants.path.parent
        self._inserter, self._constants = inserter, constants
        self._lock = Lock()

    def file(self, placement: Placement) -> Path:
        """A small file of the placement that refers to the constants which all candidates share."""
        path = self.folder / f"{placement.digest}.onnx"
        with self._lock:
            if not path.exists():
                self._constants.save(self._inserter.insert(placement), path)
        return path

    def write_whole(self, placement: Placement, path: Path) -> None:
        """Write a placement as a self-contained file."""
        save(self._inserter.insert(placement), path, self._constants)


NO_NODES = Failure("build", "the provider runs no node of the model: do its options name a chip that it knows?")

BRIEF_LOOKS = (2,)
"""Looks at a candidate that goes to the proof at once: whether that is worth its time. Chosen, not measured."""

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

    `scores` are the outputs that the user names as such; a build takes about `model_bytes`. With `by_rule` nothing is
    timed.
    """

    plan: Plan
    samples: Sequence[Sample]
    seed: int
    limits: Limits = field(default_factory=Limits)
    evaluation: Metric | None = None
    scores: Sequence[str] = ()
    model_bytes: int = 0
    by_rule: ByRule | None = None

    def may_be_taken(self, trial: Trial) -> bool:
        """Whether a candidate may be accepted, so that its build is kept until the batch is judged."""
        measured = judge(trial, self.plan)
        is_slower = measured is None or measured.verdict == "slower" or measured.median > 1
        return not is_slower and self.limits.is_exact_enough(trial.accuracy)


@dataclass(frozen=True)
class TrialJob:
    """One candidate, and the placement that it is timed `against`."""

    number: int
    proposal: Proposal
    against: Placement

    def failed(self, failure: Failure) -> Trial:
        return Trial(self.number, self.proposal, self.against, failure)


@dataclass(frozen=True)
class Batch:
    """What the trials of a batch share: the outputs of the float model as `reference`, the `scores` of classes in them,
    and the time of `time.monotonic` at which comparisons end with the rounds that they have; few if they are brief."""

    reference: Sequence[dict[str, Array]]
    scores: Scores
    deadline: float | None = None
    is_brief: bool = False


@dataclass(frozen=True)
class Entrant:
    """A candidate that was built, with its outputs on the samples; None if rounds give the outputs."""

    job: TrialJob
    build: Handle
    outputs: list[dict[str, Array]] | None


class TrialWorker:
    """Measures candidates on one device: times of two devices are never compared.

    Workers share `candidates`, which are files; `number` distinguishes the names of their logs.
    """

    def __init__(self, runner: Runner, candidates: Candidates, conditions: Conditions, number: int = 0) -> None:
        self.runner = runner
        self._candidates = candidates
        self._builds: dict[Placement, Handle] = {}
        self._mark = f"-{number + 1}" if number else ""
        self._conditions = conditions
        self._costs: dict[Placement, float] = {}

    def load(self, placement: Placement, log_name: str) -> Handle:
        """The build of a placement, made now if there is none; what the engine prints then goes to that log."""
        if placement not in self._builds:
            self._builds[placement] = self.runner.load(self._candidates.file(placement), log_name)
        return self._builds[placement]

    def drop(self, placement: Placement) -> None:
        """Unload a placement, if it is loaded."""
        if placement in self._builds:
            self.runner.unload(self._builds.pop(placement))

    def keep_only(self, placement: Placement) -> None:
        """Unload every placement but this one."""
        for other in [p for p in self._builds if p != placement]:
            self.drop(other)

    def trials(self, jobs: Sequence[TrialJob], batch: Batch) -> list[Trial]:
        """Measure candidates that are compared with the same placement, all in the same rounds.

        Raises:
            EngineFailure: the engine refuses the other placement, which it has built before.
        """
        trials = dict[int, Trial]()
        entrants = list[Entrant]()
        by_rule = self._conditions.by_rule
        if by_rule is None:
            self._opponent(jobs[0])
        for job in jobs:
            try:
                if by_rule is None:
                    entrants.append(self._entrant(job))
                else:
                    trials[job.number] = self._ruled(job, batch, by_rule)
            except EngineRefused as refused:
                trials[job.number] = job.failed(refused.failure)
                self.drop(job.proposal.placement)
        for trial in self._raced(entrants, batch) if entrants else ():
            trials[trial.number] = trial
            if not self._conditions.may_be_taken(trial):
                self.drop(trial.placement)
        return [trials[job.number] for job in jobs]

    def _entrant(self, job: TrialJob) -> Entrant:
        build = self.load(job.proposal.placement, f"trial_{job.number:03}")
        if self.runner.start_seconds(build):
            return Entrant(job, build, None)
        outputs = self.runner.outputs(build, self._conditions.samples)
        check_finite(outputs)
        return Entrant(job, build, outputs)

    def _raced(self, entrants: Sequence[Entrant], batch: Batch) -> list[Trial]:
        """The trials of candidates that race together. Where the engine fails in the race of several, each races
        alone: one of them is to blame."""
        try:
            times = self._times(entrants, batch)
        except EngineRefused as refused:
            if len(entrants) > 1:
                return [trial for entrant in entrants for trial in self._raced([entrant], batch)]
            return [entrant.job.failed(refused.failure) for entrant in entrants]
        trials = []
        for place, entrant in enumerate(entrants, 1):
            try:
                trials.append(self._trial(entrant, times.pair(0, place), batch))
            except EngineRefused as refused:
                trials.append(entrant.job.failed(refused.failure))
        return trials

    def _times(self, entrants: Sequence[Entrant], batch: Batch) -> Times:
        conditions, begun = self._conditions, time.monotonic()
        handles = [self._opponent(entrants[0].job), *(entrant.build for entrant in entrants)]
        samples = conditions.samples if entrants[0].outputs is None else ()
        plan = replace(conditions.plan, looks=BRIEF_LOOKS) if batch.is_brief else conditions.plan
        take = taking_rounds(self.runner, handles, plan, conditions.seed, samples)

        def is_late() -> bool:
            now = time.monotonic()  # the next look takes about as long as all before
            return batch.deadline is not None and now + (now - begun) > batch.deadline

        return race(take, len(handles), plan, decided_candidates(plan), is_late)

    def _trial(self, entrant: Entrant, result: Measurement, batch: Batch) -> Trial:
        job, outputs = entrant.job, entrant.outputs
        if outputs is None:
            outputs = self.runner.outputs(entrant.build, self._conditions.samples)
            check_finite(outputs)
        layers: tuple[Layer, ...] | None = None
        if job.proposal.wants_layers and not batch.is_brief:
            try:
                layers = self.runner.layers(entrant.build, profiled_runs(float(np.median(result.b))))
            except EngineRefused as refused:
                if refused.is_transient:
                    raise
                layers = ()
        closeness = accuracy(batch.reference, outputs, batch.scores)
        return Trial(job.number, job.proposal, job.against, result, accuracy=closeness, layers=layers)

    def _ruled(self, job: TrialJob, batch: Batch, by_rule: ByRule) -> Trial:
        """A candidate with its outputs, its layers, and its costs by rule; nothing is timed."""
        candidate = self.load(job.proposal.placement, f"trial_{job.number:03}")
        outputs = self._deciding(candidate, batch)
        check_finite(outputs)
        layers = self.runner.layers(candidate, 1)
        computed = [name for layer in layers if layer.kind != "quantize" for name in layer.nodes]
        if computed and left_nodes(layers).issuperset(computed):
            raise EngineRefused(NO_NODES)
        self._costs[job.proposal.placement] = cost = by_rule.costs.cost(job.proposal.placement, layers)
        result = CostsByRule(self._cost_of(job.against, by_rule), cost)
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

    def _cost_of(self, placement: Placement, by_rule: ByRule) -> float:
        """The cost of the placement that a candidate is compared with, once its layers are known. Where the engine does
        not run it, which is possible for the float model only, each of its nodes counts as one that runs elsewhere."""
        if placement not in self._costs:
            try:
                layers = self.runner.layers(self.load(placement, f"best{self._mark}"), 1)
            except EngineRefused:
                layers = ()
            self._costs[placement] = by_rule.costs.cost(placement, layers)
        return self._costs[placement]

    def _opponent(self, job: TrialJob) -> Handle:
        with rewording("the engine does not build the best model so far again"):  # it has built it before
            return self.load(job.against, f"best{self._mark}")


def trial_seconds(
    plan: Plan, build: float, seconds: float, turn: float, judged: int, start: float, profiled: int
) -> float:
    """The least seconds that a candidate takes which is as fast as the float model: its build, its outputs on `judged`
    samples, the first look of its comparison and its layers in so many `profiled` inferences. A build of the float
    model takes `build` seconds, an inference `seconds`, and its part in a round `turn`. With `start` (see
    `Plan.round_seconds`), rounds give outputs.
    """
    comparison = 2 * (plan.warmup_seconds(turn, start) + plan.round_seconds(turn, start) * plan.looks[0])
    builds = 2 * build if profiled else build  # many engines build once more for a layer report
    return builds + judged * seconds + profiled * turn + start + comparison


def profiled_runs(seconds: float) -> int:
    """The number of inferences for a layer report of a model that takes so many seconds each."""
    (least, enough, most), (short, long) = PROFILED, PROFILED_SECONDS
    if seconds * most <= short:
        return most
    return max(ceil(short / seconds), min(enough, max(least, ceil(long / seconds))))
