"""What numbers are judged by: the outputs, and the values that a Softmax or the like makes them of.

Behind a Softmax that is sure of itself all errors look small, and the one sample that is not decides. In front of it
each sample counts, but so do the scores of classes that are out of the question. Both together are a stable criterion.
"""

from __future__ import annotations

from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import COPIES, is_float
from qdqtune.types import Edge

SQUASHES = frozenset({"ArgMax", "ArgMin", "HardSigmoid", "Hardmax", "LogSoftmax", "Sigmoid", "Softmax", "TopK"})
"""Operators that make probabilities and decisions of scores."""


def judged(model: Model) -> tuple[tuple[Edge, ...], ...]:
    """For each output the float values by which it is judged: itself, and what the last operators squash. Outputs of
    which nothing is float have none and are left out."""
    found = []
    for slot, output in enumerate(model.outputs):
        edge = Edge(output, "", slot)
        found.append(tuple(e for e in dict.fromkeys((edge, _scores(model, edge))) if is_float(model, e.tensor)))
    return tuple(edges for edges in found if edges)


def _scores(model: Model, edge: Edge) -> Edge:
    """The input of the first in a row of squashing operators that ends at `edge`; itself if there is none."""
    best = edge
    while (maker := model.producers.get(edge.tensor)) is not None:
        node = model.nodes[maker]
        if node.domain or node.op not in COPIES | SQUASHES | {"Div"}:
            break
        if node.op == "Div":  # a Softmax that was taken apart
            exponential = model.nodes[i] if (i := model.producers.get(node.inputs[0])) is not None else None
            if exponential is None or exponential.op != "Exp":
                break
            node = exponential
        edge = Edge(node.inputs[0], node.name, 0)
        best = edge if _is_squash(node) else best
    return best


def _is_squash(node: Node) -> bool:
    return node.op in SQUASHES | {"Exp"}
