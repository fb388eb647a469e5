"""Rewrites are made, told and proven; pairs have to beat the rewritten model."""

from pathlib import Path
from typing import Any

import onnx
import pytest

from qdqtune.commands.explain import explain_run
from qdqtune.commands.tune import result_table
from qdqtune.commands.verify import VerifyOptions, verify
from qdqtune.engines.fake import latency
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import Rewrites
from qdqtune.placement.files import read_placement_file
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings
from runs import cost, settings, swishing, write
from workers import Build, Workers

pytestmark = pytest.mark.usefixtures("workers")


def run(folder: Path, model: Model, **changes: Any) -> Settings:
    return settings(write(model, folder), **{"rewrites": "auto", "mode": "cut", "builds": 5, **changes})


def test_a_rewrite_is_made_and_told(tmp_path: Path) -> None:
    asked = run(tmp_path, swishing())
    result = tune(asked)
    told = result.summary["rewrites"]
    assert told["names"] == ["hardswish"]
    assert told["gave"] < 0.95
    assert told["gave"] * told["placement_gave"] == pytest.approx(result.ratio.median)
    assert told["gave"] == pytest.approx(cost(tmp_path / "out" / "baseline.onnx") / cost(asked.model))
    assert result.summary["baseline_ms"] == pytest.approx(1e3 * cost(asked.model), rel=1e-6)
    final = load(asked.output_dir / "optimized_final.onnx")
    assert "HardSwish" in {n.op for n in final.nodes}
    assert read_placement_file(asked.output_dir / "placement.yaml").rewrites == Rewrites(True, ("hardswish",))
    assert any("HardSwish" in row.operators for row in explain_run(asked.output_dir).rows)


def test_a_metric_is_asked_once_for_the_float_model(tmp_path: Path) -> None:
    """Also by the same command again."""
    metric, calls = tmp_path / "metric.py", tmp_path / "calls"
    metric.write_text(f"def score(predict):\n    open({str(calls)!r}, 'a').write('x')\n    return 1.0\n")
    asked = run(tmp_path, swishing(), evaluate=f"{metric}:score", min_sqnr=99.0)  # which no candidate holds
    for _ in range(2):
        assert tune(asked).summary["metric_before"] == 1.0
        assert calls.read_text() == "x"


def test_rewrites_alone_ship_where_no_pair_pays_and_are_verified_against_the_file_of_the_user(tmp_path: Path) -> None:
    asked = run(tmp_path, swishing(8))
    result = tune(asked)
    assert result.improved
    assert not result.placement
    assert result.summary["shipped"] == "tuned"
    assert result.summary["pairs"] == 0
    assert result.summary["rewrites"]["placement_gave"] == pytest.approx(1.0)
    told = [row[0] for row in result_table(result).rows]
    assert "speedup by hardswish" in told
    assert "  and by the placement" not in told
    assert any("no pair is worth its time here" in note for note in result.notes)
    assert {n.op for n in load(asked.output_dir / "optimized_final.onnx").nodes} == {"MatMul", "HardSwish", "Relu"}
    explained = explain_run(asked.output_dir)
    assert "what ships is the rewritten float model without pairs" in explained.headline
    assert "rewritten float, ms" in explained.table().columns
    assert "builds" in explained.ended
    found = verify(VerifyOptions(folder=asked.output_dir))
    assert found.finding == "holds"
    assert found.comparison.first == str(asked.model)
    asked.model.rename(tmp_path / "elsewhere.onnx")
    moved = verify(VerifyOptions(folder=asked.output_dir))
    assert moved.finding == "cannot tell"
    assert "has its rewrites already" in moved.why


def test_pairs_do_not_ship_for_what_rewrites_gave(tmp_path: Path, workers: Workers) -> None:
    asked = run(tmp_path, swishing())

    def slower(build: Build) -> float:
        if build.path.name != "optimized_final.onnx":
            return 1
        # With pairs it is as fast as without.
        return latency(onnx.load(asked.output_dir / "baseline.onnx")) / latency(onnx.load(build.path))

    workers.slower = slower
    result = tune(asked)
    assert result.improved
    assert not result.placement
    assert [n for n in result.notes if "did not prove more than its rewrites: 1.00x" in n], result.notes
    assert result.summary["proof_builds"] % 3 == 0, "the user's file, the rewritten model, and that with pairs"


def test_rewrites_ship_without_samples_as_they_are_exact(tmp_path: Path) -> None:
    result = tune(run(tmp_path, swishing(), calibration_data=None))
    assert result.improved
    assert not result.placement
    assert (result.summary["accuracy"], result.summary["unchecked"]) == ("not measured", False)


def test_the_users_graph_stays_or_is_rewritten_as_told(tmp_path: Path) -> None:
    result = tune(run(tmp_path, swishing(), rewrites="off"))
    assert result.summary["rewrites"] == {"folded": False, "names": []}
    assert "Clip" in {n.op for n in load(tmp_path / "out" / "baseline.onnx").nodes}
    result = tune(run(tmp_path, swishing(), rewrites="hardswish", restart=True))
    assert result.summary["rewrites"]["names"] == ["hardswish"]
    assert "HardSwish" in {n.op for n in load(tmp_path / "out" / "baseline.onnx").nodes}
