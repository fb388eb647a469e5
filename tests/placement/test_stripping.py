"""The float model behind a Q/DQ model."""

import numpy as np

from models import build, feeds, run
from qdqtune.graph.model import LARGE_BYTES
from qdqtune.placement.stripping import strip_pairs


def test_a_lost_clamp_is_not_in_front_of_a_pair_that_does_not_clamp() -> None:
    """One tensor with an unsigned pair, which clamps at zero, and a signed one."""
    text = """net (float[N,4] x) => (float[N,4] y, float[N,4] z) {
        [q1] q1 = QuantizeLinear(x, s)
        [dq1] d1 = DequantizeLinear(q1, s)
        [one] y = Abs(d1)
        [q2] q2 = QuantizeLinear(x, s, zero)
        [dq2] d2 = DequantizeLinear(q2, s, zero)
        [two] z = Neg(d2)
    }"""
    model = build(text, {"s": np.float32(0.03), "zero": np.int8(0)})
    stripped, samples = strip_pairs(model), feeds(model)
    for found, given in zip(run(stripped, samples), run(model, samples), strict=True):
        assert all(np.abs(found[name] - given[name]).max() < 0.02 for name in "yz")


def test_weights_that_differ_in_their_zero_points_only_are_different_constants() -> None:
    """Constants with one key are written once."""
    text = """net (float[N] x) => (float[N] y) {
        [dq1] d1 = DequantizeLinear(w, s, zero)
        [dq2] d2 = DequantizeLinear(w, s, one)
        [add] a = Add(x, d1)
        [sub] y = Sub(a, d2)
    }"""
    constants = {"w": np.zeros(LARGE_BYTES, np.int8), "s": np.float32(1), "zero": np.int8(0), "one": np.int8(1)}
    stripped = strip_pairs(build(text, constants))
    assert stripped.constants["d1"].key != stripped.constants["d2"].key
