"""ModelOpt's configuration, insertion points, schemes, patterns with their schemes, and pattern cache."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from math import inf, prod
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

import msgspec
import onnx
from msgspec import Struct
from msgspec.structs import astuple

from qdqtune.autotune.region_search import AutotunerError as AutotunerError
from qdqtune.autotune.region_search import AutotunerNotInitializedError as AutotunerNotInitializedError
from qdqtune.autotune.region_search import GraphLike, InvalidSchemeError, Region, as_model, pattern_of, sketch
from qdqtune.autotune.region_search import has_quantizable_operations as has_quantizable_operations
from qdqtune.errors import BadOption, one_line
from qdqtune.graph.model import Model
from qdqtune.graph.operators import COMPUTE, CONVOLUTIONS
from qdqtune.graph_utils import get_tensor_consumer_node_indices
from qdqtune.placement.files import read_yaml, write_yaml
from qdqtune.placement.possible import can_carry
from qdqtune.search import region as search
from qdqtune.search.regions import cache, patterns
from qdqtune.search.regions.discovery import Point, PointKind, Scheme
from qdqtune.search.regions.discovery import RegionType as RegionType
from qdqtune.tuning.subject import FLOAT_TYPES
from qdqtune.types import Edge, QuantType


@dataclass
class Config:
    """Settings for `initialize`. Scales come from `calibration_data` (as in `Settings`), or random inputs without it;
    `default_q_scale` and `default_q_zero_point` are used for a model that ONNX Runtime cannot run. A scheme counts as
    better if it is `performance_threshold` times as fast.
    """

    verbose: bool = False
    performance_threshold: float = 1.02
    default_q_scale: float = 0.1
    default_q_zero_point: int = 0
    default_quant_type: QuantType = "int8"
    default_dq_dtype: str = "float32"
    maximum_sequence_region_size: int = search.Config.maximum_sequence_region_size
    minimum_topdown_search_size: int = search.Config.minimum_topdown_search_size
    top_percent_to_mutate: float = search.Config.top_percent_to_mutate
    minimum_schemes_to_mutate: int = search.Config.minimum_schemes_to_mutate
    maximum_mutations: int = search.Config.maximum_mutations
    maximum_generation_attempts: int = search.Config.maximum_generation_attempts
    pattern_cache_minimum_distance: int = search.Config.pattern_cache_minimum_distance
    pattern_cache_max_entries_per_pattern: int = search.Config.pattern_cache_max_entries_per_pattern
    schemes_per_region: int = search.Config.schemes_per_region
    calibration_data: str | None = None

    def check(self) -> search.Config:
        for name, values in (("default_quant_type", get_args(QuantType)), ("default_dq_dtype", tuple(FLOAT_TYPES))):
            if getattr(self, name) not in values:
                raise BadOption(f"{name} is one of {', '.join(values)}, not {getattr(self, name)!r}")
        return search.Config(**{f.name: getattr(self, f.name) for f in fields(search.Config)})


# Insertion points


class Values:
    def to_dict(self) -> Any:
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return msgspec.convert(data, cls)


class ResolvedInsertionPoint(Values, Struct, frozen=True):
    """One use of a tensor: input `input_index` of node `node_index`; if that is None, output of the graph."""

    tensor_name: str
    node_index: int | None = None
    input_index: int | None = None


class InsertionPoint(Values, Struct, frozen=True):
    """A place in a pattern where a pair can stand, with ModelOpt's field names. The last field is the number of an
    input or output; those before it are its possible owners (a node, a child region), of which exactly one is set.
    `kinds` names the kind of `Point` for each owner."""

    kinds: ClassVar[tuple[PointKind, ...]]

    @property
    def core(self) -> Point:
        *owners, number = astuple(self)
        for kind, owner in zip(self.kinds, owners, strict=True):
            if owner is not None:
                return Point(kind, owner, number)
        raise InvalidSchemeError("an output is that of a node or of a child region: give the number of one")

    @classmethod
    def among(cls, points: Iterable[Point]) -> list[Self]:
        return [
            cls(*(point.owner if kind == point.kind else None for kind in cls.kinds), point.number)
            for point in sorted(points)
            if point.kind in cls.kinds
        ]

    def resolve(self, region: Region, graph: GraphLike) -> set[ResolvedInsertionPoint]:
        """The uses in a region to which the point refers; none if it is of a child region, and the region has none."""
        if getattr(self, "region_index", None) is not None and not region.children:
            return set()
        model, point = as_model(graph), self.core
        pattern = pattern_of(model, region)
        if point.kind == "node_output":
            nodes = pattern.listings[pattern.instances[0]].nodes
            if point.owner < len(nodes):  # one that only the region uses as well
                tensor = model.nodes[nodes[point.owner]].outputs[point.number]
                return resolve_region_io_insertion_points(None, model, tensor)
        return uses_at(model, InsertionScheme.of(frozenset((point,))).edges(pattern))

    @classmethod
    def collect_from_region(cls, region: Region, graph: GraphLike) -> list[Self]:
        return cls.among(pattern_of(as_model(graph), region).points)


class NodeInputInsertionPoint(InsertionPoint, frozen=True):
    node_index: int
    input_index: int
    kinds: ClassVar[tuple[PointKind, ...]] = ("node_input",)


class ChildRegionInputInsertionPoint(InsertionPoint, frozen=True):
    region_index: int
    input_index: int
    kinds: ClassVar[tuple[PointKind, ...]] = ("child_input",)


class ChildRegionOutputInsertionPoint(InsertionPoint, frozen=True):
    """An output of a child region or of a node; the index of the other one is None."""

    region_index: int | None
    node_index: int | None
    output_index: int
    kinds: ClassVar[tuple[PointKind, ...]] = ("child_output", "node_output")


RegionOutputInsertionPoint = ChildRegionOutputInsertionPoint
"""The name in earlier versions of ModelOpt."""


class InsertionScheme(Values, Struct, rename={"node_inputs": "nodes_insertion_points"}):
    """The points of a pattern that carry a pair; the model's latency with them in ms, and its ratio to that without.
    The latency is infinite if it was not measured, or if that failed, which sets `error`."""

    node_inputs: list[NodeInputInsertionPoint] = []
    child_region_inputs: list[ChildRegionInputInsertionPoint] = []
    region_outputs: list[ChildRegionOutputInsertionPoint] = []
    latency_ms: float = inf
    error: bool = False
    ratio: float = 1.0

    @classmethod
    def of(cls, scheme: Scheme) -> Self:
        return cls(
            NodeInputInsertionPoint.among(scheme),
            ChildRegionInputInsertionPoint.among(scheme),
            ChildRegionOutputInsertionPoint.among(scheme),
        )

    @property
    def core(self) -> Scheme:
        points = (*self.node_inputs, *self.child_region_inputs, *self.region_outputs)
        return frozenset(point.core for point in points)

    @property
    def is_profiled(self) -> bool:
        return self.error or self.latency_ms != inf

    @property
    def is_empty(self) -> bool:
        return not self.core

    @property
    def hash(self) -> str:
        """32 hex digits of a hash of the points, whatever their order."""
        return hashlib.sha256(repr(sorted(map(repr, self.core))).encode()).hexdigest()[:32]

    def distance(self, other: InsertionScheme) -> int:
        return len(self.core ^ other.core)

    def edges(self, pattern: patterns.Pattern) -> frozenset[Edge]:
        """The edges of the points in all instances of a pattern. If the data input of a compute operator is among them,
        so is its weight."""
        try:
            edges = frozenset().union(*(patterns.resolve(pattern, region, self.core) for region in pattern.instances))
        except ValueError as error:
            raise InvalidSchemeError(str(error)) from error
        computing = (pattern.model.user(e) for e in edges if e.node and e.index == 0)
        return edges | {n.into[1] for n in computing if n is not None and n.op in COMPUTE and len(n.into) > 1}


def uses_at(model: Model, edges: Iterable[Edge]) -> set[ResolvedInsertionPoint]:
    return {ResolvedInsertionPoint(e.tensor, model.index_of.get(e.node), e.index) for e in edges}


def skip_invalid_insertion_points(graph: GraphLike, tensor_name: str, region_or_node: Any) -> bool:
    """Whether no pair is worth trying between a tensor and a region or node (of any graph) that reads it."""
    model, node = as_model(graph), region_or_node
    if isinstance(node, Region):
        return not _worthwhile(model, tensor_name, node.all_nodes())
    outputs = getattr(node, "outputs", None) or getattr(node, "output", None) or [""]
    index = model.producers.get(getattr(outputs[0], "name", outputs[0]), model.index_of.get(str(node)))
    if index is None:
        model, index = sketch([node], node.inputs, ()), 0
    return not _worthwhile(model, tensor_name, (index,))


def resolve_region_io_insertion_points(
    region: Region | None, graph: GraphLike, tensor_name: str
) -> set[ResolvedInsertionPoint]:
    """The uses of a tensor where a pair is worth trying: those in the region, or all if it has none."""
    model = as_model(graph)
    inside = () if region is None else region.all_nodes()
    return _worthwhile(model, tensor_name, inside) or _worthwhile(model, tensor_name, range(len(model.nodes)))


def merge_resolved_insertion_points(
    graph: GraphLike, resolved_insertion_points: Iterable[ResolvedInsertionPoint]
) -> set[ResolvedInsertionPoint]:
    """The same points, but where all nodes that read a tensor are among them, one point for the whole tensor."""
    users, points = get_tensor_consumer_node_indices(graph), set(resolved_insertion_points)
    for tensor in {point.tensor_name for point in points}:
        own = {point for point in points if point.tensor_name == tensor}
        if tensor in users and Counter[int | None](users[tensor]) <= Counter(point.node_index for point in own):
            points = points - own | {ResolvedInsertionPoint(tensor)}
    return points


FEW = 8
"""Tensors with fewer elements carry no pair in ModelOpt's autotuner."""


