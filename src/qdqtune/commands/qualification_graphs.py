"""Small graphs with seeded random weights, on which `doctor` with `qualify` checks an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from qdqtune.types import Sample

OPSET, IR_VERSION = 17, 8
"""The first opset with LayerNormalization, which TensorRT 8.6 reads as well."""

OPEN, SIZES = "tokens", ((2, 64, 128), (4, 96, 128), (8, 128, 128))
"""The input of the graph with dynamic shapes, and its smallest, usual and largest sizes."""

SAMPLES = 8
"""Samples of each graph. Chosen, not measured."""

WIDTH, SIDE, HEADS, ROWS = 64, 28, 4, 128
"""Channels and pixels of images, heads and tokens of attention: enough that 8 bits pay on most engines. Chosen, not
measured."""

CONSTANT = re.compile(r"(weight|bias|one)_\w+?_([0-9x]+)")
"""Names of constants: what they hold, what they are for, and their sizes."""


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


def _model(shape: Sequence[int | str], nodes: str, name: str = "x", constants: str = "") -> onnx.ModelProto:
    """A model of nodes in ONNX's text format, from the input `name` to the output `y`. Constants by a name of the form
    `CONSTANT` get values: weights are random, and keep the variance of values."""
    sizes = ",".join(map(str, shape))
    head = f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]>'
    model = parser.parse_model(f"{head} net (float[{sizes}] {name}) => (float y) <{constants}> {{{nodes}}}")
    random, graph = np.random.default_rng(0), model.graph
    graph.output[0].type.tensor_type.ClearField("shape")
    for constant in dict.fromkeys(tensor for node in graph.node for tensor in node.input):
        if parts := CONSTANT.fullmatch(constant):
            dims = [int(size) for size in parts[2].split("x")]
            summands = {1: 16, 2: dims[0]}.get(len(dims), prod(dims[1:]))
            values = np.ones(dims) if parts[1] == "one" else random.standard_normal(dims) / np.sqrt(summands)
            graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), constant))
    for number, node in enumerate(graph.node):
        node.name = f"/{node.op_type.lower()}_{number}"
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def _conv(x: str, y: str, given: int = WIDTH, made: int = WIDTH, kernel: int = 3, group: int = 1) -> str:
    sizes = f"{made}x{given // group}x{kernel}x{kernel}"
    how = f"pads: ints = {[kernel // 2] * 4}, group: int = {group}"
    return f" {y} = Conv <{how}> ({x}, weight_{y}_{sizes}, bias_{y}_{made})"


def _product(x: str, y: str, rows: int, columns: int) -> str:
    return f" {y}_0 = MatMul({x}, weight_{y}_{rows}x{columns}) {y} = Add({y}_0, bias_{y}_{columns})"


def _norm(x: str, y: str, width: int) -> str:
    return f" {y} = LayerNormalization <axis: int = -1> ({x}, one_{y}_{width}, bias_{y}_{width})"


def convolutions(depth: int = 4) -> onnx.ModelProto:
    """Convolutions with a Relu each."""
    nodes = _conv("x", "c0", 3)
    for n in range(1, depth):
        nodes += f" r{n} = Relu(c{n - 1})" + _conv(f"r{n}", f"c{n}")
    return _model((1, 3, SIDE, SIDE), f"{nodes} y = Relu(c{depth - 1})")


def residual() -> onnx.ModelProto:
    """An inverted residual: 1x1, depthwise, 1x1, and an Add around all; then a global average and a Gemm."""
    nodes = _conv("x", "a", WIDTH, 2 * WIDTH, 1) + " b = Clip(a, low, high)"
    nodes += _conv("b", "c", 2 * WIDTH, 2 * WIDTH, 3, 2 * WIDTH) + " d = Clip(c, low, high)"
    nodes += _conv("d", "e", 2 * WIDTH, WIDTH, 1) + " f = Add(e, x) g = GlobalAveragePool(f) h = Flatten(g)"
    nodes += f" y = Gemm(h, weight_last_{WIDTH}x16)"
    return _model((1, WIDTH, SIDE, SIDE), nodes, constants="float low = {0}, float high = {6}")


def transformer(head: int, is_fused: bool = False) -> onnx.ModelProto:
    """A layer of attention with heads of a size, and two products with a Gelu between them. Queries, keys and values
    come from one product or from three."""
    width = HEADS * head
    nodes = _norm("x", "n", width)
    if is_fused:
        nodes += _product("n", "all", width, 3 * width) + " apart = Reshape(all, five)"
        nodes += " turned = Transpose <perm: ints = [2, 0, 3, 1, 4]> (apart) a, b, c = Split <axis: int = 0> (turned)"
        nodes += " q = Squeeze(a, first) k = Squeeze(b, first) v = Squeeze(c, first)"
    for name in () if is_fused else "qkv":
        nodes += _product("n", f"{name}_1", width, width) + f" {name}_2 = Reshape({name}_1, four)"
        nodes += f" {name} = Transpose <perm: ints = [0, 2, 1, 3]> ({name}_2)"
    nodes += " t = Transpose <perm: ints = [0, 1, 3, 2]> (k) scores = MatMul(q, t) scaled = Mul(scores, scale)"
    nodes += " shares = Softmax <axis: int = -1> (scaled) mixed = MatMul(shares, v)"
    nodes += " joined = Transpose <perm: ints = [0, 2, 1, 3]> (mixed) flat = Reshape(joined, three)"
    nodes += _product("flat", "out", width, width) + " middle = Add(out, x)" + _norm("middle", "m", width)
    nodes += _product("m", "wide", width, 4 * width) + " d = Div(wide, root) e = Erf(d) f = Add(e, unit)"
    nodes += " g = Mul(wide, f) h = Mul(g, half)" + _product("h", "last", 4 * width, width) + " y = Add(last, middle)"
    sizes = f"int64[5] five = {{0, 0, 3, {HEADS}, {head}}}, int64[1] first = {{0}}"
    constants = sizes if is_fused else f"int64[4] four = {{0, 0, {HEADS}, {head}}}"
    constants += f", int64[3] three = {{0, 0, {width}}}, float scale = {{{head**-0.5}}}"
    constants += f", float root = {{{2**0.5}}}, float unit = {{1}}, float half = {{0.5}}"
    return _model((1, ROWS, width), nodes, constants=constants)


def products(shape: Sequence[int | str] = (1, 4, 256), name: str = "x") -> onnx.ModelProto:
    """Three products with a Relu between them."""
    width = int(shape[-1])
    nodes = _product(name, "a", width, 2 * width) + " b = Relu(a)"
    nodes += _product("b", "c", 2 * width, 2 * width) + " d = Relu(c)" + _product("d", "y", 2 * width, width)
    return _model(shape, nodes, name)


def boundless() -> onnx.ModelProto:
    """A graph whose output has 2^46 elements: more bytes than a process can address."""
    return _model((1,), "y = Expand(x, sizes)", constants=f"int64[2] sizes = {{{2**23}, {2**23}}}")


GRAPHS: Mapping[str, Graph] = {
    "convolutions": Graph(convolutions),
    "residual": Graph(residual),
    **{f"transformer, heads of {size}": Graph(partial(transformer, size)) for size in (16, 32, 64)},
    "transformer, fused qkv": Graph(partial(transformer, 32, is_fused=True)),
    "dynamic shapes": Graph(partial(products, ("batch", "rows", SIZES[0][-1]), OPEN)),
    "weights of 8 bits": Graph(products, {"weight_only": "w8"}),
    "weights of 4 bits": Graph(products, {"weight_only": "w4"}),
    "fp8": Graph(convolutions, {"quant_type": "fp8"}),
}
"""The graphs by name."""
