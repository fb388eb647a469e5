"""How a model becomes a file: constants embedded, or by reference into a file that many models share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from math import prod
from pathlib import Path
from threading import Lock

import onnx
from onnx import TensorProto

from qdqtune.errors import writing
from qdqtune.graph.model import Constant, Model
from qdqtune.graph.outputs import appearing, temporary_folder

CONSTANTS = "constants.bin"
"""The usual name of a file that holds the constants of many models."""

SELF_CONTAINED = 2**28
"""Bytes that no model file has without the constants inside."""

PROTOBUF_LIMIT = 2**31 - 2**20
"""Bytes beyond which a file needs external data."""


def save(model: Model, path: Path) -> None:
    """Write `model` as one self-contained file; beyond 2 GB its constants go to `<name>.data` beside it.

    Raises:
        OutputError: the file cannot be written.
    """
    with appearing(path) as fresh:
        if sum(c.nbytes for c in model.large.values()) + model.proto.ByteSize() < PROTOBUF_LIMIT:
            with fresh.open("wb") as file:
                file.writelines(_messages(model))
        else:
            with ConstantFile(data_of(fresh)) as constants:
                constants.save(model, fresh)


def _messages(model: Model) -> Iterator[bytes | memoryview]:
    """A model with all its constants as protobuf writes it, piece by piece: one constant at a time is in memory.

    https://protobuf.dev/programming-guides/encoding: a message is its fields in any order, each a tag, its length and
    its bytes. So the constants follow on the rest of the graph, and the values of each on what describes it. The
    model's own fields keep their order: OpenVINO looks at them to know an ONNX file.
    """
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
        described += _field(TensorProto.RAW_DATA_FIELD_NUMBER, constant.nbytes)
        heads.append(_field(onnx.GraphProto.INITIALIZER_FIELD_NUMBER, len(described) + constant.nbytes) + described)
    size = len(graph) + sum(map(len, heads)) + sum(c.nbytes for c in model.large.values())
    yield ahead.SerializeToString() + _field(field, size) + graph
    for head, constant in zip(heads, model.large.values(), strict=True):
        yield head
        yield constant.data()
    yield behind.SerializeToString()


def _field(number: int, length: int) -> bytes:
    """The tag and the length that precede a field of `length` bytes."""
    written = bytearray()
    for value in (number << 3 | 2, length):
        while value > 0x7F:
            written.append(value & 0x7F | 0x80)
            value >>= 7
        written.append(value)
    return bytes(written)


def nbytes(model: Path) -> int:
    """Size of a model file with its external data. A file that is large itself is taken to hold its constants: to look
    into it takes twice its size in memory."""
    if model.stat().st_size >= SELF_CONTAINED:
        return model.stat().st_size
    tensors = onnx.load(model, load_external_data=False).graph.initializer
    outside = (t for t in tensors if t.data_location == TensorProto.EXTERNAL)
    sizes = (prod(t.dims) * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize for t in outside)
    return model.stat().st_size + sum(sizes)


def data_of(path: Path) -> Path:
    """The file that holds the constants of a model that is too large for one."""
    return path.parent / f"{path.name}.data"


class ConstantFile:
    """One file of constants that many small model files in the same folder refer to.

    Each distinct content is written once, when the first model needs it. ONNX Runtime refuses references that leave
    the model's folder.
    """

    ALIGN = 4096  # engines map the file: pages must not be shared between tensors

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans: dict[str, tuple[int, int]] = {}
        self._lock = Lock()
        with writing(path):
            path.unlink(missing_ok=True)  # an engine may still have an earlier one mapped: do not cut it short there
            self._file = path.open("wb")

    def __enter__(self) -> ConstantFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # all that counts is flushed; on a full disk closing fails again
            self._file.close()

    def _span(self, constant: Constant) -> tuple[int, int]:
        if constant.key not in self._spans:
            offset = -(-self._file.tell() // self.ALIGN) * self.ALIGN
            self._file.seek(offset)
            data = constant.data()
            self._file.write(data)
            self._spans[constant.key] = (offset, data.nbytes)
        return self._spans[constant.key]

    def save(self, model: Model, path: Path) -> None:
        """Write `model` to `path` (same folder as this file) with its large constants by reference; from any thread.

        Raises:
            OutputError: a file cannot be written.
        """
        candidate = onnx.ModelProto()
        candidate.CopyFrom(model.proto)
        with self._lock, writing(path):
            for name, constant in model.large.items():
                offset, length = self._span(constant)
                tensor = candidate.graph.initializer.add()
                tensor.name, tensor.data_type = name, constant.dtype
                tensor.dims.extend(constant.shape)
                tensor.data_location = onnx.TensorProto.EXTERNAL
                for key, value in (("location", self.path.name), ("offset", offset), ("length", length)):
                    tensor.external_data.add(key=key, value=str(value))
            self._file.flush()
            path.write_bytes(candidate.SerializeToString())

    def write(self, model: Model, name: str) -> Path:
        """`save` as a new file beside this one: `<name>.onnx`, numbered if there is one.

        Raises:
            OutputError: a file cannot be written.
        """
        path, number = self.path.with_name(f"{name}.onnx"), 1
        while path.exists():
            number += 1
            path = self.path.with_name(f"{name}-{number}.onnx")
        self.save(model, path)
        return path


_shared: ContextVar[ConstantFile | None] = ContextVar("constants that are written once", default=None)


@contextmanager
def one_constant_file(folder: Path) -> Iterator[ConstantFile]:
    """A file of constants in `folder` for all models that anybody writes by reference meanwhile.

    Without it every stage of a run writes the weights once more: calibration, judging, foretelling, search.

    Raises:
        OutputError: it cannot be made.
    """
    with ConstantFile(folder / CONSTANTS) as constants:
        token = _shared.set(constants)
        try:
            yield constants
        finally:
            _shared.reset(token)


@contextmanager
def constants_to_share() -> Iterator[ConstantFile]:
    """The file of `one_constant_file`, or one of its own in a folder for temporary files.

    Raises:
        OSError, OutputError: it cannot be made.
    """
    if (shared := _shared.get()) is not None:
        yield shared
        return
    with temporary_folder() as folder, ConstantFile(folder / CONSTANTS) as constants:
        yield constants
