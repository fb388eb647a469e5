"""A station: one device with its engine, where candidates are measured against what was built on the same device.

A station that has no candidate takes rounds of one that another is still at, on builds of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil

import numpy as np

from qdqtune.engines.crew import shared, to_spare
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import EngineFailure
from qdqtune.measurement.accuracy import accuracy, is_finite
from qdqtune.measurement.limits import Limits
from qdqtune.measurement.metric import Evaluation
from qdqtune.measurement.pairing import Beside, fresh_builds, rounds_of, with_help
from qdqtune.measurement.timing import Plan, Ratio, Rounds, compare, judge
from qdqtune.tuning.candidates import Candidates, Loaded
from qdqtune.types import Array, Failure, Measurement, Placement, Proposal, Sample, Trial

FUTILE = 0.997
"""A candidate whose median ratio is no better than this at a look is not worth more rounds."""

PROFILED = (4, 12, 400)
"""Inferences behind a layer report: the least, those that are enough in most cases, and the most."""

PROFILED_SECONDS = (0.05, 1.0)
"""How long they are to take in all: at least, since short layers need many, and at most."""


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

    def won(self, trial: Trial) -> bool:
        """Whether a trial is a win as far as it was measured."""
        measured = judge(trial, self.plan)
        is_faster = measured is not None and measured.verdict == "faster"
        return is_faster and self.limits.is_exact_enough(trial.accuracy)

    def may_be_taken(self, trial: Trial) -> bool:
        """Whether its build is kept until the batch is judged: a win, or what is no slower and may be more exact."""
        measured = judge(trial, self.plan)
        is_slower = measured is None or measured.verdict == "slower" or measured.median > 1
        return not is_slower and self.limits.is_exact_enough(trial.accuracy)

    def needs_check(self, trial: Trial) -> bool:
        """Whether a win is to be repeated on second builds.

        A win that misses the limit on SQNR is repeated only when another run allows more, and one of a search that
        learns from layers never: it makes too few candidates for luck.
        """
        is_one_of_many = self.check_wins and not trial.proposal.wants_layers
        return is_one_of_many and trial.check is None and self.won(trial)


@dataclass(frozen=True)
class Job:
    """One candidate, and what it meets; `known` is what an earlier run has measured of it, which lacks a check."""

    number: int
    proposal: Proposal
    against: Placement
    known: Trial | None = None


class Station:
    """Measures on one device. Only ratios of what was built here leave it, as pairs of samples."""

    def __init__(self, runner: Runner, candidates: Candidates, conditions: Conditions, number: int = 0) -> None:
        self.runner = runner
        self.loaded = Loaded(runner, candidates)
        self._mark = f"-{number + 1}" if number else ""
        self._candidates, self._conditions = candidates, conditions

    def trial(self, job: Job, reference: Sequence[dict[str, Array]], deadline: float | None) -> Trial:
        """Time a candidate; `reference` is what the float model gives, and by `deadline`, a time of `time.monotonic`,
        comparisons decide with what they have.

        A win is repeated at once on another build of both files: one build may be fast by the luck of its memory
        layout, and stays so in every round.

        Raises:
            EngineFailure: the engine refuses the other placement, which it has built before.
        """
        trial = job.known or self._measured(job, reference, deadline)
        if self._conditions.needs_check(trial):
            trial = replace(trial, check=self._checked(trial))
        if not self._conditions.may_be_taken(trial):
            self.loaded.drop(trial.placement)
        return trial

    def _measured(self, job: Job, reference: Sequence[dict[str, Array]], deadline: float | None) -> Trial:
        conditions, told = self._conditions, (job.number, job.proposal, job.against)
        opponent = self._opponent(job)
        if isinstance(opponent, Failure):  # it was built before, so the candidate is not to blame
            raise EngineFailure(f"the engine does not build the best model so far again: {opponent.reason}")
        self._candidates.file(job.proposal.placement)  # which takes long enough for others to have nothing to do
        helpers = [partial(Station.pair_beside, job=job)] * (to_spare() or 0) if conditions.plan.slot_seconds else []
        (candidate, outputs), ready = shared(partial(self._ran, job), helpers)
        if isinstance(candidate, Failure):
            return Trial(*told, candidate)
        if isinstance(outputs, Failure):
            return Trial(*told, outputs)
        if not is_finite(outputs):
            return Trial(*told, Failure("output", "the outputs hold NaN or infinite values"))
        is_ready = any(isinstance(pair, tuple) for pair in ready)
        beside = partial(Station.rounds_beside, job=job)
        rounds = self._rounds(opponent, candidate, conditions.seed, beside, is_ready=is_ready)
        begun = time.monotonic()
        result = compare(rounds, conditions.plan, decided=lambda r: settled(r) or _is_late(begun, deadline))
        if isinstance(result, Failure):
            return Trial(*told, result)
        runs = profiled_runs(float(np.median(result.b)))
        layers = self.runner.layers(candidate, runs) if job.proposal.wants_layers else None
        if isinstance(layers, Failure) and layers.is_transient:
            return Trial(*told, layers)
        report = () if isinstance(layers, Failure) else layers
        return Trial(*told, result, accuracy=accuracy(reference, outputs), layers=report)

    def _checked(self, trial: Trial) -> Measurement | Failure:
        with self._fresh(trial, "trial") as pair:
            if isinstance(pair, Failure):
                return pair
            rounds = self._rounds(*pair, self._conditions.seed + 1, partial(Station.check_beside, trial=trial))
            return compare(rounds, self._conditions.plan, decided=settled)

    def _ran(self, job: Job) -> tuple[Handle | Failure, list[dict[str, Array]] | Failure]:
        """A build of a candidate, and its outputs."""
        candidate = self.loaded.load(job.proposal.placement, f"trial_{job.number:03}")
        if isinstance(candidate, Failure):
            return candidate, candidate
        return candidate, self.runner.outputs(candidate, self._conditions.samples)

    def pair_beside(self, job: Job) -> tuple[Handle, Handle] | Failure:
        """Builds of a candidate that another station is at and of what it meets; they stay as long as the batch."""
        opponent = self._opponent(job)
        if isinstance(opponent, Failure):
            return opponent
        candidate = self.loaded.load(job.proposal.placement, f"beside_{job.number:03}{self._mark}")
        return candidate if isinstance(candidate, Failure) else (opponent, candidate)

    def rounds_beside(self, first: int, count: int, job: Job) -> Measurement | Failure:
        """Rounds of these."""
        pair = self.pair_beside(job)
        return pair if isinstance(pair, Failure) else self._rounds(*pair, self._conditions.seed)(first, count)

    def check_beside(self, first: int, count: int, trial: Trial) -> Measurement | Failure:
        """The same of its check, on further builds."""
        with self._fresh(trial, "beside") as pair:
            return pair if isinstance(pair, Failure) else self._rounds(*pair, self._conditions.seed + 1)(first, count)

    def _opponent(self, job: Job) -> Handle | Failure:
        return self.loaded.load(job.against, f"best{self._mark}")

    def _fresh(self, trial: Trial, log_name: str) -> AbstractContextManager[tuple[Handle, Handle] | Failure]:
        files = self._candidates.file(trial.against), self._candidates.file(trial.placement)
        return fresh_builds(self.runner, *files, f"{log_name}_{trial.number:03}{self._mark}")

    def _rounds(
        self, a: Handle, b: Handle, seed: int, beside: Beside[Station] | None = None, *, is_ready: bool = False
    ) -> Rounds:
        own, plan = rounds_of(self.runner, a, b, self._conditions.plan, seed), self._conditions.plan
        if beside is None:
            return own
        return with_help(own, beside, a.build_seconds + b.build_seconds, plan, is_ready=is_ready)


def trial_seconds(plan: Plan, build: float, seconds: float, turn: float, judged: int) -> float:
    """What a candidate takes at the least that is as fast as the float model, of which a build, an inference and its
    part in a round take so many seconds: its build, its outputs on so many samples, the first look of its comparison,
    and its layers."""
    comparison = plan.start_seconds(turn) + plan.round_seconds(turn) * plan.looks[0]
    return build + judged * seconds + profiled_runs(seconds) * turn + comparison


def profiled_runs(seconds: float) -> int:
    """Inferences for a layer report of a model that takes so many seconds each."""
    (least, enough, most), (short, long) = PROFILED, PROFILED_SECONDS
    if seconds * most <= short:
        return most
    return max(ceil(short / seconds), min(enough, max(least, ceil(long / seconds))))


def _is_late(begun: float, deadline: float | None) -> bool:
    """Whether the next look of a comparison would end too late: it takes about as long as all before it."""
    now = time.monotonic()
    return deadline is not None and now + (now - begun) > deadline


def settled(measured: Ratio) -> bool:
    """Whether more rounds are not worth their time: it is decided, or at best as fast."""
    return measured.verdict != "undecided" or measured.median > FUTILE
