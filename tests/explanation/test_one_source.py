"""What `explain` and the page of a run tell of its nodes adds up to what was measured, in many runs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import INT8, build, normal, ranges
from qdqtune.commands.explain import explain_run
from qdqtune.engines import EngineSpec
from qdqtune.explanation.charts import longest
from qdqtune.explanation.report import OWN, report_of_run
from qdqtune.graph.loading import load, load_proto
from qdqtune.graph.model import Model
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import count_pairs, placement_in
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.finished import read_run
from qdqtune.tuning.loop import tune
from runs import hopeless, mixed, settings, write
from workers import in_process


def swishing(width: int = 128) -> Model:
    """Two products with a HardSwish of four nodes between them, which a rewrite makes one."""
    text = f"""net (float[8,8,{width}] x) => (float[8,8,8] y) {{
        [first] a = MatMul(x, w0) [plus] p = Add(a, three) [clip] q = Clip(p, zero, six) [times] r = Mul(a, q)
        [sixth] b = Div(r, six) [second] c = MatMul(b, w1) [relu] d = Relu(c) [head] y = MatMul(d, w2)
    }}"""
    numbers = {name: np.float32(value) for name, value in (("zero", 0), ("three", 3), ("six", 6))}
    weights = {"w0": normal(width, width, scale=0.1), "w1": normal(width, width, scale=0.1), "w2": normal(width, 8)}
    return build(text, weights | numbers)


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
    **{mode: (mixed, {"mode": mode, **FEW}) for mode in ("cut", "region", "subgraph")},
    "nothing faster": (hopeless, {"mode": "cut", **FEW}),
    "reshaped": (reshaped, {"mode": "subgraph", **FEW}),
    "front": (mixed, {"mode": "cut", "front": True, "builds": 25}),
    "rewrites": (swishing, {"mode": "cut", "rewrites": "auto", **FEW}),
    "rewrites alone": (lambda: swishing(8), {"mode": "cut", "rewrites": "auto", **FEW}),
    "dynamic": (lambda: mixed(batch=None), {"mode": "cut", "calibration_data": None, "seed": 3,
                                            "input_shapes": {"x": (4, 64, 64)}, **FEW}),
    "fixed": (scaled, {"mode": "cut", "fix_inputs": {"k": 2}, **FEW}),
    "no times": (mixed, {"mode": "region", "engine": EngineSpec("fake", {"hide_times": True}), **FEW}),
    "several threads": (mixed, {"mode": "cut", "engine": EngineSpec("fake", {"threads": 1}),
                                "threads": (1, 2), **FEW}),
    "nothing tried": (mixed, {"mode": "cut", "time_budget": 1e-3, **FEW}),
    "no pair on most": (mixed, {"mode": "cut", "node_filter": ("first",), **FEW}),
    "not exact enough": (mixed, {"mode": "cut", "min_sqnr": 45.0, **FEW}),
    "onnxruntime": (mixed, {"mode": "cut", **ORT}),
    "own pairs": (paired, OWN_PAIRS),
    "own pairs on onnxruntime": (paired, {**ORT, **OWN_PAIRS}),
}  # fmt: skip


@pytest.fixture(scope="session", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in RUNS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a finished run, which one worker of pytest-xdist makes for all tests of it."""
    made, changes = RUNS[request.param]
    model = write(made(), tmp_path_factory.mktemp("run"))
    with in_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("qdqtune.commands.tune.usual_threads", lambda _=None: 1)
        tune(settings(model, **changes))
    return model.parent / "out"


def test_what_explain_and_the_page_tell_adds_up_to_what_was_measured(folder: Path) -> None:
    explained, report, run = explain_run(folder), report_of_run(folder), read_run(folder)
    rows, drawn = explained.rows, report.map
    assert drawn is not None
    assert {node.name: node.why for node in drawn.nodes} == {name: row.why for row in rows for name in row.nodes}
    assert all(row.why for row in rows)
    hidden = [group for group in drawn.groups if group.precision in ("folded", "shapes")]
    boxes = [group for group in drawn.groups if group not in hidden]
    assert drawn.groups == (*boxes, *hidden)
    assert not any("Reshape" in box.label for box in boxes)
    assert {"asks", "picks", "listed", "joined"}.isdisjoint(drawn.nodes[n].name for box in boxes for n in box.nodes)
    if all(row.float_ms is None for row in rows):
        assert all(group.float_ms is None for group in drawn.groups)
        assert not report.bars
        return
    floats, ships = pytest.approx(run.float_ms), pytest.approx(run.here["final_ms"])
    assert run.here["final_ms"] is not None
    assert sum(row.float_ms or 0.0 for row in rows) == floats
    assert sum(tally.float_ms or 0.0 for tally in explained.tallies) == floats
    assert sum(group.float_ms or 0.0 for group in drawn.groups) == floats
    assert sum(bar.float_ms for bar in report.bars) == floats
    assert f"{run.float_ms:.4g} ms" in report.bars_lead
    assert sum(row.ms or 0.0 for row in rows) == ships
    assert sum(tally.ms or 0.0 for tally in explained.tallies) == ships
    if run.placement:
        assert drawn.tuned in ("tuned", OWN)
        assert f"{run.here['final_ms']:.4g} ms" in report.bars_lead
        assert sum((group.tuned_ms or 0.0) + group.conversion_ms for group in drawn.groups) == ships
        assert sum((bar.tuned_ms or 0.0) + bar.conversion_ms for bar in report.bars) == ships
    assert longest(report.bars) >= max(max(bar.float_ms, bar.tuned_ms or 0.0) for bar in report.bars)


def test_the_summary_is_about_the_file_that_ships_and_a_row_says_which_candidate_that_is(folder: Path) -> None:
    run, report, final = read_run(folder), report_of_run(folder), load(folder / "optimized_final.onnx")
    placement = placement_in(load(folder / "baseline.onnx"), final)
    summary, told = run.summary, {fact.name: fact.value for fact in report.facts}
    assert (summary["pairs"], summary["edges"]) == (count_pairs(placement), len(placement))
    assert summary["final_ms"] is not None
    assert summary["final_ms"] / summary["baseline_ms"] == pytest.approx(summary["ratio"])
    assert told["tensors with a Q/DQ pair"] == str(summary["pairs"])
    if run.keeps_own_pairs:
        assert told["latency"] == f"{summary['final_ms']:.3f} ms"
        assert told["output SQNR against float"].startswith(f"{summary['output_sqnr_db']:.1f} dB")
        assert f"takes {summary['final_ms']:.4g} ms" in report.verdict.meaning
    shipped = [candidate for candidate in report.candidates if candidate.ships]
    assert len(shipped) == (0 if run.trial is None else 1)
    assert all("optimized_final.onnx" in candidate.told for candidate in shipped)
