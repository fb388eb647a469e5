"""Another machine over SSH or adb, and a worker there. Model files and large arrays are named by a digest of their
content and sent once.

`Destination` runs the system's `ssh`, so that ~/.ssh/config applies. There `python -m qdqtune.engines.remote` answers
messages: `greeting` asks for the facts of the machine, `missing` which contents it lacks, `put` sends one, `stored`
passes on those of `engines.worker`. It removes its files and ends when its input closes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from socket import gethostname
from typing import Any

import msgspec
import numpy as np
import onnx

from qdqtune.engines.machine import MachineFacts, this_machine
from qdqtune.engines.process import Program, Worker
from qdqtune.engines.worker import Session, serve
from qdqtune.errors import BadOption, EngineUnavailable, OutputError, one_line, reading, writing
from qdqtune.graph.constants import inner_tensors, place_of
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Array
from qdqtune.version import __version__

SSH = (
    "ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ClearAllForwardings=yes",
    "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4",
)  # fmt: skip
"""The SSH command: it never asks for a password, and ends when the network is gone for a minute."""

SHARED = "-o", "ControlMaster=auto", "-o", "ControlPersist=60", "-o", "ControlPath=~/.ssh/qdqtune-%C"
"""Options with which all workers share one connection. SSH fails where it cannot make that socket."""

START_SECONDS = 90.0
"""Seconds that a machine may take to answer: a small board imports NumPy for a long time. Chosen, not measured."""

STORED_BYTES = 2**16
"""Arrays of at least so many bytes are sent by digest, smaller ones as part of the request. Chosen, not measured."""

ENDING_SECONDS = 3.0
"""Seconds that the other side may take to remove its files before it is disconnected. Chosen, not measured."""

USUAL_PYTHON = "python3"

NOISE = re.compile(r"^\s*$|^(Warning: Permanently added|Connection to .* closed|ControlSocket )|setlocale")
"""Lines that shells and SSH print in addition to the reason of a failure."""


@dataclass(frozen=True)
class Destination:
    """Where to connect: `ssh`'s name of a machine, or `adb:` and the serial number of a device, if given; and the
    Python to run there."""

    host: str
    python: str = USUAL_PYTHON

    @classmethod
    def parsed(cls, text: str) -> Destination:
        """Parse `[user@]host[:python]`, `ssh://[user@]host[:port][/python]` or `adb:[serial][:/python]`."""
        if (board := re.fullmatch(r"(adb:[^:/\s]*(?::\d+)?)(?::(/\S+))?", text)) is not None:
            return cls(board[1], board[2] or USUAL_PYTHON)
        found = re.fullmatch(r"(ssh://[^/:\s]+(?::\d+)?)(/\S+)?|([^-:/\s][^:/\s]*)(?::(?!//)(\S.*))?", text)
        if found is None or text.startswith("adb:"):
            raise BadOption(
                f"`on` {text!r} is no machine: give user@host, user@host:path/of/python, "
                "ssh://user@host:port/path/of/python or adb:SERIAL:/path/of/python"
            )
        return cls(found[1] or found[3], found[2] or found[4] or USUAL_PYTHON)

    def command(self, module: str) -> list[str]:
        """The local command that runs a module there. A relative path of the Python starts in the home folder there."""
        words = f"exec {shlex.quote(self.python.removeprefix('~/'))} -P -m {module}"
        if self.host.startswith("adb:"):
            serial = self.host.removeprefix("adb:")
            return ["adb", *(["-s", serial] if serial else []), "shell", "-T", words]
        shared = SHARED if os.access(Path("~/.ssh").expanduser(), os.W_OK) else ()
        return [*SSH, *shared, "--", self.host, words]

    def start(self, log: Path) -> FarWorker:
        """Start a worker there (see `StartWorker`).

        Raises:
            EngineUnavailable: the machine does not answer, or has no Python or no qdqtune of this version.
        """
        command = self.command("qdqtune.engines.remote")
        try:
            program = Program(log, args=command)
        except OSError as error:
            raise EngineUnavailable(f"`on` needs the program {command[0]}: {one_line(error)}") from error
        try:
            return FarWorker(program, START_SECONDS, self.host)
        except TimeoutError:
            raise EngineUnavailable(f"{self.host} does not answer within {START_SECONDS:.0f} s") from None
        except EOFError:
            reason = why_not(self, program.exit_code() or 0, log.read_text(errors="replace").splitlines())
            raise EngineUnavailable(reason) from None

    def facts(self) -> MachineFacts:
        """Connect, and return the facts of the machine. Raises as `start`."""
        with temporary_folder() as folder:
            worker = self.start(folder / "greeting.log")
            worker.end()
        return worker.facts


def why_not(destination: Destination, code: int, printed: list[str]) -> str:
    """The reason why no worker started, and what to do, from what `ssh` or `adb` printed and its exit code."""
    host, python = destination.host, destination.python
    lines = [line for line in printed if not NOISE.search(line)]
    last = one_line(lines[-1] if lines else f"exit code {code}")
    if code == 255 and not host.startswith("adb:"):
        reason = re.sub(r"^ssh: |[.\s]+$", "", last)
        return f"ssh to {host} fails ({reason}): ssh -o BatchMode=yes {host} has to work, without a password"
    named = f"{host}/PATH" if host.startswith("ssh://") else f"{host}:PATH"
    return (
        f"no worker starts with {python} on {host} ({last}): it has to be Python 3.11 or later with qdqtune "
        f"{__version__}; `on` {named} names another"
    )


class FarWorker:
    """A runner's worker on another machine, where `program` runs this module."""

    def __init__(self, program: Worker, limit: float, host: str = "") -> None:
        """Ask for the program's version, its host, and its machine's facts; after an error the program has ended.
        `host` is the user's name for the machine, by default its own.

        Raises:
            EngineUnavailable: it has another version of qdqtune.
            TimeoutError, EOFError: no answer within `limit` seconds.
        """
        self._program = program
        with ExitStack() as undo:
            undo.callback(self.end)
            words, there = program.ask("greeting", (), limit), "another version of qdqtune"
            try:
                self.location, there = host or words["host"], f"qdqtune {words['version']}"
                facts = msgspec.convert({**words["facts"], "where": self.location}, MachineFacts)
            except (KeyError, TypeError, msgspec.ValidationError):
                facts = None  # of a version that greets otherwise
            if facts is None or words["version"] != __version__:
                where = host or program.location or "the other machine"
                raise EngineUnavailable(
                    f"{where} has {there}, and here is {__version__}: install one version everywhere"
                )
            self.facts = facts
            undo.pop_all()

    @property
    def alive(self) -> bool:
        return self._program.alive

    def ask(self, name: str, arguments: tuple[Any, ...], limit: float) -> Any:
        contents: dict[str, Array] = {}
        log = None
        if name == "build":
            number, path, log = arguments
            proto, contents = packed(path)
            name, arguments = "build_from", (number, path.name, proto, tuple(contents))
        digests: list[str] = []

        def is_part(buffer: pickle.PickleBuffer) -> bool:
            values = np.frombuffer(buffer.raw(), np.uint8)
            if values.nbytes >= STORED_BYTES:
                digests.append(_digest(values))
                contents[digests[-1]] = values
            return values.nbytes < STORED_BYTES

        request = pickle.dumps(arguments, protocol=5, buffer_callback=is_part)
        try:
            for digest in self._program.ask("missing", (list(contents),), limit) if contents else ():
                self._program.ask("put", (digest, contents[digest]), limit)
            result = self._program.ask("stored", (name, request, digests), limit)
        except EOFError as error:
            raise EOFError(f"{error} on {self.location}") from error
        except BadOption as error:
            raise BadOption(f"on {self.location}: {error}") from error
        except (EngineUnavailable, OutputError) as error:  # other hosts may have room, so only this worker is lost
            raise EngineUnavailable(f"on {self.location}: {error}") from error
        if log is None:
            return result
        text, good, result = result
        if text:
            log.write_text(text, encoding="utf-8", errors="backslashreplace")
        if good:
            return result
        if isinstance(result, BadOption | EngineUnavailable):
            raise type(result)(f"on {self.location}: {result}") from result
        raise result

    def end(self, seconds: float = ENDING_SECONDS) -> None:
        self._program.end(seconds)


