"""How Python processes are started."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from qdqtune.system import interpreter
from test_architecture import MODULES, imports


def test_the_current_folder_is_searched_where_the_package_itself_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_nobody_else_starts_a_python() -> None:
    found = {name for name, path in MODULES.items() if "sys.executable" in path.read_text()}
    assert found == {"qdqtune.system.interpreter"}
    starters = re.compile(r"multiprocessing(?!\.connection)|concurrent\.futures\.process|os\.(exec|spawn|posix_spawn)")
    assert not {name for name, path in MODULES.items() if any(map(starters.match, imports(path)))}
