"""What an engine does not fuse in a Q/DQ model, and the reasons: concluded from the graph and its numbers."""

from dataclasses import replace
from pathlib import Path

import pytest

from layered_nets import CONV, FIRST, LAST, WEIGHT, failing, layers, net, reason
from models import FP8, INT8, PLAIN, UINT8
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.explanation.unfused import UNKNOWN, allow, check
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.types import Layer


def fake_layers(model: Model, folder: Path) -> tuple[Layer, ...]:
    save(model, folder / "m.onnx")
    return open_engine(EngineSpec("fake")).build(folder / "m.onnx", folder / "log").layers({}, 1)


def test_a_fused_model_has_only_its_border(tmp_path):
    model = net(FIRST, WEIGHT, CONV, "[relu] d = Relu(c)", LAST)
    found = check(model, fake_layers(model, tmp_path))
    assert [(f.nodes, f.kind, f.fails, f.reason) for f in found] == [
        (("xq",), "boundary", False, "first Q behind a float input of the model"),
        (("yd",), "boundary", False, "last DQ in front of a float output of the model"),
    ]
    assert all(f.time_ms is not None and f.time_ms > 0 for f in found)


BEHIND_CONV = "[cq] c1 = QuantizeLinear(c, s, z) [cd] c2 = DequantizeLinear(c1, s, z)"


@pytest.mark.parametrize(("parts", "alone", "in_float", "reason"), [
    ((FIRST, WEIGHT, CONV, BEHIND_CONV, "[relu] d = Relu(c2)"), ["cd", "yq"], ["relu"],
     "relu (Relu) runs in float: a pair stands between conv (Conv) and it, which engines fuse: "
     "put the pair behind it instead"),
    ((FIRST, "[conv] d = Conv <pads=[1,1,1,1]>(b, wf)"), ["xq", "xd", "yq"], ["conv"],
     "conv (Conv) runs in float: only its activation carries a pair, its weight wf does not"),
    ((FIRST, WEIGHT, CONV, BEHIND_CONV, "[add] d = Add(c2, x)"), ["cd", "yq"], [],
     "add (Add) runs in float: only 1 of its 2 inputs carries a pair, x does not"),
])  # fmt: skip
def test_what_runs_in_float_on_an_engine_that_fuses(tmp_path, parts, alone, in_float, reason):
    model = net(*parts, LAST)
    found = [f for f in check(model, fake_layers(model, tmp_path)) if f.fails]
    assert [f.nodes for f in found if f.kind == "standalone pair"] == [(name,) for name in alone]
    assert [f.nodes for f in found if f.kind == "float compute"] == [(name,) for name in in_float]
    assert {(f.cause, f.reason) for f in found} == {(reason.partition(" ")[0], reason)}


def test_a_weight_without_its_activation_that_the_engine_folded():
    model = net(WEIGHT, "[conv] y = Conv <pads=[1,1,1,1]>(x, v)")
    given = (*layers("conv: FP32"), Layer("folded", ("wd",), "", 0.0, "folded"))
    (finding,) = check(model, given)
    assert finding.reason == "conv (Conv) runs in float: only its weight carries a pair, its activation x does not"


def test_a_pair_on_one_input_of_an_addition(tmp_path):
    pair = "[cq] c1 = QuantizeLinear(c, s, z) [cd] c2 = DequantizeLinear(c1, s, z) [add] d = Add(c2, x)"
    model = net(FIRST, WEIGHT, CONV, pair, LAST)
    found = [f for f in check(model, fake_layers(model, tmp_path)) if f.fails]
    assert [(f.kind, f.nodes) for f in found] == [("standalone pair", ("cd",)), ("standalone pair", ("yq",))]
    assert {f.reason for f in found} == {"add (Add) runs in float: only 1 of its 2 inputs carries a pair, x does not"}


def test_an_operator_of_float_inputs_is_no_finding():
    model = net("[tanh] t = Tanh(x) [aq] a = QuantizeLinear(t, s, z) [ad] b = DequantizeLinear(a, s, z)", WEIGHT,
                "[conv] y = Conv <pads=[1,1,1,1]>(b, v)")  # fmt: skip
    (finding,) = check(model, layers("tanh: FP32", "aq: INT8", "ad + wd + conv: INT8"))
    assert (finding.nodes, finding.cause) == (("aq",), "tanh")
    assert finding.reason == "tanh (Tanh) runs in float: its input carries no pair"


def test_a_float_kernel_that_reads_and_writes_8_bits_is_no_finding_but_a_float_product_is():
    model = net(FIRST, "[pool] d = AveragePool <kernel_shape=[1,1]>(b)", LAST)
    assert not failing(model, "xq: INT8", "xd + pool + yq: FP16", "yd: FP32")
    model = net(FIRST, WEIGHT, CONV.replace("c =", "d ="), LAST)
    assert [f.kind for f in failing(model, "xq: INT8", "xd + wd + conv + yq: FP16", "yd: FP32")] == ["float compute"]


