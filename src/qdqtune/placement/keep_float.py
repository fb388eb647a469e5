"""Rules that keep operators in float: each finds edges that may carry no pair."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from qdqtune.graph.float16 import HALF
from qdqtune.graph.model import Node
from qdqtune.graph.operators import ARITHMETIC, CLAMPS, COMPUTE, CONVOLUTIONS, NORMALIZATIONS
from qdqtune.placement.graph_queries import Attention, GraphQueries, nodes_into
from qdqtune.types import Edge

FLOAT_FUNCTIONS = frozenset({"Softmax", "LogSoftmax", "Erf", "Gelu"})

TILE = 16
"""Fewest channels, and least K and N of a matrix product, that fill a tile of the 8-bit kernels (NVIDIA Model
Optimizer)."""

LARGEST_FP8_FILTER = 32
"""Most values of a filter that FP8 convolutions have kernels for (NVIDIA Model Optimizer)."""

INT8_HEADS = (16, 32, 64)
"""Head sizes for which INT8 attention has a fused kernel (TensorRT developer guide, as the next two)."""

LONGEST_INT8_ATTENTION = 512
"""Longest sequence of a fused INT8 attention."""

LARGEST_FP8_HEAD = 256
"""Largest head size of a fused FP8 attention."""


def graph_outputs(queries: GraphQueries) -> Iterator[Edge]:
    """Edges to graph outputs."""
    return (e for e in queries.possible if e.is_graph_output)


def float_outputs(queries: GraphQueries) -> Iterator[Edge]:
    """Edges to graph outputs that no convolution makes."""
    own = {result(queries, n) for n in queries.computes() if n.op in CONVOLUTIONS}
    return (e for e in graph_outputs(queries) if e.tensor not in own)


def half_precision(queries: GraphQueries) -> Iterator[Edge]:
    """Edges of tensors in float16 or bfloat16."""
    return (e for e in queries.possible if queries.model.tensors[e.tensor].dtype in HALF)


def running_sums(queries: GraphQueries) -> Iterator[Edge]:
    """Inputs of CumSum."""
    return (e for e in queries.possible if (user := queries.model.user(e)) is not None and user.op == "CumSum")


def result(queries: GraphQueries, node: Node) -> str:
    """The result of a compute operator after the clamps that are fused into it."""
    tensor = node.outputs[0]
    while len(uses := queries.model.edges(tensor)) == 1:
        user = queries.model.user(uses[0])
        if user is None or user.op not in CLAMPS or user.domain:
            break
        tensor = user.outputs[0]
    return tensor


def constant_operands(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into Add, Sub, Mul and Div nodes with a constant operand."""
    for node in queries.model.nodes:
        if node.op in ARITHMETIC and any(t in queries.model.constants for t in node.inputs):
            yield from queries.into(node)


def inside_fusions(queries: GraphQueries) -> Iterator[Edge]:
    """Edges between the operators of one fusion: bias, BatchNormalization, activation, pointwise."""
    return (e for e in queries.possible if queries.is_inside(e))


def swish(queries: GraphQueries) -> Iterator[Edge]:
    """Edges inside SiLU and HardSwish, x * gate(x): x into the gate, x and the gate into the Mul."""
    for node, x, _, first in _gated(queries):
        yield from queries.into(node)
        yield from (e for e in queries.into(first) if e.tensor == x)


def stem_swish(queries: GraphQueries) -> Iterator[Edge]:
    """Every edge from the data of a first convolution to the readers of the SiLU or HardSwish behind it.

    A convolution is first if no compute operator is in front of it and its inputs have fewer channels than fill a tile.
    """
    behind = _behind_compute(queries)
    for node, x, gate, first in _gated(queries):
        layer = queries.model.maker(x)
        if layer is None or layer.op != "Conv" or layer.inputs[0] in behind:
            continue
        channels = (queries.sizes(layer.inputs[0]) or (None, None))[1]
        if layer.attributes.get("group", 1) == 1 and (channels or TILE) < TILE:
            yield from queries.into(layer)
            tensors = {x, gate, node.outputs[0], *first.outputs}
            yield from (e for e in queries.possible if e.tensor in tensors)


