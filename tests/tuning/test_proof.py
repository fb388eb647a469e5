"""The proof: what ships is compared with the user's own file, and copied whole."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqtune.commands.tune import result_table
from qdqtune.errors import BaselineFailed
from qdqtune.explanation.report import report_of_run
from qdqtune.graph.constants import inner_tensors
from qdqtune.graph.loading import load
from qdqtune.search import best_of
from qdqtune.tuning import proof
from qdqtune.tuning.loop import tune
from qdqtune.tuning.proof import copy_model
from qdqtune.tuning.run import Run
from qdqtune.types import Accuracy, Edge, Placement, Trial
from runs import out, settings
from workers import Build, Workers

pytestmark = pytest.mark.usefixtures("workers")

BRANCHING = """net (bool c, float[300] x) => (float[300] y) {
    [if] y = If (c) <
        then_branch = g1 () => (float[300] t) { t = Add(x, then_w) },
        else_branch = g2 () => (float[300] e) { e = Add(x, else_w) }
    >
}"""


def branching(path: Path) -> None:
    """A model whose If has tensors in external data in both bodies."""
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{BRANCHING}')
    for number, body in enumerate(proto.graph.node[0].attribute):
        name = body.g.node[0].input[1]
        body.g.initializer.append(numpy_helper.from_array(np.full(300, number, np.float32), name))
    onnx.save(proto, path, save_as_external_data=True, location="bodies.bin", size_threshold=0)


def test_a_copy_has_the_external_data_of_bodies(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    source = tmp_path / "given.onnx"
    branching(source)
    for target in (tmp_path / "out" / "optimized_final.onnx", tmp_path / "beside.onnx"):
        copy_model(source, target)
        named = inner_tensors(onnx.load(target, load_external_data=False))
        assert {e.value for tensor in named for e in tensor.external_data if e.key == "location"} == {"bodies.bin"}
        onnx.checker.check_model(str(target))
        assert load(target).fingerprint == load(source).fingerprint


def test_an_improvement_that_fresh_builds_do_not_confirm_does_not_ship(model: Path, workers: Workers) -> None:
    workers.slower = lambda build: 3 if build.path.name == "optimized_final.onnx" else 1
    result = tune(settings(model))
    assert best_of(result.history).edges
    assert not result.improved
    assert any("did not prove faster" in note for note in result.notes)
    assert out(model, "optimized_final.onnx").read_bytes() == out(model, "baseline.onnx").read_bytes()
    assert result.summary["ratio"] == 1.0


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


def test_a_result_slower_than_the_users_own_file_does_not_ship(model: Path, workers: Workers) -> None:
    workers.slower = lambda build: 0.1 if build.path == model else 1
    assert tune(settings(model)).shipped == "baseline"
    assert out(model, "optimized_final.onnx").read_bytes() == model.read_bytes()


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
    found = proof.chosen_by_rule([cast(Trial, trial)], cast(Run, run))
    assert (found.shipped, found.placement) == (("baseline", Placement()) if withholds else ("tuned", chosen))
    assert written["optimized_final.onnx"] == found.placement
