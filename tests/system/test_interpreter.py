"""How Python processes are started."""

import os
import sys

from qdqtune.system import interpreter


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
