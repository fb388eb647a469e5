"""Everything that the README tells a newcomer to type works, and what it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import onnx
import pytest

from qdqtune import cli
from qdqtune.engines import MODULES, EngineSpec
from qdqtune.engines.worker import Session
from tuning import mixed, without_processes, write

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


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


def run(command: str) -> None:
    """A command of the README, as it stands. Only the engine is changed, to the one that answers at once."""
    program, *arguments = shlex.split(command)
    if program == "qdqtune":
        quick = [] if arguments[0] in ("inspect", "doctor") else ["--engine", "fake"]
        with pytest.raises(SystemExit) as end:
            cli.main([*arguments, *quick])
        assert end.value.code == 0
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", MAKEFILE, re.MULTILINE)
    elif command == ". .venv/bin/activate":
        assert "VENV := .venv\n" in MAKEFILE
    else:
        assert command == "pip install ."
        assert (ROOT / "pyproject.toml").is_file()


def test_every_command_runs_in_the_order_of_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(COMMANDS) > 8
    without_processes(monkeypatch)
    monkeypatch.chdir(folder)
    for command in COMMANDS:
        run(command)
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
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    engine = 'EngineSpec("onnxruntime", {"threads": 1})'
    assert engine in code
    Session(EngineSpec("onnxruntime", {"threads": 1}))  # takes these options
    without_processes(monkeypatch)
    monkeypatch.chdir(folder)
    exec(compile(code.replace(engine, 'EngineSpec("fake")'), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("True ")
    assert (folder / "from_python" / "optimized_final.onnx").is_file()


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {kind for kind, _ in BLOCKS} == {"bash", "python"}


def test_every_option_and_engine_exists() -> None:
    known = {name for command in cli.app.commands.values() for option in command.params for name in option.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", README))
    assert named <= known | {"--help"}
    assert len(named) > 15
    table = README.split("\n## Engines\n")[1].split("\n## ")[0]
    assert {"onnxruntime", "fake"} <= set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) <= MODULES.keys()


def test_the_map_has_every_module_and_no_other() -> None:
    source = ROOT / "src" / "qdqtune"
    rows = re.findall(r"^\| (`.*?) \|", README.split("\n## Where things are\n")[1].split("\n## ")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)} - {"src/qdqtune/"}
    files = {p.name for p in source.glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{p.parent.name}/" for p in source.glob("*/__init__.py")}
    assert named == files | folders
