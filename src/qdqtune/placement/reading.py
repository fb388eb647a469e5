"""Q/DQ models read back: which edges carry pairs, with which scales, and what the model is without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadModel
from qdqtune.graph.inference import infer
from qdqtune.graph.model import FLOATS, GRAPH, Constant, Model, Node, rebuild
from qdqtune.graph.operators import KEEPS_SIGN, LOWER_BOUNDS, QDQ
from qdqtune.placement.insertion import RAW_OUTPUT
from qdqtune.placement.possible import STORING, weight_at, weight_role
from qdqtune.placement.stored import Table, storage_in, tables_of, with_tables, without_blocks
from qdqtune.types import Array, Edge, Placement, WeightFormat


@dataclass(frozen=True)
class Reading:
    """The pairs of a Q/DQ model in terms of a float model, and how many pairs found no counterpart there.

    `ranges` are the intervals that the pairs can represent: inserted again in the same format, they give the same
    scales and zero points.
    """

    placement: Placement
    ranges: Ranges
    unmatched: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Pair:
    """A DQ node of a Q/DQ model: the float tensor or quantized constant in front, and who reads it."""

    source: str
    scale: Array
    zero_point: Array
    axis: int
    dq: Node
    is_constant: bool
    is_bias: bool
    block: int | None = None

    @property
    def range(self) -> Range:
        """What the pair can represent. Symmetric int8 leaves out -128, so that the scale is max / 127 again."""
        return Range(self.end("min"), self.end("max"))

    def end(self, which: Literal["min", "max"]) -> float:
        """One end of the range; NaN where the scale is."""
        scale, zero = float(np.max(self.scale)), float(np.max(self.zero_point.astype(np.float32)))
        low, high = ends(self.zero_point.dtype)
        low = -high if zero == 0 and low < 0 else low
        return ((low if which == "min" else high) - zero) * scale


def ends(dtype: np.dtype[np.generic]) -> tuple[float, float]:
    """The least and the largest number of a type of quantized values."""
    info = (ml_dtypes.finfo if "float" in dtype.name else ml_dtypes.iinfo)(dtype)
    return float(info.min), float(info.max)


def is_quantized(model: Model) -> bool:
    """Whether the model holds Q or DQ nodes."""
    return any(n.op in QDQ for n in model.nodes)


def read_placement(float_model: Model, qdq_model: Model) -> Reading:
    """The edges of `float_model` on which `qdq_model` has pairs.

    Nodes are matched by name, then by the name of an output tensor; the edge is the float node's own input. Pairs of
    int32 biases follow from the others and are left out. A weight without a pair on what it meets, in blocks or of 4
    bits is compressed.

    Raises:
        BadModel: a scale is no finite number, or below zero.
    """
    found, unmatched, stored = _uses(float_model, qdq_model)
    activations: dict[str, Range] = {}
    weights: dict[str, tuple[float, ...]] = {}
    for edge, pair in found.items():
        if not (np.isfinite(pair.scale) & (pair.scale >= 0)).all():
            raise BadModel(f"the pair on {edge.tensor} has a scale that no tensor has: see qdqtune debug")
        if edge.tensor in float_model.constants and weight_role(float_model, edge) is not None:
            weights[edge.tensor] = tuple(float(s) for s in pair.scale.reshape(-1))
        else:
            activations[edge.tensor] = pair.range
    return Reading(Placement.of(found, stored.items()), Ranges(activations, weights), tuple(unmatched))


def placement_in(float_model: Model, qdq_model: Model) -> Placement:
    """The placement of `read_placement`, whatever the scales are."""
    found, _, stored = _uses(float_model, qdq_model)
    return Placement.of(found, stored.items())


def _uses(float_model: Model, qdq_model: Model) -> tuple[dict[Edge, Pair], list[str], dict[Edge, WeightFormat]]:
    """Edges with their pairs, DQs of pairs that are on none, and uses of weights that alone are quantized."""
    twins = twins_of(float_model, qdq_model)
    edges: dict[Edge, Pair] = {}
    stored: dict[Edge, WeightFormat] = {}
    unmatched: list[str] = []
    for pair in pairs_of(qdq_model):
        if pair.is_bias:
            continue
        for use in qdq_model.uses(pair.dq.outputs[0]):
            edge = counterpart(float_model, qdq_model, pair, use.node, use.slot, twins)
            if edge is None:
                unmatched.append(pair.dq.name)
                continue
            if _is_alone(qdq_model, pair, use.node) and weight_at(float_model, edge) is not None:
                if (weight_format := storage_in(pair.zero_point, pair.block)) is not None:
                    stored[edge] = weight_format
                else:
                    unmatched.append(pair.dq.name)
                continue
            edges[edge] = pair
    stored |= {
        edge: table.weight_format for table in tables_of(qdq_model) if (edge := _of_table(float_model, table, twins))
    }
    return edges, unmatched, stored


def _is_alone(model: Model, pair: Pair, node: int) -> bool:
    """Whether a weight is quantized and what it meets is not, as no pair is written: in blocks, in 4 bits, or in 8 bits
    without a zero point."""
    if not pair.is_constant or node == GRAPH or model.nodes[node].op not in STORING:
        return False
    is_ours = pair.block is not None or pair.zero_point.dtype.name.endswith("int4") or len(pair.dq.inputs) < 3
    maker = model.maker(model.nodes[node].inputs[0])
    return is_ours and (maker is None or maker.op != "DequantizeLinear")


def stored_alone(model: Model) -> dict[str, WeightFormat]:
    """Names of the DQs of weights that alone are quantized, with their weight format."""
    found: dict[str, WeightFormat] = {}
    for pair in pairs_of(model):
        uses = model.uses(pair.dq.outputs[0])
        if uses and all(_is_alone(model, pair, use.node) for use in uses):
            weight_format = storage_in(pair.zero_point, pair.block)
            found |= {} if weight_format is None else {pair.dq.name: weight_format}
    return found


def _of_table(float_model: Model, table: Table, twins: Mapping[int, Node]) -> Edge | None:
    twin = twins.get(table.gather.index)
    edge = None if twin is None else twin.into[0]
    return edge if edge is not None and weight_at(float_model, edge) is not None else None


def strip_pairs(model: Model) -> Model:
    """The float model behind a Q/DQ model.

    Quantized constants become float ones. Where a pair clamped at zero and its producer may go below (a Relu that a
    quantizer had dropped), the clamp comes back as a Relu, or as a Clip where the range ends at 6.
    """
    model = with_tables(model)
    pairs = {p.dq.outputs[0]: p for p in pairs_of(model)}
    bounds = _lower_bounds(model, pairs)
    added: dict[str, Constant] = {}
    source: dict[str, str] = {}
    clamps: dict[str, onnx.NodeProto] = {}
    for name, pair in pairs.items():
        if pair.is_constant:
            added[name] = _dequantized(model, pair)
            continue
        clamps_at_zero = pair.end("min") == 0 and bounds.get(pair.source, -1.0) < 0
        if clamps_at_zero and pair.source not in clamps:
            clamps[pair.source], bound = _lost_clamp(model, pair)
            added |= bound
        source[name] = clamps[pair.source].output[0] if pair.source in clamps else pair.source
    gone = {p.dq.index for p in pairs.values()}
    gone |= {
        n.index
        for n in model.nodes
        if n.op == "QuantizeLinear" and all(use.node in gone for use in model.uses(n.outputs[0]))
    }
    final = _names_back(model, source, {c.output[0] for c in clamps.values()})
    nodes = [_renamed(clamps[t], source, final) for t in model.inputs if t in clamps]
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        if node.index not in gone:
            nodes.append(_renamed(proto, source, final))
            nodes += [_renamed(clamps[o], source, final) for o in node.outputs if o in clamps]
        elif (name := node.outputs[0]) in source and _is_read_by_name(model, name) and name not in final.values():
            nodes.append(_renamed(helper.make_node("Identity", [name], [name], node.name), source, final))
    stripped = rebuild(model, nodes, added)
    return Model(infer(stripped.proto, stripped.large), stripped.large)


def _is_read_by_name(model: Model, tensor: str) -> bool:
    """Whether a body or the graph's caller reads the tensor: such users cannot be pointed at another one."""
    return any(use.slot < 0 or use.node == GRAPH for use in model.uses(tensor))


