"""Deciding which of two models is faster, under noise.

Two models are timed in interleaved rounds, and each round gives one ratio b/a: what drifts between rounds cancels. In
every round a seeded coin says which model goes first, so for two equal models each ratio is above or below one with
even odds whatever the noise looks like. The interval for the median ratio therefore comes from ranks alone (the
inverted sign test), assumes no distribution, and is exact.

With an interval made for one look, looking early and often would raise the error. Looks happen at preset rounds only,
and each look spends an equal share of the error, whatever the looks before it have seen, so that the whole comparison
keeps `Plan.error` (by Bonferroni's inequality; the shape of the boundary is Pocock's, Biometrika 64, 1977: as much
evidence at the first look as at the last, which ends clear cases early). The intervals of all looks hold together
(repeated confidence intervals: Jennison and Turnbull, JRSS B 51, 1989), so that the last one may be shown wherever a
comparison has stopped, for whatever reason: stopping where nothing is decided can only lose a win.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import comb
from statistics import NormalDist
from typing import Literal

import numpy as np

from qdqtune.errors import Failure
from qdqtune.types import LONG_INFERENCE, CostsByRule, Measurement, Trial, Turn

Verdict = Literal["faster", "slower", "undecided"]


@dataclass(frozen=True)
class Plan:
    """How a comparison takes rounds: it is judged after each number of rounds in `looks`, and on each side it is wrong
    with a chance of at most `error`, all looks together. One turn of a model in a round takes `turn_seconds` at least;
    `warmup` inferences of each model come first.

    With one-sided error 0.001 over four looks the first look needs 12 rounds, all on one side.
    """

    looks: tuple[int, ...] = (12, 20, 32, 48)
    error: float = 0.001
    turn_seconds: float = 0.02
    warmup: int = 2

    def __post_init__(self) -> None:
        if not self.looks or list(self.looks) != sorted(set(self.looks)) or self.looks[0] < 1:
            raise ValueError("looks are round counts in rising order")
        if not 0 < self.error < 0.5:
            raise ValueError("error lies in (0, 0.5)")

    def round_seconds(self, inference: float, start: float = 0.0) -> float:
        """The seconds that a model takes in a round if its inferences take so many. Where each of its turns starts a
        process, `start` is what that takes."""
        return Turn.of(inference, self.turn_seconds, start).round_seconds

    def warmups(self, inference: float) -> int:
        """The inferences that come before rounds; none where they are long: by then each model has run twice."""
        return 0 if inference >= LONG_INFERENCE else self.warmup

    def warmup_seconds(self, inference: float, start: float = 0.0) -> float:
        """The seconds before a model's first round: it is timed twice to find how many inferences fill a turn, and
        warmed up. Processes need neither."""
        return 0.0 if start else (self.warmups(inference) + 2) * inference


def least_rounds(error: float, looks: int) -> int:
    """The least number of rounds that can decide at one of so many looks: a fair coin falls that often on the same side
    with a chance below the share of the error."""
    return next(n for n in count(1) if 0.5**n <= error / looks)


EARLY_ROUNDS, CLEAR_LOSS = 4, 1.1
"""A candidate that takes more than this share of the other's time in each of its first rounds has lost. A wrong loss
costs speed, never a promise. Chosen, not measured."""

EQUAL = 0.005
"""Files whose ratio is within this of 1 count as equal: more rounds are not worth their time. Chosen, not measured."""


def speed(ratio: float) -> str:
    """How many times as fast a model is that takes this share of the time, as users see it."""
    return f"{1 / ratio:.2f}x"


@dataclass(frozen=True)
class Ratio:
    """Median of b/a with the interval that holds the true median except with `Plan.error` on either side.

    An end is None where the rounds are too few to bound it.
    """

    median: float
    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        if any(end is not None and not end > 0 for end in (self.median, self.low, self.high)):
            raise ValueError("a ratio of times is above 0")

    @property
    def verdict(self) -> Verdict:
        """Whether the interval lies below 1 (b is faster), above it, or holds it."""
        if self.high is not None and self.high < 1:
            return "faster"
        return "slower" if self.low is not None and self.low > 1 else "undecided"

    @property
    def is_close(self) -> bool:
        return self.low is not None and self.high is not None and 1 - EQUAL <= self.low <= self.high <= 1 + EQUAL

    @property
    def speedup(self) -> str:
        """How many times as fast b is as a, with the interval: 1.50x [1.42x, 1.61x]; or 1.50x [too few rounds]."""
        if self.low is None and self.high is None:
            return f"{speed(self.median)} [too few measurements]"
        low, high = ("?" if end is None else speed(end) for end in (self.high, self.low))
        return f"{speed(self.median)} [{low}, {high}]"

    def scaled(self, by: float) -> Ratio:
        """The ratio of b to a third model, where `by` is the ratio of a to that model."""
        low, high = (None if end is None else by * end for end in (self.low, self.high))
        return Ratio(by * self.median, low, high)

    @property
    def inverse(self) -> Ratio:
        """The ratio of a to b: the speed of b as a factor."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return Ratio(1 / self.median, low, high)

    def __str__(self) -> str:
        low, high = ("?" if end is None else f"{end:.3f}" for end in (self.low, self.high))
        return f"{self.median:.3f} [{low}, {high}]"


