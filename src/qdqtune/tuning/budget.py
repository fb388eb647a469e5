"""What a run may spend: builds, and time, which is divided from its end: writing the result, the proof, the search."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdqtune.search.front import MAX_POINTS
from qdqtune.timing.ratios import FEWEST_BUILDS, USUAL_BUILDS, Plan, least_rounds
from qdqtune.tuning.bench import Bench
from qdqtune.tuning.settings import Settings
from qdqtune.types import Trial

CALIBRATION_SHARE = 0.25
"""The share of the time left that calibration may take. Chosen, not measured."""

PROOF_SHARE = 0.35
"""The share of a time budget that the first look of a proof may take. Chosen, not measured."""

FRONT_SHARE = 0.5
"""The same for the proof of a front. Chosen, not measured."""

FINISH_SHARE = 0.03
"""The share of a time budget that is kept for writing the result. Chosen, not measured."""

LEAST_ROUNDS = least_rounds(Plan.error, 1)
"""Rounds that a comparison needs to decide anything, if it has one look."""

GRACE_SHARE = 0.05
"""The share of a time budget by which a proof may end late that would not begin otherwise. Chosen, not measured."""

SLACK = 1.5
"""How much longer than expected candidates may take: they are to leave the proof its time. Chosen, not measured."""

LEARNING = 3
"""A layer report of the float model is worth its time if so many candidates may follow. Chosen, not measured."""

HOPED_RATIO = 0.8
"""The share of float's time that a finalist is expected to take. Chosen, not measured."""


@dataclass(frozen=True)
class Budget:
    """What a search and its proof may spend: `builds` of candidates, and time until `ends`, by `time.monotonic`; None
    without a time budget.

    `candidate` is the least seconds that a candidate takes if it is as fast as the float model, `brief` the same if it
    is only built, judged and proven. `proof` are the numbers of rounds at which the proof looks. There each file has so
    many `copies` in a block; `file_builds` and `file_rounds` are the seconds that one build of a file takes, and its
    part of the first look, if it is as fast as float; `opponents` files race beside the finalists, of which a front has
    up to `points`.
    """

    builds: int
    proof: tuple[int, ...]
    ends: float | None = None
    candidate: float = 0.0
    brief: float = 0.0
    file_builds: float = 0.0
    file_rounds: float = 0.0
    opponents: int = 1
    points: int = 1
    copies: int = USUAL_BUILDS
    grace: float = 0.0

    @staticmethod
    def of(settings: Settings, bench: Bench, ends: float | None, *, has_other_float: bool) -> Budget:
        """The budget of a run whose search begins now, and which has to end at `ends`. `has_other_float`: the float
        model that candidates are made of is not the user's file, which then races in the proof, too."""
        budget = Budget(
            builds=settings.search_builds,
            proof=settings.proof,
            ends=ends,
            candidate=bench.trial_seconds,
            points=MAX_POINTS if settings.front else 1,
        )
        total = settings.time_budget
        if ends is not None and total is not None:
            budget = replace(budget, ends=ends - FINISH_SHARE * total, grace=GRACE_SHARE * total)
        if not settings.is_timed:
            return replace(budget, points=0, opponents=0)
        floats, plan = bench.floats, settings.proof_plan
        each_round = plan.round_seconds(floats.turn_seconds, floats.start_seconds)
        warmup = plan.warmup_seconds(floats.turn_seconds, floats.start_seconds)
        opponents, points, proof = 1 + has_other_float, budget.points, settings.proof
        copies = FEWEST_BUILDS if floats.start_seconds else USUAL_BUILDS
        if total is not None:
            left = (FRONT_SHARE if settings.front else PROOF_SHARE) * total
            least = floats.build_seconds + LEAST_ROUNDS * each_round + warmup
            if (opponents + 1) * copies * least > left:
                copies = FEWEST_BUILDS
            if settings.front:
                points = max(2, min(MAX_POINTS, int(left / (copies * least)) - opponents))
            most = int((left / ((opponents + points) * copies) - floats.build_seconds - warmup) / each_round)
            looks = tuple(n for n in settings.proof if n <= most)
            proof = looks or (max(LEAST_ROUNDS, min(most, settings.proof[0])),)
        return replace(
            budget,
            proof=proof,
            brief=bench.brief_seconds,
            file_builds=floats.build_seconds,
            file_rounds=proof[0] * each_round + warmup,
            opponents=opponents,
            points=points,
            copies=copies,
        )

    def proof_seconds(self, finalists: int) -> float:
        """The seconds of the first look of a proof of so many finalists."""
        slow = self.opponents + HOPED_RATIO * finalists
        return self.copies * ((self.opponents + finalists) * self.file_builds + slow * self.file_rounds)

    @property
    def deadline(self) -> float | None:
        """When the search has to end, so that the proof ends in time."""
        return None if self.ends is None else self.ends - self.proof_seconds(self.points)

    @property
    def seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def can_learn(self) -> bool:
        """Whether there is time for candidates that layer reports lead to."""
        return self.seconds_left is None or self.seconds_left >= LEARNING * SLACK * self.candidate

    def lacks(self, seconds: float) -> bool:
        """Whether work of so many seconds would end after the time at which the run has to end."""
        return self.ends is not None and time.monotonic() + seconds > self.ends

    def provable(self, finalists: int) -> int:
        """How many of the finalists there is time to prove together."""
        while finalists and self.lacks(self.proof_seconds(finalists) - self.grace):
            finalists -= 1
        return finalists

    def room(self, trials: Sequence[Trial], pace: float | None = None) -> int:
        """How many candidates may follow; `pace` is the seconds that one took so far."""
        left = self.builds - len(trials)
        if self.seconds_left is None:
            return left
        each = SLACK * (self.candidate if pace is None else pace)
        return max(0, min(left, int(self.seconds_left / each))) if each else left

    def is_brief(self, trials: Sequence[Trial]) -> bool:
        """Whether there is time for one candidate only, which goes to the proof without rounds that decide anything."""
        if trials or self.room(()) or not self.builds:
            return False
        return not self.lacks(self.brief + self.proof_seconds(1))

    @property
    def excuse(self) -> str | None:
        """What to tell the user if there was no time for a candidate."""
        if not self.is_late:
            return None
        needed = f"{self.brief + self.proof_seconds(1):.0f} s beside reading the model and calibration"
        return f"`time_budget` had no room for a candidate: one and its proof take some {needed}; give more"

    def shortfall(self, trials: Sequence[Trial], pace: float | None = None) -> str | None:
        """What to tell the user if time has ended a search that had builds left. To be called as soon as it ended."""
        if not trials or self.builds <= len(trials) or self.room(trials, pace):
            return None
        spent = f"{1 + len(trials)} of {1 + self.builds} builds"
        return f"`time_budget` has ended the search after {spent}: with more time the same command goes on from there"
