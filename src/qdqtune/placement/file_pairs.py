"""Puts the pairs of a Q/DQ file on the float model without changing them, even if they are wrong.

`insertion` makes pairs from ranges; here nodes, scales, zero points and quantized constants are those of the file.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
from onnx import helper

from qdqtune.graph.model import Model
from qdqtune.graph.operators import CLAMPS
from qdqtune.placement.reading import Pair, counterpart, ends, is_conversion, pairs_of, twins_of, without_blocks
from qdqtune.placement.switches import Rounding, with_roundings
from qdqtune.types import Array

Kind = Literal["activation", "constant", "bias"]


@dataclass(frozen=True, eq=False)
class FilePair(Rounding):
    """A pair of a Q/DQ file: its Q, if it has one, and its DQ as `nodes`, with the constants that they read. Behind
    another pair, as a conversion to other bits, the nodes of that one come first.

    If the scale of the Q has another type than the values, a Cast stands in front: ONNX defines the division in the
    type of the scale, and ONNX Runtime has no kernel for two types. `edges` are those of the float model that it
    belongs to, all of one tensor. `scale` and `zero_point` are scalars, vectors along `axis`, or for a weight in blocks
    one number for each block along it.
    """

    kind: Kind
    scale: Array
    zero_point: Array
    axis: int


def file_pairs(float_model: Model, qdq_model: Model) -> tuple[tuple[FilePair, ...], tuple[str, ...]]:
    """The pairs of `qdq_model` on edges of `float_model` in graph order, and names of DQs with a use on none."""
    twins = twins_of(float_model, qdq_model)
    kept = {node.name for node in twins.values()}
    pairs: list[FilePair] = []
    unmatched: list[str] = []
    by_result = {pair.dq.outputs[0]: pair for pair in pairs_of(qdq_model)}
    for result, pair in by_result.items():
        uses = [use for use in qdq_model.uses(result) if not is_conversion(qdq_model, use)]
        if not uses and qdq_model.uses(result):
            continue
        edges = [counterpart(float_model, qdq_model, pair, u.node, u.slot, twins) for u in uses]
        known = [e for e in edges if e is not None]
        # A bias may be new: correcting biases gives one to a Conv that had none.
        if (len(known) < len(edges) or not known) and not pair.is_bias:
            unmatched.append(pair.dq.name)
        nodes, first = _nodes(qdq_model, pair), pair
        while first.source in by_result:
            first = by_result[first.source]
            nodes = (*_nodes(qdq_model, first), *nodes)
        read = {name for node in nodes for name in node.input if name in qdq_model.constants}
        kind: Kind = "bias" if pair.is_bias else "constant" if pair.is_constant else "activation"
        for tensor in dict.fromkeys(e.tensor for e in known):
            mine = tuple(e for e in known if e.tensor == tensor)
            constants = {name: qdq_model.constants[name] for name in sorted(read)}
            source = _before_clamp(float_model, qdq_model, tensor, first.source, kept)
            pairs.append(FilePair(tensor, source, mine, nodes, constants, kind, pair.scale, pair.zero_point, pair.axis))
    order = {name: i for i, name in enumerate(float_model.index_of)}
    last = len(order)
    pairs.sort(key=lambda pair: min(order.get(e.node, last) for e in pair.edges))
    return tuple(pairs), tuple(unmatched)


def _nodes(model: Model, pair: Pair) -> tuple[onnx.NodeProto, ...]:
    protos = model.proto.graph.node
    if pair.q is None:
        return (protos[pair.dq.index],)
    info, scale = model.tensors.get(pair.source), model.constants[pair.q.inputs[1]].dtype
    both = protos[pair.q.index], protos[pair.dq.index]
    if info is None or info.dtype == scale:
        return both
    return helper.make_node("Cast", [pair.source], [""], to=scale), *both


def _before_clamp(float_model: Model, qdq_model: Model, tensor: str, source: str, kept: Set[str]) -> str:
    """The input of the Relu or Clip that makes a tensor, if the file has dropped that node; else the tensor."""
    clamp, there = float_model.maker(tensor), qdq_model.maker(source)
    is_clamped = there is not None and there.op in CLAMPS
    if clamp is None or clamp.op not in CLAMPS or clamp.name in kept or is_clamped:
        return tensor
    return clamp.inputs[0]


def representable(pair: FilePair) -> tuple[float, float]:
    """The least and the largest value that a pair of an activation can give, over all channels; NaN if a scale is NaN.

    For a constant without a Q, the least and the largest of its dequantized values.
    """
    block = next((a.i for a in pair.nodes[-1].attribute if a.name == "block_size"), 0)
    is_stored = len(pair.nodes) == 1
    if block and is_stored:
        integers = pair.constants[pair.nodes[0].input[0]].array()
        values = without_blocks(integers, pair.scale, pair.zero_point, pair.axis, block)
        return float(values.min()), float(values.max())
    scale, zero = pair.scale.astype(np.float64), pair.zero_point.astype(np.float64)
    if is_stored:
        integers = pair.constants[pair.nodes[0].input[0]].array().astype(np.float64)
        rank = max(integers.ndim, 1)
        shape = [-1 if i == pair.axis % rank else 1 for i in range(integers.ndim)]
        scale, zero = (a.reshape(shape if a.size > 1 else ()) for a in (scale, zero))
        values = (integers - zero) * scale
    else:
        values = np.stack([(end - zero) * scale for end in ends(pair.zero_point.dtype)])
    return float(values.min()), float(values.max())


def with_file_pairs(model: Model, pairs: Sequence[FilePair], file: Model, *, switched: bool = False) -> Model:
    """`model` with these pairs of `file` and no others (see `with_roundings`), and its operator sets."""
    result = with_roundings(model, pairs, switched=switched)
    known = {o.domain for o in result.proto.opset_import}
    result.proto.opset_import.extend(o for o in file.proto.opset_import if o.domain not in known)
    result.proto.ir_version = max(result.proto.ir_version, file.proto.ir_version)
    return result
