"""Small graphs with seeded random weights, on which `doctor` with `qualify` checks an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtune.types import Array, Sample

OPSET, IR_VERSION = 17, 8
"""The first opset with LayerNormalization, which TensorRT 8.6 reads as well."""

OPEN, SIZES = "tokens", ((2, 64, 128), (4, 96, 128), (8, 128, 128))
"""The input of the graph with dynamic shapes, and its smallest, usual and largest sizes."""

SAMPLES = 8
"""Samples of each graph. Chosen, not measured."""

WIDTH, SIDE, HEADS, ROWS = 64, 28, 4, 128
"""Channels and pixels of images, heads and tokens of attention: enough that 8 bits pay on most engines. Chosen, not
measured."""


@dataclass(frozen=True)
class Graph:
    """A graph: its model in float, and options of `quantize` that differ from the defaults."""

    make: Callable[[], onnx.ModelProto]
    how: Mapping[str, Any] = field(default_factory=dict)


def samples_of(model: onnx.ModelProto) -> list[Sample]:
    """Normally distributed inputs; those of the open input have its sizes in turn."""
    random, (value,) = np.random.default_rng(1), model.graph.input
    sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    shapes = [SIZES[i % 3] if value.name == OPEN else sizes for i in range(SAMPLES)]
    return [{value.name: random.standard_normal(shape).astype(np.float32)} for shape in shapes]


class _Net:
    """Nodes in a row from one input to one output, with weights that keep the variance of values."""

    def __init__(self, shape: Sequence[int | str], name: str = "x") -> None:
        self._input = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)
        self.start = name

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add a node, and give the name of its output (of several: up to the dot and the number)."""
        name = f"{op.lower()}_{len(self._nodes)}"
        made = [f"{name}.{i}" for i in range(outputs)] if outputs > 1 else [name]
        self._nodes.append(helper.make_node(op, inputs, made, f"/{name}", **attributes))
        return name

    def constant(self, values: Array) -> str:
        """Add a constant."""
        name = f"constant_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(values, name))
        return name

    def weight(self, *shape: int, inputs: int) -> str:
        """A random weight of a node that adds up so many products for each value."""
        return self.constant((self._random.standard_normal(shape) / np.sqrt(inputs)).astype(np.float32))

    def scalar(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def sizes(self, *sizes: int) -> str:
        return self.constant(np.array(sizes, np.int64))

    def conv(self, x: str, given: int, made: int, kernel: int = 3, group: int = 1) -> str:
        shape = made, given // group, kernel, kernel
        weight, bias = self.weight(*shape, inputs=prod(shape[1:])), self.weight(made, inputs=16)
        return self.node("Conv", x, weight, bias, pads=[kernel // 2] * 4, group=group)

    def product(self, x: str, rows: int, columns: int) -> str:
        product = self.node("MatMul", x, self.weight(rows, columns, inputs=rows))
        return self.node("Add", product, self.weight(columns, inputs=16))

    def norm(self, x: str, width: int) -> str:
        scale, bias = self.constant(np.ones(width, np.float32)), self.constant(np.zeros(width, np.float32))
        return self.node("LayerNormalization", x, scale, bias, axis=-1)

    def gelu(self, x: str) -> str:
        erf = self.node("Erf", self.node("Div", x, self.scalar(2**0.5)))
        return self.node("Mul", self.node("Mul", x, self.node("Add", erf, self.scalar(1))), self.scalar(0.5))

    def model(self, y: str) -> onnx.ModelProto:
        """The model whose output is `y`."""
        end = onnx.ValueInfoProto(name=y, type=helper.make_tensor_type_proto(TensorProto.FLOAT, None))
        graph = helper.make_graph(self._nodes, "qualification", [self._input], [end], self._constants)
        opset = [helper.make_opsetid("", OPSET)]
        return onnx.shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION), strict_mode=True, data_prop=True
        )


def convolutions(depth: int = 4) -> onnx.ModelProto:
    """Convolutions with a Relu each."""
    net = _Net([1, 3, SIDE, SIDE])
    x = net.node("Relu", net.conv(net.start, 3, WIDTH))
    for _ in range(depth - 1):
        x = net.node("Relu", net.conv(x, WIDTH, WIDTH))
    return net.model(x)


def residuals() -> onnx.ModelProto:
    """Two blocks of two convolutions with an Add around them."""
    net = _Net([1, WIDTH, SIDE, SIDE])
    x = net.node("Relu", net.conv(net.start, WIDTH, WIDTH))
    for _ in range(2):
        inner = net.conv(net.node("Relu", net.conv(x, WIDTH, WIDTH)), WIDTH, WIDTH)
        x = net.node("Relu", net.node("Add", inner, x))
    return net.model(x)


def depthwise() -> onnx.ModelProto:
    """An inverted residual: 1x1, depthwise, 1x1, then a global average and a Gemm."""
    net = _Net([1, WIDTH, SIDE, SIDE])
    bounds = net.scalar(0), net.scalar(6)
    wide = net.node("Clip", net.conv(net.start, WIDTH, 2 * WIDTH, 1), *bounds)
    deep = net.node("Clip", net.conv(wide, 2 * WIDTH, 2 * WIDTH, 3, 2 * WIDTH), *bounds)
    x = net.node("Add", net.conv(deep, 2 * WIDTH, WIDTH, 1), net.start)
    flat = net.node("Flatten", net.node("GlobalAveragePool", x))
    return net.model(net.node("Gemm", flat, net.weight(16, WIDTH, inputs=WIDTH), transB=1))


def attention(head: int, is_fused: bool = False) -> onnx.ModelProto:
    """A layer of attention with heads of a size; queries, keys and values from one product or from three."""
    width = HEADS * head
    net = _Net([1, ROWS, width])
    x = net.norm(net.start, width)
    if is_fused:
        both = net.node("Reshape", net.product(x, width, 3 * width), net.sizes(0, 0, 3, HEADS, head))
        turned = net.node("Split", net.node("Transpose", both, perm=[2, 0, 3, 1, 4]), outputs=3, axis=0)
        q, k, v = (net.node("Squeeze", f"{turned}.{i}", net.sizes(0)) for i in range(3))
    else:
        parts = (net.node("Reshape", net.product(x, width, width), net.sizes(0, 0, HEADS, head)) for _ in range(3))
        q, k, v = (net.node("Transpose", part, perm=[0, 2, 1, 3]) for part in parts)
    scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 1, 3, 2]))
    shares = net.node("Softmax", net.node("Mul", scores, net.scalar(head**-0.5)), axis=-1)
    joined = net.node("Transpose", net.node("MatMul", shares, v), perm=[0, 2, 1, 3])
    out = net.product(net.node("Reshape", joined, net.sizes(0, 0, width)), width, width)
    return net.model(net.node("Add", out, net.start))


