"""Reads Q/DQ models back: the edges with pairs, their scales, and weights quantized without their activation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadModel
from qdqtune.graph.model import GRAPH, Model, Node, Use
from qdqtune.graph.operators import CLAMPS, COPIES, QDQ
from qdqtune.graph.rewrites import reader
from qdqtune.placement.insertion import HALF_ROUNDING
from qdqtune.placement.possible import WEIGHT_ONLY_OPS, weight_at, weight_role
from qdqtune.types import Array, Edge, Placement, QuantType, WeightFormat

COPIED = ("Identity", "Cast")
"""Operators that `strip_pairs` leaves in place of a pair."""


@dataclass(frozen=True)
class Reading:
    """A Q/DQ model as a placement on its float model. `unmatched` are names of the DQs that have no edge in the float
    model. `ranges` reproduce the scales of the file: inserted again in the same format, they give the same numbers."""

    placement: Placement
    ranges: Ranges
    unmatched: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Pair:
    """A DQ node of a Q/DQ model, and its Q if it has one. `source` is the float tensor that the Q reads, or else the
    constant that the DQ reads. The type of `zero_point` is that of the integers, `dtype` that of the DQ's result."""

    source: str
    scale: Array
    zero_point: Array
    axis: int
    dq: Node
    q: Node | None
    dtype: int
    is_constant: bool
    is_bias: bool
    block: int | None = None

    @property
    def range(self) -> Range:
        """The range of values that the pair can represent; for symmetric int8 without -128, as scale = max / 127."""
        return Range(self.end("min"), self.end("max"))

    @property
    def is_wide(self) -> bool:
        return self.zero_point.dtype.itemsize == 2 and self.zero_point.dtype.kind in "iu"

    @property
    def integers(self) -> tuple[float, float]:
        """The least and the largest number of the type that values are stored in."""
        dtype = self.zero_point.dtype
        info = (ml_dtypes.finfo if "float" in dtype.name else ml_dtypes.iinfo)(dtype)
        return float(info.min), float(info.max)

    @property
    def weight_format(self) -> WeightFormat | None:
        """The weight format of integers with these zero points and this block size; None if it is not supported."""
        name = self.zero_point.dtype.name
        is_signed = not name.startswith("u") and not self.zero_point.astype(np.int8).any()
        try:
            return WeightFormat(4 if name.endswith("int4") else 8, self.block, is_signed)
        except ValueError:  # another block size, or 4 bits with one scale for each channel
            return None

    def end(self, which: Literal["min", "max"]) -> float:
        """One end of the range, over all channels or blocks; NaN if a scale is NaN."""
        zero = self.zero_point.astype(np.float64)
        low, high = self.integers
        if which == "max":
            return float(np.max((high - zero) * self.scale))
        lowest = np.where(zero == 0, -high, low) if low < 0 else low
        return float(np.min((lowest - zero) * self.scale))

    def dequantized(self, integers: Array) -> Array:
        """(q - zero point) * scale in float32. Scale and zero point are scalars, or have one entry for each index along
        `axis`, or with a `block` one for each block of so many indices along it."""

        def spread(numbers: Array) -> Array:
            exact = numbers.astype(np.float32)
            if exact.size == 1:
                return exact.reshape(())
            if self.block is not None:
                return np.take(np.repeat(exact, self.block, self.axis), range(integers.shape[self.axis]), self.axis)
            return exact.reshape([-1 if i == self.axis % integers.ndim else 1 for i in range(integers.ndim)])

        return np.asarray((integers.astype(np.float32) - spread(self.zero_point)) * spread(self.scale))


def quantized_how(model: Model) -> str:
    """How a model is quantized already, as the end of a sentence that begins with its name; "" for a float model."""
    ops = {node.op for node in model.nodes}
    if "QuantizeLinear" not in ops and any(True for _ in dynamic_products_of(model)):
        return "is dynamically quantized already"
    return "already has Q/DQ pairs" if not ops.isdisjoint(QDQ) else ""


def is_quantized(model: Model) -> bool:
    return bool(quantized_how(model))


