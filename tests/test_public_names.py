"""What users import by name stays where it is."""

import subprocess
import sys

import pytest

import qdqtune
from runs import environment


def test_each_public_name_can_be_imported() -> None:
    assert all(getattr(qdqtune, name) for name in qdqtune.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        _ = qdqtune.no_such


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, qdqtune; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert not {"numpy", "onnx", "click", "rich", "logging"} & set(done.stdout.split())
