"""Writes a float model with a placement as a Q/DQ model.

Baselines, candidates and final models all come from here; the empty placement gives the baseline. `quantizations`
decides scales, biases and clamps first, then nodes are written in one pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from copy import deepcopy
from functools import cached_property

import numpy as np
import onnx
from onnx import helper

from qdqtune.calibration import scales
from qdqtune.calibration.scales import Quantization, Ranges
from qdqtune.errors import BadModel
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import GRAPH, Constant, Model, Node, rebuild
from qdqtune.graph.simplifying import UniqueNames, names_in
from qdqtune.placement.possible import refusal, unscaled
from qdqtune.placement.quantizations import TAKES_BIAS, Decision, Quantizer, float_type
from qdqtune.placement.weight_only import BLOCK_OPSET, GraphBuilder, WeightOnlyWriter
from qdqtune.types import Edge, NumericFormat, Placement

HALF_ROUNDING = 2**-8
"""Relative differences of scales that rounding explains: bfloat16 keeps 8 bits of a number, float16 11."""

RAW_OUTPUT = "_QuantizeLinear_Input"
"""Suffix of the float tensor in front of the pair of a graph output (as in ONNX Runtime's quantize_static)."""


def insert(model: Model, placement: Placement, ranges: Ranges, fmt: NumericFormat) -> Model:
    """`Inserter.insert` of a single placement."""
    return Inserter(model, ranges, fmt).insert(placement)


class Inserter:
    """Writes candidates of one model; caches scales and quantized weights, which most candidates share.

    One Q and one DQ serve all edges of a tensor. Constants become quantized initializers behind a DQ. The number format
    says whether biases become int32, operators share scales, and clamps go.
    """

    def __init__(self, model: Model, ranges: Ranges, fmt: NumericFormat) -> None:
        self._model, self._ranges, self._format = model, ranges, fmt
        self._forms: dict[tuple[object, ...], Constant] = {}
        self._checked = frozenset[Edge]()
        self._into = [node.into for node in self._model.nodes]
        self._quantizer = Quantizer(self._model, ranges, fmt)
        self._names = names_in(model.proto.graph) | set(model.index_of)
        self._weight_writer = WeightOnlyWriter(self._model)

    def insert(self, placement: Placement) -> Model:
        """The model with the pairs and weight formats of `placement`.

        Raises:
            ValueError: an edge does not exist in the model, cannot carry a pair, or its tensor has no range.
        """
        if self._model.opset < max(self._weight_writer.opset(placement), BLOCK_OPSET if placement.wide else 0):
            return self._raised.insert(placement)
        self._check(placement)
        return self._write(self._quantizer.decide(placement), placement)

    @cached_property
    def _raised(self) -> Inserter:
        """An inserter of the same model in BLOCK_OPSET, which scales of blocks need, and pairs of 16 bits."""
        return Inserter(with_opset(self._model, BLOCK_OPSET), self._ranges, self._format)

    def _check(self, placement: Placement) -> None:
        if placement.wide and self._format.wide is None:
            raise ValueError("the engine's number format has no activations in 16 bits")
        if new := placement.edges - self._checked:
            for edge in sorted(new):
                if edge_problem := self._problem(edge):
                    raise ValueError(f"no pair can stand on {edge}: {edge_problem}")
            self._checked |= new
        for edge, weight_format in placement.weight_only:
            if (problem := self._weight_writer.problem(edge, weight_format)) is not None:
                raise ValueError(f"{weight_format.name} cannot be the weight format of {edge}: {problem}")
        is_half = any(float_type(self._model, t) != np.float32 for t in {e.tensor for e in placement.edges})
        opset, needed = self._model.opset, max(self._format.opset, 19 if is_half else 13)
        if placement.edges and opset < needed:
            raise ValueError(f"the model has opset {opset}, its pairs need {needed}")

    def _problem(self, edge: Edge) -> str | None:
        model, node = self._model, GRAPH if edge.is_graph_output else self._model.index_of.get(edge.node)
        slots = () if node is None else model.outputs if node == GRAPH else model.nodes[node].inputs
        if node is None or not 0 <= edge.index < len(slots) or slots[edge.index] != edge.tensor:
            return "the model has no such edge"
        return refusal(model, edge.tensor, node, edge.index) or unscaled(model, edge.tensor, self._ranges)

    def _write(self, decision: Decision, placement: Placement) -> Model:
        model = self._model
        builder = GraphBuilder(UniqueNames(self._names))
        renamed = {model.nodes[i].inputs[0]: model.nodes[i].outputs[0] for i in decision.dropped}
        shown = sorted(Edge(tensor, "", slot) for slot, tensor in enumerate(model.outputs))
        paired = {e.tensor: e for e in shown if e in placement}
        raw = {tensor: builder.names.fresh(tensor + RAW_OUTPUT) for tensor in paired}
        weight_formats, superfluous = placement.weight_formats, self._weight_writer.superfluous(placement)
        changed = self._changed(placement, decision, raw.keys() | renamed.keys() | set(renamed.values()))
        for node in model.nodes:
            if node.index in decision.dropped or node.index in superfluous:
                continue
            if node.index not in changed:
                builder.nodes.append(model.proto.graph.node[node.index])
                continue
            inputs = self._inputs(builder, decision, node, placement.edges, raw)
            outputs = [raw.get(tensor, renamed.get(tensor, tensor)) for tensor in node.outputs]
            written = deepcopy(model.proto.graph.node[node.index])
            written.input[:], written.output[:] = inputs, outputs
            behind: list[onnx.NodeProto] = []
            for edge in self._into[node.index]:
                if edge in weight_formats:
                    behind += self._weight_writer.write(builder, written, edge, weight_formats[edge])
            builder.nodes += [written, *behind]
        for edge in paired.values():
            self._dequantized(builder, decision, edge, raw)
        result = rebuild(model, builder.nodes, builder.constants)
        if placement:
            oldest = 9 if model.opset >= 19 else 7
            if model.opset >= BLOCK_OPSET and (placement.weight_only or placement.wide):
                oldest = 10
            result.proto.ir_version = max(result.proto.ir_version, oldest)
        return result

    def _inputs(
        self, builder: GraphBuilder, decision: Decision, node: Node, paired: Set[Edge], raw: Mapping[str, str]
    ) -> list[str]:
        inputs = [
            self._dequantized(builder, decision, e, raw) if e in paired else raw.get(e.tensor, e.tensor)
            for e in self._into[node.index]
        ]
        if node.index in decision.biases or node.index in decision.shifted:
            slot = 2 if node.op in TAKES_BIAS else decision.shifted[node.index].slot
            inputs = [*inputs[:2], *[""] * (slot + 1 - len(inputs[:2]))]
            inputs[slot] = self._bias(builder, node, slot, decision)
        return inputs

    def _changed(self, placement: Placement, decision: Decision, touched: Set[str]) -> set[int]:
        """Indices of the nodes that differ from the float model; `touched` are the renamed tensors."""
        model = self._model
        names = {e.node for e in (*placement.edges, *placement.weight_formats)} - {""}
        changed = {*map(model.index_of.__getitem__, names), *decision.biases, *decision.shifted}
        for tensor in touched:
            changed.update(use.node for use in model.uses(tensor))
            changed.add(model.producers.get(tensor, GRAPH))
        return changed

    def _dequantized(self, builder: GraphBuilder, decision: Decision, edge: Edge, raw: Mapping[str, str]) -> str:
        """The name of the DQ output for `edge`, the output's own for a graph output, whose float tensor is named in
        `raw`; the pair is written at the first call."""
        tensor, made = edge.tensor, builder.made
        constant = self._model.constants.get(tensor)
        if constant is not None:
            return self._constant(builder, tensor, self._without_scalar(edge, constant), decision.constants[edge])
        if tensor not in made:
            shared = self._shared(builder, decision, tensor, raw)
            source, output = raw.get(tensor, tensor), tensor if tensor in raw else ""
            quantization = decision.activations[tensor]
            made[tensor, "integers"], made[tensor] = self._pair(builder, tensor, quantization, source, output, shared)
        if edge not in decision.conversions:
            return made[tensor]
        key = (tensor, "converted")
        if key not in made:
            _, made[key] = self._pair(builder, tensor, decision.converted[tensor], made[tensor])
        return made[key]

    def _pair(
        self, builder: GraphBuilder, tensor: str, quantization: Quantization, source: str, output: str = "",
        shared: str | None = None,
    ) -> tuple[str, str]:  # fmt: skip
        """Writes a DQ and, unless its integers are `shared`, a Q in front; returns what the two make."""
        parameters = self._parameters(builder, tensor, quantization)
        integers = shared or builder.names.fresh(f"{tensor}_QuantizeLinear_Output")
        output = output or builder.names.fresh(f"{tensor}_DequantizeLinear_Output")
        if shared is None:
            builder.add_converter("QuantizeLinear", tensor, source, parameters, integers)
        builder.add_converter("DequantizeLinear", tensor, integers, parameters, output)
        return integers, output

    def _shared(self, builder: GraphBuilder, decision: Decision, tensor: str, raw: Mapping[str, str]) -> str | None:
        """The quantized tensor of a pair in front of the Cast that makes `tensor`, if it has the same scale but for
        rounding. With a Q of its own behind the Cast, an engine would store the values in float beside those in 8 bits.
        """
        cast = self._model.maker(tensor)
        before = cast.inputs[0] if cast is not None and cast.op == "Cast" and tensor not in raw else ""
        own, other = decision.activations[tensor], decision.activations.get(before)
        if other is None or (own.qtype, own.zero_point) != (other.qtype, other.zero_point):
            return None
        if not np.allclose(own.scale, other.scale, rtol=HALF_ROUNDING, atol=0):
            return None
        self._dequantized(builder, decision, Edge(before, "", 0), raw)
        return builder.made[before, "integers"]

    def _without_scalar(self, edge: Edge, constant: Constant) -> Constant:
        """The constant; a scalar beside an operand of some rank as a vector of one element: TensorRT fails to give a
        quantized scalar that rank."""
        user = self._model.user(edge)
        known = (self._model.tensors[t].shape for t in (user.inputs if user else ()) if t in self._model.tensors)
        if constant.shape or not any(known):
            return constant
        return Constant(f"{constant.key}:vector", constant.dtype, (1,), lambda: constant.array().reshape(1))

    def _constant(self, builder: GraphBuilder, tensor: str, constant: Constant, quantization: Quantization) -> str:
        """The name of the DQ output behind a quantized constant, or with `float_weights` behind a Q of a float one."""
        key = (constant.key, quantization.qtype, quantization.axis, quantization.scale.tobytes(), tensor)
        if key in builder.made:
            return builder.made[key]
        name = builder.names.fresh(f"{tensor}_quantized")
        if not self._format.float_weights:
            if key not in self._forms:
                self._forms[key] = quantized(constant, quantization)
            builder.constants[name] = self._forms[key]
        parameters = self._parameters(builder, tensor, quantization)
        if self._format.float_weights:
            source = builder.names.fresh(f"{tensor}_float")
            builder.constants[source] = constant
            builder.add_converter("QuantizeLinear", tensor, source, parameters, name, quantization.axis)
        output = builder.made[key] = builder.names.fresh(f"{tensor}_DequantizeLinear_Output")
        builder.add_converter("DequantizeLinear", tensor, name, parameters, output, quantization.axis)
        return output

    def _bias(self, builder: GraphBuilder, node: Node, slot: int, decision: Decision) -> str:
        """The name of a node's new bias: the output of a DQ of int32 values, or else a corrected float bias."""
        tensor = (node.inputs[slot] if len(node.inputs) > slot else "") or f"{node.outputs[0]}_bias"
        bias = decision.biases.get(node.index)
        if bias is None:
            return builder.constant(f"{tensor}_corrected", decision.shifted[node.index].values)
        name = builder.constant(f"{tensor}_quantized", bias.values)
        parameters = (
            builder.constant(f"{name}_scale", bias.scale.astype(float_type(self._model, node.inputs[1]))),
            builder.constant(f"{name}_zero_point", np.zeros(bias.scale.shape, np.int32)),
        )
        output = builder.names.fresh(f"{tensor}_DequantizeLinear_Output")
        builder.add_converter("DequantizeLinear", tensor, name, parameters, output, 0 if bias.scale.ndim else None)
        return output

    def _parameters(self, builder: GraphBuilder, tensor: str, quantization: Quantization) -> tuple[str, str]:
        dtype = float_type(self._model, tensor)
        if self._format.float_weights and dtype == np.float16:
            raise BadModel(
                f"{tensor} is float16, and an engine that takes no integer weights reads float32 scales only: give the "
                "float32 model, the engine makes its float layers float16 by itself"
            )
        values = quantization.scale.astype(dtype)
        zeros = np.full(quantization.scale.shape, quantization.zero_point, scales.NUMPY_TYPE[quantization.qtype])
        return builder.constant(f"{tensor}_scale", values), builder.constant(f"{tensor}_zero_point", zeros)


def quantized(constant: Constant, quantization: Quantization) -> Constant:
    """The quantized form of a constant, computed when it is written or read."""
    scale = hashlib.sha256(quantization.scale.tobytes()).hexdigest()[:16]
    key = f"{constant.key}:{quantization.qtype.value}:{quantization.axis}:{quantization.zero_point}:{scale}"
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(scales.NUMPY_TYPE[quantization.qtype]))
    return Constant(key, dtype, constant.shape, lambda: scales.quantize(constant.array(), quantization))
