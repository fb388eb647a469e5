"""Bias correction: the means of all layers are those of the float model, in whatever placement a layer stands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models import FP8, INT8, UINT8, Arrays, build, normal, ranges, run
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.samples import Samples
from qdqtune.calibration.scales import Ranges
from qdqtune.graph.model import Model
from qdqtune.placement.bias_correction import bias_shifts
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.types import NumericFormat, Placement

TWO_LAYERS = """net (float[N,4,6,6] x) => (float[N,4,4,4] y, float[N,4,6,6] a) {
    [first] a = Conv(x, w0)
    b = Relu(a)
    [second] y = Conv(b, w1, bias)
}"""


def lopsided(*shape: int) -> np.ndarray[Any, Any]:
    """One weight of 1 in each channel and others of 0.4 steps, which all round down to 0."""
    weights = np.full(shape, 0.4 / 127, np.float32)
    weights.reshape(shape[0], -1)[:, 0] = 1
    return weights


def two_layers(half: bool = False) -> Model:
    constants = {"w0": lopsided(4, 4, 1, 1), "w1": lopsided(4, 4, 3, 3), "bias": np.arange(4, dtype=np.float32)}
    return build(TWO_LAYERS, constants, half=half)


def prepared(net: Model, count: int = 6) -> tuple[Prepared, list[Arrays]]:
    """Positive inputs, which differ little from each other in the mean."""
    dtype = np.float16 if net.tensors["x"].dtype == 10 else np.float32
    feeds = [{"x": (2 + normal(1, 4, 6, 6, seed=i)).astype(dtype)} for i in range(count)]
    samples = Samples("test", "", False, lambda: iter(feeds))
    return Prepared(net, net, samples, samples, samples), feeds


def everything(net: Model, known: Ranges) -> Placement:
    return Placement.of(e for e in possible_edges(net, known) if not e.is_graph_output)


def means(net: Model, feeds: list[Arrays], output: str) -> np.ndarray[Any, Any]:
    return np.stack([out[output].astype(np.float64).mean(axis=(0, 2, 3)) for out in run(net, feeds)]).mean(axis=0)


@pytest.mark.parametrize("numbers", [UINT8, INT8])
def test_the_mean_of_every_layer_is_that_of_the_float_model(numbers: NumericFormat) -> None:
    net = two_layers()
    ready, feeds = prepared(net)
    known = ranges(net, feeds)
    placement = everything(net, known)
    shifts = bias_shifts(ready, placement, known, numbers)
    assert set(shifts) == {"first", "second"}
    np.testing.assert_allclose(shifts["first"], 3 * 0.4 / 127 * 2, rtol=0.15)  # three lost weights, inputs around 2
    plain, corrected = (insert(net, placement, r, numbers) for r in (known, replace(known, shifts=shifts)))
    for output in ("a", "y"):
        wanted = means(net, feeds, output)
        lost = np.abs(means(plain, feeds, output) - wanted)
        assert (np.abs(means(corrected, feeds, output) - wanted) < 0.2 * lost).all()


def test_a_layer_does_not_take_back_what_the_layer_before_it_has_taken_back() -> None:
    """Its weights alone lose 35 steps of 0.4; the first layer's mean is right when the second one looks."""
    net = two_layers()
    ready, feeds = prepared(net)
    known = ranges(net, feeds)
    shifts = bias_shifts(ready, everything(net, known), known, INT8)
    inner = np.mean([np.maximum(out["a"], 0).mean() for out in run(net, feeds)])
    np.testing.assert_allclose(shifts["second"], 35 * 0.4 / 127 * inner, rtol=0.15)


def test_a_layer_in_float_keeps_its_bias() -> None:
    net = two_layers()
    ready, feeds = prepared(net)
    known = ranges(net, feeds)
    whole = everything(net, known)
    corrected = replace(known, shifts=bias_shifts(ready, whole, known, UINT8))
    assert insert(net, Placement(), corrected, UINT8).to_proto() == insert(net, Placement(), known, UINT8).to_proto()
    second = Placement.of(e for e in whole if e.node == "second")
    alone = insert(net, second, corrected, UINT8)
    assert len(alone.nodes[alone.index_of["first"]].inputs) == 2
    np.testing.assert_array_equal(means(alone, feeds, "a"), means(net, feeds, "a"))
    wanted = means(net, feeds, "y")
    lost = np.abs(means(insert(net, second, known, UINT8), feeds, "y") - wanted)
    assert (np.abs(means(alone, feeds, "y") - wanted) < 0.3 * lost).all()  # its weights are at fault, not its inputs


def test_a_mean_that_luck_explains_is_left_alone() -> None:
    """Rounded values of wide inputs, of which there are two: the difference is as often above zero as below."""
    net = build("net (float[N,4,1,1] x) => (float[N,16,1,1] y) { [only] y = Conv(x, w) }", {"w": normal(16, 4, 1, 1)})
    feeds = [{"x": normal(1, 4, 1, 1, seed=i)} for i in range(2)]
    samples = Samples("test", "", False, lambda: iter(feeds))
    known = ranges(net, feeds)
    shifts = bias_shifts(Prepared(net, net, samples, samples, samples), everything(net, known), known, UINT8)
    assert np.mean(np.asarray(shifts["only"]) == 0) >= 0.25


def test_float16_and_fp8() -> None:
    for half, numbers in ((True, INT8), (False, FP8)):
        net = two_layers(half)
        ready, feeds = prepared(net)
        known = ranges(net, feeds)
        placement = everything(net, known)
        corrected = replace(known, shifts=bias_shifts(ready, placement, known, numbers))
        quantized = insert(net, placement, corrected, numbers)
        bias = quantized.constants[quantized.nodes[quantized.index_of["first"]].inputs[2]]
        assert bias.dtype == net.constants["w0"].dtype
        wanted = means(net, feeds, "y")
        lost = np.abs(means(insert(net, placement, known, numbers), feeds, "y") - wanted)
        assert (np.abs(means(quantized, feeds, "y") - wanted) <= lost).all()
