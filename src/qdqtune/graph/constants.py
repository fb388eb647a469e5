"""Constants of a model file: external data and Constant nodes become initializers or `Constant` values.

`take_external` and `settle` change the protobuf in place and return the large constants, which are read on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from qdqtune.errors import BadModel, reading
from qdqtune.graph.model import DEFAULT, LARGE_BYTES, PACKED, Constant, bodies, content_key, size_of
from qdqtune.system.checks import Stamps
from qdqtune.types import Array

M = TypeVar("M")

SIZED = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED, TensorProto.STRING}
"""Element types with a fixed size."""

DENSE = "write sparse constants out (export the model again without them)"
"""What users can do about sparse constants, which are not read."""


def take_external(proto: onnx.ModelProto, folder: Path) -> dict[str, Constant]:
    """Take the large initializers with external data in `folder` out of `proto`, and embed all other external data."""
    large: dict[str, Constant] = {}
    overridable = {v.name for v in proto.graph.input}
    tensors = [(t, t.name not in overridable) for t in proto.graph.initializer]
    tensors += [(t, False) for t in inner_tensors(proto)]
    for tensor, may_stay in tensors:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        place = place_of(tensor, folder)
        if may_stay and _is_large(tensor):
            dtype, shape = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
            seen = Stamps.of([place[0]])
            read = partial(_values, place, seen, dtype, shape)
            large[tensor.name] = Constant(_key(place, seen, dtype, shape), tensor.data_type, shape, read)
        else:
            tensor.raw_data = _bytes(*place)
            tensor.ClearField("data_location")
            del tensor.external_data[:]
    if large:  # else spare the copies
        replace(proto.graph.initializer, [t for t in proto.graph.initializer if t.name not in large])
    return large


def settle(graph: onnx.GraphProto, large: MutableMapping[str, Constant]) -> None:
    """Turn Constant nodes of the main graph into initializers, and move large initializers to `large`. An initializer
    that is also a graph input stays as it is: callers may override it."""
    pairs = [(node, _lifted(node)) for node in graph.node]
    replace(graph.node, [node for node, tensor in pairs if tensor is None])
    lifted = [tensor for _, tensor in pairs if tensor is not None]
    overridable = {v.name for v in graph.input}
    small = []
    for tensor in (*graph.initializer, *lifted):
        try:
            array = numpy_helper.to_array(tensor)
        except (KeyError, TypeError, ValueError) as error:
            raise BadModel(f"the values of constant {tensor.name!r} do not fit its type and shape") from error
        if _is_large(tensor) and tensor.name not in overridable:
            large[tensor.name] = Constant.of(array)
        else:
            small.append(tensor)
    replace(graph.initializer, small)


def replace(field: MutableSequence[M], messages: Iterable[M]) -> None:
    """Set all elements of a repeated field; `messages` may be elements of the field itself."""
    messages = list(messages)
    del field[:]
    field.extend(messages)


def _is_large(tensor: TensorProto) -> bool:
    # Strings have no bytes of a fixed size; several numbers of less than 8 bits share one.
    if tensor.data_type == TensorProto.STRING or tensor.data_type in PACKED:
        return False
    return size_of(tensor.data_type, tensor.dims) >= LARGE_BYTES


def _lifted(node: onnx.NodeProto) -> TensorProto | None:
    """The value of a Constant node as an initializer; None for other nodes."""
    if node.op_type != "Constant" or node.domain not in DEFAULT:
        return None
    if len(node.attribute) != 1 or len(node.output) != 1:
        raise BadModel(f"Constant node {node.name!r} must have one value and one output")
    attribute, name = node.attribute[0], node.output[0]
    if attribute.name == "value":
        tensor = TensorProto()
        tensor.CopyFrom(attribute.t)
        tensor.name = name
        return tensor
    if attribute.name == "sparse_value":
        raise BadModel(f"constant {name!r} is sparse: {DENSE}")
    types: dict[str, Any] = {"int": np.int64, "float": np.float32, "string": np.object_}
    dtype = types.get(attribute.name.removeprefix("value_").removesuffix("s"))
    if dtype is None:
        return None
    lifted: TensorProto = numpy_helper.from_array(np.array(onnx.helper.get_attribute_value(attribute), dtype), name)
    return lifted


def inner_tensors(proto: onnx.ModelProto) -> Iterator[TensorProto]:
    """Tensors in attributes, bodies and functions: all but the initializers of the main graph."""
    pending = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while pending:
        node = pending.pop()
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
        for body in bodies(node):
            yield from body.initializer
            pending.extend(body.node)


def place_of(tensor: TensorProto, folder: Path) -> tuple[Path, int, int]:
    """The file of a constant's external data, with their offset and length in bytes."""
    what = f"external data of constant {tensor.name!r}"
    if tensor.data_type not in SIZED:
        raise BadModel(f"{what}: unknown element type ({tensor.data_type})")
    size = size_of(tensor.data_type, tensor.dims)
    info = {entry.key: str(entry.value) for entry in tensor.external_data}
    location = Path(info.get("location", ""))
    if not location.parts or location.is_absolute() or ".." in location.parts:
        again = "save the model again with its weights beside it (onnx.save, save_as_external_data=True)"
        raise BadModel(f"{what}: {str(location)!r} is not a file in the model's folder: {again}")
    try:
        offset, length = int(info.get("offset", 0)), int(info.get("length", size))
    except ValueError as error:
        raise BadModel(f"{what}: offset and length must be numbers") from error
    if length != size or offset < 0:
        raise BadModel(f"{what}: {length} bytes at {offset} do not fit its type and shape ({size} bytes)")
    file = folder / location
    if not file.is_file():
        raise BadModel(f"{what}: {location} is missing beside the model; copy it there")
    if not file.resolve().is_relative_to(folder.resolve()):
        raise BadModel(f"{what}: {location} is a link that leaves the model's folder; move the file there")
    if file.stat().st_size < offset + length:
        raise BadModel(f"{what}: {location} is too short, or of another model: copy it again")
    return file, offset, length


@lru_cache(maxsize=2**16)
def _key(place: tuple[Path, int, int], seen: Stamps, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """The key of a constant in a file with these stamps: a run loads its model several times."""
    return content_key(dtype, shape, _bytes(*place))


def _values(place: tuple[Path, int, int], seen: Stamps, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Read a constant's values from `place` (file, offset, length). The file is not memory-mapped, since the process
    would crash if the file became shorter."""
    values = _bytes(*place)
    seen.check()
    return np.frombuffer(values, dtype).reshape(shape)


def _bytes(file: Path, offset: int, length: int) -> bytes:
    with reading(file, BadModel), file.open("rb") as source:
        source.seek(offset)
        return source.read(length)