def _names_back(model: Model, source: Mapping[str, str], clamped: set[str]) -> Mapping[str, str]:
    """Float tensors that can take the name of the graph output that is their pair's, by that tensor."""
    final: dict[str, str] = {}
    for output in model.outputs:
        tensor = source.get(output)
        if tensor is None or any(use.slot < 0 for use in model.uses(output)) or _is_read_by_name(model, tensor):
            continue
        if tensor in model.producers or tensor in clamped:
            final.setdefault(tensor, output)
    return final


def _renamed(node: onnx.NodeProto, source: Mapping[str, str], final: Mapping[str, str]) -> onnx.NodeProto:
    copy = deepcopy(node)
    for i, name in enumerate(node.input):
        copy.input[i] = final.get(source.get(name, name), source.get(name, name))
    for i, name in enumerate(node.output):
        copy.output[i] = final.get(name, name)
    return copy


def pairs_of(model: Model) -> Iterator[Pair]:
    """The pairs whose scale is a constant, in graph order."""
    for node in model.nodes:
        if node.op != "DequantizeLinear":
            continue
        scale = model.constants.get(node.inputs[1])
        if scale is None:
            continue
        values = scale.array().astype(np.float32)
        axis = node.attributes.get("axis", 1)
        q = model.maker(node.inputs[0])
        constant = model.constants.get(node.inputs[0])
        if q is not None and q.op == "QuantizeLinear":
            source = q.inputs[0]
            zero = _zero_point(model, q, np.dtype(np.uint8))
            yield Pair(source, values, zero, axis, node, source in model.constants, False)
        elif constant is not None:
            zero = _zero_point(model, node, helper.tensor_dtype_to_np_dtype(constant.dtype))
            is_bias = constant.dtype == TensorProto.INT32
            yield Pair(
                node.inputs[0], values, zero, axis, node, True, is_bias, node.attributes.get("block_size") or None
            )


