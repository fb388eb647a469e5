"""Another machine over SSH or adb, and a worker there as its runner sees it: model files and large arrays go there by
content, each once. Each worker is a command that begins with `ssh` or `adb`.

The system's `ssh` is used, so that names, keys and jumps of ~/.ssh/config hold, or its `adb`. It asks for nothing.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shlex
import weakref
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx

from qdqtune.engines.devices import ANYWHERE, Device
from qdqtune.engines.execution import Deadline
from qdqtune.engines.machine import MachineFacts
from qdqtune.engines.process import Program, Worker
from qdqtune.engines.remote.far import GREETING
from qdqtune.errors import BadOption, EngineUnavailable, one_line, reading
from qdqtune.graph.constants import inner_tensors
from qdqtune.system.writing import TEMPORARY, Scratch, temporary_folder
from qdqtune.types import Array
from qdqtune.version import __version__

SSH = (
    "ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ClearAllForwardings=yes",
    "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4",
)  # fmt: skip
"""The program: no password prompt that nobody sees, and an end where the network is gone for a minute."""

SOCKETS = Path("/tmp")
"""Where sockets of shared connections lie: the system takes paths of some 100 characters only."""

START_SECONDS = 90.0
"""How long a machine may take to answer: a small board imports NumPy for seconds. Chosen, not measured."""

STORED_BYTES = 2**16
"""Size from which an array is sent by content. A smaller one is part of the request. Chosen, not measured."""

LONGEST_WELCOME = 2**16
"""Bytes that a shell may print before the greeting. Chosen, not measured."""

ENDING_SECONDS = 3.0
"""How long the other side may take to remove its files before the way to it is cut. Chosen, not measured."""

USUAL_PYTHON = "python3"

NOISE = re.compile(r"^\s*$|^(Warning: Permanently added|Connection to .* closed|ControlSocket )|setlocale")
"""Lines that shells and SSH print beside the reason of a failure."""


@dataclass(frozen=True)
class Destination:
    """What to connect to, as `ssh` takes it or `adb:` with a serial number, if one is given, the Python there, and the
    socket over which workers share one connection of SSH; without it each has its own."""

    host: str
    python: str = USUAL_PYTHON
    socket: str = ""

    @classmethod
    def parsed(cls, text: str) -> Destination:
        """Of `[user@]host[:python]`, `ssh://[user@]host[:port][/path/of/python]` or `adb:[serial][:/path/of/python]`.

        Raises:
            BadOption: it is none of them.
        """
        if text.startswith("adb:"):
            device = re.fullmatch(r"(adb:[^:/\s]*(?::\d+)?)(?::(/\S+))?", text)
            if device is None:
                raise BadOption(f"`on` {text!r} is no device: give adb:SERIAL or adb:SERIAL:/path/of/python")
            return cls(device[1], device[2] or USUAL_PYTHON)
        found = re.fullmatch(r"(ssh://[^/:\s]+(?::\d+)?)(/\S+)?|([^-:/\s][^:/\s]*)(?::(?!//)(\S.*))?", text)
        if found is None:
            raise BadOption(
                f"`on` {text!r} is no machine: give user@host, user@host:path/of/python or "
                "ssh://user@host:port/path/of/python"
            )
        return cls(found[1] or found[3], found[2] or found[4] or USUAL_PYTHON)

    def command(self, module: str) -> list[str]:
        """The command that runs a module there. The path of the Python is relative to the home folder there."""
        words = f"exec {shlex.quote(self.python.removeprefix('~/'))} -P -m {module}"
        if self.host.startswith("adb:"):
            serial = self.host.removeprefix("adb:")
            return ["adb", *(("-s", serial) if serial else ()), "shell", "-T", words]
        sharing = ["-o", "ControlMaster=auto", "-o", "ControlPersist=60", "-o", f"ControlPath={self.socket}"]
        return [*SSH, *(sharing if self.socket else ()), "--", self.host, words]

    def shared(self) -> Destination:
        """The same with one connection for all workers. Its socket lies in a private folder with a short name; where
        that cannot be made, each worker has a connection of its own."""
        if self.host.startswith("adb:"):
            return self
        try:
            scratch = Scratch(SOCKETS, TEMPORARY)
        except OSError:
            return self
        destination = replace(self, socket=str(scratch.path / "ssh"))
        weakref.finalize(destination, scratch.close)
        return destination

    def start(self, log: Path, device: Device, cores: int = 0) -> FarWorker:
        """A worker there: a `StartWorker`. `cores` has each worker on a device other than `ANYWHERE` for itself.

        Raises:
            EngineUnavailable: there is no way, no Python, or no qdqtune of this version.
        """
        program, _ = self._started(log)
        return FarWorker(program, self.host, cores if device != ANYWHERE else 0)

    def facts(self) -> MachineFacts:
        """What is known of the machine. Raises as `start`."""
        with temporary_folder() as folder:
            program, facts = self._started(folder / "greeting.log")
            program.end(ENDING_SECONDS)
        return facts

    def _started(self, log: Path) -> tuple[Program, MachineFacts]:
        command = self.command("qdqtune.engines.remote.far")
        try:
            program = Program(log, args=command)
        except OSError as error:
            raise EngineUnavailable(f"`on` needs the program {command[0]}: {one_line(error)}") from error
        try:
            words = greeting(program, START_SECONDS)
            check_version(words, self.host)
            return program, replace(msgspec.convert(words["facts"], MachineFacts), where=self.host)
        except TimeoutError:
            program.end()
            raise EngineUnavailable(f"{self.host} does not answer within {START_SECONDS:.0f} s") from None
        except (EOFError, OSError, msgspec.ValidationError):
            code = program.exit_code(ENDING_SECONDS)
            reason = why_not(self, code or 0, program.printed().splitlines())
            program.end()
            raise EngineUnavailable(reason) from None
        except BaseException:
            program.end(ENDING_SECONDS)
            raise


def why_not(destination: Destination, code: int, printed: list[str]) -> str:
    """Why no worker has started, and what to do, from the exit code of `ssh` or `adb` and what it has printed."""
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
    """A worker of a runner on another machine: on cores of its own, `cores` of them, or with 0 wherever the system
    there puts it. `program` runs `remote.far` there; `host` is how the user knows the machine."""

    def __init__(self, program: Worker, host: str, cores: int) -> None:
        self._program, self._host, self._cores = program, host, cores
        self.location = host

    @property
    def alive(self) -> bool:
        return self._program.alive

    def ask(self, message: Any, limit: float) -> tuple[bool, Any]:
        contents: dict[str, Array] = {}
        sent, (name, arguments) = message, message
        if name == "open":
            sent = "open_on", (self._cores, os.getcwd(), *arguments)
        elif name == "build":
            number, path, _ = arguments
            proto, contents = packed(path)
            sent = "build_from", (number, path.name, proto, tuple(contents))
        arrays: list[Array] = []

        def is_part(buffer: pickle.PickleBuffer) -> bool:
            values = np.frombuffer(buffer.raw(), np.uint8)
            if values.nbytes < STORED_BYTES:
                return True
            arrays.append(values)
            return False

        request = pickle.dumps(sent, protocol=5, buffer_callback=is_part)
        digests = [_digest(values) for values in arrays]
        contents |= zip(digests, arrays, strict=True)
        try:
            for digest in self._program.ask(("missing", list(contents)), limit) if contents else ():
                self._program.ask(("put", digest, contents[digest]), limit)
            good, result = self._program.ask(("ask", request, digests), limit)
        except EOFError as error:
            raise EOFError(f"{error} on {self.location}") from error
        if good and name == "build":
            text, good, result = result
            if text:
                arguments[2].write_text(text, encoding="utf-8", errors="backslashreplace")
        elif good and name == "open":
            self.location = self._host + result
        if isinstance(result, EngineUnavailable | BadOption) and self.location not in str(result):
            result = type(result)(f"on {self.location}: {result}")
        return good, result

    def end(self, seconds: float = ENDING_SECONDS) -> None:
        self._program.end(seconds)

    def printed(self) -> str:
        return self._program.printed()


def greeting(program: Program, limit: float) -> dict[str, Any]:
    """What a program says first: its version, its host, and the facts of its machine. Raises as `Program.ask`."""
    deadline = Deadline(limit)
    program.channel.skip_to(GREETING, LONGEST_WELCOME, deadline)
    words = program.channel.recv(deadline)
    if not isinstance(words, dict) or not {"version", "host", "facts"} <= words.keys():
        raise EOFError("no greeting")
    return words


def check_version(words: dict[str, Any], host: str) -> None:
    """Refuse a program by its greeting."""
    if words["version"] != __version__:
        raise EngineUnavailable(
            f"{host} has qdqtune {words['version']}, and here is {__version__}: install one version everywhere"
        )


def packed(path: Path) -> tuple[bytes, dict[str, Array]]:
    """A model file whose external data lie in files that are named by their content, and the bytes of these, which are
    read when they are used."""
    contents: dict[str, Array] = {}
    with reading(path):
        proto = onnx.load(path, load_external_data=False)
        for tensor in chain(proto.graph.initializer, inner_tensors(proto)):
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            entries = {entry.key: entry.value for entry in tensor.external_data}
            file, start = path.parent / entries["location"], int(entries.get("offset", 0))
            count = int(entries.get("length", file.stat().st_size - start))
            values = np.asarray(np.memmap(file, np.uint8, "r", start, (count,))) if count else np.zeros(0, np.uint8)
            digest = _digest(values)
            contents[digest] = values
            del tensor.external_data[:]
            tensor.external_data.add(key="location", value=digest)
            tensor.external_data.add(key="length", value=str(values.nbytes))
    return proto.SerializeToString(), contents


def _digest(values: Array) -> str:
    return hashlib.sha256(values.data).hexdigest()[:32]
