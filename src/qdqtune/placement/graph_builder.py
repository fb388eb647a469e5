"""Builds a graph: collects its nodes, constants and unique names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import onnx
from onnx import helper

from qdqtune.graph.model import INITIALIZER, NODE, Constant, Made
from qdqtune.graph.protobuf import LARGE_BYTES, field_of
from qdqtune.types import Array


@dataclass(frozen=True)
class Parameters:
    """Names of the initializers that a Q or DQ reads."""

    scale: str
    zero_point: str


@dataclass(frozen=True)
class Fragment:
    """Nodes and constants that were written for one tensor of a graph. A later graph copies them if it needs a tensor
    with an equal `made_of` (all that determines it), and has not yet used any of the `names`."""

    made_of: object
    names: frozenset[str]
    constants: Mapping[str, Constant | bytes]
    nodes: Sequence[onnx.NodeProto | Made]
    output: str


@dataclass
class GraphBuilder:
    nodes: list[onnx.NodeProto | Made] = field(default_factory=list)
    """In the order and types that `graph.model.rebuild` takes."""
    constants: dict[str, Constant | bytes] = field(default_factory=dict)
    made: dict[object, str] = field(default_factory=dict)
    """Names of the tensors that were written, each by a key of all that determines it."""
    names: set[str] = field(default_factory=set)
    given: list[tuple[str, str]] = field(default_factory=list)
    """The arguments and results of all calls of `unique`, in order."""

    def once(self, known: dict[object, Fragment], slot: object, made_of: object, write: Callable[[], str]) -> str:
        """The output name of the nodes that `write` adds, or of an equal fragment of an earlier graph, which is copied:
        `known` has the latest fragment of each `slot`."""
        last = known.get(slot)
        if last is not None and last.made_of == made_of and last.names.isdisjoint(self.names):
            self.names |= last.names
            self.constants.update(last.constants)
            self.nodes += last.nodes
            return last.output
        given, nodes = len(self.given), len(self.nodes)
        output = write()
        names = [name for wanted, name in self.given[given:] if wanted == name]
        if len(names) == len(self.given) - given:
            constants = {name: self.constants[name] for name in names if name in self.constants}
            known[slot] = Fragment(made_of, frozenset(names), constants, tuple(self.nodes[nodes:]), output)
        return output

    def constant(self, wanted: str, values: Array) -> str:
        """Add a constant in memory; returns its name, which `unique` makes of `wanted`."""
        name, array = self.unique(wanted), np.asarray(values)
        if array.nbytes < LARGE_BYTES:
            self.constants[name] = _tensor(name, array)
        else:  # candidates share large constants by key, so the key is made of the content
            self.constants[name] = Constant.of(array)
        return name

    def add_converter(
        self, op: str, tensor: str, source: str, parameters: Parameters, output: str, axis: int | None = None
    ) -> None:
        """Append a Q or a DQ of `tensor` that reads `source` and writes `output`."""
        inputs = (source, parameters.scale, parameters.zero_point)
        node = onnx.NodeProto(input=inputs, output=(output,), name=self.unique(f"{tensor}_{op}"), op_type=op)
        if axis is not None:
            node.attribute.append(helper.make_attribute("axis", axis))
        self.nodes.append(Made(field_of(NODE, node), inputs, (output,)))

    def unique(self, wanted: str) -> str:
        """`wanted`, or `wanted_2` and so on if the name is taken."""
        name, n = wanted, 2
        while name in self.names:
            name, n = f"{wanted}_{n}", n + 1
        self.names.add(name)
        self.given.append((wanted, name))
        return name


def with_names(node: onnx.NodeProto, inputs: Iterable[str], outputs: Iterable[str]) -> onnx.NodeProto:
    copy = deepcopy(node)
    copy.ClearField("input")
    copy.ClearField("output")
    copy.MergeFrom(onnx.NodeProto(input=inputs, output=outputs))
    return copy


def _tensor(name: str, array: Array) -> bytes:
    """A small constant as `numpy_helper.from_array` makes it, a few times as fast."""
    tensor = onnx.TensorProto(name=name, data_type=_type(array.dtype), dims=array.shape, raw_data=array.tobytes())
    return field_of(INITIALIZER, tensor)


_type = cache(helper.np_dtype_to_tensor_dtype)
"""Cached, as the lookup takes longer than all other work for a small constant."""
