"""Rules that place pairs: one graph for each."""

import numpy as np
import pytest

from models import attention, build, conv_net, edges, known, normal
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.engines.formats import numeric_format
from qdqtune.graph.model import Model
from qdqtune.placement.graph_queries import MOST_COPIES
from qdqtune.placement.insertion import insert
from qdqtune.types import QuantType
from rule_placements import count, placed, users, weights


def test_the_residual_input_is_the_skip() -> None:
    found = placed(conv_net(), "openvino").placement.edges
    assert edges("p0 add 1") <= found
    assert not edges("c2 add 0") & found


@pytest.mark.parametrize(("inputs", "skip"), [("p, q", 0), ("q, p", 1)])
def test_of_two_fresh_branches_the_earlier_one_is_the_skip(inputs: str, skip: int) -> None:
    text = f"""net (float[4,32] x) => (float[4,32] y) {{
        [first] p = MatMul(x, w)
        [mid] h = MatMul(x, w)
        [relu] r = Relu(h)
        [second] q = MatMul(r, w)
        [add] s = Add({inputs})
        [end] y = Exp(s)
    }}"""
    found = placed(build(text, weights(w=(32, 32)))).placement.edges
    assert {e for e in found if e.node == "add"} == edges(f"p add {skip}")


# Convolution to LayerNormalization


def block(copies: str, source: str = "p") -> str:
    return f"""net (float[1,32,8,8] x, int64[3] shape) => (float[A,B,C] y) {{
        [conv] p = Conv <pads=[1,1,1,1]> (x, w)
        {copies}
        [norm] n = LayerNormalization({source}, g, b)
        [end] y = Exp(n)
    }}"""


NORM = weights(w=(32, 32, 3, 3), g=(32,), b=(32,)) | {"axis": np.array([0]), "one": np.float32(1)}
TURN = "[t] t = Transpose <perm=[0,2,3,1]> (p)\n"


@pytest.mark.parametrize(
    ("copies", "source"),
    [("", "p"), (TURN, "t"), (TURN + "[r] r = Reshape(t, shape)", "r"), (TURN + "[u] u = Unsqueeze(t, axis)", "u"),
     (TURN + "[c] c = Cast <to=1> (t)", "c"), ("[relu] r = Relu(p)\n[t] t = Transpose <perm=[0,2,3,1]> (r)", "t"),
     ("[scale] s = Mul(p, one)\n[t] t = Transpose <perm=[0,2,3,1]> (s)", "t")],
)  # fmt: skip
def test_a_layernorm_that_follows_a_convolution_has_a_pair_on_its_data(copies: str, source: str) -> None:
    """Through copies, their data input only (the shape of a Reshape is an input of the graph); from anywhere in the
    convolution's fusion."""
    model = build(block(copies, source), NORM)
    found = placed(model)
    assert {e for e in found.placement if e.node == "norm"} == edges(f"{source} norm 0")
    assert count(found, "conv-layernorm") == 1
    assert "norm" not in users(placed(model, "openvino"))
    assert "norm" not in users(placed(model, quant_type="fp8"))


def test_not_every_layernorm_follows_a_convolution() -> None:
    for between in ("[f] f = Softmax(p)", "[f] f = GlobalAveragePool(p)", "[f] f = Mul(p, x)"):
        assert "norm" not in users(placed(build(block(between, "f"), NORM)))
    assert "norm" not in users(placed(build(block("", "x"), NORM)))


@pytest.mark.parametrize("length", [MOST_COPIES, MOST_COPIES + 1])
def test_the_walk_through_copies_is_bounded(length: int) -> None:
    tensors = ["p", *(f"t{i}" for i in range(length))]
    chain = [f"[c{i}] {tensors[i + 1]} = Transpose <perm=[0,1,3,2]> ({tensors[i]})" for i in range(length)]
    found = placed(build(block("\n".join(chain), tensors[-1]), NORM))
    assert ("norm" in users(found)) == (length <= MOST_COPIES)


STAGES = """net (float[1,32,8,8] x) => (float[1,32,4,4] y) {
    [depthwise] d = Conv <group=32, pads=[1,1,1,1]> (x, wd)
    [turn] t = Transpose <perm=[0,2,3,1]> (d)
    [norm] n = LayerNormalization(t, g, b)
    [up] u = MatMul(n, wu)
    [down] m = MatMul(u, wm)
    [bias] a = Add(m, b)
    [scale] s = Mul(a, g)
    [back] c = Transpose <perm=[0,3,1,2]> (s)
    [add] r = Add(x0, c)
    [turn2] t2 = Transpose <perm=[0,2,3,1]> (r)
    [norm2] n2 = LayerNormalization(t2, g, b)
    [back2] c2 = Transpose <perm=[0,3,1,2]> (n2)
    [shrink] y0 = Conv <strides=[2,2]> (c2, w)
    [mean] k = GlobalAveragePool(y0)
    [turn3] t3 = Transpose <perm=[0,2,3,1]> (k)
    [norm3] n3 = LayerNormalization(t3, g, b)
    [end] y = Exp(n3)
    [stem] x0 = Conv <pads=[1,1,1,1]> (x, w)
}"""


