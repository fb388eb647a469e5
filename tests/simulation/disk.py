"""A disk in memory whose every write can fail, be cut off half way, or be the last one before the power goes.

It is a folder of a file system in memory. The calls by which Python changes files go through `Disk`, so the code under
test needs no other way to write. What the engines' C libraries write is not seen.
"""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

OPEN, OS_OPEN, OS_CLOSE = io.open, os.open, os.close
MADE = os.O_CREAT | os.O_TRUNC | (getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY)
CHANGING = ("mkdir", "link", "rename", "replace", "unlink", "remove", "rmdir")
NEED_ROOM = ("mkdir", "link")


class Died(BaseException):
    """The process ends here, as by a kill. Not an `Exception`: nothing of it can be caught and gone on from."""


class File(io.FileIO):
    """An open file that asks the disk before it changes anything."""

    disk: "Disk"

    def write(self, data: Any) -> int:
        how = self.disk.step(os.fspath(self.name), needs_room=True)
        if how in ("torn", "short"):
            whole = memoryview(data).cast("B")
            written = super().write(whole[: len(whole) // 2])
            if how == "torn":
                self.disk.die()
            return written
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        self.disk.step(needs_room=False)
        return super().truncate(size)

    def close(self) -> None:
        self.disk.files.discard(self)
        super().close()


class Disk:
    """Watches all changes of files while it is `installed`, between `begin` and `end` of a process."""

    def __init__(self, root: Path, at_write: Callable[..., str | None]) -> None:
        """`at_write(name, needs_room=)` raises what a write is to raise; it gives "torn" if the process is to die half
        way, "short" if half of it fits. `name` is that of the file, if data are written to one."""
        self.root, self._at_write = root, at_write
        self.files: WeakSet[File] = WeakSet()
        self.descriptors: set[int] = set()
        self.is_watching = self.is_dead = False
        self._unsafe: dict[int, int] = {}  # by inode, the bytes that are safe of a file that was written since

    def begin(self) -> None:
        """A process begins."""
        self.is_watching, self.is_dead = True, False
        self.files, self.descriptors = WeakSet(), set()

    @property
    def left(self) -> int:
        """How many files are open."""
        return len(self.files) + len(self.descriptors)

    def end(self) -> int:
        """The process has ended. Its files are closed, and how many it had left open is returned."""
        self.is_watching, left = False, self.left
        for file in list(self.files):
            io.FileIO.close(file)
        for descriptor in self.descriptors:
            OS_CLOSE(descriptor)
        self.files, self.descriptors = WeakSet(), set()
        return left

    def step(self, name: str = "", *, needs_room: bool) -> str | None:
        """Before each change."""
        if not self.is_watching:
            return None
        if self.is_dead:
            raise Died
        how = self._at_write(name, needs_room=needs_room)
        if how == "torn" and not needs_room:
            self.die()
        return how

    def die(self) -> None:
        """The process dies: from now on it changes nothing, whatever Python code still runs on the way out."""
        self.is_dead = True
        raise Died

    def lose_power(self, kept: Callable[[int, int], int]) -> None:
        """Lose what no `fsync` has made safe: of each such file `kept(safe, size)` bytes are left."""
        for path in self.root.rglob("*"):
            if path.is_file() and not path.is_symlink():
                found = path.stat()
                if (safe := self._unsafe.get(found.st_ino)) is not None and safe < found.st_size:
                    os.truncate(path, kept(safe, found.st_size))
        self.forget()

    def forget(self) -> None:
        """All is safe now: the system has written it in its own time."""
        self._unsafe.clear()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have Python's calls go through this disk."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (io, builtins):
                patch.setattr(module, "open", self._open)
            patch.setattr(os, "open", self._os_open)
            patch.setattr(os, "close", self._os_close)
            patch.setattr(os, "fsync", self._fsync)
            for name in CHANGING:
                patch.setattr(os, name, self._watched(getattr(os, name), needs_room=name in NEED_ROOM))
            yield

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *how: Any, **named: Any) -> Any:
        if not self.is_watching:
            return OPEN(file, mode, buffering, *how, **named)
        if isinstance(file, int) or named.get("opener") is not None:  # it stands for a descriptor, and closes that
            opened = OPEN(file, mode, buffering, *how, **named)
            self.descriptors.discard(opened.fileno())
            return opened
        if not set(mode) & set("wax+"):
            return OPEN(file, mode, buffering, *how, **named)
        self.step(needs_room="r" not in mode)
        raw = File(file, mode.replace("b", "").replace("t", ""))
        raw.disk = self
        self.files.add(raw)
        found = os.fstat(raw.fileno())
        self._unsafe.setdefault(found.st_ino, found.st_size)
        if "w" in mode:
            self._unsafe[found.st_ino] = 0
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *how, **named)

    def _os_open(self, path: Any, flags: int, *how: Any, **named: Any) -> int:
        if self.is_watching and flags & MADE:
            self.step(needs_room=True)
        descriptor = OS_OPEN(path, flags, *how, **named)
        if self.is_watching:
            self.descriptors.add(descriptor)
        return descriptor

    def _os_close(self, descriptor: int) -> None:
        self.descriptors.discard(descriptor)
        OS_CLOSE(descriptor)

    def _fsync(self, descriptor: int) -> None:
        self.step(needs_room=True)
        if self.is_watching:
            self._unsafe.pop(os.fstat(descriptor).st_ino, None)

    def _watched(self, call: Callable[..., Any], *, needs_room: bool) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.step(needs_room=needs_room)
            return call(*arguments, **named)

        return watched
