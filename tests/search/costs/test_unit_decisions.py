"""What cut mode says about each unit, in whole runs on the fake engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from qdqtune.tuning.loop import tune
from runs import hopeless, mixed, mixed_run, settings, write

pytestmark = pytest.mark.usefixtures("workers")


def units_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "out" / "units.json").read_text())["units"]


def test_every_unit_is_explained_and_the_prediction_stands_beside_the_measurement(tmp_path: Path) -> None:
    summary = mixed_run(tmp_path, "cut").summary
    assert summary["predicted_ratio"] == pytest.approx(summary["ratio"], rel=1e-6)
    written = units_of(tmp_path)
    assert sorted(n for row in written for n in row["nodes"]) == sorted(n.name for n in mixed().nodes)
    rows = {row["nodes"][0]: row for row in written}
    assert [r["float_ms"] for r in written] == sorted((r["float_ms"] for r in written), reverse=True)
    assert {name for name, row in rows.items() if row["quantized"]} == {"first", "second", "skip"}
    assert rows["second"]["quantized_ms"] < rows["second"]["float_ms"] / 3
    assert all(row["seen"] for row in written)
    assert rows["skip"]["dequantize_ms"] > 0  # softmax reads it as a float


def test_nothing_faster_is_explained_too(tmp_path: Path) -> None:
    result = tune(settings(write(hopeless(), tmp_path), mode="cut", builds=12))
    assert not result.improved
    assert [row["quantized"] for row in units_of(tmp_path)] == [False] * 3
    assert result.summary["predicted_ratio"] is None
