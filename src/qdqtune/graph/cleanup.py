"""Removes the temporary folders of a process that was killed. It is the program of a small process of its own as well,
which outlives the first and whatever that has started: so it knows nothing but the standard library.

A folder for temporary files is locked by the process that it belongs to. A janitor is told the places where there are
such folders; when its standard input ends, however that came about, it removes those there that nobody holds.
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
"""The file in such a folder that says whose it is: a folder without it is somebody else's, whatever its name."""

PAUSES = (0.0, 0.05, 0.2, 1.0, 3.0)
"""Seconds before each time that a janitor looks: a process that dies closes one file after the other, and others of its
family still write meanwhile."""


def remove_left(parent: str | os.PathLike[str], prefix: str) -> bool:
    """Remove the folders for temporary files in `parent` whose processes were killed; whether none is left there."""
    left = glob.glob(f"{glob.escape(os.fspath(parent))}/{prefix}*/{MARK}")
    for folder in map(os.path.dirname, left):
        if os.path.islink(folder):  # what it leads to does not lie here
            continue
        with suppress(OSError):  # locked, or gone already
            descriptor = locked(folder)
            try:
                remove(folder)
            finally:
                os.close(descriptor)
    return not left


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove a folder, though somebody who is about to end may still write there."""
    for pause in PAUSES:
        time.sleep(pause)
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


def locked(folder: str | os.PathLike[str]) -> int:
    """A descriptor of the folder, which holds a lock on it until it is closed.

    Raises:
        OSError: another one has the lock, or there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Janitor:
    """The janitor of a process, which is told the same places once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: set[bytes] = set()
        self._pipe: int | None = None

    def watch(self, parent: str | os.PathLike[str], prefix: str) -> None:
        """Have folders in this place removed if this process is killed, once the janitor is hired."""
        place = b"%s\0%s\n" % (os.fsencode(os.path.abspath(parent)), prefix.encode())
        with self._lock:
            if place not in self._places:
                self._places.add(place)
                self._tell(place)

    def hire(self) -> None:
        """Have it begin, if it has not; it ends a moment after this process, in whatever way that ends."""
        with self._lock:
            if self._pipe is not None:
                return
            from qdqtune.graph.interpreter import python  # not known to the program that this file is

            program = python("-I", "-S", os.path.abspath(__file__))
            reads, self._pipe = os.pipe()
            nowhere = subprocess.DEVNULL
            subprocess.run(**program, stdin=reads, stdout=nowhere, stderr=nowhere, start_new_session=True, check=False)
            os.close(reads)  # what was run has ended, and left one that has no parent
            self._tell(b"".join(self._places))

    def _tell(self, places: bytes) -> None:
        if self._pipe is not None:
            with suppress(BrokenPipeError):  # somebody has ended it
                os.write(self._pipe, places)


@cache
def own() -> Janitor:
    """That of this process."""
    return Janitor()


def main() -> None:
    """Read places until there is nobody to tell any; then remove what is left there."""
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