def _worthwhile(model: Model, tensor: str, users: Collection[int]) -> set[ResolvedInsertionPoint]:
    """The uses of a tensor by the nodes `users` where a pair can stand, and where ModelOpt's autotuner would try one.

    It does not on weights, whose pairs follow from the activation; between a convolution, a normalization and an
    activation function, which run as one kernel; on tensors of few elements; in front of nodes that return no floats.
    """
    points = set()
    info = model.tensors.get(tensor)
    is_few = info is not None and bool(info.sizes) and prod(info.sizes or ()) < FEW
    for index, slot in model.uses(tensor):
        if index not in users or is_few or not can_carry(model, tensor, index, slot):
            continue
        node, maker = model.nodes[index], model.maker(tensor)
        if maker is not None and maker.op == "BatchNormalization" and node.op != maker.op:
            maker = model.maker(maker.inputs[0])
        is_behind = maker is not None and maker.op in CONVOLUTIONS
        is_inner = is_behind and node.op in {"BatchNormalization", "Relu", "Softmax"}
        is_weight = slot > 0 and node.op in COMPUTE | {"BatchNormalization", "Resize"}
        outputs = onnx.defs.get_schema(node.op).outputs if onnx.defs.has(node.op) else ()
        gives_floats = not outputs or "tensor(float)" in outputs[0].types
        if gives_floats and not is_inner and not is_weight:
            points.add(ResolvedInsertionPoint(tensor, index, slot))
    return points


