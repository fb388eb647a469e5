"""What a run may spend: builds, and of a time budget what calibration, search and proof may take each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.observe import bytes_of, outputs_on, passes
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.samples import Samples
from qdqtune.calibration.scales import Calibration
from qdqtune.calibration.user_code import TooSlow
from qdqtune.numerics.fitting import BIAS_RUNS, BIAS_SAMPLES, LEAST_SAMPLES
from qdqtune.search import best_of, ratios_to_float
from qdqtune.search.front import MAX_POINTS
from qdqtune.timing.ratios import BUILD_LOOKS, PAIRS, Plan, judge, least_rounds
from qdqtune.tuning.bench import Bench
from qdqtune.tuning.observer import State
from qdqtune.tuning.settings import Settings
from qdqtune.types import Sample, Trial

PROOF_SHARE = 0.3
"""The share of a time budget that the proof may take. Chosen, not measured."""

FRONT_SHARE = 0.5
"""The share of a time budget that the proof of a front may take. Chosen, not measured."""

LEAST_ROUNDS = least_rounds(Plan.error, 1)
"""Rounds that a comparison needs to decide anything, if it has one look."""

HOPED_RATIO = 0.6
"""Where time is short, a first candidate is tried if its proof fits in case that it takes this share of float's time.
Chosen, not measured."""

FITTING_SHARE = 0.25
"""Calibration may take this share of the time that is left when it begins. Chosen, not measured."""

REDUCED_BYTES, COUNTED_BYTES = 1e9, 4e8
"""Bytes of values a second whose ends ONNX Runtime finds, and that are counted in histograms. On two cores, seven
networks: 0.7 to 2 GB/s, and 0.2 to 0.9."""

PAIRED = 2.0
"""The time of an inference with pairs that nothing fuses, in plain inferences. Estimated, not measured."""


@dataclass(frozen=True)
class Budget:
    """What a search may spend: `builds`, of which one candidate may take `each`; and time.

    `deadline` is when the search has to end, by `time.monotonic`, so that one more candidate and the proof are done
    when the run `ends`; both None without a time budget. A first candidate may begin until `first_deadline`, and is
    then timed in a few rounds: the proof decides. `proof` are the numbers of rounds at which the proof looks,
    `points` is the most points of a front, `proof_seconds` the time of a proof that its first look decides, of a file
    that is as slow as float, and `proof_parts` the seconds that builds and rounds of its first two pairs take.
    """

    builds: int
    each: int
    deadline: float | None
    proof: tuple[int, ...]
    ends: float | None = None
    first_deadline: float | None = None
    points: int = MAX_POINTS
    proof_seconds: float = 0.0
    proof_parts: tuple[float, float] = (0.0, 0.0)

    @staticmethod
    def of(settings: Settings, bench: Bench, ends: float | None) -> Budget:
        """The budget of a run whose search begins now, and which has to end at `ends`."""
        if not settings.is_timed:
            left = None if ends is None else ends - bench.trial_seconds
            return Budget(settings.search_builds, settings.trial_builds, left, settings.proof, ends, left)
        each = bench.floats.turn_seconds, bench.floats.start_seconds
        each_round = settings.plan.round_seconds(*each)
        opponents = 1 + bool(settings.from_qdq or settings.fix_inputs)  # the float model, and then the user's file
        if settings.time_budget is None or ends is None:
            takes = 2 * opponents * (2 * bench.floats.build_seconds + each_round * settings.proof[0])
            return Budget(settings.search_builds, settings.trial_builds, None, settings.proof, proof_seconds=takes)
        share, files = PROOF_SHARE, 1
        if settings.front:
            least = 2 * opponents * (bench.floats.build_seconds + LEAST_ROUNDS * each_round)
            share, files = FRONT_SHARE, max(2, min(MAX_POINTS, int(FRONT_SHARE * settings.time_budget / least)))
        most = int(share * settings.time_budget / (2 * opponents * files * each_round))
        proof = tuple(n for n in settings.proof if n <= most) or (max(LEAST_ROUNDS, min(most, settings.proof[0])),)
        rounds = each_round * proof[0] + settings.plan.warmup_seconds(*each)
        comparison = (1 + files) * bench.floats.build_seconds + files * rounds
        # Two pairs of builds decide gains of 1.5x; four, where they are cheap, decide gains of a tenth.
        fitting = (n for n in BUILD_LOOKS[1::-1] if n * opponents * comparison <= share * settings.time_budget)
        proving = (PAIRS if settings.front else next(fitting, PAIRS)) * opponents * comparison
        parts = PAIRS * opponents * (comparison - files * rounds), PAIRS * opponents * files * rounds
        return Budget(
            builds=settings.search_builds,
            each=settings.trial_builds,
            deadline=ends - bench.trial_seconds - proving,
            proof=proof,
            ends=ends,
            first_deadline=ends - bench.brief_trial_seconds - _least_proof(parts, HOPED_RATIO),
            points=files,
            proof_seconds=proving,
            proof_parts=parts,
        )

    @property
    def seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def excuse(self) -> str | None:
        """What to tell the user if there was no time for a candidate."""
        if not self.is_late or self.ends is None or self.first_deadline is None:
            return None
        needed = f"{self.ends - self.first_deadline:.0f} s beside reading the model and calibration"
        return f"`time_budget` had no room for a candidate: one and its proof take some {needed}; give more"

    def shortfall(self, trials: Sequence[Trial]) -> str | None:
        """What to tell the user if time has ended a search that had builds left. To be called as soon as it ended."""
        if not trials or not self.is_late or builds_of(trials) + self.each > self.builds:
            return None
        spent = f"{1 + builds_of(trials)} of {1 + self.builds} builds"
        return f"`time_budget` has ended the search after {spent}: with more time the same command goes on from there"

    def lacks(self, seconds: float) -> bool:
        """Whether work of so many seconds would end after the time at which the run has to end."""
        return self.ends is not None and time.monotonic() + seconds > self.ends

    def lacks_proof(self, trials: Sequence[Trial], plan: Plan) -> bool:
        """Whether even two pairs of builds of a first candidate, for which time was short, would take too long: after a
        few rounds its time is known."""
        if not self.is_late or len(trials) != 1:
            return False
        ratio = ratios_to_float(trials, plan).get(trials[0].placement, 1.0)
        return self.lacks(_least_proof(self.proof_parts, min(ratio, 1.0)))

    def is_spent(self, trials: Sequence[Trial]) -> bool:
        """Whether no further candidate may be tried."""
        deadline = self.deadline if trials else self.first_deadline
        is_late = deadline is not None and time.monotonic() >= deadline
        return builds_of(trials) + self.each > self.builds or is_late

    def room(self, trials: Sequence[Trial]) -> int:
        """How many candidates may follow, if each takes one build."""
        return self.builds - self.each - builds_of(trials) + 1

    def state(self, trials: Sequence[Trial], plan: Plan, seconds: float, *, replayed: bool) -> State:
        """The progress of a run after these trials, which took `seconds`; `replayed` is about the last one."""
        best, built, left = best_of(trials), builds_of(trials), self.seconds_left
        pace = seconds / built * (self.builds - built)
        expected = (pace if left is None else max(0.0, min(pace, left))) + self.proof_seconds
        floats, last = ratios_to_float(trials, plan), trials[-1]
        own, against = judge(last, plan), floats[last.against]
        ratio = None if own is None else own.scaled(against)
        return State(
            builds=1 + built,
            limit=1 + self.builds,
            best_ratio=floats[best],
            best=best,
            seconds=seconds,
            seconds_left=expected,
            replayed=replayed,
            ratio=ratio,
            against_ratio=against,
        )


def _least_proof(parts: tuple[float, float], ratio: float) -> float:
    """The seconds of a proof on two pairs of builds. `parts` are what builds take, and rounds of a file that is as slow
    as float; it takes the share `ratio` of float's time."""
    builds, rounds = parts
    return builds + (1 + ratio) / 2 * rounds


