"""How good the outputs of a model are: by a function of the user, or by a metric over labelled samples.

The user's own metric is a function that asks a model for outputs and says how good they are. `evaluate`
module:callable or `path/to/file.py:callable` is called as `callable(predict) -> float`; higher is better.
`predict` takes one set of inputs, {input name: array}, and returns {output name: array}, computed on the target
engine; threads that call it wait for each other. The time limit holds for each call of `predict`, and for what the
function takes beside them. The function is called for the float model and for each candidate that is about to be
accepted, and should return the same number for the same model:

    def accuracy(predict):
        hits = [predict({"image": x[None]})["logits"].argmax() == label for x, label in test_set()]
        return sum(hits) / len(hits)

A metric without code (see `label_metrics`) compares outputs with labels in a file, one for each calibration sample in
the order of the samples, or else with what the float model says.
"""

from __future__ import annotations

import csv
import hashlib
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtune import options
from qdqtune.calibration.inputs import InputSpec, input_specs
from qdqtune.calibration.observe import outputs_on
from qdqtune.calibration.samples import LABELS, Samples, open_samples, read_arrays
from qdqtune.calibration.user_code import BudgetEnded, call_in_thread, import_callable, user_errors
from qdqtune.engines.execution import CHECK_SECONDS, Execution
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BadData, BadOption, EngineFailure, EngineRefused, Failure, one_line, parsed_json
from qdqtune.graph.model import Model
from qdqtune.numerics.accuracy import check_finite
from qdqtune.numerics.label_metrics import NAMES, Asked, Score, Tally, answer, check_classes, chosen, fits, parsed
from qdqtune.options import Kind, Names, Option, Options, PathLike, Text, anything, choice, option, reads
from qdqtune.types import Array, Sample

