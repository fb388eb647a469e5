"""Models as files: constants embedded, or by reference into a file that several models share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from threading import RLock

import onnx
from onnx import TensorProto

from qdqtune.errors import writing
from qdqtune.graph.model import Model
from qdqtune.system.checks import Output, written_as
from qdqtune.system.writing import atomic_write

CONSTANTS = "constants.bin"
"""The name of the file with constants of candidates."""

ONE_FILE_LIMIT = 2**31 - 2**20
"""Bytes from which a model needs external data: the 2 GiB limit of protobuf, less room for fields added later."""


def save(model: Model, path: Path) -> None:
    """Write `model` as one file; beyond 2 GB its constants go to `<name>.data` beside it."""
    with atomic_write(path) as fresh:
        if sum(c.nbytes for c in model.large.values()) + model.proto.ByteSize() < ONE_FILE_LIMIT:
            with fresh.open("wb") as file:
                file.writelines(_pieces(model))
        else:
            with ConstantFile(data_of(fresh)) as constants:
                constants.save(model, fresh)


def data_of(path: Path) -> Path:
    return path.parent / f"{path.name}.data"


def model_outputs(path: Path, option: str, kind: str = "model") -> list[Output]:
    """The files that are written where `option` names a model file: the model, and its external data if it is large."""
    return [Output(file, option, written_as(kind)) for file in (path, data_of(path))]


class ConstantFile:
    """A file of constants, each written when first needed, that small model files in the same folder refer to."""

    ALIGN = 4096  # engines map the file: pages must not be shared between tensors

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans: dict[str, tuple[int, int]] = {}
        self._lock = RLock()  # computing a constant may run a model, which is written here as well
        with writing(path):
            path.unlink(missing_ok=True)  # an engine may still have an earlier one mapped: do not cut it short there
            self._file = path.open("wb")

    def __enter__(self) -> ConstantFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # everything is flushed already; on a full disk closing fails again
            self._file.close()

    def save(self, model: Model, path: Path) -> None:
        """Write `model` to `path`, in the folder of this file, with its large constants by reference. Thread-safe."""
        with self._lock, writing(path):
            small = deepcopy(model.proto)
            for name, constant in model.large.items():
                tensor = small.graph.initializer.add(name=name, data_type=constant.dtype, dims=constant.shape)
                tensor.data_location = TensorProto.EXTERNAL
                if constant.key not in self._spans:
                    data = constant.data()
                    offset = -(-self._file.tell() // self.ALIGN) * self.ALIGN
                    self._file.seek(offset)
                    self._file.write(data)
                    self._spans[constant.key] = (offset, len(data))
                offset, length = self._spans[constant.key]
                for key, value in (("location", self.path.name), ("offset", offset), ("length", length)):
                    tensor.external_data.add(key=key, value=str(value))
            path.write_bytes(small.SerializeToString())
            self._file.flush()

    def write(self, model: Model, name: str) -> Path:
        """Write `model` beside this file as `<name>.onnx`, numbered if that exists."""
        path, number = self.path.with_name(f"{name}.onnx"), 1
        while path.exists():
            number += 1
            path = self.path.with_name(f"{name}-{number}.onnx")
        self.save(model, path)
        return path


def _pieces(model: Model) -> Iterator[bytes | memoryview]:
    """The bytes of a model file with one constant at a time in memory. The model's own fields keep their order, by
    which OpenVINO recognizes an ONNX file."""
    field = onnx.ModelProto.GRAPH_FIELD_NUMBER
    ahead, behind = onnx.ModelProto(), onnx.ModelProto()
    for frame, keeps in ((ahead, field.__gt__), (behind, field.__lt__)):
        frame.CopyFrom(model.proto)
        for descriptor, _ in model.proto.ListFields():
            if not keeps(descriptor.number):
                frame.ClearField(descriptor.name)
    graph = model.proto.graph.SerializeToString()
    heads = []
    for name, constant in model.large.items():
        described = TensorProto(name=name, data_type=constant.dtype, dims=constant.shape).SerializeToString()
        described += _head(TensorProto.RAW_DATA_FIELD_NUMBER, constant.nbytes)
        heads.append(_head(onnx.GraphProto.INITIALIZER_FIELD_NUMBER, len(described) + constant.nbytes) + described)
    size = len(graph) + sum(map(len, heads)) + sum(c.nbytes for c in model.large.values())
    yield ahead.SerializeToString() + _head(field, size) + graph
    for described, constant in zip(heads, model.large.values(), strict=True):
        yield described
        yield constant.data()
    yield behind.SerializeToString()


def _head(number: int, length: int) -> bytes:
    """The tag and the length in front of a field of `length` bytes (https://protobuf.dev/programming-guides/encoding)."""
    written = bytearray()
    for value in (number << 3 | 2, length):
        while value > 0x7F:
            written.append(value & 0x7F | 0x80)
            value >>= 7
        written.append(value)
    return bytes(written)
