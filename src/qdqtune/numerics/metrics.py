"""How good the outputs of a model are: by a function of the user, or by a metric over labelled samples.

The function is called as `callable(predict) -> float`; higher is better. `predict` takes {input name: array} and
returns {output name: array}, computed on the target engine; threads that call it wait for each other. The time limit
holds for each call of `predict`, and for the function's own time between calls.

A metric without code compares outputs with labels in a file, one for each sample in order, or else with the outputs of
the float model. Each row (an entry of the batch) gets a score; the metric is their mean.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from qdqtune.calibration.inputs import InputSpec, input_specs
from qdqtune.calibration.observe import outputs_on
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.samples import LABELS, Samples, open_samples, read_arrays
from qdqtune.calibration.user_code import BudgetEnded, call_in_thread, import_callable, user_errors
from qdqtune.engines.execution import CHECK_SECONDS, Execution
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BadData, BadOption, EngineFailure, EngineRefused, Failure, first_of, one_line
from qdqtune.graph.loading import load
from qdqtune.numerics.accuracy import check_finite
from qdqtune.numerics.scores import Score
from qdqtune.options import NAMES, SOURCE, Names, Options, choice, one_of
from qdqtune.types import Array, Sample

Name = Literal["top1", "top5", "cosine"]
METRICS: tuple[Name, ...] = get_args(Name)

TOP = 5
"""top5 is right if the label is among this many best classes."""


def answer(metric: Name, output: Array) -> Array | None:
    """What a metric compares of an output: for top1 class numbers, (rows,); for top5 the best five, (rows, 5); for
    cosine vectors, (rows, size). None if the output has another form."""
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


def row_scores(metric: Name, told: Array | None, right: Array | None) -> list[float] | None:
    """The score of each row of a sample, from answers `told` and labels `right`; None if they cannot be compared."""
    if told is None or right is None:
        return None
    if metric == "cosine":
        if right.ndim < 2 or right.reshape(right.shape[0], -1).shape != told.shape:
            return None
        ours, theirs = told.astype(np.float64), right.reshape(told.shape).astype(np.float64)
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        equal = (ours == theirs).all(1)
        found = np.where(lengths, (ours * theirs).sum(1) / np.where(lengths, lengths, 1.0), equal)
        return [float(one) for one in found]
    if metric == "top1" and right.dtype.kind not in "iu":
        return None
    if metric == "top5" and right.shape == told.shape:
        right = right[:, 0]  # of five labels, those of the float model, the best
    if right.shape != told.shape[:1]:
        return None
    return [float((one == label).any()) for one, label in zip(told, right, strict=True)]


def chosen(asked: str, outputs: Mapping[str, Array], right: Array | None, only: str | None = None) -> tuple[Name, str]:
    """The metric and the output that it reads: the first output that fits, or `only` that one. `auto` is top1 if that
    fits, else cosine. `right` are the labels of the sample; None if the float model's own outputs serve as labels."""
    outputs = outputs if only is None else {only: outputs[only]}
    for name in (n for n in METRICS if n == asked or (asked == "auto" and n != "top5")):
        for output, array in outputs.items():
            told = answer(name, array)
            if told is not None and (right is None or row_scores(name, told, right) is not None):
                return name, output
    has = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in outputs.items())
    given = "" if right is None else f", and `labels` has {right.dtype}{list(right.shape)} a sample"
    what = "no metric fits" if asked == "auto" else f"`metric` {asked} fits no output"
    hint = f"`metric` knows {', '.join(METRICS)}; `evaluate` calls a function of yours"
    raise BadOption(f"{what}: the model gives {has}{given}. {hint}")


def check_classes(metric: Name, output: str, array: Array, right: Array) -> None:
    """Refuse labels that are no index of a class in an output."""
    if metric == "cosine" or array.dtype.kind != "f":
        return
    classes = array.shape[1]
    if not (right.min() >= 0 and right.max() < classes):
        wrong = right[(right < 0) | (right >= classes)].flat[0]
        raise BadOption(f"label {wrong} is no class of output {output}, which has {classes}: count classes from 0")


# ---- a function of the user

