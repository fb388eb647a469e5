"""What cut mode says about each unit, in whole runs on the fake engine."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from qdqtune.cli.output import drawn
from qdqtune.commands.tune_tables import units_table
from qdqtune.search.costs.decisions import UnitPrice
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import Result
from runs import hopeless, mixed, settings, write

pytestmark = pytest.mark.usefixtures("workers")


def cut_run(folder: Path, **changes: object) -> Result:
    return tune(settings(write(mixed(), folder), **{"mode": "cut", "builds": 12} | changes))


def test_every_unit_is_explained(tmp_path: Path) -> None:
    result = cut_run(tmp_path)
    written = json.loads((tmp_path / "out" / "units.json").read_text())["units"]
    assert sorted(n for row in written for n in row["nodes"]) == sorted(n.name for n in mixed().nodes)
    rows = {row["nodes"][0]: row for row in written}
    assert [r["float_ms"] for r in written] == sorted((r["float_ms"] for r in written), reverse=True)
    assert {name for name, row in rows.items() if row["quantized"]} == {"first", "second", "skip"}
    assert rows["second"]["quantized_ms"] < rows["second"]["float_ms"] / 3
    assert all(row["margin_ms"] >= 0 for row in written)  # the decision is the optimum
    assert all(row["seen"] for row in written)
    assert rows["skip"]["boundary_ms"] == pytest.approx(rows["skip"]["dequantize_ms"])  # softmax reads it as a float
    assert rows["head"]["boundary_ms"] == 0
    assert [r.nodes for r in result.recorded.rows] == [tuple(r["nodes"]) for r in written]


def test_the_prediction_stands_beside_the_measurement(tmp_path: Path) -> None:
    summary = cut_run(tmp_path).summary
    assert summary["predicted_ms"] == pytest.approx(summary["final_ms"], rel=1e-6)
    assert summary["predicted_ratio"] == pytest.approx(summary["ratio"], rel=1e-6)


def test_nothing_faster_is_explained_too(tmp_path: Path) -> None:
    result = tune(settings(write(hopeless(), tmp_path), mode="cut", builds=12))
    assert not result.improved
    assert result.recorded.rows
    assert not any(unit.quantized for unit in result.recorded.rows)
    assert result.summary["predicted_ms"] is None


def test_the_largest_units_are_printed(tmp_path: Path) -> None:
    console = Console(width=120, record=True, file=StringIO())
    console.print(drawn(units_table(cut_run(tmp_path).recorded.rows)))
    lines = console.export_text().splitlines()
    second = next(line for line in lines if "second" in line)
    assert "8 bits" in second
    assert any("first and 1 more" in line for line in lines)


def test_weights_in_fewer_bits_are_printed_with_the_time_of_their_storage(tmp_path: Path) -> None:
    first = cut_run(tmp_path).recorded.rows[0]
    assert isinstance(first, UnitPrice)
    stored = replace(first, quantized=False, weight_format="w8", format_ms={"w8": 0.75, "w4b32": 0.25})
    console = Console(width=140, record=True, file=StringIO())
    console.print(drawn(units_table([stored, replace(stored, weight_format="")])))
    own, least = (line.split() for line in console.export_text().splitlines() if first.nodes[0] in line)
    assert ("0.750" in own, "w8" in own, "0.250" in least, "float" in least) == (True, True, True, True)


def test_region_mode_explains_no_units(tmp_path: Path) -> None:
    result = tune(settings(write(mixed(), tmp_path)))
    assert result.recorded.rows == ()
    assert not (tmp_path / "out" / "units.json").exists()


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    short = cut_run(tmp_path, builds=4)
    long = cut_run(tmp_path, builds=12)
    assert len(short.history) == 3 < len(long.history)
    assert long.history[:3] == short.history
