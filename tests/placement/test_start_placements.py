"""The first guesses: each rule puts pairs where its reason says, and nowhere else."""

import numpy as np
import onnx
import pytest

from models import UINT8, branching, build, case, conv_net, edges, known, normal, ranges, static
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.graph import operators
from qdqtune.graph.model import GRAPH, Model
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import consistent, possible_edges
from qdqtune.placement.reading import read_placement
from qdqtune.placement.start_placements import START_PLACEMENTS, placements
from qdqtune.types import Edge, Placement

CASES = ("conv_net", "attention", "tapped", "embedding", "conv_net_half")


def possible(model: Model) -> frozenset[Edge]:
    return possible_edges(model, known(model))


# Where pairs may stand


def test_possible_edges_of_a_network() -> None:
    model = conv_net()
    found = possible(model)
    assert found == edges(
        "image stem 0", "w0 stem 1", "c0 stem_relu 0", "r0 pool 0", "p0 depthwise 0", "w1 depthwise 1", "c1 clip 0",
        "k1 project 0", "w2 project 1", "c2 add 0", "p0 add 1", "a add_relu 0", "r1 side 0", "w3 side 1", "r1 concat 0",
        "c3 concat 1", "cat average 0", "g flatten 0", "f head 0", "w4 head 1",
    ) | {Edge("logits", "", 0)}  # fmt: skip


def test_no_settings_no_integers_no_custom_operators_nothing_that_a_body_reads_by_name() -> None:
    text = """net (float[1,2,4,4] x, float bound, int64[1] n) => (float[A,B,C,D] y, float[E,F,G,H] v) {
        [clip] c = Clip(x, bound, top)
        [resize] r = Resize(c, , scales)
        [pad] p = Pad(r, pads, bound)
        [norm] b = BatchNormalization(p, two, two, two, two)
        [custom] u = custom.Gate(b, two)
        [cast] i = Cast <to=7> (b)
        [add] j = Add(i, n)
        [reshape] v = Reshape(b, shape)
        [big] y = Mul(u, infinite)
    }"""
    constants = {
        "top": np.float32(1),
        "scales": np.float32([1, 1, 2, 2]),
        "pads": np.zeros(8, np.int64),
        "two": np.float32([1, 1]),
        "shape": np.array([1, 1, 2, -1]),
        "infinite": np.float32(np.inf),
    }
    model = build(text, constants)
    assert possible(model) == edges(
        "x clip 0", "c resize 0", "r pad 0", "p norm 0", "two norm 1", "b cast 0", "b reshape 0"
    ) | {Edge("y", "", 0), Edge("v", "", 1)}
    branched = possible(branching())
    assert all(e.index >= 0 and e.node not in ("branch", "mark") for e in branched)
    assert {e for e in branched if e.is_graph_output} == {Edge("y", "", 0)}  # "t" is an output, and read by a body


def test_an_output_that_is_an_input_takes_no_pair() -> None:
    model = build("net (float[N,2] x) => (float[N,2] y, float[N,2] x) { [relu] y = Relu(x) }")
    assert possible(model) == edges("x relu 0") | {Edge("y", "", 0)}


# Each rule


def placed(rule: str, model: Model) -> frozenset[Edge]:
    return START_PLACEMENTS[rule](model, possible(model)).edges


COMPUTE = ("image stem 0", "w0 stem 1", "p0 depthwise 0", "w1 depthwise 1", "k1 project 0", "w2 project 1", "r1 side 0",
           "w3 side 1", "f head 0", "w4 head 1")  # fmt: skip


def test_compute_has_both_inputs_of_compute_operators_alone() -> None:
    assert placed("compute", conv_net()) == edges(*COMPUTE)
    attention = case("attention").model
    assert {e.node for e in placed("compute", attention)} == {
        "query", "key", "value", "scores", "context", "out", "up", "down",
    }  # fmt: skip
    assert edges("q scores 0", "kt scores 1") <= placed("compute", attention)


