"""The state file of a run: everything it has measured, in an append-only file with one JSON value a line; and values
that it holds, where they are no types of other modules.

Each line has a key, a value or the failure in its place, and a checksum. A run that is killed while it writes leaves an
incomplete last line, which is dropped; any other damage is refused, because a search that goes on from wrong numbers
ships a wrong model.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from threading import RLock
from typing import IO, Any, Literal, Self, TypeVar

import msgspec

from qdqtune.calibration.scales import Ranges
from qdqtune.errors import BadState, EngineRefused, Failure, parsed_json, reading, writing
from qdqtune.numerics.scores import NO_SCORES, Scores
from qdqtune.system.checks import NO_STAMPS, Stamps, check_inside, check_single
from qdqtune.system.writing import write_through
from qdqtune.types import Placement, Trial

VERSION = 5
"""Raised when state files change, and when the files of equal placements do (loading, scales, insertion), so that no
run mixes two kinds of candidates. A test notices such a change."""

BEGINNING = b'{"key": "run", '
"""The beginning of every state file."""

OF_THE_START = ("ranges", "float:", "metric:")
"""Beginnings of keys from before the first candidate."""

IN_A_HURRY = ", in a hurry"
"""The end of a key whose value lacks something for want of time: a later session computes it anew."""

T = TypeVar("T")


@dataclass
class Caveat:
    """What a computation for `Store.memo` says of its value: time was short, or something failed that may work in a
    later session."""

    is_hurried: bool = False
    is_lost: bool = False


class Line(msgspec.Struct):
    """A line of a state file: the JSON of its value, or the failure in its place; `where` it is, for messages. The
    first line has the fingerprint of the run, the bytes of the user's model files, and the version instead."""

    key: str
    value: Any = None
    failure: Failure | None = None
    version: int = 0
    fingerprint: dict[str, Any] = {}
    model_bytes: int = 0
    where: str = ""

    def read(self, kind: type[T]) -> T:
        """The value.

        Raises:
            EngineRefused: there is a failure in its place.
        """
        if self.failure is not None:
            raise EngineRefused(self.failure)
        try:
            return msgspec.convert(self.value, kind)
        except (ValueError, RecursionError) as error:
            raise damaged(self.where) from error


