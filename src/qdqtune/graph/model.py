"""A model as an immutable value: its nodes and tensors by name, and its constants.

Large constants are kept outside the protobuf. They are read on demand and never copied for a candidate. A file gets
them when it is written: embedded (`save`), or by reference into a shared file (`ConstantFile`).
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from qdqtune.types import Array, Edge

LARGE_BYTES = 1024
"""Constants of this many bytes or more stay outside the protobuf; smaller ones may be shapes that inference reads."""

GRAPH = -1
"""The node index in the `Use` of a tensor as a graph output."""

DEFAULT = ("", "ai.onnx")
"""Names of the domain of ONNX's own operators."""

BITS = {"INT2": 2, "UINT2": 2, "INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4}
PACKED = {code: BITS[name] for name, code in onnx.TensorProto.DataType.items() if name in BITS}
"""Bits of the types that store several values in a byte. In memory each value takes a byte."""

FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the main graph. `captures` are the outer tensors that its bodies (If, Loop, Scan) read."""

    index: int
    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    captures: tuple[str, ...] = ()

    @property
    def reads(self) -> list[str]:
        """The tensors that the node reads, those read inside its bodies included."""
        return [tensor for tensor in (*self.inputs, *self.captures) if tensor]

    @property
    def into(self) -> tuple[Edge, ...]:
        """One edge for each input, by slot; an optional input that is left out has the tensor ""."""
        return tuple(Edge(tensor, self.name, slot) for slot, tensor in enumerate(self.inputs))


class Use(NamedTuple):
    """Where a tensor is used: as input number `slot` of node number `node`. The slot is -1 if a body of the node reads
    it. For a graph output, `node` is GRAPH and `slot` the number of the output."""

    node: int
    slot: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Element type (onnx.TensorProto.*) and shape; an unknown dimension is None, an unknown rank is shape None."""

    dtype: int
    shape: tuple[int | None, ...] | None

    @staticmethod
    def of(value: onnx.ValueInfoProto) -> TensorInfo:
        tensor = value.type.tensor_type
        shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
        return TensorInfo(tensor.elem_type, shape if tensor.HasField("shape") else None)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The shape if every dimension is known; else None."""
        sizes = tuple(size for size in self.shape or () if size is not None)
        return None if self.shape is None or len(sizes) < len(self.shape) else sizes

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


_element_type, _name = cache(onnx.helper.np_dtype_to_tensor_dtype), cache(str)
"""Of a numpy type. Cached, as the lookups take longer than all other work for a small constant."""


def content_key(dtype: np.dtype[Any], shape: tuple[int, ...], data: bytes | memoryview) -> str:
    """32 hex digits that name a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{_name(dtype)}{shape}".encode())
    digest.update(data)
    return digest.hexdigest()[:32]


def size_of(dtype: int, shape: Iterable[int]) -> int:
    """Bytes of a tensor's values as files hold them."""
    bits = PACKED.get(dtype) or 8 * onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize
    return -(-math.prod(shape) * bits // 8)


@dataclass(frozen=True, eq=False)
class Constant:
    """A constant tensor that is read on demand. `key` names its content: equal keys mean equal bytes. `array` returns
    the values, which are not to be changed."""

    key: str
    dtype: int
    shape: tuple[int, ...]
    array: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        return size_of(self.dtype, self.shape)

    def data(self) -> bytes | memoryview:
        """The bytes of the values as ONNX files store them; types of less than 8 bits are packed."""
        array = self.array()
        return numpy_helper.from_array(array).raw_data if self.dtype in PACKED else _bytes(array)

    @staticmethod
    def of(array: Array) -> Constant:
        """A constant with values in memory."""
        array = np.asarray(array, order="C")
        data = repr(array.tolist()).encode() if array.dtype.hasobject else _bytes(array)  # objects are strings
        key = content_key(array.dtype, array.shape, data)
        return Constant(key, _element_type(array.dtype), array.shape, lambda: array)

    def to_proto(self, name: str) -> onnx.TensorProto:
        tensor: onnx.TensorProto = numpy_helper.from_array(self.array(), name)
        return tensor


@dataclass(frozen=True, eq=False)
class Model:
    """An ONNX model with unique node names. All its constants are initializers: small ones in `proto`, large ones in
    `large`, by name; `constants` has both. Treat it as read only: every change makes a new model."""

    proto: onnx.ModelProto
    large: Mapping[str, Constant] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        return opset_of(self.proto)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes of the main graph, in graph order (topological)."""
        return tuple(_node(i, n) for i, n in enumerate(self.proto.graph.node))

    @cached_property
    def index_of(self) -> Mapping[str, int]:
        return {n.name: n.index for n in self.nodes}

    @cached_property
    def producers(self) -> Mapping[str, int]:
        """Index of the node that makes a tensor, by tensor; without graph inputs and constants."""
        return {name: n.index for n in self.nodes for name in n.outputs if name}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Use, ...]]:
        """The uses of each tensor, in graph order, graph outputs last."""
        uses = defaultdict[str, list[Use]](list)
        for node in self.nodes:
            for i, name in enumerate(node.inputs):
                uses[name].append(Use(node.index, i))
            for name in node.captures:
                uses[name].append(Use(node.index, -1))
        for i, name in enumerate(self.outputs):
            uses[name].append(Use(GRAPH, i))
        return {name: tuple(u) for name, u in uses.items() if name}

    def uses(self, tensor: str) -> tuple[Use, ...]:
        return self.consumers.get(tensor, ())

    def edge(self, tensor: str, use: Use) -> Edge:
        return Edge(tensor, "" if use.node == GRAPH else self.nodes[use.node].name, use.slot)

    def edges(self, tensor: str) -> list[Edge]:
        return [self.edge(tensor, use) for use in self.uses(tensor)]

    def node(self, name: str) -> Node:
        return self.nodes[self.index_of[name]]

    def user(self, edge: Edge) -> Node | None:
        """The node that an edge leads to; None for a graph output."""
        return self.node(edge.node) if edge.node else None

    def maker(self, tensor: str) -> Node | None:
        index = self.producers.get(tensor)
        return None if index is None else self.nodes[index]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph inputs without a default, which a caller must feed."""
        return tuple(i.name for i in self.proto.graph.input if i.name not in self.overridable)

    @cached_property
    def overridable(self) -> frozenset[str]:
        """Names of the graph inputs that have an initializer as their default."""
        listed = {i.name for i in self.proto.graph.input}
        return frozenset(t.name for t in self.proto.graph.initializer if t.name in listed)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(o.name for o in self.proto.graph.output)

    @cached_property
    def constants(self) -> Mapping[str, Constant]:
        """All constants by tensor name; without initializers that are also graph inputs, which callers may override."""
        small = (t for t in self.proto.graph.initializer if t.name not in self.overridable)
        return {t.name: _inline(t) for t in small} | dict(self.large)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type and shape of every tensor for which they are known."""
        graph = self.proto.graph
        infos = {
            v.name: TensorInfo.of(v)
            for part in (graph.input, graph.value_info, graph.output)
            for v in part
            if v.type.HasField("tensor_type")
        }
        return infos | {name: TensorInfo(c.dtype, c.shape) for name, c in self.constants.items()}

    @cached_property
    def frame(self) -> onnx.ModelProto:
        """A copy of the protobuf without its nodes, constants, and types of inner tensors."""
        bare = deepcopy(self.proto)
        del bare.graph.node[:], bare.graph.initializer[:], bare.graph.value_info[:]
        return bare

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of the graph and of every constant's content."""
        digest = hashlib.sha256(self.proto.SerializeToString(deterministic=True))
        for name in sorted(self.large):
            digest.update(f"{name}={self.large[name].key};".encode())
        return digest.hexdigest()[:32]

    def to_proto(self) -> onnx.ModelProto:
        whole = deepcopy(self.proto)
        for name, constant in self.large.items():
            whole.graph.initializer.append(constant.to_proto(name))
        return whole


def opset_of(proto: onnx.ModelProto) -> int:
    return next((o.version for o in proto.opset_import if o.domain in DEFAULT), 1)


def rebuild(model: Model, nodes: Sequence[onnx.NodeProto], added: Mapping[str, Constant]) -> Model:
    """`model` with these nodes in topological order, and the `added` constants, which replace those of the same name;
    constants and types that no node uses are dropped."""
    result = deepcopy(model.frame)
    read = {o.name for o in result.graph.output} | model.overridable
    written = set[str]()
    for node in nodes:
        read.update(node.input)
        written.update(node.output)
        for body in bodies(node):
            read |= captured(body)
    result.graph.node.extend(nodes)
    before = model.proto.graph
    result.graph.initializer.extend(t for t in before.initializer if t.name in read and t.name not in added)
    large = {name: c for name, c in model.large.items() if name in read and name not in added}
    for name, constant in added.items():
        if name in read and constant.nbytes >= LARGE_BYTES:
            large[name] = constant
        elif name in read:
            result.graph.initializer.append(constant.to_proto(name))
    described = {v.name: v for v in before.value_info if v.name in written}  # converters may list a tensor twice
    result.graph.value_info.extend(described.values())
    return Model(result, large)


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The subgraphs in a node's attributes (If, Loop, Scan)."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from graphs(body)


def defined(graph: onnx.GraphProto) -> set[str]:
    made = {name for node in graph.node for name in node.output if name}
    return {v.name for v in graph.input} | {t.name for t in graph.initializer} | made


def captured(graph: onnx.GraphProto) -> set[str]:
    """Names of outer tensors that a subgraph reads."""
    read = {o.name for o in graph.output}
    for node in graph.node:
        read.update(name for name in node.input if name)
        for body in bodies(node):
            read |= captured(body)
    return read - defined(graph)


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _node(index: int, node: onnx.NodeProto) -> Node:
    outer = sorted(set().union(*(captured(body) for body in bodies(node))))
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return Node(
        index,
        node.name,
        node.op_type,
        "" if node.domain == "ai.onnx" else node.domain,
        tuple(node.input),
        tuple(node.output),
        attributes,
        tuple(outer),
    )


def _inline(tensor: onnx.TensorProto) -> Constant:
    key = hashlib.sha256(tensor.SerializeToString(deterministic=True)).hexdigest()[:32]
    return Constant(key, tensor.data_type, tuple(tensor.dims), lambda: numpy_helper.to_array(tensor))
