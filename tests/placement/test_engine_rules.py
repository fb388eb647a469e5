"""Placement rules of `quantize`: what holds for all of them, and one graph for each that keeps operators in float."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings

from models import FORMATS, attention, branching, build, conv_net, edges, embedding, known, normal, tapped
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.engines import MODULES
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.providers import PROVIDERS
from qdqtune.graph.model import Model
from qdqtune.placement.engine_rules import RULES, KeepFloat, effect, place, rules_of
from qdqtune.placement.graph_queries import GraphQueries
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import consistent, possible_edges
from qdqtune.placement.start_placements import placements
from qdqtune.types import Edge, QuantType
from region_models import networks
from rule_placements import count, placed, users, weights

CASES = {"conv_net": conv_net, "attention": attention, "tapped": tapped, "embedding": embedding, "branching": branching}
WITHOUT_FP8 = {"onnxruntime", "openvino", *PROVIDERS}
TYPES: tuple[tuple[str, QuantType], ...] = tuple((e, q) for e in sorted(MODULES) for q in ("int8", "fp8")
                                                 if q == "int8" or e not in WITHOUT_FP8)  # fmt: skip


@pytest.mark.parametrize(("engine", "quant_type"), TYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_placement_is_whole_and_can_be_inserted(name: str, engine: str, quant_type: QuantType) -> None:
    model = CASES[name]()
    found = placed(model, engine, quant_type).placement
    assert found.edges <= possible_edges(model, known(model))
    assert consistent(model, found) == found
    done = insert(model, found, known(model), numeric_format(engine, quant_type))
    if name != "branching":  # which has an operator that no checker knows
        onnx.checker.check_model(done.to_proto(), full_check=True)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(networks())
def test_rules_take_any_graph(network) -> None:  # type: ignore[no-untyped-def]
    model = network.model()
    possible = possible_edges(model, known(model))
    found = [(place, "uint8") for place in placements(model, possible).values()]
    for engine, numbers in (("onnxruntime", "uint8"), ("tensorrt", "int8"), ("tensorrt", "fp8")):
        found.append((placed(model, engine, "fp8" if numbers == "fp8" else "int8").placement, numbers))
    for placement, numbers in found:
        assert placement.edges <= possible
        assert consistent(model, placement) == placement
        insert(model, placement, known(model), FORMATS[numbers])


def test_each_rule_has_a_reason_a_source_engines_and_a_function_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert len({(rule.find, rule.reason) for rule in RULES}) == len({rule.find for rule in RULES})
    cases = [(rule.find, e, t) for rule in RULES for e in rule.engines for t in rule.quant_types]
    assert len(set(cases)) == len(cases)
    for rule in RULES:
        assert all((rule.reason, rule.source, rule.engines, rule.quant_types))
        assert rule.engines <= MODULES.keys()
        assert effect(rule) == ("keeps in float" if isinstance(rule, KeepFloat) else "places pairs")
    assert {r.name for r in rules_of("onnxruntime")} < {r.name for r in rules_of()}
    for engine, quant_type in TYPES:
        assert rules_of(engine, quant_type)


def test_graph_outputs_stay_in_float() -> None:
    for engine in ("tensorrt", "openvino", "fake"):
        found = placed(tapped(), engine)
        assert count(found, "graph-outputs") == 2
        assert not any(e.is_graph_output for e in found.placement)
    assert not any(e.is_graph_output for e in placed(conv_net(), "onnxruntime").placement)


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


FUSED = """net (float[1,16,8,8] x) => (float[1,16,8,8] y) {
    [a] p = Conv <pads=[1,1,1,1]> (x, w)
    [bias] b = Add(p, c)
    [norm] n = BatchNormalization(b, one, zero, zero, one)
    [act] r = Relu(n)
    [next] q = Conv <pads=[1,1,1,1]> (r, w)
    [end] y = Sigmoid(q)
}"""


def test_nothing_inside_a_fusion() -> None:
    constants = weights(w=(16, 16, 3, 3), c=(16, 1, 1)) | {"one": np.ones(16, "f"), "zero": np.zeros(16, "f")}
    model = build(FUSED, constants)
    queries = GraphQueries(model, possible_edges(model, known(model)))
    inside = {e for e in queries.possible if queries.is_inside(e)}
    assert inside == edges("p bias 0", "b norm 0", "n act 0", "q end 0")
    assert placed(model).placement.edges == edges("x a 0", "w a 1", "r next 0", "w next 1")


@pytest.mark.parametrize(
    ("channels", "in_front", "kept"),
    [(3, "Relu(image)", True), (16, "Relu(image)", False), (3, "Conv(image, w)", False)],
    ids=["first", "wide enough", "not the first"],
)
def test_a_first_convolution_with_a_swish_stays_in_float_on_onnxruntime(
    channels: int, in_front: str, kept: bool
) -> None:
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
    assert edges("s add 1") <= found.placement.edges
    integer = placed(build(text, constants), "onnxruntime").placement
    assert any(e.tensor == "g" for e in integer) == ("= Sigmoid" in gate)  # which has an integer kernel there


def test_elementwise_operators_with_constants_stay_in_float() -> None:
    text = """net (float[2,32] x) => (float[2,32] y) {
        [pre] h = Mul(x, c)
        [a] p = MatMul(h, w)
        [post] y = Sub(p, c)
    }"""
    found = placed(build(text, weights(w=(32, 32), c=(32,))))
    assert count(found, "constant-operands") == 2 + 1  # that into "post" lies inside a fusion anyway
    assert users(found) == {"a"}


def test_normalizations_softmax_and_gelu_stay_in_float() -> None:
    model = attention()
    found = placed(model, "openvino")
    assert count(found, "float-functions") >= 4
    floats = {"LayerNormalization", "Softmax", "Erf", "Div"}
    assert not {n.op for n in model.nodes if n.name in users(found)} & floats


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
def test_tiny_convolutions_stay_in_float(
    weight: tuple[int, ...], group: int, is_first: bool, int8: bool, fp8: bool
) -> None:
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


def test_int8_attention_that_ends_at_an_output_stays_in_float() -> None:
    """No pair may stand behind its second product, without which the kernel is not fused."""
    model = attention_of(64, 32, ATTENTION.replace("[end] y = MatMul(o, w)", "").replace("o = ", "y = "))
    assert not placed(model).placement.edges
    assert placed(model, quant_type="fp8").placement.edges


def test_a_pair_behind_copies_is_the_one_behind_the_attention() -> None:
    back = "[back] b = Transpose <perm=[0,2,1,3]> (o) [end] y = MatMul(b, w)"
    model = attention_of(64, 32, ATTENTION.replace("[end] y = MatMul(o, w)", back))
    assert edges("b end 0") <= placed(model).placement.edges
    assert not edges("o back 0") & placed(model).placement.edges


@pytest.mark.parametrize(
    ("engine", "quant_type", "kept"),
    [
        ("tensorrt", "int8", False),
        ("tensorrt", "fp8", True),
        ("tensorrt-rtx", "int8", True),
        ("openvino", "int8", False),
        ("onnxruntime", "int8", True),
    ],
)
def test_transposed_convolutions(engine: str, quant_type: QuantType, kept: bool) -> None:
    model = build("net (float[1,32,8,8] x) => (float[A,B,C,D] y) { [up] u = ConvTranspose(x, w) [end] y = Exp(u) }",
                  weights(w=(32, 32, 3, 3)))  # fmt: skip
    assert ("up" in users(placed(model, engine, quant_type))) != kept


@pytest.mark.parametrize(("engine", "kept"), [("tensorrt", False), ("openvino", True), ("onnxruntime", True)])
def test_transposed_convolutions_with_groups(engine: str, kept: bool) -> None:
    text = "[up] u = ConvTranspose <group=2> (x, w) [end] y = Exp(u)"
    model = build(f"net (float[1,64,8,8] x) => (float[A,B,C,D] y) {{ {text} }}", weights(w=(64, 32, 3, 3)))
    assert ("up" in users(placed(model, engine, "int8"))) != kept


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
