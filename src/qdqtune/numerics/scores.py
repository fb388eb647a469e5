"""Finds outputs that hold scores of classes, and compares scores of models, with the statistics for both.

What an output holds is concluded from the float model's values. Probabilities, or their logarithms, sum to 1 along some
axis (classes, tokens, pixels). Logits are of shape [rows, classes], or [rows, positions, classes] with as many classes
as a vocabulary has. In both cases the float model must clearly prefer one class, which embeddings, coordinates and
untrained models do not. What values do not show, the user can name, such as logits of pixels, or yes/no values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from onnx import helper

from qdqtune.errors import BadOption, first_of
from qdqtune.graph.model import Model
from qdqtune.graph.operators import ASKS_SHAPE, CONTROL_FLOW, is_float, may_be_float
from qdqtune.types import Accuracy, Array

SUM_ERROR = 1e-2
"""How far sums of probabilities may be from 1: float16 rounds them. Chosen, not measured."""

LEAST_CLASSES, LEAST_TOKENS = 8, 1000
"""The fewest classes of logits, and the fewest of them that count as a vocabulary. Chosen, not measured."""

CLEAR = 0.75
"""A preference is clear if the best logit exceeds the second by this many standard deviations of the row. For 8 to
1,000 normal numbers the best two differ by 0.5 to 0.2, for an embedding of 96 by 0.4, for ten classes of small pictures
by 1.4 (by less than 0.65 in a quarter of the pictures). Chosen between these."""

DOUBT = 0.05
"""Agreement is below its limit if a model exactly at the limit would show this many differences with less
probability."""

CLEAR_SHARE = 0.1
"""As `CLEAR`, for probabilities: the best exceeds the second by this much. Chosen, not measured."""

ROWS = 4096
"""Most rows that are examined to find out what an output holds. Chosen, not measured."""


NONE = "none"
"""The value of `scores` that turns class scores off."""

BINARY = "binary"
"""Written in place of the axis of classes if each value is a yes/no score."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The outputs that hold scores of classes, by name: the `axis` of the classes, how many `classes` there are, and
    the float model's `best` class at each position of each sample (an integer array without that axis). For yes/no
    outputs the axis is None, and yes is a value over `above`. If there are no such outputs, `why_not` is the reason.
    `copies` are outputs that no rounding can change.
    """

    axis: Mapping[str, int | None]
    classes: Mapping[str, int]
    best: Mapping[str, Sequence[Array]]
    why_not: str = ""
    above: Mapping[str, float] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()

    @property
    def told(self) -> str:
        """One line for users: which outputs are taken for class scores, with how many classes; or why none is."""
        if not self.axis:
            return self.why_not
        listed = [f"{name} (yes above {middle:g})" for name, middle in self.above.items()]
        several = {name: axis for name, axis in self.axis.items() if axis is not None}
        listed += [f"{name} ({self.classes[name]} along axis {axis})" for name, axis in several.items()]
        return f"taken for scores of classes: {first_of(listed)}"

    def chosen(self, name: str, values: Array) -> Array:
        """The best class at each position of an output, given its values for one sample."""
        axis = self.axis[name]
        return values > self.above[name] if axis is None else values.argmax(axis)

    def as_json(self) -> list[dict[str, Any]]:
        return [{"output": name, "axis": axis, "classes": self.classes[name]} for name, axis in self.axis.items()]

    def first(self, count: int) -> Scores:
        """The same for the first `count` samples."""
        return replace(self, best={name: best[:count] for name, best in self.best.items()})


NO_SCORES = Scores({}, {}, {}, why_not="best classes were not looked for")
"""Used where class scores were not asked for."""


def copies_in(model: Model) -> frozenset[str]:
    """The outputs that are integer inputs, or follow from inputs without a computation in floats."""
    rounded = {name for name in model.inputs if may_be_float(model, name)}
    for node in model.nodes:
        reads = node.reads if node.op not in ASKS_SHAPE else []
        if node.op in CONTROL_FLOW or any(name in rounded or is_float(model, name) for name in reads):
            rounded.update(node.outputs)
    return frozenset(name for name in model.outputs if name not in rounded and not is_float(model, name))


def scores_of(
    outputs: Sequence[Mapping[str, Array]], asked: Sequence[str] = (), copies: frozenset[str] = frozenset()
) -> Scores:
    """The outputs that hold class scores, from the float model's `outputs` for each sample. `asked` are those that the
    user names, as NAME, NAME:AXIS or NAME:binary, or `NONE`; if empty, their values decide. `copies`: see `Scores`."""
    first = outputs[0]
    if list(asked) == [NONE]:
        return Scores({}, {}, {}, "best classes are not compared: `scores` is none", copies=copies)
    if asked:
        found = {name: _axis_of(name, axis, outputs) for name, axis in asked_outputs(asked, list(first)).items()}
    else:
        seen = ((name, _seen_axis([sample[name] for sample in outputs])) for name in first)
        found = {name: axis for name, axis in seen if axis is not None}
    if not found:
        holds, names = "it holds" if len(first) == 1 else "they hold", ",".join(first) if len(first) <= 3 else "NAME"
        told = f"no scores of classes recognised in {first_of(list(first))}: if {holds} some, add `scores` {names}"
        return Scores({}, {}, {}, told, copies=copies)
    above = dict[str, float]()
    for name in (name for name, axis in found.items() if axis is None):
        is_share = all(((sample[name] >= 0) & (sample[name] <= 1)).all() for sample in outputs)
        above[name] = 0.5 if is_share else 0.0
    classes = {name: 2 if axis is None else first[name].shape[axis] for name, axis in found.items()}
    scores = Scores(found, classes, {}, above=above, copies=copies)
    best = {name: [scores.chosen(name, sample[name]).astype(np.int32) for sample in outputs] for name in found}
    return replace(scores, best=best)


def asked_outputs(asked: Sequence[str], outputs: Sequence[str]) -> dict[str, str | None]:
    """For each output that a user names as NAME, NAME:AXIS or NAME:binary: the part behind the name, or None."""
    found = dict[str, str | None]()
    for text in () if list(asked) == [NONE] else asked:
        name, _, axis = (text, "", None) if text in outputs else text.rpartition(":")
        if name not in outputs or not (axis is None or re.fullmatch(rf"-?\d{{1,2}}|{BINARY}", axis)):
            raise BadOption(f"`scores` {text} names no output: the model has {', '.join(outputs)}")
        found[name] = axis
    return found


def check_asked(asked: Sequence[str], model: Model) -> None:
    """Raise if a user names an output, or an axis of one, that a model lacks, as far as shapes are known before it
    runs."""
    for name, axis in asked_outputs(asked, model.outputs).items():
        info = model.tensors.get(name)
        if axis not in (None, BINARY) and info is not None and info.dtype and info.shape is not None:
            _check_axis(name, int(axis), helper.tensor_dtype_to_np_dtype(info.dtype), info.shape)


def _check_axis(name: str, axis: int, dtype: np.dtype[Any], shape: Sequence[int | None]) -> None:
    if not -len(shape) <= axis < len(shape) or shape[axis] == 1:
        sizes = ", ".join("?" if size is None else str(size) for size in shape)
        raise BadOption(f"`scores` {name}: {dtype}[{sizes}] has no scores of classes along axis {axis}")


def _axis_of(name: str, told: str | None, outputs: Sequence[Mapping[str, Array]]) -> int | None:
    """The axis of the classes in an output that a user names; None if its values are yes/no. If `told` gives no axis:
    the one that values show, or axis 1, or the last of three; yes/no if there is none, or it has one class."""
    first = outputs[0][name]
    rank = first.ndim
    if told is None:
        seen = _seen_axis([sample[name] for sample in outputs])
        axis = seen if seen is not None else rank - 1 if rank == 3 else 1
        is_binary = rank < 2 or first.shape[axis] == 1
    else:
        is_binary = told == BINARY
        axis = 0 if is_binary else int(told)
    if first.dtype.kind != "f" or not first.size:
        raise BadOption(f"`scores` {name}: {first.dtype}{list(first.shape)} has no scores of classes")
    if is_binary:
        return None
    _check_axis(name, axis, first.dtype, first.shape)
    return axis % rank


def _seen_axis(outputs: Sequence[Array]) -> int | None:
    """The axis of the classes of an output, from its values on each sample; None if they do not look like scores."""
    first = outputs[0]
    if first.dtype.kind != "f" or first.ndim < 2 or not first.size:
        return None
    lengths = {axis: {array.shape[axis : axis + 1] for array in outputs} for axis in (1, first.ndim - 1)}
    axes = [axis for axis, seen in lengths.items() if len(seen) == 1 and first.shape[axis] > 1]  # classes do not vary
    for axis in axes:
        shares = [rows for array in outputs if (rows := _probabilities(_rows(array, axis))) is not None]
        if len(shares) == len(outputs):
            is_clear = np.median(np.concatenate([_gaps(rows) for rows in shares])) >= CLEAR_SHARE
            return axis if is_clear else None
    for axis in axes:
        classes = first.shape[axis]
        are_rows = axis == 1 and first.size == first.shape[0] * classes and classes >= LEAST_CLASSES
        are_tokens = axis == first.ndim - 1 and classes >= LEAST_TOKENS
        if (are_rows or are_tokens) and _is_clear(outputs, axis):
            return axis
    return None


def equal_share(accuracy: Accuracy | None) -> float | None:
    """The share of integers, or of best classes, that are as in the float model; the smaller one of both."""
    shares = () if accuracy is None else (accuracy.agreement, accuracy.top1)
    return min((share for share in shares if share is not None), default=None)


def agrees(accuracy: Accuracy, least: float) -> bool:
    """Whether at least the share `least` agrees with the float model's outputs: of integers exactly; of best classes
    unless a statistical test shows less (see `are_too_many`)."""
    if accuracy.agreement is not None and accuracy.agreement < least:
        return False
    count = accuracy.choices if accuracy.independent is None else accuracy.independent
    return accuracy.top1 is None or not count or not are_too_many((1 - accuracy.top1) * count, count, least)


def too_few_to_tell(accuracy: Accuracy, least: float) -> str | None:
    """A note if fewer best classes than the share `least` are as in float, and `least` is held all the same, because so
    few samples cannot tell the two shares apart; and how many samples could. None otherwise."""
    share = accuracy.top1
    if share is None or share >= least or not agrees(accuracy, least):
        return None
    count = accuracy.choices if accuracy.independent is None else accuracy.independent
    could, each = accuracy.samples, count / accuracy.samples
    while not are_too_many((1 - share) * each * could, each * could, least):
        could = ceil(1.1 * could)
    return (
        f"{share:.1%} of the best classes are as in float, and {100 * least:.4g}% are asked for: "
        f"{accuracy.samples} samples cannot tell the two apart, so it passes; about {could:,} could"
    )


def are_too_many(others: float, choices: float, least: float) -> bool:
    """Whether `others` differing of `choices` choices prove that the true share of equal ones is below `least`: exact
    one-sided binomial test, P(Binomial(choices, 1 - least) >= others) < `DOUBT`, by the beta function."""
    from scipy.special import betainc  # slow to import

    return others > 1e-9 and (least >= 1 or bool(betainc(others, choices - others + 1, 1 - least) < DOUBT))


def independent(equal: Array, sizes: Array) -> float:
    """The effective sample size: how many independent choices tell as much about the share of equal ones. Those of one
    sample (pixels, tokens) change together. In each sample, `equal` of `sizes` choices are equal.

    Korn and Graubard, Survey Methodology 24 (1998) 193-201: the variance of the share between samples replaces the
    binomial one, and Student's t the normal distribution. Where nothing differs, or there is one sample, the variance
    is unknown, and the result is the number of samples.
    """
    total, count = float(sizes.sum()), len(sizes)
    if (sizes == 1).all() or not total:
        return total
    share = float(equal.sum()) / total
    if share in (0.0, 1.0) or count == 1:
        return float(count)
    from scipy.special import stdtrit  # slow to import

    variance = count / (count - 1) * float(np.square(equal - share * sizes).sum()) / total**2
    as_good_as = min(total, share * (1 - share) / variance) if variance else total
    return float(as_good_as * (stdtrit(total - 1, 1 - DOUBT) / stdtrit(count - 1, 1 - DOUBT)) ** 2)


def _rows(array: Array, axis: int) -> Array:
    """Scores as [rows, classes] in float64; at most `ROWS` rows, at even distances."""
    rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
    return rows[:: max(1, -(-len(rows) // ROWS))].astype(np.float64)


def _probabilities(rows: Array) -> Array | None:
    """The rows if they sum to 1, or their exponentials if those do; else None."""
    with np.errstate(over="ignore", invalid="ignore"):
        kinds = (rows, np.exp(rows)) if (rows <= SUM_ERROR).all() else (rows,)
        return next((r for r in kinds if (r >= 0).all() and (np.abs(r.sum(1) - 1) <= SUM_ERROR).all()), None)


def _gaps(rows: Array) -> Array:
    top = np.partition(rows, -2, axis=1)
    return np.asarray(top[:, -1] - top[:, -2])


def _is_clear(outputs: Sequence[Array], axis: int) -> bool:
    """Whether the float model clearly prefers one class, and not always the same, at half of all positions or more."""
    gaps, best = list[Array](), set[int]()
    for array in outputs:
        rows = _rows(array, axis)
        gaps.append(_gaps(rows) / np.maximum(rows.std(1), np.finfo(np.float64).tiny))
        best.update(rows.argmax(1).tolist())
    is_single = sum(map(len, gaps)) == 1
    return bool(np.median(np.concatenate(gaps)) >= CLEAR) and (len(best) > 1 or is_single)


# ---- scores of models

ERROR = 0.05
"""The probability that the true loss exceeds its upper bound: one-sided 95 %."""

Z2 = NormalDist().inv_cdf(1 - ERROR) ** 2
"""The square of the normal quantile for `ERROR`: 2.706."""

HITS = frozenset({"top1", "top5"})
"""Metrics whose score of a sample is 1 or 0: its answer is right or wrong."""

DOUBTFUL = 0.2
"""If the float model is right less often than this, labels may belong to other samples. Chosen, not measured."""

LEAST_CHANGED = 8
"""Student's t is used if the scores of at least this many samples differ. Chosen, not measured."""


