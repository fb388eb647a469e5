"""Removes the temporary folders of processes that were killed.

Each temporary folder holds a lock of its process. `Cleaner` starts this module as a small program that only needs the
standard library. It reads from its standard input where such folders are made. The input ends when the process that
started it has ended, even by a kill; the program then removes the folders there that nobody has locked.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache

MARK = "temporary-files-of-qdqtune"
"""The file that each of our temporary folders holds: a folder without it is never removed, whatever its name."""

PAUSES = (0.0, 0.05, 0.2, 1.0, 3.0)
"""Seconds to wait before each attempt: a dying process closes its files one by one, and its children may still write.
Chosen, not measured."""


def remove_left(parent: str | os.PathLike[str], prefix: str) -> bool:
    """Remove the temporary folders in `parent` whose processes were killed. Returns whether no
    temporary folder was found, not even one in use."""
    left = glob.glob(f"{glob.escape(os.fspath(parent))}/{prefix}*/{MARK}")
    for folder in map(os.path.dirname, left):
        if os.path.islink(folder):  # its target lies elsewhere
            continue
        with suppress(OSError):  # locked, or gone already
            descriptor = locked(folder)
            try:
                remove(folder)
            finally:
                os.close(descriptor)
    return not left


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove a folder. Repeated for a while, since a process that is about to end may still write there."""
    for pause in PAUSES:
        time.sleep(pause)
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


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
        """Start the program unless it runs. It ends shortly after this process does."""
        with self._lock:
            if self._pipe is not None:
                return
            from qdqtune.system.interpreter import python  # here, because the program itself cannot import qdqtune

            program = python("-I", "-S", os.path.abspath(__file__))
            reads, self._pipe = os.pipe()
            nowhere = subprocess.DEVNULL
            subprocess.run(**program, stdin=reads, stdout=nowhere, stderr=nowhere, start_new_session=True, check=False)
            os.close(reads)  # the process has ended, and its child goes on without a parent
            self._send(b"".join(self._places))

    def _send(self, places: bytes) -> None:
        if self._pipe is not None:
            with suppress(BrokenPipeError):  # somebody has ended it
                os.write(self._pipe, places)


@cache
def cleaner() -> Cleaner:
    """The cleaner of this process."""
    return Cleaner()


def main() -> None:
    """Read places until the input ends; then remove the folders that are left there."""
    if os.fork():
        os._exit(0)
    os.chdir("/")
    places = [line.rstrip(b"\n").split(b"\0") for line in sys.stdin.buffer]
    for pause in PAUSES:
        time.sleep(pause)
        are_clean = [remove_left(os.fsdecode(parent), prefix.decode()) for parent, prefix in places]
        if all(are_clean):
            return


if __name__ == "__main__":
    main()