def ratio(measurement: Measurement, plan: Plan) -> Ratio:
    """Ratio b/a of all rounds, at the error of one look (plan.error / number of looks).

    The k-th smallest and k-th largest of n ratios bound the median with P(Binomial(n, 1/2) < k) on each side. Of
    a candidate that left before the first look, as all of its rounds were above `CLEAR_LOSS`, the lower end is their
    least.
    """
    ratios = np.sort(np.asarray(measurement.b) / np.asarray(measurement.a))
    rank = _rank(len(ratios), plan.error / len(plan.looks))
    median = float(np.median(ratios))
    if rank:
        return Ratio(median, float(ratios[rank - 1]), float(ratios[-rank]))
    is_loss = EARLY_ROUNDS <= len(ratios) < plan.looks[0] and ratios[0] > CLEAR_LOSS
    return Ratio(median, float(ratios[0]) if is_loss else None, None)


@cache
def _rank(rounds: int, error: float) -> int:
    """Largest k with P(Binomial(rounds, 1/2) <= k - 1) <= error; 0 if there is none."""
    rank, ways = 0, 1
    while ways / 2**rounds <= error:
        rank += 1
        ways += comb(rounds, rank)
    return rank


FUTILE = 0.997
"""A candidate whose median ratio is no better than this at a look is not worth more rounds. Chosen, not measured."""


def settled(measured: Ratio) -> bool:
    """Whether more rounds are not worth their time: the comparison is decided, or shows no gain."""
    return measured.verdict != "undecided" or measured.median > FUTILE


def is_cut_short(measurement: Measurement, plan: Plan) -> bool:
    """Whether a candidate left a race earlier than by this plan: for want of time, or by another plan."""
    rounds, measured = len(measurement.a), ratio(measurement, plan)
    if rounds < plan.looks[0]:
        return measured.verdict != "slower"
    return rounds < plan.looks[-1] and not settled(measured)


FEWEST_BUILDS, FEW_BUILDS, USUAL_BUILDS = 1, 2, 3
"""Builds of each file in a block of a race of files: where time is short or files are large, where each turn starts a
process, and else. Three show how much builds differ far better than one."""


BLOCK_LOOKS = (1, 2, 4, 8)
"""After how many blocks of builds a race of files is judged, unless the blocks before have decided it."""


@dataclass(frozen=True)
class Spread:
    """How much the ratios of pairs of builds of the same two files differ from pair to pair: the sum of the squared
    deviations of their logarithms, and the degrees of freedom."""

    squares: float
    free: int

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.squares + other.squares, self.free + other.free)


MOST_SPREAD = 0.13
"""The largest standard deviation of the logarithm of a ratio, from pair to pair of builds, that is expected where
rounds agree better than that. Equal files on ONNX Runtime had 0.2 to 2.2 % at one thread, up to 3 % at four and 6 % at
eight, and 13 % at one thread of a very busy machine (benchmarks/findings.md)."""

DEVIATIONS = 8.0
"""How many times their own deviation two pairs have to lie from 1, besides the least distance. Chosen: with more,
steady builds decide smaller differences, and restless ones need larger ones."""


def on_these_builds(ratios: Sequence[Ratio]) -> Ratio:
    """The ratio on exactly these pairs of builds: the mean of their medians, with the uncertainty of rounds alone."""
    logs = np.log([r.median for r in ratios])

    def end(ends: Sequence[float | None]) -> float | None:
        known = [e for e in ends if e is not None]
        if len(known) < len(ends):
            return None
        off = np.log(known) - logs
        return float(np.exp(np.mean(logs) + np.sign(np.sum(off)) * np.sqrt(np.sum(off**2)) / len(logs)))

    return Ratio(float(np.exp(np.mean(logs))), end([r.low for r in ratios]), end([r.high for r in ratios]))


def clear_ratio(pairs: int, looks: int, error: float) -> float:
    """The ratio that so many pairs of builds show to lie below 1 at one of so many looks, if rounds agree."""
    return float(np.exp(-build_margin((), pairs, error / looks)))


