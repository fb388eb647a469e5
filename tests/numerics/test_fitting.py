"""Numbers are chosen by what they do to the outputs, and biases are corrected where that helps."""

import numpy as np
import pytest

from fitted_nets import Heard, db, inputs_of, prepared
from models import INT8, UINT8, build, conv_net, feeds, normal, run
from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.scales import Calibration, Method, Range, Ranges
from qdqtune.graph.model import Model
from qdqtune.numerics.fitting import fitted
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Placement

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("method", ["mse", "percentile", "minmax"])
def test_probabilities_have_the_range_that_they_can_have(method: Method) -> None:
    net = build("net (float[1,64] x) => (float[1,64] y) { [soft] p = Softmax(x) [last] y = Relu(p) }", {})
    feeds = [{"x": 12 * normal(1, 64, seed=i)} for i in range(6)]  # nearly all is next to zero, and what counts is not
    found = fitted(prepared(net, feeds), Calibration(method), UINT8, inputs_of(net, "last"))
    assert found.activations["p"] == Range(0.0, 1.0)
    flat = fitted(prepared(net, [{"x": normal(1, 64)}]), Calibration(method), UINT8, inputs_of(net, "last"))
    assert flat.activations["p"].high < 0.5
    assert fitted(prepared(net, feeds), Calibration(method), INT8, inputs_of(net, "last")).activations["p"].high < 1.01


def lopsided_layer(first: float) -> Model:
    """A convolution whose weights of 0.4 steps are lost; with `first` 0.4 steps as well, all fit."""
    weights = np.full((2, 4, 1, 1), 0.4 / 127, np.float32)
    weights[:, 0] = first
    return build("net (float[1,4,5,5] x) => (float[1,2,5,5] y) { [only] y = Conv(x, w) }", {"w": weights})


def test_biases_are_corrected_where_the_outputs_gain_by_it_and_only_if_asked() -> None:
    feeds = [{"x": 3 + normal(1, 4, 5, 5, seed=i) / 4} for i in range(6)]
    net = lopsided_layer(1.0)
    place = inputs_of(net, "only")
    corrected = fitted(prepared(net, feeds), Calibration(bias_correction=True), INT8, place)
    assert corrected.shifts.keys() == {"only"}
    assert not fitted(prepared(net, feeds), Calibration(), INT8, place).shifts
    exact = run(net, feeds)
    gained, lost = (db(exact, run(insert(net, place(r), r, INT8), feeds))
                    for r in (corrected, Ranges(corrected.activations)))  # fmt: skip
    assert gained > lost + 3
    zero_mean = [{"x": normal(1, 4, 5, 5, seed=i)} for i in range(6)]
    even = lopsided_layer(0.4 / 127)
    assert not fitted(
        prepared(even, zero_mean), Calibration(bias_correction=True), INT8, inputs_of(even, "only")
    ).shifts


def test_nothing_is_run_for_an_empty_placement() -> None:
    net = conv_net()
    found = fitted(prepared(net, feeds(net)), Calibration("mse", bias_correction=True), UINT8, lambda _: Placement())
    assert not found.shifts
    assert found.activations.keys() == set(candidate_tensors(net))


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("count", [2, 5])
def test_what_takes_long_tells_how_far_it_is(bias_correction: bool, count: int) -> None:
    net, heard = conv_net(), Heard()
    how = Calibration("mse", bias_correction=bias_correction)
    fitted(
        prepared(net, feeds(net, count)),
        how,
        UINT8,
        lambda ranges: Placement(possible_edges(net, ranges)),
        listener=heard,
    )
    told = {text: steps for text, steps in heard.stages if not text.startswith("calibrating on")}
    assert ("correcting biases" in told) is bias_correction
    for steps in told.values():
        assert len(steps) > 1
        totals = {total for _, total in steps}
        assert len(totals) == 1
        assert steps == sorted(steps)
        assert max(totals) >= steps[-1][0] > 0
