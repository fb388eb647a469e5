"""The skill for agents: its commands run, what it names exists, and it is in the wheel."""

import json
import re
import shutil
from typing import get_args

import pytest
import yaml

from command_lines import COMMANDS
from conftest import Call
from documents import blocks, options_of_commands, quickly, run_command
from qdqtune.cli.commands import SKILL
from qdqtune.cli.main import EXIT_CODES
from qdqtune.engines.facts import ENGINES
from qdqtune.timing.ratios import Verdict
from qdqtune.tuning.store import Shipped
from qdqtune.tuning.summary import AtThreads, Figures, Summary

_, FRONT, BODY = SKILL.read_text().split("---\n", 2)
LINES = [command for block in blocks(BODY) for command in block.commands]
MADE = ("optimized_final.onnx", "summary.json", "placement.yaml")
"""Files in the folder of a run."""


@pytest.mark.usefixtures("workers")
def test_every_command_runs_and_what_it_says_of_results_is_so(prepared, tmp_path, monkeypatch):
    folder = shutil.copytree(prepared, tmp_path / "here", ignore=shutil.ignore_patterns("qdqtune_output"))
    quickly(monkeypatch)
    monkeypatch.chdir(folder)
    assert len(LINES) > 10
    for line in LINES:
        assert line.startswith("qdqtune ")
        run_command(line, builds=8)
    assert {name for name in MADE if name in BODY} <= {path.name for path in (folder / "tuned").iterdir()}
    summary = json.loads((folder / "tuned" / "summary.json").read_text())
    table = BODY.split("| `tuned/summary.json` |")[1].split("\n\n")[0]
    keys = {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert len(keys) > 6
    assert keys <= Summary.__annotations__.keys()
    assert {"threads", "verdict"} <= AtThreads.__annotations__.keys() | Figures.__annotations__.keys()
    assert {"engine", "version", "device"} <= summary["engine"].keys()


def test_doctor_prints_it(call: Call) -> None:
    assert call("doctor", "--skill") == (0, SKILL.read_text(), "")
    assert json.loads(call("doctor", "--skill", "--json")[1]) == {"text": SKILL.read_text()}


def test_every_name_exists() -> None:
    """What stands in backquotes is a command, a flag, an engine, a file, a key of summary.json or a value of it."""
    flags = set(options_of_commands()) | {"--help-all"}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", BODY)) <= flags
    named = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", BODY, flags=re.DOTALL)))
    table = BODY.split("| `tuned/summary.json` |")[1].split("\n\n")[0]
    keys = set(re.findall(r"`(\w+)`", table))
    known = {*COMMANDS, *ENGINES, *keys, *get_args(Shipped), *get_args(Verdict), "tuned/", "model.onnx", "samples.npz"}
    known |= {f"tuned/{name}" for name in MADE} | Summary.__annotations__.keys()
    assert not {name for name in named - known if not name.startswith("--")}
    assert set(get_args(Shipped)) | set(get_args(Verdict)) <= keys


def test_exit_codes_are_those_of_the_command_line() -> None:
    table = r"\| exit code \| \|\n.*?\n((?:\|.*\n)+)"
    told = re.search(table, BODY)
    assert set(map(int, re.findall(r"^\| (\d+)", told[1], re.MULTILINE))) <= EXIT_CODES.keys()


def test_its_form_is_that_of_agent_skills_and_it_is_short() -> None:
    front = yaml.safe_load(FRONT)
    assert front["name"] == "qdqtune"
    assert len(front["description"]) <= 1024
    assert front.keys() <= {"name", "description", "license"}
    assert len(BODY.split()) <= 660
