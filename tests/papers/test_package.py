"""What goes to an index: metadata, and a source distribution with documents and examples."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from documents import ROOT

PARTS = ("src", "docs", "examples", "demo", "benchmarks")
FILES = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "mkdocs.yml",
)


def test_metadata_are_complete() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": "qdqtune contributors"}]
    assert project["license"] == "Apache-2.0"
    assert "Typing :: Typed" in project["classifiers"]
    assert (ROOT / project["readme"]).is_file()


def test_a_source_distribution_holds_documents_and_examples(tmp_path: Path) -> None:
    for part in PARTS:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    code = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (made,) = (tmp_path / "dist").iterdir()
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "mkdocs.yml",
        "docs/index.md",
        "docs/site/hooks.py",
        "docs/speedups.svg",
        "demo/digits.onnx",
        "demo/samples.npz",
        "README.md",
        "CHANGELOG.md",
    }
    assert wanted | {"examples/qdq_placement/README.md", "src/qdqtune/py.typed"} <= names