# Patterns


@dataclass(frozen=True)
class RegionPattern:
    """A structure of `size` nodes that regions share, also across models. Patterns are equal if their `digest` is."""

    signature: str = field(compare=False)
    size: int = field(default=0, compare=False)
    digest: str = ""
    """16 hex digits of a hash of the signature, as in the search's pattern."""

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", self.get_hash()[:16])

    def __str__(self) -> str:
        return self.signature

    @classmethod
    def of(cls, pattern: patterns.Pattern) -> Self:
        return cls(pattern.signature, len(pattern.ops))

    @classmethod
    def from_region(cls, region: Region, graph: GraphLike) -> Self:
        return cls.of(pattern_of(as_model(graph), region)) if region.all_nodes() else cls("EMPTY")

    @property
    def is_empty(self) -> bool:
        return self.size == 0

    @property
    def is_composite(self) -> bool:
        return self.signature.startswith("COMPOSITE(")

    @property
    def is_leaf(self) -> bool:
        return not self.is_composite and not self.is_empty

    def get_hash(self) -> str:
        return hashlib.sha256(self.signature.encode()).hexdigest()[:32]

    def get_short_signature(self, max_length: int = 80) -> str:
        return self.signature if len(self.signature) <= max_length else f"{self.signature[: max_length - 3]}..."

    def get_full_insertion_scheme(self, region: Region, graph: GraphLike) -> InsertionScheme:
        if self != self.from_region(region, graph):
            raise InvalidSchemeError(f"region {region.id} has another pattern")
        return InsertionScheme.of(pattern_of(as_model(graph), region).everything)

    def matches(
        self, other: RegionPattern | Region, graph: GraphLike | None = None, scheme: InsertionScheme | None = None
    ) -> Any:
        """Given a pattern: whether it is equal (bool). Given a region: its nodes in the pattern's order (list[int]), or
        None if it has another pattern. Given a scheme as well: its uses in the region (set[ResolvedInsertionPoint])."""
        if isinstance(other, RegionPattern):
            return self == other
        if graph is None:
            raise InvalidSchemeError("a region is compared in its graph: give the graph as well")
        model = as_model(graph)
        if self != self.from_region(other, model):
            return None
        if self.is_empty:
            return []
        pattern = pattern_of(model, other)
        if scheme is not None:
            return uses_at(model, scheme.edges(pattern))
        return list(pattern.listings[pattern.instances[0]].nodes)

    def format_tree(self, region: Region, graph: GraphLike, indent: int = 0) -> str:
        model = as_model(graph)
        pattern = RegionPattern.from_region(region, model)
        ops = ", ".join(model.nodes[n].op for n in region.get_nodes())
        line = f"{'  ' * indent}Region {region.id}: {pattern.get_short_signature()} ({pattern.size} nodes) {ops}"
        return "\n".join([line, *(self.format_tree(child, model, indent + 1) for child in region.children)])


