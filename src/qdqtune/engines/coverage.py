"""Finds the nodes of the model file that each layer of an engine runs.

An engine reports for each layer some of its nodes, and which tensors of the model it reads and writes. These tensors
separate layers: a node that no layer names belongs to the layer between the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from qdqtune.graph.inference import constant_nodes
from qdqtune.graph.loading import name_nodes, read
from qdqtune.graph.model import GRAPH, Model, Node
from qdqtune.graph.operators import ASKS_SHAPE, COMPUTE
from qdqtune.types import Layer

FIRST_IN_FUSION = COMPUTE | {"DequantizeLinear"}
"""Operators that start a fused kernel: they are not fused with the node that writes their input."""


@dataclass(frozen=True)
class Claim:
    """What an engine reports of one layer: names of nodes in it, and tensors of the model that it reads and writes."""

    nodes: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()


def read_model(path: Path) -> Model:
    """Read a model file, with generated names for unnamed nodes (see `loading.load`). External data is not read."""
    model = read(path)
    name_nodes(model.graph)
    return Model(model)


def cover(model: Model, claims: Sequence[Claim]) -> tuple[list[tuple[str, ...]], tuple[Layer, ...]]:
    """The nodes of each layer, and a layer of kind "folded" with the nodes that no layer runs (empty if each node is in
    a layer).

    A node that several layers report belongs to the first. A node that no layer reports joins the layer of its producer
    (unless it is one of `FIRST_IN_FUSION`), or else of its reader; across tensors that separate layers only if there is
    no other. A constant node joins a layer only if the layer reads a constant that the node is computed from (int8
    weights of a DequantizeLinear). The other constant nodes, and computations of shapes known in advance, are "folded".
    """
    layer_of: dict[str, int] = {}
    for number, claim in enumerate(claims):
        for name in claim.nodes:
            if name in model.index_of:
                layer_of.setdefault(name, number)

    constants = {tensor.name for tensor in model.proto.graph.initializer}
    never_named = constant_nodes(model, constants, ASKS_SHAPE, lambda node: node.name not in layer_of)
    constants.update(*(node.outputs for node in never_named.values()))

    def is_computed_from(node: Node, tensors: frozenset[str]) -> bool:
        seen, stack = {node.name}, [node]
        while stack:
            constants_read = constants.intersection(stack.pop().reads)
            if constants_read & tensors:
                return True
            for maker in filter(None, map(model.maker, constants_read)):
                if maker.name not in seen:
                    seen.add(maker.name)
                    stack.append(maker)
        return False

    def owners_of(readers: Iterable[Node]) -> list[int]:
        return [layer_of[reader.name] for reader in readers if reader.name in layer_of]

    for node in reversed(never_named.values()):
        for tensor in node.outputs:
            owners = owners_of(readers(model, tensor))
            owner = next((number for number in owners if tensor not in claims[number].reads), None)
            if owner is not None and is_computed_from(node, claims[owner].reads):
                layer_of.setdefault(node.name, owner)

    others = [node for node in model.nodes if node.name not in never_named]

    def join_producer(node: Node, borders: frozenset[str] = frozenset()) -> None:
        owners = owners_of(filter(None, [model.maker(t) for t in node.reads if t not in borders]))
        if owners:
            layer_of[node.name] = max(owners)  # the last that runs

    for borders in (frozenset[str]().union(*(claim.reads | claim.writes for claim in claims)), frozenset[str]()):
        before = -1
        while before != len(layer_of):
            before = len(layer_of)
            for node in others:
                if node.name not in layer_of and node.op not in FIRST_IN_FUSION:
                    join_producer(node, borders)
            for node in reversed([node for node in others if node.name not in layer_of]):
                following = [readers(model, tensor) for tensor in node.outputs if tensor not in borders]
                owners = owners_of(chain.from_iterable(following))
                if owners:
                    layer_of[node.name] = min(owners)
    for node in others:
        if node.name not in layer_of:  # a DequantizeLinear without reader makes a graph output
            join_producer(node)
    covered: list[list[str]] = [[] for _ in claims]
    for name in model.index_of:
        if name in layer_of:
            covered[layer_of[name]].append(name)
    never_run = tuple(name for name in model.index_of if name not in layer_of)
    folded = (Layer("folded", never_run, "", 0.0, "folded"),) if never_run else ()
    return [tuple(names) for names in covered], folded


def readers(model: Model, tensor: str) -> list[Node]:
    return [model.nodes[use.node] for use in model.uses(tensor) if use.node != GRAPH]