def test_the_layernorms_of_a_convnext() -> None:
    """One behind a convolution, one behind a residual Add whose branch ends in a matrix product, one behind a pool."""
    order = STAGES.splitlines()
    text = "\n".join([order[0], order[-2], *order[1:-2], order[-1]])
    constants = weights(w=(32, 32, 2, 2), wd=(32, 1, 3, 3), wu=(32, 64), wm=(64, 32), g=(32,), b=(32,))
    text = text.replace("[stem] x0 = Conv <pads=[1,1,1,1]>", "[stem] x0 = Conv <pads=[0,0,1,1]>")
    found = placed(build(text, constants))
    assert {e.node for e in found.placement if e.node.startswith("norm")} == {"norm", "norm2"}
    assert edges("x0 add 0", "t norm 0", "t2 norm2 0") <= found.placement.edges


def test_the_layernorms_of_a_transformer_stay_in_float() -> None:
    assert not {"norm", "norm2"} & users(placed(attention()))


# What passes 8 bits on

PASSING = """net (float[1,32,8,8] x) => (float[A,B,C,D] y) {{
    [left] l = Conv <pads=[1,1,1,1]> (x, w)
    [right] r = Conv <pads=[1,1,1,1]> (x, w)
    [relu] s = Relu(r)
    {0}
    [next] q = Conv <pads=[1,1,1,1]> (m, {1})
    [end] y = {2}
}}"""
PASSES = weights(w=(32, 32, 3, 3), wide=(32, 64, 3, 3)) | {"scales": np.float32([1, 1, 2, 2])}


@pytest.mark.parametrize(
    ("operator", "rule", "expected"),
    [("[m] m = MaxPool <kernel_shape=[2,2]> (s)", "max-pool", "s m 0"),
     ("[m] m = Resize <mode=\"nearest\"> (s, , scales)", "resize", "s m 0"),
     ("[m] m = Resize <mode=\"linear\"> (s, , scales)", "resize", "s m 0"),
     ("[m] m = AveragePool <kernel_shape=[2,2]> (s)", "average-pool", "s m 0")],
)  # fmt: skip
def test_what_hands_values_on_takes_8_bits_between_quantized_neighbours(
    operator: str, rule: str, expected: str
) -> None:
    model = build(PASSING.format(operator, "w", "Exp(q)"), PASSES)
    found = placed(model)
    assert edges(expected) <= found.placement.edges
    assert count(found, rule) >= 1
    assert "m" not in users(placed(model, quant_type="fp8"))
    beside = build(PASSING.format(operator, "w", "Mul(q, m)"), PASSES)  # which reads it in float
    assert not edges(expected) & placed(beside).placement.edges


def test_a_cubic_resize_overshoots_and_stays_in_float() -> None:
    operator = '[m] m = Resize <mode="cubic"> (s, , scales)'
    assert "m" not in users(placed(build(PASSING.format(operator, "w", "Exp(q)"), PASSES)))


def test_an_average_pool_whose_input_something_reads_in_float_stays_in_float() -> None:
    operator = "[m] m = AveragePool <kernel_shape=[1,1]> (s)"
    assert "m" not in users(placed(build(PASSING.format(operator, "w", "Mul(q, s)"), PASSES)))


@pytest.mark.parametrize("quant_type", ["int8", "fp8"])
def test_inputs_and_output_of_a_concat_share_one_scale(quant_type: QuantType) -> None:
    model = build(PASSING.format("[m] m = Concat <axis=1> (l, s)", "wide", "Exp(q)"), PASSES)
    found = placed(model, quant_type=quant_type)
    assert edges("l m 0", "s m 1", "m next 0") <= found.placement.edges
    assert count(found, "concat") == 2
    assert placed(model, "openvino").placement.edges >= edges("l m 0", "s m 1", "m next 0")
    ranges = Ranges(dict(known(model).activations) | {"s": Range(0, 8.0), "m": Range(0, 6.0)})
    done = insert(model, found.placement, ranges, numeric_format("tensorrt", quant_type))
    scales = {float(done.constants[f"{t}_scale"].array()) for t in ("l", "s", "m")}
    assert scales == {float(np.float32(6 / (127 if quant_type == "int8" else 448)))}  # the best for all of its values


