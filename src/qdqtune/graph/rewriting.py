"""What scales and shifts channels behind a convolution or a product, drawn into its weights and bias.

No output changes beyond rounding, and less is left to quantize. Engines do the same with float weights, and cannot
where these come out of a DequantizeLinear: there a BatchNormalization would run by itself, between roundings that need
not be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import onnx

from qdqtune.graph.folding import Names, names_in
from qdqtune.graph.model import Constant, Model, Node, rebuild
from qdqtune.graph.operators import ARITHMETIC, COMPUTE
from qdqtune.types import Array


@dataclass(frozen=True, eq=False)
class _Layer:
    """A node whose output is that of its own weights times `scale`, plus `shift`: float64 vectors [channels].

    `output` is the tensor that has taken in all of it.
    """

    node: Node
    output: str
    scale: Array
    shift: Array


@dataclass(frozen=True, eq=False)
class _Affine:
    """A node that multiplies the channels of a tensor and adds to them: one number, or one a channel."""

    source: str
    scale: Array
    shift: Array


def folded(model: Model) -> Model:
    """`model` with BatchNormalization, and arithmetic with one constant or one a channel, drawn into the Conv,
    ConvTranspose or Gemm in front.

    The layer writes under the name of what it has taken in, so that edges behind keep their names; so do its weights.
    What somebody else reads too, or leaves the graph between, stays as it is.
    """
    layers: dict[str, _Layer] = {}
    gone: set[int] = set()
    for node in model.nodes:
        if (layer := _layer(model, node)) is not None:
            layers[layer.output] = layer
            continue
        for affine in _affine(model, node, layers):
            before = layers.pop(affine.source)
            scale, shift = before.scale * affine.scale, before.shift * affine.scale + affine.shift
            layers[node.outputs[0]] = replace(before, output=node.outputs[0], scale=scale, shift=shift)
            gone.add(node.index)
    changed = {layer.node.index: layer for layer in layers.values() if layer.output != layer.node.outputs[0]}
    return _written(model, changed, gone) if changed else model


def _layer(model: Model, node: Node) -> _Layer | None:
    """A layer as it stands, if its weights and its bias are constants that can take in more."""
    if node.op not in COMPUTE - {"MatMul"} or node.domain or node.inputs[1] not in model.constants:
        return None
    shape = model.constants[node.inputs[1]].shape
    match node.op:
        case "Gemm":
            channels = shape[0 if node.attributes.get("transB", 0) else 1]
        case "ConvTranspose":
            channels = shape[1] * node.attributes.get("group", 1)
        case _:
            channels = shape[0]
    bias = np.zeros(1)
    if len(node.inputs) > 2 and node.inputs[2]:
        constant = model.constants.get(node.inputs[2])
        if constant is None or constant.shape not in ((), (1,), (channels,), (1, channels)):
            return None
        bias = constant.array().astype(np.float64).reshape(-1) * node.attributes.get("beta", 1.0)
    return _Layer(node, node.outputs[0], np.ones(channels), np.broadcast_to(bias, channels))


def _affine(model: Model, node: Node, layers: dict[str, _Layer]) -> Iterator[_Affine]:
    """What `node` does to the channels of one of `layers` whose output nobody else reads; nothing if it is not that."""
    sources = [t for t in dict.fromkeys(node.inputs) if t in layers and len(model.uses(t)) == 1]
    others = [model.constants[t] for t in node.inputs if t in model.constants]
    if node.domain or len(sources) != 1 or len(others) != len(node.inputs) - 1:
        return
    (source,) = sources
    layer = layers[source]
    if node.op == "BatchNormalization" and node.inputs[0] == source:
        if not node.attributes.get("training_mode", 0) and all(c.shape == layer.scale.shape for c in others):
            gamma, beta, mean, variance = (c.array().astype(np.float64) for c in others)
            scale = gamma / np.sqrt(variance + node.attributes.get("epsilon", 1e-5))
            yield from _finite(source, scale, beta - mean * scale)
    elif node.op in ARITHMETIC and (value := _by_channel(model, layer, others[0])) is not None:
        one, zero = np.ones(1), np.zeros(1)
        match node.op, node.inputs[0] == source:
            case "Mul", _:
                yield from _finite(source, value, zero)
            case "Add", _:
                yield from _finite(source, one, value)
            case "Sub", True:
                yield from _finite(source, one, -value)
            case "Sub", False:
                yield from _finite(source, -one, value)
            case "Div", True if value.all():
                yield from _finite(source, 1 / value, zero)


def _finite(source: str, scale: Array, shift: Array) -> Iterator[_Affine]:
    if np.isfinite(scale).all() and np.isfinite(shift).all():
        yield _Affine(source, scale, shift)


def _by_channel(model: Model, layer: _Layer, constant: Constant) -> Array | None:
    """An operand as one number, or as one a channel of a layer's output; None if it varies otherwise."""
    rank = len(model.constants[layer.node.inputs[1]].shape)
    sizes = (*(1,) * (rank - len(constant.shape)), *constant.shape)
    if len(sizes) != rank or sizes not in ((1,) * rank, (1, layer.scale.size, *(1,) * (rank - 2))):
        return None
    return constant.array().astype(np.float64).reshape(-1)


def _written(model: Model, changed: dict[int, _Layer], gone: set[int]) -> Model:
    names = Names(names_in(model.proto.graph))
    added: dict[str, Constant] = {}

    def free(tensor: str, wanted: str) -> str:
        """A name for what takes the place of a constant: its own, if nobody else reads that."""
        return tensor if tensor and len(model.uses(tensor)) == 1 else names.fresh(wanted)

    nodes = []
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        if node.index in gone:
            continue
        copy = deepcopy(proto)
        if (layer := changed.get(node.index)) is not None:
            weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else ""
            inputs = [node.inputs[0], free(weight, weight), free(bias, f"{node.name}.bias")]
            before = model.constants[weight]
            added[inputs[1]] = times(before, along_outputs(node, before.shape, layer.scale))
            added[inputs[2]] = Constant.of(layer.shift.astype(onnx.helper.tensor_dtype_to_np_dtype(before.dtype)))
            del copy.input[:]
            copy.input.extend(inputs)
            copy.output[0] = layer.output
            for attribute in [a for a in copy.attribute if a.name == "beta"]:
                copy.attribute.remove(attribute)
        nodes.append(copy)
    return rebuild(model, nodes, added)


def along_outputs(node: Node, shape: Sequence[int], scale: Array) -> Array:
    """A factor for each output channel of a layer, in a shape that broadcasts over its weights."""
    if node.op == "ConvTranspose":  # [in, out / group, ...], the inputs group by group
        group = node.attributes.get("group", 1)
        rows = np.repeat(scale.reshape(group, -1), shape[0] // group, axis=0)
        return rows.reshape(*shape[:2], *(1,) * (len(shape) - 2))
    axis = 1 if node.op == "Gemm" and not node.attributes.get("transB", 0) else 0
    return scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def times(constant: Constant, factor: Array) -> Constant:
    """A float constant times what broadcasts over it, multiplied in float64 whenever somebody reads it."""
    key = hashlib.sha256(f"{constant.key}{factor.shape}".encode() + factor.tobytes()).hexdigest()[:32]

    def product() -> Array:
        values = constant.array()
        return np.asarray((values * factor).astype(values.dtype))

    return Constant(key, constant.dtype, constant.shape, product)
