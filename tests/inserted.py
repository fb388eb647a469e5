"""What tests look up in models that `insert` has made."""

from typing import Any

import onnx

from models import (
    Case,
)
from qdqtune.graph.model import Model, Node
from qdqtune.types import Placement


def check(model: Model) -> None:
    onnx.checker.check_model(model.to_proto(), full_check=True)


def of_type(model: Model, op: str) -> list[Node]:
    return [n for n in model.nodes if n.op == op]


def everything(given: Case) -> Placement:
    return Placement(given.possible)


def constant(model: Model, tensor: str) -> Any:
    return model.constants[tensor].array()


def dq_of(model: Model, tensor: str, node: str) -> Node:
    """The DequantizeLinear that feeds an input of a node, which is `tensor` in the float model."""
    target = model.nodes[model.index_of[node]]
    found = [model.nodes[model.producers[t]] for t in target.inputs if t.startswith(f"{tensor}_DequantizeLinear")]
    assert len(found) == 1
    return found[0]


def scale_of(model: Model, tensor: str, node: str) -> tuple[Any, Any]:
    """Scale and zero point of the pair on an edge."""
    dq = dq_of(model, tensor, node)
    return constant(model, dq.inputs[1]), constant(model, dq.inputs[2])
