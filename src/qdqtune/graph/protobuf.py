"""Fields of protobuf messages as bytes, and model files that are read without their large weights.

https://protobuf.dev/programming-guides/encoding: a message is its fields in any order, each a tag, its length and its
bytes. A field that is written later is merged with an earlier one of the same number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from qdqtune.errors import check_file

LARGE_BYTES = 1024
"""Constants of this many bytes or more stay outside the protobuf; smaller ones may be shapes that inference reads."""

APART_BYTES = 2**28
"""Bytes from which a model file is read without its weights. Chosen, not measured."""

SIZES = {1: 8, 5: 4}
"""Bytes of a field by its wire type, where these are fixed."""


class _Field(NamedTuple):
    """A field of a message in a file: its number, the offset of its tag, and the offsets of its content."""

    number: int
    start: int
    content: int
    end: int


def parsed(path: Path) -> onnx.ModelProto:
    """The model in a file, without its external data. The weights in a large file are not read either: they become
    external data that lie in the model file itself.

    Raises:
        DecodeError: the file is no model, or cut short.
        OSError: the file cannot be read.
    """
    proto = onnx.ModelProto()
    check_file(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        proto.ParseFromString(file.read() if size < APART_BYTES else b"".join(_without_weights(file, size, path.name)))
    return proto


def _without_weights(file: IO[bytes], size: int, name: str) -> Iterator[bytes]:
    for field in _fields(file, 0, size):
        if field.number == onnx.ModelProto.GRAPH_FIELD_NUMBER:
            graph = b"".join(_parts(file, field, name))
            yield head(field.number, len(graph)) + graph
        else:
            yield _bytes(file, field.start, field.end)


def _parts(file: IO[bytes], graph: _Field, name: str) -> Iterator[bytes]:
    for field in _fields(file, graph.content, graph.end):
        if field.number != onnx.GraphProto.INITIALIZER_FIELD_NUMBER or field.end - field.content < LARGE_BYTES:
            yield _bytes(file, field.start, field.end)
            continue
        tensor, reference = bytearray(), TensorProto()
        for part in _fields(file, field.content, field.end):
            if part.number != TensorProto.RAW_DATA_FIELD_NUMBER or part.end - part.content < LARGE_BYTES:
                tensor += _bytes(file, part.start, part.end)
                continue
            refer(reference, name, part.content, part.end - part.content)
        tensor += reference.SerializeToString()  # at the end, so that it overrides a data_location in the file
        yield head(field.number, len(tensor)) + tensor


def _fields(file: IO[bytes], position: int, end: int) -> Iterator[_Field]:
    """The fields of a message between two offsets of a file."""
    while position < end:
        file.seek(position)
        tag = _number(file)
        kind, length = tag & 7, 0
        if kind == 0:
            _number(file)
        elif kind == MESSAGE:
            length = _number(file)
        elif kind in SIZES:
            length = SIZES[kind]
        else:
            raise DecodeError("no field of a message")
        content = file.tell()
        if content + length > end:
            raise DecodeError("cut short")
        yield _Field(tag >> 3, position, content, content + length)
        position = content + length


def _number(file: IO[bytes]) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        value |= (byte[0] & 0x7F) << shift if byte else 0
        if byte and byte[0] < 0x80:
            return value
    raise DecodeError("no number of a message")


def _bytes(file: IO[bytes], start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def refer(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Make a tensor refer to `length` bytes of external data at `offset` in the file `location`."""
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


MESSAGE = 2
"""The wire type of a field with a length."""


def head(number: int, length: int) -> bytes:
    """The tag and the length in front of a field of `length` bytes."""
    written = bytearray()
    for value in (number << 3 | MESSAGE, length):
        while value > 0x7F:
            written.append(value & 0x7F | 0x80)
            value >>= 7
        written.append(value)
    return bytes(written)