def read_placement(float_model: Model, qdq_model: Model, quant_type: QuantType = "int8") -> Reading:
    """`qdq_model` as a placement on `float_model`, except int32 biases, which follow from the other pairs. Scales of
    weights are kept if symmetric numbers of `quant_type` with these scales can hold the same values. Raises BadModel
    for scales below zero or not finite, for a Q and a DQ with other numbers, and for activations with several
    scales."""
    placement, pairs, unmatched = _matched(float_model, qdq_model)
    activations: dict[str, Range] = {}
    wide: dict[str, Range] = {}
    weights: dict[str, tuple[float, ...]] = {}
    for edge, pair in pairs.items():
        if not (np.isfinite(pair.scale) & (pair.scale >= 0)).all():
            raise BadModel(f"the pair on {edge.tensor} has a scale that no tensor has: see qdqtune debug")
        if not _gives_back(qdq_model, pair):
            raise BadModel(f"the pair on {edge.tensor} does not give its values back: Q and DQ have other numbers")
        role = weight_role(float_model, edge) if edge.tensor in float_model.constants else None
        if role is not None:
            readers = [qdq_model.nodes[use.node].op for use in qdq_model.uses(pair.dq.outputs[0]) if use.node != GRAPH]
            is_moved = float_model.node(edge.node).op not in readers  # its channels may lie along another axis
            rank = len(float_model.constants[edge.tensor].shape)
            if not is_moved and _has_steps_of_weights(pair, role.axis, rank, quant_type):
                weights[edge.tensor] = tuple(float(s) for s in pair.scale.reshape(-1))
        elif pair.scale.size > 1 and not pair.is_constant:
            raise BadModel(
                f"the pair on {edge.tensor} has a scale for each channel or block, and activations get one scale here: "
                "give the float model"
            )
        elif pair.is_wide:
            wide[edge.tensor] = pair.range
        else:
            activations[edge.tensor] = pair.range
    ranges = Ranges({**wide, **activations}, weights, wide=wide)
    return Reading(placement, ranges, tuple(unmatched))


def _has_steps_of_weights(pair: Pair, axis: int | None, rank: int, quant_type: QuantType) -> bool:
    """Whether symmetric `quant_type` numbers with a pair's scales (one, or one for each channel) cover its range. They
    do not for pairs of 16 bits, of FP8, or with an uneven zero point."""
    if pair.block is not None or (pair.scale.size > 1 and (axis is None or pair.axis % rank != axis)):
        return False
    if quant_type == "fp8" or "float" in pair.zero_point.dtype.name:
        return quant_type == "fp8" and pair.zero_point.dtype.name == "float8_e4m3fn"
    zero = pair.zero_point.astype(np.int64)
    low, high = pair.integers
    return bool((low - zero >= -128).all() and (high - zero <= 127).all())


def placement_in(float_model: Model, qdq_model: Model) -> Placement:
    """The placement that `read_placement` finds; scales are not read."""
    return _matched(float_model, qdq_model)[0]


def _matched(float_model: Model, qdq_model: Model) -> tuple[Placement, dict[Edge, Pair], list[str]]:
    twins = twins_of(float_model, qdq_model)
    edges: dict[Edge, Pair] = {}
    formats: dict[Edge, WeightFormat] = {}
    unmatched: list[str] = []
    for pair in pairs_of(qdq_model):
        if pair.is_bias:
            continue
        for use in _uses_behind(float_model, qdq_model, pair):
            if is_conversion(qdq_model, use):
                continue
            edge = counterpart(float_model, qdq_model, pair, use, twins)
            if edge is None:
                unmatched.append(pair.dq.name)
            elif not _is_weight_only(qdq_model, pair, use.node) or weight_at(float_model, edge) is None:
                edges[edge] = pair
            elif pair.weight_format is None:
                unmatched.append(pair.dq.name)
            else:
                formats[edge] = pair.weight_format
    for product in dynamic_products_of(qdq_model):
        known = float_model.index_of.get(product.node.name)
        twin = float_model.maker(product.last.outputs[0]) if known is None else float_model.nodes[known]
        if twin is not None and len(twin.inputs) > 1 and weight_at(float_model, twin.into[1]) is not None:
            formats[twin.into[1]] = WeightFormat(product.bits, dynamic=True)
        else:
            unmatched.append(product.node.name)
    wide = [edge for edge, pair in edges.items() if pair.is_wide]
    return Placement.of(edges, formats.items(), wide), edges, unmatched


def is_conversion(qdq_model: Model, use: Use) -> bool:
    """Whether a use of a pair's result is a Q that converts it to another number of bits."""
    return use.node != GRAPH and qdq_model.nodes[use.node].op == "QuantizeLinear"


def _uses_behind(float_model: Model, qdq_model: Model, pair: Pair) -> Iterator[Use]:
    """The uses of a pair's result. For a weight, copies that the float model has already computed are skipped."""
    tensors = [pair.dq.outputs[0]]
    for tensor in tensors:
        for use in qdq_model.uses(tensor):
            node = None if use.node == GRAPH else qdq_model.nodes[use.node]
            if pair.is_constant and node and node.op in COPIES and node.outputs[0] in float_model.constants:
                tensors.append(node.outputs[0])
            else:
                yield use