def _behind_compute(queries: GraphQueries) -> set[str]:
    """Tensors that depend on the result of a compute operator."""
    found: set[str] = set()
    for node in queries.model.nodes:
        if node.op in COMPUTE or not found.isdisjoint((*node.inputs, *node.captures)):
            found.update(node.outputs)
    return found


def _gated(queries: GraphQueries) -> Iterator[tuple[Node, str, str, Node]]:
    """Each Mul that computes x * gate(x), the names of x and gate(x), and the node of the gate that reads x."""
    for node in queries.model.nodes:
        for x, gate in (node.inputs, node.inputs[::-1]) if node.op == "Mul" and len(node.inputs) == 2 else ():
            if (first := _gate_of(queries, x, gate)) is not None:
                yield node, x, gate, first


def _gate_of(queries: GraphQueries, x: str, gate: str) -> Node | None:
    """The node that reads x if `gate` is Sigmoid(x), HardSigmoid(x), or Clip(x + 3) times a constant; else None."""
    node = queries.model.maker(gate)
    while node is not None and node.op in ("Clip", "Div", "Mul") and len(queries.data(node)) == 1:
        node = queries.model.maker(queries.data(node)[0].tensor)
    read = [e.tensor for e in queries.data(node)] if node is not None else []
    return node if node is not None and read == [x] and node.op in ("Sigmoid", "HardSigmoid", "Add") else None


