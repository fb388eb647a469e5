"""The metrics of common heads: how good the outputs of a model are, given what is right for each sample.

A metric is a ratio of two sums over all rows (right answers and answers, say), or a mean over classes of what a
confusion matrix of all rows tells. Both give the part of each row, which `Score.by_sample` holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args
from zlib import crc32

import numpy as np

from qdqtune.errors import BadOption
from qdqtune.numerics.losses import Score
from qdqtune.types import Array

Name = Literal["top1", "top5", "f1", "miou", "tokens", "wer", "cosine", "mse", "mae", "psnr"]
Asked = Literal["auto"] | Name
NAMES: tuple[Name, ...] = get_args(Name)

WANTED: Mapping[Name, str] = {
    "top1": "class scores [rows, classes] or class numbers [rows]",
    "top5": "class scores [rows, classes]",
    "f1": "class scores [rows, classes] or class numbers [rows]",
    "miou": "scores [N, classes, H, W] or class numbers [N, H, W] of pixels",
    "tokens": "scores [rows, length, ids] or ids [rows, length]",
    "wer": "scores [rows, length, ids] or ids [rows, length]",
    "cosine": "vectors [rows, size]",
    "mse": "numbers [rows, ...]",
    "mae": "numbers [rows, ...]",
    "psnr": "pictures or signals [rows, ...]",
}
"""The outputs that a metric reads."""

OF_ONE_SHAPE = frozenset({"cosine", "mse", "mae", "psnr"})
"""Metrics whose labels have the shape of the output."""

BY_NAME_ONLY = frozenset({"top5", "f1", "mae", "psnr"})
"""Metrics that fit where another one does, which is the usual one."""

TOP = 5
"""The classes among which top5 looks for the right one."""

ON_NUMBERS = frozenset({"mse", "mae", "psnr"})
"""Metrics of numbers, which compare nothing where the float model itself is right: it has no error."""

MOST_PSNR = 100.0
"""The PSNR in dB of a row without any error. Chosen, not measured."""

NO_CLASS = 255
"""Pixels with this label do not count, as in the usual data sets."""


IGNORED = -1
"""Rows and pixels with this label do not count either."""


def answer(metric: Name, output: Array) -> Array | None:
    """What an output says in the terms of a metric, a row for each of its rows; None if it has another form.

    Class numbers of shape (rows,); for top5 the best five, (rows, 5); for miou (rows, H, W); ids of shape
    (rows, length) for tokens and wer; for cosine vectors, (rows, size), and for mse, mae and psnr numbers like them.
    """
    is_score, shape = output.dtype.kind == "f", output.shape
    if metric in ("top1", "top5", "f1"):
        while output.ndim > 1 + is_score and output.shape[-1] == 1:  # a pooled picture: (rows, classes, 1, 1)
            output = output[..., 0]
        if not is_score:
            return output if output.ndim == 1 and output.dtype.kind in "iu" and metric != "top5" else None
        if output.ndim != 2 or output.shape[1] < 2:
            return None
        ranked = np.argsort(-output, axis=1, kind="stable")
        return ranked[:, :TOP] if metric == "top5" else ranked[:, 0]
    if metric == "cosine":
        return output.reshape(shape[0], -1) if is_score and output.ndim >= 2 and output.size > shape[0] else None
    if metric in ON_NUMBERS:
        return output.reshape(shape[0], -1) if output.dtype.kind in "iuf" and output.ndim else None
    ids_ndim = 3 if metric == "miou" else 2
    if metric == "miou" and not is_score and output.ndim == 4 and shape[1] == 1:
        output = output[:, 0]
    if is_score and output.ndim == ids_ndim + 1:
        found: Array = output.argmax(axis=1 if metric == "miou" else -1)
        return found
    return output if not is_score and output.ndim == ids_ndim and output.dtype.kind in "iu" else None


def fits(metric: Name, told: Array, right: Array) -> bool:
    """Whether answers and labels of a sample can be compared."""
    if metric == "top5":
        return right.shape == told.shape[:1] or right.shape == told.shape
    if metric == "wer":
        return right.ndim == 2 and right.shape[0] == told.shape[0] and right.dtype.kind in "iu"
    if metric == "cosine":
        return right.ndim >= 2 and right.reshape(right.shape[0], -1).shape == told.shape
    if metric in ON_NUMBERS:
        return right.ndim > 0 and right.reshape(right.shape[0], -1).shape == told.shape
    return right.shape == told.shape and right.dtype.kind in "iu"


def parsed(text: str) -> tuple[Asked, str | None]:
    """The metric and the output that a user names as METRIC or METRIC:OUTPUT; None without a colon."""
    name, colon, output = text.partition(":")
    return next((known for known in NAMES if known == name), "auto"), output if colon else None


def chosen(
    asked: Asked, outputs: Mapping[str, Array], right: Array | None, only: str | None = None
) -> tuple[Name, str]:
    """The metric and the output that it reads: the first one that fits, or `only` that one. `right` are the labels of
    the same sample; None where the float model's own outputs are right.

    Raises:
        BadOption: no output fits, or auto finds no metric.
    """
    outputs = outputs if only is None else {only: outputs[only]}
    left_out = BY_NAME_ONLY if right is not None else BY_NAME_ONLY | ON_NUMBERS
    for name in (n for n in NAMES if n == asked or (asked == "auto" and n not in left_out)):
        for output, array in outputs.items():
            told = answer(name, array)
            if told is not None and (right is None or fits(name, told, right)):
                return name, output
    has = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in outputs.items())
    given = "" if right is None else f", and `labels` has {right.dtype}{list(right.shape)} a sample"
    if asked == "auto":
        raise BadOption(f"no metric fits: the model gives {has}{given}. Choose `metric` {', '.join(NAMES)}")
    alike = ", and labels of the same shape" if right is not None and asked in OF_ONE_SHAPE else ""
    raise BadOption(f"`metric` {asked} reads {WANTED[asked]}{alike}: the model gives {has}{given}")


def check_classes(metric: Name, output: str, array: Array, right: Array) -> None:
    """Refuse labels that are no class of the scores in an output.

    Raises:
        BadOption: a label is negative, and not `IGNORED`, or there are fewer classes.
    """
    if metric not in ("top1", "top5", "f1", "miou") or array.dtype.kind != "f":
        return
    counted = right[right != IGNORED]
    counted = counted[counted != NO_CLASS] if metric == "miou" else counted
    classes = array.shape[1]
    if counted.size and not (counted.min() >= 0 and counted.max() < classes):
        wrong = counted[(counted < 0) | (counted >= classes)].flat[0]
        raise BadOption(f"label {wrong} is no class of output {output}, which has {classes}: count classes from 0")


@dataclass
class Tally:
    """Counts the rows of one metric, in order: `parts` and `wholes` of a ratio, or `pairs` of classes with counts; and
    a number for each of the `answers`. `peak` is the largest label of all, for psnr."""

    metric: Name
    parts: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    pairs: list[Array] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    peak: float = 0.0

    def add(self, told: Array, right: Array) -> None:
        """Count the rows of a sample: what the model says, and what is right."""
        for one, wanted in zip(told, right, strict=True):
            if self.metric in ("top1", "top5") and np.reshape(wanted, -1)[0] == IGNORED:
                continue
            self.answers.append(crc32(np.asarray(one).tobytes()))
            if self.metric in ("f1", "miou"):
                self.pairs.append(_pairs(one, wanted))
                continue
            part, whole = _ratio(self.metric, one, wanted)
            self.parts.append(part)
            self.peak = max(self.peak, float(np.abs(wanted).max(initial=0))) if self.metric == "psnr" else 0.0
            self.wholes.append(whole)

    @property
    def score(self) -> Score:
        """The metric of all rows, and the part of each."""
        if self.metric in ("f1", "miou"):
            return _by_classes(self.pairs, 0.5 if self.metric == "f1" else 1.0, is_f1=self.metric == "f1")
        parts, wholes = np.array(self.parts), np.array(self.wholes)
        if self.metric == "psnr":  # of each row in dB, below the largest label of all
            with np.errstate(divide="ignore"):
                parts = np.minimum(10 * np.log10(max(self.peak, 1e-30) ** 2 / parts), MOST_PSNR)
        total = float(wholes.sum())
        value = float(parts.sum()) / total if total else 1.0
        if (wholes == 1).all():
            return Score(value, tuple(parts.tolist()))
        rest = np.maximum(total - wholes, 0)
        without = np.divide(parts.sum() - parts, rest, out=np.full(parts.shape, value), where=rest > 0)
        return _jackknifed(value, without)


def _ratio(metric: Name, told: Array, right: Array) -> tuple[float, float]:
    """The part and the whole of one row."""
    if metric in ("top1", "top5"):
        first = right.reshape(-1)[0]  # of five labels, those of the float model, the best
        return float(first in told.reshape(-1)), 1.0
    if metric == "cosine":
        a, b = told.astype(np.float64).reshape(-1), right.astype(np.float64).reshape(-1)
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        return (float(a @ b) / lengths if lengths else float(np.array_equal(a, b))), 1.0
    if metric in ON_NUMBERS:
        lost = told.astype(np.float64).reshape(-1) - right.astype(np.float64).reshape(-1)
        mean = float(np.abs(lost).mean() if metric == "mae" else np.square(lost).mean())
        return (mean if metric == "psnr" else -mean), 1.0
    if metric == "tokens":
        counted = right >= 0
        return float((told == right)[counted].sum()), float(counted.sum())
    ids = [int(i) for i in right if i >= 0]
    return len(ids) - edits([int(i) for i in told if i >= 0], ids), float(len(ids))


def edits(told: Sequence[int], right: Sequence[int]) -> int:
    """The least number of ids to insert, leave out or change that makes one sequence of the other (Levenshtein)."""
    row = list(range(len(right) + 1))
    for number, one in enumerate(told, 1):
        before, row = row, [number]
        for place, wanted in enumerate(right, 1):
            row.append(min(before[place] + 1, row[-1] + 1, before[place - 1] + (one != wanted)))
    return row[-1]


def _pairs(told: Array, right: Array) -> Array:
    """A row for each pair of a right class and the class that is told: both, and how often. Shape (pairs, 3)."""
    told, right = np.atleast_1d(told).reshape(-1), np.atleast_1d(right).reshape(-1)
    counted = right != (NO_CLASS if right.size > 1 else IGNORED)
    counted &= right != IGNORED
    both = np.stack([right[counted], told[counted]], axis=1).astype(np.int64)
    found, counts = np.unique(both, axis=0, return_counts=True)
    return np.concatenate([found, counts[:, None]], axis=1)


def _by_classes(rows: Sequence[Array], weight: float, *, is_f1: bool) -> Score:
    """The mean over classes of right / (right + weight * wrong), where wrong are missed and false ones: 1 gives IoU,
    0.5 gives F1. With two classes F1 is that of class 1. Classes that neither occur nor are told do not count."""
    classes = max((int(row[:, :2].max()) for row in rows if len(row)), default=0) + 1

    def value(counts: Array) -> float:
        right, wrong = counts
        if is_f1 and classes <= 2:
            right, wrong = right[1:], wrong[1:]
        all_told = right + weight * wrong
        seen = all_told > 0
        return float((right[seen] / all_told[seen]).mean()) if seen.any() else 1.0

    def counts_of(row: Array) -> Array:
        wanted, told, count = row.T
        equal, counts = wanted == told, np.zeros((2, classes))
        np.add.at(counts[0], wanted[equal], count[equal])
        np.add.at(counts[1], wanted[~equal], count[~equal])
        np.add.at(counts[1], told[~equal], count[~equal])
        return counts

    total, known = np.zeros((2, classes)), dict[bytes, float]()
    for row in rows:
        total += counts_of(row)
    for row in rows:
        if (key := row.tobytes()) not in known:  # of single answers there are few kinds
            known[key] = value(total - counts_of(row))
    return _jackknifed(value(total), np.array([known[row.tobytes()] for row in rows]))


def _jackknifed(value: float, without: Array) -> Score:
    """A metric with the pseudo-value of each row; `without` is the metric of all other rows, see `Score`."""
    count = len(without)
    parts = np.round(count * value - (count - 1) * without, 9)
    return Score(value, tuple(parts.tolist()))
