"""`explain`: what is no finished run is refused; decisions are told one by one and together."""

import shutil
from pathlib import Path

import pytest

from qdqtune.commands.explain import explain_run
from qdqtune.errors import BadOption, BadState


def test_what_is_no_finished_run_is_refused(tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"there is no folder .*none: name the output folder"):
        explain_run(tmp_path / "none")
    shutil.copytree(tuned.parent / "out", tmp_path / "out")
    (tmp_path / "out" / "autotuner_state.yaml").rename(tmp_path / "elsewhere.yaml")
    with pytest.raises(BadState, match="`state_file`"):
        explain_run(tmp_path / "out")
    assert explain_run(tmp_path / "out", tmp_path / "elsewhere.yaml").rows == explain_run(tuned.parent / "out").rows


def test_units_decided_otherwise_together_need_no_conversions_between_them(tuned: Path) -> None:
    explained = explain_run(tuned.parent / "out")
    in_8_bits = {row.unit: row for row in explained.rows if row.quantized}.values()
    (together,) = (tally for tally in explained.tallies if tally.quantized)
    assert together.margin_ms is not None
    assert 0 < together.margin_ms < sum(row.margin_ms or 0.0 for row in in_8_bits)
