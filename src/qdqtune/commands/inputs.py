"""Writes models, samples and metrics of Python programs to files that the package reads, checks which files the options
of a command may write, and finds the samples that options name."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any, TypeVar
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt
import onnx

from qdqtune.calibration.options import DataOptions
from qdqtune.calibration.prepare import MOST_JUDGED, Data, Prepared, prepare
from qdqtune.calibration.samples import LABELS, files_named
from qdqtune.calibration.user_code import checked_count, read_in_thread
from qdqtune.calibration.workloads import WorkloadFile, spans_of
from qdqtune.commands import torch_export
from qdqtune.commands.torch_export import PROTOBUF_LIMIT, Module
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import EXECUTION, TIME_LIMIT, Execution
from qdqtune.engines.tensorrt.options import libraries_in, spans, timing_cache, usual_shapes, with_spans
from qdqtune.errors import BadData, BadModel, BadOption, one_line
from qdqtune.graph.model import Model
from qdqtune.graph.model_folder import model_in
from qdqtune.numerics.metrics import LabelOptions, Predict
from qdqtune.options import REQUIRED, SOURCE, VALUES, File, Option, Options, options_of
from qdqtune.system.checks import Output, check_outputs
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.finished import data_beside
from qdqtune.tuning.options import MODEL as MODEL
from qdqtune.tuning.settings import Settings

ModelLike = str | Path | onnx.ModelProto | Module
"""A model: a path (of a file, or of a folder that holds one), the model itself, or a module of PyTorch."""

MetricLike = str | Callable[[Predict], float]
"""A metric: a function, or module:callable."""

IN_MEMORY = ("model", "quantized", "calibration_data", "evaluate", "labels")
"""Options whose value may be a Python object."""

T = TypeVar("T", bound=Options)


def model_file(model: ModelLike, folder: Path, name: str = "model", example_inputs: object = None) -> Path:
    """The path of a model. One in memory is written to `folder`, a PyTorch module is exported with `example_inputs`."""
    if isinstance(model, str | Path):
        return model_in(Path(model))
    path = folder / f"{name}.onnx"
    if torch_export.is_module(model):
        torch_export.export(model, example_inputs, path)
        return path
    if not isinstance(model, onnx.ModelProto):
        raise BadModel(f"a model is a path, an onnx.ModelProto or a torch.nn.Module, not {type(model).__name__}")
    large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > PROTOBUF_LIMIT
    copy = deepcopy(model)  # with large weights `save` would move them out of the user's own
    onnx.save(copy, path, save_as_external_data=large, location=f"{path.name}.data" if large else None)
    return path


def sample_source(samples: Any, folder: Path, execution: Execution, limit: int | None = None) -> str:
    """The text that names a source of samples. Arrays in memory are written to the folder one by one, at most `limit`
    samples. A generator runs in its own thread, within the time limits of `execution`.

    Equal arrays give equal files, so that a stopped run can continue.
    """
    target = folder / "samples"
    target.mkdir()
    if _is_batch(samples):
        return str(_write(samples, target / "samples"))
    origin = "calibration_data"
    items = next(read_in_thread(lambda: iter([samples()]), origin, execution)) if callable(samples) else samples
    if not isinstance(items, Iterable):
        raise BadData(f"samples are dictionaries of arrays, not {type(items).__name__}")
    if _is_batch(items):
        return str(_write(items, target / "samples"))
    most = None if isinstance(items, Sequence) else limit  # of a whole list, those at even distances are chosen later
    count, given = 0, read_in_thread(lambda: islice(items, most), origin, execution)
    for count, item in enumerate(given if limit is not None else checked_count(given, origin), 1):
        if not _is_batch(item) and not isinstance(item, list):
            raise BadData(f"sample {count} is {type(item).__name__}: give a dictionary of arrays by name of input")
        _write(item, target / f"{count:08}")
    if not count:
        raise BadData("the calibration data gives no sample: an exhausted generator?")
    return str(target)


class ModelOption(Options, kw_only=False):
    """The model of a command: a path; in a program any `ModelLike`, which `on_disk` writes to a file."""

    model: File = MODEL("The ONNX file, or a folder that holds one.", default=REQUIRED, metavar="MODEL")


FIXED = VALUES(
    "An input that tune made constant: files that still have it get this value. Repeatable.",
    "Model",
    flags="--fix-input",
)
"""An option of commands that read files which `tune` may have written."""


def execution_of(options: Options, begun: float | None = None) -> Execution:
    """The time limits in options, if they have them: `time_limit` of each request to an engine and of reading samples,
    and `time_budget` of the whole run, from `begun` (of `time.monotonic`) or from now on."""
    seconds, budget = getattr(options, "time_limit", TIME_LIMIT), getattr(options, "time_budget", None)
    ends = None if budget is None else budget + (monotonic() if begun is None else begun)
    return Execution(seconds, ends)


class MetricOptions(LabelOptions, DataOptions):
    evaluate: Option[str | None] = SOURCE(
        "Your metric, higher is better: callable(predict) -> number, where predict takes {input: array} and returns "
        "{output: array}. Also path/to/file.py:callable.",
        "Accuracy",
        "your own function, higher is better",
        metavar="MODULE:CALLABLE",
        reads=files_named,
    )

    @property
    def has_metric(self) -> bool:
        return self.evaluate is not None or self.is_labelled


@contextmanager
def on_disk(options: T, execution: Execution = EXECUTION) -> Iterator[T]:
    """Yield the options with Python objects (models, samples, metrics) replaced by files in a temporary folder.

    Samples are read within the time limits of `execution`. The `example_inputs` of a PyTorch module also set the sizes
    at which it is measured, unless options do.
    """
    given = {name: getattr(options, name, None) for name in IN_MEMORY}
    examples = getattr(options, "example_inputs", None)
    if examples is not None and not torch_export.is_module(given.get("model")):
        raise BadOption("`example_inputs` is for a torch.nn.Module: samples are given as `calibration_data`")
    with temporary_folder() as folder, metric_source(given.get("evaluate")) as metric:
        known: dict[str, Any] = {}
        for name, value in given.items():
            if isinstance(value, str | Path | Settings | None):
                continue
            if name == "evaluate":
                known[name] = metric
            elif name == "calibration_data":
                known[name] = sample_source(value, folder, execution, getattr(options, "calibration_samples", None))
            elif name == "labels":
                path = folder / f"{LABELS}.npy"
                try:
                    np.save(path, _array([np.asarray(label) for label in value]))
                except (TypeError, ValueError) as error:
                    told = "labels are an array or a list with one for each sample"
                    raise BadData(f"{told}: {one_line(error)}") from error
                known[name] = path
            else:
                known[name] = model_file(value, folder, name, examples)
        is_fed = given.get("calibration_data") is not None or getattr(options, "workloads", None)
        if torch_export.is_module(given.get("model")) and not is_fed and getattr(options, "input_shapes", None) == {}:
            known["input_shapes"] = torch_export.example_shapes(known["model"], given["model"], examples)
        yield replace(options, **known)


def _is_batch(item: object) -> bool:
    return isinstance(item, Mapping | np.ndarray) or hasattr(item, "__array__")


def _write(batch: object, path: Path) -> Path:
    try:
        if not isinstance(batch, Mapping):
            np.save(path.with_suffix(".npy"), _array(batch), allow_pickle=False)
            return path.with_suffix(".npy")
        with ZipFile(path.with_suffix(".npz"), "w") as archive:  # numpy.savez takes no array that is named "file"
            for name, array in batch.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, _array(array), allow_pickle=False)
    except (ValueError, TypeError) as error:
        raise BadData(f"samples are arrays of numbers or strings: {one_line(error)}") from error
    return path.with_suffix(".npz")


def _array(values: object) -> npt.NDArray[np.generic]:
    array = np.asarray(values)
    if array.dtype.kind == "O":
        raise ValueError("one holds Python objects; convert it with array.astype(numpy.float32), say")
    return array


@contextmanager
def metric_source(metric: MetricLike | None) -> Iterator[str | None]:
    """Yield `metric`; for a function a name by which it can be imported, which changes with the function's code."""
    if metric is None or isinstance(metric, str):
        yield metric
        return
    if not callable(metric):
        raise BadOption(f"evaluate is a function or 'module:callable', not {type(metric).__name__}")
    try:
        text = inspect.getsource(metric)
    except (OSError, TypeError):
        code = getattr(metric, "__code__", None)
        text = repr(metric) if code is None else f"{code.co_code!r}{code.co_consts!r}{code.co_names!r}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    label = getattr(metric, "__name__", type(metric).__name__)
    module = ModuleType(f"{label if label.isidentifier() else 'metric'}_{digest}")
    module.__dict__["metric"] = metric
    sys.modules[module.__name__] = module
    try:
        yield f"{module.__name__}:metric"
    finally:
        del sys.modules[module.__name__]


