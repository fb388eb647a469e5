"""How a model becomes a file: constants embedded, or by reference into a file that many models share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from threading import RLock

import onnx
from onnx import ModelProto, StringStringEntryProto, TensorProto

from qdqtune.errors import writing
from qdqtune.graph.loading import files_of
from qdqtune.graph.model import Constant, Model, size_of
from qdqtune.graph.protobuf import head, parsed, refer
from qdqtune.system.checks import Output, is_of_a_run, mark
from qdqtune.system.writing import atomic_write, temporary_folder

CONSTANTS, WEIGHTS = "constants.bin", "weights.bin"
"""The usual names of a file that holds the constants of many models, and of one with those of a single one."""

MOSTLY = 0.99
"""Share of a file of constants that a model needs which ships with all of it: what rewrites replaced may stay there."""

ONE_FILE_LIMIT = 2**31 - 2**20
"""Bytes beyond which a file needs external data."""


def save(model: Model, path: Path, known: ConstantFile | None = None) -> None:
    """Write `model` as one self-contained file; beyond 2 GB its constants go to `<name>.data` beside it.

    Constants that are `known` are copied from there; a file that holds just these gets a second name.

    Raises:
        OutputError: the file cannot be written.
    """
    with atomic_write(path) as fresh:
        if sum(c.nbytes for c in model.large.values()) + model.proto.ByteSize() < ONE_FILE_LIMIT:
            with fresh.open("wb") as file:
                file.writelines(messages(model, Constant.data if known is None else known.data))
        elif known is None or not known.named(data_of(fresh), model, fresh):
            with ConstantFile(data_of(fresh), known) as constants:
                constants.save(model, fresh)


def _write(model: Model, path: Path, place: Callable[[Constant], tuple[str, int, int]]) -> None:
    """Write a model whose large constants lie in other files: each by the name of its file, its offset and length."""
    small = deepcopy(model.proto)
    for name, constant in model.large.items():
        tensor = small.graph.initializer.add(name=name, data_type=constant.dtype, dims=constant.shape)
        refer(tensor, *place(constant))
    path.write_bytes(small.SerializeToString())


def nbytes(model: Path) -> int:
    """Size of a model file with its external data."""
    outside = (t for t in parsed(model).graph.initializer if t.data_location == TensorProto.EXTERNAL)
    others = (t for t in outside if all(e.value != model.name for e in t.external_data if e.key == "location"))
    return model.stat().st_size + sum(size_of(t.data_type, t.dims) for t in others)


def data_of(path: Path) -> Path:
    """The file that holds the constants of a model that is too large for one."""
    return path.parent / f"{path.name}.data"


MODEL_KIND = "model"
"""What a model that a command has written says that it is."""


def model_outputs(path: Path, option: str, kind: str = MODEL_KIND) -> list[Output]:
    """The files that an option writes which names a model: its own, and that of its constants, where it is large."""
    data = data_of(path)

    def is_ours(file: Path) -> bool:
        return _is_signed(path, kind) and not is_of_a_run(path) and (file == path or file in files_of(path))

    return [Output(path, option, is_ours), Output(data, option, is_ours)]


def sign(path: Path, kind: str = MODEL_KIND) -> None:
    """Write the mark of an output to the end of a finished ONNX file, as metadata: what follows on a message is merged
    with it.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing(path), path.open("ab") as file:
        file.write(signature(file.tell(), kind))


def signature(size: int, kind: str = MODEL_KIND) -> bytes:
    """The mark of an output as a part of an ONNX file, behind so many bytes: what another program makes of the file has
    another size, and is no output any more."""
    said = StringStringEntryProto(key=f"qdqtune.{kind}.{size:016}", value=mark(kind))
    return ModelProto(metadata_props=[said]).SerializeToString()


def _is_signed(path: Path, kind: str) -> bool:
    """Whether a file ends with the mark of an output of this kind, and holds what it held when that was written."""
    length = len(signature(0, kind))
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - length
        return size >= 0 and file.seek(size) == size and file.read() == signature(size, kind)
    return False


