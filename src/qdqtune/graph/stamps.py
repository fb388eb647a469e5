"""Files as they were when they were read: noticed if they change, and told apart by what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qdqtune.errors import BadModel, reading

Stamp = tuple[int, int, int]
"""Size in bytes, time of the last change in ns, and number on the disk."""


@dataclass(frozen=True)
class Stamps:
    """Some files as they were at one time."""

    seen: tuple[tuple[Path, Stamp | None], ...]

    @staticmethod
    def of(files: Iterable[Path]) -> Stamps:
        """The files as they are now; one that is not there is part of it."""
        return Stamps(tuple((file, stamp(file)) for file in files))

    def check(self) -> None:
        """Refuse to go on with files that are not as they were.

        Raises:
            BadModel: one has changed or gone.
        """
        for file, before in self.seen:
            if stamp(file) != before:
                raise BadModel(f"{file} has changed since the run began: start it again (what was measured is kept)")


NOTHING = Stamps(())


def stamp(file: Path) -> Stamp | None:
    """What tells a file from itself after a change; None if it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def content(files: Iterable[Path]) -> str:
    """32 hex digits that name the bytes of some files together.

    Raises:
        BadModel: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        with reading(file, BadModel), file.open("rb") as source:
            digest.update(hashlib.file_digest(source, "sha256").digest())
    return digest.hexdigest()[:32]