def build_margin(parts: Sequence[Spread], pairs: int, error: float, of_rounds: float = 0.0) -> float:
    """How far the mean logarithm of so many pairs may lie from the true one on either side, except with chance `error`.
    `of_rounds` is the standard deviation of the logarithm of a ratio from round to round.

    The smallest of up to three margins, among which the error is divided:

    - pairs that differ by `MOST_SPREAD`, or by more where pairs or rounds do: shows a large gain however few builds
      there are;
    - Student's t for the deviation that was seen. The parts need not have the same one, as builds of one file may
      differ more than those of another: the degrees of freedom are those of Satterthwaite (Biometrics Bulletin 2,
      1946), fewer where one part has most of the squares;
    - for the first builds, whose few degrees of freedom Student's t pays much for, a fixed distance plus `DEVIATIONS`,
      which holds the error as long as pairs differ by no more than in the first.
    """
    from scipy.special import ndtri, stdtrit  # slow to import

    squares = sum(part.squares for part in parts)
    free: float = sum(part.free for part in parts)
    has_student, has_distance = free > 1, free > 0 and pairs <= USUAL_BUILDS
    share = error / (1 + has_student + has_distance)
    deviation, spread = float(np.sqrt(squares / free)) if free else 0.0, max(MOST_SPREAD, of_rounds)
    margins = [-float(ndtri(share)) * max(spread, deviation) / float(np.sqrt(pairs))]
    if has_distance:
        distance = spread * _least_distance(1 if free == 1 else pairs - 1, pairs, share)
        margins.append(distance + DEVIATIONS * deviation)
    if has_student:
        if squares:
            free = max(1.0, squares**2 / sum(part.squares**2 / part.free for part in parts if part.free))
        margins.append(float(stdtrit(free, 1 - share)) * deviation / float(np.sqrt(pairs)))
    return min(margins)


@cache
def _least_distance(free: int, pairs: int, error: float) -> float:
    """The distance d for which the mean of so many normal values of deviation 1 lies beyond d + `DEVIATIONS` times an
    independent estimate of that deviation, of so many degrees of freedom, with chance `error`."""
    from scipy.optimize import brentq  # slow to import
    from scipy.special import gammaincinv, ndtr

    ranks = (np.arange(4096) + 0.5) / 4096
    deviations = np.sqrt(2 * gammaincinv(free / 2, ranks) / free)

    def excess(distance: float) -> float:
        beyond = (distance + DEVIATIONS * deviations) * np.sqrt(pairs)
        return float(np.mean(ndtr(-beyond))) - error

    return float(brentq(excess, 0.0, 10.0))


WIDE = 0.05
"""An interval that reaches further than this to either side is told with more pairs of builds where they are cheap.
Chosen, not measured."""

UNLIKELY = 0.05
"""The chance of a verdict below which further rounds are not worth their time. Chosen, not measured."""


def is_futile(found: Ratio, rounds: int, plan: Plan) -> bool:
    """Whether the last look is unlikely to decide what so many rounds have not. By then the interval is narrower by the
    root of the rounds, and the median has moved by what the rounds to come bring, which is estimated."""
    if found.low is None or found.high is None:
        return False
    quantile = NormalDist().inv_cdf
    width, share = float(np.log(found.high / found.low)) / 2, min(1.0, rounds / plan.looks[-1])
    moves = width / quantile(plan.error / len(plan.looks)) * quantile(UNLIKELY) * np.sqrt(1 - share)
    return bool(abs(np.log(found.median)) + moves < width * np.sqrt(share))


def is_wide(found: Ratio) -> bool:
    return found.low is None or found.high is None or bool(np.log(found.high / found.low) > 2 * WIDE)


def overlap(a: Ratio, b: Ratio) -> bool:
    """Whether two intervals may have a part in common; an unknown end may be anywhere."""
    return all(p.low is None or q.high is None or p.low <= q.high for p, q in ((a, b), (b, a)))


def judge(trial: Trial, plan: Plan) -> Ratio | None:
    """The ratio of a candidate to what it was compared with, of times or else of costs by rule; None if it failed."""
    if isinstance(trial.result, Failure):
        return None
    if isinstance(trial.result, CostsByRule):
        ratio_of_costs = trial.result.b / trial.result.a
        return Ratio(ratio_of_costs, ratio_of_costs, ratio_of_costs)
    return ratio(trial.result, plan)


def with_ratios(trials: Iterable[Trial], plan: Plan) -> list[tuple[Trial, Ratio]]:
    """The candidates that did not fail, each with its ratio."""
    found = ((trial, judge(trial, plan)) for trial in trials)
    return [(trial, ratio) for trial, ratio in found if ratio is not None]
