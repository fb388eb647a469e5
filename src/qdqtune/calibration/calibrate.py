"""Ranges of all candidate tensors in one pass over the samples, in memory that does not grow with their number.

Minimum and maximum are reduced inside the graph. The other methods count each tensor's values in a histogram (see
`histograms`), so that no values are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration.histograms import Histogram
from qdqtune.calibration.observe import observe, outputs_on, with_outputs
from qdqtune.calibration.scales import Calibration, Range, Ranges
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.graph.model import Model
from qdqtune.types import NumericFormat, Placement, QType, Sample

ASYMMETRIC = NumericFormat(QType.UINT8, QType.INT8, symmetric=False)
"""The default format to which entropy and mse fit ranges."""


def candidate_tensors(model: Model) -> tuple[str, ...]:
    """The float activations that nodes or outputs of the main graph read, in graph order."""
    made = [*model.inputs, *(o for n in model.nodes for o in n.outputs if o)]

    def can_have_a_range(tensor: str) -> bool:
        info = model.tensors.get(tensor)
        is_filled = info is not None and info.is_float and 0 not in (info.shape or ())
        return is_filled and any(use.slot >= 0 for use in model.uses(tensor))

    return tuple(filter(can_have_a_range, made))


def unknown_ranges(model: Model) -> Ranges:
    """Ranges of all candidate tensors in graph order, which say only that there will be some."""
    return Ranges(dict.fromkeys(candidate_tensors(model), Range(-1.0, 1.0)))


def tensors_with_pairs(model: Model, placement: Placement) -> tuple[str, ...]:
    """The candidate tensors that a placement puts pairs on, in graph order."""
    read = {edge.tensor for edge in placement}
    return tuple(tensor for tensor in candidate_tensors(model) if tensor in read)


def calibrate(
    model: Model,
    samples: Iterable[Sample],
    how: Calibration | None = None,
    *,
    numbers: NumericFormat = ASYMMETRIC,
    tensors: Sequence[str] | None = None,
    execution: Execution = EXECUTION,
) -> Ranges:
    """Ranges of candidate tensors (all, or `tensors`) over all samples, by running the float model on ONNX Runtime.

    A tensor with a NaN or an infinite value (an attention mask, say) gets no range, and so no pair. The methods entropy
    and mse fit ranges to `numbers`.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    how = how or Calibration()
    tensors = candidate_tensors(model) if tensors is None else tensors
    if not tensors:
        return Ranges({})
    if how.method == "minmax":
        ranges = _minmax(model, tensors, samples, execution)
    else:
        histograms = _histograms(model, tensors, samples, execution)
        ranges = {tensor: _chosen(histogram, how, numbers) for tensor, histogram in histograms.items()}
    return Ranges({tensor: each for tensor, each in ranges.items() if each is not None})


def _minmax(
    model: Model, tensors: Sequence[str], samples: Iterable[Sample], execution: Execution
) -> dict[str, Range | None]:
    nodes: list[onnx.NodeProto] = []
    reduced: list[str] = []
    for i, tensor in enumerate(tensors):
        source = tensor
        if model.tensors[tensor].dtype != TensorProto.FLOAT:
            source = f"__range_{i}_float"
            nodes.append(helper.make_node("Cast", [tensor], [source], source, to=TensorProto.FLOAT))
        zeros = f"__range_{i}_zeros"  # x - x keeps a NaN, which minimum and maximum may ignore
        nodes.append(helper.make_node("Sub", [source, source], [zeros], zeros))
        for op, operand in (("ReduceMin", source), ("ReduceMax", source), ("ReduceSum", zeros)):
            reduced.append(f"__range_{i}_{op}")
            nodes.append(helper.make_node(op, [operand], reduced[-1:], reduced[-1], keepdims=0))
    lows, highs = np.full(len(tensors), np.inf), np.full(len(tensors), -np.inf)
    broken = np.zeros(len(tensors), bool)
    for outputs in outputs_on(with_outputs(model, nodes, reduced), samples, execution=execution):
        values = np.asarray([outputs[name] for name in reduced], np.float64).reshape(-1, 3)
        broken |= ~np.isfinite(values).all(axis=1)
        lows, highs = np.fmin(lows, values[:, 0]), np.fmax(highs, values[:, 1])
    ends = zip(tensors, broken.tolist(), lows.tolist(), highs.tolist(), strict=True)
    return {tensor: None if is_broken else Range(low, high) for tensor, is_broken, low, high in ends}


def _histograms(
    model: Model, tensors: Sequence[str], samples: Iterable[Sample], execution: Execution
) -> dict[str, Histogram]:
    histograms = {tensor: Histogram() for tensor in tensors}
    for tensor, values in observe(model, tensors, samples, execution=execution):
        histograms[tensor].add(values)
    return histograms


def _chosen(histogram: Histogram, how: Calibration, numbers: NumericFormat) -> Range | None:
    match how.method:
        case "entropy":
            return histogram.least_divergence(numbers)
        case "mse":
            return histogram.least_error(numbers)
        case "minmax":
            return histogram.whole
        case "percentile":
            return histogram.range(how.percentile)
        case _:
            assert_never(how.method)
