"""Builds a graph: collects its nodes, constants and unique names."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper

from qdqtune.graph.model import Constant
from qdqtune.graph.simplifying import UniqueNames
from qdqtune.types import Array


@dataclass
class GraphBuilder:
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    """In topological order."""
    constants: dict[str, Constant] = field(default_factory=dict)
    made: dict[object, str] = field(default_factory=dict)
    """Names of the tensors that were written, each by a key of all that determines it."""
    names: UniqueNames = field(default_factory=UniqueNames)

    def constant(self, wanted: str, values: Array) -> str:
        """Add a constant in memory; returns its name, `wanted` unless that is taken."""
        name = self.names.fresh(wanted)
        self.constants[name] = Constant.of(np.asarray(values))
        return name

    def add_converter(
        self, op: str, tensor: str, source: str, parameters: tuple[str, str], output: str, axis: int | None = None
    ) -> None:
        """Append a Q or a DQ of `tensor` that reads `source` and, as `parameters`, scale and zero point."""
        node = onnx.NodeProto(
            input=(source, *parameters), output=(output,), name=self.names.fresh(f"{tensor}_{op}"), op_type=op
        )
        if axis is not None:
            node.attribute.append(helper.make_attribute("axis", axis))
        self.nodes.append(node)
