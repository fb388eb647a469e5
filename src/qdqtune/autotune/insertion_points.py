"""Insertion points and schemes of them, with the names and fields that scripts know; the core has values of its own."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf, prod
from typing import Any, ClassVar, Self

import onnx

from qdqtune.autotune.graphs import (
    GraphLike,
    InvalidSchemeError,
    Region,
    RegionType,
    as_model,
    get_tensor_consumer_node_indices,
    model_with,
    pattern_of,
)
from qdqtune.graph.model import GRAPH, Model, Use
from qdqtune.graph.operators import COMPUTE, CONVOLUTIONS
from qdqtune.placement.possible import can_carry
from qdqtune.search.regions import patterns
from qdqtune.search.regions.discovery import ChildInput, NodeInput, Point, RegionOutput, Scheme
from qdqtune.types import Edge


class _Fields:
    """What is written as a dictionary of its fields."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True)
class ResolvedInsertionPoint(_Fields):
    """One use of a tensor: input `input_index` of node `node_index`; without a node, of the graph as its output."""

    tensor_name: str
    node_index: int | None = None
    input_index: int | None = None


class InsertionPoint(_Fields):
    """A place in a pattern where a pair can stand. The fields say which; `core` is the core's own value."""

    kind: ClassVar[type[Point]]

    @property
    def core(self) -> Point:
        return self.kind(**self.to_dict())

    @classmethod
    def of(cls, point: Point) -> Self:
        """A point of the core."""
        return cls(**{f.name: getattr(point, f.name) for f in fields(cls)})  # type: ignore[arg-type]

    def resolve(self, region: Region, graph: GraphLike) -> set[ResolvedInsertionPoint]:
        """The uses that the point means in a region; none if it is about a child and there are no children.

        Raises:
            InvalidSchemeError: the region has no such point.
        """
        if getattr(self, "region_index", None) is not None and not region.children:
            return set()
        model, point = as_model(graph), self.core
        if isinstance(point, RegionOutput) and point.node_index is not None:
            pattern = pattern_of(model, region)
            nodes = pattern.listings[pattern.instances[0]].nodes
            if point.node_index < len(nodes):  # one that only the region uses as well
                tensor = model.nodes[nodes[point.node_index]].outputs[point.output_index]
                return resolve_region_io_insertion_points(None, model, tensor)
        return resolved(model, region, Scheme(frozenset((point,))))

    @classmethod
    def collect_from_region(cls, region: Region, graph: GraphLike) -> list[Self]:
        """All points of this kind that a region has."""
        points = pattern_of(as_model(graph), region).points
        return [cls.of(point) for point in points if isinstance(point, cls.kind)]


@dataclass(frozen=True)
class NodeInputInsertionPoint(InsertionPoint):
    """See `NodeInput`."""

    node_index: int
    input_index: int
    kind: ClassVar[type[Point]] = NodeInput


@dataclass(frozen=True)
class ChildRegionInputInsertionPoint(InsertionPoint):
    """See `ChildInput`."""

    region_index: int
    input_index: int
    kind: ClassVar[type[Point]] = ChildInput


@dataclass(frozen=True)
class ChildRegionOutputInsertionPoint(InsertionPoint):
    """See `RegionOutput`, of which one of the first two is None."""

    region_index: int | None
    node_index: int | None
    output_index: int
    kind: ClassVar[type[Point]] = RegionOutput


RegionOutputInsertionPoint = ChildRegionOutputInsertionPoint
"""The name that earlier versions of ModelOpt give it."""

PARTS: tuple[tuple[str, str, type[InsertionPoint]], ...] = (
    ("node_inputs", "nodes_insertion_points", NodeInputInsertionPoint),
    ("child_region_inputs", "child_region_inputs", ChildRegionInputInsertionPoint),
    ("region_outputs", "region_outputs", ChildRegionOutputInsertionPoint),
)
"""The lists of points in a scheme: their field, their key in files, and what they hold."""

FEW = 8
"""Tensors with fewer elements carry no pair in ModelOpt's autotuner."""