def packed(path: Path) -> tuple[bytes, dict[str, Array]]:
    """A serialized model whose external data are renamed to the digest of their content, and these data by digest,
    mapped from the files."""
    contents: dict[str, Array] = {}
    with reading(path):
        proto = onnx.load(path, load_external_data=False)
        for tensor in chain(proto.graph.initializer, inner_tensors(proto)):
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            file, start, count = place_of(tensor, path.parent)
            values = np.asarray(np.memmap(file, np.uint8, "r", start, (count,))) if count else np.zeros(0, np.uint8)
            digest = _digest(values)
            contents[digest] = values
            del tensor.external_data[:]
            tensor.external_data.add(key="location", value=digest)
            tensor.external_data.add(key="length", value=str(values.nbytes))
    return proto.SerializeToString(), contents


def _digest(values: Array) -> str:
    return hashlib.sha256(values.data).hexdigest()[:32]


MOST_KEPT = 2**30
"""Bytes of received contents that are kept though no loaded model uses them. Chosen, not measured."""


class FarSession(Session):
    """A session whose files and large arrays arrive as bytes, stored by digest."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._constants: dict[int, tuple[str, ...]] = {}

    def greeting(self) -> dict[str, Any]:
        return {"version": __version__, "host": gethostname(), "facts": asdict(this_machine())}

    def missing(self, digests: Sequence[str]) -> list[str]:
        """Which of these contents have to be sent. If too much is kept, what no loaded model uses is removed first."""
        spare = self._sizes.keys() - set(digests).union(*self._constants.values())
        if sum(self._sizes[digest] for digest in spare) > MOST_KEPT:
            for digest in spare:
                del self._sizes[digest]
                (self._folder / digest).unlink(missing_ok=True)
        return [digest for digest in digests if digest not in self._sizes]

    def put(self, digest: str, values: Array) -> None:
        with writing(f"to {self._folder}", "it may be full"):
            (self._folder / digest).write_bytes(values.data)
        self._sizes[digest] = values.nbytes

    def stored(self, name: str, request: bytes, digests: Sequence[str]) -> Any:
        """Call the method `name` with pickled arguments, of which large arrays were sent before."""
        arrays = [np.fromfile(self._folder / digest, np.uint8) for digest in digests]
        return getattr(self, name)(*pickle.loads(request, buffers=arrays))

    def build_from(self, number: int, name: str, proto: bytes, constants: tuple[str, ...]) -> tuple[str, bool, Any]:
        """Build a model from its bytes and the digests of its external data. Returns its output, and the answer."""
        path, log = self._folder / f"{number}-{name}", self._folder / "build.log"
        log.unlink(missing_ok=True)
        with writing(f"to {self._folder}", "it may be full"):
            path.write_bytes(proto)
        self._constants[number] = constants
        good, result = self.answer("build", number, path, log)
        return log.read_text(errors="replace") if log.exists() else "", good, result

    def unload(self, number: int) -> None:
        """Free a model and remove its file; external data stay, as other models may use them."""
        super().unload(number)
        self._constants.pop(number, None)
        for path in self._folder.glob(f"{number}-*"):
            path.unlink()


def main() -> None:
    with suppress(OSError):
        os.setsid()
    folder = temporary_folder().path
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    serve(FarSession(folder), folder)


if __name__ == "__main__":
    main()
