"""Whole runs of subgraph mode: what they write, that they go on where they were, and what goes wrong on the way."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Call
from models import build, feeds, normal, run
from qdqtune.engines import EngineSpec
from qdqtune.graph.loading import load
from qdqtune.timing.ratios import Plan
from qdqtune.tuning import subgraph_mode as prepare
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import Result
from runs import cost, mixed, mixed_run, settings, write
from trtexec_stand_in import calls, stand_in
from workers import Build, Workers


def profiling(folder: Path) -> dict[str, dict[str, Any]]:
    """What was measured of each kind of groups, by the first node of the first one."""
    content = json.loads((folder / "out" / "autotune_cache.json").read_text())
    return {row["groups"][0][0]: row for row in content["profiling"]}


ONCE = Plan((1,), error=0.4, turn_seconds=0.0, warmup=0)
pytestmark = pytest.mark.usefixtures("workers")


def test_it_finds_what_cut_mode_finds_and_writes_its_files(tmp_path: Path) -> None:
    result = mixed_run(tmp_path, "subgraph")
    out = tmp_path / "out"
    best = tune(settings(tmp_path / "model.onnx", mode="cut", builds=12, output_dir=tmp_path / "cut"))
    assert result.summary["ratio"] == pytest.approx(best.summary["ratio"], rel=1e-6)
    assert result.summary["mode"] == "subgraph"
    assert cost(out / "optimized_final.onnx") < cost(out / "baseline.onnx")
    assert cost(out / "optimized_raw.onnx") == pytest.approx(cost(out / "optimized_final.onnx"))
    assert result.summary["builds"] == 6  # the float model, and these:
    cache = json.loads((out / "autotune_cache.json").read_text())
    assert [t["origin"] for t in cache["validation"]] == ["all groups", "rules", "static", "compute", "cut"]
    assert all(group["schemes_ms"] for group in cache["profiling"])
    assert not list(out.glob("*.new"))
    (sample,) = feeds(mixed(), 1)
    for part in (out / "subgraphs").glob("group_*.onnx"):
        model = load(part)
        assert all(v.type.tensor_type.shape.dim for v in model.proto.graph.input)
        (made,) = run(model, feeds(model, 1))
        assert all(np.isfinite(values).all() for values in made.values())
    assert {p.name for p in (out / "subgraphs").iterdir()} >= {"group_001.onnx", "constants.bin"}
    assert run(load(out / "optimized_raw.onnx"), [sample])[0].keys() == {"y"}
    rows = profiling(tmp_path)
    nodes = {name for row in rows.values() for group in row["groups"] for name in group}
    assert {"first", "relu", "second", "skip", "softmax", "third"} <= nodes <= {n.name for n in mixed().nodes}
    assert min(rows["second"]["schemes_ms"].values()) < rows["second"]["float_ms"]
    assert min(rows["softmax"]["schemes_ms"].values()) >= rows["softmax"]["float_ms"]
    assert {edge.node for edge in result.placement} >= {"first", "second"}


def test_groups_of_a_given_file(tmp_path: Path, call: Call) -> None:
    model, graph = write(mixed(), tmp_path), tmp_path / "graph.json"
    names = ["first + relu", "second + skip", "softmax", "third", "PWN(tanh)", "head"]
    graph.write_text(json.dumps({"Layers": [{"Name": name, "LayerType": "kernel"} for name in names]}))
    common = ["autotune", "-m", model, "-o", tmp_path / "out", "--engine", "fake", "--mode", "subgraph",
              "--mode", "quick", "--calibration-data", model.with_suffix(".npz"), "--graph-json", graph]  # fmt: skip
    code, _, _ = call(*common)
    assert code == 0
    assert profiling(tmp_path)["second"]["groups"] == [["second", "skip"]]
    graph.write_text(json.dumps({"Layers": ["first", "relu"]}))
    code, _, said = call(*common)
    assert code == 2
    assert "made with graph json" in said


def trt_run(folder: Path, program: str, **options: Any) -> Result:
    """A run on the stand-in for trtexec, with as few calls of it as can be."""
    model = build(
        "net (float[N,8] x) => (float[N,4] y) {[a] t = MatMul(x, w) [b] u = Relu(t) [c] y = MatMul(u, v)}",
        {"w": normal(8, 16, scale=0.1), "v": normal(16, 4, scale=0.1, seed=1)},
    )
    spec = EngineSpec("trtexec", {"trtexec": program, **options})
    return tune(settings(write(model, folder), mode="subgraph", engine=spec, plan=ONCE, proof=(1,), builds=2,
                         input_shapes={"x": (4, 8)}, calibration_data=None, precision="fp32"))  # fmt: skip


def test_trtexec_writes_the_groups_and_builds_parts_for_the_shapes_that_were_given(tmp_path: Path) -> None:
    text = "--minShapes=x:1x8 --optShapes=x:4x8 --maxShapes=x:16x8"
    program = stand_in(tmp_path, "10.16")
    result = trt_run(tmp_path, program, trtexec_args=text)
    out = tmp_path / "out"
    rows = profiling(tmp_path)
    assert [rows[name]["groups"] for name in sorted(rows)] == [[["a", "b"]], [["c"]]]
    assert min(rows["a"]["schemes_ms"].values()) < rows["a"]["float_ms"]
    exported = json.loads((out / "model.fp16.graph.json").read_text())
    assert any("a" in layer["Name"] for layer in exported["Layers"])
    assert "trtexec" in (out / "model.fp16.build.log").read_text()
    parts = [c for c in calls(tmp_path) if "group_" in c.get("onnx", "")]
    shaped = {(c["minShapes"], c["optShapes"], c["maxShapes"]) for c in parts}
    assert shaped == {("x:1x8", "x:4x8", "x:16x8"), ("u:1x16", "u:4x16", "u:16x16")}
    count = len(parts)
    again = trt_run(tmp_path, program, trtexec_args=text)
    assert len([c for c in calls(tmp_path) if "group_" in c.get("onnx", "")]) == count
    assert again.history == result.history


def test_trtexec_without_profiling_flags(tmp_path: Path) -> None:
    unknown = ["profilingVerbosity", "exportProfile", "exportLayerInfo"]
    program = stand_in(tmp_path, "8.6", unknown=unknown)
    result = trt_run(tmp_path, program)
    assert any("reports no layers" in note for note in result.notes)
    assert not (tmp_path / "out" / "model.fp16.graph.json").exists()
    assert all(row["schemes_ms"] for row in profiling(tmp_path).values())


def test_without_layer_times_total_latency_is_compared_and_a_note_says_so(tmp_path: Path) -> None:
    result = mixed_run(tmp_path, "subgraph", engine=EngineSpec("fake", {"hide_times": True}))
    assert result.improved
    assert any("total latency" in note for note in result.notes)


def test_groups_that_do_not_build_are_listed_and_skipped(tmp_path: Path) -> None:
    result = mixed_run(tmp_path, "subgraph", engine=EngineSpec("fake", {"faults": {"refuse": "softmax"}}))
    failures = profiling(tmp_path)["softmax"]["failures"]
    assert "no implementation" in failures["activation-only"]
    assert not any(edge.node == "softmax" for edge in result.placement)
    assert result.improved


def test_a_group_that_is_timed_when_the_time_is_over_ends_with_the_scheme_in_hand(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [False]
    monkeypatch.setattr(prepare.time, "monotonic", lambda: 1e9 * late[0])

    def refused(built: Build) -> None:
        late[0] |= built.path.parent.name == "subgraphs" and "." in built.path.stem

    workers.refused = refused
    result = mixed_run(tmp_path, "subgraph", time_budget=1e6)
    groups = [built.path.name for built in workers.builds if built.path.parent.name == "subgraphs"]
    assert len(groups) == 2  # the group in float, and one scheme
    assert any("no time was left" in row["failures"].values() for row in profiling(tmp_path).values())
    assert any(note.startswith("`time_budget` ended before") for note in result.notes)
    workers.builds.clear()
    again = mixed_run(tmp_path, "subgraph", time_budget=1e6)
    assert workers.builds
    assert len(again.history) >= len(result.history)
