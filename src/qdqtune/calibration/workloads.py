"""Workloads: calls with inputs of different shapes, and the share of each in all calls."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqtune.calibration.samples import read_arrays, read_sample
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import as_workloads
from qdqtune.engines.tensorrt.options import Span
from qdqtune.errors import BadOption
from qdqtune.graph.model import Model
from qdqtune.options import WORDS, Option, check_name, text_of, texts_of
from qdqtune.types import Mix, Workload


@dataclass(frozen=True)
class WorkloadFile:
    """A file with the input arrays of one kind of call, and the weight of these calls among all."""

    path: Path
    weight: float = 1.0

    @property
    def name(self) -> str:
        return self.path.stem

    def __str__(self) -> str:
        return f"{self.path}:{self.weight:g}"


def _file(text: str) -> WorkloadFile:
    """A workload from the text FILE:WEIGHT; the weight is 1 if left out."""
    file, colon, weight = check_name(text).rpartition(":")
    if not colon or Path(text).exists():
        return WorkloadFile(Path(text))
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not file or not 0 < number < math.inf:
        raise ValueError(f"{text!r} has no weight above zero: give FILE:0.8, its share of the calls")
    return WorkloadFile(Path(file), number)


def _workloads(value: Any) -> tuple[WorkloadFile, ...]:
    if isinstance(value, Mapping):
        return tuple(_file(f"{file}:{weight}") for file, weight in value.items())
    return tuple(one if isinstance(one, WorkloadFile) else _file(text_of(one)) for one in texts_of(value))


WORKLOADS = WORDS(
    "An .npz of inputs as one call has them, and the share of the calls that are such: decode.npz:0.8. Repeatable: "
    "what counts is the mean time of all calls. Without `calibration_data` these are the samples, too.",
    "Data",
    default=None,
    convert=_workloads,
    flags="--workload",
    metavar="FILE:WEIGHT",
    reads=lambda file: [file.path],
)


WorkloadsOption = Option[tuple[WorkloadFile, ...]]


def open_workloads(files: Sequence[WorkloadFile], model: Model, fixed: Collection[str], execution: Execution) -> Mix:
    """Read the workloads of a model. Arrays of `fixed` inputs are ignored."""
    names = [file.name for file in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadOption(
            f"`workloads` has {twice!r} more than once, and results are listed by name: rename a file, or give it once "
            "with the sum of its weights"
        )
    workloads = [Workload(read_sample(f.path, model, fixed, execution), f.weight, f.name) for f in files]
    return as_workloads(tuple(workloads))


def workload_digest(workload: Workload) -> str:
    """16 hex digits of a workload's arrays."""
    digest = hashlib.sha256()
    for name, array in sorted(workload.inputs.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def description(mix: Mix) -> str:
    """Name, share and digest of each workload, as a run records them."""
    return ", ".join(f"{w.name} {w.share:.4g} ({workload_digest(w)})" for w in mix)


def spans_of(files: Sequence[WorkloadFile], fixed: Collection[str]) -> dict[str, Span]:
    """The smallest, the most frequent and the largest shape of each input, except those `fixed` or of several ranks."""
    shapes = {file: {name: a.shape for name, a in read_arrays(file.path).items()} for file in files}
    spans = {}
    for name, usual in shapes[max(files, key=lambda file: file.weight)].items():
        sizes = [named[name] for named in shapes.values() if name in named]
        if name in fixed or any(len(size) != len(usual) for size in sizes):
            continue  # other ranks are refused when the model is known
        by_axis = list(zip(*sizes, strict=True))
        spans[name] = Span(tuple(map(min, by_axis)), usual, tuple(map(max, by_axis)))
    return spans
