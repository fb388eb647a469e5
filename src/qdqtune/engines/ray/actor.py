"""A worker on a Ray cluster: an actor, which holds a device of its host, and the files and arrays that are sent to it.

Files and arrays go through the object store of the cluster. Large ones are stored under a digest of their content, so
that each content is stored, and goes to a machine, once.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal

import numpy as np
import onnx

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import LEASE_SECONDS, Device, allot
from qdqtune.engines.process import WorkerProcess
from qdqtune.errors import BadOption, EngineUnavailable, OutputError, reading, writing
from qdqtune.system.cleanup import cleaner
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Array
from qdqtune.version import __version__

STORED_BYTES = 2**16
"""Size from which an array goes through the object store. A smaller one is part of the request. Chosen, not
measured."""

Put = Callable[[Array], Any]
"""Puts an array into the object store, and returns the reference to it."""

Get = Callable[[Any], Array]
"""Gets the array of a reference from the object store."""

FILES = "files"
"""Name of the folder for model files, within the temporary folder of an actor."""


@dataclass(frozen=True)
class StoredArray:
    """An array in the object store, and the digest of its content."""

    digest: str
    reference: Any


@dataclass(frozen=True)
class SentModel:
    """A model file to send: its name, the bytes of its ModelProto, and by name the files that hold its constants."""

    name: str
    proto: StoredArray | Array
    constants: Mapping[str, StoredArray]


@dataclass
class Sender:
    """Puts model files and arrays into the object store of one cluster, each content once."""

    put: Put
    stored: dict[str, StoredArray] = field(default_factory=dict)

    def store(self, values: Array) -> StoredArray:
        """Put an array into the object store, unless its content is there already."""
        content = hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        digest = hashlib.sha256(f"{content.hexdigest()}{values.dtype}{values.shape}".encode()).hexdigest()[:32]
        if digest not in self.stored:
            self.stored[digest] = StoredArray(digest, self.put(values))
        return self.stored[digest]

    def arrays(self, tensors: Mapping[str, Array]) -> dict[str, Array | StoredArray]:
        """Arrays by name; those from `STORED_BYTES` on are put into the object store."""
        held = {name: np.asarray(array) for name, array in tensors.items()}
        return {n: self.store(a) if a.nbytes >= STORED_BYTES and a.dtype.kind != "O" else a for n, a in held.items()}

    def model(self, path: Path) -> SentModel:
        """Put a model file and its external data into the object store.

        Raises:
            BadOption: a file cannot be read.
        """
        with reading(path):
            proto = onnx.load(path, load_external_data=False)
            constants: dict[str, StoredArray] = {}
            for tensor in external(proto.graph):
                told = {entry.key: entry.value for entry in tensor.external_data}
                start, length = int(told.get("offset", 0)), int(told.get("length", -1))
                stored = self.store(np.fromfile(path.parent / told["location"], np.uint8, length, offset=start))
                constants[f"{stored.digest}.bin"] = stored
                del tensor.external_data[:]
                for key, value in (told | {"location": f"{stored.digest}.bin", "offset": "0"}).items():
                    if key in ("location", "offset", "length"):
                        tensor.external_data.add(key=key, value=value)
        data = np.frombuffer(proto.SerializeToString(), np.uint8)
        return SentModel(path.name, self.store(data) if data.nbytes >= STORED_BYTES else data, constants)


def external(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The tensors of a graph, and of graphs inside its nodes, whose values are in other files."""
    outside = onnx.TensorProto.EXTERNAL
    yield from (tensor for tensor in graph.initializer if tensor.data_location == outside)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (t for t in (attribute.t, *attribute.tensors) if t.data_location == outside)
            for inner in (attribute.g, *attribute.graphs):
                yield from external(inner)


