"""The report of a run: what it says, and that nothing from a model is more than text in it."""

import json
import re
from pathlib import Path

import pytest

from conftest import Call
from qdqtune.errors import BadOption
from qdqtune.explanation.page import render
from qdqtune.explanation.report import report_of_run
from qdqtune.tuning.loop import tune
from runs import hopeless, mixed, settings, write
from workers import Workers


@pytest.fixture
def finished(model: Path, workers: Workers) -> Path:
    tune(settings(model, mode="cut", builds=8))
    return model.parent / "out"


def test_threads_are_told_with_what_was_decided_there_and_the_speed_against_the_file_as_it_is(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    row = {"baseline_ms": 2.0, "final_ms": 1.0, "ratio": 0.5, "low": 0.4, "high": 0.6}
    rows = [row | {"threads": 1, "verdict": "faster"}, row | {"threads": 4, "verdict": "undecided"}]
    (finished / "summary.json").write_text(json.dumps(summary | {"by_threads": rows, "ratio_to_given": 0.25}))
    told = [(fact.name, fact.value, fact.hint) for fact in report_of_run(finished).facts]
    assert (f"speedup over {finished.parent.name}/model.onnx", "4.00x", "") in told
    assert ("latency, 4 threads", "1.000 ms", "float: 2.000 ms") in told
    assert ("speedup [interval]", "2.00x [1.67x, 2.50x]", "") in told


def test_the_verdict_is_that_of_the_summary_and_candidates_are_told_in_order(finished: Path) -> None:
    report = report_of_run(finished)
    summary = json.loads((finished / "summary.json").read_text())
    assert report.verdict.speed is not None
    assert report.verdict.speed.median == pytest.approx(1 / summary["ratio"])
    assert f"{1 / summary['ratio']:.2f} times as fast" in report.verdict.headline
    assert report.map is not None
    assert sorted(n for g in report.map.groups for n in g.nodes) == list(range(len(report.map.nodes)))
    assert {n.name for n in report.map.nodes} == {node.name for node in mixed().nodes}
    assert [n.name for n in report.map.nodes if n.quantized][:1] == ["first"]
    assert [c.number for c in report.candidates] == list(range(1, summary["trials"] + 1))
    assert any(c.outcome == "accepted" and c.strip is not None for c in report.candidates)
    assert len(report.proof) == 1
    assert all(len(strip.rounds) >= 12 for strip in report.proof)


def test_without_its_log_a_run_has_no_report(finished: Path) -> None:
    (finished / "run.json").unlink()
    with pytest.raises(BadOption, match=r"has lost run\.json: run the same tune command again"):
        report_of_run(finished)


def test_tune_leaves_a_report_unless_told_not_to(model: Path, call: Call) -> None:
    asked = ["tune", model, "--engine", "fake", "--calibration-data", model.with_suffix(".npz"), "--effort", "quick",
             "--calibration-method", "minmax", "--no-bias-correction"]  # fmt: skip
    out = model.parent / "out"
    assert call(*asked, "-o", out, "--no-report")[0] == 0
    assert not (out / "report.html").exists()
    code, printed, _ = call("report", out)
    assert code == 0
    assert printed.strip() == str(out / "report.html")
    page = (out / "report.html").read_text()
    assert "times as fast" in page
    assert "--effort quick" in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    assert call("report", model.parent)[0] == 2


def test_names_of_the_model_are_text_and_nothing_else(finished: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>\u202edetsurt"
    report = report_of_run(finished)
    state = finished / "summary.json"
    summary = json.loads(state.read_text())
    summary["model"] = hostile
    state.write_text(json.dumps(summary))
    page = render(report_of_run(finished), {})
    assert report.title == f"{finished.parent.name}/model.onnx"
    assert "<img" not in page
    assert "\u202e" not in page
    assert page.count("</script>") == 2


def test_points_of_a_front_have_intervals_and_another_pick_ships(model: Path, workers: Workers, call: Call) -> None:
    out = model.parent / "out"
    tune(settings(model, mode="cut", front=True, builds=25))
    assert call("report", out)[0] == 0
    report = report_of_run(out)
    proven = [point for point in report.points if point.proven]
    assert len(proven) >= 2
    made = [row.told for row in report.candidates if "front" in row.told and row.outcome == "faster"]
    assert set(made) <= {"faster than the float model, made for the front"}
    assert all(point.speed.low is not None and point.speed.low > 1 for point in proven)
    other = next(point for point in proven if not point.shipped)
    assert call("tune", model, "-o", out, "--pick", other.name.removeprefix("front/"))[0] == 0
    again = report_of_run(out)
    assert [point.name for point in again.points if point.shipped] == [other.name]
    assert again.verdict.speed == other.speed
    assert 1 <= len(again.proof) <= 2
    assert f"{other.speed.median:.2f} times as fast" in (out / "report.html").read_text()


def test_a_run_that_tried_nothing_does_not_say_that_there_was_nothing_to_try(model: Path, workers: Workers) -> None:
    tune(settings(model, mode="cut", builds=8, time_budget=1e-3))
    assert (
        report_of_run(model.parent / "out").verdict.headline == f"Nothing was tried in {model.parent.name}/model.onnx"
    )


def test_where_nothing_is_faster_the_fastest_candidate_is_shown_and_named_so(tmp_path: Path, workers: Workers) -> None:
    model = write(hopeless(), tmp_path)
    tune(settings(model, mode="cut", builds=8))
    report = report_of_run(tmp_path / "out")
    assert not report.verdict.good
    assert report.verdict.headline == f"Nothing faster was found for {model.parent.name}/model.onnx"
    assert report.map is not None
    assert report.map.tuned.startswith("candidate ")
    assert "does not ship" in report.bars_lead
    assert "Nothing faster" in render(report, {})