def test_a_concat_that_something_reads_in_float_stays_in_float() -> None:
    model = build(PASSING.format("[m] m = Concat <axis=1> (l, s)", "wide", "Exp(m)"), PASSES)
    assert "m" not in users(placed(model))


# ONNX Runtime


def test_onnxruntime_wants_pairs_behind_convolutions_and_products_with_a_bias() -> None:
    text = """net (float[4,32] x) => (float[4,32] y) {
        [a] p = MatMul(x, w)
        [bias] b = Add(p, c)
        [erf] e = Erf(b)
        [b] q = MatMul(e, w)
        [exp] y = Exp(q)
    }"""
    found = placed(build(text, weights(w=(32, 32), c=(32,))), "onnxruntime")
    assert found.placement.edges == edges("x a 0", "w a 1", "p bias 0", "e b 0", "w b 1")
    assert count(found, "compute-results") == 1


def test_onnxruntime_goes_on_in_integers_between_quantized_neighbours() -> None:
    found = placed(conv_net(), "onnxruntime")
    assert edges("c2 add 0", "p0 add 1", "r1 concat 0", "c3 concat 1") <= found.placement.edges
    assert count(found, "integer-operators") > 0
    assert not {"stem_relu", "clip"} & users(found)


FUSED = """net (float[1,64,128] x) => (float[1,64,32] y) {{
    [make] m = MatMul(x, w)
    [bias] n = Add(b, m)
    [heads] h = Reshape(n, five)
    [turn] t = Transpose <perm=[2,0,3,1,4]> (h)
    {parts}
    [sq] q = Squeeze(q1, zero) [sk] k1 = Squeeze(k0, zero) [sv] v = Squeeze(v0, zero)
    [scale] qs = Mul(q, c)
    [keys] k = Transpose <perm=[0,1,3,2]> (k1)
    [scores] s = MatMul(qs, k) [softmax] p = Softmax(s) [context] o = MatMul(p, v)
    [back] r = Transpose <perm=[0,2,1,3]> (o) [merge] e = Reshape(r, three) [end] y = MatMul(e, wo)
}}"""

SPLIT = "[part] q1, k0, v0 = Split <axis=0, num_outputs=3> (t)"
GATHERS = "[pq] q1 = Gather <axis=0> (t, i0) [pk] k0 = Gather <axis=0> (t, i1) [pv] v0 = Gather <axis=0> (t, i2)"


def fused(parts: str, heads: int = 4, half: bool = True) -> Model:
    """Attention whose queries, keys and values come from one product."""
    ints = {
        "five": [1, 64, 3, heads, 128 // heads],
        "three": [1, 64, 128],
        "zero": [0],
        "i0": [0],
        "i1": [1],
        "i2": [2],
    }
    constants = {"w": normal(128, 384), "b": normal(384), "c": np.float32(0.25), "wo": normal(128, 32)}
    return build(FUSED.format(parts=parts), constants | {n: np.array(v) for n, v in ints.items()}, half=half)


@pytest.mark.parametrize("quant_type", ["int8", "fp8"])
@pytest.mark.parametrize(("parts", "readers"), [(SPLIT, "t part 0"), (GATHERS, "t pq 0|t pk 0|t pv 0")])
def test_what_divides_queries_keys_and_values_reads_8_bits(parts: str, readers: str, quant_type: QuantType) -> None:
    wanted = edges(*readers.split("|"), "x make 0", "w make 1", "qs scores 0", "k scores 1")
    assert wanted <= placed(fused(parts), "tensorrt-rtx", quant_type).placement.edges
    for other in ("fake", "openvino", "onnxruntime")[: 3 if quant_type == "int8" else 1]:
        assert not {"part", "pq"} & users(placed(fused(parts, half=False), other, quant_type))


@pytest.mark.parametrize(
    ("quant_type", "half", "kept"),
    [
        ("int8", True, set()),
        ("fp8", True, {"make"}),
        ("int8", False, {"make", "part"}),
        ("fp8", False, {"make", "part"}),
    ],
)
def test_attention_that_is_fused_in_float16_gets_no_pair_in_front(quant_type: QuantType, half: bool, kept: set) -> None:
    """Heads of 8 have no kernel in 8 bits. In INT8 the product would run in float16 with its weights converted."""
    found = users(placed(fused(SPLIT, heads=16, half=half), "tensorrt", quant_type))
    assert found & {"make", "part", "scores", "context"} == kept
    assert "end" in found


def test_products_of_their_own_for_queries_and_keys_have_pairs_on_their_inputs_alone() -> None:
    found = placed(attention(half=True), "tensorrt")
    assert count(found, "attention-parts") == count(found, "parts-of-float-attention") == 0
