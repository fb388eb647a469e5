"""What an engine does not fuse in a Q/DQ model, and the reasons: concluded from the graph and its numbers."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from models import FP8, INT8, PLAIN, UINT8, build, normal, ranges
from qdqtune.commands.explain import Explained, explain_run
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.explanation import units
from qdqtune.explanation.unfused import UNKNOWN, Finding, allow, check
from qdqtune.explanation.units import Explanation, explanations, shipped_origin, tally
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.placement.files import PlacementFile, write_placement
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.decisions import other
from qdqtune.search.costs.units import Decision
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.finished import FinishedRun, read_run
from qdqtune.tuning.loop import tune
from qdqtune.tuning.records import RangesRecord
from qdqtune.tuning.result import Result
from qdqtune.types import Edge, Layer, Measurement, NumericFormat, Placement, Proposal, Trial, WeightFormat
from runs import mixed, settings, write
from workers import in_process

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


def test_a_fused_model_has_only_its_border(tmp_path):
    model = net(FIRST, WEIGHT, CONV, "[relu] d = Relu(c)", LAST)
    found = check(model, fake_layers(model, tmp_path))
    assert [(f.nodes, f.kind, f.fails, f.reason) for f in found] == [
        (("xq",), "boundary", False, "first Q behind a float input of the model"),
        (("yd",), "boundary", False, "last DQ in front of a float output of the model"),
    ]
    assert all(f.time_ms is not None and f.time_ms > 0 for f in found)


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
    (("[tanh] t = Tanh(x) [aq] a = QuantizeLinear(t, s, z) [ad] b = DequantizeLinear(a, s, z)", WEIGHT,
      CONV.replace("c =", "y =")), ("tanh: FP32", "aq: INT8", "ad + wd + conv: INT8"),
     {"aq": "tanh (Tanh) runs in float: its input x carries no pair"}, {}),
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
def test_what_fails_has_its_reason(
    parts: tuple[str, ...], given: tuple[str, ...], reasons: dict[str, str], more: dict[str, Any]
) -> None:
    about_net = {name: value for name, value in more.items() if name != "numbers"}
    found = failing(net(*parts, **about_net), *given, numbers=more.get("numbers"))
    assert {f.nodes[0]: f.reason for f in found} == reasons


FIVE, UNSIGNED = FIRST.replace(", z)", ", z5)"), FIRST.replace(", z)", ", zu)")


@pytest.mark.parametrize(("first", "numbers", "words"), [
    ("[xq] a = QuantizeLinear <axis=1>(x, ws, wz) [xd] b = DequantizeLinear <axis=1>(a, ws, wz)", PLAIN,
     "this engine wants one scale for all channels and uint8 at xd"),
    (FIRST, FP8, "this engine wants float8e4m3fn at xd"),
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


# What a finished run says of each unit: true of what shipped, in every mode, with one of five reasons
@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder of a run in cut mode, and its result."""
    model = write(mixed(), tmp_path_factory.mktemp("explained"))
    with in_process():
        return model.parent / "out", tune(settings(model, mode="cut", builds=8))


def by_name(explained: Explained) -> dict[str, Explanation]:
    return {name: row for row in explained.rows for name in row.nodes}


def test_a_build_takes_what_a_unit_is_said_to_take_otherwise(tuned: tuple[Path, Result], tmp_path: Path) -> None:
    run = read_run(tuned[0])
    table, record = units._Table(run), run.records.get("ranges", RangesRecord)
    assert record is not None
    numbers, shipped = open_engine(EngineSpec("fake")).numeric_format("int8"), table.parts.decision(run.placement)

    def built_ms(decision: Decision) -> float:
        model = insert(run.model, table.parts.placement(decision), record.ranges, numbers)
        return sum(layer.time_ms or 0.0 for layer in fake_layers(model, tmp_path))

    rows = [(table.row(unit), unit) for unit in table.parts.units]
    changes = {
        row.nodes: (row.more_ms, other(table.parts, shipped, [unit.number])) for row, unit in rows if row.more_ms
    }
    assert len(changes) == 3
    # `skip` alone is in float in one candidate, which is the whole difference between two builds.
    found = by_name(explain_run(tuned[0]))
    assert [found[name].source for name in ("skip", "third", "second")] == ["measured", "estimated", ""]
    assert "(measured)" in found["skip"].why
    assert f"{found['second'].ms:.3g} ms, in the float model {found['second'].float_ms:.3g} ms" in found["second"].why
    for more_ms, decision in changes.values():
        assert built_ms(decision) - built_ms(shipped) == pytest.approx(more_ms)


