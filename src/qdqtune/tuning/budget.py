"""Time: what a run may spend of it, phase by phase, so that a time budget bounds the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.observe import outputs_on, passes
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.samples import Samples
from qdqtune.calibration.scales import Calibration
from qdqtune.calibration.user_code import TooSlow
from qdqtune.numerics.fitting import inferences
from qdqtune.search.front import POINTS
from qdqtune.timing.ratios import BUILD_LOOKS, PAIRS
from qdqtune.tuning.bench import Bench
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.settings import Settings
from qdqtune.types import Sample, Trial

PROOF_SHARE = 0.3
"""Of a time budget, what the proof may take."""

FRONT_SHARE = 0.5
"""The same where the proof is of a front, which is all that the search is for."""

LEAST_ROUNDS = 12
"""Rounds without which a comparison decides nothing."""

FITTING_SHARE = 0.25
"""Of the time that is left when calibration begins, what it may take."""

INFERENCES = 16 * 48
"""That comparing ways to calibrate takes, all in all: samples times what is tried."""

SHOWN = 2.0
"""Inferences that take as long as one which shows the values of a batch of tensors, and counting these."""

PAIRED = 2.0
"""Inferences that take as long as one with pairs that nothing fuses."""

FITTED_BUILDS = 3
"""Builds that judging numbers takes: without pairs, with them, and with what biases miss."""


@dataclass(frozen=True)
class Budget:
    """What a search may spend: builds, of which one candidate may take `each`; and time, None without a limit.

    `deadline` is when it has to end, by `time.monotonic`, so that one more candidate and the proof have theirs until
    the run `ends`. `proof` is when the proof looks, `points` how many points a front may have.
    """

    builds: int
    each: int
    deadline: float | None
    proof: tuple[int, ...]
    ends: float | None = None
    points: int = POINTS
    proof_seconds: float = 0.0
    """What the proof takes where its first look decides."""

    @staticmethod
    def of(settings: Settings, bench: Bench, ends: float | None) -> Budget:
        """The budget of a run that has to end at that time, and whose search begins now."""
        each_round = settings.plan.round_seconds(bench.floats.turn_seconds)
        files_met = 1 + bool(settings.from_qdq or settings.fix_inputs)  # the float model, and then the user's own
        counts = files_met * len(settings.thread_counts)
        if settings.time_budget is None or ends is None:
            takes = 2 * counts * (2 * bench.floats.build_seconds + each_round * settings.proof[0])
            return Budget(settings.search_builds, settings.trial_builds, None, settings.proof, proof_seconds=takes)
        share, files = PROOF_SHARE, 1
        if settings.front:
            least = 2 * counts * (bench.floats.build_seconds + LEAST_ROUNDS * each_round)
            share, files = FRONT_SHARE, max(2, min(POINTS, int(FRONT_SHARE * settings.time_budget / least)))
        most = int(share * settings.time_budget / (2 * counts * files * each_round))
        proof = tuple(n for n in settings.proof if n <= most) or (max(LEAST_ROUNDS, min(most, settings.proof[0])),)
        rounds = each_round * proof[0] + settings.plan.start_seconds(bench.floats.turn_seconds)
        meeting = (1 + files) * bench.floats.build_seconds + files * rounds
        # Two pairs of builds are bounded to some 15 %: four, where they are cheap, decide on smaller gains.
        pairs = next((n for n in BUILD_LOOKS[1::-1] if n * counts * meeting <= share * settings.time_budget), PAIRS)
        proving = (PAIRS if settings.front else pairs) * counts * meeting
        return Budget(
            settings.search_builds,
            settings.trial_builds,
            ends - bench.trial_seconds - proving,
            proof,
            ends,
            files,
            proving,
        )

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the search has to end."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def is_late(self) -> bool:
        """Whether nothing may begin any more but the proof of what was found."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def excuse(self) -> str | None:
        """Why nothing was tried, if that is for want of time."""
        if not self.is_late or self.ends is None or self.deadline is None:
            return None
        needed = f"{self.ends - self.deadline:.0f} s beside reading the model and calibration"
        return f"--time-budget had no room for a candidate: one and its proof take some {needed}; give more"

    def shortfall(self, trials: Sequence[Trial]) -> str | None:
        """What to say where time has ended a search that had builds left; asked when it has just ended."""
        if not trials or not self.is_late or builds_of(trials) + self.each > self.builds:
            return None
        spent = f"{1 + builds_of(trials)} of {1 + self.builds} builds"
        return f"--time-budget has ended the search after {spent}: with more time the same command goes on from there"

    def lacks(self, seconds: float) -> bool:
        """Whether what takes so many seconds would end too late."""
        return self.ends is not None and time.monotonic() + seconds > self.ends

    def is_spent(self, trials: Sequence[Trial]) -> bool:
        """Whether no further candidate may be tried."""
        return builds_of(trials) + self.each > self.builds or self.is_late

    def room(self, trials: Sequence[Trial]) -> int:
        """How many candidates may follow, if each takes no more than one build: more are not begun, lest what they
        take is measured in vain."""
        return self.builds - self.each - builds_of(trials) + 1


