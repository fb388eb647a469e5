import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from layer_reports import (
    CHAIN,
    home,
    layers_of,
    quantized_mlp,
    random_array,
    text_model,
)
from models import feeds, ranges
from qdqtune.engines import MERGED, EngineSpec, open_engine
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.onnxruntime import layers as onnxruntime_layers
from qdqtune.errors import EngineFailure
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import allowed
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import insert
from qdqtune.types import Layer, Placement
from rewrite_nets import MERGED as NETS
from rewrite_nets import net


def test_a_large_model_is_profiled_in_its_only_session(tmp_path: Path) -> None:
    model, inputs = quantized_mlp()
    onnx.save(model, tmp_path / "model.onnx")
    built = open_engine(EngineSpec("onnxruntime")).build(tmp_path / "model.onnx", tmp_path / "log")
    before, small = built.run(inputs), built.layers(inputs, 3)
    large = built.layers(inputs, 3, saves_memory=True)
    assert [(x.name, x.nodes, x.precision) for x in large] == [(x.name, x.nodes, x.precision) for x in small]
    assert all(x.time_ms for x in large if x.kind == "compute")
    after = built.run(inputs)
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], before[name]) for name in after)


def test_it_merges_a_gelu_in_float_but_not_behind_a_pair(tmp_path: Path) -> None:
    """The reason for `engines.MERGED`: where the second assertion fails, ONNX Runtime has learned it."""
    save(net(NETS["gelu"][0], opset=18), tmp_path / "net.onnx")
    model = load(tmp_path / "net.onnx")  # nodes have names now
    merged = allowed("auto", MERGED["onnxruntime"]).of(model)
    node, sample = next(n.name for n in model.nodes if n.op == "Erf"), feeds(model, 1)[0]

    def with_pair(graph: Model) -> onnx.ModelProto:
        numbers = numeric_format("onnxruntime", "int8")
        return insert(graph, Placement.of(graph.edges("x")), ranges(graph), numbers).to_proto()

    assert home(layers_of("onnxruntime", model.to_proto(), sample, tmp_path), node).nodes != (node,)
    assert home(layers_of("onnxruntime", with_pair(model), sample, tmp_path), node).nodes == (node,)
    assert node not in {n for x in layers_of("onnxruntime", with_pair(merged), sample, tmp_path) for n in x.nodes}


BRANCHES = """g (float[64,64] x, bool go) => (float[64,64] y) {
    [before] a = Tanh(x)
    [choice] b = If(go) <
        then_branch = g1 () => (float[64,64] t) { [inner] t0 = MatMul(a, a) [outer] t = Sin(t0) },
        else_branch = g2 () => (float[64,64] e) { [other] e = Cos(a) }
    >
    [after] y = Erf(b)
}"""


def test_time_in_a_body_counts_for_its_node(tmp_path: Path) -> None:
    layers = layers_of("onnxruntime", text_model(BRANCHES), {"x": random_array(64, 64), "go": np.array(True)}, tmp_path)
    assert [x.nodes for x in layers] == [("before",), ("choice",), ("after",)]
    assert all(x.time_ms is not None for x in layers)


def event(name: str, op: str, ts: int, dur: int) -> dict[str, Any]:
    """A kernel event as ONNX Runtime writes it."""
    types = [{"float": [4]}]
    arguments = {"op_name": op, "input_type_shape": types, "output_type_shape": types}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": arguments}


def report(tmp_path: Path, events: list[dict[str, Any]], plain_ms: float = 1.0) -> tuple[Layer, ...]:
    onnx.save(text_model(CHAIN), tmp_path / "m.onnx")
    (tmp_path / "profile.json").write_text(json.dumps(events))
    graph, files = text_model(CHAIN).graph, (tmp_path / "m.onnx", tmp_path / "profile.json")
    return onnxruntime_layers.report(graph, *files, 1, [plain_ms / 1e3])


def test_times_are_means_without_tails_and_without_the_first_inference(tmp_path: Path) -> None:
    chain = (("neg", "Neg"), ("relu", "Relu"), ("exp", "Exp"), ("abs", "Abs"))
    durations = (100, 10, 20, 23, 60)
    events = [event(name, op, 1000 * run + 100 * i, durations[run])
              for run in range(5) for i, (name, op) in enumerate(chain)]  # fmt: skip
    session = {"cat": "Session", "name": "model_run", "ts": 0, "dur": 5000, "args": {}}
    layers = report(tmp_path, [session, *reversed(events)])
    assert [x.time_ms for x in layers] == [0.0215] * 4
    with pytest.raises(EngineFailure, match="does not show every node"):
        report(tmp_path, events[:-1])
    with pytest.raises(EngineFailure, match="does not show every node"):
        report(tmp_path, [])


@pytest.mark.parametrize("name", ["m.onnx", "profile.json"])
def test_files_that_a_full_disk_has_cut_short_are_a_failure(tmp_path: Path, name: str) -> None:
    onnx.save(text_model(CHAIN), tmp_path / "m.onnx")
    (tmp_path / "profile.json").write_text("[]")
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-1])
    with pytest.raises(EngineFailure, match="cut short, as with no space left on the disk"):
        onnxruntime_layers.report(text_model(CHAIN).graph, tmp_path / "m.onnx", tmp_path / "profile.json", 1, [0.001])


def test_overhead_of_the_profile_is_subtracted(tmp_path: Path) -> None:
    chain = (("neg", "Neg", 12), ("relu", "Relu", 22), ("exp", "Exp", 32), ("abs", "Abs", 1))
    events = [
        event(name, op, 1000 * run + 100 * i, spent) for run in range(3) for i, (name, op, spent) in enumerate(chain)
    ]
    times = [x.time_ms for x in report(tmp_path, events, plain_ms=0.0601)]
    assert times == pytest.approx([0.01, 0.02, 0.03, 0.0001])
    assert [x.time_ms for x in report(tmp_path, events, plain_ms=0.1)] == [0.012, 0.022, 0.032, 0.001]
    assert sum(x.time_ms or 0.0 for x in report(tmp_path, events, plain_ms=0.001)) == pytest.approx(0.0067)


def test_kernels_in_the_body_of_a_node_do_not_count_twice(tmp_path: Path) -> None:
    one = [event("neg", "Neg", 0, 5), event("relu", "Relu", 10, 50), event("exp", "Exp", 20, 9),
           event("relu", "Relu", 30, 9), event("exp", "Exp", 70, 5), event("abs", "Abs", 80, 5)]  # fmt: skip
    two = [{**e, "ts": e["ts"] + 1000} for e in one]
    assert [x.time_ms for x in report(tmp_path, one + two)] == [0.005, 0.05, 0.005, 0.005]


def test_onnxruntime_names_what_it_inserts(tmp_path: Path) -> None:
    text = """g (float[2,6,16] x) => (float[2,6,8] y) {
        [product] a = MatMul(x, w)
        [bias] y = Add(a, b)
    }"""
    model = text_model(text, {"w": random_array(16, 8), "b": random_array(8)})
    layers = layers_of("onnxruntime", model, {"x": random_array(2, 6, 16)}, tmp_path)
    assert [(x.kind, x.nodes) for x in layers] == [
        ("reformat", ()), ("compute", ("product", "bias")), ("reformat", ())
    ]  # fmt: skip
