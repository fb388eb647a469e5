"""`compare`: files of a user against the first of them."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from command_lines import errors
from conftest import Call
from models import INT8, build, joined, normal, ranges
from qdqtune import compare
from qdqtune.commands.compare import Comparison, Gated, GateOptions, Row, junit, markdown
from qdqtune.commands.shown import Table
from qdqtune.errors import BadOption
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning.file_race import Tail
from qdqtune.types import Accuracy, Placement
from runs import mixed, write
from workers import Workers


@pytest.mark.usefixtures("workers")
def test_options_of_compare_reach_the_measurement(monkeypatch, call, tmp_path):
    path = write(mixed(batch=None), tmp_path)
    given = SimpleNamespace()
    monkeypatch.setattr("qdqtune.commands.compare.compare_files", lambda *a, **k: given.__dict__.update(a=a, **k) or [])
    code, _, _ = call("compare", path, path, "--engine", "fake", "--input-shape", "x:5x64x64",
                      "--calibration_samples", 2, "--seed", 4, "--timing_runs", 30, "--warmup-runs", 1)  # fmt: skip
    assert code == 0
    compared, _, samples, plan = given.a
    assert (compared, given.seed, plan.looks, plan.warmup) == ((path, path), 4, (30,), 1)
    assert [s["x"].shape for s in samples] == [(5, 64, 64)] * 2


def test_compare_prints_a_table(call, tuned, final):
    code, out, err = call("compare", tuned, tuned, final, "--engine", "fake")
    assert code == 0
    assert f"first: {tuned}" in out
    assert re.search(r"1\.00x \[1\.00x, 1\.00x\] +no difference seen within 0 % ", out)
    assert "output SQNR over 3 samples" in out
    assert re.search(rf"^ {final} .* \d\.\d\dx \[\d\.\d\dx, \d\.\d\dx\] +faster +[\d.]+ *$", out, re.MULTILINE)
    assert err.splitlines() == [
        "running model.onnx",
        "running model.onnx",
        "running optimized_final.onnx",
        "timing model.onnx, optimized_final.onnx against model.onnx",
        "timing single inferences",
        f"note: no --calibration-data: the inputs are those of the run beside it, {tuned.with_suffix('.npz')}",
    ]


@pytest.mark.usefixtures("workers")
def test_outputs_are_compared_on_the_samples_that_tune_holds_out_or_on_all(tmp_path: Path) -> None:
    model = write(mixed(), tmp_path, count=41)
    data = {"calibration_data": model.with_suffix(".npz"), "engine": "fake", "calibration_samples": None}
    few, every = (compare(model, model, **data, all_samples=whole) for whole in (False, True))
    assert "output SQNR over 8 held-out samples, as in tune; `all_samples` takes all\n" in few.table().caption
    assert "output SQNR over 41 samples\n" in every.table().caption


def test_compare_tells_each_number_of_threads(call, tuned, final):
    at = ("--engine", "fake", "--engine-option", "threads=1", "--threads", "1,4")
    code, out, _ = call("compare", tuned, final, *at)
    assert code == 0
    assert re.search(rf"{final}, 1 thread .*faster", out)
    assert re.search(rf"{final}, 4 threads .*faster", out)
    rows = json.loads(call("compare", tuned, final, *at, "--json")[1])["others"]
    assert [(row["threads"], row["verdict"]) for row in rows] == [(1, "faster"), (4, "faster")]
    assert all(row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"] < 1 for row in rows)
    for row in rows:
        assert row["percentiles_ms"]["p90"] < row["first_percentiles_ms"]["p90"] <= row["first_percentiles_ms"]["p99"]


def test_compare_goes_on_behind_a_file_that_the_engine_refuses(call, tuned, final):
    faults = 'faults={"refuse": "*"}'
    code, out, err = call("compare", tuned, final, tuned, "--engine", "fake", "--engine-option", faults)
    assert code == 5
    assert re.search(r" failed ", out)
    assert re.search(r" no difference seen ", out)
    assert err.splitlines()[-1].startswith(f"error: {final} cannot be compared: fake engine: ")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{ l = Log(n) \n y = Add(x, l) }", "the outputs hold NaN or infinite values"),
        ("{ z = Relu(x) }", "they have other names"),
        ("{ y = Concat <axis = 1> (x, x) }", "on all samples they have other shapes"),
    ],
)
def test_outputs_that_cannot_be_compared_are_told(body: str, why: str, call: Call, tmp_path: Path) -> None:
    name = "z" if "z =" in body else "y"
    first = write(build("net (float[1,4] x) => (float[1,4] y) { y = Relu(x) }", {}), tmp_path)
    other = write(
        build(f"net (float[1,4] x) => (float[1,N] {name}) {body}", {"n": np.float32([-1])}), tmp_path, "other"
    )
    code, out, err = call("compare", first, other, "--engine", "fake", "--calibration-data", first.with_suffix(".npz"))
    assert code == 0
    assert f"outputs were not compared: {why}" in " ".join((out + err).split())
    assert "SQNR" not in out
    assert "scores of classes" not in out


def test_the_worst_slice_is_told_and_a_lost_one_warned_of(call: Call, tmp_path: Path) -> None:
    net = joined()
    first, other = write(net, tmp_path), tmp_path / "other.onnx"
    known = ranges(net)
    save(insert(net, Placement.of(possible_edges(net, known)), known, INT8), other)
    code, out, err = call("compare", first, other, "--engine", "fake", "--calibration-data", first.with_suffix(".npz"))
    assert code == 0
    assert re.search(rf"^worst slice of {other}: y\[:, :, 4:12\] -[\d.]+ dB \(lost\)$", out, re.MULTILINE)
    assert f"note: {other} against {first}: y[:, :, 4:12] lost its values: " in err


def test_a_simulator_is_not_timed(call, tuned, final, monkeypatch):
    monkeypatch.setattr(
        "qdqtune.commands.compare.simulated", lambda *_: "fake is a simulator on this machine, whose times mean nothing"
    )
    code, out, err = call("compare", tuned, final, "--engine", "fake")
    assert code == 0
    assert re.search(rf"^ {final} +not timed +[\d.]+ *$", out, re.MULTILINE)
    assert f"fake is a simulator on this machine, whose times mean nothing: outputs are against {tuned} on ONNX" in err
    told = call("compare", tuned, final, "--engine", "fake", "--json")[1]
    (row,) = json.loads(told)["others"]
    assert (row["ratio"], row["ms"], row["reason"]) == (None, None, "")
    assert row["sqnr_db"] > 10


def test_a_simulator_that_is_not_installed_is_told_without_data_too(call: Call, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
    model = write(mixed(), tmp_path)
    code, _, err = call("compare", model, model, "--engine", "qnn")
    assert code == 5
    assert "qdqtune[qnn]" in err


@pytest.mark.usefixtures("workers")
def test_a_file_is_compared_with_one_whose_input_was_made_constant(tmp_path: Path) -> None:
    text = "n (float[2,8] x, float[1] s) => (float[2,8] y) { [m] a = MatMul(x, w) [k] y = Mul(a, s) }"
    save(build(text, {"w": normal(8, 8)}), tmp_path / "open.onnx")
    save(load(tmp_path / "open.onnx", fix_inputs={"s": 3}), tmp_path / "fixed.onnx")
    files, data = (tmp_path / "open.onnx", tmp_path / "fixed.onnx"), {"x": normal(4, 2, 8)}
    for pair in (files, files[::-1]):
        found = compare(*pair, calibration_data=data, engine="fake", fix_inputs={"s": 3})
        assert found.rows[0].sqnr_db is None  # equal
        assert found.rows[0].accuracy is not None
    with pytest.raises(BadOption, match="`fix_inputs` names those that were made constant"):
        compare(*files, calibration_data=data, engine="fake")


# The limits of `compare` for continuous integration
FAST = Ratio(0.5, 0.48, 0.52)
"""Between 1.92 and 2.08 times as fast."""


@pytest.mark.parametrize(
    ("ratio", "least", "outcome"),
    [
        (FAST, 1.9, "holds"),
        (FAST, 2.0, "undecided"),
        (FAST, 2.1, "missed"),
        (Ratio(0.5, None, None), 2.1, "undecided"),
        (None, 1.0, "undecided"),
    ],
)
def test_a_speedup_is_missed_only_where_all_of_its_interval_lies_below(ratio, least, outcome):
    (gated,) = GateOptions(fail_below=least).of_speed("b.onnx", ratio)
    assert gated.outcome == outcome
    assert gated.passes is (outcome != "missed")
    assert not list(GateOptions().of_speed("b.onnx", ratio))


@pytest.mark.parametrize(
    ("gate", "accuracy", "outcome", "told"),
    [
        (GateOptions(min_sqnr=25), Accuracy(sqnr_db=30.0), "holds", "30.0 dB"),
        (GateOptions(min_sqnr=25), Accuracy(sqnr_db=24.0), "missed", "24.0 dB, and 25 dB are asked for"),
        (GateOptions(min_sqnr=25), Accuracy(sqnr_db=None), "holds", "exact"),
        (GateOptions(min_sqnr=25), Accuracy(sqnr_db=None, agreement=0.5), "undecided", "`min_agreement`"),
        (GateOptions(min_sqnr=25), None, "failed", "NaN"),
        (GateOptions(min_agreement=0.9), Accuracy(sqnr_db=9.0, agreement=0.95), "holds", "95.0%"),
        (GateOptions(min_agreement=0.9), Accuracy(sqnr_db=9.0, agreement=0.5), "missed", "50.0%"),
        (GateOptions(min_agreement=0.9), Accuracy(top1=0.867, choices=15, samples=15), "undecided", "about 277 could"),
        (GateOptions(min_agreement=0.9), Accuracy(top1=9 / 15, choices=15, samples=15), "missed", "60.0%"),
        (GateOptions(min_agreement=0.9), Accuracy(sqnr_db=9.0), "undecided", "`scores`"),
        (
            GateOptions(min_sqnr=20.0),
            Accuracy(sqnr_db=43.7, slice_name="y[:, 4]", slice_db=-2.0, slice_is_lost=True),
            "missed",
            "y[:, 4] lost its values: -2.0 dB, hidden in an output SQNR of 43.7 dB",
        ),
    ],
)
def test_outputs_are_held_against_each_limit(gate, accuracy, outcome, told):
    (gated,) = gate.of_outputs("b.onnx", accuracy, "" if accuracy else "they hold NaN")
    assert gated.outcome == outcome
    assert told in gated.told


OUTCOMES = [
    Gated("a|b<i>@x.onnx", "at least 2x as fast", "missed", "1.50x\n"),
    Gated("c.onnx", "at least 2x as fast", "undecided", "2.00x"),
    Gated("d.onnx", "runs", "failed", "refused \x1b"),
    Gated("e.onnx", "at least 2x as fast", "holds", "3.00x"),
]


def test_junit_has_a_case_for_each_limit():
    suite = ElementTree.fromstring(junit(OUTCOMES)).find("testsuite")
    assert [suite.get(n) for n in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    assert [case[0].tag for case in suite] == ["failure", "skipped", "error", "system-out"]
    assert suite[0].get("classname") == OUTCOMES[0].file


def test_markdown_shows_names_as_they_are():
    told = markdown("done", Table(("file", "ms"), [("a|b", "1")]), OUTCOMES, ["so"])
    assert "| file | ms |\n| --- | --- |\n| a\\|b | 1 |" in told
    assert "- missed: a\\|b\\<i\\>@\u200bx.onnx, at least 2x as fast: 1.50x\\\\n" in told
    assert told.endswith("- note: so\n")


def test_compare_ends_with_4_where_a_limit_is_missed_and_writes_its_files(call, tuned, final, tmp_path):
    files = (tmp_path / "gate.xml", tmp_path / "gate.md")
    written = ("--junit", files[0], "--markdown", files[1])
    base = ("compare", tuned, final, "--engine", "fake")
    code, out, _ = call(*base, "--fail-below", 1.01, "--min-sqnr", 10, *written)
    assert code == 0
    assert re.search(rf"^holds: {final}, at least 1.01x as fast: ", out, re.MULTILINE)
    assert ElementTree.parse(files[0]).find("testsuite").get("failures") == "0"
    code, out, _ = call(*base, "--fail-below", 50, "--min-sqnr", 200, *written)
    assert code == 4
    assert out.count("missed: ") == 2
    assert ElementTree.parse(files[0]).find("testsuite").get("failures") == "2"
    assert "- missed: " in files[1].read_text()
    assert "| speedup \\[interval\\] |" in files[1].read_text()
    code, out, _ = call(*base, "--fail-below", 50, "--json")
    told = json.loads(out)
    assert (code, told["passes"], told["gate"][0]["outcome"]) == (4, False, "missed")


def test_a_file_that_the_engine_refuses_fails_the_gate(call, tuned, final, tmp_path):
    xml = tmp_path / "gate.xml"
    base = ("--engine", "fake", "--fail-below", 1, "--junit", xml, "--engine-option", 'faults={"refuse": "*"}')
    for files in ((tuned, final), (final, tuned)):  # the second file, or the first: then there is no comparison
        assert call("compare", *files, *base)[0] == 5
        (case,) = ElementTree.parse(xml).iter("testcase")
        assert (case.get("classname"), case.get("name"), case[0].tag) == (str(final), "runs", "error")


def test_limits_that_cannot_be_judged_are_refused(call: Call, model: Path, tmp_path: Path, monkeypatch):
    model.with_suffix(".npz").unlink()
    base = ("compare", model, model, "--engine", "fake")
    assert errors(call(*base, "--min-sqnr", 25)) == (
        2, "--min-sqnr and --min-agreement are about outputs on samples: give --calibration-data",
    )  # fmt: skip
    (tmp_path / "own.md").write_text("mine")
    assert call(*base, "--markdown", tmp_path / "own.md")[0] == 2
    assert (tmp_path / "own.md").read_text() == "mine"
    monkeypatch.setattr("qdqtune.commands.compare.simulated", lambda *_: "a simulator")
    assert "simulator" in errors(call(*base, "--fail-below", 1))[1]


@pytest.mark.parametrize(
    ("body", "limit", "told"),
    [
        (
            "float[1,4] y) { y = Relu(x) }", "agreement",
            "--min-agreement cannot be checked: no output holds integers, and no scores of classes recognised in y: "
            "if it holds some, add --scores y",
        ),
        (
            "int64[1,1] y) { y = ArgMax <axis=1> (x) }", "sqnr",
            "--min-sqnr is about float outputs, and the model has none: use --min-agreement or --evaluate",
        ),
    ],
)  # fmt: skip
def test_a_limit_about_outputs_that_are_not_there_is_refused_and_an_error_in_junit(body, limit, told, call, tmp_path):
    model, xml = write(build(f"net (float[1,4] x) => ({body}", {}), tmp_path), tmp_path / "gate.xml"
    data = ("--engine", "fake", "--calibration-data", model.with_suffix(".npz"), f"--min-{limit}", 0.9)
    code, out, err = call("compare", model, model, *data, "--junit", xml)
    assert (code, out) == (2, "")
    assert errors((code, out, err))[1] == told
    assert "timing" not in err
    (case,) = ElementTree.parse(xml).iter("testcase")
    assert (case[0].tag, case[0].get("message")) == ("error", told)
    assert errors(call("tune", model, *data, "-o", tmp_path / "out")) == (2, told)


def test_threads_that_cannot_be_are_refused(call: Call, tuned: Path) -> None:
    code, message = errors(call("compare", tuned, tuned, "--threads", 1000))
    assert (code, message[:20]) == (2, "--threads 1000: only")


def test_inferences_a_second_are_those_of_their_own_file() -> None:
    row = Row("b.onnx", first_ms=4.0, ms=2.0, first_percentiles_ms=Tail(4, 5, 6), percentiles_ms=Tail(2, 3, 4.5))
    told = Comparison("a.onnx", (row,)).table().caption
    assert "inferences a second of b.onnx: 500, the first file 250" in told
    assert (
        "single inferences of b.onnx: p50 2 ms, p90 3 ms, p99 4.5 ms; the first file p50 4 ms, p90 5 ms, p99 6 ms"
        in told
    )


def test_a_file_that_fails_in_the_race_takes_no_other_with_it(tuned: Path, workers: Workers) -> None:
    good, bad = tuned.with_name("good.onnx"), tuned.with_name("bad.onnx")
    for file in (good, bad):
        file.write_bytes(tuned.read_bytes())
    workers.refused = lambda build: "no" if build.path == bad and build.log.stem.startswith("compare") else None
    rows = {Path(row.file): row for row in compare(tuned, good, bad, engine="fake").rows}
    assert (rows[good].reason, rows[good].ratio is not None) == ("", True)
    assert rows[bad].reason.endswith("no")