def builds_of(trials: Sequence[Trial]) -> int:
    """What trials have spent."""
    return sum(t.builds for t in trials)


@dataclass(frozen=True)
class Calibrating:
    """How ranges are found, and on what; comparing ways to find them ends where it `is_late`."""

    prepared: Prepared
    how: Calibration
    is_late: Callable[[], bool]


def affordable(prepared: Prepared, how: Calibration, ends: float | None, observer: Observer) -> Calibrating:
    """Calibration as it was asked for; or by one method where a run that has to end has no room to compare several, and
    on fewer samples where it has none for a pass over all."""
    if ends is None:
        return Calibrating(prepared, how, lambda: False)
    (_, seconds), begun = pace(prepared), time.monotonic()
    left = max(0.0, FITTING_SHARE * (ends - begun))
    share = 0.5
    if how.method == "auto" and INFERENCES * seconds > left:
        observer.note("--time-budget has no room to compare ways to calibrate: ranges by mse, without bias correction")
        how, share = Calibration("mse", how.percentile), 1.0
    most = max(1, int(share * left / max(seconds * _inferences(prepared, how), 1e-9)))
    each_pass = share * left / (1 if how.method == "minmax" else _passes(prepared))
    told: list[str] = []

    def produce() -> Iterator[Sample]:
        nonlocal most
        started = time.monotonic()
        for number, sample in enumerate(_in_time(prepared.calibration)):
            if number and time.monotonic() - started > each_pass:  # it takes longer than foretold
                most = min(most, number)
            if number == most:
                if not told:
                    told.append(f"--time-budget has no room for all calibration samples: it takes {most}")
                    observer.note(told[0])
                return
            yield sample

    limited = replace(prepared.calibration, produce=produce)
    return Calibrating(replace(prepared, calibration=limited), how, lambda: time.monotonic() > begun + left)


def _in_time(samples: Samples) -> Iterator[Sample]:
    """The samples that come before the run has to end, at least one."""
    found = False
    try:
        for sample in samples:
            yield sample
            found = True
    except TooSlow:
        if not found:
            raise


def pace(prepared: Prepared) -> tuple[float, float]:
    """Seconds until the float model has run where it is calibrated, and those that a further inference takes.

    Raises:
        BadModel: ONNX Runtime cannot run the model.
    """
    begun, took = time.monotonic(), []
    for _ in outputs_on(prepared.shaped, prepared.calibration.first(2)):
        took.append(time.monotonic() - begun)
        begun = time.monotonic()
    return took[0], took[-1]


def calibration_seconds(prepared: Prepared, how: Calibration, start: float, each: float) -> float:
    """What calibration takes where `pace` is such, fitting included."""
    count = sum(1 for _ in prepared.calibration)
    steps = inferences(prepared.shaped, how, count)
    fitting = steps * PAIRED * each + (FITTED_BUILDS * start if steps else 0.0)
    return 2 * start + count * _inferences(prepared, how) * each + fitting


def _inferences(prepared: Prepared, how: Calibration) -> float:
    """Inferences that take as long as calibrating on one sample: each pass runs what its tensors need, half of the
    model on average."""
    return SHOWN if how.method == "minmax" else SHOWN * (1 + _passes(prepared)) / 2


def _passes(prepared: Prepared) -> int:
    return passes(prepared.shaped, candidate_tensors(prepared.shaped), prepared.calibration)
