import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from engine_contract import IMAGE, EngineContract, built_by, conv_model, model_of, named, quantized_conv_model
from layer_reports import (
    CHAIN,
    RESIDUAL,
    RESIDUAL_INPUT,
    RESIDUAL_WEIGHTS,
    home,
    layers_of,
    quantized_mlp,
    random_array,
    text_model,
)
from models import build, feeds, normal, ranges
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.engines import onnxruntime as onnxruntime_layers
from qdqtune.engines.facts import CPU_PROVIDER, ENGINES, ONNXRUNTIME_SHARED, PROVIDERS
from qdqtune.engines.fallback import fallback
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.library_settings import OnnxRuntimeOptions
from qdqtune.engines.onnxruntime import OnnxRuntime, assigned_layers, elsewhere, own_words
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import allowed
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import insert
from qdqtune.types import Placement
from rewrite_nets import MERGED as NETS
from rewrite_nets import net

CPU = ENGINES["onnxruntime"]


class TestOnnxRuntime(EngineContract):
    spec = EngineSpec("onnxruntime")
    saved = "saved.onnx"
    subjects = (*EngineContract.subjects, "residual", "transformer, heads of 16", "weights of 8 bits")


def test_a_missing_provider_names_those_that_exist() -> None:
    with pytest.raises(EngineUnavailable, match=r"it has .*CPUExecutionProvider"):
        open_engine(EngineSpec("onnxruntime", {"provider": "NoSuchExecutionProvider"}))


@pytest.mark.parametrize("op", ["MaxPool", "Flatten", "Transpose"])
def test_onnxruntime_runs_shared_scale_operators_on_integers(tmp_path: Path, op: str) -> None:
    assert op in ONNXRUNTIME_SHARED
    attributes = "<kernel_shape = [2, 2]>" if op == "MaxPool" else ""
    text = f"""n (float[1,4,6,6] x) => (float[] y) {{
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) t = {op}{attributes}(d)
        u = QuantizeLinear(t, s, z) y = DequantizeLinear(u, s, z) }}"""
    model = build(text, {"s": np.float32(0.1), "z": np.uint8(3)}, opset=17).to_proto()
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ran = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert ran == ["QuantizeLinear", op, "DequantizeLinear"]


@pytest.mark.parametrize(
    ("ir_version", "opset", "words"),
    [
        (999, 17, "IR version 999 is later than its 1.: pip"),
        (10, 999, "Opset 999 is later than its 2.: pip"),
    ],
)
def test_a_later_onnx_is_refused_without_source_places(tmp_path: Path, ir_version: int, opset: int, words: str) -> None:
    model = model_of("y = Relu(x)", "2", opset=opset)
    model.ir_version = ir_version
    with pytest.raises(EngineFailure, match=f"^ONNX Runtime: {words}"):
        built_by(open_engine(EngineSpec("onnxruntime")), model, tmp_path)


def test_an_operator_that_does_not_exist_is_named(tmp_path: Path) -> None:
    model = model_of("y = Relu(x)", "2", opset=17)
    model.graph.node[0].domain = "my.ops"
    model.opset_import.add(domain="my.ops", version=1)
    with pytest.raises(EngineFailure, match=r"^ONNX Runtime: it has no my\.ops:Relu: export without it$"):
        built_by(open_engine(EngineSpec("onnxruntime")), model, tmp_path)


def test_what_fails_while_it_runs_begins_with_the_node(tmp_path: Path) -> None:
    model = build("n (int64[1] x) => (float[1,4] y) { [look] y = Gather(w, x) }", {"w": normal(8, 4)})
    built = built_by(open_engine(EngineSpec("onnxruntime")), model.to_proto(), tmp_path)
    with pytest.raises(EngineFailure, match=r"^ONNX Runtime: Gather node\. Name:'look' .*range \[-8,7\]"):
        built.run({"x": np.array([9])})


