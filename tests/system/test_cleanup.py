"""Temporary folders of processes that were killed."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from qdqtune.system.writing import SCRATCH, Scratch, atomic_write, sweep
from runs import environment

NEW = b"new" * 1000


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


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

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scratch.close()
    with (tmp_path / "other").open("wb") as other:  # which gets the number of the lock
        scratch.close()
        other.write(NEW)
    sweep(tmp_path, SCRATCH)
    assert names(tmp_path) == {"other"}
