"""The pairs of a Q/DQ file as they stand there, put onto the float model: all, some, or each behind a switch.

`insertion` makes pairs out of ranges. Here nodes, scales, zero points and quantized constants are the file's own,
whatever is wrong with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.graph.model import Constant, Model, rebuild
from qdqtune.graph.operators import CLAMPS
from qdqtune.placement.insertion import RAW_OUTPUT
from qdqtune.placement.reading import counterpart, ends, pairs_of, twins_of, without_blocks
from qdqtune.types import Array, Edge

Kind = Literal["activation", "constant", "bias"]

SWITCH = "__switch_"
"""How the inputs of a model with switches begin; the number of the pair follows."""


@dataclass(frozen=True, eq=False)
class FilePair:
    """A pair of a Q/DQ model, and the edges of the float model that it belongs to: all of one tensor.

    `source` is what its Q reads: `tensor`, or what comes into a Relu or Clip that the file has dropped, since
    saturation did its work. `nodes` are its Q, if it has one, and its DQ; `constants` are those that they read. `scale`
    and `zero_point` are scalars, vectors along `axis`, or of a weight in blocks one for each block along it.
    """

    tensor: str
    source: str
    edges: tuple[Edge, ...]
    kind: Kind
    nodes: tuple[onnx.NodeProto, ...]
    constants: Mapping[str, Constant]
    scale: Array
    zero_point: Array
    axis: int


def file_pairs(float_model: Model, qdq_model: Model) -> tuple[tuple[FilePair, ...], tuple[str, ...]]:
    """The pairs of `qdq_model` on edges of `float_model` in graph order, and the names of DQ nodes that are on none."""
    twins = twins_of(float_model, qdq_model)
    kept = {node.name for node in twins.values()}
    pairs: list[FilePair] = []
    unmatched: list[str] = []
    for pair in pairs_of(qdq_model):
        uses = qdq_model.uses(pair.dq.outputs[0])
        edges = [counterpart(float_model, qdq_model, pair, u.node, u.slot, twins) for u in uses]
        known = [e for e in edges if e is not None]
        if len(known) < len(edges) or not known:
            unmatched.append(pair.dq.name)
        q = qdq_model.producers.get(pair.dq.inputs[0])
        indices = [pair.dq.index] if q is None else [q, pair.dq.index]
        nodes = tuple(qdq_model.proto.graph.node[i] for i in indices)
        read = {name for node in nodes for name in node.input if name in qdq_model.constants}
        kind: Kind = "bias" if pair.is_bias else "constant" if pair.is_constant else "activation"
        for tensor in dict.fromkeys(e.tensor for e in known):
            mine = tuple(e for e in known if e.tensor == tensor)
            constants = {name: qdq_model.constants[name] for name in sorted(read)}
            source = _before_clamp(float_model, qdq_model, tensor, pair.source, kept)
            pairs.append(FilePair(tensor, source, mine, kind, nodes, constants, pair.scale, pair.zero_point, pair.axis))
    order = {name: i for i, name in enumerate(float_model.index_of)}
    last = len(order)
    pairs.sort(key=lambda pair: min(order.get(e.node, last) for e in pair.edges))
    return tuple(pairs), tuple(unmatched)


def _before_clamp(float_model: Model, qdq_model: Model, tensor: str, source: str, kept: Set[str]) -> str:
    """What comes into the Relu or Clip that makes a tensor, if the file has dropped it; else the tensor."""
    clamp, there = float_model.maker(tensor), qdq_model.maker(source)
    is_clamped = there is not None and there.op in CLAMPS
    if clamp is None or clamp.op not in CLAMPS or clamp.name in kept or is_clamped:
        return tensor
    return clamp.inputs[0]


def with_file_pairs(model: Model, pairs: Sequence[FilePair], opset_of: Model, *, switched: bool = False) -> Model:
    """The float model with these pairs, and no others; if `switched`, each behind an If that an input decides, named
    `SWITCH` and its number. Operator sets are those of the model that the pairs are from."""
    return _Writing(model, pairs, switched=switched).written(opset_of)


def representable(pair: FilePair) -> tuple[float, float]:
    """The least and the largest value that a pair of an activation can give; over all channels, NaN as they come.

    For a constant, the least and the largest that it does give.
    """
    block = next((a.i for a in pair.nodes[-1].attribute if a.name == "block_size"), 0)
    if block and len(pair.nodes) == 1:
        integers = pair.constants[pair.nodes[0].input[0]].array()
        values = without_blocks(integers, pair.scale, pair.zero_point, pair.axis, block)
        return float(values.min()), float(values.max())
    shape = [-1 if i == pair.axis else 1 for i in range(_rank(pair))] if pair.scale.size > 1 else ()
    scale, zero = (a.astype(np.float64).reshape(shape) for a in (pair.scale, pair.zero_point.astype(np.float64)))
    if pair.kind == "activation" or len(pair.nodes) > 1:
        values = np.stack([(end - zero) * scale for end in ends(pair.zero_point.dtype)])
    else:
        values = (pair.constants[pair.nodes[0].input[0]].array().astype(np.float64) - zero) * scale
    return float(values.min()), float(values.max())


def _rank(pair: FilePair) -> int:
    source = pair.constants.get(pair.nodes[0].input[0])
    return len(source.shape) if source is not None else pair.axis + 1


class _Writing:
    """One model while it is written."""

    def __init__(self, model: Model, pairs: Sequence[FilePair], *, switched: bool) -> None:
        self._model, self._pairs, self._is_switched = model, pairs, switched
        self._of = {edge: number for number, pair in enumerate(pairs) for edge in pair.edges}
        self._raw = {e.tensor: e.tensor + RAW_OUTPUT for e in self._of if e.is_graph_output}
        self._bypassed = {pair.tensor for pair in pairs if pair.source != pair.tensor}
        self._made: dict[int, str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._added: dict[str, Constant] = {}

    def written(self, opset_of: Model) -> Model:
        model = self._model
        for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
            copy = deepcopy(proto)
            for slot, edge in enumerate(node.into):
                copy.input[slot] = self._read(edge)
            for slot, tensor in enumerate(node.outputs):
                copy.output[slot] = self._raw.get(tensor, tensor)
            self._nodes.append(copy)
        for slot, tensor in enumerate(model.outputs):
            self._read(Edge(tensor, "", slot))
        result = rebuild(model, [n for n in self._nodes if not self._is_idle(n)], self._added)
        if self._is_switched:
            switches = (f"{SWITCH}{number}" for number in range(len(self._pairs)))
            result.proto.graph.input.extend(helper.make_tensor_value_info(s, TensorProto.BOOL, []) for s in switches)
        _raise_opsets(result.proto, opset_of.proto)
        return result

    def _is_idle(self, node: onnx.NodeProto) -> bool:
        """Whether it is a clamp that a pair does without, and nobody else reads."""
        if node.op_type not in CLAMPS or node.output[0] not in self._bypassed:
            return False
        if self._is_switched or any(use.slot < 0 for use in self._model.uses(node.output[0])):
            return False
        read = {name for other in self._nodes for name in other.input} | set(self._model.outputs)
        return node.output[0] not in read

    def _read(self, edge: Edge) -> str:
        """The tensor that the user of an edge reads; the pair is written before its first user."""
        number = self._of.get(edge)
        if number is None:
            return self._raw.get(edge.tensor, edge.tensor)
        if number not in self._made:
            self._made[number] = self._write(number)
        return self._made[number]

    def _write(self, number: int) -> str:
        pair = self._pairs[number]
        is_output = any(edge.is_graph_output for edge in pair.edges)
        result = pair.tensor if is_output else f"__pair_{number}"
        same_as, source = (self._raw.get(tensor, tensor) for tensor in (pair.tensor, pair.source))
        nodes = list(self._copies(number, pair, source))
        if not self._is_switched:
            nodes[-1].output[0] = result
            self._nodes += nodes
            return result
        dtype = self._model.tensors[pair.tensor].dtype
        self._nodes.append(behind_switch(f"{SWITCH}{number}", nodes, same_as, dtype, result, f"__pair_{number}"))
        return result

    def _copies(self, number: int, pair: FilePair, source: str) -> Iterator[onnx.NodeProto]:
        """The pair's nodes under names of their own, the first reading `source` unless it reads a constant."""
        before = source
        for step, node in enumerate(pair.nodes):
            copy = deepcopy(node)
            copy.name = f"__pair_{number}_{node.op_type}"
            for slot, name in enumerate(node.input):
                if name in pair.constants:
                    copy.input[slot] = f"__pair_{number}_{step}_{slot}"
                    self._added[copy.input[slot]] = pair.constants[name]
                elif slot == 0:
                    copy.input[slot] = before
            copy.output[0] = before = f"__pair_{number}_{step}"
            yield copy


