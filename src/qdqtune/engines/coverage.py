"""Which nodes of the model file the layers of an engine cover.

An engine tells for each layer some of the nodes in it, and which tensors of the model it reads and writes. These
tensors are borders between layers: a node that no layer names belongs to the layer between the same borders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import onnx

from qdqtune.errors import first_of
from qdqtune.graph.loading import name_nodes
from qdqtune.graph.model import bodies, captured
from qdqtune.graph.operators import ASKS_SHAPE, COMPUTE
from qdqtune.graph.protobuf import parsed
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
    """A model file, as `parsed` reads it, with the names that `loading.load` gives to unnamed nodes."""
    model = parsed(path)
    name_nodes(model.graph)
    return model


def cover(graph: onnx.GraphProto, claims: Sequence[Claim]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The nodes of each layer, and the nodes that no layer runs. Each node of `graph` is in one of these.

    A node that several layers claim belongs to the first. A node that no layer claims joins the layer of its producer
    (unless it is one of `FIRST_IN_FUSION`), or else of its reader; across borders only if there is no other. A constant
    node joins a layer only if the layer reads a constant that the node is computed from (int8 weights of a
    DequantizeLinear). The other constant nodes, and shapes known in advance, run nowhere.
    """
    return _Assignment(graph, claims).result()


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


class _Assignment:
    """The steps of `cover`. `_layer_of` maps a node to the number of its layer."""

    def __init__(self, graph: onnx.GraphProto, claims: Sequence[Claim]) -> None:
        self._claims = claims
        self._borders = frozenset[str]().union(*(claim.reads | claim.writes for claim in claims))
        self._nodes = {node.name: node for node in graph.node}
        self._inputs = {node.name: tuple(_inputs_of(node)) for node in graph.node}
        self._maker = {tensor: node.name for node in graph.node for tensor in node.output if tensor}
        self._users: dict[str, list[str]] = {}
        for name, tensors in self._inputs.items():
            for tensor in tensors:
                self._users.setdefault(tensor, []).append(name)
        self._layer_of: dict[str, int] = {}
        for number, claim in enumerate(claims):
            for name in claim.nodes:
                if name in self._nodes:
                    self._layer_of.setdefault(name, number)
        self._constant_tensors = {t.name for t in graph.initializer}
        self._constant_nodes = self._constants()
        self._assign_constants()
        self._assign_others()

    def result(self) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
        covered: list[list[str]] = [[] for _ in self._claims]
        for name in self._nodes:
            if name in self._layer_of:
                covered[self._layer_of[name]].append(name)
        return [tuple(names) for names in covered], tuple(n for n in self._nodes if n not in self._layer_of)

    def _constants(self) -> frozenset[str]:
        """Unclaimed nodes that do not depend on inputs of the graph. Their results are added to `_constant_tensors`."""
        constants = set()
        for name, node in self._nodes.items():
            is_static = node.op_type in ASKS_SHAPE or self._constant_tensors.issuperset(self._inputs[name])
            if name not in self._layer_of and is_static and not node.op_type.startswith("Random"):
                constants.add(name)
                self._constant_tensors.update(node.output)
        return frozenset(constants)

    def _assign_constants(self) -> None:
        """Assign constant nodes to the layers that read the constants they are computed from."""
        for name in reversed(self._nodes):
            if name in self._constant_nodes:
                for tensor in self._nodes[name].output:
                    owners = (self._layer_of[u] for u in self._users.get(tensor, ()) if u in self._layer_of)
                    owner = next((o for o in owners if tensor not in self._claims[o].reads), None)
                    if owner is not None and self._depends_on(name, self._claims[owner].reads):
                        self._layer_of.setdefault(name, owner)

    def _depends_on(self, name: str, tensors: frozenset[str]) -> bool:
        """Whether a constant node is computed from a constant among `tensors`."""
        seen, stack = {name}, [name]
        while stack:
            inputs = self._constant_tensors.intersection(self._inputs[stack.pop()])
            if inputs & tensors:
                return True
            fresh = {self._maker[t] for t in inputs if t in self._maker} - seen
            seen |= fresh
            stack.extend(fresh)
        return False

    def _assign_others(self) -> None:
        """Assign other nodes to the layers of their neighbours: within the borders first, then across them."""
        for borders in (self._borders, frozenset[str]()):
            before = -1
            while before != len(self._layer_of):
                before = len(self._layer_of)
                for name in self._unassigned():
                    if self._nodes[name].op_type not in FIRST_IN_FUSION:
                        self._assign_like(name, self._makers(name, borders), max)
                for name in reversed(list(self._unassigned())):
                    outputs = (t for t in self._nodes[name].output if t not in borders)
                    self._assign_like(name, (user for t in outputs for user in self._users.get(t, ())), min)
        for name in self._unassigned():  # a DequantizeLinear without reader makes a graph output
            self._assign_like(name, self._makers(name), max)

    def _unassigned(self) -> Iterator[str]:
        return (name for name in self._nodes if name not in self._layer_of and name not in self._constant_nodes)

    def _makers(self, name: str, borders: frozenset[str] = frozenset()) -> Iterator[str]:
        return (self._maker[t] for t in self._inputs[name] if t in self._maker and t not in borders)

    def _assign_like(self, name: str, neighbours: Iterable[str], choose: Callable[[Iterable[int]], int]) -> None:
        """Assign a node to the layer of a neighbour: of its producers the last that runs, of its readers the first."""
        if owners := [self._layer_of[n] for n in neighbours if n in self._layer_of]:
            self._layer_of[name] = choose(owners)


def _inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    yield from (tensor for tensor in node.input if tensor)
    for body in bodies(node):
        yield from sorted(captured(body))
