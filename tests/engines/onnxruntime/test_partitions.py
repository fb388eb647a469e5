"""Which nodes run where, and why: from ONNX Runtime's assignment and from a provider's log."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engine_contract import IMAGE, conv_model, quantized_conv_model
from qdqtune.engines import CPU_PROVIDER, EngineSpec, open_engine
from qdqtune.engines.fallback import fallback
from qdqtune.engines.onnxruntime.engine import OnnxRuntime
from qdqtune.engines.onnxruntime.layers import assigned_layers, elsewhere, own_words
from qdqtune.engines.onnxruntime.options import OnnxRuntimeOptions
from qdqtune.engines.providers import PROVIDERS
from qdqtune.errors import EngineFailure, EngineUnavailable
from qdqtune.graph.loading import load

QNN = PROVIDERS["qnn"]

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
    assert elsewhere("gemm", "Gemm", CPU_PROVIDER, QNN, told).startswith("on the CPU: QNN.backendValidateOpConfig()")


@pytest.mark.parametrize(
    ("name", "op", "words"),
    [
        ("cuda", "Shape", "on the CPU: ONNX Runtime computes shapes there"),
        ("ort-openvino", "QLinearConv", "on the CPU: QLinearConv is an operator on integers of ONNX Runtime's CPU"),
        ("cuda", "NonZero", "on the CPU: CUDAExecutionProvider says no reason; https://"),
    ],
)
def test_where_a_provider_says_nothing_the_rule_of_its_table_is_told(name, op, words) -> None:
    assert elsewhere("n", op, CPU_PROVIDER, PROVIDERS[name], {}).startswith(words)


def test_another_provider_is_named() -> None:
    assert elsewhere("n", "Add", "CUDAExecutionProvider", PROVIDERS["ort-tensorrt"], {}).startswith("on CUDAExec")


def test_parts_are_layers_and_nodes_elsewhere_as_well() -> None:
    graph = quantized_conv_model(QNN.numbers).graph
    names = [(node.name, node.op_type) for node in graph.node]
    first, *inside = names
    found = assigned_layers(graph, [(CPU_PROVIDER, [first]), (QNN.ep, inside)], QNN, "")
    ran = [(x.kind, bool(x.elsewhere)) for x in found if x.kind != "folded"]
    assert ran == [("quantize", True), ("compute", False)]
    assert {n for x in found for n in x.nodes} == {name for name, _ in names}
    assert found[1].precision == "INT8"
    assert all(x.time_ms is None for x in found if x.kind != "folded")


def test_nodes_in_a_body_count_with_their_if() -> None:
    branch = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["b"], name="inner")], "b",
        [], [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)],
    )  # fmt: skip
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch, else_branch=branch)
    graph = helper.make_graph([node], "g", [], [])
    found = assigned_layers(graph, [(CPU_PROVIDER, [("if", "If")]), (CPU_PROVIDER, [("inner", "Relu")])], QNN, "")
    assert [x.nodes for x in found] == [("if",)]


@pytest.mark.parametrize("ep", [CPU_PROVIDER, "SomeOtherProvider"])
def test_the_assignment_is_read_back_from_a_session(ep, tmp_path) -> None:
    """A table is put over the CPU's provider: all nodes run on it; or, if it has another name, elsewhere."""
    onnx.save(conv_model(), tmp_path / "m.onnx")
    engine = OnnxRuntime(OnnxRuntimeOptions())
    engine.table = replace(QNN, name="cpu", ep=ep, options={}, simulated_on=())
    found = engine.build(tmp_path / "m.onnx", tmp_path / "log").layers(IMAGE, 1)
    ran = fallback(load(tmp_path / "m.onnx"), found)
    assert (ran.nodes, len(ran.left), ran.borders) == (2, 0 if ep == CPU_PROVIDER else 2, ())
    assert all(left.reason.startswith("on the CPU: ") for left in ran.left)


@pytest.mark.parametrize("ep", [CPU_PROVIDER, "SomeOtherProvider"])
def test_a_provider_that_compiles_nothing_has_times(ep, tmp_path) -> None:
    onnx.save(conv_model(), tmp_path / "m.onnx")
    engine = OnnxRuntime(OnnxRuntimeOptions())
    engine.table = replace(PROVIDERS["cuda"], ep=ep)
    found = engine.build(tmp_path / "m.onnx", tmp_path / "log").layers(IMAGE, 4)
    ran = fallback(load(tmp_path / "m.onnx"), found)
    assert len(ran.left) == (0 if ep == CPU_PROVIDER else 2)
    assert ran.ms is not None
    assert (ran.ms > 0) is bool(ran.left)


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_provider_that_is_here_runs_and_tells_where(name, tmp_path) -> None:
    try:
        engine = open_engine(EngineSpec(name))
    except EngineUnavailable as error:
        pytest.skip(str(error))
    sample = {"x": IMAGE["x"][:1]}
    model = quantized_conv_model(engine.numeric_format("int8"), relu=False)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "m.onnx")
    built = engine.build(tmp_path / "m.onnx", tmp_path / "log")
    exact = open_engine(EngineSpec("onnxruntime", {"fuse": False})).build(tmp_path / "m.onnx", tmp_path / "cpu.log")
    np.testing.assert_allclose(built.run(sample)["y"], exact.run(sample)["y"], atol=0.1)
    ran = fallback(load(tmp_path / "m.onnx"), built.layers(sample, 4))
    assert ran.nodes > len(ran.left)
    assert all(left.reason.startswith("on ") for left in ran.left)
    if PROVIDERS[name].words:
        assert all("says no reason" not in left.reason for left in ran.left)


def test_a_gpu_is_named_by_its_driver(monkeypatch) -> None:
    engine = OnnxRuntime(OnnxRuntimeOptions())
    assert "driver" not in engine.describe()
    asked = list[tuple[str, ...]]()
    monkeypatch.setattr("qdqtune.engines.devices.gpus_here", lambda: ("2", "3"))
    monkeypatch.setattr("qdqtune.engines.devices.nvidia_smi", lambda *a: (asked.append(a) or [["H100", "550"]], ""))
    engine.table = PROVIDERS["cuda"]
    told = engine.describe()
    assert (told["engine"], told["device"], told["driver"]) == ("cuda", "H100", "550")
    assert asked == [("name,driver_version", "--id=2")]


def test_a_simulator_is_named_as_one(monkeypatch) -> None:
    monkeypatch.setattr("qdqtune.engines.onnxruntime.engine.is_simulated", lambda name: True)
    monkeypatch.setattr("qdqtune.engines.onnxruntime.engine.metadata.version", lambda name: "2.7")
    engine = OnnxRuntime(OnnxRuntimeOptions())
    engine.table = QNN
    assert engine.describe()["device"].startswith("simulator on ")
    assert engine.describe()["plugin"] == "2.7"


def test_an_onnxruntime_that_does_not_tell_is_refused(monkeypatch, tmp_path) -> None:
    onnx.save(conv_model(), tmp_path / "m.onnx")
    engine = OnnxRuntime(OnnxRuntimeOptions())
    engine.table = replace(QNN, ep=CPU_PROVIDER, options={})
    built = engine.build(tmp_path / "m.onnx", tmp_path / "log")
    name = "onnxruntime.capi.onnxruntime_inference_collection.Session.get_provider_graph_assignment_info"
    monkeypatch.delattr(name)
    with pytest.raises(EngineFailure, match=r"does not say where nodes run: install 1.24 or later"):
        built.layers(IMAGE, 1)
