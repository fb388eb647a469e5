"""Where a Q/DQ pair may stand."""

from __future__ import annotations

import numpy as np

from qdqtune.calibration.scales import Ranges
from qdqtune.graph.model import GRAPH, Model, Node
from qdqtune.graph.operators import COMPUTE, PARAMETERS, TAKES_CONSTANT_DATA, is_float, takes_data
from qdqtune.placement.insertion import weight_role
from qdqtune.types import Edge, Placement


def possible_edges(model: Model, ranges: Ranges) -> frozenset[Edge]:
    """Every edge that may carry a pair: activations of known range, weights, and float constants of elementwise ops."""
    edges = set()
    for tensor in ranges.activations:
        if not is_float(model, tensor) or tensor in model.constants:
            continue
        is_captured = any(use.slot < 0 for use in model.uses(tensor))  # by its name, which the pair would take
        for user, slot in model.uses(tensor):
            if user == GRAPH and tensor in model.producers and not is_captured:
                edges.add(Edge(tensor, "", slot))
            elif user != GRAPH and slot >= 0 and takes_data(model.nodes[user], slot):
                edges.add(Edge(tensor, model.nodes[user].name, slot))
    for node in model.nodes:
        for slot, tensor in enumerate(node.inputs):
            edge = Edge(tensor, node.name, slot)
            if tensor in model.constants and _float_constant(model, edge, node):
                edges.add(edge)
    return frozenset(edges)


def _float_constant(model: Model, edge: Edge, node: Node) -> bool:
    constant = model.constants[edge.tensor]
    if not is_float(model, edge.tensor) or not constant.nbytes or node.domain:
        return False
    is_weight, _ = weight_role(model, edge)
    usual = node.op in ("Add", "Mul", "Sub", "Div", "Concat") or (node.op == "Gather" and edge.index == 0)
    return (is_weight or usual) and bool(np.isfinite(constant.array()).all())


def compute_edges(model: Model, node: Node, possible: frozenset[Edge]) -> frozenset[Edge]:
    """Activation and weight of a compute node together, or nothing: one alone runs in float and costs a conversion."""
    both = frozenset(Edge(t, node.name, i) for i, t in enumerate(node.inputs[:2]))
    return both if both <= possible else frozenset()


def consistent(model: Model, placement: Placement) -> Placement:
    """The placement without pairs on only one input of a compute operator: such a pair costs and brings nothing."""
    lonely = set()
    for node in model.nodes:
        if node.op in COMPUTE and not node.domain:
            both = [Edge(t, node.name, i) for i, t in enumerate(node.inputs[:2])]
            if len(present := [e for e in both if e in placement]) == 1:
                lonely.update(present)
    return Placement(placement.edges - lonely) if lonely else placement


def can_carry(model: Model, tensor: str, node: int, slot: int) -> bool:
    """Whether a Q/DQ pair can stand where input `slot` of node number `node` (or the graph, GRAPH) uses `tensor`.

    A tensor of unknown type cannot: nobody knows the type that its scale must have. Nor can a tensor that a body
    captures (slot -1), a parameter of an operator, or a constant that is neither a weight nor an elementwise operand.
    """
    info = model.tensors.get(tensor)
    if info is None or not info.is_float or slot < 0:
        return False
    if node == GRAPH:
        return tensor not in model.constants
    user = model.nodes[node]
    if tensor in model.constants and (user.domain or user.op not in TAKES_CONSTANT_DATA):
        return False
    return bool(user.domain) or slot not in PARAMETERS.get(user.op, ())
