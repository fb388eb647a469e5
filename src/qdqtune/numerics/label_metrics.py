"""The metrics of labelled samples, and how far the metric of all such samples may have fallen.

A metric says how good the outputs of a model are, given what is right for each sample: the mean over all rows of a
row's own score, which `Score.by_sample` holds. Any other metric is a function of the user (see `metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np

from qdqtune.errors import BadOption
from qdqtune.types import Array

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

    @classmethod
    def of_rows(cls, name: Name, by_row: Sequence[float]) -> Score:
        """The mean over all rows."""
        return cls(float(np.mean(by_row)) if by_row else 1.0, tuple(by_row), name)

    @property
    def is_of_hits(self) -> bool:
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
    if np.count_nonzero(lost) < LEAST_CHANGED:
        return None
    from scipy.special import stdtrit  # slow to import

    spread = float(lost.std(ddof=1)) / sqrt(lost.size)
    return float(lost.mean()) + float(stdtrit(lost.size - 1, 1 - ERROR)) * spread


def samples_to_tell(score: Score, max_drop: float) -> float:
    """From how many samples on one without any change shows that the loss is within `max_drop`; infinite if none can.

    With right and wrong answers the interval of `n` samples without a change ends at z^2 / (n + z^2). Other scores
    change a little on most samples, and Student's t can tell from `LEAST_CHANGED` on.
    """
    if max_drop <= 0:
        return inf
    return max(1, ceil(Z2 * (1 - max_drop) / max_drop - 1e-9)) if score.is_of_hits else LEAST_CHANGED


def can_tell(score: Score, max_drop: float) -> bool:
    """Whether so many samples can show that a loss is within `max_drop`, at least if none of them changes."""
    return len(score.by_sample) >= samples_to_tell(score, max_drop)


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


Name = Literal["top1", "top5", "cosine"]
NAMES: tuple[Name, ...] = get_args(Name)

TOP = 5
"""The classes among which top5 looks for the right one."""

IGNORED = -1
"""Rows with this label of a class do not count."""


def answer(metric: Name, output: Array) -> Array | None:
    """What an output says in the terms of a metric, a row for each of its rows; None if it has another form.

    For top1 class numbers of shape (rows,); for top5 the best five, (rows, 5); for cosine vectors, (rows, size).
    """
    is_score, rows = output.dtype.kind == "f", output.shape[:1]
    if metric == "cosine":
        return output.reshape(*rows, -1) if is_score and output.ndim >= 2 and output.size > rows[0] else None
    while output.ndim > 1 + is_score and output.shape[-1] == 1:  # a pooled picture: (rows, classes, 1, 1)
        output = output[..., 0]
    if not is_score:
        return output if output.ndim == 1 and output.dtype.kind in "iu" and metric == "top1" else None
    if output.ndim != 2 or output.shape[1] < 2:
        return None
    ranked = np.argsort(-output, axis=1, kind="stable")
    return ranked[:, :TOP] if metric == "top5" else ranked[:, 0]


def fits(metric: Name, told: Array, right: Array) -> bool:
    """Whether answers and labels of a sample can be compared."""
    if metric == "top5":
        return right.shape == told.shape[:1] or right.shape == told.shape
    if metric == "cosine":
        return right.ndim >= 2 and right.reshape(right.shape[0], -1).shape == told.shape
    return right.shape == told.shape and right.dtype.kind in "iu"


def chosen(asked: str, outputs: Mapping[str, Array], right: Array | None, only: str | None = None) -> tuple[Name, str]:
    """The metric and the output that it reads: the first one that fits, or `only` that one. `auto` is top1, or else
    cosine. `right` are the labels of the same sample; None where the float model's own outputs are right."""
    outputs = outputs if only is None else {only: outputs[only]}
    for name in (n for n in NAMES if n == asked or (asked == "auto" and n != "top5")):
        for output, array in outputs.items():
            told = answer(name, array)
            if told is not None and (right is None or fits(name, told, right)):
                return name, output
    has = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in outputs.items())
    given = "" if right is None else f", and `labels` has {right.dtype}{list(right.shape)} a sample"
    what = "no metric fits" if asked == "auto" else f"`metric` {asked} fits no output"
    hint = f"`metric` knows {', '.join(NAMES)}; `evaluate` calls a function of yours"
    raise BadOption(f"{what}: the model gives {has}{given}. {hint}")


def check_classes(metric: Name, output: str, array: Array, right: Array) -> None:
    """Refuse labels that are no class of the scores in an output."""
    if metric == "cosine" or array.dtype.kind != "f":
        return
    right = right[right != IGNORED]
    classes = array.shape[1]
    if right.size and not (right.min() >= 0 and right.max() < classes):
        wrong = right[(right < 0) | (right >= classes)].flat[0]
        raise BadOption(f"label {wrong} is no class of output {output}, which has {classes}: count classes from 0")


def row_scores(metric: Name, told: Array, right: Array) -> list[float]:
    """The score of each row, from its answer and its label; rows with the label `IGNORED` are left out."""
    rows = [(one.reshape(-1), label.reshape(-1)) for one, label in zip(told, right, strict=True)]
    if metric == "cosine":
        return [_cosine(one.astype(np.float64), label.astype(np.float64)) for one, label in rows]
    # of five labels, those of the float model, the best
    return [float(label[0] in one) for one, label in rows if label[0] != IGNORED]


def _cosine(a: Array, b: Array) -> float:
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else float(np.array_equal(a, b))