Predict = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Outputs by name for one set of inputs by name."""


@dataclass(frozen=True)
class Evaluation:
    """A metric of the user: its name, 16 hex digits of a hash of its source text, the function, and its time limits."""

    source: str
    digest: str
    function: Callable[[Predict], float]
    execution: Execution


def load_evaluation(source: str, execution: Execution) -> Evaluation:
    function, digest = import_callable(source, "`evaluate`", execution)
    return Evaluation(source, digest, function, execution)


def evaluate(evaluation: Evaluation, runner: Runner, handle: Handle) -> float:
    """The metric of the runner's build of a model. What the function prints goes to standard error.

    Raises:
        EngineRefused: the engine cannot run the model, the metric is not finite, or the time budget has ended.
        BadOption: the function itself fails, lacks an input of the model, or does not return a number.
    """
    tasks, is_over = SimpleQueue[Any](), threading.Event()

    def computed(sample: Sample) -> Mapping[str, Array]:
        try:
            return runner.outputs(handle, [sample])[0]
        except EngineRefused as refused:
            inputs = load(handle.path).inputs
            if lacking := set(inputs) - sample.keys():
                given = f"`evaluate` {evaluation.source} calls predict without {first_of(sorted(lacking))}"
                raise BadOption(f"{given}: the model has the inputs {', '.join(inputs)}") from refused
            raise

    def predict(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        answers, sample = SimpleQueue[Any](), {name: np.asarray(array) for name, array in inputs.items()}
        tasks.put(lambda: answers.put(computed(sample)))
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
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise BadOption(f"`evaluate` {evaluation.source} returned {type(value).__name__}, not a number")
    number = float(array.reshape(()))
    if not np.isfinite(number):
        raise EngineRefused(Failure("output", f"the metric of {evaluation.source} is {number}"))
    return number


# ---- labels

FORMS = ".npz, .npy, .csv or .txt"


def read_labels(path: Path) -> Array:
    """The labels in a file: numbers, [labels], or vectors, [labels, size].

    A .npy, and the array `labels` of an .npz (or its only one), have the labels along the first axis. A .csv or .txt
    has a number at the end of each line; the first line may be a header."""
    if not path.is_file():
        raise BadData(f"labels {path} not found")
    ending = path.suffix.lower()
    try:
        if ending in (".npz", ".npy"):
            arrays = read_arrays(path, (InputSpec(LABELS, np.dtype(np.float32), ()),))
            if LABELS not in arrays and len(arrays) != 1:
                raise BadData(f"{path} has no array '{LABELS}'; it holds {', '.join(map(repr, arrays))}")
            labels = arrays.get(LABELS, next(iter(arrays.values())))
        elif ending in (".csv", ".txt"):
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            cells = [line.rpartition(",")[2].strip() for line in lines if line.strip()]
            has_header = bool(cells) and cells[0].lower() in (LABELS, "label")
            labels = np.array(cells[1:] if has_header else cells, np.float64)
        else:
            raise BadData(f"labels {path} are in no form that is read: give {FORMS}")
        if labels.dtype.kind not in "biuf":
            raise ValueError(f"they are {labels.dtype}")
    except (OSError, ValueError) as error:
        raise BadData(f"{path}: labels are numbers from 0 or vectors, not names: {one_line(error)}") from error
    if not labels.size or not labels.ndim:
        raise BadData(f"{path} holds no label for each sample")
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise BadData(f"{path}: a label holds NaN or infinite values")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    is_whole = labels.dtype.kind != "f" or bool((labels == labels.astype(np.int64)).all())
    return labels.astype(np.int64 if is_whole else np.float64)


MOST_COUNTED = 1000
"""For an error about missing labels, samples are counted up to this many. Chosen, not measured."""


def paired(labels: Array, samples: Samples, file: str) -> Array:
    """Labels as [samples, rows, ...]: each sample gets as many as its batch has rows."""
    rows = next((array.shape[0] for array in samples.first(1)[0].values() if array.ndim), 1)
    count = sum(1 for _ in samples)
    if len(labels) == count * rows:
        return labels.reshape(count, rows, *labels.shape[1:])
    if len(labels) == count and labels.shape[1:2] == (rows,):
        return labels
    left = 0 if samples.others is None else sum(1 for _ in samples.others(MOST_COUNTED))
    many = str(count + left) if left < MOST_COUNTED else f"at least {count + left}"
    each = "sample" if rows == 1 else f"sample, or for each of its {rows} rows"
    raise BadData(
        f"{file} has {len(labels)} labels, {samples.origin} {many} samples: give one for each {each}, in order"
    )


LabelsLike = str | Path | npt.ArrayLike | Sequence[npt.ArrayLike]
"""Labels: a file, or an array or a list with one for each sample."""


def _metric(value: Any) -> str:
    name, colon, output = str(value).partition(":")
    return one_of(("auto", *METRICS), name) + colon + output


class LabelOptions(Options):
    labels: LabelsLike | None = SOURCE(
        "What is right for each sample of `calibration_data`, in the same order: class numbers from 0, or vectors, "
        f"in {FORMS}. An .npz may hold samples of its own beside its array 'labels': those "
        "that calibration does not see are the fairest.",
        "Data",
        "right answers, one for each sample",
    )
    metric: str = choice(
        ("auto", *METRICS),
        "How outputs are compared with `labels`; without labels, with what the float model says: METRIC, or "
        "METRIC:OUTPUT for an output that is not the first that fits. Higher is better. "
        "top1, top5: the right class has the best score, or one of the best five. cosine: of vectors. auto: top1 where "
        "that fits the shapes, else cosine. Any other metric is a function: `evaluate`.",
        "Data",
        "top1, top5, cosine or auto",
        default="auto",
        convert=_metric,
        metavar="METRIC[:OUTPUT]",
    )

    @property
    def is_labelled(self) -> bool:
        """Whether a metric over labels, without code of the user, is asked for."""
        return self.labels is not None or self.metric != "auto"

    @property
    def label_file(self) -> Path | None:
        """The file of labels; those of Python programs were written to one, too (see `commands.inputs.on_disk`)."""
        return None if self.labels is None else Path(str(self.labels))


def check_metric(evaluate: object, options: LabelOptions) -> None:
    if evaluate is not None and options.is_labelled:
        raise BadOption("`evaluate` is a metric of its own: leave `labels` and `metric` out")


class ScoreOption(Options):
    scores: Names = NAMES(
        "Outputs that hold scores of classes, tokens or pixels, whose best class is compared with the float model's: "
        "NAME or NAME:AXIS, by commas, where AXIS is that of the classes (1 of four, the last of three), or `binary` "
        "where each value says yes (above 0, of probabilities 0.5) or no; or none. Of raw scores of pixels the values "
        "do not tell.",
        "Accuracy",
        default_in_words="what the float model's values show",
        metavar="NAME[:AXIS]",
    )


@dataclass(frozen=True)
class Labelled:
    """A metric over labelled samples. `name` is that of the metric; it reads the model output `output`. `labels` are
    [samples, rows, ...], None if the float model's own outputs serve as labels. `source` names the metric in messages,
    `digest` is 16 hex digits of a hash of labels and samples."""

    source: str
    digest: str
    name: Name
    output: str
    samples: Samples
    labels: Array | None


Metric = Evaluation | Labelled
"""A metric of a model: a function of the user, or one over labels."""


def option_of(metric: Metric) -> str:
    """How messages name a metric: its option and its name."""
    return f"`{'evaluate' if isinstance(metric, Evaluation) else 'metric'}` {metric.source}"


def open_metric(evaluate: object, options: LabelOptions, prepared: Prepared) -> Metric | None:
    """The metric that options name, a function or one over labels; None if they name none."""
    if evaluate is not None:
        return load_evaluation(str(evaluate), prepared.execution)
    return open_labelled(options, prepared) if options.is_labelled else None


def open_labelled(options: LabelOptions, prepared: Prepared) -> Labelled:
    """The metric `metric` (NAME or NAME:OUTPUT) with a file of labels, over the samples of a model; or over those in
    that file, if it is an .npz that also has the inputs of the model."""
    labels, metric, model = options.label_file, options.metric, prepared.shaped
    data, limit = prepared.data.calibration_data, prepared.data.calibration_samples
    asked, colon, output = metric.partition(":")
    if colon and output not in model.outputs:
        raise BadOption(f"`metric` {metric} names no output: the model has {', '.join(model.outputs)}")
    found = None if labels is None else read_labels(labels)
    if labels is not None and labels.suffix.lower() == ".npz":
        names = {spec.name for spec in input_specs(model)}
        data = str(labels) if names <= read_arrays(labels).keys() else data
    if data is None:
        raise BadOption(
            "a metric needs samples: give `calibration_data`, or as `labels` an .npz that holds the inputs and an "
            "array 'labels'"
        )
    most = limit if found is None else len(found) + 1
    how: Any = {"limit": most, "fixed": prepared.fixed, "folders": prepared.data.folders}
    samples = open_samples(data, model, prepared.execution, **how)
    rows = None if labels is None or found is None else paired(found, samples, labels.name)
    outputs = next(outputs_on(model, samples.first(1), execution=prepared.execution))  # before the work of a run begins
    name, of = chosen(asked, outputs, None if rows is None else rows[0], output or None)
    if rows is not None:
        check_classes(name, of, outputs[of], rows)
    title = "metric" if metric == "auto" else metric
    source = f"{title} against the float model" if labels is None else f"{title} on {labels}"
    content = [str(limit)] if rows is None else [str(rows.shape), str(rows.dtype), rows.tobytes().hex()]
    digest = hashlib.sha256("\n".join([title, samples.digest, *content]).encode()).hexdigest()[:16]
    return Labelled(source, digest, name, of, samples, rows)


def measure(metric: Metric, runner: Runner, handle: Handle, floats: Callable[[], Handle]) -> Score:
    """The metric of the runner's build `handle`; raises as `evaluate` does. `floats` gives the build of the float
    model, whose outputs serve as labels where there are none."""
    if isinstance(metric, Evaluation):
        return Score(evaluate(metric, runner, handle), name=metric.source)
    original = handle if metric.labels is not None else floats()
    by_row = list[float]()
    for sample, labels in zip(metric.samples, repeat(None) if metric.labels is None else metric.labels, strict=False):
        outputs = _outputs(runner, handle, sample)
        right = labels
        if right is None:
            reference = outputs if original is handle else _outputs(runner, original, sample)
            right = answer(metric.name, reference[metric.output])
        rows = row_scores(metric.name, answer(metric.name, outputs[metric.output]), right)
        if rows is None and labels is None and right is not None:
            rows = [0.0] * len(right)
        if rows is None:
            raise BadOption(f"{metric.source}: output {metric.output} of one sample has another form than expected")
        by_row += rows
    return Score.of_rows(metric.name, by_row)


def _outputs(runner: Runner, handle: Handle, sample: Sample) -> Mapping[str, Array]:
    outputs = runner.outputs(handle, [sample])
    check_finite(outputs)
    return outputs[0]
