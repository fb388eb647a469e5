"""The metrics of labelled samples: how good the outputs of a model are, given what is right for each sample.

A metric is the mean over all rows of a row's own score, which `Score.by_sample` holds. Any other metric is a function
of the user (see `metric`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from qdqtune.errors import BadOption
from qdqtune.numerics.losses import Score
from qdqtune.types import Array

Name = Literal["top1", "top5", "cosine"]
Asked = Literal["auto"] | Name
NAMES: tuple[Name, ...] = get_args(Name)

WANTED: Mapping[Name, str] = {
    "top1": "class scores [rows, classes] or class numbers [rows]",
    "top5": "class scores [rows, classes]",
    "cosine": "vectors [rows, size]",
}
"""The outputs that a metric reads."""

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


def parsed(text: str) -> tuple[Asked, str | None]:
    """The metric and the output that a user names as METRIC or METRIC:OUTPUT; None without a colon."""
    name, colon, output = text.partition(":")
    return next((known for known in NAMES if known == name), "auto"), output if colon else None


def chosen(
    asked: Asked, outputs: Mapping[str, Array], right: Array | None, only: str | None = None
) -> tuple[Name, str]:
    """The metric and the output that it reads: the first one that fits, or `only` that one. `auto` is top1, or else
    cosine. `right` are the labels of the same sample; None where the float model's own outputs are right.

    Raises:
        BadOption: no output fits, or auto finds no metric.
    """
    outputs = outputs if only is None else {only: outputs[only]}
    for name in (n for n in NAMES if n == asked or (asked == "auto" and n != "top5")):
        for output, array in outputs.items():
            told = answer(name, array)
            if told is not None and (right is None or fits(name, told, right)):
                return name, output
    has = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in outputs.items())
    given = "" if right is None else f", and `labels` has {right.dtype}{list(right.shape)} a sample"
    if asked == "auto":
        known = f"`metric` knows {', '.join(NAMES)}; `evaluate` calls a function of yours"
        raise BadOption(f"no metric fits: the model gives {has}{given}. {known}")
    alike = ", and labels of the same shape" if right is not None and asked == "cosine" else ""
    raise BadOption(f"`metric` {asked} reads {WANTED[asked]}{alike}: the model gives {has}{given}")


def check_classes(metric: Name, output: str, array: Array, right: Array) -> None:
    """Refuse labels that are no class of the scores in an output.

    Raises:
        BadOption: a label is negative, and not `IGNORED`, or there are fewer classes.
    """
    if metric == "cosine" or array.dtype.kind != "f":
        return
    right = right[right != IGNORED]
    classes = array.shape[1]
    if right.size and not (right.min() >= 0 and right.max() < classes):
        wrong = right[(right < 0) | (right >= classes)].flat[0]
        raise BadOption(f"label {wrong} is no class of output {output}, which has {classes}: count classes from 0")


@dataclass
class Tally:
    """Collects the score of each row of one metric, in order."""

    metric: Name
    by_row: list[float] = field(default_factory=list)

    def add(self, told: Array, right: Array) -> None:
        """Count the rows of a sample: what the model says, and what is right."""
        for one, wanted in zip(told, right, strict=True):
            if self.metric == "cosine" or wanted.reshape(-1)[0] != IGNORED:
                self.by_row.append(_score(self.metric, one, wanted))

    @property
    def score(self) -> Score:
        """The metric of all rows, and the score of each."""
        return Score(float(np.mean(self.by_row)) if self.by_row else 1.0, tuple(self.by_row), self.metric)


def _score(metric: Name, told: Array, right: Array) -> float:
    if metric == "cosine":
        a, b = told.astype(np.float64).reshape(-1), right.astype(np.float64).reshape(-1)
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        return float(a @ b) / lengths if lengths else float(np.array_equal(a, b))
    return float(right.reshape(-1)[0] in told.reshape(-1))  # of five labels, those of the float model, the best
