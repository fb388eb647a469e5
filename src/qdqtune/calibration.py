"""Ranges of all candidate tensors in one pass over the samples, in memory that does not grow with their number.

Minimum and maximum are reduced inside the graph. Percentiles come from a histogram per tensor whose bins double in
width when a value falls outside, so that no value is ever kept.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.data import Array, Sample
from qdqtune.engines import EngineSpec
from qdqtune.errors import BadData, BadModel
from qdqtune.graph import ConstantFile, Model
from qdqtune.runner import Runner
from qdqtune.scales import Range, Ranges
from qdqtune.types import Failure

Method = Literal["minmax", "percentile"]


@dataclass(frozen=True)
class Calibration:
    """How ranges are found. `percentile` is the share of values, in %, that the range of method percentile holds."""

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
    threads: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Ranges:
    """Ranges of all candidate tensors over all samples, by running the float model on ONNX Runtime.

    Tensors that took a NaN or an infinite value (attention masks, say) get no range: no pair can stand there.
    `progress` is told the number of samples done.

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
            found = _percentile(model, tensors, samples, Path(folder), threads, progress, how.percentile)
    return Ranges({t: r for t, r in zip(tensors, found, strict=True) if r is not None})


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


def _percentile(
    model: Model, tensors: Sequence[str], samples: Iterable[Sample], folder: Path, threads: int,
    progress: Callable[[int], None], percentile: float,
) -> list[Range | None]:  # fmt: skip
    watched = onnx.ModelProto()
    watched.CopyFrom(model.proto)
    del watched.graph.output[:]
    for i, tensor in enumerate(tensors):  # graph inputs cannot be outputs as they are
        name = f"__value_{i}"
        watched.graph.node.append(helper.make_node("Cast", [tensor], [name], name, to=TensorProto.FLOAT))
        watched.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    histograms = [Histogram() for _ in tensors]
    for outputs in _runs(Model(watched, model.large), samples, folder, threads, progress):
        for histogram, values in zip(histograms, outputs, strict=True):
            histogram.add(values)
    return [h.range(percentile) for h in histograms]


def _runs(
    model: Model, samples: Iterable[Sample], folder: Path, threads: int, progress: Callable[[int], None]
) -> Iterator[list[Array]]:
    """All outputs of the model, sample by sample."""
    path = folder / "calibration.onnx"
    with ConstantFile(folder / "constants.bin") as constants:
        constants.save(model, path)
    done = 0
    spec = EngineSpec("onnxruntime", {"threads": threads or _cores()})
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


class Histogram:
    """Counts of values in 2 x 2048 equal bins around zero; the bins double in width when a value falls outside."""

    BINS = 2048

    def __init__(self) -> None:
        self._counts = np.zeros(2 * self.BINS, np.int64)
        self._width = 0.0
        self._low, self._high = np.inf, -np.inf
        self._broken = False

    def add(self, values: Array) -> None:
        """Count all values of one array."""
        flat = values.reshape(-1).astype(np.float64)
        if not flat.size or self._broken:
            return
        low, high = float(flat.min()), float(flat.max())
        self._broken = not (np.isfinite(low) and np.isfinite(high))
        if self._broken:
            return
        self._low, self._high = min(self._low, low), max(self._high, high)
        top = max(-self._low, self._high)
        if self._width == 0.0 and top > 0:
            self._width = float(2.0 ** np.ceil(np.log2(top / self.BINS)))
        while top > self._width * self.BINS:
            self._double()
        if self._width == 0.0:
            self._counts[self.BINS] += flat.size
            return
        index = np.clip(np.floor(flat / self._width).astype(np.int64) + self.BINS, 0, 2 * self.BINS - 1)
        self._counts += np.bincount(index, minlength=2 * self.BINS)

    def _double(self) -> None:
        merged = self._counts.reshape(-1, 2).sum(axis=1)
        self._counts[:] = 0
        self._counts[self.BINS // 2 : self.BINS // 2 + self.BINS] = merged
        self._width *= 2

    def range(self, percentile: float) -> Range | None:
        """The interval that leaves out half of (100 - percentile) % of the values at each end; None if not finite."""
        if self._broken or not self._counts.any():
            return None
        tail = (100 - percentile) / 200 * self._counts.sum()
        below, above = np.cumsum(self._counts), np.cumsum(self._counts[::-1])
        first = int(np.searchsorted(below, tail, side="right"))
        last = 2 * self.BINS - 1 - int(np.searchsorted(above, tail, side="right"))
        low, high = (first - self.BINS) * self._width, (last + 1 - self.BINS) * self._width
        return Range(max(low, self._low), min(max(high, max(low, self._low)), self._high))


def _cores() -> int:
    """Cores that this process may use; more threads than that would wait for each other."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
