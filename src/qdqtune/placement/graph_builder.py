"""A graph while it is written: nodes, constants, and names that nothing else has."""

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
    """Names of the initializers that Q and DQ read: scale and zero point."""

    scale: str
    zero_point: str


@dataclass(frozen=True)
class Fragment:
    """What was written for one tensor, for drafts that have all its `names` free: each of them would get the same where
    it is made of the same."""

    made_of: object
    names: frozenset[str]
    constants: Mapping[str, Constant | bytes]
    nodes: Sequence[onnx.NodeProto | Made]
    output: str


@dataclass
class Draft:
    """The new graph while it is written."""

    nodes: list[onnx.NodeProto | Made] = field(default_factory=list)
    """As `rebuild` takes them."""
    constants: dict[str, Constant | bytes] = field(default_factory=dict)
    made: dict[object, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    given: list[tuple[str, str]] = field(default_factory=list)
    """Names as they were wanted, and as they are."""

    def once(self, known: dict[object, Fragment], slot: object, made_of: object, write: Callable[[], str]) -> str:
        """The name of what `write` writes, or of the same from an earlier draft: `known` holds the latest by `slot`."""
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
        """A constant in memory under a free name near `wanted`."""
        name, array = self.unique(wanted), np.asarray(values)
        if array.nbytes < LARGE_BYTES:
            self.constants[name] = _tensor(name, array)
        else:  # shared between candidates by key, and candidates differ under one name: the content decides
            self.constants[name] = Constant.of(array)
        return name

    def unique(self, wanted: str) -> str:
        """`wanted`, or `wanted_2` and so on if a tensor or node has that name already."""
        name, n = wanted, 2
        while name in self.names:
            name, n = f"{wanted}_{n}", n + 1
        self.names.add(name)
        self.given.append((wanted, name))
        return name


def converter(
    op: str, draft: Draft, tensor: str, source: str, parameters: Parameters, output: str, axis: int | None = None
) -> None:
    """Append a Q or a DQ of `tensor` that reads `source` and writes `output`."""
    inputs = (source, parameters.scale, parameters.zero_point)
    node = onnx.NodeProto(input=inputs, output=(output,), name=draft.unique(f"{tensor}_{op}"), op_type=op)
    if axis is not None:
        node.attribute.append(helper.make_attribute("axis", axis))
    draft.nodes.append(Made(field_of(NODE, node), inputs, (output,)))


def with_names(node: onnx.NodeProto, inputs: Iterable[str], outputs: Iterable[str]) -> onnx.NodeProto:
    """A copy that reads and makes other tensors."""
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
"""The lookup takes longer than all the rest of a small constant."""
