"""Equalization: scales channels so that one quantization scale fits all of them, and no output changes.

A producer with constants that can be divided by s for each channel makes x / s; the weights of the layers that read
these channels become s * W. All s are powers of two, so that no float value is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto

from qdqtune.graph.model import GRAPH, Model, Node, rebuild
from qdqtune.graph.operators import ASKS_SHAPE, CONVOLUTIONS, reduced_axes
from qdqtune.graph.rewrites import along_outputs, times
from qdqtune.types import Array, Edge

NORMALIZED_BY_CHANNEL = {"BatchNormalization": 1, "LayerNormalization": -1, "RMSNormalization": -1}
"""Normalizations with a scale for each channel, and the axis of the channels."""

HOMOGENEOUS = frozenset({"Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "Neg"})
"""Operators f with f(x / s) = f(x) / s, value by value, for s > 0."""

POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})

SUMS = frozenset({"Add", "Sub", "Max", "Min"})
"""Operators whose operands must be scaled alike."""


@dataclass(frozen=True)
class Factor:
    """A factor 2 ^ exponents for the constant of an edge, in a shape that broadcasts over it."""

    edge: Edge
    shape: tuple[int, ...]
    exponents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.exponents) != np.prod(self.shape, dtype=int) or not all(isinstance(e, int) for e in self.exponents):
            raise ValueError("a factor has one exponent for each of its elements")

    def array(self) -> Array:
        """The factors, float64."""
        return np.exp2(np.asarray(self.exponents, np.float64)).reshape(self.shape)


@dataclass(frozen=True)
class Site:
    """A tensor whose channels, along `axis`, can be scaled: node number `producer` makes it, and only the layers
    `readers` read it in the end. `operands` are constants that are added in between: (node, input).
    """

    producer: int
    tensor: str
    axis: int
    channels: int
    readers: tuple[int, ...]
    operands: tuple[tuple[int, int], ...]


def sites(model: Model) -> list[Site]:
    """The sites of a model in graph order. Their constants are float32 and have no other readers."""
    return [site for node in model.nodes if (site := _site(model, node)) is not None]


def _site(model: Model, node: Node) -> Site | None:
    axis = _producing_axis(model, node)
    info = model.tensors.get(node.outputs[0]) if axis is not None else None
    if axis is None or info is None or info.dtype != TensorProto.FLOAT or not info.shape:
        return None
    axis %= len(info.shape)
    channels = info.shape[axis]
    if channels is None or channels < 2:
        return None
    found = _Trace(model, axis, channels)
    if not found.through(node.outputs[0]) or not found.readers or found.unscaled & found.tensors.keys():
        return None
    site = Site(node.index, node.outputs[0], axis, channels, tuple(found.readers), tuple(found.operands))
    return site if _are_scalable(model, factors(model, site, [0] * channels)) else None


def _are_scalable(model: Model, wanted: Iterable[Factor]) -> bool:
    """Whether the constants of factors have no other readers, and factors broadcast over them."""
    for factor in wanted:
        shape = model.constants[factor.edge.tensor].shape
        if len(model.uses(factor.edge.tensor)) > 1 or len(factor.shape) > len(shape):
            return False
        if np.broadcast_shapes(factor.shape, shape) != shape:
            return False
    return True


def _producing_axis(model: Model, node: Node) -> int | None:
    """The axis of the channels that the constants of a node can scale; None if it has no such constants."""

    def are_constants(slots: Iterable[int]) -> bool:
        return all(node.inputs[i] in model.constants for i in slots if i < len(node.inputs) and node.inputs[i])

    if node.domain:
        return None
    if node.op in CONVOLUTIONS | {"Gemm"} and are_constants((1, 2)):
        return 1
    if node.op == "MatMul" and are_constants((1,)) and len(model.constants[node.inputs[1]].shape) == 2:
        return -1
    if node.op in NORMALIZED_BY_CHANNEL and are_constants((1, 2)) and len(node.outputs) == 1:
        is_vector = len(model.constants[node.inputs[1]].shape) == 1
        return NORMALIZED_BY_CHANNEL[node.op] if is_vector else None
    if node.op == "Mul" and any(t in model.constants and len(model.constants[t].shape) == 1 for t in node.inputs):
        return -1
    return None


@dataclass
class _Trace:
    """Follows scaled channels through operators that pass them on, to the layers that read them."""

    model: Model
    axis: int
    channels: int
    readers: list[int] = field(default_factory=list)
    operands: list[tuple[int, int]] = field(default_factory=list)
    tensors: dict[str, None] = field(default_factory=dict)
    unscaled: set[str] = field(default_factory=set)

    def through(self, tensor: str) -> bool:
        """Whether all readers of a tensor can process scaled channels; collects them on the way."""
        self.tensors[tensor] = None
        for use in self.model.uses(tensor):
            if use.node == GRAPH or use.slot < 0 or not self._can_take(self.model.nodes[use.node], use.slot, tensor):
                return False
        return True

    def _can_take(self, node: Node, slot: int, tensor: str) -> bool:
        if node.domain:
            return False
        if node.op in ASKS_SHAPE:
            return True
        if slot == 0 and self._absorbs(node):
            self.readers.append(node.index)
            return True
        if node.op in HOMOGENEOUS or (node.op in POOLS and self.axis == 1):
            return slot == 0 and self.through(node.outputs[0])
        if node.op == "ReduceMean" and self.axis == 1:
            axes, rank = reduced_axes(self.model, node), len(self.model.tensors[tensor].shape or ())
            keeps_channels = node.attributes.get("keepdims", 1) and axes and all(a % rank > 1 for a in axes)
            return bool(keeps_channels) and self.through(node.outputs[0])
        if (node.op in SUMS | {"Mul"} or (node.op == "Div" and slot == 0)) and len(node.inputs) == 2:
            return self._combines(node, slot, tensor) and self.through(node.outputs[0])
        return False

    def _combines(self, node: Node, slot: int, tensor: str) -> bool:
        """Whether an operator of two operands makes scaled channels if one operand is scaled."""
        other = node.inputs[1 - slot]
        here, there = (getattr(self.model.tensors.get(t), "shape", None) for t in (tensor, node.outputs[0]))
        if here is None or here != there or None in here[1:] or other == tensor:
            return False
        if node.op in SUMS:
            self.operands.append((node.index, 1 - slot))
            return other in self.model.constants
        self.unscaled.add(other)
        return True

    def _absorbs(self, node: Node) -> bool:
        """Whether a layer's weights can take the scales of the channels."""
        constant = self.model.constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
        rank = len(self.model.tensors[node.inputs[0]].shape or ())
        if constant is None:
            return False
        shape = constant.shape
        match node.op:
            case "Conv":
                return self.axis == 1 and shape[1] * int(node.attributes.get("group", 1)) == self.channels
            case "ConvTranspose":
                return self.axis == 1 and shape[0] == self.channels
            case "Gemm":
                row = int(node.attributes.get("transB", 0))
                return self.axis == 1 and not node.attributes.get("transA", 0) and shape[row] == self.channels
            case "MatMul":
                return self.axis == rank - 1 and len(shape) == 2 and shape[0] == self.channels
        return False


