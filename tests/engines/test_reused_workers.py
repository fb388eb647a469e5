"""Workers that several engines use one after the other."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from engine_contract import IMAGE, conv_model
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import EXECUTION, Execution, cancelled_by
from qdqtune.engines.runner import Runner, reused_workers
from qdqtune.types import Tensors


def answer(execution: Execution, folder: Path, samples: list[Tensors], at_once: int = 1, **options: Any) -> Any:
    """The process that ran the plain model of a folder, and its outputs."""
    spec = EngineSpec("onnxruntime", options)
    with Runner(spec, log_dir=folder / "logs", execution=execution, reuses=True) as runner:
        outputs = runner.outputs_of(folder / "plain.onnx", samples, at_once)
        assert runner._worker is not None
        return runner._worker._process, outputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(conv_model(), tmp_path / "plain.onnx")
    return tmp_path


def test_engines_with_other_options_run_in_the_process_of_the_first(folder: Path) -> None:
    with reused_workers(EXECUTION) as execution, reused_workers(execution) as same:
        assert same is execution
        first, outputs = answer(execution, folder, [IMAGE])
        assert first.poll() is None
        samples = [{"x": IMAGE["x"] * factor} for factor in range(11)]
        second, several = answer(execution, folder, samples, at_once=2, fuse=False)
        assert second is first
        np.testing.assert_allclose(several[1]["y"], outputs[0]["y"], rtol=1e-4, atol=1e-5)
        one_by_one = answer(execution, folder, samples, fuse=False)[1]
        assert len(several) == 11
        for a, b in zip(several, one_by_one, strict=True):
            np.testing.assert_array_equal(a["y"], b["y"])
    assert first.poll() is not None


def test_a_process_that_has_ended_or_owes_an_answer_is_not_used_again(folder: Path) -> None:
    with reused_workers(EXECUTION) as execution:
        first, _ = answer(execution, folder, [IMAGE])
        first.kill()
        first.wait()
        second, outputs = answer(execution, folder, [IMAGE])
        assert second is not first
        assert isinstance(outputs, list)

        def cancel() -> None:
            raise KeyboardInterrupt

        spec = EngineSpec("fake", {"build_seconds": 30.0})
        with Runner(spec, log_dir=folder / "logs", execution=execution, reuses=True) as runner:
            runner.describe()
            with cancelled_by(cancel), pytest.raises(KeyboardInterrupt):
                runner.load(folder / "plain.onnx")
        assert second.poll() is not None
        third, outputs = answer(execution, folder, [IMAGE])
        assert third is not second
