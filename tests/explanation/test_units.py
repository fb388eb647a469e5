"""What a finished run says of each unit: how it ran, why it is in float, and what the model would take with it in 8
bits. Figures are those of builds, and none is given within noise."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models import build, normal, ranges
from qdqtune.commands.explain import explain_run
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.errors import Failure
from qdqtune.explanation import units
from qdqtune.explanation.units import Explanation, explanations, shipped_origin, tally
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.placement.files import PlacementFile, write_placement
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import IN_BODIES, possible_edges
from qdqtune.search.costs.decisions import other
from qdqtune.search.costs.units import Decision
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.finished import FinishedRun, read_run
from qdqtune.tuning.loop import tune
from qdqtune.tuning.store import RangesRecord
from qdqtune.types import Accuracy, Edge, Layer, Measurement, Placement, Proposal, Trial, WeightFormat
from runs import settings, write
from workers import in_process


def by_name(rows: Sequence[Explanation]) -> dict[str, Explanation]:
    return {name: row for row in rows for name in row.nodes}


def test_a_build_takes_what_a_unit_is_estimated_to_take(final: Path, tmp_path: Path) -> None:
    run = read_run(final.parent)
    table, record = units._Table(run), run.records.get("ranges", RangesRecord)
    numbers, shipped = open_engine(EngineSpec("fake")).numeric_format("int8"), table.parts.decision(run.placement)

    def built_ms(decision: Decision) -> float:
        save(insert(run.model, table.parts.placement(decision), record.ranges, numbers), tmp_path / "m.onnx")
        built = open_engine(EngineSpec("fake")).build(tmp_path / "m.onnx", tmp_path / "log")
        return sum(layer.time_ms or 0.0 for layer in built.layers({}, 1))

    told = {unit: row for unit in table.parts.units for row in table.rows(unit) if row.more_ms}
    sources = {row.nodes[0]: (row.source, row.state) for row in told.values()}
    assert sources == {"skip": ("measured", "8 bits"), **dict.fromkeys(("third", "head"), ("estimated", "float"))}
    for unit, row in told.items():
        assert built_ms(other(table.parts, shipped, [unit.number])) - built_ms(shipped) == pytest.approx(row.more_ms)
        assert f"with it in {'8 bits' if row.reason else 'float'} the model would take 0.00" in row.why


def test_estimates_tell_nothing_that_the_noise_of_the_run_may_have_made(final: Path) -> None:
    run = read_run(final.parent)
    assert by_name(explanations(run))["third"].reason == "conversions cost more than it saves"
    noisy = []
    for trial in run.history:
        rounds = zip(trial.result.b, (0.5, 1.0, 2.0) * len(trial.result.b), strict=False)
        noisy.append(replace(trial, result=Measurement(trial.result.a, tuple(b * factor for b, factor in rounds))))
    vars(run)["history"] = tuple(noisy)
    row = by_name(explanations(run))["third"]
    assert (row.reason, row.more_ms) == ("no gain beyond noise", None)


def test_what_ships_need_not_be_what_prices_led_to(final: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(final.parent, tmp_path / "out")
    assert "the placement that layer times predict to be fastest" in explain_run(folder).headline
    compute = next(t.placement for t in read_run(folder).history if t.proposal.origin == "compute")
    write_placement(folder / "placement.yaml", PlacementFile(compute, "int8", "fake", {}), "model.onnx")
    explained = explain_run(folder)
    assert "pairs at the inputs of convolutions and products" in explained.headline
    assert {row.state for row in explained.rows} == {"float"}  # the engine fuses no pair without one on the result
    assert by_name(explained.rows)["softmax"].reason == "no kernel for this operator"


def test_what_computes_shapes_or_reads_no_floats_has_no_kernel(tmp_path: Path) -> None:
    text = """net (float[8,64] x) => (float[8,64] y, int64[2] s, float[n] r) {
        [big] a = MatMul(x, w) [shape] s0 = Shape(a) [twice] s = Add(s0, s0) [range] r = Range(low, high, step)
        [relu] y = Relu(a) }"""
    numbers = {name: np.float32(value) for name, value in (("low", 0), ("high", 4), ("step", 1))}
    with in_process():
        tune(settings(write(build(text, {"w": normal(64, 64)} | numbers), tmp_path), mode="cut", builds=4))
    rows = by_name(explain_run(tmp_path / "out").rows)
    for name in {"shape", "twice", "range"} & rows.keys():
        assert rows[name].reason == "no kernel for this operator"
        assert rows[name].more_ms is None
    assert "on its input 's0': it holds integers" in rows["twice"].detail


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
    summary |= {"constraint_met": None}
    run = FinishedRun(tmp_path, summary | {"final_ms": 2.5, "timed": True}, *[None] * 2)
    vars(run).update(model=model, able=able, possible=able, placement=shipped, float_layers=floats, history=(trial,))
    vars(run).update(log=SimpleNamespace(plan=Plan()), limits=Limits(), noise=None, shipped_layers=layers)
    assert shipped_origin(run) == "weights of products in 4 bits, and no pairs"
    rows = explanations(run)
    assert (rows[0].state, rows[0].precision, rows[0].reason) == ("4-bit weights", "w4", "")
    assert (rows[0].ms, rows[0].float_ms) == pytest.approx((0.25, 1.0))
    assert (rows[1].state, rows[1].reason) == ("float", "not tried")
    stored = next(each for each in tally(rows) if each.state == "4-bit weights")
    assert (stored.nodes, stored.ms, stored.float_ms) == (("a", "d"), 0.5, 2.0)


# Made-up runs: a chain of units in float, and candidates that are timed against what ships
CHAIN = """net (float[8,64] x) => (float[8,64] y) {
    [a] p = MatMul(x, w0) [b] q = Sigmoid(p) [c] y = MatMul(q, w1) }"""
SAME, SLOWER, FASTER = (1.0, 0.99, 1.01) * 8, (1.2, 1.19, 1.21) * 8, (0.8, 0.79, 0.81) * 8


def made_up(folder: Path, *trials: tuple[Placement, Any], model: Model, **facts: Any) -> FinishedRun:
    """A run that ships the float model. `trials`: placements with their times, as shares of the float model's, or a
    failure."""
    able = possible_edges(model, ranges(model))
    history = []
    for number, (placement, times) in enumerate(trials, 1):
        result = times if isinstance(times, Failure) else Measurement((1.0 + number / 1e12,) * len(times), times)
        history.append(Trial(number, Proposal("cut", placement), Placement(), result, Accuracy(30.0), holds=True))
    summary: Any = {"shipped": "baseline", "rewrites": {}, "by_threads": (), "engine": {}, "timed": True, "edges": 0}
    summary |= {"baseline_ms": 4.0, "final_ms": 4.0, "constraint_met": None}
    run = FinishedRun(folder, summary, *[None] * 2)
    usual = {"possible": able, "placement": Placement(), "float_layers": (), "shipped_layers": (), "noise": None}
    vars(run).update(usual | {"model": model, "able": able, "history": tuple(history), "limits": Limits()} | facts)
    vars(run).setdefault("log", SimpleNamespace(plan=Plan()))
    return run


@pytest.fixture
def chain() -> Model:
    return build(CHAIN, {"w0": normal(64, 64), "w1": normal(64, 64, seed=1)})


def placed(model: Model, *names: str) -> Placement:
    """Pairs on all that some nodes read and write."""
    edges = {edge for name in names for edge in model.node(name).into}
    written = {tensor for name in names for tensor in model.node(name).outputs}
    return Placement.of(edges | {edge for node in model.nodes for edge in node.into if edge.tensor in written})


def test_a_build_that_differs_from_what_ships_in_one_unit_tells_what_that_would_take_in_float(chain, tmp_path):
    one, both = placed(chain, "b"), placed(chain, "a", "b")

    def row(times: tuple[float, ...], *, is_against: bool = False) -> Explanation:
        run = made_up(tmp_path, (one, SAME), (both, times), model=chain, placement=both)
        first, last = run.history
        pair = (
            (first, replace(last, against=one))
            if is_against
            else (replace(first, against=both, result=last.result), last)
        )
        vars(run).update(history=pair, shipped_ms=4.0, trial=pair[1])
        return by_name(explanations(run))["a"]

    slower = row(SLOWER)
    assert (slower.state, slower.reason, slower.source, slower.alike) == ("8 bits", "", "measured", 0)
    assert slower.more_ms == pytest.approx(0.8)
    assert slower.why.endswith("with it in float the model would take 0.8 ms more (measured)")
    assert "110 ms more" in replace(slower, more_ms=112.0).why
    assert row(FASTER, is_against=True).more_ms == pytest.approx(1.0)
    same = row(SAME)
    assert same.more_ms is None
    assert same.why.endswith("; it gains less than 2% of the latency (measured)")


@pytest.mark.parametrize(
    ("times", "reason", "more_ms"),
    [(SAME, "no gain beyond noise", None), (SLOWER, "slower in 8 bits", 0.8),
     ((1.01,) * 24, "no gain beyond noise", None), (SLOWER[:3], "no gain beyond noise", None),
     ((1.5,) * 6, "slower in 8 bits", 2.0)],
)  # fmt: skip
def test_the_whole_latency_of_a_build_that_differs_in_one_unit_decides(times, reason, more_ms, chain, tmp_path):
    row = by_name(explanations(made_up(tmp_path, (placed(chain, "b"), times), model=chain)))["b"]
    assert (row.reason, row.more_ms) == (reason, None if more_ms is None else pytest.approx(more_ms))
    assert row.source == ("measured" if more_ms else "")
    if times == SAME:
        assert "1.00x [0.99x, 1.01x] as fast (measured)" in row.why


def test_what_became_of_the_one_candidate_is_the_reason_where_nothing_was_timed_or_it_was_faster(chain, tmp_path):
    alone, both = placed(chain, "b"), placed(chain, "a", "b")

    def row(*trials: tuple[Placement, Any], **facts: Any) -> Explanation:
        return by_name(explanations(made_up(tmp_path, *trials, model=chain, **facts)))["b"]

    failed = row((alone, Failure("build", "no memory")))
    assert (failed.reason, failed.more_ms) == ("its build failed", None)
    assert failed.detail.endswith("failed: no memory")
    assert row((both, Failure("build", "no memory"))).reason == "not tried"
    together = row((both, SLOWER))
    assert together.reason == "not tried"
    assert "and 2 more tensors in 8 bits was 0.83x as fast as float in the search" in together.detail
    run = made_up(tmp_path, (alone, FASTER), model=chain, limits=Limits(min_sqnr=40.0))
    vars(run)["history"] = (replace(run.history[0], holds=False),)
    missed = by_name(explanations(run))["b"]
    assert (missed.reason, missed.source) == ("accuracy limit", "measured")
    assert missed.more_ms == pytest.approx(-0.8)
    assert row().detail == "no candidate has it in 8 bits"
    for trial in ((alone, FASTER), (both, FASTER)):
        unproven = row(trial)
        assert (unproven.reason, unproven.more_ms) == ("not proven", None)
        assert "1.25x as fast as float in the search, but fresh builds did not prove it" in unproven.detail
    too_coarse = made_up(tmp_path, (both, FASTER), (alone, SAME), model=chain, limits=Limits(min_sqnr=40.0))
    vars(too_coarse)["history"] = tuple(replace(trial, holds=False) for trial in too_coarse.history)
    rows = by_name(explanations(too_coarse))
    assert (rows["a"].reason, rows["b"].reason) == ("accuracy limit, together", "no gain beyond noise")
    assert "only tried together with others: a candidate with it and 1 other node in 8 bits" in rows["a"].detail
    may_be = row((both, FASTER[:3]))
    assert may_be.reason == "not tried"
    unmet = made_up(tmp_path, (both, FASTER[:3]), model=chain)
    vars(unmet).update(history=(replace(unmet.history[0], holds=False),), limits=Limits(min_sqnr=40.0))
    vars(unmet)["summary"] |= {"constraint_met": False}
    assert by_name(explanations(unmet))["b"].reason == "accuracy limit, together"
    assert "1.25x as fast as float in the search, but the output SQNR of all samples is 30.0 dB" in rows["a"].detail


def ran(*low: str, **times: float) -> tuple[Layer, ...]:
    kinds = {name: "quantize" if name.endswith("Linear") else "compute" for name in times}
    return tuple(Layer(name, (name,), "INT8" if name in low else "FP32", ms, kinds[name]) for name, ms in times.items())


def test_where_no_build_with_a_unit_in_8_bits_was_as_fast_as_float_the_best_of_them_is_told(chain, tmp_path):
    run = made_up(tmp_path, (placed(chain, "a", "b"), SLOWER), model=chain, float_layers=ran(a=1.0, b=1.0, c=1.0))
    vars(run)["history"] = (replace(run.history[0], layers=ran("a", "b", a=1.05, b=1.55, c=1.0)),)
    row, slower = (by_name(explanations(run))[name] for name in ("a", "b"))
    assert (slower.reason, slower.more_ms) == ("slower in 8 bits", None)
    assert slower.detail == "estimated with it in 8 bits, not measured"
    assert (row.reason, row.more_ms) == ("slower together", None)
    assert row.detail == "with 1 other node in 8 bits the model was 0.83x as fast as float when tried"


def test_a_unit_that_reads_8_bits_and_writes_floats_is_estimated_from_what_it_takes_so(chain, tmp_path):
    """A Sigmoid that the float build fuses, so that it seems to take next to nothing in float."""
    ships, both = placed(chain, "a"), placed(chain, "a", "b")
    run = made_up(tmp_path, (both, (0.805,) * 12), (ships, (0.8,) * 12), model=chain, placement=ships)
    in_8_bits, as_shipped = ran("a", "b", a=1.0, b=1.0, q_DequantizeLinear=0.02, c=1.2), ran("a", a=1.0, b=1.0, c=1.2)
    history = [
        replace(trial, layers=layers) for trial, layers in zip(run.history, (in_8_bits, as_shipped), strict=True)
    ]
    vars(run).update(history=tuple(history), shipped_layers=as_shipped, float_layers=ran(a=2.7, b=0.1, c=1.2))
    vars(run)["summary"] |= {"final_ms": 3.2}
    row = by_name(explanations(run))["b"]
    assert (row.state, row.reason, row.more_ms) == ("float", "no gain beyond noise", None)


def test_what_got_slower_is_told_why_and_times_that_contradict_each_other_are_told_as_rough(chain, tmp_path):
    together = (Layer("a", ("a", "b"), "FP32", 3.4, "compute"), Layer("c", ("c",), "FP32", 0.6, "compute"))
    ships, as_shipped = placed(chain, "a"), ran("a", a=1.5, b=1.2, c=0.5)
    run = made_up(tmp_path, (ships, (0.8,) * 12), model=chain, placement=ships, shipped_layers=as_shipped)
    vars(run).update(float_layers=together)
    vars(run)["summary"] |= {"final_ms": 3.2}
    rows = by_name(explanations(run))
    assert rows["b"].float_with == "a"  # its share of their kernel is a guess
    assert units.disturbance(run) == ""
    assert run.spent["c"] == run.float_spent["c"]  # the same kernel
    vars(run).update(shipped_layers=ran("a", "c", a=1.5, b=1.2, c=0.5))  # another, as behind a Q that was moved
    del vars(run)["spent"]
    assert run.spent["c"].own == pytest.approx(0.5)
    vars(run).update(float_layers=ran(a=0.5, b=1.5, c=2.0))
    vars(run).pop("float_spent")
    assert "those beside no pair take 2 ms in float, and 0.5 ms in what ships" in units.disturbance(run)
    vars(run).update(float_spent={})  # a hurried run may lack the layers of the float model
    assert units.disturbance(run) == ""


def test_times_of_nodes_that_are_alike_and_differ_much_are_told_as_rough(tmp_path: Path) -> None:
    net = "net (float[8,64] x) => (float[8,64] y) { [a] p = Relu(x) [b] q = Relu(p) [c] r = Relu(q) [d] y = Tanh(r) }"
    for ms, is_rough in ((1.2, False), (4.0, True)):
        run = made_up(tmp_path, model=build(net), float_layers=ran(a=1.0, b=1.0, c=ms, d=4.0))
        assert bool(units.disturbance(run)) == is_rough
    assert "of nodes with equal operators and shapes they differ by 30% of the latency" in units.disturbance(run)


def test_builds_that_differ_elsewhere_as_well_measure_nothing(chain: Model, tmp_path: Path) -> None:
    more = Placement.of(
        placed(chain, "b").edges | set(chain.node("c").into[1:])
    )  # a pair on a weight, which changes no state
    row = by_name(explanations(made_up(tmp_path, (more, SLOWER), model=chain)))["b"]
    assert row.more_ms is None


def test_what_has_no_kernel_is_not_told_as_left_out_by_the_user(tmp_path: Path) -> None:
    model = build("""net (float[8,64] x, int64 n, bool c) => (float[8,64] y, int64[2] s, float[8,64] z) {
        [big] a = MatMul(x, w) [shape] s = Shape(a) [relu] y = Relu(a)
        [loop] z = Loop <body = step (int64 i, bool g, float[8,64] v) => (bool h, float[8,64] u) {
            h = Identity(g) u = Relu(v) }>(n, c, x) }""", {"w": normal(64, 64)})  # fmt: skip
    listed = possible_edges(model, ranges(model)) - set(model.node("relu").into)
    rows = by_name(explanations(made_up(tmp_path, model=model, possible=listed)))
    assert rows["shape"].reason == rows["loop"].reason == "no kernel for this operator"
    assert rows["loop"].detail == IN_BODIES
    assert rows["relu"].reason == "excluded by your options"


def test_what_runs_elsewhere_or_in_advance_is_a_state_and_untimed_runs_know_accuracy_alone(chain, tmp_path):
    elsewhere = Layer("l", ("a",), "FP32", 1.0, "compute", elsewhere="on the CPU: no kernel")
    run = made_up(tmp_path, model=chain, shipped_layers=(elsewhere, Layer("f", ("b",), "", 0.0, "folded")))
    vars(run)["summary"]["timed"] = False
    rows = by_name(explanations(run))
    assert (rows["a"].state, rows["a"].reason) == ("elsewhere", "no kernel for this operator")
    assert "on the CPU" in rows["a"].detail
    assert rows["b"].state == "computed in advance"
    assert (rows["c"].state, rows["c"].reason) == ("float", "accuracy limit")


ROW = Explanation(("a", "b"), ("MatMul", "Relu"), "8 bits", "int8", 2.0, 4.0)


def test_sums_are_by_state_and_reason_with_the_most_time_first() -> None:
    rows = [ROW, replace(ROW, nodes=("c",), ms=1.0), replace(ROW, nodes=("d",), state="float", ms=9.0)]
    in_float, in_8_bits = tally(rows)
    assert (in_float.state, in_float.nodes, in_float.ms) == ("float", ("d",), 9.0)
    assert (in_8_bits.nodes, in_8_bits.ms, in_8_bits.float_ms) == (("a", "b", "c"), 3.0, 8.0)


def test_a_row_tells_of_each_node_what_the_engine_reports_of_it(tmp_path: Path) -> None:
    """A LeakyRelu in float inside an 8-bit unit, a product in 8 bits inside one that was slower so, a Relu removed."""
    net = "net (float[8,64] x) => (float[8,64] y) { [a] p = MatMul(x, w0) [b] q = LeakyRelu(p) [c] r = Relu(q)"
    model = build(net + " [d] y = Sigmoid(r) }", {"w0": normal(64, 64)})
    inside = placed(model, "a", "b", "c")
    around = Placement.of(edge for edge in inside.edges if edge.tensor != "p")
    in_8_bits = Layer("a", ("a",), "INT8", 0.5, "compute"), *ran(b=0.2, d=0.1)
    floats = Layer("a", ("a", "b"), "FP32", 1.0, "compute"), *ran(c=0.1, d=0.1)
    run = made_up(tmp_path, (around, SLOWER), (inside, SLOWER), model=model, placement=around, float_layers=floats)
    first, second = run.history
    vars(run).update(shipped_layers=in_8_bits, history=(replace(first, layers=in_8_bits), second))
    rows = by_name(explanations(run))
    assert [(rows[name].state, rows[name].reason) for name in "abc"] == [
        ("8 bits", ""), ("float", "not between pairs"), ("its Q", "")]  # fmt: skip
    slow = replace(in_8_bits[0], time_ms=2.0), *in_8_bits[1:]
    history = replace(first, layers=ran(a=1.0, b=0.2, d=0.1)), replace(second, layers=slow)
    vars(run).update(placement=Placement(), shipped_layers=floats, history=history)
    row = by_name(explanations(run))["a"]
    assert (row.nodes, row.state, row.reason) == (("a", "b"), "float", "slower in 8 bits")


def test_what_this_engine_always_computes_in_float_has_no_kernel_whatever_candidates_missed(tmp_path: Path) -> None:
    """The Add is in 8 bits in front of a pair, or inside an 8-bit product: that says nothing of the Tanh behind it."""
    net = "net (float[8,64] x) => (float[8,64] y) { [a] p = MatMul(x, w0) [b] q = Add(p, k) [c] y = Tanh(q) }"
    model = build(net, {"w0": normal(64, 64), "k": normal(64)})
    floats = Layer("a", ("a",), "FP32", 1.0, "compute"), Layer("c", ("b", "c"), "FP32", 1.0, "compute")
    product = Layer("a", ("a", "b"), "INT8", 0.5, "compute"), Layer("c", ("c",), "FP32", 1.0, "compute")
    shipped = Placement.of((), [(Edge("w0", "a", 1), WeightFormat.named("d8"))])
    run = made_up(tmp_path, (shipped, FASTER), model=model, placement=shipped, float_layers=floats)
    vars(run).update(shipped_layers=product, history=(replace(run.history[0], layers=product),))
    vars(run)["summary"] |= {"engine": {"engine": "onnxruntime"}, "final_ms": 3.2}
    rows = by_name(explanations(run))
    assert rows["a"].why.startswith("an 8-bit product that finds the scale of its input in every inference: part of")
    assert (rows["b"].nodes, rows["b"].state, rows["b"].why) == (("b",), "8 bits", "the kernel of a computes it")
    assert (rows["c"].nodes, rows["c"].state, rows["c"].precision) == (("c",), "float", "fp32")
    assert rows["c"].why == "no kernel for this operator: this engine computes Tanh in float, with or without pairs"
    vars(run).update(float_layers=ran(a=1.0, b=1.0, c=1.0))
    vars(run)["summary"] |= {"shipped": "tuned"}
    del vars(run)["float_spent"]
    product_row, bias = (by_name(explanations(run))[name] for name in ("a", "b"))
    assert (bias.state, bias.precision, bias.why) == ("8 bits", "int8", "the kernel of a computes it")
    assert (product_row.source, product_row.more_ms) == ("measured", pytest.approx(0.8))


def test_a_refused_candidate_of_undecided_speed_is_told_as_inaccurate_and_not_as_slower(chain, tmp_path):
    undecided = placed(chain, "a", "b", "c"), (0.5, 1.15, 1.9) * 8
    trials = (placed(chain, "a", "b"), SLOWER), undecided, (placed(chain, "b", "c"), SLOWER)
    run = made_up(tmp_path, *trials, model=chain, float_layers=ran(a=1.0, b=1.0, c=1.0), limits=Limits(min_sqnr=40.0))
    slower = replace(run.history[0], layers=ran("a", "b", a=1.05, b=1.55, c=1.0))
    vars(run)["history"] = (slower, replace(run.history[1], holds=False), run.history[2])
    row = by_name(explanations(run))["a"]
    assert (row.reason, row.more_ms) == ("accuracy limit", None)
    assert row.detail.endswith("is 30.0 dB, and 40 dB are asked for; its speed was undecided")
