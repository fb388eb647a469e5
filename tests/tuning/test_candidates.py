"""Files of placements: a small one that shares its constants, and a whole one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from models import ranges
from qdqtune.engines import formats
from qdqtune.errors import OutputError
from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.tuning.trial_worker import Candidates
from qdqtune.types import Placement
from runs import mixed

MODEL = mixed()
ALL = Placement.of(possible_edges(MODEL, ranges(MODEL)))


@pytest.fixture
def candidates(tmp_path: Path) -> Iterator[Candidates]:
    with ConstantFile(tmp_path / CONSTANTS) as constants:
        yield Candidates(Inserter(MODEL, ranges(MODEL), formats.numeric_format("fake", "int8")), constants)


def test_the_whole_file_computes_what_the_candidate_did(candidates: Candidates, tmp_path: Path) -> None:
    candidates.write_whole(ALL, tmp_path / "whole.onnx")
    small, whole = candidates.file(ALL), tmp_path / "whole.onnx"
    assert small.stat().st_size < whole.stat().st_size
    assert onnx.load(small, load_external_data=False).graph.node == onnx.load(whole).graph.node
    loaded = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(small).graph.initializer}
    expected = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(whole).graph.initializer}
    assert loaded.keys() == expected.keys()
    assert all(np.array_equal(loaded[name], expected[name]) for name in loaded)


def test_a_place_that_cannot_be_written_is_an_output_error(candidates: Candidates, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        candidates.write_whole(Placement(), tmp_path / "file" / "model.onnx")
