"""Channels that a file has scaled are told from weights that are wrong."""

import numpy as np
import pytest

from models import build, feeds, normal, run
from qdqtune.calibration.equalization import Factor, factors, scaled, sites
from qdqtune.graph.model import Model
from qdqtune.graph.protobuf import LARGE_BYTES
from qdqtune.placement.stripping import moved_channels, strip_pairs
from qdqtune.types import Edge

NET = """net (float[2,8] x) => (float[2,3] y) {
    [first] m = Gemm(x, w, b)
    [relu] r = Relu(m)
    [second] y = Gemm(r, v)
}"""

WRONG = {
    "first": Factor(Edge("w", "first", 1), (1,), (-6,)),
    "second": Factor(Edge("v", "second", 1), (1,), (5,)),
}


@pytest.fixture
def model() -> Model:
    return build(NET, {"w": normal(8, 8), "b": normal(8), "v": normal(8, 3)})


def moved(model: Model) -> list[Factor]:
    (site,) = sites(model)
    return list(factors(model, site, [i % 4 - 1 for i in range(site.channels)]))


def test_what_was_scaled_is_found(model: Model) -> None:
    assert list(moved_channels(model, scaled(model, moved(model)))) == moved(model)
    assert moved_channels(model, model) == ()


@pytest.mark.parametrize("where", WRONG)
def test_weights_with_a_wrong_scale_have_moved_nothing(model: Model, where: str) -> None:
    """Off by a power of two in all channels alike, as channels might have been moved."""
    assert moved_channels(model, scaled(model, [WRONG[where]])) == ()


def test_a_wrong_scale_does_not_hide_what_was_scaled(model: Model) -> None:
    spoiled = scaled(scaled(model, moved(model)), [WRONG["second"]])
    found = moved_channels(model, spoiled)
    assert [f.edge for f in found] == [f.edge for f in moved(model)]
    assert all(np.array_equal(a.array(), b.array()) for a, b in zip(found, moved(model), strict=True))


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