Predict = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Outputs by name for one set of inputs by name."""


@dataclass(frozen=True)
class Evaluation:
    """A metric: its name as the user gave it, 16 hex digits of a hash of its source text, the function, and the limits
    of its time."""

    source: str
    digest: str
    function: Callable[[Predict], float]
    execution: Execution


def load_evaluation(source: str, execution: Execution) -> Evaluation:
    """The metric of `module:callable` or `path/to/file.py:callable`.

    Raises:
        BadOption: it cannot be imported, or is not callable.
        TooSlow: the import takes too long.
    """
    function, digest = import_callable(source, "`evaluate`", execution)
    return Evaluation(source, digest, function, execution)


def evaluate(evaluation: Evaluation, runner: Runner, handle: Handle) -> float:
    """The metric of a model that the runner holds. The output of the function goes to standard error.

    Raises:
        EngineRefused: the engine cannot run the model, the metric is not finite, or the time budget has ended.
        BadOption: the function itself fails, or does not return a number.
        TooSlow: it takes too long.
    """
    tasks, is_over = SimpleQueue[Any](), threading.Event()

    def predict(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        answers, sample = SimpleQueue[Any](), {name: np.asarray(array) for name, array in inputs.items()}
        tasks.put(lambda: answers.put(runner.outputs(handle, [sample])[0]))
        while not is_over.is_set():
            with suppress(Empty):
                outputs: Mapping[str, Array] = answers.get(timeout=CHECK_SECONDS)
                return outputs
        raise EngineFailure("the metric has ended")  # or the engine has refused the model, which `evaluate` raises

    def score() -> float:
        with user_errors(f"`evaluate` {evaluation.source} failed", BadOption):
            return evaluation.function(predict)

    try:
        with redirect_stdout(sys.stderr):
            value = call_in_thread(score, f"`evaluate` {evaluation.source}", evaluation.execution, tasks)
    except BudgetEnded as ended:
        raise EngineRefused(Failure("timeout", str(ended))) from ended
    except BadOption as error:
        if isinstance(error.__cause__, TypeError):
            raise BadOption(f"{error} (it is called with `predict`, which takes {{input name: array}})") from error
        raise
    finally:
        is_over.set()
    return _number(evaluation.source, value)


def _number(source: str, value: object) -> float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise BadOption(f"`evaluate` {source} returned {type(value).__name__}, not a number")
    number = float(array.reshape(()))
    if not np.isfinite(number):
        raise EngineRefused(Failure("output", f"the metric of {source} is {number}"))
    return number


FORMS = ".npz, .npy, .json, .csv or .txt"

COLUMNS = (LABELS, "label")
"""Names of the array of labels in an .npz, of the list in a .json, and of the column in a .csv."""


def read_labels(path: Path) -> tuple[Array, ...]:
    """The labels in a file, one array a label: a number has shape (), a vector its own.

    A .npy, and the array `labels` of an .npz (or its only one), have the labels along the first axis. A .json holds a
    list, or an object with one under `labels`. A .csv or .txt has a number a line: in the column `label`, or else in
    the last one."""
    if not path.is_file():
        raise BadData(f"labels {path} not found")
    ending = path.suffix.lower()
    if ending in (".npz", ".npy"):
        found = _of_arrays(path)
    elif ending in (".json", ".csv", ".txt"):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise BadData(f"cannot read labels {path}: {one_line(error)}") from error
        found = _of_json(text, path) if ending == ".json" else _of_lines(text, path)
    else:
        raise BadData(f"labels {path} are in no form that is read: give {FORMS}")
    labels = tuple(_label(label, path) for label in found)
    if not labels:
        raise BadData(f"{path} holds no label")
    if all(label.shape == (1,) for label in labels):
        labels = tuple(label.reshape(()) for label in labels)
    if len({label.ndim for label in labels}) > 1:
        raise BadData(f"{path}: some labels are numbers and others lists: give one form for all")
    return labels


def holds_inputs(path: Path, specs: Sequence[InputSpec]) -> bool:
    """Whether a file of labels is an .npz that holds the arrays of inputs, too."""
    return path.suffix.lower() == ".npz" and {spec.name for spec in specs} <= read_arrays(path).keys()


def paired(labels: Sequence[Array], samples: int, first: Sample, origin: str) -> tuple[Array, ...]:
    """The labels of each sample, with its rows (its batch) along the first axis."""
    rows = next((array.shape[0] for array in first.values() if array.ndim), 1)
    if rows == 1 and len(labels) == samples:
        return tuple(label[None] for label in labels)
    if len(labels) == samples * rows:
        return tuple(np.stack(labels[i * rows : (i + 1) * rows]) for i in range(samples))
    if len(labels) == samples and all(label.shape[:1] == (rows,) for label in labels):
        return tuple(labels)
    many = f"more than {len(labels)}" if samples > len(labels) else str(samples)
    each = "sample" if rows == 1 else f"sample, or for each of its {rows} rows"
    raise BadData(
        f"{len(labels)} labels for {many} samples of {origin}: `labels` has one for each {each}, in the same order"
    )


def _of_arrays(path: Path) -> Sequence[Any]:
    arrays = read_arrays(path, (InputSpec(LABELS, np.dtype(np.float32), ()),))
    name = next((name for name in COLUMNS if name in arrays), next(iter(arrays)) if len(arrays) == 1 else None)
    if name is None:
        raise BadData(f"{path} has no array '{LABELS}'; it holds {', '.join(map(repr, arrays))}")
    array = arrays[name]
    if not array.ndim:
        raise BadData(f"{path}: '{name}' is one number: give an array with a label for each sample")
    return list(array)


def _of_json(text: str, path: Path) -> Sequence[Any]:
    try:
        found = parsed_json(text)
    except ValueError as error:
        raise BadData(f"cannot read labels {path} as JSON: {one_line(error)}") from error
    if isinstance(found, dict):
        found = next((found[name] for name in COLUMNS if name in found), None)
    if not isinstance(found, list):
        raise BadData(f"{path} holds no list: give a JSON list with a label for each sample")
    return found


def _of_lines(text: str, path: Path) -> Sequence[Any]:
    rows = [row for row in csv.reader(text.splitlines()) if any(cell.strip() for cell in row)]
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    column = next((header.index(name) for name in COLUMNS if name in header), -1)
    rows = rows[column >= 0 :]
    if short := [row for row in rows if len(row) <= column]:
        raise BadData(f"{path}: the row {','.join(short[0])!r} has no label")
    return [row[column] for row in rows]


def _label(label: Any, path: Path) -> Array:
    try:
        array = np.asarray(label)
        if array.dtype.kind in "US":
            array = array.astype(np.float64)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadData(f"{path}: a label holds NaN or infinite values")
    if array.dtype.kind not in "biuf":
        raise BadData(f"{path}: label {str(label)[:40]!r} is no number: give class numbers, counted from 0, not names")
    if array.dtype.kind == "f" and (array == array.astype(np.int64)).all() and not isinstance(label, np.ndarray):
        array = array.astype(np.int64)
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


LabelsLike = PathLike | npt.ArrayLike | Sequence[npt.ArrayLike]
"""Labels: a file, or an array or a list with one for each sample."""


METRIC_NAME = choice("auto", *NAMES)


def _metric(value: Any) -> str:
    name, colon, output = str(value).partition(":")
    return f"{METRIC_NAME.convert(name)}{colon}{output}"


@dataclass(kw_only=True)
class LabelOptions(Options):
    """A metric over labelled samples."""

    labels: Option[LabelsLike | None, LabelsLike | None] = option(
        anything(reads(make=str)),
        None,
        "What is right for each sample of `calibration_data`, in the same order: class numbers from 0, or vectors, "
        f"in {FORMS}. An .npz may hold samples of its own beside its array 'labels': those "
        "that calibration does not see are the fairest.",
        "Data",
        short="right answers, one for each sample",
        metavar="FILE",
    )
    metric: Text = option(
        Kind(_metric, choices=METRIC_NAME.choices),
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
    """Refuse two metrics at once."""
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
    limit: int | None,
    fixed: Collection[str],
    folders: Sequence[Path],
) -> Labelled:
    """The `metric` (METRIC or METRIC:OUTPUT) of a file of labels, over the samples of `data`, or over those in the file
    itself if it is an .npz with the inputs of the `model`. Without labels it is over at most `limit` samples.
    `folders` are those of the model (see `open_samples`)."""
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
    outputs = next(outputs_on(model, [first], execution=execution))  # before the work of a run begins
    chosen_metric, of = chosen(asked, outputs, rows[0], output)
    for labels_of_sample in rows:
        check_classes(chosen_metric, of, outputs[of], labels_of_sample)
    content = (part for label in found for part in (str(label.shape), str(label.dtype), label.tobytes().hex()))
    return Labelled(f"{name} on {labels}", _digest(name, samples.digest, *content), asked, samples, rows, output)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def measure(metric: Metric, runner: Runner, handle: Handle, floats: Callable[[], Handle]) -> Score:
    """The metric of a model that the runner holds; see `evaluate`. `floats` gives the build of the float model, whose
    outputs are right where there are no labels.

    Raises:
        EngineRefused: there is none, see `evaluate`.
        BadOption: the function of the user fails, or no output fits the metric.
    """
    if isinstance(metric, Evaluation):
        return Score(evaluate(metric, runner, handle))
    original = handle if metric.labels else floats()
    tally, of = None, ""
    for sample, right in zip(metric.samples, metric.labels or repeat(None), strict=False):
        outputs = _outputs(runner, handle, sample)
        if tally is None:
            name, of = chosen(metric.metric, outputs, right, metric.output)
            tally = Tally(name)
        told = answer(tally.metric, outputs[of])
        if right is None:
            reference = outputs if original is handle else _outputs(runner, original, sample)
            right = answer(tally.metric, reference[of])
        else:
            check_classes(tally.metric, of, outputs[of], right)
        if told is None or right is None or not fits(tally.metric, told, right):
            raise BadOption(f"{metric.source}: output {of} of one sample has another form than that of the first")
        tally.add(told, right)
    assert tally is not None  # a source without samples is refused when it is opened
    return tally.score


def _outputs(runner: Runner, handle: Handle, sample: Sample) -> Mapping[str, Array]:
    outputs = runner.outputs(handle, [sample])
    check_finite(outputs)
    return outputs[0]
