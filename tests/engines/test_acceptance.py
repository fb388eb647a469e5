"""No written model keeps its name, or gets it, unless its engine loads it."""

from pathlib import Path

import onnx
import pytest

from conftest import Call
from loaded_modules import absent, forgotten
from qdqtune.commands import apply, quantize
from qdqtune.engines.acceptance import check_loads, checked_output
from qdqtune.engines.execution import EXECUTION
from qdqtune.errors import EngineFailure
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from runs import mixed
from workers import Workers


def refused(model: Model, path: Path) -> None:
    """Write a model that the checker lets pass and ONNX Runtime refuses: a scale that is no float."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.to_proto())
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear":
            node.attribute.append(onnx.helper.make_attribute("axis", 77))
    save(Model(proto), path)


@pytest.mark.parametrize("engine", ["onnxruntime", "fake", "tensorrt"])
def test_a_file_that_the_engine_refuses_does_not_appear(tmp_path: Path, workers: Workers, engine: str) -> None:
    target = tmp_path / "q.onnx"
    target.write_bytes(b"as it was")
    with pytest.raises(EngineFailure, match="so nothing was kept"), checked_output(target, engine, EXECUTION) as fresh:
        fresh.write_bytes(b"no model")
    assert target.read_bytes() == b"as it was"
    assert workers.started == (engine != "tensorrt")  # a build of which takes minutes: the checker is asked
    with checked_output(target, engine, EXECUTION) as fresh:
        save(mixed(), fresh)
    check_loads(target, engine)


def test_without_the_engine_the_checker_decides(tmp_path, workers, monkeypatch):
    absent(monkeypatch, "openvino")
    forgotten(monkeypatch, "qdqtune.engines.openvino.engine")  # which may have it already
    save(mixed(), tmp_path / "m.onnx")
    check_loads(tmp_path / "m.onnx", "openvino")
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(EngineFailure, match="no sound model"):
        check_loads(tmp_path / "m.onnx", "openvino")


def test_a_file_that_was_run_is_not_loaded_again(tmp_path: Path, workers: Workers) -> None:
    with checked_output(tmp_path / "m.onnx", "tensorrt", EXECUTION, is_run=True) as fresh:
        save(mixed(), fresh)
    assert workers.started == 0


@pytest.mark.parametrize("command", ["quantize", "apply"])
def test_a_command_that_writes_what_its_engine_refuses_writes_nothing(call, model, tmp_path, command, monkeypatch):
    told = [model, "--calibration-data", model.with_suffix(".npz"), "--calibration-method", "minmax"]
    if command == "apply":
        quick = ["--engine", "fake", "--engine-option", "asymmetric=true", "--builds", "4", "--min-sqnr", "none"]
        assert call("tune", *told, *quick, "-o", tmp_path / "out")[0] == 0
        told += ["--placement", tmp_path / "out" / "placement.yaml"]
    monkeypatch.setattr({"quantize": quantize, "apply": apply}[command], "save", refused)
    before = sorted(tmp_path.iterdir())
    code, out, err = call(command, *told, "--no-bias-correction", "-o", tmp_path / "q.onnx")
    assert (code, out) == (5, "")
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_metric_that_fails_leaves_nothing_behind(call: Call, model: Path, tmp_path: Path) -> None:
    (tmp_path / "ev.py").write_text("def score(predict):\n    raise ValueError('no labels')\n")
    before = sorted(tmp_path.iterdir())
    told = ["--calibration-data", model.with_suffix(".npz"), "--calibration-method", "minmax", "--no-bias-correction"]
    code, _, err = call(
        "quantize", model, *told, "--evaluate", f"{tmp_path / 'ev.py'}:score", "-o", tmp_path / "q.onnx"
    )
    assert (code, "no labels" in err) == (2, True)
    assert sorted(path for path in tmp_path.iterdir() if path.name != "__pycache__") == before