@dataclass(frozen=True)
class Score:
    """The metric `name` (or the user's function) of a model; higher is better.

    `by_sample` has the score of each labelled sample in order (1 for a right answer, 0 for a wrong one); empty if a
    function of the user returned only one number.
    """

    value: float
    by_sample: tuple[float, ...] = ()
    name: str = ""

    @classmethod
    def of_rows(cls, name: str, by_row: Sequence[float]) -> Score:
        return cls(float(np.mean(by_row)) if by_row else 1.0, tuple(by_row), name)

    @property
    def is_of_hits(self) -> bool:
        return self.name in HITS


def doubt(before: Score) -> str | None:
    """A warning if labels hardly fit the float model's outputs; else None."""
    if not before.is_of_hits or before.value >= DOUBTFUL:
        return None
    return (
        f"the float model has {before.name} {before.value:.3g}: if it should be better, see whether `labels` has the "
        "order of the samples, counts classes as the outputs do, and the samples are pre-processed"
    )


def metric_json(before: Score, after: Score) -> dict[str, Any]:
    """The metric of both models; over labels, also its name, the number of samples, and `loss_high`."""
    values: dict[str, Any] = {"before": before.value, "after": after.value}
    if before.by_sample:
        values |= {"name": before.name, "samples": len(before.by_sample), "loss_high": loss_high(before, after)}
    return values


