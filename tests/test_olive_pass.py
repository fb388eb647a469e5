"""The pass of Olive, run as Olive runs it: from a configuration, by its own engine of passes."""

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def olive() -> Any:
    """Olive, if it is installed: it brings torch and transformers."""
    return pytest.importorskip("olive")


@pytest.mark.usefixtures("workers")
def test_a_workflow_of_olive_tunes_a_model(olive: Any, model: Path, tmp_path: Path) -> None:
    from olive.workflows import run

    config = {
        "input_model": {"type": "OnnxModel", "model_path": str(model)},
        "passes": {
            "tune": {
                "type": "QdqTune",
                "calibration_data": str(model.with_suffix(".npz")),
                "engine": "fake",
                "options": {"builds": 5, "price_cache": "none"},
            }
        },
        "output_dir": str(tmp_path / "olive"),
        "cache_dir": str(tmp_path / "cache"),
        "evaluate_input_model": False,
    }
    package = tmp_path / "package.json"
    package.write_text(json.dumps({"passes": {"QdqTune": {"module_path": "qdqtune.olive_pass.QdqTune"}}}))
    out = run(config, package_config=str(package))
    made = Path(out.get_best_candidate().model_path)
    folder = made if made.is_dir() else made.parent
    assert (folder / "optimized_final.onnx").is_file()
    assert json.loads((folder / "summary.json").read_text())["shipped"] == "tuned"


def test_the_engine_is_that_of_olives_accelerator(olive: Any) -> None:
    from olive.hardware import DEFAULT_CPU_ACCELERATOR
    from olive.hardware.accelerator import AcceleratorSpec

    from qdqtune.olive_pass import QdqTune

    on_gpu = AcceleratorSpec("gpu", "CUDAExecutionProvider")
    engines = [QdqTune._default_config(spec)["engine"].default_value for spec in (DEFAULT_CPU_ACCELERATOR, on_gpu)]
    assert engines == ["onnxruntime", "cuda"]
    assert not QdqTune.is_accelerator_agnostic(on_gpu)
