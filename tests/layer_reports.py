"""Models whose fusions are known, and checked reports of their layers."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models import model
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.engines.coverage import read_model
from qdqtune.types import Layer

ENGINES = [
    "onnxruntime",
    pytest.param(
        "openvino",
        marks=pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs OpenVINO"),
    ),
]


RANDOM = np.random.default_rng(3)


def random_array(*shape: int) -> np.ndarray:
    return (0.3 * RANDOM.standard_normal(shape)).astype(np.float32)


def text_model(text: str, constants: Mapping[str, Any] | None = None) -> onnx.ModelProto:
    """A model of ONNX's text form, opset 19, with more constants."""
    made = model(text, 19, 9, constants)
    onnx.checker.check_model(made)
    return made


def layers_of(engine: str, model: onnx.ModelProto, inputs: Mapping[str, Any], folder: Path) -> tuple[Layer, ...]:
    """The report, checked: every node once, what is folded last."""
    path = folder / "m.onnx"
    onnx.save(model, path)
    layers = open_engine(EngineSpec(engine)).build(path, folder / "log").layers(inputs, 2)
    assert sorted(n for x in layers for n in x.nodes) == sorted(n.name for n in read_model(path).nodes)
    assert all(x.kind != "folded" for x in layers[:-1])
    return layers


def home(layers: tuple[Layer, ...], node: str) -> Layer:
    return next(layer for layer in layers if node in layer.nodes)


CHAIN = """g (float[4] x) => (float[4] y) {
    [neg] a = Neg(x)
    [relu] b = Relu(a)
    [exp] c = Exp(b)
    [abs] y = Abs(c)
}"""


RESIDUAL = """g (float[1,16,16,16] x) => (float[1,10] y) {
    [conv1] a = Conv <pads=[1,1,1,1]> (x, w1, b1)
    [relu1] b = Relu(a)
    [conv2] c = Conv <pads=[1,1,1,1]> (b, w2, b2)
    [add] d = Add(c, b)
    [relu2] e = Relu(d)
    [same] f = Identity(e)
    [pool] g = GlobalAveragePool(f)
    [flat] h = Flatten(g)
    [head] y = Gemm <transB=1> (h, w3, b3)
}"""


RESIDUAL_WEIGHTS = {
    "w1": random_array(16, 16, 3, 3),
    "b1": random_array(16),
    "w2": random_array(16, 16, 3, 3),
    "b2": random_array(16),
    "w3": random_array(10, 16),
    "b3": random_array(10),
}


RESIDUAL_INPUT = {"x": random_array(1, 16, 16, 16)}


def quantized_mlp() -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Two products that carry pairs, a Softmax between them that does not run on integers."""
    text = """g (float[8,32] x) => (float[8,16] y) {
        [x_q] xq = QuantizeLinear(x, s, z)
        [x_dq] xd = DequantizeLinear(xq, s, z)
        [w1_dq] w1d = DequantizeLinear <axis=1> (w1, ws1, wz1)
        [product1] a = MatMul(xd, w1d)
        [softmax] b = Softmax(a)
        [b_q] bq = QuantizeLinear(b, s, z)
        [b_dq] bd = DequantizeLinear(bq, s, z)
        [w2_dq] w2d = DequantizeLinear <axis=1> (w2, ws2, wz2)
        [product2] y = MatMul(bd, w2d)
    }"""
    constants: dict[str, Any] = {"s": np.float32(0.02), "z": np.int8(0)}
    for i, (rows, columns) in enumerate([(32, 24), (24, 16)], 1):
        constants[f"w{i}"] = RANDOM.integers(-60, 60, (rows, columns), dtype=np.int8)
        constants[f"ws{i}"] = np.full(columns, 0.01, np.float32)
        constants[f"wz{i}"] = np.zeros(columns, np.int8)
    return text_model(text, constants), {"x": random_array(8, 32)}