@dataclass(eq=False)
class Journal:
    """The content of a state file: the run's fingerprint, all other lines by key, and the bytes of the user's model
    files."""

    fingerprint: dict[str, Any]
    lines: dict[str, Line] = field(default_factory=dict)
    model_bytes: int = 0

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of a key; None if there is none.

        Raises:
            EngineRefused: there is a failure in its place.
        """
        line = self.lines.get(key)
        return None if line is None else line.read(kind)

    def has(self, key: str) -> bool:
        return key in self.lines

    def values(self, start: str, kind: type[T]) -> dict[str, T]:
        """The values whose keys start so, by the rest of the key, in the order in which they were written first."""
        lines = {key: line for key, line in self.lines.items() if key.startswith(start) and line.failure is None}
        return {key.removeprefix(start): line.read(kind) for key, line in lines.items()}

    def may_yield_to(self, other: Journal) -> bool:
        """Whether a run with another fingerprint may begin in this file: there is no candidate, and the user's model is
        the same file by its size. Options, such as the precision, change the model of the fingerprint as well."""
        is_begun = not all(key.startswith(OF_THE_START) for key in self.lines)
        is_same_model = self.fingerprint.get("model") == other.fingerprint.get("model")
        return not is_begun and (is_same_model or self.model_bytes == other.model_bytes)


class Store(Journal):
    """The state file of one run, locked against other processes. A context manager. Several threads may use it.

    The first line is the run's fingerprint. A file of a run with another model, engine or option is refused, and the
    difference is named. A file without a candidate is emptied for other options: users correct their first commands.
    """

    def __init__(self, path: Path, fingerprint: object, *, restart: bool = False, given: Stamps = NO_STAMPS) -> None:
        """Open or create `path` for a run with that fingerprint, a struct or a map. Nothing more is written once one of
        the files `given` has changed."""
        self.path = path
        self._given, self._lock = given, RLock()
        check_inside(path, path.parent)
        check_single(path)
        with writing(path):
            path.touch()
            # Unbuffered: what could not be written to a full disk must not be written again on closing.
            self._file: IO[bytes] = path.open("r+b", buffering=0)
        with ExitStack() as stack:
            stack.enter_context(self._file)
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadState(f"{path} is in use by another run: choose another `output_dir`") from error
            if restart:
                may_continue(path)
                self._file.truncate(0)
            journal = self._opened(json.loads(json.dumps(plain(fingerprint, "deterministic"))))
            super().__init__(**vars(journal))
            stack.pop_all()  # `__exit__` closes it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def memo(self, key: str, kind: type[T], compute: Callable[[], T], caveat: Caveat | None = None) -> T:
        """The value of a key from this session or an earlier one; else what `compute` gives, which is stored, or the
        failure that it raises. See `Caveat`, which `compute` fills.

        Raises:
            EngineRefused: `compute` raises it, now or then.
        """
        known = self.get(key, kind)
        if known is not None:
            return known
        try:
            value = compute()
        except EngineRefused as refused:
            self.refuse(key, refused.failure)
            raise
        caveat = caveat or Caveat()
        ending = IN_A_HURRY if caveat.is_hurried else ""
        self._write(Line(key, plain(value)), on_disk=not caveat.is_lost, ending=ending)
        return value

    def put(self, key: str, value: T, *, on_disk: bool = True, order: Literal["deterministic"] | None = None) -> T:
        """Write a value to disk, where it survives a kill of the process; or keep it for this session only. For `order`
        see `plain`."""
        self._write(Line(key, plain(value, order)), on_disk=on_disk)
        return value

    def refuse(self, key: str, failure: Failure) -> None:
        """Record that computing the value of a key failed: `get` raises that failure from now on, and in later sessions
        too unless it `is_transient` (another attempt may succeed)."""
        self._write(Line(key, failure=failure), on_disk=not failure.is_transient)

    def _write(self, line: Line, *, on_disk: bool, ending: str = "") -> None:
        line.where = str(self.path)
        row = {"value": line.value} if line.failure is None else {"failure": plain(line.failure)}
        with self._lock:
            self._given.check()
            if on_disk:
                self._append({"key": line.key + ending, **row})
            self.lines[line.key] = line

    def _append(self, row: Mapping[str, Any]) -> None:
        with writing(self.path):
            write_through(self._file, line_of(row))

    def _opened(self, fingerprint: dict[str, Any]) -> Journal:
        """The content of the file. If it is empty, or of another run of the same file without a candidate, it begins
        anew, with the fingerprint as its first line."""
        self._file.seek(0)
        content = self._file.read()
        journal = _journal(content, self.path)
        fresh = Journal(fingerprint, model_bytes=self._given.nbytes)
        if journal is None or (journal.fingerprint != fingerprint and journal.may_yield_to(fresh)):
            self._file.truncate(0)
            self._append(_head(fresh))
            return fresh
        _refuse_difference(journal.fingerprint, fingerprint, self.path)
        if (whole := content.rfind(b"\n") + 1) < len(content):
            self._file.truncate(whole)
        return journal


def damaged(where: str) -> BadState:
    return BadState(f"{where} is damaged: restore the file, or start over with `restart`")


def may_continue(path: Path) -> bool:
    """True if a file is a state file, empty, or the beginning of one, so that a run may go on or start over in it."""
    with path.open("rb") as file:
        start = file.read(2 * len(BEGINNING))
    if not start.startswith(BEGINNING[: len(start)]):
        raise _foreign(start, path)
    return True


def read_journal(path: Path) -> Journal | None:
    """Read a state file without locking it; None if it has no complete line yet."""
    with reading(path, BadState):
        content = path.read_bytes()
    return _journal(content, path)


def _foreign(start: bytes, path: Path) -> BadState:
    if start.startswith(b"baseline_latency_ms:"):
        return BadState(
            f"{path} is a state file of ModelOpt's autotuner, whose latencies and regions are others: choose another "
            "`output_dir`, and tune the model that it has made with `from_qdq`"
        )
    return BadState(f"{path} is no state file of this version: choose another `output_dir`, or move it away")


def _head(journal: Journal) -> dict[str, Any]:
    head = {"key": "run", "version": VERSION, "fingerprint": journal.fingerprint}
    return head | ({"model_bytes": journal.model_bytes} if journal.model_bytes else {})


def _journal(content: bytes, path: Path) -> Journal | None:
    *lines, _ = content.split(b"\n")  # behind the last line break: nothing, or half a line
    if not content.startswith(BEGINNING[: len(content)]):
        raise _foreign(content, path)
    if not lines:
        return None
    head, *others = [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    if head.version != VERSION:
        raise _foreign(content, path)
    return Journal(head.fingerprint, {row.key: row for row in others}, head.model_bytes)


def line_of(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row, allow_nan=False)
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def _parsed(line: bytes, where: str) -> Line:
    text, _, crc = line.decode(errors="replace").rpartition(', "crc": "')
    if crc != f'{zlib.crc32((text + "}").encode()):08x}"}}':
        raise damaged(where)
    try:
        return msgspec.convert(parsed_json(text + "}") | {"where": where}, Line)
    except (ValueError, TypeError) as error:
        raise damaged(where) from error


def plain(value: object, order: Literal["deterministic"] | None = None) -> Any:
    """Convert a value to JSON values; "deterministic" sorts maps and sets, so that equal values give equal JSON."""
    return msgspec.to_builtins(value, enc_hook=_encoded, order=order)


def _encoded(value: Any) -> object:
    """Convert what msgspec does not know: maps that are no dictionaries, paths, and numbers of NumPy."""
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, PurePath) else value.item()


def _refuse_difference(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Refuse a fingerprint that differs from that of the file, and name the first difference: the model's, or else the
    engine's name, if these differ."""
    was, now = _flat(old), _flat(new)
    different = [name for name in {**now, **was} if was.get(name) != now.get(name)]
    if not different:
        return
    name = min(different, key=lambda name: (name != "model", name != "engine engine"))
    label = " ".join(dict.fromkeys(name.replace("_", " ").split()))  # "engine engine" becomes "engine"
    made = f"with {label} {_shown(was.get(name))}, now it is {_shown(now.get(name))}"
    if name == "model":
        made = "with another model, or the file has changed since then"
    raise BadState(f"{path} was made {made}: use the same command, another `output_dir`, or `restart` to start over")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The values in nested maps, each by the keys that lead to it."""
    if not isinstance(value, Mapping):
        return {name: value}
    rows: dict[str, Any] = {}
    for key, one in value.items():
        rows |= _flat(one, f"{name} {key}".lstrip())
    return rows


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)


# ---------------------------------------------------------------- values

Shipped = Literal["tuned", "baseline", "given"]
"""The content of optimized_final.onnx: the tuned model, the float model, or a copy of the user's file."""


class RangesRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ranges that calibration found. `hurried` are notes on what a time budget left out of it."""

    ranges: Ranges
    hurried: tuple[str, ...] = ()


def job_of(trial: Trial) -> str:
    """What a trial's key ends with: 16 hex digits made of the digests of the candidate's placement and of the
    placement `against` which it was timed. So it does not depend on the order of trials."""
    return hashlib.sha256(f"{trial.placement.digest}:{trial.against.digest}".encode()).hexdigest()[:16]


def proof_key(placement: Placement) -> str:
    return f"proof:{placement.digest}"


class FloatRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The float model: the seconds of one inference (roughly), of its build, and of starting a process, if each turn of
    a round starts one; the kinds of its outputs (NumPy's `dtype.kind`); and those that hold scores of classes, without
    the best class at each position.

    `turn_seconds` is a fourth of a round of two such builds: one inference of each workload at each number of threads;
    and half as much again with several workloads, because the shapes change.
    """

    seconds: float
    turn_seconds: float
    build_seconds: float
    start_seconds: float
    kinds: tuple[str, ...] = ()
    scores: Scores = NO_SCORES


class ConversationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a script that times models by itself through ModelOpt's interface: latencies in ms (None where a
    model failed), the best placement, latencies by digest of the placement, and the patterns that were begun."""

    baseline_ms: float | None
    best: Placement
    best_ms: float | None
    measured: dict[str, float | None]
    patterns: tuple[dict[str, Any], ...]
