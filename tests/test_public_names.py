"""What users import by name stays where it is."""

import subprocess
import sys

import pytest

import qdqtune
from runs import environment

NAMES = [
    "Cancelled", "Edge", "EngineSpec", "Explanation", "Observer", "Placement", "QdqtuneError", "Result", "Settings",
    "State", "Trial", "__version__", "apply", "build", "check", "compare", "explain", "inspect", "layers", "quantize",
    "tune", "verify",
]  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert sorted(qdqtune.__all__) == NAMES
    assert all(getattr(qdqtune, name) for name in NAMES)
    with pytest.raises(AttributeError, match="no_such"):
        _ = qdqtune.no_such


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, qdqtune; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert not {"numpy", "onnx", "click", "rich", "logging"} & set(done.stdout.split())