def _is_weight_only(model: Model, pair: Pair, node: int) -> bool:
    """Whether a node reads a weight quantized without its activation: in blocks, in 4 bits, or without a zero point."""
    if not pair.is_constant or node == GRAPH or model.nodes[node].op not in WEIGHT_ONLY_OPS:
        return False
    is_ours = pair.block is not None or pair.zero_point.dtype.name.endswith("int4") or len(pair.dq.inputs) < 3
    maker = model.maker(model.nodes[node].inputs[0])
    return is_ours and (maker is None or maker.op != "DequantizeLinear")


def weight_only_formats(model: Model) -> dict[str, WeightFormat]:
    """Weight formats by name of the DQ, of weights that are quantized without their activation."""
    formats: dict[str, WeightFormat] = {}
    for pair in pairs_of(model):
        uses, weight_format = model.uses(pair.dq.outputs[0]), pair.weight_format
        if weight_format is not None and uses and all(_is_weight_only(model, pair, use.node) for use in uses):
            formats[pair.dq.name] = weight_format
    return formats


def pairs_of(model: Model) -> Iterator[Pair]:
    """The pairs whose scales and zero points are constants, in graph order."""
    for node in model.nodes:
        if node.op != "DequantizeLinear":
            continue
        maker, constant = model.maker(node.inputs[0]), model.constants.get(node.inputs[0])
        q = maker if maker is not None and maker.op == "QuantizeLinear" else None
        if q is not None:
            source, zero = q.inputs[0], _zero_point(model, q, q.attributes.get("output_dtype") or TensorProto.UINT8)
        elif constant is not None:
            source, zero = node.inputs[0], _zero_point(model, node, constant.dtype)
        else:
            continue
        numbers = [*node.inputs[1:], *(q.inputs[1:] if q is not None else ())]
        if zero is None or any(name and name not in model.constants for name in numbers):
            continue
        scale = model.constants[node.inputs[1]]
        yield Pair(
            source=source,
            scale=scale.array().astype(np.float32),
            zero_point=zero,
            axis=node.attributes.get("axis", 1),
            dq=node,
            q=q,
            dtype=node.attributes.get("output_dtype") or scale.dtype,
            is_constant=source in model.constants,
            is_bias=q is None and constant is not None and constant.dtype == TensorProto.INT32,
            block=node.attributes.get("block_size") or None,
        )


def _gives_back(model: Model, pair: Pair) -> bool:
    """Whether the DQ of a pair undoes its Q: the same zero point for the same channels or blocks, and the same scale
    but for rounding."""
    if pair.q is None:
        return True
    scale = model.constants[pair.q.inputs[1]].array().astype(np.float32)
    zero = _zero_point(model, pair.dq, pair.dtype)
    if scale.size != pair.scale.size or zero is None or not {zero.size, pair.zero_point.size} <= {1, scale.size}:
        return False
    info = model.tensors.get(pair.source)
    rank = len(info.shape or ()) if info is not None else 0
    axes = {axis % rank if rank else axis for axis in (pair.q.attributes.get("axis", 1), pair.axis)}
    is_same_block = (pair.q.attributes.get("block_size") or None) == pair.block
    if scale.size > 1 and (scale.shape != pair.scale.shape or len(axes) > 1 or not is_same_block):
        return False
    same_zero = (zero.reshape(-1) == pair.zero_point.reshape(-1)).all()
    return bool(same_zero) and np.allclose(scale.reshape(-1), pair.scale.reshape(-1), rtol=HALF_ROUNDING, atol=0)


def _zero_point(model: Model, node: Node, dtype: int) -> Array | None:
    """The zero point of a Q or DQ, by default zero of type `dtype`; None if it is computed."""
    if len(node.inputs) > 2 and node.inputs[2]:
        zero = model.constants.get(node.inputs[2])
        return None if zero is None else zero.array()
    return np.zeros((), helper.tensor_dtype_to_np_dtype(dtype))


def twins_of(float_model: Model, qdq_model: Model) -> Mapping[int, Node]:
    """For each node of the Q/DQ model that was made of a float node, by index, that node. Both have the same operator
    and the same name, or else an output of the same name. A name that `load` may have given, of operator and position,
    counts only if no output decides. The maker of a graph output with a pair may differ in name and output."""
    twins: dict[int, Node] = {}
    for node in qdq_model.nodes:
        same_output = next(filter(None, map(float_model.maker, node.outputs)), None)
        index = float_model.index_of.get(node.name)
        same_name = None if index is None else float_model.nodes[index]
        candidates = [same_name, same_output]
        if re.fullmatch(rf"{node.op}_\d+", node.name):
            is_made_elsewhere = same_name is not None and any(o in qdq_model.producers for o in same_name.outputs)
            candidates = [same_output, None if is_made_elsewhere else same_name]
        twin = next((n for n in candidates if n is not None and n.op == node.op), None)
        if twin is not None:
            twins[node.index] = twin
    taken = {twin.index for twin in twins.values()}
    for tensor in qdq_model.outputs:
        last, twin = qdq_model.maker(_before_pairs(qdq_model, tensor)), float_model.maker(tensor)
        if last is not None and twin is not None and twin.op in CLAMPS and last.op != twin.op:
            twin = float_model.maker(twin.inputs[0])  # the pair clamps in its place
        if last is None or twin is None or last.index in twins or twin.index in taken or last.op != twin.op:
            continue
        twins[last.index] = twin
    return twins


