"""What an engine does not fuse in a Q/DQ model, and the reasons: concluded from the graph and its numbers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from models import FP8, INT8, PLAIN, UINT8, build, normal
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.explanation.unfused import UNKNOWN, Finding, allow, check
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.types import Layer, NumericFormat

CONSTANTS: dict[str, Any] = {
    "w": np.ones((4, 4, 3, 3), np.int8), "wf": normal(4, 4, 3, 3), "ws": np.full(4, 0.1, np.float32),
    "wz": np.zeros(4, np.int8), "s": np.float32(0.1), "s2": np.float32(0.2), "z": np.int8(0), "z5": np.int8(5),
    "low": np.int8(-128), "zu": np.uint8(0),
}  # fmt: skip
FIRST = "[xq] a = QuantizeLinear(x, s, z) [xd] b = DequantizeLinear(a, s, z)"
WEIGHT = "[wd] v = DequantizeLinear <axis=0>(w, ws, wz)"
CONV = "[conv] c = Conv <pads=[1,1,1,1]>(b, v)"
LAST = "[yq] e = QuantizeLinear(d, s, z) [yd] y = DequantizeLinear(e, s, z)"


Kind = Literal["compute", "quantize", "reformat"]


def net(*parts: str, outputs: Sequence[str] = ("y",), shape: str = "1,4,8,8") -> Model:
    results = ", ".join(f"float[{shape}] {output}" for output in outputs)
    text = f"net (float[{shape}] x) => ({results}) {{ {' '.join(parts)} }}"
    used = {n: v for n, v in CONSTANTS.items() if any(f"{before}{n}{after}" in text
            for before in "( " for after in ",)")}  # fmt: skip
    return build(text, used)


def layers(*given: str) -> tuple[Layer, ...]:
    """Of `nodes joined by +: precision`. A layer of Qs and DQs alone is of kind quantize, one without nodes a reformat.

    Nodes of constants that no layer has are folded.
    """
    found = []
    for number, text in enumerate(given):
        names, _, precision = text.partition(": ")
        nodes = tuple(names.split(" + ")) if names else ()
        computes = any(not name.endswith(("q", "d")) for name in nodes)
        kind: Kind = "compute" if computes else "quantize" if nodes else "reformat"
        found.append(Layer(f"layer {number}", nodes, precision, 0.5, kind))
    return tuple(found)


def failing(model: Model, *given: str, numbers: NumericFormat | None = None) -> list[Finding]:
    return [finding for finding in check(model, layers(*given), numbers) if finding.fails]


def fake_layers(model: Model, folder: Path) -> tuple[Layer, ...]:
    save(model, folder / "m.onnx")
    return open_engine(EngineSpec("fake")).build(folder / "m.onnx", folder / "log").layers({}, 1)


BEHIND_CONV = "[cq] c1 = QuantizeLinear(c, s, z) [cd] c2 = DequantizeLinear(c1, s, z)"


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


@pytest.mark.parametrize(("layer", "expected"), [
    (Layer("l", ("yq",), "FP32", 0.1, "compute"), []),  # the rest of an operator
    (Layer("l", ("conv", "stranger"), "FP32", None, "compute"), [("float compute", ("conv",), None)]),
    (Layer("l", (), "INT8", 0.1, "quantize"), [("standalone pair", (), 0.1)]),
])  # fmt: skip
def test_a_layer_of_its_own(layer, expected):
    model = net(FIRST, WEIGHT, CONV.replace("c =", "d ="), LAST)
    found = check(model, [*layers("xq: INT8", "xd + wd: INT8"), layer])
    assert [(f.kind, f.nodes, f.time_ms) for f in found if f.layer == "l"] == expected


def reformats(*given: str) -> list[tuple[str, bool, str]]:
    model = net(FIRST, WEIGHT, CONV, "[tanh] t = Tanh(c) [exp] y = Exp(t)")
    found = check(model, layers(*given))
    return [(f.kind, f.fails, f.reason) for f in found if f.layer == "layer 1"]


def test_a_change_of_layout_fails_beside_float():
    fused = "xd + wd + conv: INT8"
    assert reformats(fused, ": FP16", "tanh: FP16") == [
        ("reformat", True, "the engine changes layout or type beside tanh (Tanh), which runs in float")
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
    assert allow(found, ["tanh"])[0].reason == "allowed: tanh (Tanh) runs in float: its input x carries no pair"


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


def test_what_carries_a_value_in_or_out_of_the_model_is_no_obstacle():
    model = net("[turn] t = Transpose <perm=[0,1,3,2]>(x)", FIRST.replace("(x,", "(t,"), WEIGHT,
                CONV.replace("c =", "d ="), LAST.replace("y =", "f ="),
                "[back] y = Transpose <perm=[0,1,3,2]>(f)")  # fmt: skip
    found = check(model, layers("turn: FP32", "xq: INT8", "xd + wd + conv + yq: INT8", "yd: FP32", "back: FP32"))
    assert [(f.kind, f.nodes) for f in found] == [("boundary", ("xq",)), ("boundary", ("yd",))]


TANH = "[tanh] t = Tanh(x)"
MADE = CONV.replace("c =", "d =")
TURN, RELU = "[turn] t = Transpose <perm=[0,1,3,2]>(b)", "[relu] d = Relu(c)"
AGAIN = "[cq] c1 = QuantizeLinear({0}, {1}, z) [cd] c2 = DequantizeLinear(c1, {1}, z)"
ALONE = "[conv] y = Conv(c2, v)"
NO_KERNEL = "of this model runs in 8 bits: this engine seems to have no such kernel"
PAIR = "[{0}q] {0}1 = QuantizeLinear({0}, s, z) [{0}d] {0}2 = DequantizeLinear({0}1, s, z)"
BY_TANH = "tanh (Tanh) runs in float: no Tanh " + NO_KERNEL
MOVED = (
    "relu (Relu) runs in float: a pair stands between conv (Conv) and it, which engines fuse: "
    "put the pair behind it instead"
)
CASES: tuple[tuple[tuple[str, ...], tuple[str, ...], dict[str, str], dict[str, Any]], ...] = (
    ((FIRST, WEIGHT, CONV, BEHIND_CONV, "[relu] d = Relu(c2)", LAST),
     ("xd + wd + conv + cq: INT8", "cd: FP32", "relu: FP32", "yq: INT8"), dict.fromkeys(("cd", "relu", "yq"), MOVED),
     {}),
    ((FIRST, "[conv] d = Conv <pads=[1,1,1,1]>(b, wf)", LAST), ("xq: INT8", "xd: FP32", "conv: FP32"),
     dict.fromkeys(("xq", "xd", "conv"), "conv (Conv) runs in float: its weight wf carries no pair"), {}),
    ((FIRST, WEIGHT, CONV, BEHIND_CONV, "[sum] d = Add(c2, x)", LAST),
     ("xd + wd + conv + cq: INT8", "cd: FP32", "sum: FP32", "yq: INT8"),
     dict.fromkeys(("cd", "yq"), "sum (Add) runs in float: its input x carries no pair"), {}),
    ((WEIGHT, "[conv] y = Conv <pads=[1,1,1,1]>(x, v)"), ("conv: FP32",),
     {"conv": "conv (Conv) runs in float: its activation x carries no pair"}, {}),
    ((TANH + " [aq] a = QuantizeLinear(t, s, z) [ad] b = DequantizeLinear(a, s, z)", WEIGHT,
      CONV.replace("c =", "y =")), ("tanh: FP32", "aq: INT8", "ad + wd + conv: INT8"),
     {"aq": "tanh (Tanh) runs in float: its input x carries no pair"}, {}),
    ((TANH, "[turn] e = Transpose <perm=[0,1,3,2]>(t)", AGAIN.format("e", "s"), WEIGHT, ALONE),
     ("tanh: FP32", "turn: INT8", "cq: INT8", "cd + wd + conv: INT8"),
     {"cq": "tanh (Tanh) runs in float: its input x carries no pair"}, {}),
    ((TANH, PAIR.format("t"), "[moved] e = Transpose <perm=[0,1,3,2]>(t2)", AGAIN.format("e", "s"), WEIGHT, ALONE),
     ("tanh: FP32", "td + moved + cq: INT8", "cd + wd + conv: INT8"),
     {"td": "tanh (Tanh) runs in float: its input x carries no pair"}, {}),
    ((FIRST, "[shape] n = Shape(b) [tanh] t = Tanh(b) [keep] y = Reshape(t, n)"),
     ("xq: INT8", "xd: FP32", "shape: INT64", "tanh: FP32", "keep: FP32"),
     {"xq": BY_TANH, "xd": BY_TANH, "tanh": BY_TANH}, {}),
    ((FIRST, WEIGHT, CONV, "[tanh] y = Tanh(b)"), ("xq: INT8", "xd: FP32", "wd + conv: INT8", "tanh: FP32"),
     {"xd": BY_TANH, "tanh": BY_TANH}, {"outputs": ("y", "c")}),
    ((FIRST, WEIGHT, MADE, LAST, "[tanh] t = Tanh(d)"), ("xd + wd + conv: INT8", "yq: INT8", "tanh: FP32"),
     {"yq": "the result of conv (Conv) is read in float as well: tanh (Tanh)"}, {"outputs": ("y", "t")}),
    ((FIRST, WEIGHT, MADE, LAST, "[tanh] t = Tanh(d)"), ("wd + conv: FP32",),
     {"conv": "conv (Conv) runs in float: its output carries no pair on the way to tanh (Tanh)"},
     {"outputs": ("y", "t")}),
    ((FIRST, WEIGHT, CONV, "[relu] y = Relu(c)"), ("wd + conv + relu: FP32",),
     {"conv": "conv (Conv) runs in float: its output carries no pair on the way to the model's output"}, {}),
    ((FIRST, WEIGHT, MADE, LAST), ("xd: FP32", "wd + conv + yq: INT8"), {"xd": "b is an output of the model as well"},
     {"outputs": ("y", "b")}),
    ((FIRST, AGAIN.format("b", "s"), WEIGHT, ALONE), ("xd: FP32", "cq: INT8", "cd + wd + conv: INT8"),
     dict.fromkeys(("xd", "cq"), "cq follows xd with the same scale: one pair is enough"), {}),
    ((FIRST, TURN, AGAIN.format("t", "s"), WEIGHT, ALONE), ("turn: INT8", "cq: INT8", "cd + wd + conv: INT8"),
     {"cq": "cq follows xd with the same scale: one pair is enough"}, {}),
    ((FIRST, TURN, AGAIN.format("t", "s2"), WEIGHT, ALONE), ("turn: INT8", "cq: INT8", "cd + wd + conv: INT8"),
     {"cq": "cq follows xd with another scale: give both pairs one"}, {}),
    ((FIRST, "[conv] c = Conv <pads=[1,1,1,1]>(b, wf)", BEHIND_CONV, "[add] d = Add(c2, b)", LAST),
     ("cd + add: FP32", "yq: INT8"),
     dict.fromkeys(("cd", "yq"), f"add (Add) runs in float: no Add {NO_KERNEL}"), {}),
    ((PAIR.format("x"), "[scores] t = MatMul(x2, x2)", PAIR.format("t"), "[end] y = Tanh(t2)"),
     ("xd + scores: FP32",),
     {"scores": "scores (MatMul) runs in float: it multiplies two activations, as in attention: not every engine runs "
      "these in 8 bits"}, {"shape": "8,8"}),
    ((FIRST, WEIGHT, MADE, LAST.replace("y =", "f ="), "[conv2] y = Conv(f, v)"),
     ("conv: FP32", "yd + conv2: INT8"), {"conv": f"conv (Conv) runs in float: {UNKNOWN}"}, {"numbers": PLAIN}),
    ((FIRST, WEIGHT, CONV, RELU, LAST.replace(", z)", ", low)")), ("wd + conv + relu: FP32",),
     {"conv": "conv (Conv) runs in float: this engine wants uint8 at xd"}, {"numbers": UINT8}),
    ((FIRST, WEIGHT, CONV, RELU, LAST), ("wd + conv + relu: FP32",), {"conv": f"conv (Conv) runs in float: {UNKNOWN}"},
     {"numbers": INT8}),
)  # fmt: skip
"""Nodes of a network, layers of an engine, the reason by the first node of a layer that fails, and more about both."""


@pytest.mark.parametrize(("parts", "given", "reasons", "more"), CASES)
def test_what_fails_has_its_reason(parts, given, reasons, more):
    about_net = {name: value for name, value in more.items() if name != "numbers"}
    found = failing(net(*parts, **about_net), *given, numbers=more.get("numbers"))
    assert {f.nodes[0]: f.reason for f in found} == reasons


FIVE, UNSIGNED = FIRST.replace(", z)", ", z5)"), FIRST.replace(", z)", ", zu)")


@pytest.mark.parametrize(("first", "numbers", "words"), [
    ("[xq] a = QuantizeLinear <axis=1>(x, ws, wz) [xd] b = DequantizeLinear <axis=1>(a, ws, wz)", PLAIN,
     "this engine wants one scale for all channels and uint8 at xd"),
    (FIRST, FP8, "this engine wants float8_e4m3fn at xd"),
    (FIRST, replace(INT8, per_channel=False), "this engine wants one scale for all channels at wd"),
    (FIVE, INT8, "this engine wants a zero point of 0 at xd"),
    (FIRST, PLAIN, "this engine wants uint8 at xd"),
    (UNSIGNED, INT8, "this engine wants int8 at xd"),
    (FIVE, None, UNKNOWN),
    (FIRST, INT8, UNKNOWN),
])  # fmt: skip
def test_numbers_that_the_engine_does_not_take_and_no_reason_is_invented(first, numbers, words):
    model = net(first, WEIGHT, "[conv] d = Conv <pads=[1,1,1,1]>(b, v)", LAST)
    (finding,) = failing(model, "conv: FP32", numbers=numbers)
    assert finding.reason == f"conv (Conv) runs in float: {words}"
