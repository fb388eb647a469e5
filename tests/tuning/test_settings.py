"""Settings that leave nothing to do are refused."""

from pathlib import Path

import pytest

from qdqtune.errors import BadOption
from qdqtune.tuning.settings import Settings


def test_formats_that_the_engine_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"no kernels for weights stored as 'w2'; it has w4, w8.*, and int8 for pairs"):
        Settings(tmp_path / "m.onnx", formats=("int8", "w2"))
    with pytest.raises(BadOption, match="names nothing"):
        Settings(tmp_path / "m.onnx", formats=())
    assert not Settings(tmp_path / "m.onnx", formats=("w4",)).has_pairs