def metric_in_words(before: Score, after: Score) -> str:
    """The metric of both models, how many answers became wrong or right, and the upper bound of the loss."""
    over = f" on {len(before.by_sample)} samples" if before.by_sample else ""
    parts = [f"{before.name}{over}: {before.value:.4g} before, {after.value:.4g} after"]
    if before.is_of_hits:
        moves = [b - a for a, b in zip(before.by_sample, after.by_sample, strict=True)]
        parts.append(f"{sum(m < 0 for m in moves)} lost, {sum(m > 0 for m in moves)} won")
    high = loss_high(before, after)
    if high is not None:
        parts.append(f"loss at most {max(high, 0):.2g} (95 %)")
    return "; ".join(parts)


def loss_high(before: Score, after: Score) -> float | None:
    """The upper end of the one-sided 95 % confidence interval of the loss, before - after.

    Both models answer the same samples, so only samples that changed count. For right and wrong answers: the score
    interval for paired proportions (see `_score_high`). For other scores: Student's t of the differences, if at least
    `LEAST_CHANGED` samples changed. None if too few changed, or there are no samples.
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
    """How many samples without a change show that the loss is within `max_drop`; infinite if no number does. For right
    and wrong answers the interval of `n` samples without a change ends at z^2 / (n + z^2)."""
    if max_drop <= 0:
        return inf
    return max(1, ceil(Z2 * (1 - max_drop) / max_drop - 1e-9)) if score.is_of_hits else LEAST_CHANGED


def can_tell(score: Score, max_drop: float) -> bool:
    return len(score.by_sample) >= samples_to_tell(score, max_drop)


def _score_high(lost: int, won: int, count: int) -> float:
    """The upper end of the score interval for the difference of two paired proportions, (lost - won) / count.

    Tango, Statistics in Medicine 17 (1998) 891-908: the largest difference d at which (lost - won - count*d) /
    sqrt(count * (2*q + d*(1 - d))) is still -z, where q is the most likely share of won samples if the difference is d.
    """
    from scipy.optimize import brentq  # slow to import

    def beyond(d: float) -> float:
        b = (2 * count - lost + won) * d - lost - won
        c = -won * d * (1 - d)
        q = (sqrt(max(0.0, b * b - 8 * count * c)) - b) / (4 * count)
        return count * d - (lost - won) - sqrt(Z2 * max(0.0, count * (2 * q + d * (1 - d))))

    low = (lost - won) / count
    return 1.0 if low >= 1 else float(brentq(beyond, low + 1e-12, 1 - 1e-12))
