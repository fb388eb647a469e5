"""Pairs as TensorRT's implicit quantization had its scales: on all that a quantizable layer reads.

With `--int8` and a calibration cache TensorRT 8 to 10 could run every layer with an integer kernel in 8 bits whose
tensors had scales, and chose the fastest precision. Engines that take types from the graph choose no more: what carries
a pair runs in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import AVERAGE_POOLS, COMPUTE
from qdqtune.placement.engine_rules import PlacedByRules
from qdqtune.placement.graph_queries import GraphQueries
from qdqtune.placement.possible import compute_edges, consistent
from qdqtune.types import Edge, Placement, QuantType

ELEMENTWISE = frozenset({"Add", "Mul", "Sub"})
QUANTIZABLE = AVERAGE_POOLS | ELEMENTWISE | {"Concat", "MaxPool", "Resize"}
"""Operators with integer kernels besides those that compute: pooling, elementwise, concatenation and resize layers.
Layers that only move values need no pair of their own: TensorRT moves those around them across."""


def place(model: Model, possible: frozenset[Edge], quant_type: QuantType) -> PlacedByRules:
    """Pairs on all inputs of every quantizable operator whose inputs all have scales, and its result, if it computes
    nothing. Tensors inside a fusion, which never leave the kernel, carry none."""
    queries = GraphQueries(model, possible, quant_type)
    edges = frozenset(e for node in model.nodes if not node.domain for e in _into(queries, node))
    placement = consistent(model, Placement(frozenset(e for e in edges if not queries.is_inside(e))))
    return PlacedByRules(placement, (("implicit", len(placement)),))


def _into(queries: GraphQueries, node: Node) -> Iterator[Edge]:
    if node.op in COMPUTE:
        yield from compute_edges(queries.model, node, queries.possible)
    elif node.op in QUANTIZABLE:
        data = queries.data(node)
        outputs = [e for e in queries.model.edges(node.outputs[0]) if not e.is_graph_output]
        is_whole = len(data) == 2 or node.op not in ELEMENTWISE  # with a constant it joins the kernel in front of it
        if data and is_whole and all(e in queries.possible for e in (*data, *outputs)):
            yield from data