def float_functions(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into FLOAT_FUNCTIONS and unfused normalizations, except the data of one that `follows_convolution`."""
    for node in queries.model.nodes:
        if node.op in NORMALIZATIONS and queries.fusions.get(node.index) is None:
            kept = 0 if follows_convolution(queries, node) is not None else None
            yield from (e for e in queries.into(node) if e.index != kept)
        elif node.op in FLOAT_FUNCTIONS:
            yield from queries.into(node)


def follows_convolution(queries: GraphQueries, node: Node) -> Node | None:
    """The compute operator in front of a LayerNormalization in a convolutional network; None for other nodes.

    The data of the LayerNormalization comes, through copies, from the fusion of a convolution. Or it comes from a
    residual Add whose branch ends in a matrix product, and the result goes, through copies, into a Conv.
    """
    if node.op != "LayerNormalization" or node.domain:
        return None
    source = queries.source(node.inputs[0])
    root = None if source is None else queries.fusions.get(source.index)
    if source is None or root is None:
        return None
    made_by = queries.model.nodes[root]
    if made_by.op in CONVOLUTIONS:
        return made_by
    users = [queries.model.user(e) for e in queries.readers(node.outputs[0])]
    is_residual = source.op == "Add" and queries.skip(source) is not None
    return made_by if is_residual and any(u is not None and u.op == "Conv" for u in users) else None


def matrix_vector(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into products [M, K] x [K, N] with M or N = 1, as NVIDIA Model Optimizer has it: with a constant operand
    those of two dimensions only. A step of a language model, [1, 1, K], reads its weights in 8 bits."""
    for node in queries.computes():
        shape = queries.sizes(node.outputs[0])
        is_weighted = any(t in queries.model.constants for t in node.inputs[:2])
        if node.op in CONVOLUTIONS or not shape or (is_weighted and len(shape) > 2):
            continue
        if len(shape) == 1 or 1 in shape[-2:]:
            yield from queries.into(node)


def tiny_products(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into products [M, K] x [K, N] with K or N below TILE."""
    for node in queries.computes():
        second, shape = queries.sizes(node.inputs[1]), queries.sizes(node.outputs[0])
        if node.op in CONVOLUTIONS or len(second) < 2 or not shape:
            continue
        inner = second[-1] if node.op == "Gemm" and node.attributes.get("transB", 0) else second[-2]
        if any(0 < (size or 0) < TILE for size in (inner, shape[-1])):
            yield from queries.into(node)


def tiny_convolutions(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into convolutions with few input or output channels.

    INT8: inputs or outputs below 16; and both below 16 behind the first layer, or neither a multiple of 8. A grouped
    one: inputs or outputs below 16; and outputs no multiple of 8, or a filter narrower than 3. FP8: inputs or outputs
    of 16 or less, or a filter of more than 32 values.
    """
    for node in queries.computes():
        weight = queries.sizes(node.inputs[1])
        if node.op != "Conv" or len(weight) < 3 or None in weight:
            continue
        outputs, inputs, *kernel = (d or 0 for d in weight)
        if queries.quant_type == "fp8":
            is_tiny = min(outputs, inputs) <= TILE or prod(kernel) > LARGEST_FP8_FILTER
        elif min(outputs, inputs) >= TILE:
            is_tiny = False
        elif node.attributes.get("group", 1) > 1:
            is_tiny = outputs % 8 != 0 or min(kernel) < 3
        else:
            is_first = node.inputs[0] in queries.model.inputs
            is_tiny = bool(outputs % 8 and inputs % 8) or not (is_first or max(outputs, inputs) >= TILE)
        if is_tiny:
            yield from queries.into(node)


def unfusable_int8_attention(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into both products of an attention that no INT8 kernel fuses: for its sizes, or because a pair cannot stand
    where the kernel needs one (on both inputs of both products, and on the result of the second).

    Seen with TensorRT-RTX 1.7 for sm89, and in NVIDIA's guide: heads of 16, 32 or 64, at most 512 positions.
    """
    for attention in queries.attentions:
        fits = attention.head_size in INT8_HEADS and (attention.sequence or 0) <= LONGEST_INT8_ATTENTION
        behind = attention_results(queries, attention)
        if not fits or not _can_carry_pairs(queries, attention.products) or not queries.possible.issuperset(behind):
            yield from nodes_into(queries, attention.products)


def attention_results(queries: GraphQueries, attention: Attention) -> list[Edge]:
    """The edges that read an attention's second product, directly or through copies."""
    return list(queries.readers(queries.model.nodes[attention.context].outputs[0]))


def unfusable_fp8_attention(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into both products of an attention that no FP8 kernel fuses: for a head size that is unknown, no multiple
    of 16 or above 256, or because a pair on an input of a product is not possible."""
    for attention in queries.attentions:
        size = attention.head_size or 0
        fits = 0 < size <= LARGEST_FP8_HEAD and size % 16 == 0
        if not fits or not _can_carry_pairs(queries, attention.products):
            yield from nodes_into(queries, attention.products)


def parts_of_float_attention(queries: GraphQueries) -> Iterator[Edge]:
    """Inputs of a product that makes queries, keys and values at once, where the attention is fused in float16."""
    for attention in queries.attentions:
        parts = queries.parts(attention)
        if parts is not None and queries.is_fused_as_float(attention, queries.possible):
            yield from queries.into(parts[0])


def transposed_convolutions(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into ConvTranspose nodes."""
    for node in queries.computes():
        if node.op == "ConvTranspose":
            yield from queries.into(node)


def grouped_transposed_convolutions(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into ConvTranspose nodes with groups."""
    for node in queries.computes():
        if node.op == "ConvTranspose" and node.attributes.get("group", 1) > 1:
            yield from queries.into(node)


def pooled_convolutions(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into convolutions of a 1x1 image, as in squeeze-and-excitation: they are matrix-vector products."""
    for node in queries.computes():
        image = queries.sizes(node.inputs[0])[2:]
        if node.op == "Conv" and image and all(size == 1 for size in image):
            yield from queries.into(node)


def _can_carry_pairs(queries: GraphQueries, products: tuple[int, int]) -> bool:
    """Whether both products may carry pairs on both inputs."""
    return all(e in queries.possible for e in nodes_into(queries, products))
