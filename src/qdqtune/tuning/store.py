"""The state file of a run: everything it has measured, in an append-only file with one record a line.

The file is a YAML list of JSON records, so readers of both formats can read it. Every record ends with a checksum. A
run that is killed while it writes leaves an incomplete last record, which is dropped; any other damage is refused,
because a search that goes on from wrong numbers ships a wrong model.
"""

from __future__ import annotations

import fcntl
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self, cast

from qdqtune.errors import TRANSIENT, BadData, BadModel, BadOption, BadState, BaselineFailed, Failure, reading, writing
from qdqtune.system.checks import NO_STAMPS, Stamps, check_inside, check_single
from qdqtune.system.writing import write_through
from qdqtune.tuning.records import (
    FloatRecord,
    HeadRecord,
    MachineRecord,
    MetricRecord,
    R,
    RangesRecord,
    Record,
    RepeatabilityRecord,
    parsed,
    plain,
)

VERSION = 1
CANDIDATE_VERSION = 5
"""The version of the code that makes candidates (loading, scales, insertion): raised when the files of equal placements
change, so that no run mixes two kinds. A test notices such a change."""

RECORD_START = b'- {"kind": "'
BEGINNING = RECORD_START + b'run", '
"""The beginning of every state file."""

WRONG_INPUT = BadOption, BadData, BadModel, BaselineFailed
"""Errors after which users change what the fingerprint holds: an option, the samples or the model."""

OF_THE_START = MachineRecord, RangesRecord, FloatRecord, RepeatabilityRecord, MetricRecord
"""Records from before the first candidate."""

BARE_EXPONENT = re.compile(r'"(?:[^"\\]|\\.)*"|\d+\.\d+|(\d+)e')
"""Matches strings, numbers with a point, and (as group 1) the 1 of 1e-05, which YAML reads only as 1.0e-05."""

OTHER_MACHINE = (
    "results so far were measured on {}; this run continues on {}, because its engine and processor have the same "
    "names: `restart` starts over"
)


@dataclass(frozen=True)
class Journal:
    """The content of a state file: its first record, all others by kind and `of`, and the bytes that they take."""

    head: HeadRecord
    records: dict[tuple[type[Record], str], Record] = field(default_factory=dict)
    size: int = 0

    def get(self, kind: type[R], of: str = "") -> R | None:
        """The record of this kind and this `of`; None if there is none."""
        return cast(R | None, self.records.get((kind, of)))

    def of(self, kind: type[R]) -> tuple[R, ...]:
        """All records of a kind, in the order in which they were written."""
        return tuple(record for record in self.records.values() if isinstance(record, kind))


