"""Writes the float model with values rounded on some edges, as by the pairs of a Q/DQ file: always, or behind switches.

A switch is a boolean model input and an If node, which passes a tensor on either unchanged or rounded. An If copies its
result; so for a large weight, the If encloses the only node that reads it instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.graph.model import Constant, Model, rebuild
from qdqtune.graph.operators import CLAMPS
from qdqtune.graph.simplifying import UniqueNames, drop_unused, names_in
from qdqtune.placement.insertion import RAW_OUTPUT
from qdqtune.placement.reading import Pair, counterpart, is_conversion, pairs_of, twins_of
from qdqtune.types import Edge

SWITCH = "__switch_"
"""Prefix of the inputs that switch roundings on; the number of the rounding follows."""

ERROR, POWER = "__error_", "__power_"
"""Prefixes of the outputs of `with_errors`."""


@dataclass(frozen=True, eq=False)
class Rounding:
    """Nodes that round one tensor on some of its edges, in a chain: the first reads `source`, each other one the result
    before it. `source` is `tensor`; or the input of the Relu or Clip that makes it, if the rounding replaces that."""

    tensor: str
    source: str
    edges: tuple[Edge, ...]
    nodes: tuple[onnx.NodeProto, ...]
    constants: Mapping[str, Constant]


def with_roundings(model: Model, roundings: Sequence[Rounding], *, switched: bool) -> Model:
    """`model` with these roundings; if `switched`, rounding i is on only while the model input `SWITCH` + i is true."""
    return _Writer(model, roundings, is_switched=switched).written()


def with_errors(model: Model, roundings: Sequence[Rounding]) -> Model:
    """`model` with two outputs for each rounding, the sums of squares of its error and of its exact tensor: `ERROR` and
    `POWER` with its number."""
    writer = _Writer(model, roundings, is_switched=True)
    writer.raw.clear()  # outputs keep their names: nothing reads the rounded tensors
    outputs = []
    for number, rounding in enumerate(roundings):
        exact, error = rounding.tensor, f"__error_of_{number}"
        chain = list(writer.copies(number))
        chain.append(helper.make_node("Sub", [chain[-1].output[0], exact], [error], error))
        for prefix, tensor in ((ERROR, error), (POWER, exact)):
            name = f"{prefix}{number}"
            chain.append(helper.make_node("Cast", [tensor], [f"{name}_float"], f"{name}_float", to=TensorProto.FLOAT))
            chain.append(helper.make_node("ReduceSumSquare", [f"{name}_float"], [name], name, keepdims=0))
            outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
        writer.nodes += chain
    result = rebuild(model, [*model.proto.graph.node, *writer.nodes], writer.added)
    del result.proto.graph.output[:]
    result.proto.graph.output.extend(outputs)
    return result


def is_switched_at_reader(model: Model, edge: Edge) -> bool:
    """Whether the If of a switch encloses the reader of a tensor, and not the tensor alone: for a large constant with
    one use, if its reader has one output of known type."""
    if edge.is_graph_output or edge.tensor not in model.large or len(model.uses(edge.tensor)) != 1:
        return False
    outputs = model.node(edge.node).outputs
    return len(outputs) == 1 and outputs[0] in model.tensors


class _Writer:
    """Writes one model: nodes in graph order, a rounding before its first reader."""

    def __init__(self, model: Model, roundings: Sequence[Rounding], *, is_switched: bool) -> None:
        self._model, self._roundings, self._is_switched = model, roundings, is_switched
        self._numbers = {edge: number for number, rounding in enumerate(roundings) for edge in rounding.edges}
        names = UniqueNames(names_in(model.proto.graph))
        shown = dict.fromkeys(e.tensor for e in self._numbers if e.is_graph_output)
        self.raw = {tensor: names.fresh(tensor + RAW_OUTPUT) for tensor in shown}
        self._made: dict[int, str] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.added: dict[str, Constant] = {}

    def written(self) -> Model:
        model = self._model
        for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
            copy, rounded = deepcopy(proto), [e for e in node.into if e in self._numbers]
            weight = next((e for e in rounded if self._is_switched and is_switched_at_reader(model, e)), None)
            for slot, edge in enumerate(node.into):
                if edge != weight:
                    copy.input[slot] = self._read(edge)
            for slot, tensor in enumerate(node.outputs):
                copy.output[slot] = self.raw.get(tensor, tensor)
            self.nodes.append(copy if weight is None else self._switched_reader(copy, weight, node.outputs[0]))
        for slot, tensor in enumerate(model.outputs):
            self._read(Edge(tensor, "", slot))
        result = rebuild(model, self.nodes, self.added)
        if self._is_switched:
            switches = (f"{SWITCH}{number}" for number in range(len(self._roundings)))
            result.proto.graph.input.extend(helper.make_tensor_value_info(s, TensorProto.BOOL, []) for s in switches)
            return result
        large = dict(result.large)
        drop_unused(result.proto.graph, large)  # such as a clamp that a rounding replaces
        return Model(result.proto, large)

    def _read(self, edge: Edge) -> str:
        """The name of the tensor that the user of an edge reads; its rounding is written at the first call."""
        number = self._numbers.get(edge)
        if number is None:
            return self.raw.get(edge.tensor, edge.tensor)
        if number not in self._made:
            self._made[number] = self._write(number)
        return self._made[number]

    def _write(self, number: int) -> str:
        rounding = self._roundings[number]
        is_output = any(edge.is_graph_output for edge in rounding.edges)
        result = rounding.tensor if is_output else f"__rounded_{number}"
        nodes = list(self.copies(number))
        if not self._is_switched:
            nodes[-1].output[0] = result
            self.nodes += nodes
            return result
        same, name = f"__rounded_{number}_same", f"__rounded_{number}"
        passing = helper.make_node("Identity", [self.raw.get(rounding.tensor, rounding.tensor)], [same], same)
        dtype = self._model.tensors[rounding.tensor].dtype
        self.nodes.append(_either(f"{SWITCH}{number}", nodes, [passing], dtype, result, name))
        return result

    def _switched_reader(self, reader: onnx.NodeProto, edge: Edge, output: str) -> onnx.NodeProto:
        """An If with two copies of the only node that reads a weight: one reads it rounded, one as it is."""
        number = self._numbers[edge]
        rounding, copies = list(self.copies(number)), [deepcopy(reader), deepcopy(reader)]
        for copy, name in zip(copies, ("rounded", "plain"), strict=True):
            copy.name = copy.output[0] = f"__rounded_{number}_{name}"
        copies[0].input[edge.index] = rounding[-1].output[0]
        dtype = self._model.tensors[output].dtype
        whole = [*rounding, copies[0]]
        return _either(f"{SWITCH}{number}", whole, copies[1:], dtype, reader.output[0], f"__rounded_{number}")

    def copies(self, number: int) -> Iterator[onnx.NodeProto]:
        rounding = self._roundings[number]
        before, others = self.raw.get(rounding.source, rounding.source), dict[str, str]()
        for step, node in enumerate(rounding.nodes):
            copy = deepcopy(node)
            copy.name = f"__rounded_{number}_{step}_{node.op_type}"
            for slot, name in enumerate(node.input):
                if name in rounding.constants:
                    copy.input[slot] = f"__rounded_{number}_{step}_{slot}"
                    self.added[copy.input[slot]] = rounding.constants[name]
                elif slot == 0:
                    copy.input[slot] = before
                else:
                    copy.input[slot] = others[name]
            copy.output[0] = before = f"__rounded_{number}_{step}"
            for slot, name in enumerate(node.output[1:], start=1):
                copy.output[slot] = others[name] = f"__rounded_{number}_{step}_output{slot}"
            yield copy


def _either(
    switch: str, nodes: Sequence[onnx.NodeProto], others: Sequence[onnx.NodeProto], dtype: int, result: str, name: str
) -> onnx.NodeProto:
    """An If with the result of the last of `nodes` where `switch` is true, else of the last of `others`."""
    branches: dict[str, Any] = {
        branch: helper.make_graph(
            body, f"{name}_{branch}", [], [helper.make_tensor_value_info(body[-1].output[0], dtype, None)]
        )
        for branch, body in (("then_branch", nodes), ("else_branch", others))
    }
    return helper.make_node("If", [switch], [result], f"{name}_if", **branches)


Kind = Literal["activation", "constant", "bias"]


@dataclass(frozen=True, eq=False)
class FilePair(Rounding):
    """A pair of a Q/DQ file: its nodes (Q if it has one, and DQ), with the constants that they read; for a conversion
    to other bits, after the nodes of the pair that it converts.

    `edges` are the edges of the float model that the pair is on, all of one tensor.
    """

    kind: Kind
    pair: Pair


def file_pairs(float_model: Model, qdq_model: Model) -> tuple[tuple[FilePair, ...], tuple[str, ...]]:
    """The pairs of `qdq_model` on edges of `float_model` in graph order, and names of DQs with a use on no edge."""
    twins = twins_of(float_model, qdq_model)
    kept = {node.name for node in twins.values()}
    pairs: list[FilePair] = []
    unmatched: list[str] = []
    by_result = {pair.dq.outputs[0]: pair for pair in pairs_of(qdq_model)}
    for result, pair in by_result.items():
        uses = [use for use in qdq_model.uses(result) if not is_conversion(qdq_model, use)]
        if not uses and qdq_model.uses(result):
            continue
        edges = [counterpart(float_model, qdq_model, pair, use, twins) for use in uses]
        known = [e for e in edges if e is not None]
        # A bias may be new: correcting biases gives one to a Conv that had none.
        if (len(known) < len(edges) or not known) and not pair.is_bias:
            unmatched.append(pair.dq.name)
        first, chain = pair, [pair.q, pair.dq]
        while first.source in by_result:
            first = by_result[first.source]
            chain = [first.q, first.dq, *chain]
        nodes = tuple(qdq_model.proto.graph.node[node.index] for node in chain if node is not None)
        read = set[str]().union(*(node.input for node in nodes)) & qdq_model.constants.keys()
        constants = {name: qdq_model.constants[name] for name in sorted(read)}
        kind: Kind = "bias" if pair.is_bias else "constant" if pair.is_constant else "activation"
        before = qdq_model.maker(first.source)
        for tensor in dict.fromkeys(e.tensor for e in known):
            mine = tuple(e for e in known if e.tensor == tensor)
            clamp, source = float_model.maker(tensor), tensor
            if clamp is not None and clamp.op in CLAMPS and clamp.name not in kept:  # the file has dropped it
                source = tensor if before is not None and before.op in CLAMPS else clamp.inputs[0]
            pairs.append(FilePair(tensor, source, mine, nodes, constants, kind, pair))
    last = len(float_model.nodes)
    pairs.sort(key=lambda pair: min(float_model.index_of.get(e.node, last) for e in pair.edges))
    return tuple(pairs), tuple(unmatched)


def representable(rounding: FilePair) -> tuple[float, float]:
    """The least and the largest value that a pair can represent, over all channels; NaN if a scale is NaN. For a
    constant without a Q: of its dequantized values."""
    pair = rounding.pair
    if pair.q is None:
        values = pair.dequantized(rounding.constants[pair.source].array())
    else:
        scale, zero = pair.scale.astype(np.float64), pair.zero_point.astype(np.float64)
        values = np.stack([(end - zero) * scale for end in pair.integers])
    return float(values.min()), float(values.max())


def with_file_pairs(model: Model, pairs: Sequence[FilePair], file: Model, *, switched: bool = False) -> Model:
    """`model` with these pairs of `file` (see `with_roundings`), and the operator sets that they need."""
    result = with_roundings(model, pairs, switched=switched)
    known = {o.domain for o in result.proto.opset_import}
    result.proto.opset_import.extend(o for o in file.proto.opset_import if o.domain not in known)
    result.proto.ir_version = max(result.proto.ir_version, file.proto.ir_version)
    return result
