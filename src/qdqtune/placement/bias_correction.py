"""Bias correction: what quantizing a layer does to the mean of its outputs, taken back in its bias.

Weights that are rounded and inputs that are clipped move the mean of an output channel; behind it everything sees the
move. After Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv 1906.04721,
section 4.2), with the means of calibration samples. Here is what layers there are, and what their means say; who runs
them is `measurement.adjustable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import COMPUTE, CONVOLUTIONS, is_float
from qdqtune.types import Array, Placement


@dataclass(frozen=True)
class Layer:
    """A compute operator and the constant vector that is added to its result: input `slot` of node `node`.

    `node` is the operator itself, or the Add behind a MatMul. What it makes, `result`, has `channels` channels: along
    axis 1 if it is one of convolutions, whose `rank` it has, else along its last axis.
    """

    node: str
    slot: int
    result: str
    channels: int
    rank: int | None = None


def layers(model: Model, placement: Placement) -> tuple[Layer, ...]:
    """Those whose input and weight carry pairs, in graph order."""
    return tuple(found for node in model.nodes if (found := layer_at(model, placement, node)) is not None)


def layer_at(model: Model, placement: Placement, node: Node) -> Layer | None:
    """The layer whose bias a node adds; None if it adds none and can have none, or if the layer is in float."""
    if node.domain or not is_float(model, node.outputs[0]):
        return None
    if node.op == "Add":
        return _behind_product(model, placement, node)
    shape = _weight(model, placement, node)
    bias = model.constants.get(node.inputs[2]) if len(node.inputs) > 2 else None
    is_free = len(node.inputs) < 3 or not node.inputs[2] or (bias is not None and len(bias.shape) == 1)
    is_plain = all(node.attributes.get(a, 1.0) == 1.0 for a in ("alpha", "beta"))
    if shape is None or not is_free or not is_plain:
        return None
    if node.op in CONVOLUTIONS:
        channels = shape[0] if node.op == "Conv" else shape[1] * node.attributes.get("group", 1)
        return Layer(node.name, 2, node.outputs[0], channels, len(shape))
    if node.op == "Gemm":
        return Layer(node.name, 2, node.outputs[0], shape[0 if node.attributes.get("transB", 0) else 1])
    return None


def _behind_product(model: Model, placement: Placement, add: Node) -> Layer | None:
    """An Add of a constant vector behind a MatMul."""
    for slot, tensor in enumerate(add.inputs):
        bias, maker = model.constants.get(tensor), model.maker(add.inputs[1 - slot])
        if bias is None or maker is None or maker.op != "MatMul":
            continue
        shape = _weight(model, placement, maker)
        fits = shape is not None and len(shape) == 2 and bias.shape == shape[1:]
        if fits and add.into[slot] not in placement:
            return Layer(add.name, slot, add.outputs[0], bias.shape[0])
    return None


def _weight(model: Model, placement: Placement, node: Node) -> tuple[int, ...] | None:
    """The shape of the constant weight of a compute operator, if it and the input carry pairs."""
    weight = model.constants.get(node.inputs[1]) if node.op in COMPUTE and not node.domain else None
    both = all(edge in placement for edge in node.into[:2])
    return weight.shape if weight is not None and both else None


def shrunk_mean(moves: Array) -> Array:
    """What to add to a bias: the mean of what each sample [samples, channels] misses.

    A mean of few samples is luck in part: it is shrunk by the share of its square that its own standard error explains
    (the positive-part estimator of James and Stein, 1961, channel by channel).
    """
    shift = moves.mean(axis=0)
    if len(moves) > 1:
        error = moves.var(axis=0, ddof=1) / len(moves)
        with np.errstate(divide="ignore", invalid="ignore"):
            kept = np.where(shift == 0, 0.0, np.maximum(1 - error / np.square(shift), 0))
        shift = shift * kept
    return np.asarray(shift)


def by_layer(found: tuple[Layer, ...], shift: Array) -> Iterator[tuple[Layer, Array]]:
    """Each layer and its part of a vector over the channels of all."""
    end = 0
    for layer in found:
        end += layer.channels
        yield layer, shift[end - layer.channels : end]
