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

MARK = "temporary-files-of-qdqtune"
"""The file in such a folder that says whose it is: a folder without it is somebody else's, whatever its name."""

PAUSES = (0.0, 0.05, 0.2, 1.0, 3.0)
"""Seconds before each time that a janitor looks: a process that dies closes one file after the other, and others of its
family still write meanwhile."""

_lock = threading.Lock()
_places: set[bytes] = set()
_janitor: int | None = None
"""Where it is told places."""


def remove_left(parent: str | os.PathLike[str], prefix: str) -> bool:
    """Remove the folders for temporary files in `parent` whose processes were killed; whether none is left there."""
    left = glob.glob(f"{glob.escape(os.fspath(parent))}/{prefix}*/{MARK}")
    for folder in map(os.path.dirname, left):
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


def watch(parent: str | os.PathLike[str], prefix: str) -> None:
    """Have folders in this place removed if this process is killed, once it has a janitor."""
    place = b"%s\0%s\n" % (os.fsencode(os.path.abspath(parent)), prefix.encode())
    with _lock:
        if place not in _places:
            _places.add(place)
            _tell(place)


def hire() -> None:
    """Give this process a janitor; it ends a moment after this process, in whatever way that ends."""
    global _janitor
    with _lock:
        if _janitor is not None:
            return
        program = [sys.executable, "-I", "-S", os.path.abspath(__file__)]
        reads, _janitor = os.pipe()
        nowhere = subprocess.DEVNULL
        subprocess.run(program, stdin=reads, stdout=nowhere, stderr=nowhere, start_new_session=True, check=False)
        os.close(reads)  # what was run has ended, and left one that has no parent
        _tell(b"".join(_places))


def _tell(places: bytes) -> None:
    if _janitor is not None:
        with suppress(BrokenPipeError):  # somebody has ended it
            os.write(_janitor, places)


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
