"""Writes a float model with a placement as a Q/DQ model.

`quantizations` decides scales, biases and clamps first, then nodes are written in one pass.

A weight in a weight format becomes integers and a DequantizeLinear, which kernels fuse; for them, a Gemm loses transB
and a Transpose of the constant is removed. Dynamic quantization writes the nodes that ONNX Runtime fuses into one
kernel: DynamicQuantizeLinear, MatMulInteger, and a Cast and a Mul that convert the sums to float.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration import scales
from qdqtune.calibration.scales import Quantization, Ranges
from qdqtune.errors import BadModel
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import Constant, Model, Node, rebuild
from qdqtune.graph.simplifying import UniqueNames, names_in
from qdqtune.placement.possible import possible_edges, weight_at
from qdqtune.placement.quantizations import Bias, Decision, Quantizer, float_type
from qdqtune.placement.weight_only import BLOCK_OPSET, FormattedWeights
from qdqtune.types import Array, Edge, NumericFormat, Placement, WeightFormat

HALF_ROUNDING = 2**-8
"""The relative difference of scales that rounding can explain: bfloat16 keeps 8 bits of a number, float16 11."""

RAW_OUTPUT = "_QuantizeLinear_Input"
"""Suffix of the float tensor in front of the pair of a graph output (as in ONNX Runtime's quantize_static)."""


def insert(model: Model, placement: Placement, ranges: Ranges, fmt: NumericFormat) -> Model:
    """The Q/DQ model of one placement (see `Inserter.insert`)."""
    return Inserter(model, ranges, fmt).insert(placement)


class Inserter:
    """Writes Q/DQ models of one float model; caches scales, which most placements share. All edges of a tensor share
    one Q and one DQ. Constants are stored quantized, with a DQ."""

    def __init__(self, model: Model, ranges: Ranges, fmt: NumericFormat) -> None:
        self.model, self._ranges, self._format = model, ranges, fmt
        self._quantizer, self._weights = Quantizer(model, ranges, fmt), FormattedWeights(model)
        self._names = names_in(model.proto.graph) | set(model.index_of)

    def insert(self, placement: Placement) -> Model:
        """The model with the pairs and weight formats of `placement`.

        Raises:
            ValueError: an edge does not exist in the model, cannot carry its pair or weight format, or has no range; or
                the opset or the engine's number format lacks what a pair needs.
        """
        model = self.model
        if model.opset < max(self._weights.opset(placement), BLOCK_OPSET if placement.wide else 0):
            return self._raised.insert(placement)
        if placement.wide and self._format.wide is None:
            raise ValueError("the engine's number format has no activations in 16 bits")
        if placement.edges and not placement.edges <= self._possible:
            raise ValueError(f"no pair can stand on {min(placement.edges - self._possible)}")
        for edge, weight_format in placement.weight_only:
            if not self._weights.can_have(edge, weight_format):
                raise ValueError(f"{weight_format.name} cannot be the weight format of {edge}")
        is_half = any(float_type(model, t) != np.float32 for t in {e.tensor for e in placement.edges})
        needed = max(self._format.opset, 19 if is_half else 13)
        if placement.edges and model.opset < needed:
            raise ValueError(f"the model has opset {model.opset}, its pairs need {needed}")
        decision, names = self._quantizer.decide(placement), UniqueNames(self._names)
        return _Writer(model, self._format, self._weights, decision, placement, names).written()

    @cached_property
    def _raised(self) -> Inserter:
        return Inserter(with_opset(self.model, BLOCK_OPSET), self._ranges, self._format)

    @cached_property
    def _possible(self) -> frozenset[Edge]:
        return possible_edges(self.model, self._ranges)


class _Writer:
    def __init__(
        self, model: Model, fmt: NumericFormat, weights: FormattedWeights, decision: Decision, placement: Placement,
        names: UniqueNames,
    ) -> None:  # fmt: skip
        self._model, self._format, self._weights = model, fmt, weights
        self._decision, self._placement, self._fresh = decision, placement, names.fresh
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, Constant] = {}
        self._made: dict[object, str] = {}
        """Names of the tensors that were written, each by a key of all that determines it."""
        shown = sorted(Edge(tensor, "", slot) for slot, tensor in enumerate(model.outputs))
        self._outputs = {e.tensor: e for e in shown if e in placement}
        self._raw = {tensor: self._fresh(tensor + RAW_OUTPUT) for tensor in self._outputs}
        """The float tensor in front of the pair of each graph output."""

    def written(self) -> Model:
        model, decision, placement = self._model, self._decision, self._placement
        gone = decision.dropped | self._weights.superfluous(placement)
        renamed = {model.nodes[i].inputs[0]: model.nodes[i].outputs[0] for i in decision.dropped} | self._raw
        for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
            if node.index in gone:
                continue
            edges = node.into
            inputs = self._inputs(node, edges)
            outputs = [renamed.get(tensor, tensor) for tensor in node.outputs]
            weights = [edge for edge in edges if edge in placement.weight_formats]
            if (*inputs, *outputs) == (*node.inputs, *node.outputs) and not weights:
                self._nodes.append(proto)
                continue
            written = deepcopy(proto)
            written.input[:], written.output[:] = inputs, outputs
            behind: list[onnx.NodeProto] = []
            for edge in weights:
                behind += self._with_format(written, edge, placement.weight_formats[edge])
            self._nodes += [written, *behind]
        for edge in self._outputs.values():
            self._dequantized(edge)
        result = rebuild(model, self._nodes, self._constants)
        if placement:
            oldest = 9 if model.opset >= 19 else 7
            if model.opset >= BLOCK_OPSET and (placement.weight_only or placement.wide):
                oldest = 10
            result.proto.ir_version = max(result.proto.ir_version, oldest)
        return result

    def _inputs(self, node: Node, edges: Iterable[Edge]) -> list[str]:
        paired = self._placement.edges
        inputs = [self._dequantized(e) if e in paired else self._raw.get(e.tensor, e.tensor) for e in edges]
        bias = self._decision.biases.get(node.index)
        if bias is not None:
            inputs = [*inputs[:2], *[""] * (bias.slot + 1 - len(inputs[:2]))]
            inputs[bias.slot] = self._bias(node, bias)
        return inputs

    def _dequantized(self, edge: Edge) -> str:
        """The name of the DQ output for `edge`; the pair is written at the first call."""
        tensor, made, decision = edge.tensor, self._made, self._decision
        constant = self._model.constants.get(tensor)
        if constant is not None:
            user = self._model.user(edge)
            infos = (self._model.tensors.get(t) for t in (user.inputs if user else ()))
            if not constant.shape and any(info is not None and info.shape for info in infos):
                # TensorRT fails to give a quantized scalar the rank of another operand.
                scalar = constant
                constant = Constant(f"{scalar.key}:vector", scalar.dtype, (1,), lambda: scalar.array().reshape(1))
            return self._constant(tensor, constant, decision.constants[edge])
        if tensor not in made:
            source, output = self._raw.get(tensor, tensor), tensor if tensor in self._raw else ""
            shared = self._shared(tensor)
            self._pair(tensor, tensor, decision.activations[tensor], source, output, shared)
        if edge not in decision.conversions:
            return made[tensor]
        if (tensor, "converted") not in made:
            self._pair((tensor, "converted"), tensor, decision.converted[tensor], made[tensor])
        return made[tensor, "converted"]

    def _pair(
        self, key: object, tensor: str, quantization: Quantization, source: str, output: str = "", shared: str = ""
    ) -> None:
        """Write a DQ and, unless it reads the integers `shared`, a Q. `key` is the cache key of the DQ's output."""
        parameters = self._parameters(tensor, quantization)
        integers = shared or self._fresh(f"{tensor}_QuantizeLinear_Output")
        output = output or self._fresh(f"{tensor}_DequantizeLinear_Output")
        if not shared:
            self._add("QuantizeLinear", tensor, [source, *parameters], integers)
        self._add("DequantizeLinear", tensor, [integers, *parameters], output)
        self._made[key, "integers"], self._made[key] = integers, output

    def _shared(self, tensor: str) -> str:
        """The integers of a pair in front of the Cast that makes `tensor`, to share them if scales are equal up to
        rounding; else "". With another Q behind the Cast, an engine would store the values in float as well.
        """
        cast = self._model.maker(tensor)
        before = cast.inputs[0] if cast is not None and cast.op == "Cast" and tensor not in self._raw else ""
        own, other = self._decision.activations[tensor], self._decision.activations.get(before)
        if other is None or (own.qtype, own.zero_point) != (other.qtype, other.zero_point):
            return ""
        if not np.allclose(own.scale, other.scale, rtol=HALF_ROUNDING, atol=0):
            return ""
        self._dequantized(Edge(before, "", 0))
        return self._made[before, "integers"]

    def _constant(self, tensor: str, constant: Constant, quantization: Quantization) -> str:
        """The DQ output for a constant, which is stored quantized, or with `float_weights` in float with a Q."""
        integers, axis = quantized(constant, quantization), quantization.axis
        key = (tensor, integers.key)
        if key in self._made:
            return self._made[key]
        name = self._fresh(f"{tensor}_quantized")
        if not self._format.float_weights:
            self._constants[name] = integers
        parameters = self._parameters(tensor, quantization)
        if self._format.float_weights:
            source = self._fresh(f"{tensor}_float")
            self._constants[source] = constant
            self._add("QuantizeLinear", tensor, [source, *parameters], name, axis=axis)
        self._made[key] = self._fresh(f"{tensor}_DequantizeLinear_Output")
        self._add("DequantizeLinear", tensor, [name, *parameters], self._made[key], axis=axis)
        return self._made[key]

    def _bias(self, node: Node, bias: Bias) -> str:
        """The name of a node's new bias: the output of a DQ of int32 values, or else a corrected float bias."""
        tensor = (node.inputs[bias.slot] if len(node.inputs) > bias.slot else "") or f"{node.outputs[0]}_bias"
        if bias.scale is None:
            return self._in_memory(f"{tensor}_corrected", bias.values)
        name = self._in_memory(f"{tensor}_quantized", bias.values)
        scale = self._in_memory(f"{name}_scale", bias.scale.astype(float_type(self._model, node.inputs[1])))
        zero_point = self._in_memory(f"{name}_zero_point", np.zeros(bias.scale.shape, np.int32))
        output = self._fresh(f"{tensor}_DequantizeLinear_Output")
        axis = 0 if bias.scale.ndim else None
        self._add("DequantizeLinear", tensor, [name, scale, zero_point], output, axis=axis)
        return output

    def _parameters(self, tensor: str, quantization: Quantization) -> tuple[str, str]:
        dtype = float_type(self._model, tensor)
        if self._format.float_weights and dtype == np.float16:
            raise BadModel(
                f"{tensor} is float16, and an engine that takes no integer weights reads float32 scales only: give the "
                "float32 model, the engine makes its float layers float16 by itself"
            )
        values = quantization.scale.astype(dtype)
        zeros = np.full(quantization.scale.shape, quantization.zero_point, quantization.qtype.dtype)
        return self._in_memory(f"{tensor}_scale", values), self._in_memory(f"{tensor}_zero_point", zeros)

    def _with_format(self, node: onnx.NodeProto, edge: Edge, weight_format: WeightFormat) -> tuple[onnx.NodeProto, ...]:
        """Change `node` to read its weight at `edge` in a weight format; returns the nodes that have to follow it."""
        weight = weight_at(self._model, edge)
        assert weight is not None  # `problem` was asked first
        names = []
        for what, constant in self._weights.parts(weight, weight_format).items():
            key = (edge.tensor, constant.key)
            if key not in self._made:
                self._made[key] = self._fresh(f"{edge.tensor}_{what}")
                self._constants[self._made[key]] = constant
            names.append(self._made[key])
        if weight_format.dynamic:
            return self._as_integers(node, names)
        weights = ("dequantized", *names)
        if weights not in self._made:
            block, axis = weight_format.block, 1 if weight_format.block is None else 0
            self._made[weights] = self._fresh(f"{edge.tensor}_DequantizeLinear_Output")
            self._add("DequantizeLinear", edge.tensor, names, self._made[weights], axis=axis, block_size=block)
        node.input[edge.index] = self._made[weights]
        kept = [a for a in node.attribute if a.name != "transB"]
        del node.attribute[:]
        node.attribute.extend(kept)
        return ()

    def _as_integers(self, node: onnx.NodeProto, names: list[str]) -> tuple[onnx.NodeProto, ...]:
        """Turn a product into a MatMulInteger; returns the nodes behind it, which convert its sums to float and add the
        bias of a Gemm. Products of one activation share its DynamicQuantizeLinear."""
        (source, _, *bias), result, name = node.input, node.output[0], node.name
        parts = [("dynamic", source, what) for what in ("quantized", "scale", "zero_point")]
        if parts[0] not in self._made:
            self._made |= {part: self._fresh(f"{source}_dynamic_{part[-1]}") for part in parts}
            made, own = [self._made[part] for part in parts], self._fresh(f"{source}_DynamicQuantizeLinear")
            self._nodes.append(helper.make_node("DynamicQuantizeLinear", [source], made, own))
        integers, scale, zero_point = (self._made[part] for part in parts)
        sums, floats, scaling = (self._fresh(f"{result}_{what}") for what in ("sums", "floats", "scales"))
        node.op_type = "MatMulInteger"
        node.input[:], node.output[:] = [integers, names[0], zero_point], [sums]
        del node.attribute[:]
        scaled = self._fresh(f"{result}_scaled") if any(bias) else result
        nodes = [
            helper.make_node("Cast", [sums], [floats], self._fresh(f"{name}_Cast"), to=TensorProto.FLOAT),
            helper.make_node("Mul", [scale, names[1]], [scaling], self._fresh(f"{name}_scales")),
            helper.make_node("Mul", [floats, scaling], [scaled], self._fresh(f"{name}_Mul")),
        ]
        if any(bias):
            nodes.append(helper.make_node("Add", [scaled, *bias], [result], self._fresh(f"{name}_Add")))
        return tuple(nodes)

    def _in_memory(self, wanted: str, values: Array) -> str:
        name = self._fresh(wanted)
        self._constants[name] = Constant.of(np.asarray(values))
        return name

    def _add(self, op: str, tensor: str, inputs: list[str], output: str, **attributes: Any) -> None:
        """Append a Q or a DQ of `tensor`; attributes that are None are left out."""
        self._nodes.append(helper.make_node(op, inputs, [output], self._fresh(f"{tensor}_{op}"), **attributes))


def quantized(constant: Constant, quantization: Quantization) -> Constant:
    """The quantized form of a constant, computed when it is written or read."""
    scale = hashlib.sha256(quantization.scale.tobytes()).hexdigest()[:16]
    key = f"{constant.key}:{quantization.qtype.value}:{quantization.axis}:{quantization.zero_point}:{scale}"
    dtype = helper.np_dtype_to_tensor_dtype(quantization.qtype.dtype)
    return Constant(key, dtype, constant.shape, lambda: scales.quantize(constant.array(), quantization))
