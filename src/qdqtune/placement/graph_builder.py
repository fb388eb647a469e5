"""Builds a graph: collects its nodes, constants and unique names."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper

from qdqtune.graph.model import Constant
from qdqtune.types import Array


@dataclass(frozen=True)
class Parameters:
    """Names of the initializers that a Q or DQ reads."""

    scale: str
    zero_point: str


@dataclass
class GraphBuilder:
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    """In topological order."""
    constants: dict[str, Constant] = field(default_factory=dict)
    made: dict[object, str] = field(default_factory=dict)
    """Names of the tensors that were written, each by a key of all that determines it."""
    names: set[str] = field(default_factory=set)

    def constant(self, wanted: str, values: Array) -> str:
        """Add a constant in memory; returns its name, which `unique` makes of `wanted`."""
        name = self.unique(wanted)
        self.constants[name] = Constant.of(np.asarray(values))
        return name

    def add_converter(
        self, op: str, tensor: str, source: str, parameters: Parameters, output: str, axis: int | None = None
    ) -> None:
        """Append a Q or a DQ of `tensor` that reads `source` and writes `output`."""
        inputs = (source, parameters.scale, parameters.zero_point)
        node = onnx.NodeProto(input=inputs, output=(output,), name=self.unique(f"{tensor}_{op}"), op_type=op)
        if axis is not None:
            node.attribute.append(helper.make_attribute("axis", axis))
        self.nodes.append(node)

    def unique(self, wanted: str) -> str:
        """`wanted`, or `wanted_2` and so on if the name is taken."""
        name, n = wanted, 2
        while name in self.names:
            name, n = f"{wanted}_{n}", n + 1
        self.names.add(name)
        return name


def with_names(node: onnx.NodeProto, inputs: Iterable[str], outputs: Iterable[str]) -> onnx.NodeProto:
    copy = deepcopy(node)
    copy.ClearField("input")
    copy.ClearField("output")
    copy.MergeFrom(onnx.NodeProto(input=inputs, output=outputs))
    return copy
