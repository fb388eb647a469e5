"""What goes to an index: metadata, a source distribution with all that its tests need."""

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from documents import MAKEFILE, PROJECT, ROOT

OF_REPOSITORY = {".ci/run", ".gitignore"}
"""Files that are of use in the repository only."""


def test_metadata_are_complete() -> None:
    assert PROJECT["authors"] == [{"name": "qdqtune contributors"}]
    assert PROJECT["license"] == "Apache-2.0"
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / PROJECT["readme"]).is_file()


def test_a_source_distribution_holds_all_that_its_tests_need(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    if not files:
        pytest.skip("needs a clone")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    code = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (made,) = (tmp_path / "dist").iterdir()
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files - names <= OF_REPOSITORY
    assert "examples/qdq_placement/README.md" in names


def test_distributions_are_built_in_an_environment_of_their_own() -> None:
    """`make dist` needs an index, so that no test runs it: its commands are looked at."""
    planned = subprocess.run(["make", "-n", "dist"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line for line in planned.splitlines() if re.search(r"-m build$|twine check --strict dist/\*", line)]
    assert not re.search(r"(?<!build/)\.venv", planned)
    assert re.search(r"^#   make dist ", MAKEFILE, re.MULTILINE)