def test_what_ships_need_not_be_what_prices_led_to(tuned: tuple[Path, Result], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(tuned[0], folder)
    assert "the cut of the prices" in explain_run(folder).headline
    compute = next(t.placement for t in tuned[1].history if t.proposal.origin == "compute")
    write_placement(folder / "placement.yaml", PlacementFile(compute, "int8", "fake", {}), "model.onnx")
    explained = explain_run(folder)
    assert "the rule 'compute'" in explained.headline
    assert {row.state for row in explained.rows} == {"float"}  # the engine fuses no pair without one on the result
    assert by_name(explained)["softmax"].reason == "no kernel for this operator"


def test_what_computes_shapes_or_reads_no_floats_has_no_kernel(tmp_path: Path) -> None:
    text = """net (float[8,64] x) => (float[8,64] y, int64[2] s, float[n] r) {
        [big] a = MatMul(x, w) [shape] s0 = Shape(a) [twice] s = Add(s0, s0) [range] r = Range(low, high, step)
        [relu] y = Relu(a) }"""
    numbers = {name: np.float32(value) for name, value in (("low", 0), ("high", 4), ("step", 1))}
    with in_process():
        tune(settings(write(build(text, {"w": normal(64, 64)} | numbers), tmp_path), mode="cut", builds=4))
    rows = by_name(explain_run(tmp_path / "out"))
    for name in {"shape", "twice", "range"} & rows.keys():
        assert rows[name].reason == "no kernel for this operator"
        assert rows[name].more_ms is None
    assert "on its input s0: it is not known to be a float tensor" in rows["twice"].detail


def test_weights_in_fewer_bits_are_a_state_of_their_own(tmp_path: Path) -> None:
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
    summary: Any = {"shipped": "tuned", "rewrites": {}, "by_threads": (), "engine": {}, "baseline_ms": 4.0}
    run = FinishedRun(tmp_path, summary | {"final_ms": 2.5, "timed": True}, *[None] * 2)  # type: ignore[arg-type]
    vars(run).update(model=model, able=able, possible=able, placement=shipped, float_layers=floats, history=(trial,))
    vars(run).update(log=SimpleNamespace(plan=Plan()), limits=Limits(), noise=None, shipped_layers=layers)
    assert shipped_origin(run) == "weights of products in 4 bits, and no pairs"
    rows = explanations(run)
    assert (rows[0].state, rows[0].precision, rows[0].otherwise, rows[0].reason) == ("4-bit weights", "w4", "float", "")
    assert (rows[0].ms, rows[0].float_ms) == pytest.approx((0.25, 1.0))
    assert (rows[1].state, rows[1].reason) == ("float", "not tried")
    stored = next(each for each in tally(rows) if each.state == "4-bit weights")
    assert (stored.nodes, stored.ms, stored.float_ms) == (("a", "d"), 0.5, 2.0)


ROW = Explanation(("a", "b"), ("MatMul", "Relu"), "8 bits", "int8", 2.0, 4.0, "float")


def test_sums_are_by_state_and_reason_with_the_most_time_first() -> None:
    rows = [ROW, replace(ROW, nodes=("c",), ms=1.0), replace(ROW, nodes=("d",), state="float", ms=9.0)]
    in_float, in_8_bits = tally(rows)
    assert (in_float.state, in_float.nodes, in_float.ms) == ("float", ("d",), 9.0)
    assert (in_8_bits.nodes, in_8_bits.ms, in_8_bits.float_ms) == (("a", "b", "c"), 3.0, 8.0)
