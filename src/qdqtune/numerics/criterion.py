"""What numbers are judged by: the outputs, and the values that a Softmax or the like makes them of.

Behind a Softmax that is sure of itself all errors look small, and the one sample that is not decides. In front of it
each sample counts, but so do the scores of classes that are out of the question. Both together are a stable criterion.
"""

from __future__ import annotations

from qdqtune.graph.model import Model
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
    while (node := model.maker(edge.tensor)) is not None:
        if node.op == "ZipMap":  # which hands on a tensor as maps
            edge = best = node.into[0]
            continue
        if node.domain or node.op not in COPIES | SQUASHES | {"Div"}:
            break
        if node.op == "Div":  # a Softmax that was taken apart
            node = model.maker(node.inputs[0])
            if node is None or node.op != "Exp":
                break
        edge = node.into[0]
        best = edge if node.op in SQUASHES | {"Exp"} else best
    return best
