"""A graph while it is written: nodes, constants, and names that nothing else has."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper

from qdqtune.graph.model import LARGE, Constant
from qdqtune.types import Array


@dataclass(frozen=True)
class Parameters:
    """Names of the initializers that Q and DQ read: scale and zero point."""

    scale: str
    zero_point: str


@dataclass
class Draft:
    """The new graph while it is written."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    made: dict[tuple[object, ...], str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def constant(self, wanted: str, values: Array) -> str:
        """A constant in memory under a free name near `wanted`."""
        name, array = self.unique(wanted), np.asarray(values)
        # Large ones are shared between candidates by key, and candidates differ under one name: the content decides.
        self.constants[name] = Constant.of(array, key=name if array.nbytes < LARGE else None)
        return name

    def unique(self, wanted: str) -> str:
        """`wanted`, or `wanted_2` and so on if a tensor or node has that name already."""
        name, n = wanted, 2
        while name in self.names:
            name, n = f"{wanted}_{n}", n + 1
        self.names.add(name)
        return name


def converter(
    op: str, draft: Draft, tensor: str, source: str, parameters: Parameters, output: str, axis: int | None = None
) -> None:
    """Append a Q or a DQ of `tensor` that reads `source` and writes `output`."""
    inputs = [source, parameters.scale, parameters.zero_point]
    node = helper.make_node(op, inputs, [output], draft.unique(f"{tensor}_{op}"))
    if axis is not None:
        node.attribute.append(helper.make_attribute("axis", axis))
    draft.nodes.append(node)