def test_onnxruntime_saves_a_model_that_computes_the_same(tmp_path: Path) -> None:
    engine = open_engine(EngineSpec("onnxruntime"))
    built = built_by(engine, text_model(RESIDUAL, RESIDUAL_WEIGHTS), tmp_path)
    built.save(tmp_path / "s.onnx")
    saved = onnx.load(tmp_path / "s.onnx")
    assert "FusedConv" in {node.op_type for node in saved.graph.node}
    assert not {node.domain for node in saved.graph.node} & {"com.microsoft.nchwc"}
    again = built_by(engine, saved, tmp_path).run(RESIDUAL_INPUT)["y"]
    np.testing.assert_allclose(again, built.run(RESIDUAL_INPUT)["y"], rtol=1e-4, atol=1e-5)


def test_graphs_of_cuda_are_refused() -> None:
    with pytest.raises(BadOption, match="enable_cuda_graph wants inputs in fixed places"):
        open_engine(EngineSpec("onnxruntime", {"provider_options": {"enable_cuda_graph": "1"}}))


# Layers that ONNX Runtime ran, and the nodes that a provider leaves to it, with the reason
def test_a_large_model_is_profiled_in_its_only_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = quantized_mlp()
    built = built_by(open_engine(EngineSpec("onnxruntime")), model, tmp_path)
    before, small = built.run(inputs), built.layers(inputs, 3)
    monkeypatch.setattr("qdqtune.engines.onnxruntime.LOADED_ONCE", 0)
    large = built.layers(inputs, 3)
    assert [(x.name, x.nodes, x.precision) for x in large] == [(x.name, x.nodes, x.precision) for x in small]
    assert all(x.time_ms for x in large if x.kind == "compute")
    after = built.run(inputs)
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], before[name]) for name in after)


def test_it_merges_a_gelu_in_float_but_not_behind_a_pair(tmp_path: Path) -> None:
    """The reason for `merges`: where the second assertion fails, ONNX Runtime has learned it."""
    save(net(NETS["gelu"][0], opset=18), tmp_path / "net.onnx")
    model = load(tmp_path / "net.onnx")  # nodes have names now
    merged = allowed("auto", ENGINES["onnxruntime"].merges).of(model)
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


def event(name: str, ts: int, dur: int, op: str = "") -> dict[str, Any]:
    """A kernel event as ONNX Runtime writes it."""
    types = [{"float": [4]}]
    arguments = {"op_name": op or name.title(), "input_type_shape": types, "output_type_shape": types}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": arguments}


def inference(number: int, *durations: int) -> list[dict[str, Any]]:
    """The events of the chain in one inference."""
    names = ("neg", "relu", "exp", "abs")
    return [event(name, 1000 * number + 100 * i, durations[i]) for i, name in enumerate(names)]


def times(tmp_path: Path, events: list[dict[str, Any]], plain_ms: float = 1.0) -> list[float | None]:
    onnx.save(text_model(CHAIN), tmp_path / "m.onnx")
    (tmp_path / "profile.json").write_text(json.dumps(events))
    model, files = Model(text_model(CHAIN)), (tmp_path / "m.onnx", tmp_path / "profile.json")
    return [layer.time_ms for layer in onnxruntime_layers.report(model, *files, [plain_ms / 1e3], CPU)]


def test_times_are_means_without_tails_and_without_the_first_inference(tmp_path: Path) -> None:
    events = [each for run, dur in enumerate((100, 10, 20, 23, 60)) for each in inference(run, *[dur] * 4)]
    session = {"cat": "Session", "name": "model_run", "ts": 0, "dur": 5000, "args": {}}
    assert times(tmp_path, [session, *reversed(events)]) == [0.02] * 4
    for some in (events[:-1], []):
        with pytest.raises(EngineFailure, match="does not show every node"):
            times(tmp_path, some)


@pytest.mark.parametrize(
    ("plain_ms", "expected"),
    [
        (0.056, [0.01, 0.026, 0.01, 0.01]),
        (0.083, [0.01, 0.053, 0.01, 0.01]),
        (0.051, [0.009, 0.024, 0.009, 0.009]),  # an overhead for each of five kernels
    ],
)
def test_a_node_with_a_body_takes_the_time_of_the_kernels_in_it(plain_ms, expected, tmp_path):
    """The profiler writes a line after each kernel, in the time of the node around it."""
    events = []
    for run in range(3):
        events += inference(run, 10, 80, 10, 10)
        at = 1000 * run + 100
        events += [event("conv", at + 5, 20), event("if", at + 35, 30), event("inner", at + 45, 6, "Neg")]
    assert times(tmp_path, events, plain_ms) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["m.onnx", "profile.json"])
