"""qdqtune under a real emulator of ARM. The environment variable ARM_PYTHON names a Python of ARM that has what qdqtune
needs: a script that starts it by qemu-aarch64, or any Python in a container for linux/arm64."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("ARM_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="ARM_PYTHON names no Python under an emulator")


def told(*arguments: object) -> tuple[int, str]:
    """The exit code of the command under the emulator, and what it prints."""
    given = [str(PYTHON), "-m", "qdqtune", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    done = subprocess.run(given, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout + done.stderr


EMULATED = "this ARM processor is emulated on x86, so times mean nothing"
MODEL, SAMPLES = ROOT / "demo" / "digits.onnx", ROOT / "demo" / "samples.npz"
DATA = ("--calibration-data", SAMPLES, "--calibration-samples", 8)


def test_no_times_are_claimed() -> None:
    code, text = told("compare", MODEL, MODEL, *DATA)
    assert code == 0
    assert "not timed" in text
    assert "exact" in text
    assert EMULATED in text


def test_the_whole_path_runs_without_times(tmp_path: Path) -> None:
    quick = ("--calibration-method", "minmax", "--no-bias-correction")
    code, text = told("tune", MODEL, *DATA, *quick, "--portable", "-o", tmp_path / "out")
    assert code == 0, text
    assert f"{EMULATED}: nothing was timed, and no speed is claimed" in text
    code, text = told("verify", tmp_path / "out", *DATA)
    assert code == 0, text
    assert "nothing was timed" in text
    code, text = told(
        "apply",
        MODEL,
        "--placement",
        tmp_path / "out" / "placement.yaml",
        *DATA,
        *quick,
        "-o",
        tmp_path / "applied.onnx",
    )
    assert code == 0, text