def test_residual_adds_the_skip_input_only() -> None:
    assert placed("residual", conv_net()) == edges(*COMPUTE, "p0 add 1")


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
    assert placed("residual", model) - placed("compute", model) == (edges(skip) if skip else set())


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


def test_islands_of_a_model_that_shape_inference_did_not_reach() -> None:
    """Slice with an input left out, and tensors of unknown type."""
    text = """net (float[N,4] x) => (float[A,B] y) {
        [a] p = MatMul(x, w)
        [slice] s = Slice(p, zero, one, , one)
        [gate] g = custom.Gate(s)
        [shape] h = Reshape(g, sizes)
        [add] k = Add(h, s)
        [b] y = MatMul(k, w)
    }"""
    constants = {"w": normal(4, 4), "zero": np.array([0]), "one": np.array([1]), "sizes": np.array([1, 4])}
    model = build(text, constants)
    assert "g" not in model.tensors
    assert edges("p slice 0", "s gate 0") & placed("islands", model) == edges("p slice 0")
    for place in START_PLACEMENTS.values():
        assert place(model, possible(model)).edges <= possible(model)


@pytest.mark.parametrize("name", ["conv_net", "tapped", "embedding", "attention"])
def test_static_is_what_quantize_static_does(name: str) -> None:
    model, quantized = static(name, per_channel=True)
    theirs = read_placement(model, quantized).placement
    scales_of_norms = Placement.of(e for e in theirs if e.tensor == "gamma")
    assert start_placements.static(model, possible_edges(model, ranges(model))) == theirs - scales_of_norms
    assert len(theirs) > 5


def test_everything_leaves_out_the_inside_of_fusions_and_the_outputs() -> None:
    model = conv_net()
    assert possible(model) - placed("everything", model) == edges("c0 stem_relu 0", "c1 clip 0") | {
        Edge("logits", "", 0)
    }


def test_an_input_of_a_clamp_that_others_read_is_no_inside() -> None:
    text = "net (float[N,4] x) => (float[N,4] y) {\n [a] p = MatMul(x, w)\n [relu] r = Relu(p)\n [add] y = Add(r, p) }"
    assert Edge("p", "relu", 0) in placed("everything", build(text, {"w": normal(4, 4)}))


# What all rules hold


def inside(model: Model) -> set[Edge]:
    """Edges between a compute operator and the clamp that it alone feeds."""
    found = set()
    for node in model.nodes:
        if node.op in ("Relu", "Clip") and len(model.uses(node.inputs[0])) == 1:
            producer = model.producers.get(node.inputs[0], GRAPH)
            if producer != GRAPH and model.nodes[producer].op in operators.COMPUTE:
                found.add(Edge(node.inputs[0], node.name, 0))
    return found


@pytest.mark.parametrize("name", CASES)
def test_rules_never_break_a_fusion_or_quantize_half_an_operator(name: str) -> None:
    model, _, found, all_of_them, _ = case(name)
    guesses = placements(model, all_of_them)
    assert guesses.keys() <= START_PLACEMENTS.keys()
    assert len(set(guesses.values())) == len(guesses) >= 2
    for placement in guesses.values():
        assert placement.edges
        assert placement.edges <= all_of_them
        assert not placement.edges & inside(model)
        assert consistent(model, placement) == placement
        onnx.checker.check_model(insert(model, placement, found, UINT8).to_proto(), full_check=True)


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


def test_consistent_drops_lonely_pairs_of_compute_operators_only() -> None:
    model = conv_net()
    whole = edges("image stem 0", "w0 stem 1", "p0 add 1", "r0 pool 0")
    lonely = edges("p0 depthwise 0", "w2 project 1", "f head 0")
    assert consistent(model, Placement.of(whole | lonely)) == Placement.of(whole)
    assert consistent(model, Placement.of(whole)) == Placement.of(whole)


def test_guesses_of_a_model_without_compute_operators_are_not_empty_placements() -> None:
    model = build("net (float[N,2] x) => (float[N,2] y) { [exp] y = Exp(x) }")
    guesses = placements(model, possible(model))
    assert guesses == {"everything": Placement.of(edges("x exp 0"))}
