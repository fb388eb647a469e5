"""Ranges of all candidate tensors in one pass over the samples, in memory that does not grow with their number.

Minimum and maximum are reduced inside the graph. The other methods take a histogram per tensor (see `histograms`), so
that no value is ever kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration.histograms import Histogram
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.engines import EngineSpec
from qdqtune.engines.cpu import cores
from qdqtune.engines.runner import Runner
from qdqtune.errors import BadData, BadModel
from qdqtune.graph.files import ConstantFile
from qdqtune.graph.model import Model
from qdqtune.types import Array, Failure, NumericFormat, QType, Sample

Method = Literal["minmax", "percentile", "entropy", "mse"]

ASYMMETRIC = NumericFormat(QType.UINT8, QType.INT8, symmetric=False)
"""The numbers that entropy and mse fit a range to where none are given."""


@dataclass(frozen=True)
class Calibration:
    """How ranges are found.

    minmax: all values. percentile: the share of them given in %, without outliers at both ends. entropy: the least
    divergence of the distribution. mse: the least squared error.
    """

    method: Method = "minmax"
    percentile: float = 99.99

    def __post_init__(self) -> None:
        if not 50 < self.percentile <= 100:
            raise ValueError("percentile lies in (50, 100]")


def candidate_tensors(model: Model) -> tuple[str, ...]:
    """Every float activation that somebody in the main graph uses, in graph order."""
    made = [*model.inputs, *(o for n in model.nodes for o in n.outputs if o)]
    return tuple(t for t in made if (info := model.tensors.get(t)) is not None and info.is_float
                 and 0 not in (info.shape or ()) and any(u.slot >= 0 for u in model.uses(t)))  # fmt: skip


def calibrate(
    model: Model,
    samples: Iterable[Sample],
    how: Calibration | None = None,
    *,
    numbers: NumericFormat = ASYMMETRIC,
    threads: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Ranges:
    """Ranges of all candidate tensors over all samples, by running the float model on ONNX Runtime.

    Tensors that took a NaN or an infinite value (attention masks, say) get no range: no pair can stand there.
    Methods entropy and mse fit ranges to `numbers`. `progress` is told the number of samples done.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    how = how or Calibration()
    tensors = candidate_tensors(model)
    if not tensors:
        return Ranges({})
    with tempfile.TemporaryDirectory(prefix="qdqtune-") as folder:
        if how.method == "minmax":
            found = _minmax(model, tensors, samples, Path(folder), threads, progress)
        else:
            counted = _histograms(model, tensors, samples, Path(folder), threads, progress)
            found = [_chosen(histogram, how, numbers) for histogram in counted]
    return Ranges({t: r for t, r in zip(tensors, found, strict=True) if r is not None})


def watch(model: Model, tensors: Sequence[str], sample: Sample, *, threads: int = 0) -> dict[str, Array]:
    """The values that some tensors take on one sample, by running the float model on ONNX Runtime.

    Raises:
        BadModel: ONNX Runtime cannot run the model.
    """
    watched = onnx.ModelProto()
    watched.CopyFrom(model.proto)
    del watched.graph.output[:]
    for i, tensor in enumerate(tensors):  # graph inputs cannot be outputs as they are
        name = f"__value_{i}"
        watched.graph.node.append(helper.make_node("Identity", [tensor], [name], name))
        watched.graph.output.add(name=name)
    with tempfile.TemporaryDirectory(prefix="qdqtune-") as folder:
        (values,) = _runs(Model(watched, model.large), [sample], Path(folder), threads, lambda _: None)
    return dict(zip(tensors, values, strict=True))


