"""Where pairs and weight formats can stand, why not elsewhere, and how many bits the tensors of a placement have.

`refusal` checks the structure of the graph; a pair also needs a scale. A weight has a pair or a weight format
(weight-only quantization, see `weight_at` and `can_have`). `biased_layers` finds the layers whose bias can be
corrected.

The output of a node is stored in as many bits as the node's input. Where a reader wants other bits, a DequantizeLinear
of one type and a QuantizeLinear of the other convert it; engines fuse the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx

from qdqtune.calibration.scales import Ranges
from qdqtune.graph.model import GRAPH, Constant, Model, Node
from qdqtune.graph.operators import (
    ARITHMETIC,
    COMPUTE,
    CONTROL_FLOW,
    CONVOLUTIONS,
    is_float,
    output_channels,
    takes_data,
)
from qdqtune.types import Array, Edge, Placement, WeightFormat

TAKES_CONSTANTS = ARITHMETIC | {"Concat"}
"""Operators whose constant operand is quantized like an activation: engines have kernels with both operands in 8 bits.
The table of a Gather is quantized like that too."""

IN_BODIES = "a Loop, If or Scan computes in its bodies, where no pair can be"

WEIGHT_ONLY_OPS = frozenset({"Gemm", "MatMul"})
"""Operators whose weight may have a weight format, while their activation stays float."""

WEIGHT_ONLY_TYPES = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16})
"""Types of the weights that may have a weight format."""


def refusal(model: Model, tensor: str, node: int, slot: int) -> str | None:
    """Why `tensor` can carry no pair into input `slot` of node number `node`, or as graph output `slot` (node GRAPH).
    None if it can, once it has a range: activations at data inputs, constants where `weight_role` or `TAKES_CONSTANTS`
    allow it."""
    if tensor in model.overridable:
        return "callers may override it, and its range with it"
    if not is_float(model, tensor):
        return "it holds integers or truth values" if tensor in model.tensors else "its type is unknown"
    if slot < 0:
        return "a body reads it under its name"
    if node == GRAPH:
        if tensor not in model.producers:
            return "the graph hands it through"
        is_captured = any(use.slot < 0 for use in model.uses(tensor))
        return "a body reads it under its name" if is_captured else None
    user = model.nodes[node]
    if user.op in CONTROL_FLOW:
        return IN_BODIES
    if user.domain:
        return f"{user.op} is no operator of ONNX"
    if tensor not in model.constants:
        return None if takes_data(user, slot) else f"it is a setting of {user.op}"
    if not model.constants[tensor].nbytes:
        return "it is empty"
    is_operand = user.op in TAKES_CONSTANTS or (user.op == "Gather" and slot == 0)
    if is_operand or weight_role(model, Edge(tensor, user.name, slot)) is not None:
        return None
    return f"it is neither a weight nor an operand of {user.op}"


def can_carry(model: Model, tensor: str, node: int, slot: int) -> bool:
    return refusal(model, tensor, node, slot) is None


def every_edge(model: Model) -> frozenset[Edge]:
    edges = {Edge(tensor, "", slot) for slot, tensor in enumerate(model.outputs)}
    return frozenset(edges.union(*(node.into for node in model.nodes)))


def possible_edges(model: Model, ranges: Ranges) -> frozenset[Edge]:
    """Every edge that can carry a pair and whose tensor has a range."""
    places = {**model.index_of, "": GRAPH}
    able = {e for e in every_edge(model) if can_carry(model, e.tensor, places[e.node], e.index)}
    constants = {e.tensor for e in able} & model.constants.keys()
    scaled = {t for t in constants if np.isfinite(model.constants[t].array()).all()}
    scaled |= ranges.activations.keys() - model.constants.keys()
    return frozenset(e for e in able if e.tensor in scaled)


@dataclass(frozen=True)
class WeightRole:
    """Marks a constant as a weight. `axis` is that of its output channels; None: one scale for the whole weight."""

    axis: int | None


def weight_role(model: Model, edge: Edge) -> WeightRole | None:
    """The role at an edge of its tensor, which must be a constant: a weight, or a normalization's scale. Else None."""
    node = model.user(edge)
    if node is None or node.domain:
        return None
    match node.op, edge.index:
        case "Conv", 1:
            return WeightRole(0)
        case "ConvTranspose", 1:
            return WeightRole(1 if node.attributes.get("group", 1) == 1 else None)
        case "Gemm", 1:
            return WeightRole(0 if node.attributes.get("transB", 0) else 1)
        case "MatMul", 1:
            rank = len(model.constants[edge.tensor].shape)
            return WeightRole(1 if rank == 2 else None)  # engines have no per-channel kernels for batched weights
        case (("Gemm" | "MatMul"), 0) | (("LayerNormalization" | "InstanceNormalization" | "BatchNormalization"), 1):
            return WeightRole(None)
    return None


