"""Files that are written atomically, and temporary folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from qdqtune.errors import OutputError, writing
from qdqtune.system.checks import check_inside, real
from qdqtune.system.cleanup import MARK, cleaner, locked, remove_left, remove_locked

SCRATCH = ".qdqtune-"
"""Prefix of temporary folders beside a result."""

TEMPORARY = "qdqtune-"
"""Prefix of temporary folders in the system's temporary folder."""

WORKERS = "worker-"
"""Prefix of temporary folders of engine processes, beside their logs."""


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """Yield a file to write instead of `target`, which is renamed to `target` when the block ends without an error.

    Files that were written beside it (external data of a model) are renamed with it. Until then, and after an error,
    existing files of these names are unchanged. If `target` is a link to a file in its folder or below, that file is
    replaced."""
    with writing(target):
        file = _replaceable(target)
        with Scratch(file.parent) as folder:
            fresh = folder / "new"
            fresh.mkdir()
            yield fresh / file.name
            made = sorted(path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file())
            for name in made:
                check_inside(file.parent / name, file.parent)
                _flush(fresh / name, file.parent / name)
            made.sort(key=lambda name: name == Path(file.name))  # the file itself comes last
            rename_all([(fresh / name, file.parent / name) for name in made], folder / "old")


def _replaceable(path: Path) -> Path:
    """The file to replace, links followed."""
    check_inside(path, path.parent)
    file = real(path)
    if file.exists() and not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return file


def _flush(fresh: Path, target: Path) -> None:
    """Flush a file to the disk, so that a full disk shows before anything is renamed, and copy the old permissions."""
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    if target.exists():
        shutil.copymode(target, fresh)


def write_through(file: IO[bytes], data: bytes) -> None:
    """Append data to a file that is open without a buffer, and flush it to the disk. On an error nothing is added.

    Raises:
        OSError: the disk is full, say.
    """
    end, left = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


def append(log: Path, text: str) -> None:
    """Add text to a log; characters that are not UTF-8, as in names of files, are escaped."""
    with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file."""
    with atomic_write(path) as fresh:
        fresh.write_text(json.dumps(dict(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def rename_all(moves: Sequence[tuple[Path, Path]], aside: Path) -> None:
    """Rename files to their targets in this order, and undo everything if that fails. `aside`, a new folder, takes
    the old files meanwhile.

    An old model is moved first and a new one last, so that no model is ever beside the weights of another.
    """
    kept: list[tuple[Path, Path]] = []
    placed: list[Path] = []
    try:
        if len(moves) > 1:
            aside.mkdir()
            for number, (_, target) in enumerate(reversed(moves)):
                if target.exists():
                    kept.append((target.replace(aside / str(number)), target))
        for fresh, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            placed.append(fresh.replace(target))
    except BaseException:
        for path in placed if len(moves) > 1 else ():
            path.unlink(missing_ok=True)
        for old, target in reversed(kept):
            old.replace(target)
        raise


def temporary_folder() -> Scratch:
    """A new folder in the system's folder for temporary files. It is removed even if this process is killed at once."""
    try:
        parent = Path(tempfile.gettempdir())
    except OSError as error:  # no such folder can be written to, as on full disks
        raise OutputError(f"cannot write temporary files: {error.strerror}") from error
    with suppress(OSError):  # without it, the folder of a killed process is removed by the next command
        cleaner().start()
    with writing(parent):
        return Scratch(parent, TEMPORARY)


class Scratch:
    """A temporary folder: a context manager that gives its path and removes it at the end.

    It is locked while its process lives. If the process is killed, `cleanup` removes it, at the latest when the next
    folder is made in the same place.
    """

    def __init__(self, parent: Path, prefix: str = SCRATCH) -> None:
        """Make the folder in `parent`.

        Raises:
            OSError: the folder cannot be made.
        """
        remove_left(parent, prefix)
        cleaner().watch(parent, prefix)
        self._lock, self.path = -1, parent
        while not self._made(Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()):
            pass

    def _made(self, path: Path) -> bool:
        """Lock and mark a new folder. False if another process was faster, which takes it for one that was left."""
        try:
            self._lock, self.path = locked(path), path
            (path / MARK).touch()
        except (BlockingIOError, FileNotFoundError):
            self.close()
            return False
        except BaseException:
            self.close()
            with suppress(OSError):
                path.rmdir()  # it was not locked yet
            raise
        return True

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        lock, self._lock = self._lock, -1  # closed once, even if this is interrupted: another file may get its number
        if lock >= 0:
            remove_locked(self.path, lock)
