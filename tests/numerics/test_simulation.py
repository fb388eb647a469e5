"""Outputs foretold without the engine: against the inserter's own models on ONNX Runtime."""

from dataclasses import replace

import numpy as np
import pytest

from models import PLAIN, attention, build, conv_net, feeds, normal, ranges, run
from qdqtune.graph.model import Model
from qdqtune.numerics.accuracy import accuracy
from qdqtune.numerics.simulation import Simulation
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Accuracy, Placement

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("net", [conv_net, attention])
def test_it_tells_what_the_file_does(net: type[object]) -> None:
    model = net()
    known, samples = ranges(model), feeds(model)
    inserter = Inserter(model, known, replace(PLAIN, reduced_weights=True))  # with 8 bits, fused products may saturate
    reference = run(model, samples)
    with Simulation(inserter, samples) as simulation:
        for placement in start_placements.placements(model, possible_edges(model, known)).values():
            found = simulation.accuracy(placement)
            real = accuracy(reference, run(inserter.insert(placement), samples))
            fused = accuracy(reference, run(inserter.insert(placement), samples, fused=True))
            assert isinstance(found, Accuracy)
            assert found.sqnr_db is not None
            assert found.sqnr_db == pytest.approx(real.sqnr_db, abs=1e-3)
            assert found.sqnr_db == pytest.approx(fused.sqnr_db, abs=1.0)
        assert simulation.accuracy(Placement()).sqnr_db is None  # type: ignore[union-attr]


BETWEEN = """net (float[1,4,8,8] x) => (float[1,4,8,8] y) {
    [first] a = Conv<pads=[1,1,1,1]>(x, w0)
    [pool] b = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(a)
    [second] c = Conv(b, w1)
    [relu] y = Relu(c)
}"""


def three_ways(model: Model, tensors: str) -> tuple[Accuracy, Accuracy, Accuracy]:
    """Of a placement on some tensors: as ONNX Runtime runs it, as it is foretold for that, and by the file alone."""
    samples, known = feeds(model), ranges(model)
    placement = Placement.of(e for e in possible_edges(model, known) if e.tensor in tensors)
    inserter = Inserter(model, known, PLAIN)
    fused = accuracy(run(model, samples), run(inserter.insert(placement), samples, fused=True))
    with Simulation(inserter, samples, "onnxruntime") as meant, Simulation(inserter, samples) as unmeant:
        found, literal = meant.accuracy(placement), unmeant.accuracy(placement)
    assert isinstance(found, Accuracy)
    assert isinstance(literal, Accuracy)
    return fused, found, literal


def test_weights_that_onnx_runtime_rounds_by_itself_count_where_it_is_meant() -> None:
    first, second = normal(4, 4, 3, 3), normal(4, 4, 1, 1, seed=1)
    first[0], second[0, 0], second[1, 0] = (
        0,
        50,
        -50,
    )  # large weights, of a channel that is always zero, and zero point 0
    model = build(BETWEEN, {"w0": first, "w1": second})
    fused, found, literal = three_ways(model, "ay")  # in front of MaxPool, behind
    assert found.sqnr_db == pytest.approx(fused.sqnr_db, abs=0.5)
    assert literal.sqnr_db > found.sqnr_db + 3


def test_a_softmax_in_integers_is_foretold_where_it_is_meant() -> None:
    net = "net (float[256,2] x) => (float[256,2] y) { [squash] h = Softmax(x) [twice] y = Mul(h, two) }"
    model = build(net, {"two": np.float32(2)})
    fused, found, literal = three_ways(model, "xh")
    assert found.sqnr_db == pytest.approx(fused.sqnr_db, abs=0.01)
    assert literal.sqnr_db > fused.sqnr_db + 0.2
