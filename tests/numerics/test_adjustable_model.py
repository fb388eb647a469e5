"""A model with pairs whose scales are inputs computes what the formula of a pair says."""

import numpy as np

from models import build, normal, run
from qdqtune.calibration.scales import Quantization, dequantize, quantize
from qdqtune.numerics.adjustable_model import SCALES, ZEROS, adjustable_model, feeds
from qdqtune.types import Edge, QType

INT8 = Quantization(QType.INT8, np.float32(0.02), 3, None)
UINT8 = Quantization(QType.UINT8, np.float32(0.05), 100, None)


def test_scales_are_fed_in_their_order_and_int8_as_uint8() -> None:
    fed = feeds({"a": INT8, "b": UINT8})
    np.testing.assert_array_equal(fed[SCALES], np.float32([0.02, 0.05]))
    np.testing.assert_array_equal(fed[ZEROS], np.uint8([131, 100]))


def test_one_model_serves_all_scales() -> None:
    net = build("net (float[4,8] x) => (float[4,8] y) { [a] t = Tanh(x) [b] y = Neg(t) }")
    first, second, result = Edge("x", "a", 0), Edge("t", "b", 0), Edge("y")
    model = adjustable_model(net, {"x": UINT8, "t": INT8}, {}, {first, second}, [], "means", [result])
    x = normal(4, 8)
    for pairs in ({"x": UINT8, "t": INT8}, {"x": Quantization(QType.UINT8, np.float32(0.5), 9, None), "t": INT8}):
        (outputs,) = run(model, [{"x": x} | feeds(pairs)])
        t = np.tanh(dequantize(quantize(x, pairs["x"]), pairs["x"]))
        (y,) = outputs.values()
        assert np.isclose(y, -dequantize(quantize(t, INT8), INT8), atol=1e-5).mean() > 0.9  # a tie may go either way
