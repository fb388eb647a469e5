"""What goes to an index: a source distribution with all that its tests need, and a wheel."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from documents import ROOT
from qdqtune.cli.commands import SKILL

OF_REPOSITORY = {".ci/run", ".gitignore"}
"""Files that are of use in the repository only."""


def test_a_source_distribution_holds_all_that_its_tests_need(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    if not files:
        pytest.skip("needs a clone")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    code = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    source, wheel = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix)
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files - names <= OF_REPOSITORY
    assert "examples/qdq_placement/README.md" in names
    with zipfile.ZipFile(wheel) as installed:
        assert installed.read("qdqtune/skill/SKILL.md") == SKILL.read_bytes()
