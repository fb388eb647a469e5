"""No command overwrites or deletes what a user has: inputs by whatever name, and files that are not of our making."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import onnx
import pytest

from command_lines import is_refused
from conftest import Call
from qdqtune.errors import OutputError
from qdqtune.graph.saving import save
from qdqtune.system import interpreter
from qdqtune.system.checks import HEAD, LIST, below
from qdqtune.system.writing import SCRATCH, Scratch, atomic_write, sweep, write_json
from qdqtune.tuning.loop import tune
from runs import environment, hopeless, mixed, room_for, settings, write

QUICK = ("--engine", "fake", "--engine-option", "asymmetric=true", "--builds", "4", "-q")


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A model whose weights lie in weights.bin beside it, and samples."""
    model = write(mixed(), tmp_path)
    onnx.save(onnx.load(model), model, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return model


@pytest.mark.parametrize(
    ("more", "target", "what"),
    [
        ([], "weights.bin", "the model"),
        (["--calibration-data", "d"], "d/a.npz", "the file of --calibration-data"),
        (["--calibration-data", "code.py:samples"], "code.py", "the file of --calibration-data"),
        (["--evaluate", "code:score"], "code.py", "the file of --evaluate"),
    ],
)
def test_inputs_are_not_overwritten(call, external, more, target, what, monkeypatch):
    monkeypatch.chdir(external.parent)
    Path("d").mkdir()
    shutil.copy(external.with_suffix(".npz"), "d/a.npz")
    Path("code.py").write_text("def samples(): yield {}\ndef score(predict): return 1.0\n")
    is_refused(call, external.parent, f"would overwrite {what}", "quantize", external, *more, "-o", target)


def test_files_that_engine_options_name_are_not_overwritten(call: Call, model: Path, tmp_path: Path) -> None:
    library = tmp_path / "plugin.so"
    library.write_text("a library")
    named = ["--engine-option", f"plugin_libraries={library}"]
    is_refused(call, tmp_path, "would overwrite the plugin libraries", "build", model, *named, "-o", library)
    for name in (model, library):
        cache = [*named, "--engine", "trtexec", "--engine-option", f"timing_cache={name}", "-o", tmp_path / "m.plan"]
        is_refused(call, tmp_path, "--engine-option timing_cache", "build", model, *cache)


@pytest.mark.parametrize("mode", ["cut", "region", "subgraph", "front"])
def test_files_beside_ours_stay(call: Call, model: Path, tmp_path: Path, mode: str) -> None:
    mine = [tmp_path / folder / "notes.txt" for folder in ("region_models", "subgraphs", "front", "logs")]
    mine += [tmp_path / "logs" / "worker-mine" / "notes.txt", tmp_path / ".qdqtune-mine" / "notes.txt"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    data = ["--calibration-data", model.with_suffix(".npz")]
    chosen = ["--front", "--builds", "14", *data] if mode == "front" else ["--mode", mode]
    for _ in range(2):
        code, _, err = call("tune", model, *QUICK, *chosen, "--restart", "-o", tmp_path)
        assert code in (0, 3, 4), err
        assert all(path.read_text() == "mine" for path in mine)


@pytest.mark.parametrize(
    "words",
    [
        "inspect PIPE",
        "run PIPE",
        "apply MODEL --placement PIPE -o made.onnx",
        "quantize MODEL --calibration-cache PIPE -o made.onnx",
        *(f"autotune -m MODEL {' '.join(QUICK)} -o out --{option} PIPE"
          for option in ("node-filter-list", "pattern-cache", "qdq-baseline", "graph-json")),
    ],
)  # fmt: skip
def test_a_pipe_is_no_file_to_read(call: Call, model: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    os.mkfifo("pipe")
    code, _, err = call(*words.replace("PIPE", "pipe").replace("MODEL", str(model)).split())
    assert (code, "is no file" in err) == (2, True), err


@pytest.mark.parametrize("name", ["summary.json", "run.json", "placement.yaml", "baseline.onnx", LIST])
def test_pipes_in_the_folder_of_a_run_are_refused(call: Call, external: Path, name: str) -> None:
    folder = external.parent / "tuned"
    tune(settings(external, builds=4, mode="cut", output_dir=folder))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for arguments in (["explain", folder], ["report", folder], ["tune", external, *QUICK, "-o", folder]):
        code, _, err = call(*arguments)
        assert code == 2 or arguments[0] != "tune", err


def test_what_lies_below_a_folder_is_listed_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert sorted(below(tmp_path)) == sorted(tmp_path.rglob("*"))
    assert below(tmp_path / "gone") == []  # as a folder that vanishes meanwhile


# Results appear whole under their names or not at all; what had these names stays until then
OLD, NEW = b"old", b"new" * 1000


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write_both(target: Path, then: Callable[[], None]) -> None:
    """A model and its data, and what happens before they take their names."""
    with atomic_write(target) as fresh:
        fresh.write_bytes(NEW)
        fresh.with_name(f"{fresh.name}.data").write_bytes(NEW)
        then()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_an_error_leaves_existing_files_unchanged(tmp_path: Path, error: BaseException) -> None:
    for name in ("r.onnx", "r.onnx.data"):
        (tmp_path / name).write_bytes(OLD)
    expected = OutputError if isinstance(error, OSError) else type(error)

    with pytest.raises(expected):
        write_both(tmp_path / "r.onnx", Mock(side_effect=error))
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {OLD}
    assert names(tmp_path) == {"r.onnx", "r.onnx.data"}


@pytest.mark.parametrize("stop", range(4))
def test_files_of_one_result_take_their_names_together_or_none_does(
    tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renaming stops at any step: two old files go aside, two new ones take their names."""
    for name in ("r.onnx", "r.onnx.data"):
        (tmp_path / name).write_bytes(OLD)
    replace, done = Path.replace, [0]

    def limited(self: Path, target: Path) -> Path:
        done[0] += 1
        if done[0] == stop + 1:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    with pytest.raises(OutputError, match="No space left"):
        write_both(tmp_path / "r.onnx", lambda: monkeypatch.setattr(Path, "replace", limited))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"r.onnx": OLD, "r.onnx.data": OLD}


def test_a_link_stays_a_link_and_a_second_name_keeps_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "real.onnx"
    target.write_bytes(OLD)
    target.chmod(0o640)
    (tmp_path / "link.onnx").symlink_to(target)
    os.link(target, tmp_path / "second.onnx")
    with atomic_write(tmp_path / "link.onnx") as fresh:
        fresh.write_bytes(NEW)
    assert (tmp_path / "link.onnx").is_symlink()
    assert target.read_bytes() == NEW
    assert target.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "second.onnx").read_bytes() == OLD


@pytest.mark.parametrize("limit", [1 << 30, 6000])
@pytest.mark.parametrize("room", [0, 1000, 20_000])
def test_a_model_on_a_full_disk(tmp_path: Path, limit: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.graph.saving.ONE_FILE_LIMIT", limit)
    path = tmp_path / "m.onnx"
    save(hopeless(), path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with room_for(room), pytest.raises(OutputError, match=r"cannot write .*m\.onnx"):
        save(mixed(), path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    save(mixed(), path)
    onnx.checker.check_model(str(path))


def test_a_file_that_cannot_be_listed_is_not_left_as_one_of_nobodys(tmp_path: Path) -> None:
    """It would be refused by every later command."""
    (tmp_path / LIST).write_text(f"{HEAD}\n{'x' * 2000}\n")
    with room_for(2020), pytest.raises(OutputError, match="File too large"):
        write_json(tmp_path / "summary", {"a": 1}, "record")
    assert names(tmp_path) == {LIST}


# Temporary folders of processes that were killed
def test_folders_of_a_killed_run_are_removed_and_others_stay(tmp_path: Path) -> None:
    target = tmp_path / "r.onnx"
    script = f"""
import os, pathlib
from qdqtune.system.writing import atomic_write
with atomic_write(pathlib.Path({str(target)!r})) as fresh:
    fresh.write_bytes(b"half")
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, env=environment()).returncode == -9
    (left,) = tmp_path.iterdir()
    (tmp_path / ".qdqtune-mine").mkdir()
    (tmp_path / ".qdqtune-mine" / "notes.txt").touch()
    with Scratch(tmp_path) as busy, atomic_write(target) as fresh:
        fresh.write_bytes(NEW)
        assert busy.exists()
    assert not left.exists()
    assert names(tmp_path) == {"r.onnx", ".qdqtune-mine"}
    assert names(tmp_path / ".qdqtune-mine") == {"notes.txt"}


def test_a_folder_that_another_process_takes_for_one_that_was_left_is_made_again(tmp_path, monkeypatch):
    taken: list[str] = []

    def made(*how: object) -> str:
        path = tempfile_mkdtemp(*how)
        if not taken:
            taken.append(path)
            sweep(tmp_path, SCRATCH)
        return path

    tempfile_mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", made)
    with Scratch(tmp_path) as folder:
        assert taken[0] != str(folder)
        assert folder.exists()
    assert not names(tmp_path)


def test_a_removal_that_is_interrupted_closes_its_lock_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Scratch(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            scratch.close()
    with (tmp_path / "other").open("wb") as other:  # which gets the number of the lock
        scratch.close()
        other.write(NEW)
    sweep(tmp_path, SCRATCH)
    assert names(tmp_path) == {"other"}


# How Python processes are started and ended
def test_the_current_folder_is_searched_where_the_package_itself_lies_there(tmp_path, monkeypatch):
    def path() -> list[str]:
        told: str = interpreter.python("-c", "")["env"]["PYTHONPATH"]
        return told.split(os.pathsep)

    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path), str(tmp_path / "gone")])
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "gone") in path()
    assert str(tmp_path) not in path()
    monkeypatch.chdir(interpreter.HOME)
    assert path()[0] == interpreter.HOME
    assert str(tmp_path) in path()


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_group_ends_with_all_that_its_leader_has_started() -> None:
    leader = subprocess.Popen(**interpreter.python("-c", PARENT), process_group=0, stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    assert os.getpgid(child) == leader.pid
    os.killpg(leader.pid, signal.SIGSTOP)
    interpreter.end_group(leader.pid)
    assert leader.wait() == -signal.SIGKILL
    assert leader.stdout.read() == ""  # the child held it as well
    leader.stdout.close()
    interpreter.end_group(leader.pid)  # it is gone already
