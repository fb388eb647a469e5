"""Decides which of two models is faster, despite noise.

Two models are timed in interleaved rounds, and each round gives one ratio b/a: what drifts between rounds cancels. In
every round a seeded random bit says which model runs first, so for two equal models each ratio is above or below one
with even odds whatever the noise looks like. The interval for the median ratio therefore comes from ranks alone (the
inverted sign test), assumes no distribution, and is exact.

Judging a single-look interval repeatedly would raise the error. So results are judged ("looks") after preset numbers of
rounds only, and each look spends an equal share of the error, whatever the looks before it have seen, so that the whole
comparison keeps `Plan.error` (by Bonferroni's inequality; the shape of the boundary is Pocock's, Biometrika 64, 1977:
as much evidence at the first look as at the last, which ends clear cases early). The intervals of all looks hold
together (repeated confidence intervals: Jennison and Turnbull, JRSS B 51, 1989), so that the last one may be shown
wherever a comparison has stopped, for whatever reason: stopping where nothing is decided can only lose a win.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import comb, inf, log
from statistics import NormalDist
from typing import Literal

import numpy as np

from qdqtune.errors import Failure
from qdqtune.types import LONG_INFERENCE, CostsByRule, Measurement, Trial, Turn

Verdict = Literal["faster", "slower", "undecided"]


@dataclass(frozen=True)
class Plan:
    """The schedule of a comparison. It is judged after each number of rounds in `looks`; on either side it is wrong
    with probability at most `error`, all looks together. A model's turn in a round takes at least `turn_seconds`;
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
        """Seconds that a model takes in one round, where one inference takes `inference` seconds, and `start` is the
        time to start the process of each turn (0: none is started)."""
        return Turn.of(inference, self.turn_seconds, start).round_seconds

    def warmups(self, inference: float) -> int:
        """Inferences before the first round; none if they are long, since probing has run the model twice."""
        return 0 if inference >= LONG_INFERENCE else self.warmup

    def warmup_seconds(self, inference: float, start: float = 0.0) -> float:
        """Seconds before a model's first round: two probing inferences and the warm-up; 0 if turns start processes."""
        return 0.0 if start else (self.warmups(inference) + 2) * inference


def least_rounds(error: float, looks: int) -> int:
    """The least number of rounds that can decide a comparison at one of `looks` looks: so many fair coin flips all
    agree with a probability below the look's share of `error`."""
    return next(n for n in count(1) if 0.5**n <= error / looks)


EARLY_ROUNDS, CLEAR_LOSS = 4, 1.1
"""A candidate whose ratio is above `CLEAR_LOSS` in each of the first `EARLY_ROUNDS` rounds has lost. A wrong loss only
costs speed. Chosen, not measured."""

EQUAL = 0.005
"""Files whose time ratio is this close to 1 count as equal: more rounds are useless. Chosen, not measured."""


def speed(ratio: float) -> str:
    """A time ratio as users see it: 0.5 is "2.00x"."""
    return f"{1 / ratio:.2f}x"


@dataclass(frozen=True)
class Ratio:
    """Median of the time ratios b/a, and an interval that misses the true median with probability at most `Plan.error`
    on either side.

    An end is None if there are too few rounds.
    """

    median: float
    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        if any(end is not None and not end > 0 for end in (self.median, self.low, self.high)):
            raise ValueError("a ratio of times is above 0")

    @property
    def verdict(self) -> Verdict:
        """Faster if the whole interval is below 1 (b takes less time), slower if it is above, else undecided."""
        if self.high is not None and self.high < 1:
            return "faster"
        return "slower" if self.low is not None and self.low > 1 else "undecided"

    @property
    def width(self) -> float:
        """The logarithm of the quotient of both ends; infinite with too few rounds."""
        return inf if self.low is None or self.high is None else log(self.high / self.low)

    @property
    def is_close(self) -> bool:
        return self.low is not None and self.high is not None and 1 - EQUAL <= self.low <= self.high <= 1 + EQUAL

    @property
    def speedup(self) -> str:
        """Speed of b relative to a, with its interval: 1.50x [1.42x, 1.61x], or 1.50x [too few measurements]."""
        if self.low is None and self.high is None:
            return f"{speed(self.median)} [too few measurements]"
        low, high = ("?" if end is None else speed(end) for end in (self.high, self.low))
        return f"{speed(self.median)} [{low}, {high}]"

    def scaled(self, by: float) -> Ratio:
        """The ratio of b to another model c, where `by` is the ratio of a to c."""
        low, high = (None if end is None else by * end for end in (self.low, self.high))
        return Ratio(by * self.median, low, high)

    @property
    def inverse(self) -> Ratio:
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return Ratio(1 / self.median, low, high)

    def __str__(self) -> str:
        low, high = ("?" if end is None else f"{end:.3f}" for end in (self.low, self.high))
        return f"{self.median:.3f} [{low}, {high}]"