@pytest.mark.parametrize(("precision", "fails"), [
    ("FP32", True), ("FP16", True), ("BF16", True), ("f32", True), ("INT8", False), ("UINT8", False), ("FP8", False),
    ("u8", False), ("i8", False), ("", False), ("INT32", False),
])  # fmt: skip
def test_precisions(precision, fails):
    model = net(FIRST, WEIGHT, CONV.replace("c =", "y ="))
    assert bool(failing(model, f"xd + wd + conv: {precision}")) == fails


def test_a_compute_layer_that_holds_only_a_q_is_the_rest_of_an_operator():
    model = net(FIRST, WEIGHT, CONV.replace("c =", "d ="), LAST)
    given = [*layers("xq: INT8", "xd + wd + conv: INT8"), Layer("scale", ("yq",), "FP32", 0.1, "compute")]
    assert [f.nodes for f in check(model, given)] == [("xq",)]


def test_what_reads_only_the_shape_of_a_tensor_is_no_finding_and_no_reason():
    model = net(FIRST, "[shape] n = Shape(b) [tanh] t = Tanh(b) [keep] y = Reshape(t, n)")
    found = failing(model, "xq: INT8", "xd: FP32", "shape: INT64", "tanh: FP32", "keep: FP32")
    assert {f.cause for f in found} == {"tanh"}
    assert not [f for f in found if "shape" in f.nodes]


def test_names_that_are_no_nodes():
    model = net(FIRST, WEIGHT, CONV.replace("c =", "y ="))
    (finding,) = check(model, [Layer("l", ("conv", "stranger"), "FP32", None, "compute")])
    assert (finding.nodes, finding.time_ms) == (("conv",), None)


def reformats(*given: str) -> list[tuple[str, bool, str]]:
    model = net(FIRST, WEIGHT, CONV, "[tanh] t = Tanh(c) [exp] y = Exp(t)")
    found = check(model, layers(*given))
    return [(f.kind, f.fails, f.reason) for f in found if f.layer == "layer 1"]


def test_a_change_of_layout_fails_beside_float():
    fused = "xd + wd + conv: INT8"
    assert reformats(fused, ": FP16", "tanh: FP16") == [
        ("reformat", True, "the engine changes layout or type between layer 0 (INT8) and layer 2 (FP16)")
    ]
    assert [f[:2] for f in reformats(fused, ": INT8", "tanh: INT8")] == [("reformat", False)]
    assert [f[:2] for f in reformats(fused, ": INT8")] == [("boundary", False)]
    assert not reformats("tanh: FP16", ": FP16", "exp: FP16")


def test_an_added_copy_counts_if_it_takes_time():
    model = net(FIRST, WEIGHT, CONV, "[tanh] y = Tanh(c)")
    for time_ms, count in ((0.0, 0), (None, 0), (0.1, 1)):
        first, last = layers("xd + wd + conv: INT8", "tanh: FP32")
        assert len(check(model, [first, Layer("copy", (), "FP32", time_ms, "copy"), last])) == count


def test_a_node_that_moves_floats_between_pairs():
    model = net(FIRST, "[turn] d = Transpose <perm=[0,1,3,2]>(b)", LAST)
    given = [*layers("xq: INT8", "xd: FP32"), Layer("t", ("turn",), "FP32", 0.1, "copy"), *layers("yq: INT8")]
    assert [(f.kind, f.nodes) for f in check(model, given) if f.layer == "t"] == [("reformat", ("turn",))]


def test_a_conversion_without_a_node():
    model = net(FIRST, WEIGHT, CONV.replace("c =", "y ="))
    (finding,) = check(model, [*layers("xd + wd + conv: INT8"), Layer("q", (), "INT8", 0.1, "quantize")])
    assert (finding.kind, finding.nodes) == ("standalone pair", ())
    assert finding.reason == "the engine names no node for it, and may have added it: it runs behind layer 0 (INT8)"


def test_a_first_q_that_serves_nobody():
    model = net(FIRST, "[tanh] y = Tanh(b)")
    assert [f.nodes for f in failing(model, "xq: INT8", "xd: FP32", "tanh: FP32")] == [("xq",), ("xd",), ("tanh",)]


