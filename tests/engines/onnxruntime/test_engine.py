from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from engine_contract import EngineContract, model_of
from layer_reports import RESIDUAL, RESIDUAL_INPUT, RESIDUAL_WEIGHTS, text_model
from models import build, normal
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.engines.formats import ONNXRUNTIME_SHARED
from qdqtune.engines.onnxruntime.engine import Recording
from qdqtune.errors import EngineFailure, EngineUnavailable
from qdqtune.graph.saving import save


class TestOnnxRuntime(EngineContract):
    spec = EngineSpec("onnxruntime")
    saved = "saved.onnx"


class TestOnnxRuntimeThreads(EngineContract):
    spec = EngineSpec("onnxruntime", {"threads": 2})
    saved = "saved.onnx"


def test_a_missing_provider_names_those_that_exist() -> None:
    with pytest.raises(EngineUnavailable, match=r"it has .*CPUExecutionProvider"):
        open_engine(EngineSpec("onnxruntime", {"provider": "NoSuchExecutionProvider"}))


@pytest.mark.parametrize("op", ["MaxPool", "Flatten", "Transpose"])
def test_onnxruntime_runs_shared_scale_operators_on_integers(tmp_path: Path, op: str) -> None:
    assert op in ONNXRUNTIME_SHARED
    attributes = {"kernel_shape": [2, 2]} if op == "MaxPool" else {}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node(op, ["d"], ["t"], **attributes),
        helper.make_node("QuantizeLinear", ["t", "s", "z"], ["u"]),
        helper.make_node("DequantizeLinear", ["u", "s", "z"], ["y"]),
    ]
    model = model_of(nodes, [1, 4, 6, 6], {"s": np.array(0.1, np.float32), "z": np.array(3, np.uint8)}, opset=17)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ran = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert ran == ["QuantizeLinear", op, "DequantizeLinear"]


@pytest.mark.parametrize(
    ("ir_version", "opset", "words"),
    [(999, 17, "Unsupported model IR version: 999, max"), (10, 999, "ONNX Runtime only .* Opset 999 is under devel")],
)
def test_a_later_onnx_is_refused_without_source_places(tmp_path: Path, ir_version: int, opset: int, words: str) -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], [2], {}, opset=opset)
    model.ir_version = ir_version
    (tmp_path / "new.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(EngineFailure, match=f"^ONNX Runtime: {words}"):
        open_engine(EngineSpec("onnxruntime")).build(tmp_path / "new.onnx", tmp_path / "log")


def test_onnxruntime_saves_a_model_that_computes_the_same(tmp_path: Path) -> None:
    onnx.save(text_model(RESIDUAL, RESIDUAL_WEIGHTS), tmp_path / "m.onnx")
    engine = open_engine(EngineSpec("onnxruntime"))
    built = engine.build(tmp_path / "m.onnx", tmp_path / "log")
    built.save(tmp_path / "s.onnx")
    saved = onnx.load(tmp_path / "s.onnx")
    assert "FusedConv" in {node.op_type for node in saved.graph.node}
    assert not {node.domain for node in saved.graph.node} & {"com.microsoft.nchwc"}
    again = engine.build(tmp_path / "s.onnx", tmp_path / "log").run(RESIDUAL_INPUT)["y"]
    np.testing.assert_allclose(again, built.run(RESIDUAL_INPUT)["y"], rtol=1e-4, atol=1e-5)


def test_a_recorded_inference_takes_new_inputs_in_their_places(tmp_path: Path) -> None:
    model = build(
        "net (float[2,4] x) => (float[2,8] y, float[2,8] z) { y = MatMul(x, w)\n z = Relu(y) }", {"w": normal(4, 8)}
    )
    save(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    first, second = ({"x": normal(2, 4, seed=seed)} for seed in (1, 2))
    recording = Recording(session, first, ["y", "z"], "cpu", 1)
    assert recording.time(3) > 0
    for inputs in (first, second, first):
        recording.take(inputs)
        for found, expected in zip(recording.run(), session.run(["y", "z"], inputs), strict=True):
            np.testing.assert_array_equal(found, expected)
