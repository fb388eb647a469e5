"""Placement rules: the first guesses of a search, and those of quantize, with one graph for each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from models import FORMATS, attention, build, conv_net, edges, known, normal, ranges, static
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.engines.formats import numeric_format
from qdqtune.graph.model import Model
from qdqtune.placement import start_placements
from qdqtune.placement.engine_rules import PlacedByRules, place
from qdqtune.placement.graph_queries import GraphQueries
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import consistent, possible_edges
from qdqtune.placement.reading import read_placement
from qdqtune.placement.start_placements import START_PLACEMENTS, placements
from qdqtune.types import Edge, Placement, QuantType
from region_models import networks


def placed(model: Model, engine: str = "tensorrt", quant_type: QuantType = "int8") -> PlacedByRules:
    return place(model, possible_edges(model, known(model)), engine, quant_type)


def users(found: PlacedByRules) -> set[str]:
    """The nodes with a pair on an input."""
    return {e.node for e in found.placement}


def count(found: PlacedByRules, rule: str) -> int:
    return dict(found.counts)[rule]


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: normal(*shape) for name, shape in shapes.items()}


@settings(derandomize=True, max_examples=15, deadline=None)
@given(networks())
def test_rules_take_any_graph(network) -> None:
    model = network.model()
    possible = possible_edges(model, known(model))
    starts = placements(model, possible).values()
    assert len(set(starts)) == len(starts)
    found = [(start, "uint8") for start in starts]
    for engine, numbers in (("onnxruntime", "uint8"), ("tensorrt", "int8"), ("tensorrt", "fp8")):
        found.append((placed(model, engine, "fp8" if numbers == "fp8" else "int8").placement, numbers))
    for placement, numbers in found:
        assert placement.edges <= possible
        assert consistent(model, placement) == placement
        insert(model, placement, known(model), FORMATS[numbers])


def test_on_onnxruntime_only_a_convolution_writes_8_bits_to_an_output() -> None:
    """It has no kernel that takes 8 bits and gives float."""
    text = """net (float[1,16,8,8] x) => (float[1,16,6,6] y, float[1,16,6,6] z) {
        [a] p = Conv <pads=[1,1,1,1]> (x, w)
        [relu] q = Relu(p)
        [last] y = Conv(q, w)
        [end] z = Exp(y)
    }"""
    found = placed(build(text, weights(w=(16, 16, 3, 3))), "onnxruntime")
    assert found.placement.edges == edges("x a 0", "w a 1", "q last 0", "w last 1", "y end 0") | {Edge("y", "", 0)}
    assert count(found, "float-outputs") == 1


def test_on_onnxruntime_what_is_in_half_precision_stays_in_float() -> None:
    text = """net (float[4,32] x) => (float[4,32] y) {
        [a] p = MatMul(x, w)
        [half] h = Cast <to=10> (p)
        [b] q = MatMul(h, v)
        [back] r = Cast <to=1> (q)
        [end] y = Exp(r)
    }"""
    model = build(text, weights(w=(32, 32)) | {"v": weights(v=(32, 32))["v"].astype(np.float16)})
    assert users(placed(model, "onnxruntime")) == {"a"}
    assert users(placed(model)) == {"a", "b"}
    assert count(placed(model, "onnxruntime"), "half-precision") == 3


def test_nothing_inside_a_fusion() -> None:
    constants = weights(w=(16, 16, 3, 3), c=(16, 1, 1)) | {"one": np.ones(16, "f"), "zero": np.zeros(16, "f")}
    text = """net (float[1,16,8,8] x) => (float[1,16,8,8] y) {
        [a] p = Conv <pads=[1,1,1,1]> (x, w)
        [bias] b = Add(p, c)
        [norm] n = BatchNormalization(b, one, zero, zero, one)
        [act] r = Relu(n)
        [next] q = Conv <pads=[1,1,1,1]> (r, w)
        [end] y = Sigmoid(q)
    }"""
    model = build(text, constants)
    queries = GraphQueries(model, possible_edges(model, known(model)))
    inside = {e for e in queries.possible if queries.is_inside(e)}
    assert inside == edges("p bias 0", "b norm 0", "n act 0", "q end 0")
    assert placed(model).placement.edges == edges("x a 0", "w a 1", "r next 0", "w next 1")


@pytest.mark.parametrize(
    ("channels", "in_front", "kept"),
    [(3, "Relu(image)", True), (16, "Relu(image)", False), (3, "Conv(image, w)", False)],
    ids=["first", "wide enough", "not the first"],
)
def test_a_first_convolution_with_a_swish_stays_in_float_on_onnxruntime(channels, in_front, kept):
    text = f"""net (float[1,{channels},9,9] image) => (float[1,16,9,9] y) {{
        [front] c = {in_front} [stem] x = Conv(c, v)
        [add] a = Add(x, three) [clip] b = Clip(a, zero, six) [divide] g = Div(b, six) [product] p = Mul(x, g)
        [second] o = Conv(p, u) [sigmoid] h = Sigmoid(o) [last] q = Mul(o, h) [tail] y = Conv(q, u)
    }}"""
    constants = weights(v=(16, channels, 1, 1), u=(16, 16, 1, 1), w=(channels, channels, 1, 1))
    constants |= {n: np.float32(v) for n, v in (("three", 3), ("zero", 0), ("six", 6))}
    model = build(text, constants)
    found = placed(model, "onnxruntime")
    assert ("stem" not in users(found)) is kept
    assert any(e.tensor in ("x", "g", "p") for e in found.placement) is not kept
    assert ("second" in users(found)) is not kept  # what reads the product
    assert "tail" in users(found)


@pytest.mark.parametrize(
    "gate",
    ["[g] g = Sigmoid(p)\n[m] m = Mul(p, g)", "[g] g = HardSigmoid(p)\n[m] m = Mul(g, p)",
     "[t] t = Add(p, three)\n[c] c = Clip(t, zero, six)\n[d] g = Div(c, six)\n[m] m = Mul(p, g)"],
)  # fmt: skip
def test_silu_and_hardswish_join_their_convolution(gate: str) -> None:
    """And a residual Add behind them knows its branch."""
    text = f"""net (float[1,16,8,8] x) => (float[1,16,8,8] y) {{
        [first] s = Conv <pads=[1,1,1,1]> (x, w)
        [a] p = Conv <pads=[1,1,1,1]> (s, w)
        {gate}
        [add] r = Add(m, s)
        [last] q = Conv <pads=[1,1,1,1]> (r, w)
        [end] y = Exp(q)
    }}"""
    constants = weights(w=(16, 16, 3, 3)) | {n: np.float32(v) for n, v in (("three", 3), ("zero", 0), ("six", 6))}
    found = placed(build(text, constants))
    assert count(found, "swish") >= 3
    assert users(found) == {"first", "a", "add", "last"}
    assert {e for e in found.placement if e.node == "add"} == edges("s add 1")
    integer = placed(build(text, constants), "onnxruntime").placement
    assert any(e.tensor == "g" for e in integer) == ("= Sigmoid" in gate)  # which has an integer kernel there


PRODUCT = "net (float[{0}] x) => (float[{1}] y) {{\n [turn] t = Exp(x)\n [a] p = MatMul(t, {2})\n [end] y = Exp(p) }}"


@pytest.mark.parametrize(
    ("shape", "weight", "is_quantized"),
    [("4,32", (32, 32), True), ("1,32", (32, 32), False), ("4,32", (32, 1), False), ("N,32", (32, 32), True),
     ("1,1,32", (32, 32), True), ("2,1,32", (32, 32), True)],
)  # fmt: skip
def test_matrix_times_vector_stays_in_float(shape: str, weight: tuple[int, ...], is_quantized: bool) -> None:
    """A batch of unknown size may make rows. A step of a language model has three dimensions."""
    output = ",".join("DEF"[: len(shape.split(","))])
    found = placed(build(PRODUCT.format(shape, output, "w"), weights(w=weight)))
    assert (users(found) == {"a"}) == is_quantized
    assert users(placed(build(PRODUCT.format(shape, output, "w"), weights(w=weight)), "onnxruntime"))  # no such rule


def test_a_product_of_activations_counts_without_its_batch() -> None:
    text = "net (float[8,1,32] x, float[8,32,32] k) => (float[8,1,32] y) {\n [a] p = MatMul(x, k)\n [end] y = Exp(p) }"
    found = placed(build(text))
    assert count(found, "matrix-vector") == 2
    assert not found.placement.edges


@pytest.mark.parametrize(("weight", "is_quantized"), [((8, 32), False), ((32, 8), False), ((16, 16), True)])
def test_tiny_products_stay_in_float(weight: tuple[int, int], is_quantized: bool) -> None:
    model = build(PRODUCT.format(f"4,{weight[0]}", "A,B", "w"), weights(w=weight))
    assert bool(placed(model).placement.edges) == is_quantized
    gemm = build("net (float[4,32] x) => (float[4,8] y) {\n [a] p = Gemm <transB=1> (x, w)\n [end] y = Exp(p) }",
                 weights(w=(8, 32)))  # fmt: skip
    assert count(placed(gemm), "tiny-products") == 2


CONVOLUTION = """net (float[1,{0},16,16] x) => (float[A,B,C,D] y) {{
    [pre] t = {1}
    [a] p = Conv <group={2}> (t, w)
    [end] y = Exp(p)
}}"""


@pytest.mark.parametrize(
    ("weight", "group", "is_first", "int8", "fp8"),
    [((32, 32, 3, 3), 1, False, True, True), ((16, 16, 3, 3), 1, False, True, False),
     ((32, 32, 7, 7), 1, False, True, False), ((32, 3, 3, 3), 1, True, True, False),
     ((8, 3, 3, 3), 1, True, True, False), ((8, 3, 3, 3), 1, False, False, False),
     ((7, 5, 3, 3), 1, True, False, False), ((32, 1, 3, 3), 32, False, True, False),
     ((32, 1, 1, 1), 32, False, False, False)],
)  # fmt: skip
def test_tiny_convolutions_stay_in_float(weight, group, is_first, int8, fp8):
    text = CONVOLUTION.format(weight[1] * group, "Exp(x)", group)
    if is_first:
        text = text.replace("[pre] t = Exp(x)\n", "").replace("Conv <group=1> (t", "Conv <group=1> (x")
    model = build(text, weights(w=weight))
    assert ("a" in users(placed(model)), "a" in users(placed(model, quant_type="fp8"))) == (int8, fp8)


ATTENTION = """net (float[1,4,{0},{1}] q, float[1,4,{0},{1}] k, float[1,4,{0},{1}] v) => (float[A,B,C,D] y) {{
    [turn] t = Transpose <perm=[0,1,3,2]> (k)
    [scores] s = MatMul(q, t)
    [scale] d = Div(s, c)
    [softmax] p = Softmax(d)
    [context] o = MatMul(p, v)
    [end] y = MatMul(o, w)
}}"""


def attention_of(length: int | str, head: int | str, text: str = ATTENTION) -> Model:
    """An attention, and a product with weights behind it."""
    return build(
        text.format(length, head), {"c": np.float32(4), "w": normal(head if isinstance(head, int) else 32, 32)}
    )


@pytest.mark.parametrize(
    ("length", "head", "int8", "fp8"),
    [(64, 16, True, True), (64, 32, True, True), (64, 64, True, True), (512, 32, True, True), (513, 32, False, True),
     (64, 24, False, False), (64, 48, False, True), (64, 128, False, True), (64, 272, False, False),
     ("S", 32, True, True), (64, "H", False, False)],
)  # fmt: skip
def test_attention(length: int | str, head: int | str, int8: bool, fp8: bool) -> None:
    """INT8: both products and their result, for heads of few sizes and no long sequences. FP8: pairs on q, k, v and
    the probabilities, heads of 16 x n."""
    model = attention_of(length, head)
    both, behind = edges("q scores 0", "t scores 1", "p context 0", "v context 1"), edges("o end 0", "w end 1")
    assert placed(model).placement.edges == (both | behind if int8 else behind)
    assert placed(model, quant_type="fp8").placement.edges == (both | behind if fp8 else behind)


def test_attention_whose_head_size_is_computed() -> None:
    """As in Swin: shapes come from a Concat that no inference sees through; the weights behind tell the heads."""
    model = build(
        """net (float[1,49,96] x, int64[1] size) => (float[A,B,C] y) {
        [fq] q1 = MatMul(x, wq) [fk] k1 = MatMul(x, wk) [fv] v1 = MatMul(x, wv)
        [sizes] shape = Concat <axis=0> (front, size)
        [rq] q2 = Reshape(q1, shape) [rk] k2 = Reshape(k1, shape) [rv] v2 = Reshape(v1, shape)
        [tq] q = Transpose <perm=[0,2,1,3]> (q2) [tk] k = Transpose <perm=[0,2,3,1]> (k2)
        [tv] v = Transpose <perm=[0,2,1,3]> (v2)
        [scores] s = MatMul(q, k) [softmax] p = Softmax(s) [context] o = MatMul(p, v)
        [turn] t = Transpose <perm=[0,2,1,3]> (o) [merge] r = Reshape(t, flat) [end] y = MatMul(r, wo)}""",
        {name: normal(96, 96) for name in ("wq", "wk", "wv", "wo")}
        | {"front": np.array([1, 49, 3]), "flat": np.array([1, 49, 96])},
    )
    assert edges("q scores 0", "k scores 1", "p context 0", "v context 1") <= placed(model).placement.edges


def test_int8_attention_has_a_pair_behind_it_also_behind_copies_or_none_at_all() -> None:
    """Without one behind its second product the kernel is not fused, and none may stand at an output."""
    model = attention_of(64, 32, ATTENTION.replace("[end] y = MatMul(o, w)", "").replace("o = ", "y = "))
    assert not placed(model).placement.edges
    assert placed(model, quant_type="fp8").placement.edges
    back = "[back] b = Transpose <perm=[0,2,1,3]> (o) [end] y = MatMul(b, w)"
    model = attention_of(64, 32, ATTENTION.replace("[end] y = MatMul(o, w)", back))
    assert edges("b end 0") <= placed(model).placement.edges
    assert not edges("o back 0") & placed(model).placement.edges


@pytest.mark.parametrize(
    ("engine", "quant_type", "groups", "kept"),
    [
        ("tensorrt", "int8", 1, False),
        ("tensorrt", "int8", 2, False),
        ("tensorrt", "fp8", 1, True),
        ("tensorrt-rtx", "int8", 1, True),
        ("openvino", "int8", 1, False),
        ("openvino", "int8", 2, True),
        ("onnxruntime", "int8", 1, True),
    ],
)
def test_transposed_convolutions(engine: str, quant_type: QuantType, groups: int, kept: bool) -> None:
    text = f"[up] u = ConvTranspose <group={groups}> (x, w) [end] y = Exp(u)"
    model = build(f"net (float[1,64,8,8] x) => (float[A,B,C,D] y) {{ {text} }}", weights(w=(64, 32, 3, 3)))
    assert ("up" in users(placed(model, engine, quant_type))) != kept


def test_convolutions_of_one_pixel_stay_in_float() -> None:
    text = """net (float[1,32,8,8] x) => (float[A,B,C,D] y) {
        [conv] c = Conv <pads=[1,1,1,1]> (x, w)
        [pool] p = GlobalAveragePool(c)
        [squeeze] s = Conv(p, small)
        [gate] g = Sigmoid(s)
        [scale] m = Mul(c, g)
        [end] y = Exp(m)
    }"""
    model = build(text, weights(w=(32, 32, 3, 3), small=(32, 32, 1, 1)))
    assert users(placed(model)) & {"conv", "squeeze"} == {"conv"}
    assert "squeeze" in users(placed(model, "openvino"))


def test_one_product_of_an_attention_alone_is_not_quantized() -> None:
    model = attention_of(64, 32)
    possible = possible_edges(model, Ranges({t: Range(-1, 1) for t in "qkts"}))
    for quant_type in ("int8", "fp8"):
        assert not place(model, possible, "tensorrt", quant_type).placement.edges


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
    assert not {"norm", "norm2"} & users(placed(attention()))


def test_the_layernorms_of_a_convnext() -> None:
    """One behind a convolution, one behind a residual Add whose branch ends in a matrix product, one behind a pool."""
    constants = weights(w=(32, 32, 2, 2), wd=(32, 1, 3, 3), wu=(32, 64), wm=(64, 32), g=(32,), b=(32,))
    text = """net (float[1,32,8,8] x) => (float[1,32,4,4] y) {
        [stem] x0 = Conv <pads=[0,0,1,1]> (x, w)
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
    }"""
    found = placed(build(text, constants))
    assert {e.node for e in found.placement if e.node.startswith("norm")} == {"norm", "norm2"}
    assert edges("x0 add 0", "t norm 0", "t2 norm2 0") <= found.placement.edges


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
def test_what_hands_values_on_takes_8_bits_between_quantized_neighbours(operator, rule, expected):
    model = build(PASSING.format(operator, "w", "Exp(q)"), PASSES)
    found = placed(model)
    assert edges(expected) <= found.placement.edges
    assert count(found, rule) >= 1
    assert "m" not in users(placed(model, quant_type="fp8"))
    beside = build(PASSING.format(operator, "w", "Mul(q, m)"), PASSES)  # which reads it in float
    assert not edges(expected) & placed(beside).placement.edges


@pytest.mark.parametrize(
    ("operator", "weight", "end"),
    [('Resize <mode="cubic"> (s, , scales)', "w", "Exp(q)"), ("AveragePool <kernel_shape=[1,1]> (s)", "w", "Mul(q, s)"),
     ("Concat <axis=1> (l, s)", "wide", "Exp(m)")],
    ids=["overshoots", "its input is read in float", "its result is read in float"],
)  # fmt: skip
def test_what_hands_values_on_stays_in_float(operator: str, weight: str, end: str) -> None:
    assert "m" not in users(placed(build(PASSING.format(f"[m] m = {operator}", weight, end), PASSES)))


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


JOINT = """net (float[1,64,128] x) => (float[1,64,32] y) {{
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
    ints = {f"i{k}": [k] for k in range(3)}
    ints |= {"five": [1, 64, 3, heads, 128 // heads], "three": [1, 64, 128], "zero": [0]}
    constants = {"w": normal(128, 384), "b": normal(384), "c": np.float32(0.25), "wo": normal(128, 32)}
    return build(JOINT.format(parts=parts), constants | {n: np.array(v) for n, v in ints.items()}, half=half)


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


def guess(rule: str, model: Model) -> frozenset[Edge]:
    return START_PLACEMENTS[rule](model, possible_edges(model, known(model))).edges


COMPUTE = ("image stem 0", "w0 stem 1", "p0 depthwise 0", "w1 depthwise 1", "k1 project 0", "w2 project 1", "r1 side 0",
           "w3 side 1", "f head 0", "w4 head 1")  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "skip"),
    [("p, r", "r add 1"), ("r, p", "r add 0"), ("p, q", "q add 1"), ("s, r", "r add 1"), ("r, r", None), ("x, p", None),
     ("p, c", None)],
)  # fmt: skip
def test_which_input_of_an_add_is_the_skip(inputs: str, skip: str | None) -> None:
    """Both fresh: the second. A graph input stays float, since nothing would be saved; a constant is a bias."""
    text = """net (float[N,4] x) => (float[N,4] y) {{
        [relu] r = Relu(x)
        [a] p = MatMul(r, w)
        [b] q = MatMul(r, w)
        [bias] s = Add(p, c)
        [add] y = Add({})
    }}"""
    model = build(text.format(inputs), {"w": normal(4, 4), "c": normal(4)})
    assert guess("residual", model) == guess("compute", model) | (edges(skip) if skip else set())


def test_islands_join_compute_operators_through_what_hands_integers_on() -> None:
    assert guess("islands", conv_net()) == edges(
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
    found = guess("islands", build(text, {"w": normal(4, 4)}))
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
    assert Edge("p", "relu", 0) in guess("everything", build(text, {"w": normal(4, 4)}))


def test_an_operator_with_one_input_that_cannot_be_quantized_gets_no_pair_at_all() -> None:
    """A weight that is not finite, an activation of unknown range."""
    bad = normal(4, 4)
    bad[0, 0] = np.inf
    text = """net (float[N,4] x, float[N,4] z) => (float[N,4] y) {
        [a] p = MatMul(x, bad)
        [b] q = MatMul(z, w)
        [c] r = MatMul(z, w)
        [add] s = Add(p, q)
        [sum] y = Add(s, r)
    }"""
    model = build(text, {"bad": bad, "w": normal(4, 4)})
    some = possible_edges(model, Ranges({t: Range(-1, 1) for t in "xpqrsy"}))
    assert Edge("x", "a", 0) in some
    chosen = [START_PLACEMENTS[name](model, some) for name in ("compute", "residual", "islands")]
    for placement in (*chosen, *placements(model, some).values()):
        assert not {e.node for e in placement} & {"a", "b", "c"}
