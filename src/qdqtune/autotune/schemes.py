"""Configuration, insertion points, schemes and their cache, under the names that scripts know.

All of it turns into values of the core, which do the work.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Self, get_args

from qdqtune import patterns, placements, types
from qdqtune.autotune.regions import Grouping, InvalidSchemeError, Region
from qdqtune.engines import QuantType
from qdqtune.errors import BadOption
from qdqtune.graph import Model
from qdqtune.strategies import region as search
from qdqtune.subject import DTYPES
from qdqtune.types import ChildInput, NodeInput, RegionOutput, Scheme


@dataclass
class Config:
    """What `initialize` takes. Scales come from `calibration_data` (as in `Settings`), random inputs without it.

    `default_q_scale` and `default_q_zero_point` hold for a model that ONNX Runtime cannot run for calibration.
    A scheme counts as better where it is `performance_threshold` times as fast.
    """

    default_quant_type: QuantType = "int8"
    default_dq_dtype: str = "float32"
    default_q_scale: float = 0.1
    default_q_zero_point: int = 0
    performance_threshold: float = 1.02
    top_percent_to_mutate: float = 0.1
    minimum_schemes_to_mutate: int = 10
    maximum_mutations: int = 3
    maximum_generation_attempts: int = 100
    pattern_cache_minimum_distance: int = 4
    pattern_cache_max_entries_per_pattern: int = 32
    maximum_sequence_region_size: int = 10
    minimum_topdown_search_size: int = 10
    verbose: bool = False
    calibration_data: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("quant_type", get_args(QuantType)), ("dq_dtype", tuple(DTYPES))):
            if getattr(self, f"default_{name}") not in known:
                raise BadOption(
                    f"default_{name} is one of {', '.join(known)}, not {getattr(self, f'default_{name}')!r}"
                )

    @property
    def search(self) -> search.Config:
        """The fields that the search has as well."""
        shared = {f.name for f in fields(search.Config)} & vars(self).keys()
        return search.Config(**{name: getattr(self, name) for name in shared})


@dataclass(frozen=True)
class ResolvedInsertionPoint:
    """One use of a tensor: input `input_index` of node `node_index`; without a node, of the graph as its output."""

    tensor_name: str
    node_index: int | None = None
    input_index: int | None = None


class InsertionPoint:
    """What the three kinds have in common. Nodes and child regions are counted in the order of the pattern."""

    def resolve(self, region: Region, graph: Model) -> set[ResolvedInsertionPoint]:
        """The uses of tensors that this point means in a region."""
        return RegionPattern.from_region(region, graph).resolve(region, graph, Scheme(frozenset([_core(self)])))


@dataclass(frozen=True)
class NodeInputInsertionPoint(InsertionPoint):
    """An input of a node."""

    node_index: int
    input_index: int


@dataclass(frozen=True)
class ChildRegionInputInsertionPoint(InsertionPoint):
    """An activation that enters a child region."""

    region_index: int
    input_index: int


@dataclass(frozen=True)
class RegionOutputInsertionPoint(InsertionPoint):
    """What leaves the region: an output of one of its nodes, or of one of its child regions."""

    region_index: int | None
    node_index: int | None
    output_index: int


ChildRegionOutputInsertionPoint = RegionOutputInsertionPoint


def _core(point: InsertionPoint) -> types.Point:
    match point:
        case NodeInputInsertionPoint(node, number):
            return NodeInput(node, number)
        case ChildRegionInputInsertionPoint(region, number):
            return ChildInput(region, number)
        case RegionOutputInsertionPoint(child, of_node, output):
            return RegionOutput(output, of_node, child)
    raise InvalidSchemeError(f"{point!r} is no insertion point")


@dataclass
class InsertionScheme:
    """Insertion points of a pattern that carry a pair, what the model takes with them, and to that without any pair."""

    node_inputs: list[NodeInputInsertionPoint] = field(default_factory=list)
    child_region_inputs: list[ChildRegionInputInsertionPoint] = field(default_factory=list)
    region_outputs: list[RegionOutputInsertionPoint] = field(default_factory=list)
    latency_ms: float = inf
    error: bool = False
    ratio: float = 1.0

    @classmethod
    def of(cls, scheme: Scheme) -> Self:
        """A scheme of the core."""
        made = cls()
        for point in sorted(scheme.points, key=repr):
            match point:
                case NodeInput(node, number):
                    made.node_inputs.append(NodeInputInsertionPoint(node, number))
                case ChildInput(region, number):
                    made.child_region_inputs.append(ChildRegionInputInsertionPoint(region, number))
                case RegionOutput(output, of_node, child):
                    made.region_outputs.append(RegionOutputInsertionPoint(child, of_node, output))
        return made

    @property
    def core(self) -> Scheme:
        """The scheme as the core has it."""
        return Scheme(frozenset(map(_core, (*self.node_inputs, *self.child_region_inputs, *self.region_outputs))))

    @property
    def is_empty(self) -> bool:
        """Whether it has no point."""
        return not self.core.points

    @property
    def is_profiled(self) -> bool:
        """Whether it was measured, or could not be."""
        return self.error or self.latency_ms != inf

    @property
    def hash(self) -> str:
        """32 hex digits, equal for equal points."""
        return hashlib.sha256(repr(sorted(self.core.points, key=repr)).encode()).hexdigest()[:32]

    def distance(self, other: InsertionScheme) -> int:
        """Number of points in which two schemes differ."""
        return self.core.distance(other.core)


@dataclass(frozen=True)
class RegionPattern:
    """A structure that regions share; equal for equal structures, in whatever model. `size` counts nodes."""

    signature: str = field(compare=False)
    size: int = field(default=0, compare=False)
    ops: tuple[str, ...] = field(default=(), compare=False, repr=False)
    digest: str = ""

    @classmethod
    def of(cls, pattern: patterns.Pattern) -> Self:
        """A pattern of the core."""
        return cls(pattern.signature, len(pattern.ops), pattern.ops, pattern.digest)

    @classmethod
    def from_region(cls, region: Region, graph: Model) -> Self:
        """The pattern of a region; `graph` is that of the autotuner.

        Raises:
            InvalidSchemeError: no pair can stand in the region.
        """
        found = Grouping.of(graph, [region]).pattern_of(region)
        if found is None:
            raise InvalidSchemeError(f"{region} has no place for a pair")
        return cls.of(found)

    def get_full_insertion_scheme(self, region: Region, graph: Model) -> InsertionScheme:
        """All insertion points of a region that has this pattern."""
        return InsertionScheme.of(self._found(region, graph)[0].everything)

    def matches(
        self, other: RegionPattern | Region, graph: Model | None = None, scheme: InsertionScheme | None = None
    ) -> bool | set[ResolvedInsertionPoint]:
        """Whether a pattern, or the pattern of a region, is the same; with a scheme, what that means in the region."""
        if isinstance(other, RegionPattern) or graph is None:
            return self == other
        return self == self.from_region(other, graph) if scheme is None else self.resolve(other, graph, scheme.core)

    def resolve(self, region: Region, graph: Model, scheme: Scheme) -> set[ResolvedInsertionPoint]:
        """The uses of tensors that a scheme means in a region that has this pattern."""
        pattern, core = self._found(region, graph)
        edges = patterns.resolve(graph, pattern, core, scheme)
        return {ResolvedInsertionPoint(e.tensor, graph.index_of.get(e.node), e.index) for e in edges}

    def _found(self, region: Region, graph: Model) -> tuple[patterns.Pattern, types.Region]:
        grouping = Grouping.of(graph, [region])
        pattern = grouping.pattern_of(region)
        if pattern is None or pattern.digest != self.digest:
            raise InvalidSchemeError(f"{region} has another pattern")
        return pattern, grouping.cores[region]


@dataclass
class PatternSchemes:
    """The schemes of one pattern that were tried or are to be."""

    pattern: RegionPattern
    schemes: list[InsertionScheme] = field(default_factory=list)

    @property
    def num_schemes(self) -> int:
        """Number of schemes."""
        return len(self.schemes)

    @property
    def best_scheme(self) -> InsertionScheme | None:
        """The fastest that was measured; None before that."""
        measured = [s for s in self.schemes if s.latency_ms != inf and not s.error]
        return min(measured, key=lambda s: s.latency_ms, default=None)


@dataclass
class PatternCache:
    """Schemes worth trying again by pattern, in memory and as the file that a tuning run reads and writes."""

    pattern_schemes: list[PatternSchemes] = field(default_factory=list)
    minimum_distance: int = 4
    max_entries_per_pattern: int = 32

    @property
    def num_patterns(self) -> int:
        """Number of patterns."""
        return len(self.pattern_schemes)

    @property
    def total_schemes(self) -> int:
        """Number of schemes of all patterns."""
        return sum(p.num_schemes for p in self.pattern_schemes)

    def get_pattern_schemes(self, pattern: RegionPattern) -> PatternSchemes | None:
        """The schemes of a pattern."""
        return next((p for p in self.pattern_schemes if p.pattern == pattern), None)

    def add_pattern_schemes(self, added: PatternSchemes) -> None:
        """Keep the fastest of old and new schemes, each of them different enough from all faster ones."""
        own, kept = self._entry(added.pattern), list[InsertionScheme]()
        for scheme in sorted((*own.schemes, *added.schemes), key=lambda s: s.latency_ms):
            if not scheme.error and all(scheme.distance(other) >= max(self.minimum_distance, 1) for other in kept):
                kept.append(scheme)
        own.schemes = kept[: self.max_entries_per_pattern]

    def put_first(self, pattern: RegionPattern, scheme: InsertionScheme) -> None:
        """Have a scheme tried before all others of its pattern."""
        own = self._entry(pattern)
        own.schemes = [scheme, *(s for s in own.schemes if s.distance(scheme))]

    def merge(self, other: PatternCache) -> None:
        """Take over the schemes of another cache."""
        for schemes in other.pattern_schemes:
            self.add_pattern_schemes(schemes)

    def save(self, output_path: str | Path) -> None:
        """Write the file."""
        rows = {p.pattern.digest: [(s.core, s.ratio) for s in p.schemes] for p in self.pattern_schemes}
        placements.write_cache(Path(output_path), rows, [p.pattern for p in self.pattern_schemes])

    @classmethod
    def load(cls, input_path: str | Path) -> Self:
        """Read a file of `save` or of a tuning run.

        Raises:
            BadOption: the file is missing, or is no pattern cache.
        """
        found = placements.read_cache(Path(input_path))
        return cls([PatternSchemes(RegionPattern("", digest=digest), [*map(InsertionScheme.of, schemes)])
                    for digest, schemes in found.items()])  # fmt: skip

    def _entry(self, pattern: RegionPattern) -> PatternSchemes:
        found = self.get_pattern_schemes(pattern)
        if found is None:
            found = PatternSchemes(pattern)
            self.pattern_schemes.append(found)
        return found
