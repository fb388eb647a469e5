"""Weight-only quantization: writes weights in weight formats, as integers behind a DequantizeLinear (kernels fuse it).

The matrix of a product is stored as [in, out], as kernels of ONNX Runtime, OpenVINO and TensorRT take it: a Gemm loses
transB, and a Transpose of the constant is removed. For a Gather, one Gather picks rows of integers, another their
scales, and a DequantizeLinear follows, since no known engine fuses a DequantizeLinear in front of a Gather.

Dynamic quantization puts a DynamicQuantizeLinear in front of the product, which becomes a MatMulInteger, and the Cast
and the Mul that make floats of its sums behind it: the nodes that ONNX Runtime fuses into one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property, partial

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration.rounding import INTEGER_TYPE, RoundedWeight, rounded_weight
from qdqtune.graph.model import Constant, Model
from qdqtune.graph.simplifying import UniqueNames
from qdqtune.placement.possible import Weight, format_refusal, weight_at, weight_only_edges
from qdqtune.types import Array, Edge, Placement, WeightFormat

BLOCK_OPSET = 21
"""The first opset whose DequantizeLinear has scales for blocks, and 4-bit integers."""


@dataclass
class GraphBuilder:
    """The nodes, constants and unique names of a graph that is being written."""

    names: UniqueNames
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    """In topological order."""
    constants: dict[str, Constant] = field(default_factory=dict)
    made: dict[object, str] = field(default_factory=dict)
    """Names of the tensors that were written, each by a key of all that determines it."""

    def constant(self, wanted: str, values: Array) -> str:
        """Add a constant in memory; returns its name, `wanted` unless that is taken."""
        name = self.names.fresh(wanted)
        self.constants[name] = Constant.of(np.asarray(values))
        return name

    def add_converter(
        self, op: str, tensor: str, source: str, parameters: tuple[str, str], output: str, axis: int | None = None
    ) -> None:
        """Append a Q or a DQ of `tensor` that reads `source` and, as `parameters`, scale and zero point."""
        node = onnx.NodeProto(
            input=(source, *parameters), output=(output,), name=self.names.fresh(f"{tensor}_{op}"), op_type=op
        )
        if axis is not None:
            node.attribute.append(helper.make_attribute("axis", axis))
        self.nodes.append(node)


class WeightOnlyWriter:
    """Writes weights of one model in weight formats; caches scales, which each candidate needs."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._parts: dict[str, dict[str, Constant]] = {}
        self._latest: tuple[str, RoundedWeight] | None = None

    @cached_property
    def _able(self) -> frozenset[Edge]:
        return weight_only_edges(self._model)

    def problem(self, edge: Edge, weight_format: WeightFormat) -> str | None:
        """Why the weight at an edge cannot have a weight format; None if it can."""
        weight = weight_at(self._model, edge)
        if weight is None or edge not in self._able:
            return "no product and no Gather reads a matrix of finite weights there"
        return format_refusal(weight, weight_format)

    def opset(self, placement: Placement) -> int:
        """The least opset that the weight formats of a placement need; 0 for none."""
        return max((self._opset(e, s) for e, s in placement.weight_only), default=0)

    def _opset(self, edge: Edge, weight_format: WeightFormat) -> int:
        weight = weight_at(self._model, edge)
        if weight is None or weight.node.op == "Gather":
            return BLOCK_OPSET
        return max(weight_format.opset, 13 if weight.constant.dtype == TensorProto.FLOAT else 19)

    def superfluous(self, placement: Placement) -> frozenset[int]:
        """Indices of the Transposes of constants that lose all readers when weights get weight formats."""
        model, written = self._model, {edge for edge, _ in placement.weight_only}
        found = set()
        for tensor in {e.tensor for e in written} & model.producers.keys():
            if all(edge in written for edge in model.edges(tensor)):
                found.add(model.producers[tensor])
        return frozenset(found)

    def write(
        self, builder: GraphBuilder, node: onnx.NodeProto, edge: Edge, weight_format: WeightFormat
    ) -> tuple[onnx.NodeProto, ...]:
        """Make `node` read its weight in a weight format at `edge`; returns the nodes that have to follow it."""
        weight = weight_at(self._model, edge)
        assert weight is not None  # `problem` was asked first
        names = self._constants(builder, edge.tensor, weight, weight_format)
        if weight.node.op == "Gather":
            return self._with_gathered_scales(builder, node, names, weight_format.block or weight.shape[0])
        if weight_format.dynamic:
            return self._as_integers(builder, node, names)
        node.input[edge.index] = self._dequantized(builder, edge.tensor, names, weight_format)
        kept = [a for a in node.attribute if a.name != "transB"]
        del node.attribute[:]
        node.attribute.extend(kept)
        return ()

    def _dequantized(
        self, builder: GraphBuilder, tensor: str, names: tuple[str, ...], weight_format: WeightFormat
    ) -> str:
        key = ("dequantized", names)
        if key not in builder.made:
            builder.made[key] = builder.names.fresh(f"{tensor}_DequantizeLinear_Output")
            name = builder.names.fresh(f"{tensor}_DequantizeLinear")
            axis = 1 if weight_format.block is None else 0
            back = helper.make_node("DequantizeLinear", list(names), [builder.made[key]], name, axis=axis)
            if weight_format.block is not None:
                back.attribute.append(helper.make_attribute("block_size", weight_format.block))
            builder.nodes.append(back)
        return builder.made[key]

    def _with_gathered_scales(
        self, builder: GraphBuilder, node: onnx.NodeProto, names: tuple[str, ...], block: int
    ) -> tuple[onnx.NodeProto, ...]:
        result = node.output[0]
        rows, scales = builder.names.fresh(f"{result}_quantized"), builder.names.fresh(f"{result}_scale")
        node.input[0], node.output[0] = names[0], rows
        own = builder.names.fresh(f"{node.name}_scale"), builder.names.fresh(f"{result}_DequantizeLinear")
        return (
            helper.make_node("Gather", [names[1], node.input[1]], [scales], own[0], axis=0),
            helper.make_node("DequantizeLinear", [rows, scales], [result], own[1], axis=-1, block_size=block),
        )

    def _as_integers(
        self, builder: GraphBuilder, node: onnx.NodeProto, names: tuple[str, ...]
    ) -> tuple[onnx.NodeProto, ...]:
        """Make a product a MatMulInteger; returns the nodes behind it, which make floats of its sums and add the bias
        of a Gemm. Products of one activation share its DynamicQuantizeLinear."""
        (source, _, *bias), result, name = node.input, node.output[0], node.name
        parts = [("dynamic", source, what) for what in ("quantized", "scale", "zero_point")]
        if parts[0] not in builder.made:
            builder.made |= {part: builder.names.fresh(f"{source}_dynamic_{part[-1]}") for part in parts}
            made, own = [builder.made[part] for part in parts], builder.names.fresh(f"{source}_DynamicQuantizeLinear")
            builder.nodes.append(helper.make_node("DynamicQuantizeLinear", [source], made, own))
        quantized, scale, zero_point = (builder.made[part] for part in parts)
        sums, floats, scales = (builder.names.fresh(f"{result}_{what}") for what in ("sums", "floats", "scales"))
        node.op_type = "MatMulInteger"
        node.input[:], node.output[:] = [quantized, names[0], zero_point], [sums]
        del node.attribute[:]
        scaled = builder.names.fresh(f"{result}_scaled") if any(bias) else result
        nodes = [
            helper.make_node("Cast", [sums], [floats], builder.names.fresh(f"{name}_Cast"), to=TensorProto.FLOAT),
            helper.make_node("Mul", [scale, names[1]], [scales], builder.names.fresh(f"{name}_scales")),
            helper.make_node("Mul", [floats, scales], [scaled], builder.names.fresh(f"{name}_Mul")),
        ]
        if any(bias):
            nodes.append(helper.make_node("Add", [scaled, *bias], [result], builder.names.fresh(f"{name}_Add")))
        return tuple(nodes)

    def parts(self, weight: Weight, weight_format: WeightFormat) -> dict[str, Constant]:
        """The integers, the scales and, if asymmetric, the zero points, in the shapes that their node reads; computed
        when they are written."""
        source, is_table = weight.constant, weight.node.op == "Gather"
        key = f"{source.key}:{weight_format.name}:{weight.transposed:d}{is_table:d}"
        if key in self._parts:
            return self._parts[key]
        integers = helper.np_dtype_to_tensor_dtype(np.dtype(INTEGER_TYPE[weight_format.bits, weight_format.symmetric]))
        rows, columns = weight.shape
        scaled = (rows // (weight_format.block or rows), columns) if weight_format.block or is_table else (columns,)
        described = [("quantized", integers, (rows, columns)), ("scale", source.dtype, scaled)]
        described += [] if weight_format.symmetric else [("zero_point", integers, scaled)]
        parts = {}
        for what, dtype, shape in described:
            read = partial(self._part, what, key, weight, weight_format, shape)
            kept = read if what == "quantized" else cache(read)
            parts[what] = Constant(f"{key}:{what}", dtype, shape[::-1] if is_table else shape, kept)
        self._parts[key] = parts
        return parts

    def _constants(
        self, builder: GraphBuilder, tensor: str, weight: Weight, weight_format: WeightFormat
    ) -> tuple[str, ...]:
        """Names of the initializers of a weight in a weight format; the first call adds them to the graph."""
        parts = self.parts(weight, weight_format)
        made = ("constants", tensor, *(constant.key for constant in parts.values()))
        if made not in builder.made:
            names = {builder.names.fresh(f"{tensor}_{what}"): constant for what, constant in parts.items()}
            builder.constants.update(names)
            builder.made[made] = "\n".join(names)
        return tuple(builder.made[made].split("\n"))

    def _part(self, what: str, key: str, weight: Weight, weight_format: WeightFormat, shape: tuple[int, ...]) -> Array:
        if self._latest is None or self._latest[0] != key:
            self._latest = key, rounded_weight(weight.array(), weight_format)
        latest = self._latest[1]
        values = {"quantized": latest.integers, "scale": latest.scale, "zero_point": latest.zero_point}[what]
        assert values is not None  # a symmetric weight format has no third part
        return np.ascontiguousarray(values.reshape(shape).T if weight.node.op == "Gather" else values.reshape(shape))
