"""The report of a run: what it says, and that nothing from a model is more than text in it."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Call
from models import INT8, build, conv_net, normal, ranges
from qdqtune.commands.explain import explain_run
from qdqtune.engines import EngineSpec
from qdqtune.engines.machine import MachineFacts
from qdqtune.errors import BadOption
from qdqtune.explanation.charts import Axis, scatter, spanning
from qdqtune.explanation.formatting import title
from qdqtune.explanation.model_map import MapGroup, MapNode, draw, rows_of
from qdqtune.explanation.page import render
from qdqtune.explanation.report import OWN, Point, report_of_run
from qdqtune.explanation.units import Explanation, tally
from qdqtune.graph.loading import load, load_proto
from qdqtune.graph.model import Model
from qdqtune.numerics.accuracy import closeness, closeness_cell, closeness_of
from qdqtune.numerics.scores import equal_share
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import count_pairs, placement_in
from qdqtune.timing.ratios import Plan, Ratio
from qdqtune.tuning.finished import read_run
from qdqtune.tuning.loop import tune
from qdqtune.types import Accuracy
from runs import hopeless, mixed, settings, swishing, write
from runs import rows as lines
from workers import in_process


@pytest.fixture
def finished(tuned: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tuned.parent / "out", tmp_path / "out")


def test_figures_are_numbers_with_small_print_and_names_are_text(finished: Path) -> None:
    row = {"baseline_ms": 2.0, "final_ms": 1.0, "ratio": 0.5, "low": 0.4, "high": 0.6}
    rows = [row | {"threads": 1, "verdict": "faster"}, row | {"threads": 4, "verdict": "undecided"}]
    judged = {"slice_name": "boxes[:, :, 3]", "slice_db": 17.5, "slice_is_lost": True, "samples": 9}
    judged |= {"sqnr_db": 24.1, "lowest_db": 18.3, "highest_db": 31.0}
    judged |= {"by_output": {"scores": None, "boxes": 24.1}}
    hostile = "</script><img src=x onerror=alert(1)>\u202edetsurt"
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["percentiles_ms"]["final"]["p99"] < summary["percentiles_ms"]["baseline"]["p90"]
    summary |= {"model": hostile, "by_threads": rows}
    summary |= {"ratio_to_given": 0.25, "output_accuracy": judged, "output_sqnr_db": 24.1}
    (finished / "summary.json").write_text(json.dumps(summary))
    report = report_of_run(finished)
    assert "search" in report.notes[0], "why it ended"
    told = {fact.name: (fact.value, fact.hint) for fact in report.facts}
    assert told["p50, p90, p99 of single inferences"][0].endswith(" ms")
    assert told["latency, 4 threads"] == ("1.000 ms", "float: 2.000 ms")
    assert told["speedup [interval]"] == ("2.00x [1.67x, 2.50x]", "")
    assert ("4.00x", "") in [value for name, value in told.items() if name.startswith("speedup over ")]
    assert told["output SQNR against float"] == (
        "24.1 dB",
        "18.3 to 31.0 over 9 samples; of boxes, the worst of 2 outputs",
    )
    assert list(report.outputs) == ["boxes", "scores"]
    assert told["of the worst slice"] == ("17.5 dB, lost", "boxes[:, :, 3]")
    page = render(report, {})
    assert "<img" not in page
    assert "\u202e" not in page
    assert "</script>" not in page


def test_the_verdict_is_that_of_the_summary_and_candidates_are_told_in_order(finished: Path) -> None:
    report = report_of_run(finished)
    summary = json.loads((finished / "summary.json").read_text())
    assert report.title.endswith("/model.onnx")
    assert report.verdict.speed.median == pytest.approx(1 / summary["ratio"])
    assert f"{1 / summary['ratio']:.2f} times as fast" in report.verdict.headline
    nodes = [node for group in report.map.groups for node in group.nodes]
    assert sorted(node.name for node in nodes) == sorted(node.name for node in mixed().nodes)
    assert next(node.name for node in nodes if node.state == "8 bits") == "first"
    assert [c.number for c in report.candidates] == list(range(1, summary["trials"] + 1))
    assert any(c.outcome == "accepted" and c.against_best is not None for c in report.candidates)
    assert len(report.proof) == 1
    assert all(speed.low is not None for speed in report.proof)


def test_without_its_log_a_run_has_no_report(finished: Path) -> None:
    (finished / "run.json").unlink()
    with pytest.raises(BadOption, match=r"has lost run\.json: run the same tune command again"):
        report_of_run(finished)


def test_tune_leaves_a_report_unless_told_not_to(model: Path, call: Call) -> None:
    asked = ["tune", model, "--engine", "fake", "--calibration-data", model.with_suffix(".npz"), "--effort", "quick",
             "--calibration-method", "minmax", "--no-bias-correction"]  # fmt: skip
    out = model.parent / "out"
    assert call(*asked, "-o", out, "--no-report")[0] == 0
    assert not (out / "report.html").exists()
    code, printed, _ = call("report", out)
    assert code == 0
    assert printed.strip() == str(out / "report.html")
    page = (out / "report.html").read_text()
    assert "times as fast" in page
    assert "--effort quick" in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    assert call("report", model.parent)[0] == 2


# What `explain` and the page of a run tell of its nodes adds up to what was measured, in many runs
def reshaped() -> Model:
    """Products behind a Reshape whose sizes a Shape tells, as exporters write them."""
    text = """net (float[8,64] x) => (float[8,64] y) {
        [first] a = MatMul(x, w0) [asks] s = Shape(a) [picks] n = Gather(s, zero) [listed] l = Unsqueeze(n, zeros)
        [joined] t = Concat<axis = 0>(l, halves) [view] b = Reshape(a, t) [relu] c = Relu(b) [whole] d = Reshape(c, s)
        [second] e = MatMul(d, w1) [tanh] y = Tanh(e) }"""
    numbers = {"zero": np.int64(0), "zeros": np.array([0]), "halves": np.array([2, 32])}
    return build(text, {"w0": normal(64, 64), "w1": normal(64, 64, seed=1)} | numbers)


def scaled() -> Model:
    """Products with a factor between them that is an input."""
    text = """net (float[8,64] x, float[1] k) => (float[8,64] y) {
        [first] a = MatMul(x, w0) [times] b = Mul(a, k) [second] y = MatMul(b, w1) }"""
    return build(text, {"w0": normal(64, 64), "w1": normal(64, 64, seed=1)})


def paired() -> Model:
    """A Q/DQ model, with pairs wherever neighbours share them."""
    model = mixed()
    known = ranges(model)
    placement = start_placements.integer_islands(model, possible_edges(model, known))
    return load_proto(insert(model, placement, known, INT8).to_proto())


SHORT = Plan((12,), turn_seconds=0.0)
FEW: Mapping[str, Any] = {"builds": 8}
ORT: Mapping[str, Any] = {"engine": EngineSpec("onnxruntime", {"threads": 1}), "plan": SHORT, "proof": (12,), **FEW}
OWN_PAIRS: Mapping[str, Any] = {"mode": "cut", "from_qdq": True, "builds": 2}
"""Only the model's own pairs are tried, so that nothing can be faster than its file."""
RUNS: Mapping[str, tuple[Callable[[], Model], Mapping[str, Any]]] = {
    **{mode: (mixed, {"mode": mode, **FEW}) for mode in ("cut", "subgraph")},
    "region": (mixed, {"mode": "region"}),
    "nothing faster": (hopeless, {"mode": "cut", **FEW}),
    "reshaped": (reshaped, {"mode": "subgraph", **FEW}),
    "front": (mixed, {"mode": "cut", "front": True, "builds": 25}),
    "rewrites": (swishing, {"mode": "cut", "rewrites": "auto", **FEW}),
    "rewrites alone": (lambda: swishing(8), {"mode": "cut", "rewrites": "auto", **FEW}),
    "dynamic": (lambda: mixed(batch=None), {"mode": "cut", "calibration_data": None, "seed": 3,
                                            "input_shapes": {"x": (4, 64, 64)}, **FEW}),
    "fixed": (scaled, {"mode": "cut", "fix_inputs": {"k": 2}, **FEW}),
    "no times": (mixed, {"mode": "region", "engine": EngineSpec("fake", {"hide_times": True})}),
    "several threads": (mixed, {"mode": "cut", "engine": EngineSpec("fake", {"threads": 1}),
                                "threads": (1, 2), **FEW}),
    "nothing tried": (mixed, {"mode": "cut", "time_budget": 1e-3, **FEW}),
    "no pair on most": (mixed, {"mode": "cut", "node_filter": ("first",), **FEW}),
    "not exact enough": (mixed, {"mode": "cut", "min_sqnr": 45.0, **FEW}),
    "onnxruntime": (mixed, {"mode": "cut", **ORT}),
    "own pairs": (paired, OWN_PAIRS),
}  # fmt: skip