def _zero_point(model: Model, node: Node, default: np.dtype[np.generic]) -> Array:
    if len(node.inputs) > 2 and node.inputs[2] in model.constants:
        return model.constants[node.inputs[2]].array()
    return np.zeros((), default)


def twins_of(float_model: Model, qdq_model: Model) -> Mapping[int, Node]:
    """Node of the Q/DQ model (by index) to the same node of the float model."""
    by_output = {o: n for n in float_model.nodes for o in n.outputs if o}
    twins = {}
    for node in qdq_model.nodes:
        named = float_model.index_of.get(node.name)
        twin = float_model.nodes[named] if named is not None else None
        if twin is None or twin.op != node.op:
            twin = next((by_output[o] for o in node.outputs if o in by_output), None)
        if twin is not None and twin.op == node.op:
            twins[node.index] = twin
    return twins


def counterpart(
    float_model: Model, qdq_model: Model, pair: Pair, node: int, slot: int, twins: Mapping[int, Node]
) -> Edge | None:
    """The float model's edge for one use of a pair."""
    if node == GRAPH:
        tensor = qdq_model.outputs[slot]
        known = tensor in float_model.outputs and pair.source in (tensor, tensor + RAW_OUTPUT, *qdq_model.inputs)
        return Edge(tensor, "", float_model.outputs.index(tensor)) if known else None
    twin = twins.get(node)
    if twin is None or not 0 <= slot < len(twin.inputs) or not twin.inputs[slot]:
        return None
    tensor, edge = twin.inputs[slot], twin.into[slot]
    info = float_model.tensors.get(tensor)
    is_fixed = tensor in float_model.constants or (pair.is_constant and weight_at(float_model, edge) is not None)
    return edge if is_fixed == pair.is_constant and (info is None or info.is_float) else None


