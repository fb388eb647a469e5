"""Simple placements of a whole model, which every search measures first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from qdqtune.graph.model import Model
from qdqtune.graph.operators import CLAMPS, COMPUTE, FUSED_BEHIND, INTEGER_KERNELS, MOVERS, is_float, takes_data
from qdqtune.placement.possible import can_have, compute_edges, consistent, weight_at
from qdqtune.types import Edge, Placement, WeightFormat

STATIC = COMPUTE | INTEGER_KERNELS | {
    "InstanceNormalization", "LayerNormalization", "LeakyRelu", "Pad", "Sigmoid", "Softmax",
}  # fmt: skip
"""Operators that ONNX Runtime's quantize_static puts pairs around, besides MOVERS and CLAMPS behind a pair."""


def compute_inputs(model: Model, possible: frozenset[Edge]) -> Placement:
    """All inputs of Conv, ConvTranspose, Gemm and MatMul; all else stays in float."""
    nodes = (n for n in model.nodes if n.op in COMPUTE and not n.domain)
    return Placement.of(e for n in nodes for e in compute_edges(n, possible))


def residual_inputs(model: Model, possible: frozenset[Edge]) -> Placement:
    """`compute_inputs`, and the skip input of each Add that fuses into the compute operator of its other input."""
    edges = set(compute_inputs(model, possible).edges)
    for node in model.nodes:
        if node.op != "Add" or node.domain:
            continue
        computed = [_behind_compute(model, t) for t in node.inputs]
        for slot, edge in enumerate(node.into):
            is_branch = all(computed) and slot == 0  # if both are computed, input 1 is the skip
            if computed[1 - slot] and not is_branch and edge.tensor in model.producers and edge in possible:
                edges.add(edge)
    return Placement.of(edges)


def integer_islands(
    model: Model, possible: frozenset[Edge], joining: frozenset[str] = INTEGER_KERNELS - {"Mul"}
) -> Placement:
    """`compute_inputs`, and the inputs and results of copies (MOVERS) and `joining` operators whose inputs come from
    quantized operators: values stay in integers between them, which saves conversions."""
    edges = set(compute_inputs(model, possible).edges)
    integer: set[str] = set()
    for node in model.nodes:
        is_compute = node.op in COMPUTE and not node.domain and compute_edges(node, possible)
        if is_compute or (node.op in FUSED_BEHIND and node.inputs[0] in integer):
            integer.update(node.outputs)
        elif node.op in MOVERS | joining:
            data = [e for e in node.into if takes_data(node, e.index) and is_float(model, e.tensor)]
            if data and all(e.tensor in integer for e in data):
                edges.update(data)
                edges.update(e for t in node.outputs for e in model.edges(t))
                integer.update(node.outputs)

    def is_fused(edge: Edge) -> bool:
        node = model.user(edge)
        return node is not None and node.op in FUSED_BEHIND and len(model.uses(edge.tensor)) == 1

    return Placement.of(e for e in edges if e in possible and not e.is_graph_output and not is_fused(e))


def static(model: Model, possible: frozenset[Edge]) -> Placement:
    """Where ONNX Runtime's quantize_static puts pairs: inputs and outputs of every operator that it knows. Scales of
    normalizations stay in float: no kernel takes them in 8 bits."""
    marked: set[str] = set()
    for node in model.nodes:
        if node.domain or not node.outputs:
            continue
        if node.op in STATIC:
            marked.update(t for t in (*node.inputs[:1], *node.outputs) if t)
            if node.op in COMPUTE | INTEGER_KERNELS:
                marked.update(t for t in (node.inputs if node.op == "Concat" else node.inputs[:2]) if t)
        elif node.op == "Gather" and node.inputs[0] in model.constants:
            marked.update((node.inputs[0], *node.outputs))
        elif node.op in MOVERS | CLAMPS and node.inputs[0] in marked:
            if node.op in CLAMPS and len(model.uses(node.inputs[0])) == 1:
                marked.difference_update({node.inputs[0]} - set(model.inputs))
            marked.update(node.outputs)
    return Placement.of(e for t in marked for e in model.edges(t) if e in possible)


def everything(model: Model, possible: frozenset[Edge]) -> Placement:
    """Every possible edge except those inside a fusion and graph outputs."""
    inside = {
        n.into[0]
        for n in model.nodes
        if n.op in FUSED_BEHIND and len(model.uses(n.inputs[0])) == 1 and _behind_compute(model, n.inputs[0])
    }
    return Placement.of(e for e in possible - inside if not e.is_graph_output)


START_PLACEMENTS: Mapping[str, Callable[[Model, frozenset[Edge]], Placement]] = {
    "compute": compute_inputs, "residual": residual_inputs, "islands": integer_islands, "static": static,
    "everything": everything,
}  # fmt: skip


def weight_only(model: Model, edges: Iterable[Edge], wanted: Sequence[WeightFormat]) -> Placement:
    """A placement of weight formats alone: the weight at each edge gets the first of `wanted` that it can have."""
    formats = {}
    for edge in edges:
        weight = weight_at(model, edge)
        fitting = [f for f in wanted if weight is not None and can_have(weight, f)]
        if fitting:
            formats[edge] = fitting[0]
    return Placement.of((), formats.items())


def placements(model: Model, possible: frozenset[Edge]) -> Mapping[str, Placement]:
    """All START_PLACEMENTS of a model by name; without empty ones, and without repetitions of an earlier one."""
    guesses: dict[str, Placement] = {}
    for name, place in START_PLACEMENTS.items():
        placement = consistent(model, place(model, possible))
        if placement.edges and placement not in guesses.values():
            guesses[name] = placement
    return guesses


def _behind_compute(model: Model, tensor: str) -> bool:
    """Whether a tensor is the result of a compute operator or of operators that are fused into it."""
    while (node := model.maker(tensor)) is not None:
        if node.op in COMPUTE:
            return True
        if node.op not in FUSED_BEHIND and not (node.op == "Add" and any(t in model.constants for t in node.inputs)):
            return False
        tensor = next((t for t in node.inputs if t not in model.constants), "")
    return False
