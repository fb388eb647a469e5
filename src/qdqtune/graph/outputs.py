"""What may be written, asked in one place before any work; and files that appear whole under their names or not at all.

A name that something refers to is refused whatever it is: the file itself, a link to it, or another name of the same
file.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from qdqtune.errors import BadOption, OutputError, writing
from qdqtune.graph import janitor
from qdqtune.graph.janitor import MARK, locked, remove, remove_left

Inputs = Mapping[str, Iterable[Path]]
"""The files that a command reads, under what they are."""

SCRATCH = ".qdqtune-"
"""How the names of our folders for temporary files begin."""

TEMPORARY = "qdqtune-"
"""The same where the system has its temporary files."""

WORKERS = "worker-"
"""The same for those of engine processes, beside their logs."""


def check_output(output: Path, read: Inputs) -> None:
    """Refuse an output that is no file, that lies in a folder that is not there, or that is one of the files `read`.

    Raises:
        BadOption, OutputError: see above.
    """
    if (what := overwritten([output], read)) is not None:
        raise BadOption(f"{output} would overwrite the {what[1]}: choose another --output")
    if not output.parent.is_dir():
        raise OutputError(f"cannot write {output}: there is no folder {output.parent}")
    if output.is_dir():
        raise OutputError(f"cannot write {output}: it is a folder")
    if output.exists() and not output.is_file():
        raise OutputError(f"cannot write {output}: it is no file; name one with --output")
    with writing(output, "choose another --output"):
        tempfile.TemporaryFile(dir=_replaceable(output).parent).close()


def overwritten(outputs: Iterable[Path], read: Inputs) -> tuple[Path, str] | None:
    """The first input that one of the outputs would overwrite, and what it is."""
    named: dict[Path | tuple[int, int], tuple[Path, str]] = {}
    for what, files in read.items():
        for file in files:
            for key in _identities(file):
                named.setdefault(key, (file, what))
    return next((named[key] for output in outputs for key in _identities(output) if key in named), None)


def _identities(path: Path) -> Iterator[Path | tuple[int, int]]:
    """What a file is known by: its place, links followed, and its number on the disk."""
    with suppress(OSError):  # a name too long, or links in a circle: it is no input, and writing says what is wrong
        yield path.resolve()
        found = path.stat()
        yield found.st_dev, found.st_ino


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A file to write instead of `target`, which takes its name when the block ends without an error.

    So does all that was written beside it, under the same names beside the target: a model and its external data appear
    together. Until then, and after an error, what had these names is as it was. Where `target` is a link, the file that
    it leads to is replaced.

    Raises:
        OutputError: it cannot be written.
    """
    with writing(target):
        real = _replaceable(target)
        with Scratch(real.parent) as folder:
            fresh = folder / "new"
            fresh.mkdir()
            yield fresh / real.name
            made = sorted(path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file())
            for name in made:
                _settle(fresh / name, real.parent / name)
            made.sort(key=lambda name: name == Path(real.name))  # the file itself comes last
            exchange([(fresh / name, real.parent / name) for name in made], folder / "old")


def _replaceable(path: Path) -> Path:
    """The file that a name leads to. One that may not be written is not replaced either.

    Raises:
        OSError: it may not.
    """
    real = path.resolve()
    if real.exists() and not os.access(real, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return real


def _settle(fresh: Path, target: Path) -> None:
    """Bring a file to the disk, so that a full one shows before a name is taken, with the rights of the old one."""
    if target.exists():
        shutil.copymode(target, fresh)
    with fresh.open("rb") as file:
        os.fsync(file.fileno())


def exchange(moves: Sequence[tuple[Path, Path]], aside: Path) -> None:
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

    It is locked, so that one whose process was killed is known as left over; such folders are removed by a janitor, or
    when the next one is made in the same place.
    """

    def __init__(self, parent: Path, prefix: str = SCRATCH) -> None:
        """Make it in `parent`.

        Raises:
            OSError: it cannot be made.
        """
        remove_left(parent, prefix)
        janitor.own().watch(parent, prefix)
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
