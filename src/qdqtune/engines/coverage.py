"""Which nodes of the model file the layers of an engine cover.

An engine tells for each layer some of the nodes in it, and which tensors of the model it reads and writes. These
tensors are borders between layers: a node that no layer names belongs to the layer between the same borders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import onnx

from qdqtune.errors import first_of
from qdqtune.graph.loading import name_nodes, read
from qdqtune.graph.model import bodies, captured
from qdqtune.graph.operators import ASKS_SHAPE, COMPUTE
from qdqtune.types import Layer

FIRST_IN_FUSION = COMPUTE | {"DequantizeLinear"}
"""Operators that a fusion begins with: they are not fused with the producer of their input."""

STRANGE = 0.1
"""The largest share of the time that rows of a profile may take that fit no layer. Chosen, not measured."""


@dataclass(frozen=True)
class Claim:
    """What an engine tells of one layer: names of nodes in it, and tensors of the model that it reads and writes."""

    nodes: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()


def read_model(path: Path) -> onnx.ModelProto:
    """A model file with the names that `loading.load` gives to unnamed nodes."""
    model = read(path)
    name_nodes(model.graph)
    return model


def cover(graph: onnx.GraphProto, claims: Sequence[Claim]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The nodes of each layer, and the nodes that no layer runs. Each node of `graph` is in one of these.

    A node that several layers claim belongs to the first. A node that no layer claims joins the layer of its producer
    (unless it is one of `FIRST_IN_FUSION`), or else of its reader; across borders only if there is no other. A constant
    node joins a layer only if the layer reads a constant that the node is computed from (int8 weights of a
    DequantizeLinear). The other constant nodes, and shapes known in advance, run nowhere.
    """
    nodes = {node.name: node for node in graph.node}
    inputs = {node.name: tuple(inputs_of(node)) for node in graph.node}
    maker = {tensor: node.name for node in graph.node for tensor in node.output if tensor}
    users: dict[str, list[str]] = {}
    for name, tensors in inputs.items():
        for tensor in tensors:
            users.setdefault(tensor, []).append(name)
    layer_of: dict[str, int] = {}
    for number, claim in enumerate(claims):
        for name in claim.nodes:
            if name in nodes:
                layer_of.setdefault(name, number)

    constants = {tensor.name for tensor in graph.initializer}
    constant_nodes = dict[str, None]()
    for name, node in nodes.items():
        is_static = node.op_type in ASKS_SHAPE or constants.issuperset(inputs[name])
        if name not in layer_of and is_static and not node.op_type.startswith("Random"):
            constant_nodes[name] = None
            constants.update(node.output)

    def is_computed_from(name: str, tensors: frozenset[str]) -> bool:
        seen, stack = {name}, [name]
        while stack:
            read = constants.intersection(inputs[stack.pop()])
            if read & tensors:
                return True
            fresh = {maker[tensor] for tensor in read if tensor in maker} - seen
            seen |= fresh
            stack.extend(fresh)
        return False

    for name in reversed(constant_nodes):
        for tensor in nodes[name].output:
            owners = [layer_of[user] for user in users.get(tensor, ()) if user in layer_of]
            owner = next((number for number in owners if tensor not in claims[number].reads), None)
            if owner is not None and is_computed_from(name, claims[owner].reads):
                layer_of.setdefault(name, owner)

    others = [name for name in nodes if name not in constant_nodes]

    def join_producer(name: str, borders: frozenset[str] = frozenset()) -> None:
        makers = (maker.get(tensor, "") for tensor in inputs[name] if tensor not in borders)
        owners = [layer_of[node] for node in makers if node in layer_of]
        if owners:
            layer_of[name] = max(owners)  # the last that runs

    for borders in (frozenset[str]().union(*(claim.reads | claim.writes for claim in claims)), frozenset[str]()):
        before = -1
        while before != len(layer_of):
            before = len(layer_of)
            for name in others:
                if name not in layer_of and nodes[name].op_type not in FIRST_IN_FUSION:
                    join_producer(name, borders)
            for name in reversed([name for name in others if name not in layer_of]):
                readers = (user for t in nodes[name].output if t not in borders for user in users.get(t, ()))
                owners = [layer_of[user] for user in readers if user in layer_of]
                if owners:
                    layer_of[name] = min(owners)
    for name in others:
        if name not in layer_of:  # a DequantizeLinear without reader makes a graph output
            join_producer(name)
    covered: list[list[str]] = [[] for _ in claims]
    for name in nodes:
        if name in layer_of:
            covered[layer_of[name]].append(name)
    return [tuple(names) for names in covered], tuple(name for name in nodes if name not in layer_of)


def never_run(nodes: tuple[str, ...]) -> tuple[Layer, ...]:
    """The layer of kind "folded", for nodes that do not run at inference; none if there are no such nodes."""
    return (Layer("folded", nodes, "", 0.0, "folded"),) if nodes else ()


def wrong_nodes(operators: Mapping[str, str], layers: Sequence[Layer]) -> str:
    """Why the layers do not cover a model, whose nodes are `operators` by name: each node must be in one layer, and
    each product in one that computes. "" if they do."""
    named = Counter(node for layer in layers for node in layer.nodes)
    computed = {node for layer in layers if layer.kind == "compute" for node in layer.nodes}
    wrong = {
        "nodes in no layer": operators.keys() - named.keys(),
        "nodes in several layers": {node for node, count in named.items() if count > 1},
        "layers with names that are no nodes": named.keys() - operators.keys(),
        "products outside of layers that compute": {n for n, op in operators.items() if op in COMPUTE} - computed,
    }
    return next((f"{what}: {first_of(sorted(names))}" for what, names in wrong.items() if names), "")


def has_sensible_times(layers: Sequence[Layer]) -> bool:
    """Whether each layer that runs has a time, and next to none of it is in rows that fit no layer."""
    times = [layer.time_ms for layer in layers if layer.kind != "folded"]
    known = [time for time in times if time is not None]
    strange = sum(layer.time_ms or 0.0 for layer in layers if layer.kind == "unknown")
    is_whole = len(known) == len(times) and min(known) >= 0 and 0 < sum(known) < inf
    return is_whole and strange <= STRANGE * sum(known)


def inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors that a node reads, also in its bodies."""
    yield from (tensor for tensor in node.input if tensor)
    for body in bodies(node):
        yield from sorted(captured(body))
