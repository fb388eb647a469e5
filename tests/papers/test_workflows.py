"""Workflows and images, which run elsewhere: they parse, are pinned, and name commands and files that exist."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_lines import COMMANDS
from documents import MAKEFILE, PROJECT, ROOT

WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HADOLINT = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}")


def steps(name: str) -> Iterator[dict[str, Any]]:
    """All steps of a workflow."""
    for job in WORKFLOWS[name]["jobs"].values():
        yield from job.get("steps", ())


def test_there_is_one_for_tests_and_one_for_a_release() -> None:
    assert WORKFLOWS.keys() == {"test", "release"}
    assert WORKFLOWS["release"]["jobs"]["test"]["uses"] == "./.github/workflows/test.yml"
    assert "workflow_call" in WORKFLOWS["test"][True]  # YAML 1.1 reads `on` as true


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_commands_exist(name: str) -> None:
    found = list(steps(name))
    assert len(found) > 4
    assert all(PINNED.fullmatch(step["uses"]) for step in found if "uses" in step)
    for line in (line for step in found for line in step.get("run", "").splitlines()):
        program, *words = line.split()
        assert program in ("make", "docker", "python", "test"), line
        if program == "make":
            assert re.search(rf"^{words[0]}:", MAKEFILE, re.MULTILINE), line
        if program == "docker" and words[0] == "run":
            assert words[-1] in COMMANDS
        assert "${{" not in line, "text of others does not belong into a shell script"


def test_only_publishing_may_prove_who_it_is() -> None:
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}
        allowed = {job: told["permissions"] for job, told in workflow["jobs"].items() if "permissions" in told}
        assert allowed == ({"publish": {"id-token": "write"}} if name == "release" else {})


def test_the_matrix_holds_every_python_that_the_package_names() -> None:
    matrix = WORKFLOWS["test"]["jobs"]["tests"]["strategy"]["matrix"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert matrix["python"] == named
    assert {system.partition("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert WORKFLOWS["test"]["jobs"]["images"]["strategy"]["matrix"]["engine"] == [path.stem for path in IMAGES]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_an_image_copies_files_that_exist_and_starts_our_program(path: Path) -> None:
    lines = path.read_text().replace("\\\n", " ").splitlines()
    taken = (ROOT / ".dockerignore").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists()
                assert f"!{name}" in taken
    assert f'ENTRYPOINT ["{next(iter(PROJECT["scripts"]))}"]' in lines
    (extra,) = re.findall(r"\$\{wheel\}\[(\w+)\]", path.read_text())
    assert extra in PROJECT["optional-dependencies"]
    (python,) = re.findall(r"^ARG BASE=python:([\d.]+)-slim$", path.read_text(), re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint")
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_hadolint_finds_nothing_in_an_image(path: Path) -> None:
    done = subprocess.run([str(HADOLINT), path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