@dataclass(frozen=True, eq=False)
class Weight:
    """A constant matrix of a product: [in, out], or [out, in] if `transposed`. Blocks run along `in`."""

    node: Node
    constant: Constant
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.constant.shape
        return (columns, rows) if self.transposed else (rows, columns)

    def array(self) -> Array:
        return self.constant.array().T if self.transposed else self.constant.array()


def weight_at(model: Model, edge: Edge) -> Weight | None:
    """The constant matrix that a MatMul or Gemm reads at an edge, directly or through a Transpose (as in language
    models whose last layer shares the embedding table); None if there is none."""
    node = model.user(edge) if edge.node in model.index_of else None
    if node is None or node.domain or edge.index >= len(node.inputs) or node.inputs[edge.index] != edge.tensor:
        return None
    tensor, turned = edge.tensor, False
    turn = model.maker(tensor)
    if turn and (turn.op, turn.domain, [*turn.attributes.get("perm", (1, 0))]) == ("Transpose", "", [1, 0]):
        tensor, turned = turn.inputs[0], True
    constant = model.constants.get(tensor)
    if constant is None or len(constant.shape) != 2 or constant.dtype not in WEIGHT_ONLY_TYPES:
        return None
    match node.op, edge.index:
        case "MatMul", 1:
            return Weight(node, constant, turned)
        case "Gemm", 1 if all(node.attributes.get(a, 1.0) == 1.0 for a in ("alpha", "beta")):
            if not node.attributes.get("transA", 0):
                return Weight(node, constant, turned != bool(node.attributes.get("transB", 0)))
    return None


def can_have(weight: Weight, weight_format: WeightFormat) -> bool:
    """Whether a weight can have a weight format: blocks divide its inputs; dynamic quantization needs float32."""
    if weight_format.block is not None and weight.shape[0] % weight_format.block:
        return False
    return not weight_format.dynamic or weight.constant.dtype == onnx.TensorProto.FLOAT


def weight_only_edges(model: Model) -> frozenset[Edge]:
    """Every use of a weight that may have a weight format: a matrix of finite values."""
    weights = ((edge, weight_at(model, edge)) for edge in every_edge(model))
    return frozenset(e for e, w in weights if w is not None and np.isfinite(w.constant.array()).all())


def compute_edges(node: Node, possible: frozenset[Edge]) -> frozenset[Edge]:
    """A compute node's edges of activation and weight if both are in `possible`, else none: one alone gains nothing."""
    both = frozenset(node.into[:2])
    return both if both <= possible else frozenset()


def consistent(model: Model, placement: Placement) -> Placement:
    """The placement without pairs on only one of the inputs of a compute operator, which cost time and save none."""
    computing = (node for node in model.nodes if node.op in COMPUTE and not node.domain)
    present = ([e for e in node.into[:2] if e in placement] for node in computing)
    lonely = {edges[0] for edges in present if len(edges) == 1}
    return placement.paired(placement.edges - lonely) if lonely else placement


def clamp_bounds(model: Model, node: Node) -> tuple[float, float] | None:
    """The interval to which a Relu or Clip limits values; None if unknown."""
    if node.op == "Relu":
        return 0.0, np.finfo(np.float64).max
    ends = []
    for i, default in ((1, -np.finfo(np.float64).max), (2, np.finfo(np.float64).max)):
        name = node.inputs[i] if len(node.inputs) > i else ""
        if name and name not in model.constants:
            return None
        ends.append(float(model.constants[name].array().reshape(())) if name else float(default))
    return (ends[0], ends[1])


@dataclass(frozen=True)
class BiasedLayer:
    """A quantized compute operator whose bias is, or could become, the constant input `slot` of node `node`: of the
    operator itself, or of the Add behind a MatMul.

    Its output `result` has `channels` channels. For a convolution they lie along axis 1 of `rank` axes; otherwise
    `rank` is None, and they lie along the last axis.
    """

    node: str
    slot: int
    result: str
    channels: int
    rank: int | None = None


