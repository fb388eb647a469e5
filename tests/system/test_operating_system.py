"""What differs between systems stands in one module; here is its side of Linux and macOS."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qdqtune.system import operating_system
from qdqtune.system.interpreter import python

PACKAGE = Path(operating_system.__file__).parent.parent
WANTING = re.compile(
    r"\b(fcntl|killpg|signal\.SIG(KILL|STOP)|os\.(fork|pread|pwrite|getloadavg|getuid|mkfifo)|process_group=|pass_fds=|"
    r"start_new_session=|CDLL\(None\))"
)
"""What Windows does not have, as far as we have used it. `mypy --platform win32` knows the rest."""

posix = pytest.mark.skipif(sys.platform == "win32", reason="how Linux and macOS do it")

HOLDER = """
import os, sys
from qdqtune.system import operating_system
file = open(sys.argv[1], "ab")
operating_system.lock(file.fileno())
print("locked", flush=True)
sys.stdin.read()
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
READER = """
import os, sys
from qdqtune.system.operating_system import descriptor_of
print(os.read(descriptor_of(int(sys.argv[1])), 5).decode())
"""


def test_only_one_module_asks_for_what_windows_lacks() -> None:
    found = {path.name for path in PACKAGE.rglob("*.py") if WANTING.search(path.read_text())}
    assert found == {"operating_system.py"}


def test_a_lock_holds_against_others_until_its_process_ends(tmp_path: Path) -> None:
    file = tmp_path / "state"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(**python("-c", HOLDER, str(file)), **pipes, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with file.open("ab") as ours:
            ours.write(b"one")
            with pytest.raises(BlockingIOError):
                operating_system.lock(ours.fileno())
            holder.communicate("")
            operating_system.lock(ours.fileno())
            ours.write(b"two")
    assert file.read_bytes() == b"onetwo"


@posix
def test_a_group_ends_with_all_that_its_leader_has_started() -> None:
    leader = subprocess.Popen(**python("-c", PARENT), **operating_system.own_group(), stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    assert os.getpgid(child) == leader.pid
    operating_system.stop_group(leader.pid)
    operating_system.end_group(leader.pid)
    assert leader.wait() == -signal.SIGKILL
    assert leader.stdout.read() == ""  # the child held it as well
    leader.stdout.close()
    operating_system.end_group(leader.pid)  # it is gone already


def test_a_child_inherits_a_pipe() -> None:
    reads, writes = os.pipe()
    handle = operating_system.handle_of(reads)
    child = subprocess.Popen(
        **python("-c", READER, str(handle)),
        **operating_system.own_group(),
        **operating_system.inherited(handle),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.write(writes, b"hello")
    assert child.communicate()[0] == "hello\n"
    os.close(reads)
    os.close(writes)


def test_an_interrupt_of_this_process_reaches_its_handler() -> None:
    """In a process of its own: one that runs tests may do something else on an interrupt."""
    code = """
from qdqtune.system import operating_system
seen = []
operating_system.on_interrupt(lambda *_: seen.append(1))
operating_system.interrupt_self()
while not seen:
    pass
print(seen)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[1]\n"


def test_reading_leaves_the_place_in_a_file(tmp_path: Path) -> None:
    with (tmp_path / "data").open("w+b") as file:
        file.write(b"abcdef")
        file.flush()
        assert operating_system.read_at(file, 2, 1) == b"bc"
        assert file.tell() == 6


def test_the_load_is_a_number_where_there_is_one() -> None:
    load = operating_system.load()
    assert load is None or load >= 0
