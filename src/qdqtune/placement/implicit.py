"""Pairs as TensorRT's implicit quantization had its scales: on all that a quantizable layer reads.

With `--int8` and a calibration cache TensorRT 8 to 10 could run every layer with an integer kernel in 8 bits whose
tensors had scales, and chose the fastest precision. Engines that take types from the graph choose no more: what carries
a pair runs in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import AVERAGE_POOLS, COMPUTE
from qdqtune.placement.engine_rules import Placed
from qdqtune.placement.graph_queries import Scene
from qdqtune.placement.possible import compute_edges, consistent
from qdqtune.types import Edge, Placement, QuantType

JOINS = frozenset({"Add", "Mul", "Sub"})
QUANTIZABLE = AVERAGE_POOLS | JOINS | {"Concat", "MaxPool", "Resize"}
"""Operators with integer kernels besides those that compute: pooling, elementwise, concatenation and resize layers.
Layers that only move values need no pair of their own: TensorRT moves those around them across."""


def place(model: Model, possible: frozenset[Edge], quant_type: QuantType) -> Placed:
    """Pairs on all inputs of every quantizable operator whose inputs all have scales, and its result, if it computes
    nothing. Tensors inside a fusion, which never leave the kernel, carry none."""
    scene = Scene(model, possible, quant_type)
    edges = frozenset(e for node in model.nodes if not node.domain for e in _into(scene, node))
    placement = consistent(model, Placement(frozenset(e for e in edges if not scene.is_inside(e))))
    return Placed(placement, (("implicit", len(placement)),))


def _into(scene: Scene, node: Node) -> Iterator[Edge]:
    if node.op in COMPUTE:
        yield from compute_edges(scene.model, node, scene.possible)
    elif node.op in QUANTIZABLE:
        data = scene.data(node)
        outputs = [e for e in scene.model.edges(node.outputs[0]) if not e.is_graph_output]
        is_whole = len(data) == 2 or node.op not in JOINS  # with a constant it joins the kernel in front of it
        if data and is_whole and all(e in scene.possible for e in (*data, *outputs)):
            yield from data