class ConstantFile:
    """One file of constants that many small model files in the same folder refer to.

    Each distinct content is written once, when the first model needs it; what is in the file `before` it is not written
    again, but read or referred to there. ONNX Runtime refuses references that leave the model's folder.
    """

    ALIGN = 4096  # engines map the file: pages must not be shared between tensors

    def __init__(self, path: Path, known: ConstantFile | None = None) -> None:
        self.path = path
        self._known = known
        self._spans: dict[str, tuple[int, int]] = {}
        self._lock = RLock()  # what is computed to be written may have to run a model, which is written here too
        with writing(path):
            path.unlink(missing_ok=True)  # an engine may still have an earlier one mapped: do not cut it short there
            self._file = path.open("w+b")

    def __enter__(self) -> ConstantFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # all that counts is flushed; on a full disk closing fails again
            self._file.close()

    def data(self, constant: Constant) -> bytes | memoryview:
        """The bytes of a constant, read where they lie, here or in the known file, or else computed."""
        if constant.key in self._spans:
            self._file.flush()
            offset, length = self._spans[constant.key]
            return os.pread(self._file.fileno(), length, offset)
        return constant.data() if self._known is None else self._known.data(constant)

    def _span(self, constant: Constant) -> tuple[str, int, int]:
        """The file in this folder that holds a constant, and where."""
        if (
            (known := self._known) is not None
            and constant.key in known._spans
            and known.path.parent == self.path.parent
        ):
            return known._span(constant)
        if constant.key not in self._spans:
            data = self.data(constant)
            offset = -(-self._file.tell() // self.ALIGN) * self.ALIGN
            self._file.seek(offset)
            self._file.write(data)
            self._spans[constant.key] = (offset, len(data))
        return self.path.name, *self._spans[constant.key]

    def save(self, model: Model, path: Path) -> None:
        """Write `model` to `path` (same folder as this file) with its large constants by reference; from any thread.

        Raises:
            OutputError: a file cannot be written.
        """
        with self._lock, writing(path):
            _write(model, path, self._span)
            self._file.flush()

    def keep(self, model: Model) -> None:
        """Write the large constants of a model that may ship to the known file, those that are not yet there.

        Raises:
            OutputError: a file cannot be written.
        """
        if self._known is not None:
            self._known.save(model, self.path.with_name("weights.onnx"))

    def named(self, data: Path, model: Model, path: Path) -> bool:
        """Write `model` to `path` with its large constants in `data`, as a second name of this file or the known one,
        if that holds these and hardly any others, and may have one."""
        keys = {c.key for c in model.large.values()}
        needed = sum(length for key, (_, length) in self._spans.items() if key in keys)
        if not keys or not self._spans.keys() >= keys or needed < MOSTLY * self._file.tell():
            return self._known is not None and self._known.named(data, model, path)
        self._file.flush()
        try:
            data.hardlink_to(self.path)
        except OSError:  # on another disk, or one that knows no second names
            return False
        _write(model, path, lambda constant: (data.name, *self._spans[constant.key]))
        return True

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
    """A file of constants in `folder` for all models that anybody writes by reference meanwhile; those that are to be
    kept in a file of their own, so that they need not be written again where they ship.

    Without it every stage of a run writes the weights once more: calibration, judging, foretelling, search.

    Raises:
        OutputError: it cannot be made.
    """
    with ConstantFile(folder / WEIGHTS) as weights, ConstantFile(folder / CONSTANTS, weights) as constants:
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


def messages(model: Model, data: Callable[[Constant], bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """A model with all its constants as protobuf writes it, piece by piece: one constant at a time is in memory.

    The model's own fields keep their order: OpenVINO looks at them to know an ONNX file. `data` gives the bytes of a
    constant.
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
        described += head(TensorProto.RAW_DATA_FIELD_NUMBER, constant.nbytes)
        heads.append(head(onnx.GraphProto.INITIALIZER_FIELD_NUMBER, len(described) + constant.nbytes) + described)
    size = len(graph) + sum(map(len, heads)) + sum(c.nbytes for c in model.large.values())
    yield ahead.SerializeToString() + head(field, size) + graph
    for described, constant in zip(heads, model.large.values(), strict=True):
        yield described
        yield data(constant)
    yield behind.SerializeToString()