VERDICTS = {
    "nothing faster": "Nothing faster was found for {}",
    "nothing tried": "Nothing was tried in {}",
    "not exact enough": "Nothing faster is exact enough for {}",
}
REASONS: Mapping[str, Mapping[str, tuple[str, str, str]]] = {
    "cut": {**dict.fromkeys(("first", "relu", "second", "skip"), ("8 bits", "", "")),
            "third": ("float", "conversions cost more than it saves", ""),
            **dict.fromkeys(("softmax", "tanh"), ("float", "no kernel for this operator", ""))},
    "region": {"third": ("float", "no gain beyond noise", "has it in 8 bits, and was 1.81x as fast as float")},
    "no times": {"second": ("8 bits", "", "part of"),
                 "third": ("float", "no gain beyond noise", "has it in 8 bits, and was 1.81x as fast as float")},
    "no pair on most": {"first": ("8 bits", "", "part of"), "relu": ("8 bits", "", "part of"),
                        **dict.fromkeys(("second", "third", "skip"),
                                        ("float", "excluded by your options", "you have listed"))},
    "not exact enough": {"second": ("float", "accuracy limit", "the limit is 45.0 dB")},
}  # fmt: skip
"""State, reason and part of the detail by node, of runs by name."""


@pytest.fixture(scope="session", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in RUNS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a finished run, which one worker of pytest-xdist makes for all tests of it."""
    made, changes = RUNS[request.param]
    model = write(made(), tmp_path_factory.mktemp("run"))
    with in_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(MachineFacts, "usual_threads", lambda *_: 1)
        tune(settings(model, **changes))
    return model.parent / "out"


def test_what_explain_and_the_page_tell_adds_up_to_what_was_measured(folder: Path) -> None:
    explained, report, run = explain_run(folder), report_of_run(folder), read_run(folder)
    rows, drawn = explained.rows, report.map
    whys = {node.name: node.why for group in drawn.groups for node in group.nodes}
    assert whys == {name: row.why for row in rows for name in row.nodes}
    assert all(row.why for row in rows)
    hidden = [group for group in drawn.groups if group.state in ("computed in advance", "computing shapes")]
    boxes = [group for group in drawn.groups if group not in hidden]
    assert drawn.groups == [*boxes, *hidden]
    assert not any("Reshape" in box.label for box in boxes)
    assert {"asks", "picks", "listed", "joined"}.isdisjoint(node.name for box in boxes for node in box.nodes)
    if all(row.float_ms is None for row in rows):
        assert all(group.float_ms is None for group in drawn.groups)
        assert not drawn.bars
        return
    floats, ships = pytest.approx(run.float_ms), pytest.approx(run.here["final_ms"])
    assert sum(row.float_ms or 0.0 for row in rows) == floats
    assert sum(tally.float_ms or 0.0 for tally in tally(explained.rows)) == floats
    assert sum(group.float_ms or 0.0 for group in drawn.groups) == floats
    assert sum(bar.float_ms or 0.0 for bar in drawn.bars) == floats
    assert f"{run.float_ms:.4g} ms" in report.bars_lead
    assert sum(row.ms or 0.0 for row in rows) == ships
    assert sum(tally.ms or 0.0 for tally in tally(explained.rows)) == ships
    if run.placement:
        assert drawn.tuned == (OWN if run.keeps_own_pairs else "tuned")
        assert f"{run.here['final_ms']:.4g} ms" in report.bars_lead
        assert sum(group.tuned_ms or 0.0 for group in drawn.groups) == ships
        assert sum(bar.tuned_ms or 0.0 for bar in drawn.bars) == ships


@pytest.mark.parametrize("folder", [pytest.param("front", marks=pytest.mark.xdist_group("front"))], indirect=True)
def test_points_of_a_front_have_intervals(folder: Path, call: Call) -> None:
    assert call("report", folder)[0] == 0
    report = report_of_run(folder)
    proven = [point for point in report.points if point.proven]
    assert len(proven) >= 2
    made = [row.told for row in report.candidates if "front" in row.told and row.outcome == "faster"]
    assert set(made) <= {"faster than the float model, made for the front"}
    assert all(point.speed.low is not None and point.speed.low > 1 for point in proven)
    assert [point.shipped for point in proven].count(True) == 1


def test_a_run_says_what_became_of_it_and_why_a_node_runs_as_it_does(folder, request):
    name, report, explained = request.node.callspec.params["folder"], report_of_run(folder), explain_run(folder)
    if name in VERDICTS:
        assert report.verdict.headline == VERDICTS[name].format(f"{folder.parent.name}/model.onnx")
        assert explained.headline == report.verdict.headline
        assert not report.verdict.good
        assert {group.tuned_ms for group in report.map.groups} == {None}
        assert {group.state for group in report.map.groups} <= {"float", "computing shapes", "computed in advance"}
        assert report.verdict.headline in render(report, {})
    rows = {node: row for row in explained.rows for node in row.nodes}
    for node, (state, reason, words) in REASONS.get(name, {}).items():
        assert (rows[node].state, rows[node].reason) == (state, reason)
        assert words in rows[node].detail
    if name == "no times":
        assert all(row.ms is None and row.source != "estimated" for row in explained.rows)
        assert "measured no layers" in explained.table().caption
        assert tally(explained.rows)[0].ms is None
    if name == "not exact enough":  # what is built first waits for no noise of single tensors
        kinds = [row["kind"] for row in lines(folder / "autotuner_state.yaml")]
        assert kinds.index("trial") < kinds.index("sensitivity")


def test_the_summary_is_about_the_file_that_ships_and_a_row_says_which_candidate_that_is(folder: Path) -> None:
    run, report, final = read_run(folder), report_of_run(folder), load(folder / "optimized_final.onnx")
    placement = placement_in(load(folder / "baseline.onnx"), final)
    summary, told = run.summary, {fact.name: fact.value for fact in report.facts}
    assert (summary["pairs"], summary["edges"]) == (count_pairs(placement), len(placement))
    assert summary["final_ms"] / summary["baseline_ms"] == pytest.approx(summary["ratio"])
    assert told["tensors with a Q/DQ pair"] == str(summary["pairs"])
    if run.keeps_own_pairs:
        assert told["latency"] == f"{summary['final_ms']:.3f} ms"
        assert told["output SQNR against float"].startswith(f"{summary['output_sqnr_db']:.1f} dB")
        assert f"takes {summary['final_ms']:.4g} ms" in report.verdict.meaning
    shipped = [candidate for candidate in report.candidates if candidate.ships]
    assert len(shipped) == (0 if run.trial is None else 1)
    assert all("optimized_final.onnx" in candidate.told for candidate in shipped)


# The map: groups in the order in which values flow, in rows
def test_groups_stand_behind_those_that_they_read_from() -> None:
    model = conv_net()
    rows = [Explanation((node.name,), (node.op,), "float", "", None, None) for node in reversed(model.nodes)]
    drawn = draw(model, rows, {})
    names = [node.name for group in drawn.groups for node in group.nodes]
    assert names == [node.name for node in model.nodes]
    kernel = [group.name for group in drawn.groups[:2]]
    fused = draw(model, rows, {}, kernels=[kernel])
    assert [node.name for node in fused.groups[0].nodes[:2]] == kernel
    assert len(fused.groups) == len(drawn.groups) - 1


def named(*names: str) -> list[MapGroup]:
    return [MapGroup((MapNode(name, "Conv", "float"),), "Conv", "float", 1.0, 0.5, 0.1, None) for name in names]


def test_a_block_that_repeats_is_one_row_and_other_rows_end_with_modules() -> None:
    layers = [f"/m/layers.{layer}/{part}/MatMul" for layer in range(4) for part in "ab"]
    groups = named("/stem/Conv", *layers, "/head/a/Gemm", "/head/b/Gemm")
    first, block, last = rows_of(groups, ["stem", *"ab" * 4, "c", "d"])
    assert (first.name, last.name, block.name, block.times) == (
        "stem",
        "head/a to head/b",
        "m/layers.0 to m/layers.3",
        4,
    )
    assert [(group.name, group.count, group.float_ms) for group in block.groups] == [(n, 4, 4.0) for n in layers[:2]]
    assert [len(row.groups) for row in (first, block, last)] == [1, 2, 2]
    plain = rows_of(named(*(f"Conv_{n}" for n in range(100))), range(100))
    assert [(row.name, len(row.groups)) for row in plain[:2]] == [("Conv_0 to Conv_39", 40), ("Conv_40 to Conv_79", 40)]
    modules = rows_of(named(*(f"/features/{n // 10}/{n}/Conv" for n in range(30))), range(30))
    assert [row.name for row in modules] == ["features/0", "features/1", "features/2"]


# Counts and names as text: the same wherever people read of them
@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("a/model.onnx", "a/model.onnx"),
        ("x/a/model.onnx", "a/model.onnx"),
        ("a/m.onnx", "m.onnx"),
        ("/model.onnx", "model.onnx"),
    ],
)
def test_titles_name_the_folder_of_a_usual_name(path: str, told: str) -> None:
    assert title(Path(path)) == told


@pytest.mark.parametrize(
    ("accuracy", "told", "short", "cell"),
    [
        (Accuracy(24.06, 18.0, 31.0, samples=3), "24.1 dB (18.0 to 31.0 over 3 samples)", "24.1 dB", "24.1"),
        (Accuracy(24.06, agreement=0.5), "24.1 dB, 50.0% of the integers equal", "24.1 dB", "24.1"),
        (Accuracy(agreement=0.5), "50.0% of the integers equal", "50.0% of the integers equal", ""),
        (Accuracy(agreement=1.0, samples=3), "exact, 100.0% of the integers equal", "exact", "exact"),
        (Accuracy(top1=1.0), "exact, 100.0% of the best classes equal", "exact", "exact"),
        (Accuracy(), "exact", "exact", "exact"),
    ],
)
def test_how_close_outputs_are_is_told_alike_everywhere(accuracy: Accuracy, told: str, short: str, cell: str) -> None:
    equal = equal_share(accuracy)
    here = (closeness_of(accuracy), closeness(accuracy.sqnr_db, equal), closeness_cell(accuracy.sqnr_db, equal))
    assert here == (told, short, cell)


# Charts: where marks stand follows from values, and what lies outside of an axis stands at its end
def test_values_have_their_place_on_an_axis_and_ticks_are_round() -> None:
    axis = Axis(1.0, 3.0)
    assert [axis.place(value) for value in (0.5, 1.0, 1.5, 3.0, 9.0)] == [0.0, 0.0, 25.0, 100.0, 100.0]
    assert axis.ticks(4) == (1.0, 1.5, 2.0, 2.5, 3.0)
    assert spanning([2.0, 4.0], pad=0.1) == Axis(1.8, 4.2)
    assert spanning([5.0], pad=0.1).low < 5.0 < spanning([5.0], pad=0.1).high


def test_equal_outputs_stand_at_the_top_of_the_chart_of_points() -> None:
    points = [
        Point(name, Ratio(speed, None, None), db, False, True, True)
        for name, speed, db in (("a", 1.5, 20.0), ("b", 1.2, None))
    ]
    chart = scatter(points, floor_db=30.0, height=100)
    assert chart.down(None) == 0.0
    assert 0.0 < chart.down(30.0) < chart.down(20.0) < 100.0
    assert 0.0 < chart.x.place(1.0) < chart.x.place(1.2) < chart.x.place(1.5) < 100.0