def behind_switch(
    switch: str, nodes: Sequence[onnx.NodeProto], otherwise: str, dtype: int, result: str, name: str
) -> onnx.NodeProto:
    """An If: where `switch` holds, what the last of `nodes` makes, else the tensor `otherwise`, of the same type."""
    passing = helper.make_node("Identity", [otherwise], [f"{name}_same"], f"{name}_same")
    return either(switch, nodes, [passing], dtype, result, name)


def either(
    switch: str, nodes: Sequence[onnx.NodeProto], others: Sequence[onnx.NodeProto], dtype: int, result: str, name: str
) -> onnx.NodeProto:
    """An If: where `switch` holds, what the last of `nodes` makes, else what the last of the `others` does."""
    branches: dict[str, Any] = {
        branch: helper.make_graph(
            body, f"{name}_{branch}", [], [helper.make_tensor_value_info(body[-1].output[0], dtype, None)]
        )
        for branch, body in (("then_branch", nodes), ("else_branch", others))
    }
    return helper.make_node("If", [switch], [result], f"{name}_if", **branches)


def _raise_opsets(proto: onnx.ModelProto, source: onnx.ModelProto) -> None:
    """Import what the pairs need: custom domains, and an IR version that has their types."""
    known = {o.domain for o in proto.opset_import}
    proto.opset_import.extend(o for o in source.opset_import if o.domain not in known)
    proto.ir_version = max(proto.ir_version, source.ir_version)
