"""What placement rules ask of a graph: fusions, readers behind copies, attention, sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from qdqtune.graph.float16 import HALF
from qdqtune.graph.model import GRAPH, Model, Node
from qdqtune.graph.operators import ARITHMETIC, ASKS_SHAPE, COMPUTE, COPIES, FUSED_POINTWISE, is_float, takes_data
from qdqtune.types import Edge, QuantType

SCALES_AND_MASKS = COPIES | ARITHMETIC | {"Clip", "Where"}
"""Operators that may stand between the first product of attention and its Softmax."""

DIVIDES = frozenset({"Gather", "Slice", "Split"})
"""Operators that return a part of a tensor."""


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention: the products of queries and keys (`scores`), and of probabilities and values (`context`), with the
    Softmax between them. A dynamic size is None."""

    scores: Node
    softmax: Node
    context: Node
    sequence: int | None
    head_size: int | None

    @property
    def into_products(self) -> tuple[Edge, ...]:
        return (*self.scores.into, *self.context.into)


@dataclass
class GraphQueries:
    """Questions about a model in which pairs may stand on the edges `possible`, and stand on the edges `placed`."""

    model: Model
    possible: frozenset[Edge]
    quant_type: QuantType = "int8"
    placed: frozenset[Edge] = frozenset()

    def computes(self) -> Iterator[Node]:
        return (n for n in self.model.nodes if n.op in COMPUTE and not n.domain)

    def data(self, node: Node) -> list[Edge]:
        """Edges to the float activations that a node reads."""
        return [
            e
            for e in node.into
            if takes_data(node, e.index) and e.tensor not in self.model.constants and is_float(self.model, e.tensor)
        ]

    def source(self, tensor: str) -> Node | None:
        """The node that computes a tensor's values; copies (Reshape, Transpose ...) in between are skipped."""
        while (node := self.model.maker(tensor)) is not None and node.op in COPIES:
            tensor = node.inputs[0]
        return node

    def readers(self, tensor: str, copies: frozenset[str] = COPIES) -> Iterator[Edge]:
        """The edges that read a tensor's values, not only its shape. In place of an edge into an operator of `copies`
        stand the edges that read that operator's result."""
        pending = self.model.edges(tensor)
        while pending:
            edge = pending.pop()
            node = self.model.user(edge)
            if node is not None and node.op in copies and edge.index == 0:
                pending += self.model.edges(node.outputs[0])
            elif node is None or node.op not in ASKS_SHAPE:
                yield edge

    def sizes(self, tensor: str) -> tuple[int | None, ...]:
        """The shape of a tensor, with None for dynamic sizes; empty if its rank is unknown."""
        info = self.model.tensors.get(tensor)
        return (info.shape or ()) if info is not None else ()

    @cached_property
    def fusions(self) -> Mapping[int, int]:
        """For each fused node, the index of the compute operator that it is fused with (or that it is).

        A copy or pointwise operator is fused if all its data comes from one fusion. An Add of two branches is fused
        with a branch that nothing else reads, the later one if there are two; its other input is the skip input.
        """
        roots: dict[int, int] = {}
        for node in self.model.nodes:
            if node.op in COMPUTE and not node.domain:
                roots[node.index] = node.index
            if node.domain or node.op not in COPIES | FUSED_POINTWISE:
                continue
            data = self.data(node)
            origins = [roots.get(self.model.producers.get(e.tensor, GRAPH)) for e in data]
            root = origins[0] if len(set(origins)) == 1 else None
            branch = _joined_branch(self, data, origins) if root is None and node.op == "Add" else None
            root = root if branch is None else origins[branch]
            if root is not None:
                roots[node.index] = root
        return roots

    def skip(self, add: Node) -> Edge | None:
        """The skip input of an Add (the one that its fusion does not compute); None if the Add is not residual."""
        data = self.data(add)
        fused = [self.fusions.get(self.model.producers.get(e.tensor, GRAPH)) for e in data]
        branch = _joined_branch(self, data, fused)
        return None if branch is None else data[1 - branch]

    def is_inside(self, edge: Edge) -> bool:
        """Whether the tensor of an edge stays within one fusion."""
        root = self.fusions.get(self.model.producers.get(edge.tensor, GRAPH))
        if root is None:  # also for constants, which thousands of nodes may read
            return False
        users = (self.model.user(e) for e in self.readers(edge.tensor, copies=frozenset()))
        return all(u is not None and self.fusions.get(u.index) == root for u in users)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """Every Softmax between two products of activations: MatMul, scale and mask, Softmax, MatMul."""
        blocks = []
        for node in self.model.nodes:
            if node.op != "Softmax" or node.domain:
                continue
            makers = (maker for maker, _ in self._in_front(node.inputs[0], SCALES_AND_MASKS))
            scores = next((m for m in makers if m.op == "MatMul" and len(self.data(m)) == 2), None)
            users = {u.index: u for e in self.readers(node.outputs[0]) if (u := self.model.user(e)) is not None}
            context = next((u for u in users.values() if u.op == "MatMul"), None)
            if scores is not None and context is not None:
                sequence = next(iter(self.sizes(scores.inputs[1])[-1:]), None)
                head = self._head_size(scores, context)
                blocks.append(Attention(scores, node, context, sequence, head))
        return tuple(blocks)

    def parts(self, attention: Attention) -> tuple[Node, tuple[Edge, ...]] | None:
        """Where one product with a weight makes queries and keys, often values as well: that product, and the edges
        into the operators that split its result. None where queries and keys have separate products."""
        queries, *others = (self._part_of(e.tensor) for e in attention.into_products)
        if queries is None or others[0] is None or queries[0] is not others[0][0]:
            return None
        edges = (edge for product, edge in (queries, *filter(None, others)) if product is queries[0])
        return queries[0], tuple(dict.fromkeys(edges))

    def _part_of(self, tensor: str) -> tuple[Node, Edge] | None:
        """The product with a weight of which a tensor is a (scaled) part, and the edge into the first operator that
        splits it."""
        for node, divided in self._in_front(tensor, COPIES | ARITHMETIC | DIVIDES):
            if divided is not None and node.op in ("Gemm", "MatMul") and len(self.data(node)) == 1:
                return node, divided
        return None

    def _in_front(self, tensor: str, operators: Collection[str]) -> Iterator[tuple[Node, Edge | None]]:
        """The nodes on which a tensor depends through `operators`, with the edge into the first of DIVIDES behind
        each."""
        pending: list[tuple[str, Edge | None]] = [(tensor, None)]
        seen: set[str] = set()
        while pending:
            tensor, divided = pending.pop()
            node = self.model.maker(tensor)
            if node is None or tensor in seen:
                continue
            seen.add(tensor)
            yield node, divided
            if node.op in operators:
                pending += [(e.tensor, e if node.op in DIVIDES else divided) for e in self.data(node)]

    def is_fused_as_float(self, attention: Attention, paired: Collection[Edge]) -> bool:
        """Whether TensorRT runs an attention as one float16 kernel: in half precision, if a product lacks a pair."""
        info = self.model.tensors.get(attention.softmax.inputs[0])
        is_half = info is not None and info.dtype in HALF
        return is_half and not all(e in paired for e in attention.into_products)

    def _head_size(self, scores: Node, context: Node) -> int | None:
        """The last dimension of queries and values. If the model leaves it open: the rows of the weight that reads all
        heads side by side, divided by the number of heads."""
        queries, keys, values = (self.sizes(t) for t in (*scores.inputs[:2], context.inputs[1]))
        if known := [size for size in (*keys[-2:-1], *queries[-1:], *values[-1:]) if size is not None]:
            return known[0]
        heads = next(iter(self.sizes(scores.outputs[0])[-3:-2]), None)
        for edge in self.readers(context.outputs[0]):
            node = self.model.user(edge)
            weights = None if node is None or node.op != "MatMul" else self.model.constants.get(node.inputs[1])
            if heads and weights is not None and edge.tensor != context.outputs[0] and len(weights.shape) == 2:
                return None if weights.shape[0] % heads else weights.shape[0] // heads
        return None


def _joined_branch(queries: GraphQueries, data: list[Edge], roots: list[int | None]) -> int | None:
    """The index in an Add's `data` of the branch that the Add is fused with (see `fusions`); None for no branch."""
    if len(data) != 2 or data[0].tensor == data[1].tensor or roots[0] == roots[1]:
        return None
    fresh = [
        (root, i)
        for i, (edge, root) in enumerate(zip(data, roots, strict=True))
        if root is not None and len(queries.model.edges(edge.tensor)) == 1
    ]
    return max(fresh)[1] if fresh else None
