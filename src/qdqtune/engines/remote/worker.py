"""A worker on another machine as its runner sees it: model files and large arrays go there by content, each once."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx

from qdqtune.engines.execution import Deadline
from qdqtune.engines.process import Program
from qdqtune.engines.remote.far import GREETING
from qdqtune.errors import BadOption, EngineUnavailable, reading
from qdqtune.graph.constants import inner_tensors
from qdqtune.types import Array
from qdqtune.version import __version__

STORED_BYTES = 2**16
"""Size from which an array is sent by content. A smaller one is part of the request. Chosen, not measured."""

LONGEST_WELCOME = 2**16
"""Bytes that a shell may print before the greeting. Chosen, not measured."""

ENDING_SECONDS = 3.0
"""How long the other side may take to remove its files before the way to it is cut. Chosen, not measured."""


class Far(Protocol):
    """A program that runs `remote.far`: a `process.Program`, or an actor that has one."""

    @property
    def alive(self) -> bool: ...

    def ask(self, message: object, limit: float) -> Any: ...

    def end(self, seconds: float = 0.0) -> None: ...

    def printed(self) -> str: ...


class FarWorker:
    """A `process.Worker` on another machine: on cores of its own, `cores` of them, or with 0 wherever the system there
    puts it. `host` is how the user knows the machine."""

    def __init__(self, program: Far, host: str, cores: int) -> None:
        self._program, self._host, self._cores = program, host, cores
        self.location = host

    @property
    def alive(self) -> bool:
        return self._program.alive

    def request(self, name: str, arguments: tuple[Any, ...], limit: float) -> tuple[bool, Any]:
        contents: dict[str, Array] = {}
        sent: tuple[Any, ...] = (name, arguments)
        if name == "open":
            sent = "open_on", (*arguments, self._cores, os.getcwd())
        elif name == "build":
            number, path, _ = arguments
            proto, contents = packed(path)
            sent = "build_from", (number, path.name, proto, tuple(contents))
        elif name == "save":
            sent = "saved", arguments[:1]
        request = io.BytesIO()
        _Request(request, contents).dump(sent)
        try:
            for digest in self._program.ask(("missing", list(contents)), limit) if contents else ():
                self._program.ask(("put", digest, contents[digest]), limit)
            good, result = self._program.ask(("ask", request.getvalue()), limit)
        except EOFError as error:
            raise EOFError(f"{error} on {self.location}") from error
        if good and name == "build":
            text, good, result = result
            if text:
                arguments[2].write_text(text, encoding="utf-8", errors="backslashreplace")
        elif good and name == "open":
            self.location = self._host + result
        elif good and name == "save":
            result.tofile(arguments[1])
        if isinstance(result, EngineUnavailable | BadOption) and self.location not in str(result):
            result = type(result)(f"on {self.location}: {result}")
        return good, result

    def kill(self) -> None:
        self._program.end(ENDING_SECONDS)

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
    """Refuse a program by its greeting.

    Raises:
        EngineUnavailable: it has another version of qdqtune.
    """
    if words["version"] != __version__:
        raise EngineUnavailable(
            f"{host} has qdqtune {words['version']}, and here is {__version__}: install one version everywhere"
        )


def packed(path: Path) -> tuple[bytes, dict[str, Array]]:
    """A model file whose external data lie in files that are named by their content, and the bytes of these.

    Raises:
        BadOption: a file cannot be read.
    """
    contents: dict[str, Array] = {}
    with reading(path):
        proto = onnx.load(path, load_external_data=False)
        for tensor in chain(proto.graph.initializer, inner_tensors(proto)):
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            entries = {entry.key: entry.value for entry in tensor.external_data}
            values = _bytes_at(path.parent / entries["location"], int(entries.get("offset", 0)), entries.get("length"))
            digest = _digest(values)
            contents[digest] = values
            del tensor.external_data[:]
            tensor.external_data.add(key="location", value=digest)
            tensor.external_data.add(key="length", value=str(values.nbytes))
    return proto.SerializeToString(), contents


def _bytes_at(path: Path, start: int, length: str | None) -> Array:
    """The bytes of a part of a file, which are read when they are used."""
    count = path.stat().st_size - start if length is None else int(length)
    return np.asarray(np.memmap(path, np.uint8, "r", start, (count,))) if count else np.zeros(0, np.uint8)


def _digest(values: Array) -> str:
    return hashlib.sha256(values.data).hexdigest()[:32]


class _Request(pickle.Pickler):
    """Writes a request; large arrays are put into `contents` instead."""

    def __init__(self, file: io.BytesIO, contents: dict[str, Array]) -> None:
        super().__init__(file, protocol=5)
        self._contents = contents

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.nbytes < STORED_BYTES or value.dtype.kind == "O":
            return None
        values = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        digest = _digest(values)
        self._contents[digest] = values
        return digest, value.dtype, value.shape
