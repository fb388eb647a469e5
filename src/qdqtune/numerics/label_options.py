"""The options for a metric without code, and for outputs that hold scores of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy.typing as npt

from qdqtune import options
from qdqtune.calibration.labels import FORMS
from qdqtune.errors import BadOption
from qdqtune.numerics.label_metrics import NAMES
from qdqtune.options import Anything, Names, Option, Options, PathLike, Reads, Text, option

LabelsLike = PathLike | npt.ArrayLike | Sequence[npt.ArrayLike]
"""Labels: a file, or an array or a list with one for each sample."""


class MetricName(click.Choice[str]):
    """The name of a metric, and behind a colon that of the output which it reads."""

    def __init__(self) -> None:
        super().__init__(("auto", *NAMES))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name of the metric."""
        name, colon, output = str(value).partition(":")
        return super().convert(name, param, ctx) + colon + output


@dataclass(kw_only=True)
class LabelOptions(Options):
    """A metric over labelled samples."""

    labels: Option[LabelsLike | None, LabelsLike | None] = option(
        Anything(Reads(path_type=str)),
        None,
        "What is right for each sample of `calibration_data`, in the same order: class numbers from 0, or vectors, "
        f"in {FORMS}. An .npz may hold samples of its own beside its array 'labels': those "
        "that calibration does not see are the fairest.",
        "Data",
        short="right answers, one for each sample",
        metavar="FILE",
    )
    metric: Text = option(
        MetricName(),
        "auto",
        "How outputs are compared with `labels`; without labels, with what the float model says: METRIC, or "
        "METRIC:OUTPUT for an output that is not the first that fits. Higher is better. "
        "top1, top5: the right class has the best score, or one of the best five. cosine: of vectors. auto: top1 where "
        "that fits the shapes, else cosine. Any other metric is a function: `evaluate`.",
        "Data",
        short="top1, top5, cosine or auto",
        metavar="METRIC[:OUTPUT]",
    )

    @property
    def is_labelled(self) -> bool:
        """Whether a metric without code is asked for."""
        return self.labels is not None or self.metric != "auto"

    @property
    def label_file(self) -> Path | None:
        """The file of labels; labels of Python programs lie in one, too (see `commands.inputs.on_disk`)."""
        return None if self.labels is None else Path(str(self.labels))


def check_metric(evaluate: object, options: LabelOptions) -> None:
    """Refuse two metrics at once.

    Raises:
        BadOption: a function is given together with labels or the name of a metric.
    """
    if evaluate is not None and options.is_labelled:
        raise BadOption("`evaluate` is a metric of its own: leave `labels` and `metric` out")


@dataclass(kw_only=True)
class ScoreOption(Options):
    """Which outputs hold scores of classes (see `numerics.scores`)."""

    scores: Names = option(
        options.NAMES,
        (),
        "Outputs that hold scores of classes, tokens or pixels, whose best class is compared with the float model's: "
        "NAME or NAME:AXIS, by commas, where AXIS is that of the classes (1 of four, the last of three); or none. Of "
        "raw scores of pixels the values do not tell.",
        "Accuracy",
        default_in_words="what the float model's values show",
        metavar="NAME[:AXIS]",
        is_repeated=True,
    )
