"""The GitHub Action, whose shell steps run here with a stand-in for `gh`, and the hook for pre-commit."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import onnx
import pytest
import yaml

from conftest import Call
from engine_contract import quantized_conv_model
from models import UINT8
from qdqtune.commands.compare import BEGINNING
from runs import environment

ROOT = Path(__file__).parent.parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
GH = """#!/bin/sh
echo "$@" >> "$GH_LOG"
case "$*" in *--paginate*) printf '%s' "$GH_ID" ;; *) exit "$GH_CODE" ;; esac
"""


@dataclass
class Runner:
    """Runs steps of the action as GitHub does: inputs and outputs are put in, and `bash -e` runs the text."""

    folder: Path
    inputs: dict[str, str]
    event: str = "7"

    def step(self, name: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a step of this name."""
        context = {f"inputs.{key}": own.get("default", "") for key, own in ACTION["inputs"].items()}
        context |= {f"inputs.{key}": value for key, value in self.inputs.items()}
        context |= {f"steps.measure.outputs.{key}": value for key, value in self.outputs.items()}
        context |= {"github.event.pull_request.number": self.event}
        env = {
            key: re.sub(r"\$\{\{ (.+?) \}\}", lambda found: str(context[found[1]]), value)
            for key, value in STEPS[name].get("env", {}).items()
        }
        files = {"GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary", "GH_LOG": "gh.log"}
        given = environment() | env | {key: str(self.folder / file) for key, file in files.items()}
        given |= {"GITHUB_REPOSITORY": "o/r", "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **more}
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", STEPS[name]["run"]],
            env=given, cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip

    @property
    def outputs(self) -> dict[str, str]:
        """What the step Measure has put out."""
        file = self.folder / "output"
        return dict(line.split("=", 1) for line in file.read_text().splitlines()) if file.exists() else {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the programs that the steps call."""
    (tmp_path / "bin").mkdir()
    ours = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m qdqtune "$@"\n'
    for name, text in (("gh", GH), ("qdqtune", ours)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def test_compare_fails_by_its_limits_and_leaves_its_files(folder: Path, tuned: Path) -> None:
    given = {"model": str(tuned.parent / "out" / "optimized_final.onnx"), "baseline": str(tuned), "engine": "fake"}
    given |= {"calibration-data": str(tuned.with_suffix(".npz")), "fail-below": "50", "min-sqnr": "10"}
    runner = Runner(folder, given | {"args": "--timing-runs 12", "output-dir": "of gate"})
    done = runner.step("Measure")
    assert done.returncode == 0, done.stderr
    assert runner.outputs["code"] == "4"
    suite = ElementTree.parse(folder / runner.outputs["junit"]).find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert (folder / "summary").read_text() == (folder / runner.outputs["markdown"]).read_text()
    assert runner.step("Result").returncode == 4


def test_tune_finds_a_model_and_compares_it(folder: Path, tuned: Path) -> None:
    data = {"calibration-data": str(tuned.with_suffix(".npz")), "args": "--builds 4 --no-report"}
    runner = Runner(folder, {"command": "tune", "model": str(tuned), "engine": "fake", "fail-below": "1.01", **data})
    done = runner.step("Measure")
    assert runner.outputs["code"] == "0", done.stderr
    assert (folder / "qdqtune_output" / "deploy" / "settings.json").is_file()
    assert "optimized\\_final.onnx" in (folder / "summary").read_text()


def test_check_tells_what_is_not_fused(folder: Path, tuned: Path) -> None:
    runner = Runner(folder, {"command": "check", "model": str(tuned), "engine": "fake"})
    assert runner.step("Measure").returncode == 0
    assert runner.outputs["code"] == "0"
    told = (folder / "summary").read_text()
    assert told.startswith(BEGINNING)  # by which the comment is found
    assert "no pairs, nothing to check" in told
    wrong = Runner(folder, {"command": "dance", "model": str(tuned)})
    assert "::error::command is" in wrong.step("Measure").stdout
    assert wrong.outputs["code"] == "2"


COMMENTS = [("", "POST repos/o/r/issues/7/comments"), ("5", "PATCH repos/o/r/issues/comments/5")]


@pytest.mark.parametrize(("known", "call"), COMMENTS)
def test_one_comment_is_written_and_renewed(folder: Path, known: str, call: str) -> None:
    (folder / "told.md").write_text("x")
    (folder / "output").write_text("markdown=told.md\n")
    runner = Runner(folder, {})
    done = runner.step("Comment", GH_ID=known, GH_CODE="0")
    assert (done.returncode, done.stdout) == (0, "")
    assert f"{call} -F body=@told.md" in (folder / "gh.log").read_text()
    done = runner.step("Comment", GH_ID=known, GH_CODE="1")
    assert done.returncode == 0
    assert "::warning::no comment" in done.stdout


def test_the_hook_refuses_a_model_whose_pairs_are_not_fused(call: Call, tuned: Path, tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    program, *words = hook["entry"].split()
    assert program == "qdqtune"
    assert re.search(hook["files"], "models/a.onnx")
    bad = tmp_path / "bad.onnx"
    onnx.save(quantized_conv_model(UINT8), bad)
    code, out, _ = call(*words, "--input-shape", "x:1x4x8x8", tuned, bad)
    assert code == 4
    assert f"{tuned}: no pairs, nothing to check" in out
    assert f"{bad} on onnxruntime: " in out
    assert call(*words, tuned, tuned)[0] == 0
    assert len(json.loads(call(*words, tuned, tuned, "--json")[1])) == 2
    assert call(*words, tuned, tuned, "--graph-json", tmp_path / "layers.json")[0] == 2
