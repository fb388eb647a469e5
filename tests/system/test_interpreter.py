"""How Python processes are started and ended."""

import os
import signal
import subprocess
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
