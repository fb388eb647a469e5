"""Values of tensors on samples, and the ranges that every method takes from them, in memory that does not grow."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import FP8, INT8, UINT8, Arrays, activations, branching, build, conv_net, embedding, feeds, normal
from qdqtune.calibration import observe as observe_module
from qdqtune.calibration.calibrate import Histogram, calibrate, candidate_tensors
from qdqtune.calibration.observe import observe, outputs_on, running
from qdqtune.calibration.samples import Samples
from qdqtune.calibration.scales import Calibration, Range, dequantize, of_range, quantize
from qdqtune.errors import BadData, BadModel
from qdqtune.graph.model import Model
from qdqtune.types import Array, NumericFormat
from refusals import refusal

pytestmark = pytest.mark.usefixtures("workers")


def close(found: Range, values: Array, percentile: float, bin_width: float) -> None:
    """Both ends lie between the two values that numpy would interpolate, give or take a bin."""
    tails = [(100 - percentile) / 2, (100 + percentile) / 2]
    least, most = (np.percentile(values, tails, method=m) for m in ("lower", "higher"))
    ends = np.array([found.low, found.high])
    assert (least - 1.001 * bin_width <= ends).all()
    assert (ends <= most + 1.001 * bin_width).all()


def error(values: Array, tried: Range, numbers: NumericFormat) -> float:
    """Mean squared error of a range, by the definition."""
    how = of_range(tried, numbers)
    return float(np.square(values - dequantize(quantize(values, how), how)).mean())


def without_mark() -> Model:
    """The model with an If, without the node that no engine knows."""
    net = branching()
    net.proto.graph.node.pop()
    return Model(net.proto, net.large)


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
        ends = min(v[tensor].min() for v in values), max(v[tensor].max() for v in values)
        rtol = 2e-3 if make is half_conv_net else 1e-5
        np.testing.assert_allclose((own.low, own.high), ends, rtol=rtol, atol=1e-6)


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


def test_ranges_fit_the_numbers_they_are_for_and_percentiles_cut_both_ends() -> None:
    net = build("net (float[N,20000] x) => (float[N,20000] y) { y = Relu(x) }")
    samples = [{"x": (normal(1, 20000, seed=i) ** 3).astype(np.float32)} for i in range(3)]
    fp8, int8 = (calibrate(net, samples, Calibration("mse"), numbers=n).activations["x"] for n in (FP8, INT8))
    assert fp8.magnitude > int8.magnitude  # whose steps are the same size everywhere
    values = np.concatenate([sample["x"].ravel() for sample in samples])
    bin_width = 2.0 ** np.ceil(np.log2(np.abs(values).max())) / Histogram.BINS
    close(calibrate(net, samples, Calibration("percentile", 90.0)).activations["x"], values, 90.0, bin_width)


def filled(*parts: Array) -> Any:
    histogram = Histogram()
    for part in parts:
        histogram.add(part)
    return histogram


@settings(derandomize=True, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), min_size=1, max_size=6))
def test_counts_are_those_of_one_histogram_with_the_final_bins(parts: list[list[float]]) -> None:
    """Widening merges bins exactly: the order of the samples does not matter, nor that they came in parts."""
    arrays = [np.array(part, np.float64) for part in parts]
    forward, backward = filled(*arrays), filled(*arrays[::-1])
    assert forward._width == backward._width or not forward._width
    np.testing.assert_array_equal(forward._counts, backward._counts)
    whole = np.concatenate(arrays)
    assert forward._counts.sum() == whole.size
    if forward._width:
        edges = np.arange(-Histogram.BINS, Histogram.BINS + 1) * forward._width
        np.testing.assert_array_equal(forward._counts, np.histogram(whole, edges)[0])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([np.zeros(5)], Range(0, 0)),
        ([np.zeros(5), np.ones(5)], Range(0, 1)),
        ([np.full(3, 7.0)], Range(7, 7)),
        ([np.full(3, -7.0)], Range(-7, -7)),
        ([np.full(3, 2.0**-149), np.full(3, 2.0**127)], Range(2.0**-149, 2.0**127)),
        ([np.zeros(0)], None),
        ([np.ones(3), np.float64([1, np.nan])], None),
        ([np.float64([1, -np.inf]), np.ones(3)], None),
    ],
)
def test_odd_histograms(parts: list[Array], expected: Range | None) -> None:
    histogram = filled(*parts)
    assert histogram.range(100.0) == expected
    if len(parts) == 1 or expected is None:
        assert histogram.least_error(INT8) == expected


NUMBERS = {"uint8": UINT8, "int8": INT8, "fp8": FP8}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("kind", ["normal", "relu", "heavy", "shifted"])
def test_mse_comes_close_to_the_best_range_that_a_fine_search_finds(kind: str, numbers: str) -> None:
    values = normal(20_000).astype(np.float64)
    values = {"normal": values, "relu": np.maximum(values, 0), "heavy": values**3, "shifted": values - 2}[kind]
    found = filled(*np.split(values, 4)).least_error(NUMBERS[numbers])
    top = np.abs(values).max()
    shrunk = [Range(max(-t, values.min()), min(t, values.max())) for t in np.linspace(top / 200, top, 200)]
    assert error(values, found, NUMBERS[numbers]) <= 1.05 * min(error(values, r, NUMBERS[numbers]) for r in shrunk)


def test_mse_moves_the_ends_of_an_asymmetric_range_by_themselves() -> None:
    values = np.concatenate([normal(200_000), [6.0]])
    found = filled(values).least_error(UINT8)
    assert found.high < 5  # one value, where all others gain
    assert error(values, found, UINT8) < min(error(values, Range(-t, t), UINT8) for t in (found.high, 4.0, 5.0, 6.0))


@pytest.mark.parametrize("memory", [2**29, 1])
@pytest.mark.parametrize("half", [False, True])
def test_values_are_those_of_the_model_batch_by_batch(monkeypatch: pytest.MonkeyPatch, half: bool, memory: int) -> None:
    monkeypatch.setattr(observe_module, "BATCH_BYTES", memory)
    net = conv_net(half=half)
    samples = feeds(net, 2)
    exact = activations(net, samples)
    wanted = [t for t in ("image", "c0", "a") if t in exact[0]]
    order = [(n, t) for n in range(2) for t in wanted]
    if memory == 1:
        order.sort(key=lambda place: wanted.index(place[1]))
    for (number, name), (tensor, values) in zip(order, observe(net, wanted, samples), strict=True):
        assert tensor == name
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, exact[number][tensor], rtol=2e-3, atol=1e-3)


def test_sizes_that_are_not_static_are_those_of_the_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    net = build("net (float[N,4] x) => (float[N,4] y) { a = Relu(x) y = Neg(a) }")
    samples = [{"x": np.full((8, 4), i, np.float32)} for i in range(2)]
    for tensors_at_once, order in (1, ["a", "a", "y", "y"]), (2, ["a", "y", "a", "y"]):
        monkeypatch.setattr(observe_module, "BATCH_BYTES", tensors_at_once * 8 * 4 * 4)
        assert [tensor for tensor, _ in observe(net, ["a", "y"], samples)] == order
    assert not list(observe(net, [], samples))


def test_values_on_one_sample_keep_their_types_and_inputs_may_be_asked_for() -> None:
    net = build("net (float16[2] x, int64[2] n) => (float16[2] y) { m = Neg(n) k = Cast <to = 10> (m) y = Add(x, k) }")
    sample = {"x": np.float16([1, 2]), "n": np.int64([3, 4])}
    found = dict(observe(net, ["x", "m", "y"], [sample], widen=False))
    assert {name: array.dtype.name for name, array in found.items()} == {"x": "float16", "m": "int64", "y": "float16"}
    assert found["m"].tolist() == [-3, -4]
    assert {values.dtype.name for _, values in observe(net, ["x", "y"], [sample])} == {"float32"}


def test_no_sample_and_a_model_that_does_not_run() -> None:
    net = conv_net()
    with pytest.raises(BadData, match="no sample"):
        list(outputs_on(net, []))
    table = build("net (int64[2] ids) => (float[2,4] y) { y = Gather(w, ids) }", {"w": normal(3, 4)})
    with pytest.raises(BadData, match="out of data bounds, idx=7"):
        list(outputs_on(table, [{"ids": np.int64([0, 7])}]))
    with pytest.raises(BadModel, match=r"cannot run the model on .* \dx\d"):
        list(outputs_on(branching(), feeds(branching(), 1)))
    with running(branching()) as run:
        refusal(lambda: run(feeds(branching(), 1)))
