"""What a notebook holds in memory, as what the package reads: models, samples and metrics."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt
import onnx

from qdqtune.errors import BadData, BadModel, BadOption, one_line
from qdqtune.measurement.metric import Predict

PROTOBUF_LIMIT = 2**31 - 2**24
"""Bytes that a single ONNX file may hold, with some room."""

ModelLike = str | Path | onnx.ModelProto
"""A model: where it lies, or itself."""

Batch = Mapping[str, npt.ArrayLike] | npt.ArrayLike
"""Arrays by name of input, or the array of the only one: a sample, or several along a first axis."""

SamplesLike = str | Path | Batch | Iterable[Batch] | Callable[[], Iterable[Batch]]
"""Samples: a dictionary of arrays, dictionaries one after the other, a function that gives them, or a source that the
command line takes (a file, a folder, module:callable)."""

WorkloadsLike = Sequence[str] | Mapping[str | Path, float | tuple[Mapping[str, npt.ArrayLike], float]]
"""Calls of different shapes: weights by file, arrays and their weight by name, or as the command line has it."""

MetricLike = str | Callable[[Predict], float]
"""A metric: a function, or module:callable."""


def model_file(model: ModelLike, folder: Path, name: str = "model") -> Path:
    """Where a model lies; one that is in memory is written to the folder.

    Raises:
        BadModel: it is no model.
    """
    if isinstance(model, str | Path):
        return Path(model)
    if not isinstance(model, onnx.ModelProto):
        raise BadModel(f"a model is a path or an onnx.ModelProto, not {type(model).__name__}")
    path = folder / f"{name}.onnx"
    large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > PROTOBUF_LIMIT
    copy = deepcopy(model)  # with large weights `save` would move them out of the user's own
    onnx.save(copy, path, save_as_external_data=large, location=f"{path.name}.data" if large else None)
    return path


def sample_source(samples: SamplesLike | None, folder: Path, limit: int | None = None) -> str | None:
    """The source of samples that are in memory, written to the folder one by one; at most `limit` are taken.

    Files have the same bytes for the same arrays, so that a run goes on where it was.

    Raises:
        BadData: they are no samples, or there is none.
    """
    if samples is None or isinstance(samples, str):
        return samples
    if isinstance(samples, Path):
        return str(samples)
    target = folder / "samples"
    target.mkdir()
    if _is_batch(samples):
        return str(_write(samples, target / "samples"))
    items = samples() if callable(samples) else samples
    if not isinstance(items, Iterable):
        raise BadData(f"samples are dictionaries of arrays, not {type(items).__name__}")
    if _is_batch(items):
        return str(_write(items, target / "samples"))
    count = 0
    for count, item in enumerate(islice(items, limit), 1):
        if not _is_batch(item):
            raise BadData(f"sample {count} is {type(item).__name__}: give a dictionary of arrays by name of input")
        _write(item, target / f"{count:08}")
    if not count:
        raise BadData("the calibration data gives no sample: an exhausted generator?")
    return str(target)


def workload_files(workloads: WorkloadsLike | None, folder: Path) -> dict[str, object]:
    """The keyword of workloads as the command line takes it; those that are in memory are written to the folder.

    Raises:
        BadData: they are no arrays.
        BadOption: one has no weight.
    """
    if workloads is None or not isinstance(workloads, Mapping):
        return {} if workloads is None else {"workload": workloads}
    texts = []
    for name, given in workloads.items():
        file: object = name
        weight: object = given
        if isinstance(given, tuple):
            if len(given) != 2 or not isinstance(given[0], Mapping):
                raise BadOption(f"workload {name!r} is (arrays by name of input, weight)")
            target = folder / "workloads"
            target.mkdir(exist_ok=True)
            arrays, weight = given
            file = _write(arrays, target / str(name))
        texts.append(f"{file}:{weight}")
    return {"workload": texts}


def _is_batch(item: object) -> bool:
    return isinstance(item, Mapping | np.ndarray) or hasattr(item, "__array__")


def _write(batch: object, path: Path) -> Path:
    try:
        if not isinstance(batch, Mapping):
            np.save(path.with_suffix(".npy"), np.asarray(batch), allow_pickle=False)
            return path.with_suffix(".npy")
        with ZipFile(path.with_suffix(".npz"), "w") as archive:  # numpy.savez takes no array that is named "file"
            for name, array in batch.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
    except (ValueError, TypeError) as error:
        raise BadData(f"samples are arrays of numbers: {one_line(error)}") from error
    return path.with_suffix(".npz")


@contextmanager
def metric_source(metric: MetricLike | None) -> Iterator[str | None]:
    """The name under which a function can be imported as a metric; another one when its code is another.

    Raises:
        BadOption: it is no function.
    """
    if metric is None or isinstance(metric, str):
        yield metric
        return
    if not callable(metric):
        raise BadOption(f"evaluate is a function or 'module:callable', not {type(metric).__name__}")
    label = getattr(metric, "__name__", type(metric).__name__)
    module = ModuleType(f"{label if label.isidentifier() else 'metric'}_{_digest(metric)}")
    module.__dict__["metric"] = metric
    sys.modules[module.__name__] = module
    try:
        yield f"{module.__name__}:metric"
    finally:
        del sys.modules[module.__name__]


def _digest(function: Callable[..., object]) -> str:
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        text = repr(function) if code is None else f"{code.co_code!r}{code.co_consts!r}{code.co_names!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]
