"""Files that appear whole under their names or not at all, and folders for temporary files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from qdqtune.errors import writing
from qdqtune.system.checks import check_inside, real
from qdqtune.system.cleanup import MARK, cleaner, locked, remove, remove_left

SCRATCH = ".qdqtune-"
"""How the names of our folders for temporary files begin."""

TEMPORARY = "qdqtune-"
"""The same where the system has its temporary files."""

WORKERS = "worker-"
"""The same for those of engine processes, beside their logs."""


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """A file to write instead of `target`, which takes its name when the block ends without an error.

    So does all that was written beside it, under the same names beside the target: a model and its external data appear
    together. Until then, and after an error, what had these names is as it was. Where `target` is a link to a file in
    the same folder or below, that file is replaced.

    Raises:
        OutputError: it cannot be written, or a link leads out of the folder.
    """
    with writing(target):
        file = _replaceable(target)
        with Scratch(file.parent) as folder:
            fresh = folder / "new"
            fresh.mkdir()
            yield fresh / file.name
            made = sorted(path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file())
            for name in made:
                check_inside(file.parent / name, file.parent)
                _settle(fresh / name, file.parent / name)
            made.sort(key=lambda name: name == Path(file.name))  # the file itself comes last
            rename_all([(fresh / name, file.parent / name) for name in made], folder / "old")


def _replaceable(path: Path) -> Path:
    """The file that a name leads to. One that may not be written is not replaced either.

    Raises:
        OSError: it may not.
        OutputError: it leads out of its folder.
    """
    check_inside(path, path.parent)
    file = real(path)
    if file.exists() and not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return file


def _settle(fresh: Path, target: Path) -> None:
    """Bring a file to the disk, so that a full one shows before a name is taken, with the rights of the old one."""
    if target.exists():
        shutil.copymode(target, fresh)
    with fresh.open("rb") as file:
        os.fsync(file.fileno())


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file for machines.

    Raises:
        OutputError: the file cannot be written.
    """
    with atomic_write(path) as fresh:
        fresh.write_text(json.dumps(dict(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def rename_all(moves: Sequence[tuple[Path, Path]], aside: Path) -> None:
    """Rename files to their targets in this order; if that fails, all is as it was. `aside` is a folder to be made.

    The model comes last, and an old one goes first: nobody ever finds the weights of one beside the other.
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
    """A folder where the system has temporary files; those that killed processes have left there are removed.

    Raises:
        OSError: it cannot be made.
    """
    return Scratch(Path(tempfile.gettempdir()), TEMPORARY)


class Scratch:
    """A folder of its own for temporary files. A context manager that gives its path and removes it at the end.

    It is locked, so that one whose process was killed is known as left over; such folders are removed by `cleanup`, or
    when the next one is made in the same place.
    """

    def __init__(self, parent: Path, prefix: str = SCRATCH) -> None:
        """Make it in `parent`.

        Raises:
            OSError: it cannot be made.
        """
        remove_left(parent, prefix)
        cleaner().watch(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()
        self._lock = locked(self.path)
        (self.path / MARK).touch()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder; does nothing if that has been done."""
        if self._lock >= 0:
            remove(self.path)
            os.close(self._lock)
        self._lock = -1
