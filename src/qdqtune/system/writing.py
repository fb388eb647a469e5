"""Files that are written atomically, and temporary folders."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from qdqtune.errors import writing
from qdqtune.system.checks import HEAD, LIST, check_inside, list_line, listed, real

SCRATCH = ".qdqtune-"

TEMPORARY = "qdqtune-"

WORKERS = "worker-"

ENDING = ".tmp"
"""Suffix of all temporary folders; only folders named so are ever removed."""


@contextmanager
def atomic_write(target: Path, kind: str = "") -> Iterator[Path]:
    """Yield a file to write instead of `target`, which is renamed to `target` when the block ends without an error.

    Files that were written beside it (external data of a model) are renamed with it. Until then, and after an error,
    existing files of these names are unchanged. If `target` is a link to a file in its folder or below, that file is
    replaced. With a `kind`, the files are added to the list in their folder (see `system.checks.written_as`).
    """
    with writing(target):
        check_inside(target, target.parent)
        file = real(target)
        if file.exists() and not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with Scratch(file.parent) as folder:
            fresh = folder / "new"
            fresh.mkdir()
            yield fresh / file.name
            made = sorted(path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file())
            for name in made:
                old = file.parent / name
                check_inside(old, file.parent)
                with (fresh / name).open("rb") as written:
                    os.fsync(written.fileno())  # a full disk shows before anything is renamed
                if old.exists():
                    shutil.copymode(old, fresh / name)
            made.sort(key=lambda name: name == Path(file.name))  # the file itself comes last
            if kind:  # before the file is there: where the list cannot be written, it would be nobody's
                add_to_list(file.parent, map(str, made), kind)
            rename_all([(fresh / name, file.parent / name) for name in made], folder / "old")


def add_to_list(folder: Path, names: Iterable[str], kind: str) -> None:
    """Add files of this kind to the list in their folder, so that a later command may replace them. Does nothing if the
    user has a file with the list's name."""
    path, known = folder / LIST, listed(folder)
    if known is None:
        return
    check_inside(path, folder)
    fresh = [list_line(name, kind) for name in names if not {name, list_line(name, kind)} & known]
    if fresh:
        with writing(path), path.open("ab", buffering=0) as file:
            append_lines(file, fresh)


def append_lines(file: IO[bytes], lines: Sequence[str]) -> None:
    """Add lines to a list open for appending: an incomplete last line is cut off first, and an empty list gets its
    head."""
    content = Path(file.name).read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        file.truncate(whole)
    text = "".join(f"{line}\n" for line in (lines if whole else [HEAD, *lines]))
    write_through(file, text.encode())


def write_through(file: IO[bytes], data: bytes) -> None:
    """Append data to an unbuffered file and flush it to the disk. On an error the file stays as it was."""
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
    """Add text to a log; characters that UTF-8 cannot encode, as in file names, are escaped."""
    with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def write_json(path: Path, content: Mapping[str, object], kind: str = "") -> None:
    with atomic_write(path, kind) as fresh:
        fresh.write_text(json.dumps(dict(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def rename_all(moves: Sequence[tuple[Path, Path]], aside: Path) -> None:
    """Rename files to their targets in this order, and undo everything if that fails. Old files are kept in `aside`, a
    new folder, until then.

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
    with writing("temporary files"):
        return Scratch(Path(tempfile.gettempdir()), TEMPORARY)


def named(text: str) -> str:
    """A message with temporary paths replaced by what they stand for: "the model", "model 2", "sample 3 of
    `calibration_data`"."""

    def name(found: re.Match[str]) -> str:
        what, number = found["what"], found["number"]
        if what.startswith("model"):
            return f"the {what}" if what == "model" else what.replace("_", " ")
        whole = "`calibration_data`" if what == "samples" else f"`{what}`"
        return f"sample {int(number)} of {whole}" if number else whole

    file = r"(?P<what>[a-z]\w*)(?:/(?:(?P<number>\d+)|samples))?(?:\.(?:onnx|np[yz]))?"
    return re.sub(rf"[^\s'\"(]*/{TEMPORARY}[^/\s]*{re.escape(ENDING)}/{file}", name, text)


class Scratch:
    """A temporary folder: a context manager that gives its path and removes it at the end.

    It is locked while its process lives. If the process is killed, the next `Scratch` in the same parent removes it.
    """

    def __init__(self, parent: Path, prefix: str = SCRATCH) -> None:
        sweep(parent, prefix)
        lock = None
        while lock is None:  # another process may take a new folder for one that was left
            self.path = Path(tempfile.mkdtemp(ENDING, prefix, parent)).absolute()
            lock = _locked(self.path)
        self._lock = lock

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        lock, self._lock = self._lock, -1  # closed once, even if this is interrupted: another file may get its number
        if lock >= 0:
            _remove(self.path, lock)


def sweep(parent: Path, prefix: str) -> None:
    """Remove the temporary folders in `parent` whose processes were killed."""
    name = re.compile(rf"{re.escape(prefix)}\w{{8}}{re.escape(ENDING)}")
    folders = [folder for folder in parent.glob(f"{prefix}*{ENDING}") if name.fullmatch(folder.name)]
    for folder in folders:
        with suppress(OSError):  # of another user, say
            lock = None if folder.is_symlink() else _locked(folder)
            if lock is not None:
                _remove(folder, lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that locks a folder until it is closed; None if another process has the lock, or it is gone."""
    with ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            return None
        if folder.exists():
            stack.pop_all()
            return descriptor
    return None


def _remove(folder: Path, lock: int) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
