"""What travels to another machine: model files and arrays, in parts that are known by what they hold, so that each part
goes to a machine once."""

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

LARGE = 2**16
"""Bytes from which something travels by itself, known by what it holds."""

Put = Callable[[Array], Any]
"""Gives an array to the object store of the cluster: the reference to it there."""

Get = Callable[[Any], Array]
"""The array of a reference."""


@dataclass(frozen=True)
class Part:
    """Bytes, or an array, that lie in the object store."""

    digest: str
    reference: Any


@dataclass(frozen=True)
class ModelParcel:
    """A model file, and what its constants refer to: files by name, each a part."""

    name: str
    proto: Part | Array
    constants: Mapping[str, Part]


@dataclass
class Sender:
    """Packs for one cluster, and remembers what its object store has already."""

    put: Put
    parts: dict[str, Part] = field(default_factory=dict)

    def part(self, values: Array) -> Part:
        """The part that holds these values."""
        content = hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        digest = hashlib.sha256(f"{content.hexdigest()}{values.dtype}{values.shape}".encode()).hexdigest()[:32]
        if digest not in self.parts:
            self.parts[digest] = Part(digest, self.put(values))
        return self.parts[digest]

    def arrays(self, tensors: Mapping[str, Array]) -> dict[str, Array | Part]:
        """Arrays by name, the large ones as parts."""
        held = {name: np.asarray(array) for name, array in tensors.items()}
        return {n: self.part(a) if a.nbytes >= LARGE and a.dtype.kind != "O" else a for n, a in held.items()}

    def model(self, path: Path) -> ModelParcel:
        """A model file and its external data.

        Raises:
            BadOption: it cannot be read.
        """
        with reading(path):
            proto = onnx.load(path, load_external_data=False)
            constants: dict[str, Part] = {}
            for tensor in external(proto.graph):
                told = {entry.key: entry.value for entry in tensor.external_data}
                start, length = int(told.get("offset", 0)), int(told.get("length", -1))
                part = self.part(np.fromfile(path.parent / told["location"], np.uint8, length, offset=start))
                constants[f"{part.digest}.bin"] = part
                del tensor.external_data[:]
                for key, value in (told | {"location": f"{part.digest}.bin", "offset": "0"}).items():
                    if key in ("location", "offset", "length"):
                        tensor.external_data.add(key=key, value=value)
        data = np.frombuffer(proto.SerializeToString(), np.uint8)
        return ModelParcel(path.name, self.part(data) if data.nbytes >= LARGE else data, constants)


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
    """Unpacks into a folder of its own. The object store of a host, which its workers share, gets each part once; files
    cannot be shared, since ONNX refuses external data that has several names."""

    folder: Path
    get: Get

    def arrays(self, tensors: Mapping[str, Array | Part]) -> dict[str, Array]:
        """`Sender.arrays` undone."""
        return {name: self.get(a.reference) if isinstance(a, Part) else a for name, a in tensors.items()}

    def model(self, parcel: ModelParcel, number: int) -> Path:
        """The file of a build; it and its constants lie in one folder.

        Raises:
            OutputError: the disk is full.
        """
        path = self.folder / f"{number}-{parcel.name}"
        with writing(path):
            for name, part in parcel.constants.items():
                if not (self.folder / name).exists():
                    fresh = self.folder / f"{name}.part"
                    self.get(part.reference).tofile(fresh)
                    fresh.rename(self.folder / name)
            proto = self.get(parcel.proto.reference) if isinstance(parcel.proto, Part) else parcel.proto
            proto.tofile(path)
        return path
