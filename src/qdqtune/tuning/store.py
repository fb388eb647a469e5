"""What a run has found so far, on disk: an append-only file, one record a line.

The file is YAML (a list) and each record is JSON behind "- ", so both kinds of reader can read it. Every record ends
with a checksum of its text. A run that dies while it writes leaves a torn last record, which is dropped; any other
damage is refused, because a search that goes on from wrong numbers ships a wrong model.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, Self

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadState, OutputError, writing
from qdqtune.graph.equalization import Factor
from qdqtune.graph.stamps import NOTHING, Stamps
from qdqtune.tuning.forms import is_whole, rounds_of
from qdqtune.types import TRANSIENT, Accuracy, Edge, Failure, Layer, Measurement, Placement, Storage

VERSION = 1
CANDIDATES = 3
"""The version of what makes candidates (loading, scales, insertion): raised where equal placements become other files,
so that no run mixes two kinds. A test holds what they are."""

RECORD = b'- {"key": "'
EARLIER = {"rewrites": "off", "formats": "pairs", "equalization": False, "weight rounding": "nearest"}
"""What was so in every run whose fingerprint does not say it."""

HEAD = RECORD + b'run", '
"""How every state file begins."""

BARE_EXPONENT = re.compile(r'"(?:[^"\\]|\\.)*"|\d+\.\d+|(\d+)e')
"""Strings, numbers with a point, and (as group 1) the 1 of 1e-05, a number that YAML wants to be written 1.0e-05."""

Record = dict[str, Any]


class Store:
    """The records of one run. A context manager; one process at a time.

    The first record is the run's fingerprint: opening a file that another model, engine or option has written is
    refused with the difference named.
    """

    def __init__(
        self, path: Path, fingerprint: Mapping[str, Any], *, restart: bool = False, given: Stamps = NOTHING
    ) -> None:
        """Open or create `path`. Nothing is written once the files `given` have changed.

        Raises:
            BadState: the file is damaged, belongs to another run, or is in use.
            OutputError: it cannot be written.
        """
        self.path = path
        self._given = given
        self._found: dict[str, Record] = {}
        self._made_by = CANDIDATES
        with writing(path):
            path.touch()
            # Unbuffered: what a full disk has refused must not come up again when the file is closed.
            self._file: IO[bytes] = path.open("r+b", buffering=0)
        try:
            self._lock()
            if restart:
                if not self._file.read(len(RECORD)).startswith(RECORD[: os.fstat(self._file.fileno()).st_size]):
                    raise BadState(f"{path} is no state file: choose another --state-file, or remove it")
                self._file.truncate(0)
            self._read(dict(fingerprint))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Record | None:
        """The record of that key, if this run or an earlier one has written it."""
        return self._found.get(key)

    def put(self, key: str, record: Record) -> Record:
        """Write a record for good: when this returns, it survives a kill.

        A transient failure is known until this run ends and not written: the next one tries again.

        Raises:
            BadModel: a file of the user's is not what it was when the run began.
            OutputError: the disk is full, or the file is gone.
        """
        self._given.check()
        record = {"key": key, **record}
        if not is_transient(record):
            self._append(record)
        self._found[key] = record
        return record

    def records(self) -> Iterator[Record]:
        """All records in the order in which they were written."""
        yield from self._found.values()

    def lines(self) -> list[str]:
        """The whole records of the file as it stands, its head first, a line each."""
        self._file.seek(0)
        return self._file.read().decode().split("\n")[:-1]

    def check_candidates(self) -> None:
        """Refuse to go on with what another version has begun that makes other candidates.

        Raises:
            BadState: it is such a file.
        """
        if self._made_by != CANDIDATES:
            raise BadState(
                f"{self.path} was made by a version of qdqtune whose candidates are others ({self._made_by}, now "
                f"{CANDIDATES}): use that version, another --output-dir, or --restart to start over"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadState(f"{self.path} is in use by another run: choose another --output-dir") from error

    def _append(self, record: Record) -> None:
        end = self._file.seek(0, os.SEEK_END)
        left = memoryview(_line(record))
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _read(self, fingerprint: Mapping[str, Any]) -> None:
        self._file.seek(0)
        *lines, torn = _ours(self._file.read(), self.path).split(
            b"\n"
        )  # behind the last line break: nothing, or half a record
        records = [_parsed(line, self.path, number) for number, line in enumerate(lines, 1)]
        if not records:
            if not torn.startswith(HEAD[: len(torn)]):
                raise BadState(f"{self.path} is no state file: choose another --state-file")
            self._file.truncate(0)
            self._append({"key": "run", "version": VERSION, "candidates": CANDIDATES, "fingerprint": fingerprint})
            return
        head, *rest = records
        if head.get("key") != "run" or head.get("version") != VERSION:
            raise BadState(f"{self.path} is no state file of this version: move it away, or start over with --restart")
        earlier = {name: EARLIER[name] for name in EARLIER.keys() & fingerprint.keys()}
        _compare(earlier | head["fingerprint"], json.loads(json.dumps(fingerprint)), self.path)
        self._made_by = head.get("candidates", 1)  # which the first versions did not write
        self._found = {r["key"]: r for r in rest if not is_transient(r)}
        if torn:
            self._file.truncate(sum(len(line) + 1 for line in lines))


def is_transient(record: Record) -> bool:
    """Whether a record holds a failure that another try may not have. Earlier versions wrote such records."""
    parts = (record, record.get("result"), record.get("check"))
    failures = (part.get("failure") for part in parts if isinstance(part, dict))
    return any(isinstance(failure, dict) and failure.get("stage") in TRANSIENT for failure in failures)


def is_state(path: Path) -> bool:
    """Whether a file begins as state files do."""
    try:
        with path.open("rb") as file:
            return file.read(len(HEAD)) == HEAD
    except OSError:
        return False


def began_without(path: Path, option: str) -> bool:
    """Whether a state file comes from a version that did not know an option.

    Raises:
        BadState: the file is damaged.
    """
    head = read_records(path)[:1] if is_state(path) else []
    return any(option not in record.get("fingerprint", {option: None}) for record in head)


def read_records(path: Path) -> list[Record]:
    """The records of a state file, its head first, without opening it for a run.

    Raises:
        BadState: the file is damaged.
    """
    *lines, _torn = _ours(path.read_bytes(), path).split(b"\n")
    return [_parsed(line, path, number) for number, line in enumerate(lines, 1)]


def _ours(content: bytes, path: Path) -> bytes:
    """The content of a state file.

    Raises:
        BadState: it is one of ModelOpt's autotuner.
    """
    if content.startswith(b"baseline_latency_ms:"):
        raise BadState(
            f"{path} is a state file of ModelOpt's autotuner, whose latencies and regions are others: choose another "
            "--output-dir, and give the model that it has made as --qdq-baseline"
        )
    return content


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(", ", ": "), allow_nan=False)
    text = BARE_EXPONENT.sub(lambda m: f"{m[1]}.0e" if m[1] else m[0], text)
    return f'- {text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def _parsed(line: bytes, path: Path, number: int) -> Record:
    text, _, crc = line.decode(errors="replace").removeprefix("- ").rpartition(', "crc": "')
    if not line.startswith(b"- ") or crc != f'{zlib.crc32((text + "}").encode()):08x}"}}':
        raise BadState(f"{path}, line {number} is damaged: restore the file, or start over with --restart")
    try:
        record: Record = json.loads(text + "}")
    except (ValueError, RecursionError):
        record = {}
    if not is_whole(record):
        raise BadState(
            f"{path}, line {number} is damaged: it holds what no run writes; restore the file, or use --restart"
        )
    return record


def _compare(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    for name in (*new, *sorted(old.keys() - new.keys())):
        if old.get(name) != new.get(name):
            told = " ".join(dict.fromkeys(name.split()))  # the name of the engine is called "engine engine"
            was, now = map(_shown, _differing(old.get(name), new.get(name)))
            looks = [re.search(r"looks=\(([\d, ]+?),?\)", text) for text in (was, now)]
            if name == "rounds" and looks[0] and looks[1] and looks[0][1] != looks[1][1]:
                told, was, now = "rounds of comparisons (--effort)", looks[0][1], looks[1][1]
            made = f"with {told} {was}, now it is {now}"
            if name == "model":
                made = "with another model, or the file has changed since then"
            raise BadState(
                f"{path} was made {made}: use the same command, another --output-dir, or --restart to start over"
            )


def _differing(was: Any, now: Any) -> tuple[Any, Any]:
    """Of two mappings what is not alike in both."""
    if not isinstance(was, Mapping) or not isinstance(now, Mapping):
        return was, now
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    before, after = ({name: values[name] for name in names if name in values} for values in (was, now))
    return before, after


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)


def pack_placement(placement: Placement) -> list[list[Any]]:
    """A placement as JSON values: edges with a pair, then weights with the name of their storage behind."""
    weights = ([e.tensor, e.node, e.index, storage.name] for e, storage in placement.storages.items())
    return [*([e.tensor, e.node, e.index] for e in placement), *weights]


def unpack_placement(values: list[list[Any]]) -> Placement:
    """The placement of `pack_placement`."""
    stored = [(Edge(*value[:3]), Storage.named(value[3])) for value in values if len(value) > 3]
    return Placement.of((Edge(*value) for value in values if len(value) == 3), stored)


def pack_ranges(ranges: Ranges) -> Record:
    """Ranges as JSON values."""
    activations = {t: [r.low, r.high] for t, r in ranges.activations.items()}
    vectors = {"weights": dict(ranges.weights), "shifts": dict(ranges.shifts)}
    given: Record = {"is_given": True} if ranges.is_given else {}
    if ranges.factors:
        given["factors"] = [[*f.edge, list(f.shape), list(f.exponents)] for f in ranges.factors]
    return {"activations": activations, **vectors, "method": ranges.method, **given}


def unpack_ranges(record: Record) -> Ranges:
    """The ranges of `pack_ranges`."""
    activations = {t: Range(*ends) for t, ends in record["activations"].items()}
    weights, shifts = record["weights"], record.get("shifts", {})  # which older files do not have, nor a method
    return Ranges(
        activations,
        {t: tuple(s) for t, s in weights.items()},
        {n: tuple(s) for n, s in shifts.items()},
        record.get("method", ""),
        record.get("is_given", False),
        tuple(Factor(Edge(*edge), tuple(shape), tuple(by)) for *edge, shape, by in record.get("factors", [])),
    )


def pack_layers(layers: Iterable[Layer]) -> list[list[Any]]:
    """A layer report as JSON values."""
    return [[x.name, list(x.nodes), x.precision, x.time_ms, x.kind] for x in layers]


def unpack_layers(values: list[list[Any]]) -> tuple[Layer, ...]:
    """The report of `pack_layers`."""
    return tuple(Layer(name, tuple(nodes), precision, ms, kind) for name, nodes, precision, ms, kind in values)


def pack_accuracy(accuracy: Accuracy) -> Record:
    """An accuracy as JSON values."""
    return {"sqnr_db": accuracy.sqnr_db, "accuracy": asdict(accuracy)}


def unpack_accuracy(record: Record) -> Accuracy:
    """The accuracy of `pack_accuracy`; an early record knows the SQNR alone."""
    known = record.get("accuracy") or {"sqnr_db": record["sqnr_db"]}
    return Accuracy(**{f.name: known[f.name] for f in fields(Accuracy) if f.name in known})


def pack_result(result: Measurement | Failure) -> Record:
    """A measurement with all its samples, or a failure, as JSON values."""
    return {"failure": asdict(result)} if isinstance(result, Failure) else {"samples": _pack_rounds(result)}


def _pack_rounds(result: Measurement) -> Record:
    parts = {"parts": [_pack_rounds(part) for part in result.parts]} if result.parts else {}
    return {"a": result.a, "b": result.b, **parts}


def unpack_result(record: Record) -> Measurement | Failure:
    """The result of `pack_result`."""
    if "failure" in record:
        return Failure(**record["failure"])
    return rounds_of(record["samples"])