def check_options(options: Options) -> None:
    """Raise an error if a command must not write the files that its options name, or that it writes by default."""
    outputs, of_engine = list[Output](), getattr(options, "engine_options", None) or {}
    inputs = {"plugin libraries": [Path(library) for library in libraries_in(of_engine)]}
    for name, own in options_of(type(options)).items():
        value = getattr(options, name)
        if own.writes is not None:
            outputs += own.writes(value, f"`{name}`", options)
        if own.reads is not None:
            for one in value if isinstance(value, tuple) else [value]:
                if isinstance(one, str | Path | WorkloadFile):
                    what = f"file of `{name}`" if own.group else "model"
                    inputs.setdefault(what, []).extend(own.reads(one))
    if isinstance(cache := of_engine.get("timing_cache"), str | Path):
        outputs += timing_cache(Path(cache), "`engine_options` timing_cache")
    if outputs:
        check_outputs(outputs, inputs)


def prepared_for(
    model: Model,
    spec: EngineSpec,
    options: DataOptions,
    execution: Execution,
    files: Iterable[Path] = (),
    *,
    fixed: Collection[str] = (),
    most: int = MOST_JUDGED,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Prepared:
    """A model for an engine, and the samples that options name, in files (see `on_disk`): see `prepare`.

    If options name none and one of `files` is in the folder of a run: that run's samples. Random samples have `shapes`,
    or the sizes that the engine tunes for, unless the user sets others.
    """
    files, source = tuple(files), options.calibration_data
    data = Data(
        source,
        options.calibration_samples,
        options.input_shapes,
        options.seed,
        tuple(getattr(options, "workloads", ())),
        tuple(dict.fromkeys(file.parent for file in files)),
    )
    if source is None and not data.input_shapes and not data.workloads:
        beside = next(filter(None, (data_beside(file, execution) for file in files)), None)
        if beside is None:
            data = replace(data, input_shapes=shapes or usual_shapes(spec, None))
        else:
            data = replace(beside, calibration_samples=data.calibration_samples, seed=data.seed, workloads=())
    return prepare(model, data, execution, fixed=fixed, most=most)


def built_for(spec: EngineSpec, workloads: Sequence[WorkloadFile], fixed: Collection[str] = ()) -> EngineSpec:
    """`spec` with the range of input sizes over all workloads, if the engine takes ranges and the user set none."""
    if not spec.facts.is_tensorrt or not workloads or spans(spec):
        return spec
    return with_spans(spec, spans_of(workloads, fixed))
