"""A metric without code: its options, labels in a file beside the samples, and its value (see `label_metrics`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from onnx.helper import tensor_dtype_to_np_dtype

from qdqtune import options
from qdqtune.calibration.inputs import input_specs
from qdqtune.calibration.labels import FORMS, holds_inputs, paired, read_labels
from qdqtune.calibration.samples import Samples, open_samples
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BadOption
from qdqtune.graph.model import Model
from qdqtune.numerics.accuracy import NOT_FINITE, is_finite
from qdqtune.numerics.label_metrics import NAMES, Asked, Score, Tally, answer, check_classes, chosen, fits, parsed
from qdqtune.numerics.metric import Evaluation, evaluate
from qdqtune.options import Anything, Names, Option, Options, PathLike, Reads, Text, option
from qdqtune.types import Array, Failure, Sample

LabelsLike = PathLike | npt.ArrayLike | Sequence[npt.ArrayLike]
"""Labels: a file, or an array or a list with one for each sample."""


class MetricName(click.Choice[str]):
    """The name of a metric, and behind a colon that of the output which it reads."""

    def __init__(self) -> None:
        super().__init__(("auto", *NAMES))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
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
        metavar="METRIC[:OUTPUT]",
        is_rare=True,
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
        is_rare=True,
    )


@dataclass(frozen=True)
class Labelled:
    """A metric over labelled samples. `labels` has those of each sample, its rows along the first axis; None where the
    float model's own outputs are right. `output` is the one that is compared, None for the first that fits. `source`
    names the metric in messages, `digest` is 16 hex digits of all its content."""

    source: str
    digest: str
    metric: Asked
    samples: Samples
    labels: tuple[Array, ...] | None
    output: str | None = None


Metric = Evaluation | Labelled
"""What can be asked of a model: a function of the user, or a metric over labels."""


def option_of(metric: Metric) -> str:
    """The metric in messages: the option that asks for it, and its name."""
    return f"`{'evaluate' if isinstance(metric, Evaluation) else 'metric'}` {metric.source}"


def open_labelled(
    labels: Path | None,
    metric: str,
    data: str | None,
    model: Model,
    execution: Execution,
    *,
    limit: int | None = None,
    fixed: Collection[str] = (),
    folders: Sequence[Path] = (),
) -> Labelled:
    """The `metric` (METRIC or METRIC:OUTPUT) of a file of labels, over the samples of `data`, or over those in the file
    itself if it is an .npz with the inputs of the `model`. Without labels it is over at most `limit` samples.
    `folders` are those of the model (see `open_samples`).

    Raises:
        BadData: labels or samples cannot be read, or are not equally many.
        BadOption: there are no samples, no such output, no labels for a metric that needs them, or these fit no output.
    """
    asked, output = parsed(metric)
    name = "metric" if metric == "auto" else metric
    if output is not None and output not in model.outputs:
        raise BadOption(f"`metric` {metric} names no output: there are {', '.join(model.outputs)}")
    if labels is None:
        if data is None:
            raise BadOption(f"`metric` {metric} needs samples: give `calibration_data`")
        samples = open_samples(data, model, execution, limit=limit, fixed=fixed, folders=folders)
        digest = _digest(name, samples.digest, str(limit))
        return Labelled(f"{name} against the float model", digest, asked, samples, None, output)
    found = read_labels(labels)
    own = str(labels) if holds_inputs(labels, input_specs(model)) else None
    if data is None and own is None:
        raise BadOption(
            "`labels` tells what is right for samples: give `calibration_data`, or an .npz that holds the inputs and "
            "an array 'labels'"
        )
    samples = open_samples(own or data, model, execution, limit=len(found) + 1, fixed=fixed, folders=folders)
    first = samples.first(1)[0]
    count = sum(1 for _ in samples)
    rows = paired(found, count, first, samples.origin)
    _check_shapes(asked, model, rows[0], output)
    content = (part for label in found for part in (str(label.shape), str(label.dtype), label.tobytes().hex()))
    return Labelled(f"{name} on {labels}", _digest(name, samples.digest, *content), asked, samples, rows, output)


def _check_shapes(asked: Asked, shaped: Model, right: Array, only: str | None) -> None:
    """Refuse labels of a sample that fit no output, before the model runs; not where a shape is unknown. An output is
    taken to have as many rows as the labels: its first size may be that of another batch.

    Raises:
        BadOption: see `label_metrics.chosen`.
    """
    infos = {name: shaped.tensors.get(name) for name in (shaped.outputs if only is None else [only])}
    outputs = dict[str, Array]()
    for name, info in infos.items():
        if info is not None and info.sizes is not None and info.dtype:
            kind = np.float32 if info.is_float else tensor_dtype_to_np_dtype(info.dtype)
            outputs[name] = np.zeros((*right.shape[:1], *info.sizes[1:]), kind)
    if len(outputs) == len(infos):
        chosen(asked, outputs, right, only)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def measure(metric: Metric, runner: Runner, handle: Handle, floats: Callable[[], Handle | Failure]) -> Score | Failure:
    """The metric of a model that the runner holds, or why there is none; see `metric.evaluate`. `floats` gives the
    build of the float model, whose outputs are right where there are no labels.

    Raises:
        BadOption: the function of the user fails, or no output fits the metric.
    """
    if isinstance(metric, Evaluation):
        value = evaluate(metric, runner, handle)
        return value if isinstance(value, Failure) else Score(value)
    original = handle if metric.labels else floats()
    if isinstance(original, Failure):
        return original
    tally, of = None, ""
    for sample, right in zip(metric.samples, metric.labels or repeat(None), strict=False):
        outputs = _ran(runner, handle, sample)
        if isinstance(outputs, Failure):
            return outputs
        if tally is None:
            name, of = chosen(metric.metric, outputs, right, metric.output)
            tally = Tally(name)
        told = answer(tally.metric, outputs[of])
        if right is None:
            reference = outputs if original is handle else _ran(runner, original, sample)
            if isinstance(reference, Failure):
                return reference
            right = answer(tally.metric, reference[of])
        else:
            check_classes(tally.metric, of, outputs[of], right)
        if told is None or right is None or not fits(tally.metric, told, right):
            raise BadOption(f"{metric.source}: output {of} of one sample has another form than that of the first")
        tally.add(told, right)
    assert tally is not None  # a source without samples is refused when it is opened
    return tally.score


def _ran(runner: Runner, handle: Handle, sample: Sample) -> Mapping[str, Array] | Failure:
    ran = runner.outputs(handle, [sample])
    if isinstance(ran, Failure):
        return ran
    return ran[0] if is_finite(ran) else NOT_FINITE
