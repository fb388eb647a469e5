"""How a model becomes a file: constants embedded, or by reference into a file that many models share."""

from __future__ import annotations

from pathlib import Path

import onnx

from qdqtune.errors import writing
from qdqtune.graph.model import Constant, Model
from qdqtune.graph.outputs import appearing

PROTOBUF_LIMIT = 2**31 - 2**20
"""Bytes beyond which a file needs external data."""


def save(model: Model, path: Path) -> None:
    """Write `model` as one self-contained file; beyond 2 GB its constants go to `<name>.data` beside it.

    Raises:
        OutputError: the file cannot be written.
    """
    with appearing(path) as fresh:
        if model.large_bytes + model.proto.ByteSize() < PROTOBUF_LIMIT:
            fresh.write_bytes(model.to_proto().SerializeToString())
        else:
            with ConstantFile(data_of(fresh)) as constants:
                constants.save(model, fresh)


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
        with writing(path):
            path.unlink(missing_ok=True)  # an engine may still have an earlier one mapped: do not cut it short there
            self._file = path.open("wb")

    def __enter__(self) -> ConstantFile:
        return self

    def __exit__(self, *_: object) -> None:
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
        """Write `model` to `path` (same folder as this file) with its large constants by reference.

        Raises:
            OutputError: a file cannot be written.
        """
        candidate = onnx.ModelProto()
        candidate.CopyFrom(model.proto)
        with writing(path):
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