def _dequantized(model: Model, pair: Pair) -> Constant:
    """The float constant that a DQ of a constant gives: (q - zero point) * scale, or the float source of a Q."""
    constant = model.constants[pair.source]
    dtype = helper.tensor_dtype_to_np_dtype(model.constants[pair.dq.inputs[1]].dtype)
    if helper.tensor_dtype_to_np_dtype(constant.dtype) == dtype:
        return constant

    def read() -> Array:
        quantized = constant.array().astype(np.float32)
        if pair.block is not None:
            return without_blocks(quantized, pair.scale, pair.zero_point, pair.axis, pair.block).astype(dtype)
        shape = [-1 if i == pair.axis % max(quantized.ndim, 1) else 1 for i in range(quantized.ndim)]
        scale, zero = (a.astype(np.float32).reshape(shape if a.size > 1 else ()) for a in (pair.scale, pair.zero_point))
        return np.asarray((quantized - zero) * scale).astype(dtype)

    key = f"{constant.key}:dequantized:{model.constants[pair.dq.inputs[1]].key}"
    return Constant(key, helper.np_dtype_to_tensor_dtype(dtype), constant.shape, read)


def _lost_clamp(model: Model, pair: Pair) -> tuple[onnx.NodeProto, dict[str, Constant]]:
    """A Relu or Clip that stands for the saturation of a pair whose lowest value is zero."""
    name, result = f"{pair.source}_clamp", f"{pair.source}_clamped"
    if abs(pair.end("max") - 6) > 0.01:
        return helper.make_node("Relu", [pair.source], [result], name), {}
    dtype = helper.tensor_dtype_to_np_dtype(model.constants[pair.dq.inputs[1]].dtype)
    bounds = {f"{name}_{end}": Constant.of(np.array(v, dtype)) for end, v in (("min", 0), ("max", 6))}
    return helper.make_node("Clip", [pair.source, *bounds], [result], name), bounds


def _lower_bounds(model: Model, pairs: Mapping[str, Pair]) -> Mapping[str, float]:
    """Tensors to a value that they never fall below once the pairs are gone and the lost clamps back."""
    bounds: dict[str, float] = {}

    def bound(tensor: str) -> float | None:
        constant = model.constants.get(tensor)
        return bounds.get(tensor) if constant is None else _least(constant)

    for node in model.nodes:
        if node.op in LOWER_BOUNDS:
            low: float | None = LOWER_BOUNDS[node.op]
        elif node.op == "DequantizeLinear" and node.outputs[0] in pairs:
            pair = pairs[node.outputs[0]]
            if pair.is_constant:
                low = _least(_dequantized(model, pair))
            else:
                low = 0.0 if pair.end("min") == 0 else bound(pair.source)
        elif node.op == "Clip" and len(node.inputs) > 1 and node.inputs[1]:
            low = bound(node.inputs[1])
        elif node.op in KEEPS_SIGN and (first := bound(node.inputs[0])) is not None:
            low = min(first, 0.0)  # pools may count zeros of the border
        elif node.op in ("Add", "Concat", "Mul"):
            low = _joined(node.op, [bound(tensor) for tensor in node.inputs])
        else:
            low = None
        if low is not None:
            bounds.update(dict.fromkeys(node.outputs, low))
    return bounds


def _least(constant: Constant) -> float | None:
    return float(constant.array().min()) if constant.nbytes and constant.dtype in FLOATS else None


def _joined(op: str, bounds: list[float | None]) -> float | None:
    known = [low for low in bounds if low is not None]
    if len(known) < len(bounds):
        return None
    if op == "Mul":
        return 0.0 if min(known) >= 0 else None
    return sum(known) if op == "Add" else min(known)


def count_pairs(placement: Placement) -> int:
    """How many tensors have a Q/DQ pair: what users are told, in terminal, report and summary alike. A tensor that
    several nodes read through a pair counts once.
    """
    return len({edge.tensor for edge in placement.edges})
