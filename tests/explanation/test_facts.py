"""Facts of a finished run."""

import pytest

from models import build, normal, ranges
from qdqtune.explanation.facts import Facts
from qdqtune.explanation.reasons_by_measurement import headline, tallied
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Edge, Layer, Measurement, Placement, Proposal, Trial, WeightFormat


def test_weights_in_fewer_bits_are_a_decision_of_their_own() -> None:
    net = """net (float[4,64] x) => (float[4,64] y) {
        [a] p = MatMul(x, w0) [b] q = Tanh(p) [c] r = Softmax(q) [d] y = MatMul(r, w1) }"""
    model = build(net, {"w0": normal(64, 64), "w1": normal(64, 64, seed=1)})
    w4, (first, last) = WeightFormat(4, 32), (Edge("w0", "a", 1), Edge("w1", "d", 1))
    shipped = Placement.of((), [(first, w4), (last, w4)])
    ran = [("a", "W4", 0.25), ("b", "FP32", 1.0), ("c", "FP32", 1.0), ("d", "W4", 0.25)]
    layers = tuple(Layer(n, (n,), precision, ms, "compute") for n, precision, ms in ran)
    floats = tuple(Layer(n.name, (n.name,), "FP32", 1.0, "compute") for n in model.nodes)
    won = Measurement((4e-3,) * 12, (2.5e-3,) * 12)
    trial = Trial(0, Proposal("weights in 4 bits", shipped), Placement(), won, layers=layers, accepted=True)
    able = possible_edges(model, ranges(model))
    facts = Facts(model, able, able, shipped, "tuned", "int8", floats, (trial,))
    assert "weights of products in 4 bits, and no pairs" in headline(facts)
    rows, tallies = tallied(facts)
    a = rows[0]
    assert (a.precision, a.weight_format, a.otherwise, a.why, a.quantized) == (
        "w4",
        "w4b32",
        "float weights",
        "faster",
        False,
    )
    assert (a.ms, a.margin_ms) == pytest.approx((0.25, 0.75))
    assert (rows[1].weight_format, rows[1].otherwise) == ("", "8 bits")
    stored = next(tally for tally in tallies if tally.family == "w4")
    assert (stored.runs_in, stored.nodes, stored.ms, stored.float_ms) == ("4-bit weights", 2, 0.5, 2.0)