def _minmax(
    model: Model, tensors: Sequence[str], samples: Iterable[Sample], folder: Path, threads: int,
    progress: Callable[[int], None],
) -> list[Range | None]:  # fmt: skip
    reduced = onnx.ModelProto()
    reduced.CopyFrom(model.proto)
    del reduced.graph.output[:]
    for i, tensor in enumerate(tensors):
        source = tensor
        if model.tensors[tensor].dtype != TensorProto.FLOAT:
            source = f"__range_{i}_float"
            reduced.graph.node.append(helper.make_node("Cast", [tensor], [source], source, to=TensorProto.FLOAT))
        zeros = f"__range_{i}_zeros"  # x - x keeps a NaN, which minimum and maximum may pass over
        reduced.graph.node.append(helper.make_node("Sub", [source, source], [zeros], zeros))
        for op, operand in (("ReduceMin", source), ("ReduceMax", source), ("ReduceSum", zeros)):
            name = f"__range_{i}_{op}"
            reduced.graph.node.append(helper.make_node(op, [operand], [name], name, keepdims=0))
            reduced.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
    lows, highs = np.full(len(tensors), np.inf), np.full(len(tensors), -np.inf)
    broken = np.zeros(len(tensors), bool)
    for outputs in _runs(Model(reduced, model.large), samples, folder, threads, progress):
        values = np.asarray(outputs, np.float64).reshape(-1, 3)
        broken |= ~np.isfinite(values).all(axis=1)
        lows, highs = np.fmin(lows, values[:, 0]), np.fmax(highs, values[:, 1])
    return [None if b else Range(float(lo), float(hi)) for b, lo, hi in zip(broken, lows, highs, strict=True)]


def _chosen(histogram: Histogram, how: Calibration, numbers: NumericFormat) -> Range | None:
    match how.method:
        case "entropy":
            return histogram.least_divergence(numbers)
        case "mse":
            return histogram.least_error(numbers)
    return histogram.range(how.percentile)


def _histograms(
    model: Model, tensors: Sequence[str], samples: Iterable[Sample], folder: Path, threads: int,
    progress: Callable[[int], None],
) -> list[Histogram]:  # fmt: skip
    histograms = [Histogram() for _ in tensors]
    for outputs in _runs(_showing(model, tensors), samples, folder, threads, progress):
        for histogram, values in zip(histograms, outputs, strict=True):
            histogram.add(values)
    return histograms


def observed(
    model: Model, tensors: Sequence[str], samples: Iterable[Sample], *, threads: int = 0
) -> Iterator[dict[str, Array]]:
    """The float32 values that some tensors take, sample by sample.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    with tempfile.TemporaryDirectory(prefix="qdqtune-") as folder:
        for outputs in _runs(_showing(model, tensors), samples, Path(folder), threads, lambda _: None):
            yield dict(zip(tensors, outputs, strict=True))


def _showing(model: Model, tensors: Sequence[str]) -> Model:
    """The model with the values of `tensors` as its outputs, in float32."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model.proto)
    del shown.graph.output[:]
    for i, tensor in enumerate(tensors):  # graph inputs cannot be outputs as they are
        name = f"__value_{i}"
        shown.graph.node.append(helper.make_node("Cast", [tensor], [name], name, to=TensorProto.FLOAT))
        shown.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return Model(shown, model.large)


def _runs(
    model: Model, samples: Iterable[Sample], folder: Path, threads: int, progress: Callable[[int], None]
) -> Iterator[list[Array]]:
    """All outputs of the model, sample by sample."""
    path = folder / "calibration.onnx"
    with ConstantFile(folder / "constants.bin") as constants:
        constants.save(model, path)
    done = 0
    spec = EngineSpec("onnxruntime", {"threads": threads or cores()})
    with Runner(spec, time_limit_s=3600, log_dir=folder) as runner:
        handle = runner.load(path)
        for sample in samples:
            outputs = handle if isinstance(handle, Failure) else runner.outputs(handle, [sample])
            if isinstance(outputs, Failure):
                raise BadModel(f"calibration cannot run the model: {outputs.reason}")
            yield [outputs[0][name] for name in model.outputs]
            done += 1
            progress(done)
    if not done:
        raise BadData("the calibration data hold no sample")
