"""Everything that the README tells a newcomer to type works, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

from documents import ROOT, blocks, options_of_commands, run_command, run_python
from qdqtune.engines import MODULES, EngineSpec
from qdqtune.engines.worker import Session
from runs import mixed, write

README = (ROOT / "README.md").read_text()
BLOCKS = blocks(README)
COMMANDS = [command for block in BLOCKS if block.kind == "bash" for command in block.commands]


pytestmark = pytest.mark.usefixtures("workers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the README's commands find: a model, its samples, and the model trained again."""
    folder = tmp_path_factory.mktemp("readme")
    write(mixed(), folder).with_suffix(".npz").rename(folder / "samples.npz")
    proto = onnx.load(folder / "model.onnx")
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(1.5 * onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(proto, folder / "retrained.onnx")
    return folder


def test_every_command_runs_in_the_order_of_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(COMMANDS) > 8
    monkeypatch.chdir(folder)
    for command in COMMANDS:
        run_command(command)
    assert (folder / "quantized.onnx").is_file()
    listed = {
        name.rstrip("/") for name in re.findall(r"^\| `([\w./]+)` \|", README.split("## How it")[0], re.MULTILINE)
    }
    made = {path.name for path in (folder / "qdqtune_output").iterdir()}
    assert made <= listed
    assert listed - made <= {"region_models", "units.json"}  # only where a region won, only in cut mode


def test_the_python_code_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = [block.text for block in BLOCKS if block.kind == "python"]
    engine = 'EngineSpec("onnxruntime", {"threads": 1})'
    assert engine in code
    Session(EngineSpec("onnxruntime", {"threads": 1}))  # takes these options
    monkeypatch.chdir(folder)
    assert run_python(code, capsys).startswith("True ")
    assert (folder / "from_python" / "optimized_final.onnx").is_file()


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {block.kind for block in BLOCKS} == {"bash", "python"}


OF_TRTEXEC = ("--int8", "--calib")


def test_every_option_and_engine_exists() -> None:
    known = set(options_of_commands())
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", README))
    assert named <= known | {"--help", *OF_TRTEXEC}
    assert len(named) > 15
    table = README.split("\n## Engines\n")[1].split("\n## ")[0]
    assert {"onnxruntime", "fake"} <= set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) <= MODULES.keys()
