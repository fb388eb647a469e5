"""Rules that place pairs: each finds further edges, given the edges `placed` that have pairs already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qdqtune.graph.model import Node
from qdqtune.graph.operators import AVERAGE_POOLS, CLAMPS, COMPUTE
from qdqtune.placement import start_placements
from qdqtune.placement.graph_queries import GraphQueries, nodes_into
from qdqtune.placement.keep_float import attention_results as results_of
from qdqtune.placement.keep_float import follows_convolution, result
from qdqtune.types import Edge

INTEGER = frozenset({"Add", "Concat", "LeakyRelu", "Mul", "Sigmoid"})
"""Operators whose integer kernels in ONNX Runtime save time between quantized neighbours."""


def compute_inputs(queries: GraphQueries, placed: frozenset[Edge]) -> Iterable[Edge]:
    """Activation and weight of Conv, ConvTranspose, Gemm and MatMul."""
    return start_placements.compute_inputs(queries.model, queries.possible)


def attention_results(queries: GraphQueries, placed: frozenset[Edge]) -> Iterator[Edge]:
    """The edges that read an attention's second product, also through copies, if both products have pairs."""
    for attention in queries.attentions:
        if all(e in placed for e in nodes_into(queries, attention.products)):
            yield from results_of(queries, attention)


def attention_parts(queries: GraphQueries, placed: frozenset[Edge]) -> Iterator[Edge]:
    """The result of a quantized product that makes queries, keys and values at once, in front of what divides it,
    unless the attention is fused in float16."""
    for attention in queries.attentions:
        parts = queries.parts(attention)
        if parts is not None and queries.runs_in_8_bits(parts[0], placed):
            yield from () if queries.is_fused_as_float(attention, placed) else parts[1]


def residual_skip(queries: GraphQueries, placed: frozenset[Edge]) -> Iterator[Edge]:
    """The skip input of an Add whose other input comes from a quantized compute operator."""
    for node in queries.model.nodes:
        if node.op != "Add" or node.domain or (skip := queries.skip(node)) is None:
            continue
        root = queries.fusions.get(node.index)
        if root is not None and skip.tensor in queries.model.producers and _runs_in_8_bits(queries, root, placed):
            yield skip


def convolution_to_layernorm(queries: GraphQueries, placed: frozenset[Edge]) -> Iterator[Edge]:
    """The data input of a LayerNormalization that follows a quantized convolution: see `follows_convolution`."""
    for node in queries.model.nodes:
        source = follows_convolution(queries, node)
        if source is not None and queries.runs_in_8_bits(source, placed):
            yield node.into[0]


def concat(queries: GraphQueries, placed: frozenset[Edge]) -> Iterator[Edge]:
    """All inputs and uses of a Concat that only quantized operators read, if a quantized operator feeds it."""
    for node in queries.model.nodes:
        if node.op == "Concat" and _all_read_in_8_bits(queries, node, placed):
            data = queries.data(node)
            if any(_made_in_8_bits(queries, e.tensor, placed) for e in data):
                yield from data
                yield from queries.model.edges(node.outputs[0])


def max_pool(queries: GraphQueries, placed: frozenset[Edge]) -> Iterator[Edge]:
    """The input of a MaxPool that only quantized operators read."""
    for node in queries.model.nodes:
        if node.op == "MaxPool" and _all_read_in_8_bits(queries, node, placed):
            yield from queries.data(node)


def resize(queries: GraphQueries, placed: frozenset[Edge]) -> Iterator[Edge]:
    """The input of a Resize that only quantized operators read; not if cubic, as results then exceed its range."""
    for node in queries.model.nodes:
        is_resize = node.op in ("Resize", "Upsample") and node.attributes.get("mode", "nearest") not in (
            "cubic",
            b"cubic",
        )
        if is_resize and _all_read_in_8_bits(queries, node, placed):
            yield from queries.data(node)


def average_pool(queries: GraphQueries, placed: frozenset[Edge]) -> Iterator[Edge]:
    """Input and result of an average pool between quantized operators, if nothing reads its input in float."""
    for node in queries.model.nodes:
        if node.op not in AVERAGE_POOLS or not _all_read_in_8_bits(queries, node, placed):
            continue
        tensor = node.inputs[0]
        others = [e for e in queries.model.edges(tensor) if e.node != node.name]
        if _made_in_8_bits(queries, tensor, placed) and all(e in placed for e in others):
            yield from (*queries.data(node), *queries.model.edges(node.outputs[0]))


def compute_results(queries: GraphQueries, placed: frozenset[Edge]) -> Iterator[Edge]:
    """All uses of the result of a quantized convolution, or of a quantized MatMul with a bias behind it."""
    for node in queries.computes():
        if node.op == "Gemm" or not queries.runs_in_8_bits(node, placed):
            continue
        uses = queries.model.edges(result(queries, node))
        if node.op != "MatMul" or any(_adds_bias(queries, e) for e in uses):
            yield from uses


def integer_operators(queries: GraphQueries, placed: frozenset[Edge]) -> Iterable[Edge]:
    """Inputs and results of operators with an integer kernel whose inputs are all quantized."""
    return start_placements.integer_islands(queries.model, queries.possible, INTEGER)


def everywhere(queries: GraphQueries, placed: frozenset[Edge]) -> Iterable[Edge]:
    """Every edge that can carry a pair, but for those between an operator that computes and the clamp behind it."""
    for edge in queries.possible:
        user, maker = queries.model.user(edge), queries.model.maker(edge.tensor)
        if not (user is not None and user.op in CLAMPS and maker is not None and maker.op in COMPUTE):
            yield edge


def _adds_bias(queries: GraphQueries, edge: Edge) -> bool:
    user = queries.model.user(edge)
    return user is not None and user.op == "Add" and any(t in queries.model.constants for t in user.inputs)


def _runs_in_8_bits(queries: GraphQueries, node: int, placed: frozenset[Edge]) -> bool:
    return queries.runs_in_8_bits(queries.model.nodes[node], placed)


def _made_in_8_bits(queries: GraphQueries, tensor: str, placed: frozenset[Edge]) -> bool:
    """Whether a tensor comes, through copies, from the fusion of a quantized operator, or from a Concat, MaxPool or
    Resize of quantized inputs."""
    source = queries.source(tensor)
    if source is None:
        return False
    root = queries.fusions.get(source.index)
    if root is not None:
        return _runs_in_8_bits(queries, root, placed)
    data = queries.data(source)
    return source.op in ("Concat", "MaxPool", "Resize") and bool(data) and all(e in placed for e in data)


def _all_read_in_8_bits(queries: GraphQueries, node: Node, placed: frozenset[Edge]) -> bool:
    """Whether every reader of a node's result, behind copies, has a pair on it."""
    readers = list(queries.readers(node.outputs[0]))
    return bool(readers) and all(e in placed for e in readers)