@dataclass
class InsertionScheme:
    """Insertion points of a pattern that carry a pair; the model's latency with them, and its ratio to that without."""

    node_inputs: list[NodeInputInsertionPoint] = field(default_factory=list)
    child_region_inputs: list[ChildRegionInputInsertionPoint] = field(default_factory=list)
    region_outputs: list[ChildRegionOutputInsertionPoint] = field(default_factory=list)
    latency_ms: float = inf
    error: bool = False
    profile_timestamp: str | None = None
    ratio: float = 1.0

    @classmethod
    def of(cls, scheme: Scheme) -> Self:
        """A scheme of the core."""
        points = sorted(scheme.points, key=repr)
        parts: Any = {name: [kind.of(p) for p in points if isinstance(p, kind.kind)] for name, _, kind in PARTS}
        return cls(**parts)

    @property
    def core(self) -> Scheme:
        """The scheme as the core has it."""
        points = (*self.node_inputs, *self.child_region_inputs, *self.region_outputs)
        return Scheme(frozenset(point.core for point in points))

    @property
    def is_profiled(self) -> bool:
        """Whether it was measured, or could not be."""
        return self.error or self.latency_ms != inf

    @property
    def is_empty(self) -> bool:
        return not self.core.points

    @property
    def hash(self) -> str:
        """32 hex digits that stand for the points, in whatever order they are listed."""
        return hashlib.sha256(repr(sorted(map(repr, self.core.points))).encode()).hexdigest()[:32]

    def distance(self, other: InsertionScheme) -> int:
        """Number of points in which two schemes differ."""
        return self.core.distance(other.core)

    def to_dict(self) -> dict[str, Any]:
        """The scheme as values of JSON, a failure without a latency."""
        points = {key: [point.to_dict() for point in getattr(self, name)] for name, key, _ in PARTS}
        latency_ms = None if self.latency_ms == inf else self.latency_ms
        told = {"error": self.error, "profile_timestamp": self.profile_timestamp, "ratio": self.ratio}
        return {"latency_ms": latency_ms, **told, **points, "hash": self.hash}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave; what is missing is as in a new scheme."""
        told = {name: data[name] for name in ("error", "profile_timestamp", "ratio") if name in data}
        points: Any = {name: [kind.from_dict(point) for point in data.get(key, ())] for name, key, kind in PARTS}
        latency_ms = data.get("latency_ms")
        return cls(**points, **told, latency_ms=inf if latency_ms is None else latency_ms)


def resolved(model: Model, region: Region, scheme: Scheme) -> set[ResolvedInsertionPoint]:
    """The uses that a scheme means in a region, weights along with their activations."""
    pattern = pattern_of(model, region)
    try:
        edges = patterns.resolve(model, pattern, pattern.instances[0], scheme)
    except ValueError as error:
        raise InvalidSchemeError(str(error)) from error
    return uses_at(model, with_weights(model, edges))


def uses_at(model: Model, edges: Iterable[Edge]) -> set[ResolvedInsertionPoint]:
    return {ResolvedInsertionPoint(e.tensor, model.index_of.get(e.node), e.index) for e in edges}


def with_weights(model: Model, edges: Iterable[Edge]) -> frozenset[Edge]:
    """Edges, and the other inputs of the compute operators whose data input is among them: scripts name that alone."""
    edges = frozenset(edges)
    computing = (model.user(e) for e in edges if e.node and e.index == 0)
    return edges | {n.into[1] for n in computing if n is not None and n.op in COMPUTE and len(n.into) > 1}


def has_quantizable_operations(region: Region, graph: GraphLike) -> bool:
    """Whether a region holds an operator that engines quantize, working on floats, or regions that may."""
    if region.type is not RegionType.LEAF and not region.get_region_nodes_and_descendants():
        return True
    model = as_model(graph)
    return patterns.is_quantizable(model, pattern_of(model, region).instances[0])


def skip_invalid_insertion_points(graph: GraphLike, tensor_name: str, region_or_node: object) -> bool:
    """Whether no pair is worth trying between a tensor and a region, or a node, that reads it.

    A node may lie outside of the graph: then it is judged by itself.
    """
    if isinstance(region_or_node, Region):
        model, users = as_model(graph), region_or_node.get_region_nodes_and_descendants()
    else:
        model, index = model_with(graph, region_or_node)
        users = {index}
    return not any(_is_worthwhile(model, tensor_name, use) for use in _uses(model, tensor_name, users))


def resolve_region_io_insertion_points(
    region: Region | None, graph: GraphLike, tensor_name: str
) -> set[ResolvedInsertionPoint]:
    """The uses of a tensor where a pair is worth trying: in a region, or anywhere if nothing in the region reads it."""
    model = as_model(graph)
    everywhere = set(range(len(model.nodes)))
    inside = everywhere if region is None else region.get_region_nodes_and_descendants()
    uses = _uses(model, tensor_name, inside) or _uses(model, tensor_name, everywhere)
    return {ResolvedInsertionPoint(tensor_name, u.node, u.slot) for u in uses if _is_worthwhile(model, tensor_name, u)}


def merge_resolved_insertion_points(
    graph: GraphLike, resolved_insertion_points: Iterable[ResolvedInsertionPoint]
) -> set[ResolvedInsertionPoint]:
    """The same, with one point for the tensor where all nodes that read it are among them."""
    users, points = get_tensor_consumer_node_indices(graph), set(resolved_insertion_points)
    for tensor in {point.tensor_name for point in points}:
        own = {point for point in points if point.tensor_name == tensor}
        if tensor in users and not Counter[int | None](users[tensor]) - Counter(point.node_index for point in own):
            points = points - own | {ResolvedInsertionPoint(tensor)}
    return points


def get_autotuner_quantizable_ops() -> set[str]:
    """Operators that engines run on quantized values."""
    return set(patterns.RUN_IN_8_BITS)


def _uses(model: Model, tensor: str, users: set[int]) -> list[Use]:
    return [use for use in model.uses(tensor) if use.node in users and use.node != GRAPH]


def _is_worthwhile(model: Model, tensor: str, use: Use) -> bool:
    """Whether a pair can stand on a use, and ModelOpt's autotuner would try it there.

    It does not on weights, which have a pair where the activation has one; between a convolution, a normalization and
    an activation, which run as one kernel; on tensors of few elements; and in front of what gives no floats.
    """
    node, info = model.nodes[use.node], model.tensors.get(tensor)
    maker = model.maker(tensor)
    if maker is not None and maker.op == "BatchNormalization" and node.op != maker.op:
        maker = model.maker(maker.inputs[0])
    is_inner = maker is not None and maker.op in CONVOLUTIONS and node.op in {"BatchNormalization", "Relu", "Softmax"}
    is_weight = use.slot > 0 and node.op in COMPUTE | {"BatchNormalization", "Resize"}
    shape = info.shape if info is not None else None
    is_few = bool(shape) and prod(n if isinstance(n, int) else FEW for n in shape or ()) < FEW
    known = onnx.defs.has(node.op) and onnx.defs.get_schema(node.op).outputs
    gives_floats = not known or "tensor(float)" in known[0].types
    return gives_floats and not (is_inner or is_weight or is_few) and can_carry(model, tensor, *use)
