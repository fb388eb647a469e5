"""Configuration, insertion points, schemes and their cache, under the names that scripts know.

All of it turns into values of the core, which do the work.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Self, get_args

from qdqtune.autotune.regions import Grouping, InvalidSchemeError, Region
from qdqtune.errors import BadOption
from qdqtune.graph.model import Model
from qdqtune.search import region as search
from qdqtune.search.regions import cache, patterns
from qdqtune.search.regions import region as core
from qdqtune.search.regions.region import ChildInput, NodeInput, RegionOutput, Scheme
from qdqtune.tuning.subject import DTYPES
from qdqtune.types import QuantType


@dataclass(frozen=True)
class Config(search.Config):
    """What `initialize` takes. Scales come from `calibration_data` (as in `Settings`), random inputs without it.

    `default_q_scale` and `default_q_zero_point` hold for a model that ONNX Runtime cannot run for calibration.
    A scheme counts as better where it is `performance_threshold` times as fast.
    """

    default_quant_type: QuantType = "int8"
    default_dq_dtype: str = "float32"
    default_q_scale: float = 0.1
    default_q_zero_point: int = 0
    performance_threshold: float = 1.02
    verbose: bool = False
    calibration_data: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("default_quant_type", get_args(QuantType)), ("default_dq_dtype", tuple(DTYPES))):
            if getattr(self, name) not in known:
                raise BadOption(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")


NodeInputInsertionPoint = NodeInput
ChildRegionInputInsertionPoint = ChildInput
RegionOutputInsertionPoint = RegionOutput


@dataclass(frozen=True)
class ResolvedInsertionPoint:
    """One use of a tensor: input `input_index` of node `node_index`; without a node, of the graph as its output."""

    tensor_name: str
    node_index: int | None = None
    input_index: int | None = None


@dataclass
class InsertionScheme:
    """Insertion points of a pattern that carry a pair, what the model takes with them, and to that without any pair."""

    node_inputs: list[NodeInput] = field(default_factory=list)
    child_region_inputs: list[ChildInput] = field(default_factory=list)
    region_outputs: list[RegionOutput] = field(default_factory=list)
    latency_ms: float = inf
    error: bool = False
    ratio: float = 1.0

    @classmethod
    def of(cls, scheme: Scheme) -> Self:
        """A scheme of the core."""
        points, made = sorted(scheme.points, key=repr), cls()
        made.node_inputs = [p for p in points if isinstance(p, NodeInput)]
        made.child_region_inputs = [p for p in points if isinstance(p, ChildInput)]
        made.region_outputs = [p for p in points if isinstance(p, RegionOutput)]
        return made

    @property
    def core(self) -> Scheme:
        """The scheme as the core has it."""
        return Scheme(frozenset((*self.node_inputs, *self.child_region_inputs, *self.region_outputs)))

    @property
    def is_profiled(self) -> bool:
        """Whether it was measured, or could not be."""
        return self.error or self.latency_ms != inf

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
    """16 hex digits that stand for the signature, as in the core's pattern."""

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", hashlib.sha256(self.signature.encode()).hexdigest()[:16])

    @classmethod
    def of(cls, pattern: patterns.Pattern) -> Self:
        """A pattern of the core."""
        return cls(pattern.signature, len(pattern.ops), pattern.ops, pattern.digest)

    @classmethod
    def from_region(cls, region: Region, graph: Model) -> Self:
        """The pattern of a region; `graph` is that of the autotuner."""
        return cls.of(Grouping.of(graph, [region]).pattern_of(graph, region))

    def get_full_insertion_scheme(self, region: Region, graph: Model) -> InsertionScheme:
        """All insertion points of a region that has this pattern."""
        return InsertionScheme.of(self._found(region, graph)[0].everything)

    def matches(
        self, other: RegionPattern | Region, graph: Model | None = None, scheme: InsertionScheme | None = None
    ) -> bool | set[ResolvedInsertionPoint]:
        """Whether a pattern, or the pattern of a region, is the same; with a scheme, what that means in the region."""
        if isinstance(other, RegionPattern) or graph is None:
            return self == other
        if scheme is None:
            return self == self.from_region(other, graph)
        edges = patterns.resolve(graph, *self._found(other, graph), scheme.core)
        return {ResolvedInsertionPoint(e.tensor, graph.index_of.get(e.node), e.index) for e in edges}

    def _found(self, region: Region, graph: Model) -> tuple[patterns.Pattern, core.Region]:
        grouping = Grouping.of(graph, [region])
        pattern = grouping.pattern_of(graph, region)
        if pattern.digest != self.digest:
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

    entries: dict[str, PatternSchemes] = field(default_factory=dict)
    """By digest of the pattern."""
    minimum_distance: int = 4
    max_entries_per_pattern: int = 32

    @property
    def num_patterns(self) -> int:
        """Number of patterns."""
        return len(self.entries)

    @property
    def total_schemes(self) -> int:
        """Number of schemes of all patterns."""
        return sum(p.num_schemes for p in self.entries.values())

    def get_pattern_schemes(self, pattern: RegionPattern | str) -> PatternSchemes | None:
        """The schemes of a pattern, or of the pattern of a signature."""
        wanted = RegionPattern(pattern) if isinstance(pattern, str) else pattern
        return self.entries.get(wanted.digest)

    def add_pattern_schemes(self, added: PatternSchemes) -> None:
        """Keep the fastest of old and new schemes, each of them different enough from all faster ones."""
        own, kept = self._own(added.pattern), list[InsertionScheme]()
        for scheme in sorted((*own.schemes, *added.schemes), key=lambda s: s.latency_ms):
            if not scheme.error and all(scheme.distance(other) >= max(self.minimum_distance, 1) for other in kept):
                kept.append(scheme)
        own.schemes = kept[: self.max_entries_per_pattern]

    def add_pattern_from_region(self, region: Region, graph: Model) -> None:
        """Add the pattern of a region, with the scheme of all its points."""
        pattern = RegionPattern.from_region(region, graph)
        self.add_pattern_schemes(PatternSchemes(pattern, [pattern.get_full_insertion_scheme(region, graph)]))

    def put_first(self, pattern: RegionPattern, scheme: InsertionScheme) -> None:
        """Have a scheme tried before all others of its pattern."""
        own = self._own(pattern)
        own.schemes = [scheme, *(s for s in own.schemes if s.distance(scheme))]

    def merge(self, other: PatternCache) -> None:
        """Take over the schemes of another cache."""
        for schemes in other.entries.values():
            self.add_pattern_schemes(schemes)

    def save(self, output_path: str | Path) -> None:
        """Write the file."""
        rows = {digest: [(s.core, s.ratio) for s in own.schemes] for digest, own in self.entries.items()}
        cache.write_cache(Path(output_path), rows, [own.pattern for own in self.entries.values()])

    @classmethod
    def load(cls, input_path: str | Path) -> Self:
        """Read a file of `save` or of a tuning run.

        Raises:
            BadOption: the file is missing, or is no pattern cache.
        """
        entries = {}
        for digest, schemes in cache.read_cache(Path(input_path)).items():
            pattern = RegionPattern("", digest=digest)
            entries[digest] = PatternSchemes(pattern, [*map(InsertionScheme.of, schemes)])
        return cls(entries)

    def _own(self, pattern: RegionPattern) -> PatternSchemes:
        return self.entries.setdefault(pattern.digest, PatternSchemes(pattern))