def normalization() -> onnx.ModelProto:
    """LayerNormalization, two products with a Gelu between them, and an Add around all."""
    net = _Net([1, ROWS, 2 * WIDTH])
    wide = net.gelu(net.product(net.norm(net.start, 2 * WIDTH), 2 * WIDTH, 8 * WIDTH))
    return net.model(net.node("Add", net.product(wide, 8 * WIDTH, 2 * WIDTH), net.start))


def products(shape: Sequence[int | str] = (1, 4, 256), name: str = "x") -> onnx.ModelProto:
    """Three products with a Relu between them."""
    net, width = _Net(shape, name), int(shape[-1])
    x = net.node("Relu", net.product(net.start, width, 2 * width))
    return net.model(net.product(net.node("Relu", net.product(x, 2 * width, 2 * width)), 2 * width, width))


def boundless() -> onnx.ModelProto:
    """A graph whose output has 2^46 elements: more bytes than a process can address."""
    net = _Net([1])
    return net.model(net.node("Expand", net.start, net.sizes(2**23, 2**23)))


GRAPHS: Mapping[str, Graph] = {
    "convolutions": Graph(convolutions),
    "residuals": Graph(residuals),
    "depthwise": Graph(depthwise),
    **{f"attention, heads of {size}": Graph(partial(attention, size)) for size in (16, 32, 64)},
    "attention, fused qkv": Graph(partial(attention, 32, is_fused=True)),
    "normalization": Graph(normalization),
    "dynamic shapes": Graph(partial(products, ("batch", "rows", SIZES[0][-1]), OPEN)),
    "weights of 8 bits": Graph(products, {"weight_only": "w8"}),
    "weights of 4 bits": Graph(products, {"weight_only": "w4"}),
    "fp8": Graph(convolutions, {"quant_type": "fp8"}),
}
"""The graphs by name."""
