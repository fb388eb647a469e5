"""The state file of a run: all its measurements, in an append-only file with one JSON value per line; and types of
values that no other module defines.

Each line has a key, a value or a failure, and a checksum. A killed run may leave an incomplete last line, which is
dropped. Any other damage is refused, since a search that continues from wrong numbers ships a wrong model.
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
from qdqtune.types import Placement, Proposal, Trial

VERSION = 5
"""Raised when the format of state files changes, or the files made for a placement do (loading, scales, insertion), so
that a run never mixes the two. A test notices such a change."""

BEGINNING = b'{"key": "run", '

OF_THE_START = ("ranges", "plan", "float:", "metric:")
"""Prefixes of keys that are written before the first candidate."""

SENSITIVITY = "sensitivity"
"""The key of what rounding single tensors does, up to its colon."""

IN_A_HURRY = ", in a hurry"
"""Suffix of the key of a value that is incomplete for want of time; a later session computes it again."""

T = TypeVar("T")


@dataclass
class Caveat:
    """Set by a computation for `Store.memo` if its value is provisional. `is_hurried`: time was short, so later
    sessions compute it again. `is_lost`: something failed that may work later, so the value is kept for this session
    only."""

    is_hurried: bool = False
    is_lost: bool = False


class Line(msgspec.Struct):
    """A line of a state file: a value as JSON, or a failure; `where` names the line in messages. The first line has the
    run's fingerprint, the size of the user's model files in bytes, and the format version."""

    key: str
    value: Any = None
    failure: Failure | None = None
    version: int = 0
    fingerprint: dict[str, Any] = {}
    model_bytes: int = 0
    where: str = ""

    def read(self, kind: type[T]) -> T:
        """The value. Raises EngineRefused if the line has a failure, BadState if the value does not have this form."""
        if self.failure is not None:
            raise EngineRefused(self.failure)
        try:
            return msgspec.convert(self.value, kind)
        except (ValueError, RecursionError) as error:
            raise damaged(self.where) from error


@dataclass(eq=False)
class Journal:
    """The content of a state file: the run's fingerprint, all other lines by key, and the size of the user's model
    files."""

    fingerprint: dict[str, Any]
    lines: dict[str, Line] = field(default_factory=dict)
    model_bytes: int = 0

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of a key; None if there is none.

        Raises:
            EngineRefused: the key has a failure.
        """
        line = self.lines.get(key)
        return None if line is None else line.read(kind)

    def has(self, key: str) -> bool:
        return key in self.lines

    def values(self, start: str, kind: type[T]) -> dict[str, T]:
        """The values whose keys begin with `start`, by the rest of the key, in the order of first writing; without
        failures."""
        lines = {key: line for key, line in self.lines.items() if key.startswith(start) and line.failure is None}
        return {key.removeprefix(start): line.read(kind) for key, line in lines.items()}

    def may_yield_to(self, other: Journal) -> bool:
        """Whether a run with another fingerprint may start over in this file: nothing was measured; or it has no
        candidate, and the user's model is the same or at least of equal size (options such as the precision change the
        model in the fingerprint)."""
        is_begun = not all(key.startswith(OF_THE_START) for key in self.lines)
        is_same_model = self.fingerprint.get("model") == other.fingerprint.get("model")
        return not self.lines or (not is_begun and (is_same_model or self.model_bytes == other.model_bytes))


