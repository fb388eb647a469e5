"""What the user allows one build or inference holds wherever the model is run, calibration and checks included."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqtune.calibration.observe import outputs_on
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineFailure
from qdqtune.graph.loading import load_proto
from runs import mixed, write

ENDLESS = """<ir_version: 8, opset_import: ["": 17]>
net (float[2,8] x) => (float[2,8] z) {
    [first] y = MatMul(x, w)
    [round] z = Loop(, on, y) <body = step (int64 i, bool go, float[2,8] v) => (bool more, float[2,8] u) {
        more = Identity(go)
        u = Relu(v)
    }>
}"""


def endless() -> onnx.ModelProto:
    """A loop whose condition always holds."""
    proto: onnx.ModelProto = onnx.parser.parse_model(ENDLESS)
    for name, value in (("w", np.eye(8, dtype=np.float32)), ("on", np.array(True))):
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return proto


def test_calibration_of_an_endless_loop_ends_in_one_line() -> None:
    """With a process of its own: one that hangs is the point."""
    sample = {"x": np.zeros((2, 8), np.float32)}
    with pytest.raises(EngineFailure, match="took longer than 1 s: `time_limit` gives it longer"):
        list(outputs_on(load_proto(endless()), [sample], execution=Execution(1.0)))


@pytest.mark.parametrize("command", ["tune", "quantize", "apply", "check", "debug"])
def test_every_runner_of_a_command_has_the_limit(call, tmp_path, command, monkeypatch):
    model = write(mixed(), tmp_path)
    data = ["--calibration-data", model.with_suffix(".npz")]
    quick = ["--engine", "fake", "--engine-option", "asymmetric=true", "--builds", "4"]
    if command in ("check", "debug"):
        assert call("quantize", model, *data, "-o", tmp_path / "q.onnx")[0] == 0
    if command == "apply":
        assert call("tune", model, *quick, *data, "--min-sqnr", "none", "-o", tmp_path / "out")[0] == 0
    arguments = {
        "tune": [model, *quick, *data, "-o", tmp_path / "out"],
        "quantize": [model, *data, "--report", "-o", tmp_path / "q.onnx"],
        "apply": [model, *data, "--placement", tmp_path / "out" / "placement.yaml", "-o", tmp_path / "q.onnx"],
        "check": [tmp_path / "q.onnx", *data],
        "debug": [model, tmp_path / "q.onnx", *data],
    }[command]
    limits = []
    made = Runner.__init__

    def watched(runner: Runner, *arguments: object, **more: object) -> None:
        made(runner, *arguments, **more)  # type: ignore[arg-type]
        limits.append(runner._execution.seconds)

    monkeypatch.setattr(Runner, "__init__", watched)
    code, _, err = call(command, *arguments, "--time-limit", "123s")
    assert code in (0, 3, 4), err
    assert limits
    assert set(limits) == {123.0}