def builds_of(trials: Sequence[Trial]) -> int:
    return sum(t.builds for t in trials)


# ---------------------------------------------------------------- calibration


@dataclass(frozen=True)
class Calibrating:
    """How ranges are found, and on which data; `bias_samples` of them, at most, correct biases."""

    prepared: Prepared
    how: Calibration
    bias_samples: int = BIAS_SAMPLES


@dataclass
class _SamplesInTime:
    """Iterates over at most `most` samples, and over fewer, but for the `LEAST_SAMPLES`, once a pass takes longer than
    `seconds`; later passes then take as few. `note` tells the user once."""

    samples: Samples
    most: int
    seconds: float
    note: Callable[[str], None]
    is_noted: bool = False

    def __call__(self) -> Iterator[Sample]:
        started = time.monotonic()
        for number, sample in enumerate(_until_too_slow(self.samples)):
            if number >= LEAST_SAMPLES and time.monotonic() - started > self.seconds:
                self.most = min(self.most, number)
            if number == self.most:
                if not self.is_noted:
                    self.note(f"`time_budget` has no room for all calibration samples: it takes {self.most}")
                self.is_noted = True
                return
            yield sample


def affordable_calibration(
    prepared: Prepared, how: Calibration, ends: float | None, note: Callable[[str], None]
) -> Calibrating:
    """Calibration as it was asked for; where a time budget has no room for that, on fewer samples, and without
    corrected biases, as `note` then says."""
    if ends is None:
        return Calibrating(prepared, how)
    half = 0.5 * max(0.0, FITTING_SHARE * (ends - time.monotonic()))
    seconds = pace(prepared)[1]
    each = max(sample_seconds(prepared, how, seconds), sys.float_info.epsilon)  # clocks may be coarse
    most = max(LEAST_SAMPLES, int(half / each))
    each_pass = half / (1 if how.method == "minmax" else _passes(prepared))
    limited = replace(prepared.calibration, produce=_SamplesInTime(prepared.calibration, most, each_pass, note))
    bias_seconds = BIAS_RUNS * PAIRED * seconds
    bias_samples = BIAS_SAMPLES if BIAS_SAMPLES * bias_seconds <= half else int(half / bias_seconds)
    if how.bias_correction and bias_samples < LEAST_SAMPLES:
        note("`time_budget` has no room to correct biases: outputs come less close to the float model's")
        how = replace(how, bias_correction=False)
    return Calibrating(replace(prepared, calibration=limited), how, bias_samples)