def biased_layers(model: Model, placement: Placement) -> tuple[BiasedLayer, ...]:
    return tuple(found for node in model.nodes if (found := biased_layer_at(model, placement, node)) is not None)


def biased_layer_at(model: Model, placement: Placement, node: Node) -> BiasedLayer | None:
    """The layer whose bias a node adds or could add. None if there is none, if the layer runs in float, or if its
    weight has 16 bits, where errors are too small to correct."""
    if node.domain or not is_float(model, node.outputs[0]):
        return None
    if node.op == "Add":  # of a constant bias vector behind a MatMul
        for slot, tensor in enumerate(node.inputs):
            added, maker = model.constants.get(tensor), model.maker(node.inputs[1 - slot])
            shape = None if maker is None or maker.op != "MatMul" else _quantized_weight_shape(model, placement, maker)
            if added is None or shape is None or len(shape) != 2 or node.into[slot] in placement:
                continue
            if added.shape == shape[1:]:
                return BiasedLayer(node.name, slot, node.outputs[0], shape[1])
        return None
    shape = None if node.op == "MatMul" else _quantized_weight_shape(model, placement, node)
    bias = model.constants.get(node.inputs[2]) if len(node.inputs) > 2 else None
    is_free = len(node.inputs) < 3 or not node.inputs[2] or (bias is not None and len(bias.shape) == 1)
    is_plain = all(node.attributes.get(a, 1.0) == 1.0 for a in ("alpha", "beta"))
    if shape is None or not is_free or not is_plain:
        return None
    rank = len(shape) if node.op in CONVOLUTIONS else None
    return BiasedLayer(node.name, 2, node.outputs[0], output_channels(node, shape), rank)


def _quantized_weight_shape(model: Model, placement: Placement, node: Node) -> tuple[int, ...] | None:
    """The shape of the constant weight of a compute operator, if both inputs carry pairs, the weight one of 8 bits."""
    weight = model.constants.get(node.inputs[1]) if node.op in COMPUTE and not node.domain else None
    both = all(edge in placement for edge in node.into[:2]) and placement.wide.isdisjoint(node.into[1:2])
    return weight.shape if weight is not None and both else None


NO_WIDE = "{} has no 16 bits: pairs of 16 bits have 8 here"
"""Told to users if a placement has 16 bits and the engine has not."""


def wide_tensors(model: Model, placement: Placement) -> frozenset[str]:
    """The activations with a pair that are stored in 16 bits: outputs of nodes that read 16 bits (directly or through
    nodes without pairs), and outputs of float nodes that some reader wants in 16 bits."""
    if not placement.wide:
        return frozenset()
    reads: dict[str, bool] = {}  # whether the maker of a tensor reads 16 bits; without those that read floats only
    for node in model.nodes:
        activations = [e for e in node.into if e.tensor not in model.constants and is_float(model, e.tensor)]
        paired = [e in placement.wide for e in activations if e in placement.edges]
        bits = paired or [reads[e.tensor] for e in activations if e.tensor in reads]
        if bits:
            reads.update(dict.fromkeys(node.outputs, any(bits)))
    wanted = {e.tensor for e in placement.wide}
    stored = {e.tensor for e in placement.edges} - model.constants.keys()
    return frozenset(t for t in stored if reads.get(t, t in wanted))


def wide_weights(model: Model, placement: Placement) -> frozenset[str]:
    constants = (edge for edge in placement.wide if edge.tensor in model.constants)
    return frozenset(edge.tensor for edge in constants if weight_role(model, edge) is not None)


def computable(model: Model, placement: Placement) -> Placement:
    """The placement with 8 bits for weights of nodes that read no activation in 16 bits: no engine has such kernels."""
    wide = {e.node for e in placement.wide if e.tensor not in model.constants}
    weights = wide_weights(model, placement)
    alone = frozenset(e for e in placement.wide if e.tensor in weights and e.node not in wide)
    return replace(placement, wide=placement.wide - alone) if alone else placement


def conversions(model: Model, placement: Placement, stored: frozenset[str]) -> frozenset[Edge]:
    """The edges, other than graph outputs, read in other bits than their tensor has; `stored` are the tensors in 16
    bits."""
    if not placement.wide:
        return frozenset()
    return frozenset(
        e
        for e in placement.edges
        if not e.is_graph_output and e.tensor not in model.constants and (e in placement.wide) != (e.tensor in stored)
    )