@dataclass
class Receiver:
    """Writes the files that a `Sender` has sent into a folder. The workers of a host share its object store, but not
    the files: ONNX refuses external data with several hard links."""

    folder: Path
    get: Get

    def arrays(self, tensors: Mapping[str, Array | StoredArray]) -> dict[str, Array]:
        """The arrays that `Sender.arrays` was given."""
        return {name: self.get(a.reference) if isinstance(a, StoredArray) else a for name, a in tensors.items()}

    def model(self, sent: SentModel, number: int) -> Path:
        """Write the file of a build, and its constants beside it.

        Raises:
            OutputError: the disk is full.
        """
        path = self.folder / f"{number}-{sent.name}"
        with writing(path):
            for name, stored in sent.constants.items():
                if not (self.folder / name).exists():
                    fresh = self.folder / f"{name}.part"
                    self.get(stored.reference).tofile(fresh)
                    fresh.rename(self.folder / name)
            proto = self.get(sent.proto.reference) if isinstance(sent.proto, StoredArray) else sent.proto
            proto.tofile(path)
        return path


@dataclass(frozen=True)
class Reply:
    """The outcome of a request: an answer (a result if `good`, else a QdqtuneError), a timeout, or an ended process.

    `text` is what the engine has printed, or why the process has ended. `content` is that of a saved file.
    """

    kind: Literal["answer", "timeout", "ended"]
    good: bool = False
    result: Any = None
    text: str = ""
    content: bytes = b""


@dataclass(frozen=True)
class WorkerLocation:
    """The host and the device of a worker, and the version of qdqtune there."""

    host: str
    device: Device
    version: str

    def __str__(self) -> str:
        cores = f"cores {','.join(map(str, self.device.cores))}" if self.device.cores else ""
        return " ".join(filter(None, (self.host, cores, self.device.gpu and f"GPU {self.device.gpu}")))


class WorkerActor:
    """Answers the requests of one runner on a device of this host. Ray ends it together with the process that created
    it; the engine process then ends too, and the files of both are removed. File names in the engine's options are
    relative to `folder`, if this host has that folder."""

    def __init__(self, spec: EngineSpec, cores_each: int | None, get: Get, folder: str) -> None:
        with suppress(OSError):
            os.chdir(folder)
        cleaner().start()
        self._asked = spec, cores_each
        self._scratch = temporary_folder()
        self._folder = self._scratch.path
        (self._folder / FILES).mkdir()
        self._receiver = Receiver(self._folder / FILES, get)
        self._worker: WorkerProcess | None = None

    def start(self) -> WorkerLocation:
        """Start an engine process on free cores of this host, and on a free GPU if the engine needs one.

        Raises:
            BadOption, EngineUnavailable: there are too few within `LEASE_SECONDS`.
        """
        end = monotonic() + LEASE_SECONDS
        while True:
            try:
                (device,) = allot(self._asked[0], 1, self._asked[1])
                self._worker = WorkerProcess(self._folder / "worker.log", device)
                return WorkerLocation(socket.gethostname(), device, __version__)
            except (BadOption, EngineUnavailable):  # its last process is still ending, or another worker took it
                if monotonic() > end:
                    raise
                sleep(0.1)

    def request(self, name: str, arguments: tuple[Any, ...], limit: float) -> Reply:
        """Pass on one request for `worker.Session`. A model file comes as `SentModel`; a saved file is returned as its
        content."""
        assert self._worker is not None
        log, wanted = self._folder / "build.log", None
        try:
            if name == "build":
                number, sent, _ = arguments
                log.unlink(missing_ok=True)
                arguments = (number, self._receiver.model(sent, number), log)
            elif name == "save":
                wanted = self._folder / "saved"
                arguments = (arguments[0], wanted)
            elif name == "feed":
                arguments = (tuple(replace(w, inputs=self._receiver.arrays(w.inputs)) for w in arguments[0]),)
            elif name == "run":
                arguments = (arguments[0], self._receiver.arrays(arguments[1]))
            good, result = self._worker.request(name, arguments, limit)
        except TimeoutError:
            text = _text(log) + self._worker.printed()
            self._worker.kill()
            return Reply("timeout", text=text)
        except (EOFError, BrokenPipeError, ConnectionError):
            return Reply("ended", text=self._worker.exit_reason())
        except OutputError as error:  # other hosts may have room, so only this worker is lost
            return Reply("answer", False, EngineUnavailable(f"on {socket.gethostname()}: {error}"))
        content = wanted.read_bytes() if wanted is not None and wanted.is_file() else b""
        return Reply("answer", good, result, _text(log) if name == "build" else "", content)

    def close(self) -> None:
        """End the engine process, and remove all files."""
        if self._worker is not None:
            self._worker.kill()
        self._scratch.close()


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""