class Store:
    """The state file of one run, locked against other processes. A context manager.

    The first record is the run's fingerprint. A file of a run with another model, engine or option is refused, and the
    difference is named. Where a run ends by what the user gave, before its first candidate, the file is emptied: the
    corrected command, whose fingerprint is another, is not refused.
    """

    def __init__(self, path: Path, fingerprint: object, *, restart: bool = False, given: Stamps = NO_STAMPS) -> None:
        """Open or create `path` for a run with that fingerprint, a struct or a map. Nothing more is written once one of
        the files `given` has changed.

        Raises:
            BadState: the file is damaged, belongs to another run, or is in use.
            OutputError: it cannot be written, is a link out of its folder, or has other hard links.
        """
        self.path = path
        self._given = given
        check_inside(path, path.parent)
        check_single(path)
        with writing(path):
            path.touch()
            # Unbuffered: what could not be written to a full disk must not be written again on closing.
            self._file: IO[bytes] = path.open("r+b", buffering=0)
        try:
            self._lock()
            if restart:
                if not RECORD_START.startswith(self._file.read(len(RECORD_START))):
                    raise BadState(f"{path} is no state file: choose another `output_dir`, or remove it")
                self._file.truncate(0)
            self.journal = self._opened(json.loads(json.dumps(plain(fingerprint, "deterministic"))))
            self._left = {key: record for key, record in self.journal.records.items() if record.is_cut_short}
            for key in self._left:
                del self.journal.records[key]
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._file:
            is_wrong = isinstance(error, WRONG_INPUT) and not error.is_transient
            if is_wrong and all(isinstance(one, OF_THE_START) for one in self.of(Record)):
                with suppress(OSError):
                    self._file.truncate(0)

    def __len__(self) -> int:
        return len(self.journal.records)

    def get(self, kind: type[R], of: str = "") -> R | None:
        """The record of this kind and this `of`, written by this run or an earlier one; None if there is none."""
        return self.journal.get(kind, of)

    def left(self, kind: type[R]) -> R | None:
        """The record of this kind that an earlier session left, as it was cut short; None if there is none."""
        return cast(R | None, self._left.get((kind, "")))

    def forget(self) -> None:
        """Forget everything that was measured: another float model, or another engine, is measured from now on."""
        with writing(self.path):
            self._file.truncate(0)
        self._append(self.journal.head)
        self.journal.records.clear()

    def put(self, record: R) -> R:
        """Write a record to disk; it survives a kill of the process. Gives the record.

        A record with a transient failure is kept in memory only, so that the next run tries again.

        Raises:
            BadModel: a file in `given` has changed since the run began.
            OutputError: the disk is full, or the file is gone.
        """
        self._given.check()
        if not is_transient(record):
            self._append(record)
        self.journal.records[type(record), record.of] = record
        return record

    def of(self, kind: type[R]) -> tuple[R, ...]:
        """All records of a kind, in the order in which they were written."""
        return self.journal.of(kind)

    def lines(self) -> list[str]:
        """The lines of the file, without an incomplete last one."""
        self._file.seek(0)
        return self._file.read().decode().split("\n")[:-1]

    def measuring_on(self, where: str) -> str | None:
        """Record which machine measures from now on. What to tell the user if another one has measured so far."""
        if (was := (self.get(MachineRecord) or MachineRecord()).where) == where:
            return None
        is_new = not len(self)
        self.put(MachineRecord(where=where))
        both = was or "this machine", where or "this machine"
        return None if is_new else OTHER_MACHINE.format(*both)

    def check_candidates(self) -> None:
        """Check that the candidates in the file were made by the code of this version.

        Raises:
            BadState: they were not.
        """
        if (made_by := self.journal.head.candidates) != CANDIDATE_VERSION:
            raise BadState(
                f"{self.path} was made by a version of qdqtune whose candidates are others ({made_by}, now "
                f"{CANDIDATE_VERSION}): use that version, another `output_dir`, or `restart` to start over"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadState(f"{self.path} is in use by another run: choose another `output_dir`") from error

    def _append(self, record: Record) -> None:
        line = line_of(plain(record))
        with writing(self.path):
            write_through(self._file, line)

    def _opened(self, fingerprint: dict[str, Any]) -> Journal:
        """The content of the file. If the file is empty, its first record is written, with the fingerprint."""
        self._file.seek(0)
        content = self._file.read()
        if (journal := _journal(content, self.path)) is None:
            self._file.truncate(0)
            head = HeadRecord(version=VERSION, candidates=CANDIDATE_VERSION, fingerprint=fingerprint)
            self._append(head)
            return Journal(head)
        _refuse_difference(journal.head.fingerprint, fingerprint, self.path)
        if journal.size < len(content):
            self._file.truncate(journal.size)
        return journal


def is_transient(record: Record) -> bool:
    """Whether a record holds a failure that may not occur again."""
    parts = (record, getattr(record, "result", None), getattr(record, "check", None))
    failures: Iterable[Failure | None] = (getattr(part, "failure", None) for part in parts)
    return any(failure is not None and failure.stage in TRANSIENT for failure in failures)


def may_continue(path: Path) -> bool:
    """True if a file is a state file, empty, or the beginning of one, so that a run may go on or start over in it.

    Raises:
        BadState: it is another file, or a state file of ModelOpt's autotuner.
    """
    with path.open("rb") as file:
        start = file.read(2 * len(BEGINNING))
    _refuse_modelopt(start, path)
    if not start.startswith(RECORD_START[: len(start)]):
        raise BadState(f"{path} is no state file: choose another `output_dir`, or remove it")
    return True


def read_journal(path: Path) -> Journal | None:
    """Read a state file without locking it; None if it has no complete line yet.

    Raises:
        BadState: it is damaged, or no state file of this version.
    """
    with reading(path, BadState):
        content = path.read_bytes()
    return _journal(content, path)


def _refuse_modelopt(content: bytes, path: Path) -> None:
    if content.startswith(b"baseline_latency_ms:"):
        raise BadState(
            f"{path} is a state file of ModelOpt's autotuner, whose latencies and regions are others: choose another "
            "`output_dir`, and tune the model that it has made with `from_qdq`"
        )


def _journal(content: bytes, path: Path) -> Journal | None:
    _refuse_modelopt(content, path)
    *lines, torn = content.split(b"\n")  # behind the last line break: nothing, or half a record
    if not lines:
        if BEGINNING.startswith(torn[: len(BEGINNING)]):
            return None
        raise BadState(f"{path} is no state file: choose another `output_dir`")
    head = _parsed(lines[0], path, 1)
    if not isinstance(head, HeadRecord) or head.version != VERSION:
        raise BadState(f"{path} is no state file of this version: move it away, or start over with `restart`")
    records = (_parsed(line, path, number) for number, line in enumerate(lines[1:], 2))
    return Journal(head, {(type(record), record.of): record for record in records}, len(content) - len(torn))


def line_of(values: Mapping[str, Any]) -> bytes:
    """JSON values as a line of a state file.

    Raises:
        ValueError: a number is infinite or not a number.
    """
    text = json.dumps(values, separators=(", ", ": "), allow_nan=False)
    text = BARE_EXPONENT.sub(lambda m: f"{m[1]}.0e" if m[1] else m[0], text)
    return f'- {text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def _parsed(line: bytes, path: Path, number: int) -> Record:
    text, _, crc = line.decode(errors="replace").removeprefix("- ").rpartition(', "crc": "')
    if not line.startswith(b"- ") or crc != f'{zlib.crc32((text + "}").encode()):08x}"}}':
        raise BadState(f"{path}, line {number} is damaged: restore the file, or start over with `restart`")
    try:
        return parsed((text + "}").encode())
    except ValueError as error:
        raise BadState(
            f"{path}, line {number} is damaged: it is no record of a run; restore the file, or use `restart`"
        ) from error


def _refuse_difference(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Refuse a fingerprint that differs from that of the file, and name the first difference."""
    for names, was, now in _differences(old, new, ()):
        words = " ".join(names).replace("_", " ").split()
        label = " ".join(dict.fromkeys(words))  # "engine engine" becomes "engine"
        made = f"with {label} {_shown(was)}, now it is {_shown(now)}"
        if names == ("model",):
            made = "with another model, or the file has changed since then"
        raise BadState(
            f"{path} was made {made}: use the same command, another `output_dir`, or `restart` to start over"
        )


def _differences(old: Any, new: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The differing values of two nested maps, with the names that lead to them."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        own = names[-1] if names else None  # first the engine's name: another engine differs in device and version, too
        for name in sorted((*new, *sorted(old.keys() - new.keys())), key=lambda name: name != own):
            yield from _differences(old.get(name), new.get(name), (*names, name))
    elif old != new:
        yield names, old, new


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)
