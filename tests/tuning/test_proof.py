"""The proof: what ships is compared with the user's own file, and copied whole; of a front, every point is."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from models import model as proto_of
from qdqtune.commands.tune import result_table
from qdqtune.errors import BadOption, BaselineFailed
from qdqtune.explanation.report import report_of_run
from qdqtune.graph.constants import inner_tensors
from qdqtune.graph.loading import load
from qdqtune.placement.files import read_placement_file
from qdqtune.placement.reading import read_placement
from qdqtune.search import best_of
from qdqtune.tuning import proof
from qdqtune.tuning.loop import tune
from qdqtune.tuning.proof import copy_model
from qdqtune.types import Accuracy, Edge, Placement
from runs import out, settings
from workers import Build, Workers

pytestmark = pytest.mark.usefixtures("workers")


def test_a_copy_has_the_external_data_of_bodies(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    source = tmp_path / "given.onnx"
    text = """net (bool c, float[300] x) => (float[300] y) {
        [if] y = If (c) <
            then_branch = g1 () => (float[300] t) { t = Add(x, then_w) },
            else_branch = g2 () => (float[300] e) { e = Add(x, else_w) }
        >
    }"""
    proto = proto_of(text)
    for number, body in enumerate(proto.graph.node[0].attribute):
        name = body.g.node[0].input[1]
        body.g.initializer.append(numpy_helper.from_array(np.full(300, number, np.float32), name))
    onnx.save(proto, source, save_as_external_data=True, location="bodies.bin", size_threshold=0)
    for target in (tmp_path / "out" / "optimized_final.onnx", tmp_path / "beside.onnx"):
        copy_model(source, target)
        named = inner_tensors(onnx.load(target, load_external_data=False))
        assert {e.value for tensor in named for e in tensor.external_data if e.key == "location"} == {"bodies.bin"}
        onnx.checker.check_model(str(target))
        assert load(target).fingerprint == load(source).fingerprint


@pytest.mark.parametrize(("name", "factor"), [("optimized_final.onnx", 3), ("model.onnx", 0.1)])
def test_what_fresh_builds_do_not_show_faster_than_the_users_file_does_not_ship(model, workers, name, factor):
    workers.slower = lambda build: factor if build.path.name == name else 1
    result = tune(settings(model))
    assert best_of(result.history).edges
    assert (result.improved, result.shipped, result.summary["ratio"]) == (False, "baseline", 1.0)
    assert any("did not prove faster" in note for note in result.notes)
    files = {path.read_bytes() for path in (model, out(model, "optimized_final.onnx"), out(model, "baseline.onnx"))}
    assert len(files) == 1


def test_a_later_proof_with_a_wider_interval_does_not_replace_a_better_one(model: Path, workers: Workers) -> None:
    first = tune(settings(model, builds=8, mode="cut"))
    workers.slower = lambda build: 1 + build.number % 3 / 20
    second = tune(settings(model, builds=8, mode="cut", proof=(14,)))
    assert second.improved
    assert (second.placement, second.ratio) == (first.placement, first.ratio)
    workers.slower = lambda build: 3 if build.path.name == "optimized_final.onnx" else 1
    assert not tune(settings(model, builds=8, mode="cut", proof=(15,))).improved, "the new rounds contradict it"


def test_a_proof_that_the_machine_fails_is_made_by_the_next_run(model: Path, workers: Workers) -> None:
    def late(build: Build) -> None:
        if build.path.name in ("optimized_final.onnx", model.name):
            raise TimeoutError

    workers.refused = late
    with pytest.raises(BaselineFailed, match="failed on the finished files"):
        tune(settings(model, builds=8, mode="cut"))
    assert not out(model, "optimized_final.onnx").exists()
    workers.refused = lambda _: None
    assert tune(settings(model, builds=8, mode="cut")).improved


def test_without_samples_pairs_ship_only_if_asked_to_by_name_and_then_as_unchecked(model: Path) -> None:
    asked = settings(model, calibration_data=None, builds=8)
    kept = tune(asked)
    keys = ("shipped", "pairs", "accuracy", "unchecked", "output_accuracy", "constraint_met")
    assert [kept.summary[key] for key in keys] == ["baseline", 0, "not measured", False, None, None]
    assert kept.summary["fastest_without_limits"]["ratio"] < 0.9
    told = report_of_run(asked.output_dir)
    assert told.verdict.headline.endswith("times as fast, accuracy not measured")
    assert not told.verdict.good
    assert not told.points
    table = result_table(kept)
    assert ("output accuracy", "", "not measured") in table.rows
    assert "give `calibration_data`" in (table.caption or "")
    shipped = tune(replace(asked, min_sqnr=None))
    assert [shipped.summary[key] for key in keys[2:]] == ["not measured", True, None, None]
    assert shipped.improved
    assert shipped.placement
    told = report_of_run(asked.output_dir)
    assert told.verdict.headline.endswith("times as fast, accuracy not measured")
    assert ("output accuracy", "not measured, shipped unchecked") in [(fact.name, fact.value) for fact in told.facts]
    assert ("output accuracy", "", "not measured, shipped unchecked") in result_table(shipped).rows


@pytest.mark.parametrize("changes", [{"from_qdq": True}, {"mode": "subgraph"}])
def test_a_metric_of_the_user_checks_what_no_samples_check(changes: dict[str, Any], model: Path) -> None:
    asked = partial(settings, model, calibration_data=None, **changes)
    assert asked().withholds_pairs
    assert not asked(min_sqnr=None).withholds_pairs
    assert asked(min_sqnr=None, min_agreement=0.9).withholds_pairs
    assert not asked(evaluate="m:f").withholds_pairs
    assert asked(evaluate="m:f", min_sqnr=30.0).withholds_pairs
    assert not asked().limits.are_set  # random inputs do not tell whether they hold
    assert not settings(model, **changes).withholds_pairs


@pytest.mark.parametrize("withholds", [True, False])
def test_by_rule_nothing_with_pairs_ships_without_samples_either(withholds: bool, tmp_path: Path) -> None:
    chosen, written = Placement(frozenset({Edge("x", "first", 0)})), dict[str, Placement]()
    trial = SimpleNamespace(placement=chosen, accepted=True, accuracy=Accuracy())
    run = SimpleNamespace(
        settings=SimpleNamespace(withholds_pairs=withholds, output_dir=tmp_path),
        candidates=SimpleNamespace(write_whole=lambda placement, path: written.update({path.name: placement})),
        given=SimpleNamespace(check=lambda: None),
    )
    found = proof.chosen_by_rule([trial], run)
    assert (found.shipped, found.placement) == (("baseline", Placement()) if withholds else ("tuned", chosen))
    assert written["optimized_final.onnx"] == found.placement


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
