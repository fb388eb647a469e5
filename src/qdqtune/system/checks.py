"""Checks whether a command may write its files, and whether the files that it reads have changed.

A path that does not exist may be written. An existing file may be replaced if the list `.qdqtune` in its folder says
that an earlier command wrote it. A file that the command reads is never written, under whatever name, and nothing is
written through a link that leaves its folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from qdqtune.errors import BadModel, BadOption, OutputError, check_file, reading, writing

Inputs = Mapping[str, Iterable[Path]]
"""The files that a command reads, by a description for messages."""

LIST = ".qdqtune"
"""The file that lists what qdqtune wrote to its folder: one relative path per line, folders with a slash at the end. A
file that was written by itself, not by a run, has its kind in brackets behind it."""

HEAD = "# what qdqtune has written to this folder, and may overwrite or delete: a path a line"


@dataclass(frozen=True)
class Output:
    """A file to write: its path, the option that names it, and a test whether an existing file is an earlier output.

    `folder`: no link may lead out of it; by default the folder of the file. `makes_folder`: a missing folder is made.
    """

    path: Path
    option: str
    is_ours: Callable[[Path], bool]
    folder: Path | None = None
    makes_folder: bool = False


def check_outputs(outputs: Sequence[Output], read: Inputs) -> None:
    """Refuse an output that cannot be written, is reached by a link out of its folder, or would overwrite an input,
    another output, or a file that no earlier command wrote."""
    taken: dict[Path | tuple[int, int], str] = {}
    for what, files in read.items():
        for file in files:
            for key in _identities(file):
                taken.setdefault(key, what)
    for output in outputs:
        path, hint = output.path, f"choose another {output.option}"
        if "\0" in str(path):
            raise BadOption(f"{output.option} {str(path)!r} is no name of a file")
        if path.is_dir():
            raise OutputError(f"cannot write {path}: it is a folder; name a file in it")
        for key in _identities(path):
            if key in taken:
                raise BadOption(f"{path} would overwrite the {taken[key]}: {hint}")
        if path.exists() and not path.is_file():
            raise OutputError(f"cannot write {path}: it is no file; name one with {output.option}")
        check_inside(path, output.folder or path.parent)
        if not path.parent.is_dir() and not output.makes_folder:
            raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
        if path.exists() and not output.is_ours(path):
            raise BadOption(f"{path} was there before, and is not of qdqtune's making: {hint}, or move it")
        if not output.makes_folder:
            with writing(path, hint):
                tempfile.TemporaryFile(dir=real(path).parent).close()
        for key in _identities(path):
            if isinstance(key, Path):  # a second name of an output keeps its content
                taken.setdefault(key, f"file of {output.option}")


def _identities(path: Path) -> Iterator[Path | tuple[int, int]]:
    """Values that two paths share if they are the same file: the path with links resolved, and (device, inode)."""
    with suppress(OSError, ValueError):  # a name that no file can have: writing it gives an error
        yield real(path)
        status = path.stat()
        yield status.st_dev, status.st_ino


def below(folder: Path) -> list[Path]:
    """All files and folders below a folder. Those that vanish meanwhile, such as temporary ones, are left out."""
    return [Path(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files)]


def real(path: Path) -> Path:
    """The path with all links resolved.

    Raises:
        OSError: no file can have this name, or its links form a circle.
    """
    try:
        resolved = Path(os.path.realpath(path))
    except ValueError as error:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from error
    if resolved.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return resolved


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a path that a link leads out of `folder`, or that is a pipe or a device."""
    with writing(path):
        is_plain = path.parent == folder and path.name != ".." and not path.is_symlink()  # resolving takes much longer
        if not is_plain and not real(path).is_relative_to(real(folder)):
            raise OutputError(f"cannot write {path}: a link leads from there to {real(path)}; remove it")
        check_file(path)


def check_single(path: Path) -> None:
    """Refuse a file with several hard links, since all of them would see a change in place."""
    if path.is_file() and path.stat().st_nlink > 1:
        raise OutputError(f"cannot write {path}: the file has another name (a hard link) as well; put a copy there")


def listed(folder: Path) -> set[str] | None:
    """The lines of the list in a folder; empty if there is no list, None if the file of this name is not qdqtune's or
    cannot be read. An incomplete last line is left out."""
    path = folder / LIST
    try:
        check_file(path)
        first, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError:
        return None
    if first != HEAD and (lines or not HEAD.startswith(first)):
        return None
    paths = {line: Path(line).parts for line in lines[:-1]}
    return {line for line, parts in paths.items() if parts and ".." not in parts and parts[0] != "/"}


def in_list(folder: Path) -> Callable[[Path], bool]:
    """A test whether the list in the folder of a run has a file there and, if it is a link, the file it leads to."""
    names, home = listed(folder) or set(), real(folder)
    return lambda path: {path.relative_to(folder).as_posix(), real(path).relative_to(home).as_posix()} <= names


def written_as(kind: str) -> Callable[[Path], bool]:
    """A test whether the list says that a file was written by itself, as one of this kind, and not by a run."""

    def is_ours(path: Path) -> bool:
        place = real(path)
        names = listed(place.parent) or set()
        return list_line(place.name, kind) in names and place.name not in names

    return is_ours


def record(path: Path | None, name: str, _: object = None) -> list[Output]:
    """The output files of an option that takes the path of a record; see `Output`."""
    return [] if path is None else [Output(path, name, written_as("record"))]


def list_line(name: str, kind: str) -> str:
    return f"{name} ({kind})"


Stamp = tuple[int, int, int]
"""Size in bytes, time of the last change in ns, and inode number."""


@dataclass(frozen=True)
class Stamps:
    """Files with their stamps at one time, so that later changes are noticed."""

    seen: tuple[tuple[Path, Stamp | None], ...]

    @staticmethod
    def of(files: Iterable[Path]) -> Stamps:
        """Stamp files as they are now; a missing one is recorded as missing."""
        return Stamps(tuple((file, stamp(file)) for file in files))

    @property
    def nbytes(self) -> int:
        return sum(stamp[0] for _, stamp in self.seen if stamp is not None)

    def check(self) -> None:
        """Raise if a file has changed since."""
        for file, before in self.seen:
            if stamp(file) != before:
                raise BadModel(f"{file} has changed since the run began: start it again (what was measured is kept)")


NO_STAMPS = Stamps(())


def stamp(file: Path) -> Stamp | None:
    """The stamp of a file, which differs after a change; None if the file is missing."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def content_digest(files: Iterable[Path]) -> str:
    """32 hex digits that identify the content of all files together."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(bytes.fromhex(file_digest(file)))
    return digest.hexdigest()[:32]


def file_digest(file: Path) -> str:
    return _digest(Content(file, stamp(file)))


@dataclass(frozen=True)
class Content:
    """Identifies the content of a file by its stamp, also after a renaming: a key for stored results."""

    path: Path = field(compare=False)
    stamp: Stamp | None


@lru_cache(maxsize=64)
def _digest(content: Content) -> str:
    with reading(content.path, BadModel), content.path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