def _before_pairs(model: Model, tensor: str) -> str:
    """The float tensor in front of the Q and DQ nodes that make `tensor`."""
    while (maker := model.maker(tensor)) is not None and maker.op in QDQ:
        tensor = maker.inputs[0]
    return tensor


def _is_read_by_pair(float_model: Model, qdq_model: Model, tensor: str, source: str, twins: Mapping[int, Node]) -> bool:
    """Whether a pair that reads `source` in the Q/DQ model belongs on `tensor` of the float model."""
    result = _before_pairs(qdq_model, source)
    if (maker := qdq_model.maker(result)) is not None:
        if (twin := twins.get(maker.index)) is None:
            return False
        result = twin.outputs[maker.outputs.index(result)]
    while tensor != result and (last := float_model.maker(tensor)) is not None and last.op in {*CLAMPS, *COPIED}:
        tensor = last.inputs[0]
    return tensor == result


def counterpart(float_model: Model, qdq_model: Model, pair: Pair, use: Use, twins: Mapping[int, Node]) -> Edge | None:
    """The float edge that matches a use of a pair in the Q/DQ model; None if there is none."""
    if use.node == GRAPH:
        tensor = qdq_model.outputs[use.slot]
        if tensor not in float_model.outputs:
            return None
        known = _is_read_by_pair(float_model, qdq_model, tensor, pair.source, twins)
        return Edge(tensor, "", float_model.outputs.index(tensor)) if known else None
    twin = twins.get(use.node)
    if twin is None or not 0 <= use.slot < len(twin.inputs) or not twin.inputs[use.slot]:
        return None
    tensor, edge = twin.inputs[use.slot], twin.into[use.slot]
    info = float_model.tensors.get(tensor)
    is_fixed = tensor in float_model.constants or (pair.is_constant and weight_at(float_model, edge) is not None)
    return edge if is_fixed == pair.is_constant and (info is None or info.is_float) else None


@dataclass(frozen=True, eq=False)
class DynamicProduct:
    """A product with dynamic quantization (see `insertion`): its MatMulInteger, the float tensor that is quantized, the
    constant scale of the weight and its bits, and the last node, which makes floats."""

    node: Node
    source: str
    scale: str
    bits: Literal[7, 8]
    last: Node


def dynamic_products_of(model: Model) -> Iterator[DynamicProduct]:
    """Dynamically quantized products with signed weights, as written by `insertion` or ONNX Runtime's
    quantize_dynamic."""
    for node in model.nodes:
        if node.op != "MatMulInteger" or len(node.inputs) < 3:
            continue
        front, weight = model.maker(node.inputs[0]), model.constants.get(node.inputs[1])
        zero = model.constants.get(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else None
        is_plain = len(node.inputs) == 3 or not node.inputs[3] or (zero is not None and not zero.array().any())
        if weight is None or weight.dtype != TensorProto.INT8 or len(weight.shape) != 2 or not is_plain:
            continue
        if front is None or front.op != "DynamicQuantizeLinear" or node.inputs[:3:2] != front.outputs[::2]:
            continue
        cast = reader(model, node)
        scaling = reader(model, cast) if cast is not None and cast.op == "Cast" else None
        if cast is None or scaling is None or scaling.op != "Mul":
            continue
        scales = next((m for m in filter(None, map(model.maker, scaling.inputs)) if m != cast), None)
        if scales is None or scales.op != "Mul" or front.outputs[1] not in scales.inputs:
            continue
        scale = next((t for t in scales.inputs if t in model.constants), None)
        if scale is not None:
            integers = weight.array().astype(np.int16)
            bits: Literal[7, 8] = 7 if max(-integers.min(initial=0), integers.max(initial=0)) < 64 else 8
            yield DynamicProduct(node, front.inputs[0], scale, bits, scaling)


def count_pairs(placement: Placement) -> int:
    """The number of tensors with a Q/DQ pair, however many nodes read each: what messages and reports call pairs."""
    return len({edge.tensor for edge in placement.edges})
