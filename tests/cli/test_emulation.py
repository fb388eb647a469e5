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


def test_no_times_are_claimed(tmp_path: Path) -> None:
    model, samples = ROOT / "demo" / "digits.onnx", ROOT / "demo" / "samples.npz"
    emulated = "this ARM processor is emulated on x86, so times mean nothing"
    code, text = told("tune", model, "--calibration-data", samples, "-o", tmp_path / "out")
    assert (code, text.count("\n")) == (5, 1)
    assert emulated in text
    code, text = told("compare", model, model, "--calibration-data", samples, "--calibration-samples", 2)
    assert code == 0
    assert "not timed" in text
    assert "exact" in text
    assert emulated in text
