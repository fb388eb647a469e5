"""A metric with the part of each sample, and how far the metric of all such samples may have fallen."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist

import numpy as np

ERROR = 0.05
"""The chance that the loss is larger than the upper end that is told for it: one-sided 95 %."""

Z2 = NormalDist().inv_cdf(1 - ERROR) ** 2
"""The square of the normal quantile for `ERROR`: 2.706."""

HITS = frozenset({"top1", "top5"})
"""Metrics whose score of a sample is 1 or 0: its answer is right or wrong."""

DOUBTFUL = 0.2
"""A float model that is right less often may have been given labels of other samples. Chosen, not measured."""

LEAST_CHANGED = 8
"""Student's t wants so many samples whose scores differ. Chosen, not measured."""


@dataclass(frozen=True)
class Score:
    """A metric of a model; higher is better.

    `by_sample` has the score of each labelled sample, in their order, 1 or 0 where an answer is right or wrong; empty
    where a function of the user gives one number. `name` is that of the metric over labels.
    """

    value: float
    by_sample: tuple[float, ...] = ()
    name: str = ""

    @property
    def is_of_hits(self) -> bool:
        """Whether each sample is right or wrong."""
        return self.name in HITS


def doubt(before: Score) -> str | None:
    """A note for users where labels hardly fit the float model; None where they do."""
    if not before.is_of_hits or before.value >= DOUBTFUL:
        return None
    return (
        f"the float model has {before.name} {before.value:.3g}: if it should be better, see whether `labels` has the "
        "order of the samples, counts classes as the outputs do, and the samples are pre-processed"
    )


def loss_high(before: Score, after: Score) -> float | None:
    """The upper end of the one-sided 95 % interval of the loss, before - after, over all samples like these.

    Both models answer the same samples, so that only samples that changed count. Right and wrong answers: the score
    interval for paired proportions (see `_score_high`). Other scores: Student's t of the differences, if at least
    `LEAST_CHANGED` samples changed. None if the samples cannot tell, as too few changed or there are none.
    """
    first, second = np.array(before.by_sample), np.array(after.by_sample)
    if not first.size or first.size != second.size:
        return None
    lost = first - second
    if before.is_of_hits:
        return _score_high(int((lost > 0).sum()), int((lost < 0).sum()), lost.size)
    if _changed(before, after) < LEAST_CHANGED:
        return None
    from scipy.special import stdtrit  # slow to import

    spread = float(lost.std(ddof=1)) / sqrt(lost.size)
    return float(lost.mean()) + float(stdtrit(lost.size - 1, 1 - ERROR)) * spread


def _changed(before: Score, after: Score) -> int:
    """How many samples have another score."""
    return sum(a != b for a, b in zip(before.by_sample, after.by_sample, strict=True))


def few_changed(before: Score, after: Score) -> str | None:
    """Why the interval of the loss is not known, in words; None where it is, or there are no labels."""
    if not before.by_sample or not after.by_sample or loss_high(before, after) is not None:
        return None
    changed = _changed(before, after)
    return (
        f"{changed} of {len(before.by_sample)} samples changed, and an interval of {before.name} takes {LEAST_CHANGED}"
    )


def samples_to_tell(score: Score, max_drop: float) -> int | None:
    """How many samples it takes until one without any change shows that the loss is within `max_drop`; None if these
    are enough, or no number is.

    With right and wrong answers the interval of `n` samples without a change ends at z^2 / (n + z^2). Other scores
    change a little on most samples, and Student's t can tell from `LEAST_CHANGED` on.
    """
    count = len(score.by_sample)
    if not score.is_of_hits:
        return LEAST_CHANGED if 0 < count < LEAST_CHANGED else None
    needed = ceil(Z2 * (1 - max_drop) / max_drop - 1e-9) if 0 < max_drop < 1 else 0
    return needed if count < needed else None


def can_tell(score: Score, max_drop: float) -> bool:
    """Whether so many samples can show that a loss is within `max_drop`, at least if none of them changes."""
    return bool(score.by_sample) and max_drop > 0 and samples_to_tell(score, max_drop) is None


def _score_high(lost: int, won: int, count: int) -> float:
    """The upper end of the score interval for the difference of two paired proportions, (lost - won) / count.

    Tango, Statistics in Medicine 17 (1998) 891-908: the largest difference d at which
    (lost - won - count*d) / sqrt(count * (2*q + d*(1 - d))) is still -z, where q is the most likely share of samples
    that are won if the difference is d.
    """
    from scipy.optimize import brentq  # slow to import

    def beyond(d: float) -> float:
        b = (2 * count - lost + won) * d - lost - won
        c = -won * d * (1 - d)
        q = (sqrt(max(0.0, b * b - 8 * count * c)) - b) / (4 * count)
        return count * d - (lost - won) - sqrt(Z2 * max(0.0, count * (2 * q + d * (1 - d))))

    low = (lost - won) / count
    return 1.0 if low >= 1 else float(brentq(beyond, low + 1e-12, 1 - 1e-12))
