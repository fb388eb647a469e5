"""Checks for invalid models that ONNX's checker accepts. They come before any other work on the model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Literal

import onnx
from onnx import TensorProto

from qdqtune.errors import BadModel
from qdqtune.graph.model import bodies, graphs

TYPES = frozenset(TensorProto.DataType.values())

MOST_NODES = 10**6
"""Nodes that inlining the functions of a model may give: each level of calls can double their number. Chosen, not
measured."""


def check_sound(proto: onnx.ModelProto) -> None:
    """Refuse unknown element types, references to attributes of a function outside of one, and functions that inlining
    would turn into too many nodes.

    Raises:
        BadModel: the model has one of these.
    """
    for graph in graphs(proto.graph):
        for value in chain(graph.input, graph.output, graph.value_info):
            element = value.type.tensor_type.elem_type  # 0 for what is no tensor
            if element not in TYPES:
                raise BadModel(f"tensor {value.name!r} has an unknown element type ({element})")
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.ref_attr_name:
                    what = f"attribute {attribute.name!r} of node {node.name or node.op_type!r}"
                    raise BadModel(f"{what} refers to one of a function, {attribute.ref_attr_name!r}, but is in none")
    if proto.functions:
        _check_functions(proto)


def check_outputs(proto: onnx.ModelProto) -> None:
    """Refuse outputs that are no tensors: sequences, maps and optional values cannot be compared. The output of a
    ZipMap, in which classifiers of scikit-learn give probabilities, can.

    Raises:
        BadModel: an output cannot be compared.
    """
    zipped = {name for node in proto.graph.node if node.op_type == "ZipMap" for name in node.output}
    for value in proto.graph.output:
        if value.name in zipped:
            continue
        if value.type.WhichOneof("value") not in (None, "tensor_type"):
            problem = f"is no tensor but of type {kind_of(value)}"
            raise BadModel(f"output {value.name!r} {problem}; such outputs are not supported")


def kind_of(value: onnx.ValueInfoProto) -> str:
    """The element type of a tensor, or the kind of another value, for messages; empty if unknown."""
    kind = value.type.WhichOneof("value") or ""
    if kind != "tensor_type":
        return kind.removesuffix("_type").replace("_", " ")
    element = value.type.tensor_type.elem_type
    return TensorProto.DataType.Name(element).lower() if element else ""


def differs(listed: onnx.ValueInfoProto, made: onnx.ValueInfoProto) -> Literal["type", "shape"] | None:
    """Whether a tensor's type or shape in the file contradicts the one that its node makes; None if neither does."""
    if kind_of(listed) not in ("", kind_of(made)):
        return "type"
    one, other = listed.type.tensor_type, made.type.tensor_type
    if not (one.HasField("shape") and other.HasField("shape")):
        return None
    known = [
        (a.dim_value, b.dim_value)
        for a, b in zip(one.shape.dim, other.shape.dim, strict=False)
        if a.HasField("dim_value") and b.HasField("dim_value")
    ]
    is_other = len(one.shape.dim) != len(other.shape.dim) or any(a != b for a, b in known)
    return "shape" if is_other else None


def _check_functions(proto: onnx.ModelProto) -> None:
    """Count the nodes after inlining, function by function. Recursion is refused by the checker."""
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
    sizes: dict[tuple[str, str, str], int] = {}

    def size(nodes: Iterable[onnx.NodeProto], open_calls: frozenset[tuple[str, str, str]]) -> int:
        total = 0
        for node in nodes:
            key = node.domain, node.op_type, node.overload
            if key in functions and key not in open_calls:
                if key not in sizes:
                    sizes[key] = size(functions[key].node, open_calls | {key})
                total += sizes[key]
            total += 1 + sum(size(body.node, open_calls) for body in bodies(node))
        return total

    if (total := size(proto.graph.node, frozenset())) > MOST_NODES:
        raise BadModel(f"inlining its functions gives {total:,} nodes, more than can be handled ({MOST_NODES:,})")