def along_inputs(node: Node, shape: Sequence[int], values: Array) -> Array:
    """Numbers for the input channels of a layer, in a shape that broadcasts over its weights."""
    if node.op == "Conv":  # [out, in / group, ...], the outputs group by group
        group = int(node.attributes.get("group", 1))
        rows = (
            values.reshape(group, -1) if group == 1 else np.repeat(values.reshape(group, -1), shape[0] // group, axis=0)
        )
        return rows.reshape(*rows.shape, *(1,) * (len(shape) - 2))
    axis = 1 if node.op == "Gemm" and node.attributes.get("transB", 0) else 0
    return values.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def factors(model: Model, site: Site, exponents: Sequence[int]) -> list[Factor]:
    """The factors that divide the channels of a site by 2 ^ exponents and multiply its readers' weights by them."""
    wanted = np.asarray(exponents, np.int64)
    node = model.nodes[site.producer]
    rank = len(model.tensors[site.tensor].shape or ())
    vector = -wanted.reshape([-1] + [1] * (rank - 1 - site.axis))
    found = []

    def add(reader: Node, slot: int, values: Array) -> None:
        if slot < len(reader.inputs) and reader.inputs[slot]:
            edge = Edge(reader.inputs[slot], reader.name, slot)
            found.append(Factor(edge, values.shape, tuple(values.reshape(-1).tolist())))

    if node.op in CONVOLUTIONS | {"Gemm"}:
        add(node, 1, along_outputs(node, model.constants[node.inputs[1]].shape, -wanted))
        add(node, 2, -wanted)
    elif node.op == "MatMul":
        add(node, 1, -wanted)
    elif node.op == "Mul":
        add(node, next(i for i, t in enumerate(node.inputs) if t in model.constants), vector)
    else:
        add(node, 1, -wanted)
        add(node, 2, -wanted)
    for index, slot in site.operands:
        add(model.nodes[index], slot, vector)
    for layer in (model.nodes[r] for r in site.readers):
        add(layer, 1, along_inputs(layer, model.constants[layer.inputs[1]].shape, wanted))
    return found


def scaled(model: Model, wanted: Sequence[Factor]) -> Model:
    """`model` with its constants multiplied by their factors; factors of edges that it lacks are ignored."""
    together: dict[str, Array] = {}
    for factor in wanted:
        index = model.index_of.get(factor.edge.node)
        inputs = () if index is None else model.nodes[index].inputs
        if factor.edge.index < len(inputs) and inputs[factor.edge.index] == factor.edge.tensor:
            together[factor.edge.tensor] = together.get(factor.edge.tensor, np.ones(1)) * factor.array()
    if not together:
        return model
    nodes: list[onnx.NodeProto] = list(model.proto.graph.node)
    return rebuild(model, nodes, {t: times(model.constants[t], f, np.float32) for t, f in together.items()})


def largest_weights(model: Model, site: Site) -> Array:
    """The largest |weight| that readers multiply each channel with, [channels]. Depthwise readers count as 0: their
    weights have a scale for each channel anyway."""
    found = np.zeros(site.channels)
    for node in (model.nodes[r] for r in site.readers):
        found = np.maximum(found, _largest_by_channel(node, model.constants[node.inputs[1]].array(), site.channels))
    return found


def _largest_by_channel(node: Node, weights: Array, channels: int) -> Array:
    group = int(node.attributes.get("group", 1))
    if node.op in CONVOLUTIONS and group == channels:
        return np.zeros(channels)
    values = np.abs(weights.astype(np.float64))
    if node.op == "Conv":
        parts = values.reshape(group, -1, *values.shape[1:])
        return np.asarray(parts.max(axis=(1, *range(3, parts.ndim))).reshape(-1))
    axis = 1 if node.op == "Gemm" and node.attributes.get("transB", 0) else 0
    return np.asarray(values.max(axis=tuple(i for i in range(values.ndim) if i != axis)))
