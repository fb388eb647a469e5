"""Ranges of all tensors in one pass: exact for min-max, to a bin for percentiles, in memory that does not grow."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from models import FP8, INT8, Arrays, activations, branching, build, conv_net, embedding, feeds, normal
from qdqtune.calibration.calibrate import Histogram, calibrate, candidate_tensors
from qdqtune.calibration.samples import Samples
from qdqtune.calibration.scales import Calibration
from qdqtune.graph.model import Model
from range_errors import close

pytestmark = pytest.mark.usefixtures("workers")


def without_mark() -> Model:
    """The model with an If, without the node that no engine knows."""
    net = branching()
    net.proto.graph.node.pop()
    return Model(net.proto, net.large)


def spread(values: list[Arrays], tensor: str) -> tuple[float, float]:
    return min(v[tensor].min() for v in values), max(v[tensor].max() for v in values)


def half_conv_net() -> Model:
    return conv_net(half=True)


def test_candidates_are_the_float_tensors_that_have_readers() -> None:
    assert candidate_tensors(embedding()) == ("mask", "e", "u", "m", "y")
    assert set(candidate_tensors(without_mark())) == {"x", "t", "r", "z", "y"}  # nobody reads "unused"
    assert candidate_tensors(build("n (float[0,2] x, double[2] d) => (float[0,2] y) { y = Relu(x) }")) == ()


@pytest.mark.parametrize("make", [conv_net, half_conv_net, embedding, without_mark])
def test_min_and_max_are_those_of_numpy_over_all_samples(make: Any) -> None:
    net = make()
    samples = feeds(net, 5)
    found = calibrate(net, samples).activations
    values = activations(net, samples)
    assert set(found) == set(candidate_tensors(net))
    for tensor, own in found.items():
        np.testing.assert_allclose(
            (own.low, own.high), spread(values, tensor), rtol=2e-3 if make is half_conv_net else 1e-5, atol=1e-6
        )


MASKED = """net (float[1,64] x, float[1,64] m) => (float[1,64] y, float[1,64] z) {
    l = Log(x)
    s = Add(x, m)
    y = Relu(s)
    h = Mul(m, huge)
    z = Add(h, l)
}"""


@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_tensors_with_nan_or_infinite_values_get_no_range(method: Any) -> None:
    """Log of a negative number is NaN, Log of zero is infinite; one such value in one sample is enough."""
    net = build(MASKED, {"huge": np.float32(3e38)})
    x = np.abs(normal(4, 1, 64)) + 0.1
    masks = np.zeros((4, 1, 64), np.float32)
    masks[0, 0, ::2] = 1  # 3e38 in half the places: finite, though the sum is not
    samples = [{"x": a, "m": m} for a, m in zip(x, masks, strict=True)]
    usual = set(candidate_tensors(net))
    assert set(calibrate(net, samples, Calibration(method)).activations) == usual
    for value in (0.0, -1.0):
        bad = [dict(s) for s in samples]
        bad[2]["x"] = x[2].copy()
        bad[2]["x"][0, 37] = value
        assert usual - set(calibrate(net, bad, Calibration(method)).activations) == {"l", "z"}


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    net = build("net (float[N,20000] x) => (float[N,20000] y) { y = Relu(x) }")
    sample_bytes, count = 80_000, 60

    def long() -> Iterator[Arrays]:
        for i in range(count):
            yield {"x": np.full((1, 20000), i, np.float32)}

    tracemalloc.start()
    try:
        found = calibrate(net, Samples("long", "", False, long), Calibration("mse")).activations
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["x"].low == 0
    assert found["x"].high > 0.9 * count
    assert peak < 0.5 * count * sample_bytes  # the values of one tensor would take twice that


def test_percentiles_of_a_model_over_samples() -> None:
    net = embedding()
    samples = feeds(net, 6)
    found = calibrate(net, samples, Calibration("percentile", 90.0)).activations
    for tensor in ("mask", "y"):
        values = np.concatenate([v[tensor].reshape(-1) for v in activations(net, samples)])
        close(found[tensor], values, 90.0, 2.0 ** np.ceil(np.log2(np.abs(values).max())) / Histogram.BINS)


def test_ranges_fit_the_numbers_they_are_for() -> None:
    net = build("net (float[N,20000] x) => (float[N,20000] y) { y = Relu(x) }")
    samples = [{"x": (normal(1, 20000, seed=i) ** 3).astype(np.float32)} for i in range(3)]
    for method in ("entropy", "mse"):
        fp8, int8 = (calibrate(net, samples, Calibration(method), numbers=n).activations["x"] for n in (FP8, INT8))
        assert fp8.magnitude > int8.magnitude  # whose steps are the same size everywhere
