"""Model files and arrays that are sent to other machines, under a digest of their content: each content goes to a
machine once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import onnx

from qdqtune.engines.remote.messages import SentModel, StoredArray
from qdqtune.errors import reading, writing
from qdqtune.types import Array

STORED_BYTES = 2**16
"""Size from which an array is sent by content. A smaller one is part of the request. Chosen, not measured."""

Put = Callable[[str, Array], Any]
"""Puts an array with this digest into the store of the other side, and returns the reference to it."""

Forget = Callable[[str], None]
"""Removes the array with this digest from there."""

Get = Callable[[Any], Array]
"""Gets the array of a reference from that store."""


@dataclass
class Sender:
    """Puts model files and arrays into the store of another machine or a cluster, each content once. The part of a
    model file that names its nodes is stored from `least_proto` bytes on. Of the inputs some `most_kept` bytes stay
    there: those that were not used for longest are forgotten."""

    put: Put
    least_proto: float = STORED_BYTES
    most_kept: float = inf
    forget: Forget = lambda _: None
    stored: dict[str, StoredArray] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    """The bytes of stored inputs, in the order of their last use."""
    lock: Lock = field(default_factory=Lock)

    def store(self, values: Array) -> StoredArray:
        """Put an array into the store, unless its content is there already."""
        content = hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        digest = hashlib.sha256(f"{content.hexdigest()}{values.dtype}{values.shape}".encode()).hexdigest()[:32]
        if digest not in self.stored:
            self.stored[digest] = StoredArray(digest, self.put(digest, values))
        return self.stored[digest]

    def arrays(self, tensors: Mapping[str, Array]) -> dict[str, Array | StoredArray]:
        """Arrays by name; those from `STORED_BYTES` on are put into the store."""
        sent: dict[str, Array | StoredArray] = {name: np.asarray(array) for name, array in tensors.items()}
        with self.lock:
            while sum(self.inputs.values()) > self.most_kept:
                oldest = next(iter(self.inputs))
                del self.inputs[oldest], self.stored[oldest]
                self.forget(oldest)
            for name, array in sent.items():
                if isinstance(array, np.ndarray) and array.nbytes >= STORED_BYTES and array.dtype.kind != "O":
                    sent[name] = stored = self.store(array)
                    self.inputs.pop(stored.digest, None)
                    self.inputs[stored.digest] = array.nbytes
        return sent

    def model(self, path: Path) -> SentModel:
        """Put a model file and its external data into the store.

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
        return SentModel(path.name, self.store(data) if data.nbytes >= self.least_proto else data, constants)


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
    """Writes the files that a `Sender` has sent into a folder, those of builds with names that begin with `prefix`. If
    the store keeps its arrays in files, these lie in the same folder. Elsewhere workers of a host share the store, but
    not the files: ONNX refuses external data with several hard links."""

    folder: Path
    get: Get
    prefix: str = ""

    def arrays(self, tensors: Mapping[str, Array | StoredArray]) -> dict[str, Array]:
        """The arrays that `Sender.arrays` was given."""
        return {name: self.get(a.reference) if isinstance(a, StoredArray) else a for name, a in tensors.items()}

    def model(self, sent: SentModel, number: int) -> Path:
        """Write the file of a build, and its constants beside it.

        Raises:
            OutputError: the disk is full.
        """
        self.remove(number)
        path = self.folder / f"{self.prefix}{number}-{sent.name}"
        with writing(path):
            for stored in sent.constants.values():
                self._written(stored)
            if isinstance(sent.proto, StoredArray):
                os.link(self._written(sent.proto), path)
            else:
                sent.proto.tofile(path)
        return path

    def remove(self, number: int) -> None:
        """Remove the file of a build; its constants stay for others."""
        for path in self.folder.glob(f"{self.prefix}{number}-*"):
            path.unlink()

    def _written(self, stored: StoredArray) -> Path:
        """The file with the content of an array, written now if it does not exist."""
        path = self.folder / f"{stored.digest}.bin"
        if not path.exists():
            fresh = path.with_suffix(".part")
            self.get(stored.reference).tofile(fresh)
            fresh.rename(path)
        return path
