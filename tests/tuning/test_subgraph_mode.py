"""Subgraph mode: whole runs, groups of layer reports, and groups as models of their own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from conftest import Call
from models import attention, build, conv_net, feeds, normal, ranges, run, tapped
from qdqtune.calibration.observe import observe
from qdqtune.engines import EngineSpec
from qdqtune.engines.tensorrt.options import Span
from qdqtune.errors import BadOption
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.placement.possible import possible_edges
from qdqtune.timing.ratios import Plan
from qdqtune.tuning import subgraph_groups as groups
from qdqtune.tuning import subgraph_mode as prepare
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import Result
from qdqtune.tuning.subgraph_groups import Resolved, borders, by_rules, extract, is_shape, resolve
from qdqtune.types import Layer
from runs import cost, mixed, mixed_run, settings, write
from trtexec_stand_in import calls, stand_in
from workers import Build

pytestmark = pytest.mark.usefixtures("workers")


def profiling(folder: Path) -> dict[str, dict[str, Any]]:
    """What was measured of each kind of groups, by the first node of the first one."""
    content = json.loads((folder / "out" / "autotune_cache.json").read_text())
    return {row["groups"][0][0]: row for row in content["profiling"]}


ONCE = Plan((1,), error=0.4, turn_seconds=0.0, warmup=0)


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
    assert "made with --graph-json" in said


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


def test_a_group_that_is_timed_when_the_time_is_over_ends_with_the_scheme_in_hand(tmp_path, workers, monkeypatch):
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


def reshaped() -> Model:
    text = """net (float[N,4,6] x) => (float[N,M,2] y) {
        [rows] s = Shape <start=0, end=1> (x)
        [wanted] t = Concat <axis=0> (s, minus, six)
        [reshape] a = Reshape(x, t)
        [product] b = MatMul(a, w)
        [relu] y = Relu(b)
        }"""
    return build(text, {"w": normal(6, 2), "minus": np.array([-1]), "six": np.array([6])})


@pytest.mark.parametrize("make", [conv_net, attention, tapped])
def test_a_part_computes_what_the_model_computes_there(make: Callable[[], Model]) -> None:
    model = make()
    (sample,) = feeds(model, 1)
    resolved = resolve(model, model, sample, {})
    tensors = [tensor for node in model.nodes for tensor in node.outputs if tensor]
    values = dict(observe(model, tensors, [sample], widen=False)) | sample
    for group in by_rules(model, possible_edges(model, ranges(model))).groups:
        nodes = [model.index_of[name] for name in group]
        reads, writes = borders(model, nodes)
        if not writes:  # nobody reads what it makes
            continue
        part = extract(model, nodes, resolved, {})
        onnx.checker.check_model(part.to_proto(), full_check=True)
        assert (part.inputs, part.outputs) == (reads, writes)
        (found,) = run(part, [{name: values[name] for name in reads}])
        for name in writes:
            np.testing.assert_allclose(found[name], values[name], rtol=1e-4, atol=1e-5)


def test_weights_are_those_of_the_model_not_copies() -> None:
    model = conv_net()
    resolved = resolve(model, model, feeds(model, 1)[0], {})
    for node in model.nodes:
        part = extract(model, [node.index], resolved, {})
        assert set(part.large) == set(model.large) & set(node.inputs)
        assert all(part.large[name] is model.large[name] for name in part.large)
        assert set(part.constants) == set(model.constants) & set(node.inputs)


def test_shapes_that_inference_cannot_find_are_looked_up_by_running_the_model() -> None:
    model = reshaped()
    sample = {"x": np.ones((3, 4, 6), np.float32)}
    shaped = with_input_shapes(model, {"x": (3, 4, 6)})
    assert resolve(model, model, sample, {}).sizes["b"] == (3, 4, 2)
    assert resolve(model, shaped, sample, {}).sizes["y"] == (3, 4, 2)


def test_shapes_that_nodes_compute_become_constants() -> None:
    model = reshaped()
    resolved = resolve(model, model, {"x": np.ones((3, 4, 6), np.float32)}, {})
    assert is_shape(model, "t", resolved.sizes)
    assert not is_shape(model, "a", resolved.sizes)
    part = extract(model, [model.index_of["reshape"]], resolved, {"t": np.array([3, -1, 6])})
    assert part.inputs == ("x",)
    assert run(part, [{"x": np.ones((3, 4, 6), np.float32)}])[0]["a"].shape == (3, 4, 6)


def test_sizes_that_vary_stay_open_in_a_part() -> None:
    model = build("net (float[N,8] x) => (float[N,8] y) {[a] t = MatMul(x, w) [b] y = Relu(t)}", {"w": normal(8, 8)})
    sample = {"x": np.ones((4, 8), np.float32)}
    shaped = with_input_shapes(model, {"x": (4, 8)})
    fixed = resolve(model, shaped, sample, {"x": Span((4, 8), (4, 8), (4, 8))})
    assert fixed.spans == {}
    assert extract(shaped, [1], fixed, {}).tensors["t"].shape == (4, 8)
    resolved = resolve(model, shaped, sample, {"x": Span((1, 8), (4, 8), (16, 8))})
    assert resolved.spans["t"] == ((1, 8), (4, 8), (16, 8))
    part = extract(shaped, [1], resolved, {})
    assert part.tensors["t"].shape == part.tensors["y"].shape == (None, 8)
    onnx.checker.check_model(part.to_proto(), full_check=True)


def test_a_border_of_unknown_type_is_refused() -> None:
    model = build("net (float[2] x) => (float[2] y) {[a] t = Relu(x) [b] y = Relu(t)}")
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.value_info[:]
    with pytest.raises(BadOption, match="type of tensor 't'"):
        extract(Model(proto, model.large), [1], Resolved({}), {})


def layer(name: str, *nodes: str, kind: str = "compute") -> Layer:
    return Layer(name, nodes, "FP32", 1.0, kind)


def exported(folder: Path, *names: str) -> Path:
    path = folder / "graph.json"
    path.write_text(json.dumps({"Layers": [{"Name": name, "LayerType": "Convolution"} for name in names]}))
    return path


def test_each_node_is_in_one_group_in_graph_order() -> None:
    model = conv_net()
    names = [node.name for node in model.nodes]
    report = [
        layer("b", names[2], names[1]),
        layer("a", names[0], names[2], "of no use"),
        layer("copy", kind="reformat"),
    ]
    found = groups.from_layers(model, report)
    assert found.groups[:2] == ((names[0],), (names[1], names[2]))
    assert [name for group in found.groups for name in group] == names
    assert found.nameless == ("copy",)


def test_nodes_that_are_computed_in_advance_are_in_no_group() -> None:
    model = conv_net()
    names = [node.name for node in model.nodes]
    found = groups.from_layers(model, [layer("folded", names[3], kind="folded")])
    assert found.folded == (names[3],)
    assert (names[3],) not in found.groups
    assert sorted([*found.folded, *(n for g in found.groups for n in g)]) == sorted(names)


def test_groups_of_a_file_that_tensorrt_wrote(tmp_path: Path) -> None:
    model = build(
        "net (float[1,8] x) => (float[1,8] y) {[a] t = MatMul(x, w) [b] u = Relu(t) [c] y = MatMul(u, v)}",
        {"w": normal(8, 200, scale=0.1), "v": normal(200, 8, seed=1)},
    )
    assert model.large  # its names are not in the protobuf, and still no strangers
    path = exported(tmp_path, "w + a + b", "Reformatting CopyNode for Input Tensor 0 to v + c", "v + c")
    found = groups.from_file(model, path)
    assert found.groups == (("a", "b"), ("c",))
    assert len(found.nameless) == 1


def test_an_unusable_report_is_refused_with_the_option_that_names_it(tmp_path: Path) -> None:
    path = exported(tmp_path, "somebody + else")
    with pytest.raises(BadOption, match=f"`graph_json` {path}: .*another model"):
        groups.from_file(conv_net(), path)
