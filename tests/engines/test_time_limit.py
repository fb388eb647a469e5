"""What the user allows one build or inference holds wherever the model is run, calibration and checks included."""

from typing import Any

import numpy as np
import pytest

from command_lines import QUICK
from models import build
from qdqtune.calibration.observe import outputs_on
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineFailure
from workers import InProcess, Workers


class Slow(InProcess):
    def ask(self, name: str, arguments: tuple[Any, ...], limit: float) -> Any:
        if name == "run":
            raise TimeoutError
        return super().ask(name, arguments, limit)


def test_calibration_that_takes_too_long_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.engines.runner.start_worker", lambda *_: Slow(Workers()))
    sample = {"x": np.zeros((2, 3, 4), np.float32)}
    model = build("n (float[2,3,4] x) => (float[2,3,4] y) { y = Relu(x) }")
    with pytest.raises(EngineFailure, match="took longer than 1 s: `time_limit` gives it longer"):
        list(outputs_on(model, [sample], execution=Execution(1.0)))


@pytest.mark.parametrize("command", ["tune", "quantize", "apply", "check", "debug"])
def test_every_runner_of_a_command_has_the_limit(call, tuned, final, placement, tmp_path, command, monkeypatch):
    arguments = {
        "tune": [tuned, *QUICK, "-o", tmp_path / "out"],
        "quantize": [tuned, "--report", "-o", tmp_path / "q.onnx"],
        "apply": [tuned, "--placement", placement, "-o", tmp_path / "q.onnx"],
        "check": [final],
        "debug": [tuned, final],
    }[command]
    limits = []
    made = Runner.__init__

    def watched(runner: Runner, *arguments: object, **more: object) -> None:
        made(runner, *arguments, **more)
        limits.append(runner._execution.seconds)

    monkeypatch.setattr(Runner, "__init__", watched)
    data = ["--calibration-data", tuned.with_suffix(".npz")]
    code, _, err = call(command, *arguments, *data, "--time-limit", "123s")
    assert code in (0, 3, 4), err
    assert limits
    assert set(limits) == {123.0}
