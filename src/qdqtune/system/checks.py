"""Checks whether a command may write its files, and whether the files that it reads have changed.

A path that does not exist may be written. An existing file may be replaced if an earlier command wrote it: it carries a
mark, or is on the list in a run's folder. A file that the command reads is never written, under whatever name, and
nothing is written through a link that leaves its folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qdqtune.errors import BadModel, BadOption, OutputError, check_file, reading, writing

Inputs = Mapping[str, Iterable[Path]]
"""The files that a command reads, by a description of them."""

LIST = ".qdqtune"
"""The list of what a run has written to its folder: a relative path a line; a folder ends with a slash."""

HEAD = "# what qdqtune has written to this folder, and may overwrite or delete: a path a line"

PAGE_KIND, RECORD_KIND = "page", "record"
"""Kinds of outputs besides models: HTML pages and YAML files."""

SEARCHED = 2**16
"""Bytes at the beginning and at the end of a file in which a mark is searched."""


@dataclass(frozen=True)
class Output:
    """A file to write: its path, the option that names it, and a test whether an existing file is an earlier output.

    `is_appended`: an existing file is changed in place, under all of its hard links. `makes_folder`: a missing folder
    is made.
    """

    path: Path
    option: str
    is_ours: Callable[[Path], bool]
    is_appended: bool = False
    makes_folder: bool = False


def check_outputs(outputs: Sequence[Output], read: Inputs) -> None:
    """Refuse an output that is no file, has no folder that can be written, is a link out of its folder, or would
    overwrite an input, another output, or a file that no earlier command wrote.

    Raises:
        BadOption, OutputError: an output is refused.
    """
    for number, output in enumerate(outputs):
        others = {f"file of {other.option}": [other.path] for other in outputs[:number]}
        _check_output(output, {**read, **others})


def _check_output(output: Output, read: Inputs) -> None:
    path, hint = output.path, f"choose another {output.option}"
    if "\0" in str(path):
        raise BadOption(f"{output.option} {str(path)!r} is no name of a file")
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder")
    if (found := overwritten([path], read)) is not None:
        raise BadOption(f"{path} would overwrite the {found[1]}: {hint}")
    if path.exists() and not path.is_file():
        raise OutputError(f"cannot write {path}: it is no file; name one with {output.option}")
    check_inside(path, path.parent)
    if output.makes_folder and not path.parent.is_dir():
        return
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
    if path.exists() and not output.is_ours(path):
        raise BadOption(f"{path} was there before, and is not of qdqtune's making: {hint}, or remove it")
    if output.is_appended:
        check_single(path)
    else:
        with writing(path, hint):
            tempfile.TemporaryFile(dir=real(path).parent).close()


def overwritten(outputs: Iterable[Path], read: Inputs) -> tuple[Path, str] | None:
    """The first input that an output would overwrite, with its description."""
    named: dict[Path | tuple[int, int], tuple[Path, str]] = {}
    for what, files in read.items():
        for file in files:
            for key in _identities(file):
                named.setdefault(key, (file, what))
    return next((named[key] for output in outputs for key in _identities(output) if key in named), None)


def _identities(path: Path) -> Iterator[Path | tuple[int, int]]:
    """What equal files have in common: the path with links resolved, and device and inode number."""
    with suppress(OSError, ValueError):  # a name that no file can have: writing it gives an error
        yield real(path)
        found = path.stat()
        yield found.st_dev, found.st_ino


def below(folder: Path) -> list[Path]:
    """All files and folders in a folder, and in the folders there. Those that vanish meanwhile, such as temporary ones
    of a run that was just killed, are passed over."""
    return [Path(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files)]


def real(path: Path) -> Path:
    """The path with all links resolved.

    Raises:
        OSError: no file can have that name (it holds a NUL, say), or its links lead in a circle.
    """
    try:
        found = Path(os.path.realpath(path))
    except ValueError as error:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from error
    if found.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return found


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a path in `folder` that leads out of it through a link, or that is a pipe or a device."""
    with writing(path):
        is_plain = path.parent == folder and path.name != ".." and not path.is_symlink()  # resolving takes much longer
        if not is_plain and not real(path).is_relative_to(real(folder)):
            raise OutputError(f"cannot write {path}: a link leads from there to {real(path)}; remove it")
        check_file(path)


def check_single(path: Path) -> None:
    """Refuse a file with several hard links: a change in place would show under all of them."""
    if path.is_file() and path.stat().st_nlink > 1:
        raise OutputError(f"cannot write {path}: the file has another name (a hard link) as well; put a copy there")


def is_list(path: Path) -> bool:
    """Whether a file begins like the list in a run's folder, or is the beginning of one, whose writer was killed."""
    try:
        check_file(path)
        first, *others = path.read_text(encoding="utf-8", errors="replace").split("\n", 1)
        return first == HEAD or (not others and HEAD.startswith(first))
    except OSError:
        return False


def listed(folder: Path) -> set[str]:
    """The paths on the list in a run's folder; empty if there is no such list."""
    if not is_list(folder / LIST):
        return set()
    names = (folder / LIST).read_text(encoding="utf-8", errors="replace").split("\n")[1:-1]  # behind them: a torn one
    return {name for name in names if (parts := Path(name).parts) and ".." not in parts and parts[0] != "/"}


def is_of_a_run(path: Path) -> bool:
    """Whether a file is on the list of a run, in its folder or the one above, so that only that run may write it."""
    place = real(path)
    return any(place.relative_to(folder).as_posix() in listed(folder) for folder in list(place.parents)[:2])


def mark(kind: str) -> str:
    """The text in an output of one kind (model, page) by which the same option may replace it later."""
    return f"made by qdqtune ({kind}), which may replace this file"


def is_marked(path: Path, kind: str) -> bool:
    """Whether a file has the mark of an output of this kind at its beginning or its end."""
    with suppress(OSError), path.open("rb") as file:
        ends = file.read(SEARCHED)
        file.seek(-min(SEARCHED, path.stat().st_size), os.SEEK_END)
        return mark(kind).encode() in ends + b"\n" + file.read()
    return False


def replaceable(kind: str) -> Callable[[Path], bool]:
    """A test whether a file is an earlier output of this kind and not of a run."""
    return lambda path: is_marked(path, kind) and not is_of_a_run(path)


Stamp = tuple[int, int, int]
"""Size in bytes, time of the last change in ns, and inode number."""


@dataclass(frozen=True)
class Stamps:
    """Files with their stamps at one time, to notice later changes."""

    seen: tuple[tuple[Path, Stamp | None], ...]

    @staticmethod
    def of(files: Iterable[Path]) -> Stamps:
        """The files as they are now. A missing file is recorded as missing."""
        return Stamps(tuple((file, stamp(file)) for file in files))

    def check(self) -> None:
        """Refuse files that have changed.

        Raises:
            BadModel: a file has changed, appeared or gone.
        """
        for file, before in self.seen:
            if stamp(file) != before:
                raise BadModel(f"{file} has changed since the run began: start it again (what was measured is kept)")


NO_STAMPS = Stamps(())


def stamp(file: Path) -> Stamp | None:
    """The stamp of a file, which differs after a change; None if the file is missing."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def content_digest(files: Iterable[Path]) -> str:
    """32 hex digits of the content of all files together.

    Raises:
        BadModel: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        with reading(file, BadModel), file.open("rb") as source:
            digest.update(hashlib.file_digest(source, "sha256").digest())
    return digest.hexdigest()[:32]
