"""The first guesses: each rule puts pairs where its reason says, and nowhere else."""

import numpy as np
import pytest

from models import build, conv_net, edges, known, normal, ranges, static
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.graph.model import Model
from qdqtune.placement import start_placements
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import read_placement
from qdqtune.placement.start_placements import START_PLACEMENTS, placements
from qdqtune.types import Edge, Placement


def possible(model: Model) -> frozenset[Edge]:
    return possible_edges(model, known(model))


def placed(rule: str, model: Model) -> frozenset[Edge]:
    return START_PLACEMENTS[rule](model, possible(model)).edges


COMPUTE = ("image stem 0", "w0 stem 1", "p0 depthwise 0", "w1 depthwise 1", "k1 project 0", "w2 project 1", "r1 side 0",
           "w3 side 1", "f head 0", "w4 head 1")  # fmt: skip


ADDS = """net (float[N,4] x) => (float[N,4] y) {{
    [relu] r = Relu(x)
    [a] p = MatMul(r, w)
    [b] q = MatMul(r, w)
    [bias] s = Add(p, c)
    [add] y = Add({})
}}"""


@pytest.mark.parametrize(
    ("inputs", "skip"),
    [("p, r", "r add 1"), ("r, p", "r add 0"), ("p, q", "q add 1"), ("s, r", "r add 1"), ("r, r", None), ("x, p", None),
     ("p, c", None)],
)  # fmt: skip
def test_which_input_of_an_add_is_the_skip(inputs: str, skip: str | None) -> None:
    """Both fresh: the second. A graph input stays float, since nothing would be saved; a constant is a bias."""
    model = build(ADDS.format(inputs), {"w": normal(4, 4), "c": normal(4)})
    assert placed("residual", model) == placed("compute", model) | (edges(skip) if skip else set())


def test_islands_join_compute_operators_through_what_hands_integers_on() -> None:
    assert placed("islands", conv_net()) == edges(
        *COMPUTE, "r0 pool 0", "p0 add 1", "c2 add 0", "r1 concat 0", "c3 concat 1", "cat average 0", "g flatten 0"
    )


def test_islands_end_where_a_float_operator_stands() -> None:
    text = """net (float[N,4] x, float[N,4] z) => (float[N,4] y) {
        [a] p = MatMul(x, w)
        [turn] t = Transpose <perm=[1,0]> (p)
        [soft] s = Softmax(t)
        [back] u = Transpose <perm=[1,0]> (s)
        [add] v = Add(p, z)
        [b] y = MatMul(v, w)
    }"""
    found = placed("islands", build(text, {"w": normal(4, 4)}))
    assert found == edges("x a 0", "w a 1", "v b 0", "w b 1", "p turn 0", "t soft 0")


@pytest.mark.parametrize("name", ["conv_net", "tapped", "embedding", "attention"])
def test_static_is_what_quantize_static_does(name: str) -> None:
    model, quantized = static(name, per_channel=True)
    theirs = read_placement(model, quantized).placement
    scales_of_norms = Placement.of(e for e in theirs if e.tensor == "gamma")
    assert start_placements.static(model, possible_edges(model, ranges(model))) == theirs - scales_of_norms
    assert len(theirs) > 5


def test_an_input_of_a_clamp_that_others_read_is_no_inside() -> None:
    text = "net (float[N,4] x) => (float[N,4] y) {\n [a] p = MatMul(x, w)\n [relu] r = Relu(p)\n [add] y = Add(r, p) }"
    assert Edge("p", "relu", 0) in placed("everything", build(text, {"w": normal(4, 4)}))


HALF_KNOWN = """net (float[N,4] x, float[N,4] z) => (float[N,4] y) {
    [a] p = MatMul(x, bad)
    [b] q = MatMul(z, w)
    [c] r = MatMul(z, w)
    [add] s = Add(p, q)
    [sum] y = Add(s, r)
}"""


def test_an_operator_with_one_input_that_cannot_be_quantized_gets_no_pair_at_all() -> None:
    """A weight that is not finite, an activation of unknown range."""
    bad = normal(4, 4)
    bad[0, 0] = np.inf
    model = build(HALF_KNOWN, {"bad": bad, "w": normal(4, 4)})
    some = possible_edges(model, Ranges({t: Range(-1, 1) for t in "xpqrsy"}))
    assert Edge("x", "a", 0) in some
    chosen = [START_PLACEMENTS[name](model, some) for name in ("compute", "residual", "islands")]
    for placement in (*chosen, *placements(model, some).values()):
        assert not {e.node for e in placement} & {"a", "b", "c"}
