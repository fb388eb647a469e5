"""The front: points that nothing else beats, each a proven file."""

from pathlib import Path

import pytest

from qdqtune.errors import BadOption
from qdqtune.graph.loading import load
from qdqtune.placement.files import read_placement_file
from qdqtune.placement.reading import read_placement
from qdqtune.tuning.loop import tune
from runs import settings
from workers import Workers

pytestmark = pytest.mark.usefixtures("workers")


def test_points_are_proven_files_that_no_other_beats_until_a_run_without_a_front(model: Path, workers: Workers) -> None:
    result = tune(settings(model, mode="cut", front=True, builds=25))
    rows = result.summary["front"]
    assert len(rows) >= 2
    assert [row["ratio"] for row in rows] == sorted(row["ratio"] for row in rows)
    assert [row["sqnr_db"] for row in rows] == sorted(row["sqnr_db"] for row in rows)  # else one would beat another
    assert all(row["high"] < 1 for row in rows)
    assert [row["shipped"] for row in rows].count(True) == 1
    folder = model.parent / "out"
    for row in rows:
        recorded = read_placement_file((folder / row["file"]).with_suffix(".yaml"))
        assert read_placement(load(model), load(folder / row["file"])).placement == recorded.placement
        assert len({e.tensor for e in recorded.placement}) == row["pairs"]
    assert {p.name for p in (folder / "front").iterdir()} == {
        f"{row['name']}{end}" for row in rows for end in (".onnx", ".yaml")
    }
    built = sum(build.engine == "fake" for build in workers.builds)
    singles = 2  # of the float model and of what ships
    assert built == result.summary["builds"] + result.summary["proof_builds"] + singles
    assert result.summary["builds"] <= 25
    (folder / "front" / "mine.onnx").write_text("of the user")
    tune(settings(model, mode="cut", builds=25))
    assert [path.name for path in (folder / "front").iterdir()] == ["mine.onnx"], "a run without a front leaves none"


def test_what_ships_is_the_fastest_that_holds_the_limits(model: Path) -> None:
    free = tune(settings(model, mode="cut", front=True, builds=25, min_sqnr=None))
    fastest, second, *_ = free.summary["front"]
    assert fastest["shipped"]
    limit = (fastest["sqnr_db"] + second["sqnr_db"]) / 2
    held = tune(settings(model, mode="cut", front=True, builds=25, min_sqnr=limit))
    shipped = next(row for row in held.summary["front"] if row["shipped"])
    assert shipped["sqnr_db"] >= limit
    assert all(not row["holds_limits"] for row in held.summary["front"] if row["ratio"] < shipped["ratio"])


def test_what_cannot_be_is_one_line(model: Path) -> None:
    with pytest.raises(BadOption, match="no room for a front"):
        settings(model, mode="cut", front=True, builds=7)
    with pytest.raises(BadOption, match="`mode` cut"):
        settings(model, mode="region", front=True, builds=30)
    with pytest.raises(BadOption, match="weighs speed against accuracy, which takes samples"):
        tune(settings(model, mode="cut", front=True, builds=25, calibration_data=None))