def ratio(measurement: Measurement, plan: Plan) -> Ratio:
    """Ratio b/a of all rounds, at the error of one look (plan.error / number of looks).

    The k-th smallest and k-th largest of n ratios bound the median with P(Binomial(n, 1/2) < k) on each side. For a
    candidate that left before the first look, with all rounds above `CLEAR_LOSS`, the lower end is the smallest ratio.
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
    """Whether more rounds are useless: the comparison is decided, or shows no gain."""
    return measured.verdict != "undecided" or measured.median > FUTILE


def is_cut_short(measurement: Measurement, plan: Plan) -> bool:
    """Whether a candidate left a race earlier than this plan would let it: time was short, or another plan applied."""
    rounds, measured = len(measurement.a), ratio(measurement, plan)
    if rounds < plan.looks[0]:
        return measured.verdict != "slower"
    return rounds < plan.looks[-1] and not settled(measured)


FEWEST_BUILDS, FEW_BUILDS, USUAL_BUILDS = 1, 2, 3
"""Builds of each file in one block of a race: where time is short or files are large; where each turn starts a process;
and usually. Three show far better than one how much builds differ."""


BLOCK_LOOKS = (1, 2, 4, 8)
"""A race of files is judged after so many blocks of builds, until it is decided."""


@dataclass(frozen=True)
class Spread:
    """How much the log ratios of two files vary between pairs of builds: the sum of squared deviations (`squares`) and
    its degrees of freedom (`free`)."""

    squares: float
    free: int

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.squares + other.squares, self.free + other.free)


MOST_SPREAD = 0.13
"""The largest standard deviation, between pairs of builds, of the log ratio of two files that is expected where rounds
vary less than that. Measured between equal files on ONNX Runtime: 0.2 to 2.2 % at one thread, up to 3 % at four, 6 % at
eight, and 13 % at one thread of a very busy machine (benchmarks/findings.md)."""

DEVIATIONS = 8.0
"""By how many of their own standard deviations two pairs of builds must differ from 1, plus a fixed distance. Chosen:
more lets steady builds decide smaller differences, but noisy ones need larger ones."""


def on_these_builds(ratios: Sequence[Ratio]) -> Ratio:
    """The ratio for exactly these pairs of builds: the geometric mean of their medians, with the noise of rounds
    alone."""
    logs = np.log([r.median for r in ratios])

    def end(ends: Sequence[float | None]) -> float | None:
        known = [e for e in ends if e is not None]
        if len(known) < len(ends):
            return None
        off = np.log(known) - logs
        return float(np.exp(np.mean(logs) + np.sign(np.sum(off)) * np.sqrt(np.sum(off**2)) / len(logs)))

    return Ratio(float(np.exp(np.mean(logs))), end([r.low for r in ratios]), end([r.high for r in ratios]))


def clear_ratio(pairs: int, looks: int, error: float) -> float:
    """The largest ratio b/a at which so many pairs of builds prove b faster by one of `looks` looks, at best."""
    return float(np.exp(-build_margin((), pairs, error / looks)))


def build_margin(parts: Sequence[Spread], pairs: int, error: float, of_rounds: float = 0.0) -> float:
    """Half the width of the interval for the mean log ratio of `pairs` pairs of builds, with error probability `error`
    on either side. `of_rounds` is the standard deviation of the logarithm of a ratio from round to round.

    The smallest of up to three margins, among which the error is divided:

    - pairs that vary by `MOST_SPREAD`, or by more where pairs or rounds do: shows a large gain however few builds
      there are;
    - Student's t for the deviation that was seen. The parts need not have the same one, as builds of one file may
      differ more than those of another: the degrees of freedom are those of Satterthwaite (Biometrics Bulletin 2,
      1946), fewer where one part has most of the squares;
    - for the first builds, where Student's t is wide for want of degrees of freedom, a fixed distance plus
      `DEVIATIONS`, which holds the error as long as pairs differ by no more than in the first.
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
    """The distance d such that the mean of `pairs` standard normal values exceeds d + `DEVIATIONS` times an independent
    estimate of their deviation, with `free` degrees of freedom, with probability `error`."""
    from scipy.optimize import brentq  # slow to import
    from scipy.special import gammaincinv, ndtr

    ranks = (np.arange(4096) + 0.5) / 4096
    deviations = np.sqrt(2 * gammaincinv(free / 2, ranks) / free)

    def excess(distance: float) -> float:
        beyond = (distance + DEVIATIONS * deviations) * np.sqrt(pairs)
        return float(np.mean(ndtr(-beyond))) - error

    return float(brentq(excess, 0.0, 10.0))


WIDE = 0.05
"""Intervals wider than this on either side get more pairs of builds, where these are cheap. Chosen, not measured."""

UNLIKELY = 0.05
"""If a verdict is less probable than this, further rounds are not worth their time. Chosen, not measured."""


def is_futile(found: Ratio, rounds: int, plan: Plan) -> bool:
    """Whether the last look will hardly decide a comparison that is undecided after `rounds` rounds: it extrapolates
    that the interval narrows by the square root of the number of rounds, and that the median moves by the noise of the
    rounds to come."""
    if found.low is None or found.high is None:
        return False
    quantile = NormalDist().inv_cdf
    width, share = found.width / 2, min(1.0, rounds / plan.looks[-1])
    moves = width / quantile(plan.error / len(plan.looks)) * quantile(UNLIKELY) * np.sqrt(1 - share)
    return bool(abs(np.log(found.median)) + moves < width * np.sqrt(share))


def is_wide(found: Ratio) -> bool:
    return found.width > 2 * WIDE


def overlap(a: Ratio, b: Ratio) -> bool:
    """Whether two intervals may overlap; an unknown end may be anywhere."""
    return all(p.low is None or q.high is None or p.low <= q.high for p, q in ((a, b), (b, a)))


def judge(trial: Trial, plan: Plan) -> Ratio | None:
    """The ratio of a candidate to its opponent, of times or of costs by rule (`search.by_rule`); None if it failed."""
    if isinstance(trial.result, Failure):
        return None
    if isinstance(trial.result, CostsByRule):
        ratio_of_costs = trial.result.b / trial.result.a
        return Ratio(ratio_of_costs, ratio_of_costs, ratio_of_costs)
    return ratio(trial.result, plan)


def with_ratios(trials: Iterable[Trial], plan: Plan) -> list[tuple[Trial, Ratio]]:
    """The trials that did not fail, each with its ratio (`judge`)."""
    found = ((trial, judge(trial, plan)) for trial in trials)
    return [(trial, ratio) for trial, ratio in found if ratio is not None]
