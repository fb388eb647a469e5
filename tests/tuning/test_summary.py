"""summary.json is read as it was written; what is missing or damaged is told in a line."""

import json
from pathlib import Path

import pytest

from qdqtune.errors import BadOption
from qdqtune.tuning.store import plain
from qdqtune.tuning.summary import read_summary


def test_a_summary_is_read_as_it_was_written(tuned: Path) -> None:
    folder = tuned.parent / "out"
    assert plain(read_summary(folder)) == json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    "change",
    [{"ratio": 0.0}, {"builds": -1}, {"shipped": "mine"}, {"by_threads": None}],
)  # fmt: skip
def test_values_that_no_run_writes_are_refused(change: dict[str, object], tuned: Path, tmp_path: Path) -> None:
    whole = json.loads((tuned.parent / "out" / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps(whole | change))
    with pytest.raises(BadOption, match=r"summary\.json is not what a run has written"):
        read_summary(tmp_path)


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="holds no finished run"):
        read_summary(tmp_path)
    with pytest.raises(BadOption, match="there is no folder"):
        read_summary(tmp_path / "none")