def test_files_that_a_full_disk_has_cut_short_are_a_failure(tmp_path: Path, name: str) -> None:
    onnx.save(text_model(CHAIN), tmp_path / "m.onnx")
    (tmp_path / "profile.json").write_text("[]")
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-1])
    with pytest.raises(EngineFailure, match="cut short, as with no space left on the disk"):
        onnxruntime_layers.report(text_model(CHAIN).graph, tmp_path / "m.onnx", tmp_path / "profile.json", [0.001], CPU)


def test_overhead_of_the_profile_is_subtracted(tmp_path: Path) -> None:
    events = [each for run in range(3) for each in inference(run, 12, 22, 32, 1)]
    assert times(tmp_path, events, plain_ms=0.0601) == pytest.approx([0.01, 0.02, 0.03, 0.0001])
    assert times(tmp_path, events, plain_ms=0.1) == [0.012, 0.022, 0.032, 0.001]
    assert sum(times(tmp_path, events, plain_ms=0.001)) == pytest.approx(0.0067)


def test_kernels_in_the_body_of_a_node_do_not_count_twice(tmp_path: Path) -> None:
    one = [event("neg", 0, 5), event("relu", 10, 50), event("exp", 20, 9), event("relu", 30, 9),
           event("exp", 70, 5), event("abs", 80, 5)]  # fmt: skip
    two = [{**e, "ts": e["ts"] + 1000} for e in one]
    assert times(tmp_path, one + two) == [0.005, 0.05, 0.005, 0.005]


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


QNN = ENGINES["qnn"]

LOG = """
[W:onnxruntime:, x.cc:5 CreateQnnNode] QNN.backendValidateOpConfig() failed for node `gemm` of type `F` with 3\x1b[m
[V:onnxruntime:, x.cc:1 LogNodeSupport] Validation PASSED for 1 nodes in OrtNodeUnit (Conv) :
\tOperator type: Conv Node name: conv Node index: 1

[V:onnxruntime:, x.cc:1 LogNodeSupport] Validation FAILED for 2 nodes in OrtNodeUnit (Gemm) :
\tOperator type: DequantizeLinear Node name: dq/duplicated Node index: 2
\tOperator type: Gemm Node name: gemm Node index: 3
\tREASON : Failed to add node.

"""


def test_a_provider_is_quoted() -> None:
    told = own_words(QNN, LOG)
    assert told["dq"] == "Failed to add node"
    assert told["gemm"] == "QNN.backendValidateOpConfig() failed for node `gemm` of type `F` with 3"
    assert "conv" not in told


@pytest.mark.parametrize(
    ("name", "ep", "told", "words"),
    [
        ("qnn", CPU_PROVIDER, {"n": "failed"}, "on the CPU: failed"),
        ("cuda", CPU_PROVIDER, {}, "on the CPU: CUDAExecutionProvider says no reason; https://"),
        ("qnn", "CUDAExecutionProvider", {}, "on CUDAExec"),
    ],
)
def test_a_node_elsewhere_has_the_words_of_the_provider(name, ep, told, words) -> None:
    assert elsewhere("n", ep, ENGINES[name], told).startswith(words)


def test_parts_are_layers_and_nodes_elsewhere_as_well() -> None:
    model = Model(named(quantized_conv_model(QNN.numbers)))
    names = [(node.name, node.op) for node in model.nodes]
    first, *inside = names
    found = assigned_layers(model, [(CPU_PROVIDER, [first]), (QNN.ep, inside)], QNN, "")
    ran = [(x.kind, bool(x.elsewhere)) for x in found if x.kind != "folded"]
    assert ran == [("quantize", True), ("compute", False)]
    assert {n for x in found for n in x.nodes} == {name for name, _ in names}
    assert found[1].precision == "INT8"
    assert all(x.time_ms is None for x in found if x.kind != "folded")