def test_what_is_allowed_becomes_a_boundary():
    model = net("[tanh] t = Tanh(x) [aq] a = QuantizeLinear(t, s, z) [ad] b = DequantizeLinear(a, s, z)",
                "[conv] y = Conv <pads=[1,1,1,1]>(b, wf)")  # fmt: skip
    found = check(model, layers("tanh: FP32", "aq: INT8", "ad: FP32", "conv: FP32"))
    assert [f.kind for f in found] == ["standalone pair", "standalone pair", "float compute"]
    for wildcard, kinds in (
        ("ta*", ["boundary", "standalone pair", "float compute"]),
        ("a?", ["boundary", "boundary", "float compute"]),
        ("conv", ["standalone pair", "boundary", "boundary"]),
        ("other", ["standalone pair", "standalone pair", "float compute"]),
    ):
        after = allow(found, [wildcard])
        assert [f.kind for f in after] == kinds
        assert [f.fails for f in after] == [f.kind != "boundary" for f in after]
    assert allow(found, ["tanh"])[0].reason == "allowed: tanh (Tanh) runs in float: its input carries no pair"


def test_nodes_that_a_provider_leaves_to_another_fail_if_they_carry_pairs(tmp_path):
    model = net(FIRST, WEIGHT, CONV, "[relu] d = Relu(c)", LAST)
    whole = fake_layers(model, tmp_path)
    away = [replace(x, elsewhere="on the CPU: no kernel") for x in whole]
    found = check(model, away)
    assert {(f.kind, f.fails) for f in found} == {("boundary", False), ("elsewhere", True)}
    assert {f.reason for f in found} == {"runs on the CPU: no kernel"}
    plain = net("[conv] y = Conv <pads=[1,1,1,1]>(x, wf)")
    (alone,) = check(plain, [replace(x, elsewhere="on the CPU: x") for x in fake_layers(plain, tmp_path)])
    assert (alone.kind, alone.nodes, alone.fails) == ("elsewhere", ("conv",), False)


def test_one_of_several_readers_is_float():
    model = net(FIRST, WEIGHT, CONV, "[tanh] y = Tanh(b)", outputs=("y", "c"))
    found = failing(model, "xq: INT8", "xd: FP32", "wd + conv: INT8", "tanh: FP32")
    assert [f.nodes for f in found] == [("xd",), ("tanh",)]
    assert found[0].reason == (
        "tanh (Tanh) runs in float: no Tanh of this model runs in 8 bits: this engine seems to have no such kernel; "
        "1 of 2 readers take 8 bits"
    )


def test_the_result_has_another_reader():
    model = net(FIRST, WEIGHT, CONV.replace("c =", "d ="), LAST, "[tanh] t = Tanh(d)", outputs=("y", "t"))
    assert reason(model, "wd + conv: FP32").endswith(": its output carries no pair on the way to tanh (Tanh)")
    found = failing(model, "xd + wd + conv: INT8", "yq: INT8", "tanh: FP32")
    assert [f.reason for f in found] == ["the result of conv (Conv) is read in float as well: tanh (Tanh)"]


def test_the_result_is_an_output_of_the_model():
    model = net(FIRST, WEIGHT, CONV, "[relu] y = Relu(c)")
    assert reason(model, "wd + conv + relu: FP32").endswith("carries no pair on the way to the model's output")
    model = net(FIRST, WEIGHT, CONV.replace("c =", "d ="), LAST, outputs=("y", "b"))
    (finding,) = failing(model, "xd: FP32", "wd + conv + yq: INT8")
    assert finding.reason == "b is an output of the model as well"


@pytest.mark.parametrize("moved", ["", "[turn] t = Transpose <perm=[0,1,3,2]>(b)"])
@pytest.mark.parametrize(("scale", "words"), [
    ("s", "with the same scale: one pair is enough"), ("s2", "with another scale: give both pairs one"),
])  # fmt: skip
def test_pairs_one_behind_the_other(scale, words, moved):
    values = "t" if moved else "b"
    again = f"[cq] c1 = QuantizeLinear({values}, {scale}, z) [cd] c2 = DequantizeLinear(c1, {scale}, z)"
    model = net(FIRST, moved, again, WEIGHT, "[conv] y = Conv(c2, v)")
    found = failing(model, "xd: FP32", *(["turn: INT8"] if moved else []), "cq: INT8", "cd + wd + conv: INT8")
    assert found[-1].reason == f"cq follows xd {words}"


def test_what_carries_a_value_in_or_out_of_the_model_is_no_obstacle():
    model = net("[turn] t = Transpose <perm=[0,1,3,2]>(x)", FIRST.replace("(x,", "(t,"), WEIGHT,
                CONV.replace("c =", "d ="), LAST.replace("y =", "f ="),
                "[back] y = Transpose <perm=[0,1,3,2]>(f)")  # fmt: skip
    found = check(model, layers("turn: FP32", "xq: INT8", "xd + wd + conv + yq: INT8", "yd: FP32", "back: FP32"))
    assert [(f.kind, f.nodes) for f in found] == [("boundary", ("xq",)), ("boundary", ("yd",))]


