"""What `check` finds in a Q/DQ model and an engine's layers, and the reasons that it gives."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layered_nets import CONV, FIRST, LAST, WEIGHT, failing, layers, net
from models import build
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.explanation.findings import allow, check
from qdqtune.explanation.reasons_by_graph import UNKNOWN
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.types import Layer


def fake_layers(model: Model, folder: Path) -> tuple[Layer, ...]:
    save(model, folder / "m.onnx")
    return open_engine(EngineSpec("fake")).build(folder / "m.onnx", folder / "log").layers({}, 1)


def test_a_fused_model_has_only_its_border(tmp_path):
    model = net(FIRST, WEIGHT, CONV, "[relu] d = Relu(c)", LAST)
    found = check(model, fake_layers(model, tmp_path))
    assert [(f.kind, f.nodes, f.fails) for f in found] == [("boundary", ("xq",), False), ("boundary", ("yd",), False)]
    assert [f.reason for f in found] == [
        "first Q behind a float input of the model",
        "last DQ in front of a float output of the model",
    ]
    assert all(f.time_ms is not None and f.time_ms > 0 for f in found)


def test_a_pair_between_convolution_and_relu(tmp_path):
    middle = "[cq] c1 = QuantizeLinear(c, s, z) [cd] c2 = DequantizeLinear(c1, s, z) [relu] d = Relu(c2)"
    model = net(FIRST, WEIGHT, CONV, middle, LAST)
    found = [f for f in check(model, fake_layers(model, tmp_path)) if f.fails]
    assert [(f.kind, f.nodes, f.cause) for f in found] == [
        ("standalone pair", ("cd",), "relu"), ("float compute", ("relu",), "relu"),
        ("standalone pair", ("yq",), "relu"),
    ]  # fmt: skip
    assert {f.reason for f in found} == {
        "relu (Relu) runs in float: a pair stands between conv (Conv) and it, which engines fuse: "
        "put the pair behind it instead"
    }


def test_an_activation_without_its_weight(tmp_path):
    model = net(FIRST, "[conv] d = Conv <pads=[1,1,1,1]>(b, wf)", LAST)
    found = [f for f in check(model, fake_layers(model, tmp_path)) if f.fails]
    assert [(f.kind, f.nodes, f.cause) for f in found] == [
        ("standalone pair", ("xq",), "conv"), ("standalone pair", ("xd",), "conv"),
        ("float compute", ("conv",), "conv"), ("standalone pair", ("yq",), "conv"),
    ]  # fmt: skip
    assert {f.reason for f in found} == {
        "conv (Conv) runs in float: only its activation carries a pair, its weight wf does not"
    }


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


def test_integer_results_of_paired_inputs_are_no_finding():
    model = net(FIRST, "[shape] n = Shape(b) [keep] y = Reshape(x, n)")
    assert not [f for f in failing(model, "xq: INT8", "xd: FP32", "shape: FP32") if f.kind == "float compute"]


def test_what_reads_only_the_shape_of_a_tensor_is_no_reason():
    model = net(FIRST, "[shape] n = Shape(b) [tanh] t = Tanh(b) [keep] y = Reshape(t, n)")
    found = failing(model, "xq: INT8", "xd: FP32", "shape: INT64", "tanh: FP32", "keep: FP32")
    assert {f.cause for f in found} == {"tanh"}


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


def test_a_q_that_no_kernel_of_the_operator_takes_in_has_that_as_its_reason() -> None:
    """As behind FP8 convolutions of TensorRT-RTX. Where one kernel takes it in, the graph does not show the reason."""
    text = """net (float[1,4,8,8] x) => (float[1,4,8,8] y) {
        [xq] a = QuantizeLinear(x, s, z) [xd] b = DequantizeLinear(a, s, z)
        [wd] w = DequantizeLinear(wi, s, z) [conv] c = Conv(b, w) [relu] r = Relu(c)
        [rq] d = QuantizeLinear(r, s, z) [rd] e = DequantizeLinear(d, s, z) [last] f = Conv(e, w)
        [fq] g = QuantizeLinear(f, s, z) [fd] y = DequantizeLinear(g, s, z)
    }"""
    model = build(text, {"wi": np.ones((4, 4, 1, 1), np.int8), "s": np.float32(0.1), "z": np.int8(0)})
    given = ["xq: INT8", "xd + wd + conv + relu: INT8", "rq: INT8"]
    alone = failing(model, *given, "rd + last: INT8", "fq: INT8", "fd: FP32")
    assert {(f.nodes, f.reason, f.cause) for f in alone} >= {
        (("rq",), "this engine seems to have no Conv that writes 8 bits", "conv")
    }
    assert [f.reason.endswith(UNKNOWN) for f in failing(model, *given, "rd + last + fq: INT8", "fd: FP32")] == [True]


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
