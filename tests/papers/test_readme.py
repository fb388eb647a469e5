"""Everything that the README tells a newcomer to type works, and what it names exists."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import digits
from documents import ROOT, blocks, quickly, run_command, run_python
from runs import mixed, write

README = (ROOT / "README.md").read_text()
BLOCKS = blocks(README)
COMMANDS = [command for block in BLOCKS if block.kind == "bash" for command in block.commands]


pytestmark = pytest.mark.usefixtures("workers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone, as far as the README's commands look at it, with a model that takes no time."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "demo").mkdir()
    write(mixed(), folder / "demo", "digits").with_suffix(".npz").rename(folder / "demo" / "samples.npz")
    assert {path.name for path in (folder / "demo").iterdir()} <= {p.name for p in (ROOT / "demo").iterdir()}
    return folder


def test_every_command_runs_in_the_order_of_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(COMMANDS) >= 6
    quickly(monkeypatch)
    monkeypatch.chdir(folder)
    for command in COMMANDS:
        run_command(command, builds=8)
    files = (ROOT / "docs" / "reference" / "files.md").read_text()
    for path in (folder / "digits").iterdir():
        assert f"`{path.name}{'/' * path.is_dir()}`" in files


def test_it_is_short_and_its_picture_is_that_of_the_figures() -> None:
    assert len(README.split()) <= 620
    spec = importlib.util.spec_from_file_location("speedups", ROOT / "benchmarks" / "speedups.py")
    speedups = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(speedups)
    drawn = speedups.picture(speedups.TABLE.read_text())
    assert drawn == speedups.PICTURE.read_text()
    assert drawn.count('<rect class="tuned"') == 13 + 13 + 1


def test_its_samples_are_those_that_the_demo_calibrates_with() -> None:
    with np.load(ROOT / "demo" / "samples.npz") as arrays:
        assert np.array_equal(arrays[digits.INPUT_NAME], digits.load().calibration.pixels)


def test_the_python_code_runs(folder, monkeypatch, capsys):
    (code,) = [block.text for block in BLOCKS if block.kind == "python"]
    quickly(monkeypatch)
    monkeypatch.chdir(folder)
    speedup, file = run_python(code, capsys).split()
    assert float(speedup) > 1
    assert file == "from_python/optimized_final.onnx"
    assert (folder / file).is_file()
