"""The limits of `compare` for continuous integration."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from command_lines import errors
from conftest import Call
from qdqtune.commands.gate import Gated, GateOptions, junit, markdown
from qdqtune.commands.shown import Table
from qdqtune.timing.ratios import Ratio
from qdqtune.types import Accuracy

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
    assert suite is not None
    assert [suite.get(n) for n in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    assert [case[0].tag for case in suite] == ["failure", "skipped", "error", "system-out"]
    assert suite[0].get("classname") == OUTCOMES[0].file


def test_markdown_shows_names_as_they_are():
    told = markdown("done", Table(("file", "ms"), [("a|b", "1")]), OUTCOMES, ["so"])
    assert "| file | ms |\n| --- | --- |\n| a\\|b | 1 |" in told
    assert "- missed: a\\|b\\<i\\>@\u200bx.onnx, at least 2x as fast: 1.50x\\\\n" in told
    assert told.endswith("- note: so\n")


def test_compare_ends_with_4_where_a_limit_is_missed_and_writes_its_files(call: Call, tuned: Path, tmp_path: Path):
    final, files = tuned.parent / "out" / "optimized_final.onnx", (tmp_path / "gate.xml", tmp_path / "gate.md")
    written = ("--junit", files[0], "--markdown", files[1])
    base = ("compare", tuned, final, "--engine", "fake")
    code, out, _ = call(*base, "--fail-below", 1.01, "--min-sqnr", 10, *written)
    assert code == 0
    assert re.search(rf"^holds: {final}, at least 1.01x as fast: ", out, re.MULTILINE)
    assert ElementTree.parse(files[0]).find("testsuite").get("failures") == "0"  # type: ignore[union-attr]
    code, out, _ = call(*base, "--fail-below", 50, "--min-sqnr", 200, *written)
    assert code == 4
    assert out.count("missed: ") == 2
    assert ElementTree.parse(files[0]).find("testsuite").get("failures") == "2"  # type: ignore[union-attr]
    assert "- missed: " in files[1].read_text()
    assert "| speedup \\[interval\\] |" in files[1].read_text()
    code, out, _ = call(*base, "--fail-below", 50, "--json")
    told = json.loads(out)
    assert (code, told["passes"], told["gate"][0]["outcome"]) == (4, False, "missed")


def test_a_file_that_the_engine_refuses_fails_the_gate(call: Call, tuned: Path, tmp_path: Path):
    final, xml = tuned.parent / "out" / "optimized_final.onnx", tmp_path / "gate.xml"
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
    monkeypatch.setattr("qdqtune.commands.compare.is_simulated", lambda *_: True)
    assert "simulator" in errors(call(*base, "--fail-below", 1))[1]
