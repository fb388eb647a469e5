"""Values of search options: numbers of threads, wildcards of node names, and formats that leave nothing to do."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qdqtune.commands.tune import TuneOptions
from qdqtune.engines import EngineSpec
from qdqtune.engines.options import EngineOptions
from qdqtune.errors import BadOption
from qdqtune.tuning.settings import Settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), ("1,4, 16", (1, 4, 16)), (4, (4,)), ([1, 4], (1, 4)), (["4,1", "4"], (4, 1))],
)
def test_numbers_of_threads_are_told_in_every_form(given: Any, expected: tuple[int, ...] | None) -> None:
    assert EngineOptions(threads=given).threads == expected


@pytest.mark.parametrize("given", ["1;4", "0", "-2", "1.5", "10000"])
def test_what_is_no_number_of_threads_is_refused(given: Any) -> None:
    with pytest.raises(BadOption, match=r"no (whole number from 1 up to 9999|number of threads)"):
        EngineOptions(threads=given)


def test_wildcards_are_a_sequence_or_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "names.txt"
    file.write_text("# encoder only\n/a/*\n\n  b?\n")
    assert TuneOptions("m.onnx", node_filter=file).node_filter == ("/a/*", "b?")
    assert TuneOptions("m.onnx", node_filter=["/a/*"]).node_filter == ("/a/*",)
    file.write_text("# nothing\n")
    for wrong, words in ((file, "holds no wildcard"), (tmp_path / "gone", "No such file"), (tmp_path, "cannot read")):
        with pytest.raises(BadOption, match=words):
            TuneOptions("m.onnx", node_filter=wrong)


def test_formats_that_the_engine_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"no kernels for weights stored as 'w2'; it has w4, w8.*, and int8 for pairs"):
        Settings(tmp_path / "m.onnx", formats=("int8", "w2"))
    with pytest.raises(BadOption, match="names nothing"):
        Settings(tmp_path / "m.onnx", formats=())
    assert not Settings(tmp_path / "m.onnx", formats=("w4",)).has_pairs


def test_pairs_are_tried_where_the_engine_has_kernels_or_when_asked_for(tmp_path: Path) -> None:
    cuda = partial(Settings, tmp_path / "m.onnx", engine=EngineSpec("cuda"))
    assert not cuda().has_pairs
    asked: tuple[dict[str, Any], ...] = ({"formats": ("int8",)}, {"from_qdq": True}, {"mode": "region"})
    assert all(cuda(**options).has_pairs for options in asked)