class PatternSchemes(Values, Struct):
    pattern: RegionPattern = RegionPattern("EMPTY")
    schemes: list[InsertionScheme] = []

    @property
    def pattern_signature(self) -> str:
        """Empty if unknown, as in files of a tuning run."""
        return self.pattern.signature

    @property
    def num_schemes(self) -> int:
        return len(self.schemes)

    @property
    def best_scheme(self) -> InsertionScheme | None:
        measured = [s for s in self.schemes if s.latency_ms != inf and not s.error]
        return min(measured, key=lambda s: s.latency_ms, default=None)


class PatternCache(Values, Struct):
    """The best schemes by pattern, to try again; in memory, and as the file that a tuning run reads and writes."""

    pattern_schemes: list[PatternSchemes] = []
    minimum_distance: int = search.Config.pattern_cache_minimum_distance
    max_entries_per_pattern: int = search.Config.pattern_cache_max_entries_per_pattern

    @property
    def num_patterns(self) -> int:
        return len(self.pattern_schemes)

    def get_pattern_schemes(self, pattern_signature: RegionPattern | str) -> PatternSchemes | None:
        pattern = RegionPattern(pattern_signature) if isinstance(pattern_signature, str) else pattern_signature
        return next((own for own in self.pattern_schemes if own.pattern == pattern), None)

    def add_pattern_schemes(self, pattern_schemes: PatternSchemes) -> None:
        """Keep the fastest of old and new schemes, without failed ones and those too similar to a faster one."""
        own, kept = self.get_pattern_schemes(pattern_schemes.pattern), list[InsertionScheme]()
        if own is None:
            own = PatternSchemes(pattern_schemes.pattern)
            self.pattern_schemes.append(own)
        for scheme in sorted((*own.schemes, *pattern_schemes.schemes), key=lambda s: s.latency_ms):
            if not scheme.error and all(scheme.distance(other) >= max(self.minimum_distance, 1) for other in kept):
                kept.append(scheme)
        own.schemes = kept[: self.max_entries_per_pattern]

    def add_pattern_from_region(
        self, region: Region, graph: GraphLike, quantized_tensors: Collection[str] | None = None
    ) -> None:
        """Add the pattern of a region with a scheme of all its points, or of those on `quantized_tensors`."""
        model = as_model(graph)
        pattern = pattern_of(model, region)
        scheme = pattern.everything
        if quantized_tensors is not None:
            edges = chain.from_iterable(map(model.edges, quantized_tensors))
            scheme = patterns.scheme_of(pattern, pattern.instances[0], [*edges])
        if scheme:
            self.add_pattern_schemes(PatternSchemes(RegionPattern.of(pattern), [InsertionScheme.of(scheme)]))

    def merge(self, other: PatternCache, prefer_existing: bool = True) -> None:
        """Add the schemes of another cache; with `prefer_existing` only for patterns that this one lacks."""
        for theirs in other.pattern_schemes:
            if not (prefer_existing and self.get_pattern_schemes(theirs.pattern)):
                self.add_pattern_schemes(theirs)

    def save(self, output_path: str | Path) -> None:
        rows = {own.pattern.digest: [(s.core, s.ratio) for s in own.schemes] for own in self.pattern_schemes}
        write_yaml(Path(output_path), {**cache.content_of(rows), "interface": self.to_dict()}, "record")

    @classmethod
    def load(cls, input_path: str | Path) -> Self:
        path = Path(input_path)
        content = read_yaml(path, "pattern cache")
        if "interface" not in content:
            entries = cache.read_cache(path).items()
            return cls([PatternSchemes(RegionPattern("", digest=d), [*map(InsertionScheme.of, s)]) for d, s in entries])
        try:
            return cls.from_dict(content["interface"])
        except ValueError as error:
            raise BadOption(f"{path} is no pattern cache: {one_line(error)}") from error