def test_a_constant_that_is_quantized_each_time():
    model = net("[wq] q = QuantizeLinear <axis=0>(wf, ws, wz)", FIRST, "[wd] v = DequantizeLinear <axis=0>(q, ws, wz)",
                CONV.replace("c =", "y ="))  # fmt: skip
    (finding,) = failing(model, "wq: INT8", "xd + wd + conv: INT8")
    assert finding.reason == "it quantizes a constant, which the engine has not done in advance"


def test_a_reader_that_shares_its_pair_with_a_float_one():
    model = net(FIRST, "[conv] c = Conv <pads=[1,1,1,1]>(b, wf)", BEHIND_CONV, "[add] d = Add(c2, b)", LAST)
    found = failing(model, "xq: INT8", "xd: FP32", "conv: FP32", "cq: INT8", "cd + add: FP32", "yq: INT8")
    kernel = "no Add of this model runs in 8 bits: this engine seems to have no such kernel"
    assert {f.reason for f in found if f.cause == "add"} == {f"add (Add) runs in float: {kernel}"}


def test_products_of_two_activations():
    pair = "[{0}q] {0}1 = QuantizeLinear({0}, s, z) [{0}d] {0}2 = DequantizeLinear({0}1, s, z)"
    model = net(pair.format("x"), "[scores] t = MatMul(x2, x2)", pair.format("t"), "[end] y = Tanh(t2)", shape="8,8")
    assert reason(model, "xd + scores: FP32", "tq: INT8", "end: INT8") == (
        "scores (MatMul) runs in float: it multiplies two activations, as in attention: not every engine runs these in "
        "8 bits"
    )


FIVE, UNSIGNED = FIRST.replace(", z)", ", z5)"), FIRST.replace(", z)", ", zu)")


@pytest.mark.parametrize(("first", "bias", "numbers", "words"), [
    ("[s1] sx = Abs(s) [xq] a = QuantizeLinear(x, s, z) [xd] b = DequantizeLinear(a, sx, z)", "", PLAIN,
     "the scale of xd is no constant"),
    ("[xq] a = QuantizeLinear(x, s, z) [xd] b = DequantizeLinear(a, s2, z)", "", PLAIN,
     "xq and xd differ in scale or zero point"),
    ("[xq] a = QuantizeLinear <axis=1>(x, ws, wz) [xd] b = DequantizeLinear <axis=1>(a, ws, wz)", "", PLAIN,
     "xd has a scale for each channel of an activation, and engines want one for all"),
    (FIRST, "", FP8, "wd has a scale for each channel, and this engine wants one for all"),
    (FIVE, "", INT8, "the zero point of xd is not 0, and this engine takes symmetric pairs only"),
    (FIRST, "", PLAIN, "xd takes int8, and this engine wants uint8"),
    (UNSIGNED, "", INT8, "xd takes uint8, and this engine wants int8"),
    (FIVE, "", None, UNKNOWN),
    (FIRST, "", INT8, UNKNOWN),
    (FIRST, "[hd] h = DequantizeLinear <axis=0>(bias, ws)", INT8,
     "its bias h comes out of a DQ, and this engine wants it in float"),
    (UNSIGNED, "[hd] h = Abs(bf)", UINT8, "its bias h is in float, and this engine wants it in int32 behind a DQ"),
    (UNSIGNED, "[hd] h = DequantizeLinear <axis=0>(bias, ss)", UINT8, UNKNOWN),
])  # fmt: skip
def test_numbers_that_the_engine_does_not_take_and_no_reason_is_invented(first, bias, numbers, words):
    model = net(first, WEIGHT, bias, f"[conv] d = Conv <pads=[1,1,1,1]>(b, v{', h' if bias else ''})", LAST)
    assert reason(model, "conv: FP32", numbers=numbers) == f"conv (Conv) runs in float: {words}"


def test_what_runs_elsewhere_is_no_obstacle():
    second = "[yq] e = QuantizeLinear(d, s, z) [yd] f = DequantizeLinear(e, s, z) [conv2] y = Conv(f, v)"
    model = net(FIRST, WEIGHT, CONV.replace("c =", "d ="), second)
    assert reason(model, "conv: FP32", "yd + conv2: INT8", numbers=PLAIN).endswith(f": {UNKNOWN}")


def test_a_clamp_that_the_pair_behind_it_does_not_replace():
    relu = "[relu] d = Relu(c)"
    model = net(FIRST, WEIGHT, CONV, relu, LAST)
    given = ("wd + conv + relu: FP32", "yq: INT8")
    assert reason(model, *given, numbers=UINT8) == (
        "conv (Conv) runs in float: relu (Relu) behind it has to run, since yq keeps values below 0"
    )
    lowest = net(FIRST, WEIGHT, CONV, relu, LAST.replace(", z)", ", low)"))
    assert "relu (Relu) behind it" not in reason(lowest, *given, numbers=UINT8)
    assert reason(model, *given, numbers=INT8).endswith(f": {UNKNOWN}")
