"""Removes the temporary folders of processes that were killed.

Each temporary folder holds a lock of its process. `Cleaner` starts this module as a small program that only needs this
folder and the standard library. It reads from its standard input where such folders are made. The input ends when the
process that started it has ended, even by a kill; the program then removes the folders there that nobody has locked.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache

from qdqtune.system.interpreter import HOME, python

MARK = "temporary-files-of-qdqtune"
"""The file that each of our temporary folders holds: a folder without it is never removed, whatever its name, unless it
is empty and as `mkdtemp` makes folders: its process was killed before it had put the file there."""

FOR_ITS_OWNER = 0o700
"""The mode of folders that `mkdtemp` has made. Those that people make have other modes."""

PAUSES = (0.0, 0.05, 0.2, 1.0, 3.0)
"""Seconds to wait before each attempt: a dying process closes its files one by one, and its children may still write.
Chosen, not measured."""


def remove_left(parent: str | os.PathLike[str], prefix: str) -> bool:
    """Remove the temporary folders in `parent` whose processes were killed. Returns whether no
    temporary folder was found, not even one in use."""
    found = [f for f in glob.glob(f"{glob.escape(os.fspath(parent))}/{prefix}*") if not os.path.islink(f)]
    left = [folder for folder in found if os.path.exists(os.path.join(folder, MARK))]
    for folder in left:
        with suppress(OSError):  # locked, or gone already
            remove_locked(folder, locked(folder))
    unmarked = [folder for folder in found if folder not in left and _is_unused(folder)]
    for folder in unmarked:
        with suppress(OSError):
            descriptor = locked(folder)
            try:
                os.rmdir(folder)
            finally:
                os.close(descriptor)
    return not left and not unmarked


def _is_unused(folder: str) -> bool:
    """Whether a folder is empty and as `mkdtemp` has made it."""
    with suppress(OSError):
        return stat.S_IMODE(os.lstat(folder).st_mode) == FOR_ITS_OWNER and not os.listdir(folder)
    return False


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove a folder. Repeated for a while, since a process that is about to end may still write there. `MARK` goes
    last: if this process is killed meanwhile, others still know the folder as ours."""
    for pause in PAUSES:
        time.sleep(pause)
        for path in _others(folder):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.unlink(path)
        if not _others(folder):
            shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


def _others(folder: str | os.PathLike[str]) -> list[str]:
    """What a folder holds besides `MARK`; nothing if it is gone."""
    with suppress(OSError):
        return [os.path.join(folder, name) for name in os.listdir(folder) if name != MARK]
    return []


def remove_locked(folder: str | os.PathLike[str], descriptor: int) -> None:
    """Remove a folder that this process has locked by this descriptor, which is closed."""
    try:
        remove(folder)
    finally:
        os.close(descriptor)


def locked(folder: str | os.PathLike[str]) -> int:
    """Lock a folder. The lock ends when the returned descriptor is closed.

    Raises:
        OSError: another process has the lock, or there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


PROGRAM = "import sys; sys.path.append(sys.argv[1]); from qdqtune.system.cleanup import main; main()"
"""What the program runs: isolated, it does not find this package by itself."""


class Cleaner:
    """Starts this module as a program, and tells it once of each place with temporary folders."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: set[bytes] = set()
        self._pipe: int | None = None

    def watch(self, parent: str | os.PathLike[str], prefix: str) -> None:
        """Have folders of this prefix in `parent` removed if this process is killed. Takes effect after `start`."""
        place = b"%s\0%s\n" % (os.fsencode(os.path.abspath(parent)), prefix.encode())
        with self._lock:
            if place not in self._places:
                self._places.add(place)
                self._send(place)

    def start(self) -> None:
        """Start the program unless it runs. It ends shortly after this process does.

        Raises:
            OSError: the system starts no process.
        """
        with self._lock:
            if self._pipe is not None:
                return
            reads, writes = os.pipe()
            try:
                program, nowhere = python("-I", "-S", "-c", PROGRAM, HOME), subprocess.DEVNULL
                subprocess.run(
                    **program, stdin=reads, stdout=nowhere, stderr=nowhere, start_new_session=True, check=False
                )
            except BaseException:
                os.close(writes)
                raise
            finally:
                os.close(reads)  # the process has ended, and its child goes on without a parent
            self._pipe = writes
            self._send(b"".join(self._places))

    def _send(self, places: bytes) -> None:
        if self._pipe is not None:
            with suppress(BrokenPipeError):  # somebody has ended it
                os.write(self._pipe, places)


@cache
def cleaner() -> Cleaner:
    return Cleaner()


def main() -> None:
    """Read places until the input ends; then remove the folders that are left there."""
    if os.fork():  # go on without a parent, so that nobody waits for the end
        os._exit(0)
    os.chdir("/")
    places = [line.rstrip(b"\n").split(b"\0") for line in sys.stdin.buffer]
    for pause in PAUSES:
        time.sleep(pause)
        are_clean = [remove_left(os.fsdecode(parent), prefix.decode()) for parent, prefix in places]
        if all(are_clean):
            return