@pytest.mark.parametrize("table", [replace(QNN, name="cpu", options={}, simulated_on=()), ENGINES["cuda"]])
@pytest.mark.parametrize("ep", [CPU_PROVIDER, "SomeOtherProvider"])
def test_where_nodes_run_is_read_back_from_a_session(ep, table, tmp_path) -> None:
    """A table is put over the CPU's provider: all nodes run on it; or, if it has another name, elsewhere. There are
    times where nothing is compiled."""
    engine = OnnxRuntime(OnnxRuntimeOptions())
    engine.table = replace(table, ep=ep)
    found = built_by(engine, conv_model(), tmp_path).layers(IMAGE, 4)
    ran = fallback(load(tmp_path / "m.onnx"), found)
    assert (len(ran.left), ran.borders) == (0 if ep == CPU_PROVIDER else 2, ())
    assert all(left.reason.startswith("on the CPU: ") for left in ran.left)
    assert ran.ms is None if table.compiles else (ran.ms or 0.0) > 0 or not ran.left


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_provider_that_is_here_runs_and_tells_where(name, tmp_path) -> None:
    try:
        engine = open_engine(EngineSpec(name))
    except EngineUnavailable as error:
        pytest.skip(str(error))
    sample = {"x": IMAGE["x"][:1]}
    model = quantized_conv_model(engine.numeric_format("int8"), relu=False)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    built = built_by(engine, model, tmp_path)
    exact = open_engine(EngineSpec("onnxruntime", {"fuse": False})).build(tmp_path / "m.onnx", tmp_path / "cpu.log")
    np.testing.assert_allclose(built.run(sample)["y"], exact.run(sample)["y"], atol=0.1)
    ran = fallback(load(tmp_path / "m.onnx"), built.layers(sample, 4))
    assert ran.nodes > len(ran.left)
    assert all(left.reason.startswith("on ") for left in ran.left)
    if ENGINES[name].words:
        assert all("says no reason" not in left.reason for left in ran.left)


def test_a_gpu_is_named_by_its_driver(monkeypatch) -> None:
    engine = OnnxRuntime(OnnxRuntimeOptions())
    assert "driver" not in engine.describe()
    asked = list[tuple[str, ...]]()
    monkeypatch.setattr("qdqtune.engines.devices.gpus_here", lambda: ("2", "3"))
    monkeypatch.setattr("qdqtune.engines.devices.nvidia_smi", lambda *a: (asked.append(a) or [["H100", "550"]], ""))
    engine.table = ENGINES["cuda"]
    told = engine.describe()
    assert (told["engine"], told["device"], told["driver"]) == ("cuda", "H100", "550")
    assert asked == [("name,driver_version", "--id=2")]


def test_a_simulator_is_named_as_one(monkeypatch) -> None:
    monkeypatch.setattr("qdqtune.engines.onnxruntime.simulated", lambda name: "a simulator")
    monkeypatch.setattr("qdqtune.engines.onnxruntime.metadata.version", lambda name: "2.7")
    engine = OnnxRuntime(OnnxRuntimeOptions())
    engine.table = QNN
    assert engine.describe()["device"].startswith("simulator on ")
    assert engine.describe()["plugin"] == "2.7"


def test_times_of_few_inferences_are_those_that_other_work_left_alone() -> None:
    quiet, disturbed = [1.0, 1.0, 1.1, 0.9] * 3, [9.0, 1.0, 7.0, 1.0, 1.1, 0.9, 8.0, 1.0, 9.0, 1.1, 1.0, 5.0]
    assert onnxruntime_layers.trimmed_mean(disturbed) == pytest.approx(1.0, abs=0.05)
    assert onnxruntime_layers.trimmed_mean(quiet) == pytest.approx(1.0)
    for few, mean in (([3.0], 3.0), ([2.0, 9.0], 2.0), ([1.0, 2.0, 8.0, 9.0], 2.0)):
        assert onnxruntime_layers.trimmed_mean(few) == mean
    assert onnxruntime_layers.trimmed_mean([3.0] * 60 + [4.0] * 40) == pytest.approx(3.3), "resolves shares of its unit"
