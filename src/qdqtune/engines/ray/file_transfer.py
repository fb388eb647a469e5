"""Model files and arrays on their way to another machine, through the cluster's object store.

Large ones are stored under a digest of their content, so that each content is stored, and goes to a machine, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqtune.errors import reading, writing
from qdqtune.types import Array

STORED_BYTES = 2**16
"""Size from which an array goes through the object store; a smaller one travels in the request itself."""

Put = Callable[[Array], Any]
"""Puts an array into the object store, and gives the reference to it."""

Get = Callable[[Any], Array]
"""The array of a reference."""


@dataclass(frozen=True)
class StoredArray:
    """An array in the object store; the digest tells its content."""

    digest: str
    reference: Any


@dataclass(frozen=True)
class SentModel:
    """A model file, and the files that its constants refer to by name."""

    name: str
    proto: StoredArray | Array
    constants: Mapping[str, StoredArray]


@dataclass
class Sender:
    """Puts model files and arrays into the object store of one cluster, each content once."""

    put: Put
    stored: dict[str, StoredArray] = field(default_factory=dict)

    def store(self, values: Array) -> StoredArray:
        """An array in the object store, put there if its content is new."""
        content = hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        digest = hashlib.sha256(f"{content.hexdigest()}{values.dtype}{values.shape}".encode()).hexdigest()[:32]
        if digest not in self.stored:
            self.stored[digest] = StoredArray(digest, self.put(values))
        return self.stored[digest]

    def arrays(self, tensors: Mapping[str, Array]) -> dict[str, Array | StoredArray]:
        """Arrays by name, the large ones stored."""
        held = {name: np.asarray(array) for name, array in tensors.items()}
        return {n: self.store(a) if a.nbytes >= STORED_BYTES and a.dtype.kind != "O" else a for n, a in held.items()}

    def model(self, path: Path) -> SentModel:
        """A model file and its external data.

        Raises:
            BadOption: it cannot be read.
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
    """The tensors of a graph, and of those inside its nodes, that lie in other files."""
    outside = onnx.TensorProto.EXTERNAL
    yield from (tensor for tensor in graph.initializer if tensor.data_location == outside)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (t for t in (attribute.t, *attribute.tensors) if t.data_location == outside)
            for inner in (attribute.g, *attribute.graphs):
                yield from external(inner)


@dataclass
class Receiver:
    """Writes what a `Sender` has sent into a folder. Workers of a host share its object store, but not the files: ONNX
    refuses external data that has several names."""

    folder: Path
    get: Get

    def arrays(self, tensors: Mapping[str, Array | StoredArray]) -> dict[str, Array]:
        """`Sender.arrays` undone."""
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
