"""Outputs that hold scores of classes: a task counts whether the best class stays the same, not decibels.

What an output holds is found from the values that the float model gives:

- probabilities, or their logarithms: along some axis they sum to 1 (classes, tokens, pixels);
- logits: an output of shape [rows, classes], or [rows, positions, classes] with as many classes as a vocabulary has.

In both the float model itself has to prefer one class clearly. Embeddings, coordinates, weights of mixtures and models
without training do not, and which of their values is the largest means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from qdqtune.types import Accuracy, Array

SUM_ERROR = 1e-2
"""How far sums of probabilities may be from 1: float16 rounds them. Chosen, not measured."""

LEAST_CLASSES, LEAST_TOKENS = 8, 1000
"""The fewest classes of logits, and the fewest of them that count as a vocabulary. Chosen, not measured."""

CLEAR = 1.0
"""A preference is clear where the best logit is above the second by this many standard deviations of the row. The best
two of 8 to 1,000 normal numbers differ by 0.6 to 0.3. Chosen, not measured."""

DOUBT = 0.05
"""A share of first choices is below its limit if a model that just holds it had so many others with less chance."""

CLEAR_SHARE = 0.1
"""The same for probabilities: the best one is above the second by so much. Chosen, not measured."""

ROWS = 4096
"""Rows that are looked at to tell what an output holds. Chosen, not measured."""


def class_axis(outputs: Sequence[Array]) -> int | None:
    """The axis of an output's classes, from its values for each sample; None if it holds no scores of classes."""
    first = outputs[0]
    if first.dtype.kind != "f" or first.ndim < 2 or not first.size:
        return None
    axes = [axis for axis in dict.fromkeys((1, first.ndim - 1)) if first.shape[axis] > 1]
    for axis in axes:
        shares = [rows for array in outputs if (rows := _probabilities(_rows(array, axis))) is not None]
        if len(shares) == len(outputs):
            return axis if np.median(np.concatenate([_gaps(rows) for rows in shares])) >= CLEAR_SHARE else None
    return next((axis for axis in axes if _may_be_logits(first, axis) and _is_clear(outputs, axis)), None)


def scores_of(outputs: Sequence[Mapping[str, Array]]) -> dict[str, int]:
    """The axis of the classes, by the name of each output that holds scores; `outputs` are those of each sample."""
    axes = {name: class_axis([sample[name] for sample in outputs]) for name in outputs[0]}
    return {name: axis for name, axis in axes.items() if axis is not None}


def equal_share(accuracy: Accuracy | None) -> float | None:
    """The share of integers, or else of first choices, that are as in the float model."""
    return None if accuracy is None else accuracy.top1 if accuracy.agreement is None else accuracy.agreement


def agrees(accuracy: Accuracy, least: float) -> bool:
    """Whether outputs agree with the float model's in at least this share: of integers, each of which counts; and of
    first choices, unless these are fewer beyond doubt."""
    if accuracy.agreement is not None and accuracy.agreement < least:
        return False
    if accuracy.top1 is None or not accuracy.choices:
        return True
    return not are_too_many(round((1 - accuracy.top1) * accuracy.choices), accuracy.choices, least)


def are_too_many(others: int, choices: int, least: float) -> bool:
    """Whether so many other choices show beyond doubt that less than the share `least` is equal: exact binomial test,
    one-sided, P(Binomial(choices, 1 - least) >= others) < `DOUBT`."""
    from scipy.special import bdtrc  # slow to import

    return others > 0 and (least >= 1 or bool(bdtrc(others - 1, choices, 1 - least) < DOUBT))


def smallest_seen(choices: int, least: float) -> float:
    """The smallest share of other choices that so many can show to be too many; 1 - `least` for endless ones."""
    return next((k / choices for k in range(1, choices + 1) if are_too_many(k, choices, least)), 1.0)


def _rows(array: Array, axis: int) -> Array:
    """The scores as [rows, classes] in float64, at most `ROWS` rows spread over all."""
    rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
    return rows[:: -(-len(rows) // ROWS)].astype(np.float64)


def _probabilities(rows: Array) -> Array | None:
    """Rows that sum to 1, or the exponentials of such rows' logarithms; None if they are neither."""
    with np.errstate(over="ignore", invalid="ignore"):
        kinds = (rows, np.exp(rows)) if (rows <= SUM_ERROR).all() else (rows,)
        return next((r for r in kinds if (r >= 0).all() and (np.abs(r.sum(1) - 1) <= SUM_ERROR).all()), None)


def _gaps(rows: Array) -> Array:
    """By how much the largest value of each row is above the second."""
    top = np.partition(rows, -2, axis=1)
    return np.asarray(top[:, -1] - top[:, -2])


def _may_be_logits(first: Array, axis: int) -> bool:
    """Whether the shape is that of logits: [rows, classes] with axes of size 1 behind, or [.., tokens]."""
    classes = first.shape[axis]
    is_row = axis == 1 and first.size == first.shape[0] * classes
    return (is_row and classes >= LEAST_CLASSES) or (axis == first.ndim - 1 and classes >= LEAST_TOKENS)


def _is_clear(outputs: Sequence[Array], axis: int) -> bool:
    """Whether the float model prefers one class clearly at half of all positions, and not always the same."""
    gaps, best = list[Array](), set[int]()
    for array in outputs:
        rows = _rows(array, axis)
        gaps.append(_gaps(rows) / np.maximum(rows.std(1), np.finfo(np.float64).tiny))
        best.update(rows.argmax(1).tolist())
    is_single = sum(map(len, gaps)) == 1
    return bool(np.median(np.concatenate(gaps)) >= CLEAR) and (len(best) > 1 or is_single)