class Store(Journal):
    """The state file of one run, locked against other processes. A context manager. Several threads may use it.

    The first line is the run's fingerprint. A file of another model, engine or option is refused with a message that
    names the difference; but without a candidate yet it is emptied, as users correct their first commands.
    """

    def __init__(self, path: Path, fingerprint: object, *, restart: bool = False, given: Stamps = NO_STAMPS) -> None:
        """Open or create `path` for a run with that fingerprint, a struct or a map. Once one of the files `given` has
        changed, nothing more is written."""
        self.path = path
        self._given, self._lock = given, RLock()
        self.has_lost = False
        """Whether something failed in this session that may work in a later one."""
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
        """The stored value of a key; without one, that of `compute`, which is then stored, as is its failure. `compute`
        may mark the `caveat` to make a value provisional.

        Raises:
            EngineRefused: `compute` raises it, now or in an earlier session.
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
        """Store a value on the disk, safe from a kill; or for this session only. `order` as in `plain`."""
        self._write(Line(key, plain(value, order)), on_disk=on_disk)
        return value

    def refuse(self, key: str, failure: Failure) -> None:
        """Store a failure: `get` raises it from now on, in later sessions unless it `is_transient` (may not recur)."""
        self._write(Line(key, failure=failure), on_disk=not failure.is_transient)

    def _write(self, line: Line, *, on_disk: bool, ending: str = "") -> None:
        line.where = str(self.path)
        row = {"value": line.value} if line.failure is None else {"failure": plain(line.failure)}
        with self._lock:
            self._given.check()
            self.has_lost |= not on_disk
            if on_disk:
                self._append({"key": line.key + ending, **row})
            self.lines[line.key] = line

    def _append(self, row: Mapping[str, Any]) -> None:
        with writing(self.path):
            write_through(self._file, line_of(row))

    def _opened(self, fingerprint: dict[str, Any]) -> Journal:
        """Read the file. An empty one, or one that `may_yield_to` this run, starts with the fingerprint."""
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
    """Raise BadState unless a run may continue or start over in a file: a state file, the beginning of one, or an empty
    file. Otherwise returns True, as a test for `Output`."""
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
    """Convert what msgspec cannot: maps that are no dicts, paths, and NumPy numbers."""
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, PurePath) else value.item()


def _refuse_difference(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Raise if a fingerprint differs from the file's; names the model or engine, else the first difference."""
    was, now = _flat(old), _flat(new)
    different = [name for name in {**now, **was} if was.get(name) != now.get(name)]
    if not different:
        return
    name = min(different, key=lambda name: (name != "model", name != "engine engine"))
    words = " ".join(dict.fromkeys(name.replace("_", " ").split()))  # "engine engine" becomes "engine"
    label = words if " " in name else f"`{name}`"
    made = f"with {label} {_shown(was.get(name))}, now it is {_shown(now.get(name))}"
    if name == "model":
        made = "with another model, or the file has changed since then"
    raise BadState(f"{path} was made {made}: use the same command, another `output_dir`, or `restart` to start over")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The values in nested maps, by the keys that lead to them joined to one name."""
    if not isinstance(value, Mapping):
        return {name: value}
    rows: dict[str, Any] = {}
    for key, one in value.items():
        rows |= _flat(one, f"{name} {key}".lstrip())
    return rows


def _shown(value: object) -> str:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return "unset" if value is None else str(value)


# ---------------------------------------------------------------- values

Shipped = Literal["tuned", "baseline", "given"]
"""The content of optimized_final.onnx: the tuned model, the float model, or a copy of the user's file."""


class RangesRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ranges from calibration; `hurried` are notes on what a time budget left out."""

    ranges: Ranges
    hurried: tuple[str, ...] = ()


def job_of(trial: Trial) -> str:
    """The end of a trial's key: 16 hex digits from the digests of the candidate's placement and of its opponent, so
    that it does not depend on the order of trials."""
    return hashlib.sha256(f"{trial.placement.digest}:{trial.against.digest}".encode()).hexdigest()[:16]


def proof_key(placement: Placement) -> str:
    return f"proven:{placement.digest}"


PROPOSED = "proposed:"
"""Prefix of the keys of batches, before their number."""


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch that a search proposed, and the digest of the placement to compare with. `is_lacking`: a failure that may
    not recur had changed the search before. Then a later session with the same time budget, `under` in seconds, leaves
    the batch out and proposes anew; one with another budget repeats it."""

    against: str
    proposals: tuple[Proposal, ...]
    is_lacking: bool
    under: float | None


class FloatRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of the float model: seconds of one inference (roughly), of its build, and of starting a process, if each
    turn starts one; the kinds of its outputs (NumPy's `dtype.kind`); and which outputs hold class scores.

    `turn_seconds` are those of one inference of each workload at each number of threads, times 1.5 if one build runs
    several workloads, because then shapes change.
    """

    seconds: float
    turn_seconds: float
    build_seconds: float
    start_seconds: float
    kinds: tuple[str, ...] = ()
    scores: Scores = NO_SCORES


class ConversationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a script that uses ModelOpt's interface and times models itself: latencies in ms by digest of the
    placement (None: the model failed), the best placement, and the patterns begun."""

    baseline_ms: float | None
    best: Placement
    best_ms: float | None
    measured: dict[str, float | None]
    patterns: tuple[dict[str, Any], ...]
