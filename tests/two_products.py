"""A model of two products with a large weight each, and an If that reads outer tensors."""

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import parser

from qdqtune.graph.model import Constant, Model

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[N,40] x, bool c) => (float[N,40] y, float[N,40] z) <float[N,40] t, float[1] b = {2}> {
    [mm] t = MatMul(x, w)
    [add] s = Add(t, b)
    [mm2] y = MatMul(s, v)
    [if] z = If(c) <
        then_branch = a () => (float[N,40] p) { k = Relu(t)
            p = Add(k, b) },
        else_branch = d () => (float[N,40] q) { q = Add(x, x) }>
}"""


def weights(value: float = 1.0) -> npt.NDArray[Any]:
    array = np.eye(40, dtype=np.float32)
    array[0, 0] = value
    return array


def model(w: npt.NDArray[Any] | None = None, v: npt.NDArray[Any] | None = None) -> Model:
    large = {"w": Constant.of(weights() if w is None else w), "v": Constant.of(weights() if v is None else v)}
    return Model(parser.parse_model(TEXT), large)