def _until_too_slow(samples: Samples) -> Iterator[Sample]:
    """The samples that can be read before the run has to end, at least one."""
    found = False
    try:
        for sample in samples:
            yield sample
            found = True
    except TooSlow:
        if not found:
            raise


def pace(prepared: Prepared) -> tuple[float, float]:
    """Seconds of the first inference of the float model in ONNX Runtime, loading included; and of the second.

    Raises:
        BadModel: ONNX Runtime cannot run the model.
    """
    begun, took = time.monotonic(), []
    for _ in outputs_on(prepared.shaped, prepared.calibration.first(2), execution=prepared.execution):
        took.append(time.monotonic() - begun)
        begun = time.monotonic()
    return took[0], took[-1]


def sample_seconds(prepared: Prepared, how: Calibration, seconds: float) -> float:
    """The time of calibrating on one sample, if an inference takes so many `seconds`: each pass runs what its tensors
    need, half of the model on average; and their values are read."""
    tensors = candidate_tensors(prepared.shaped)
    values = bytes_of(prepared.shaped, tensors, prepared.calibration, prepared.execution)
    if how.method == "minmax":
        return seconds + values / REDUCED_BYTES
    return seconds * (1 + _passes(prepared)) / 2 + values / COUNTED_BYTES


def _passes(prepared: Prepared) -> int:
    """The passes over the samples; one at least, also where no tensor has values to look at."""
    tensors = candidate_tensors(prepared.shaped)
    return max(1, passes(prepared.shaped, tensors, prepared.calibration, prepared.execution))
