"""Configuration, patterns with their schemes, and their cache; and all names of the module that scripts import from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, Self, get_args

from qdqtune.autotune.graphs import (
    AutotunerError,
    AutotunerNotInitializedError,
    GraphLike,
    InvalidSchemeError,
    Region,
    RegionType,
    as_model,
    pattern_of,
)
from qdqtune.autotune.insertion_points import (
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    InsertionPoint,
    InsertionScheme,
    NodeInputInsertionPoint,
    RegionOutputInsertionPoint,
    ResolvedInsertionPoint,
)
from qdqtune.autotune.region_pattern import RegionPattern
from qdqtune.errors import BadOption
from qdqtune.placement.files import parsed_yaml, write_yaml, wrong_part
from qdqtune.search import region as search
from qdqtune.search.regions import cache
from qdqtune.search.regions.patterns import scheme_of
from qdqtune.tuning.subject import FLOAT_TYPES
from qdqtune.types import QuantType

__all__ = [
    "AutotunerError", "AutotunerNotInitializedError", "ChildRegionInputInsertionPoint",
    "ChildRegionOutputInsertionPoint", "Config", "InsertionPoint", "InsertionScheme", "InvalidSchemeError",
    "NodeInputInsertionPoint", "PatternCache", "PatternSchemes", "Region", "RegionOutputInsertionPoint",
    "RegionPattern", "RegionType", "ResolvedInsertionPoint",
]  # fmt: skip

_SEARCH = search.Config()
"""The defaults of region search."""


@dataclass
class Config:
    """What `initialize` takes. Scales come from `calibration_data` (as in `Settings`), random inputs without it.

    `default_q_scale` and `default_q_zero_point` hold for a model that ONNX Runtime cannot run for calibration.
    A scheme counts as better where it is `performance_threshold` times as fast. Fields may be changed until then.
    """

    verbose: bool = False
    performance_threshold: float = 1.02
    default_q_scale: float = 0.1
    default_q_zero_point: int = 0
    default_quant_type: QuantType = "int8"
    default_dq_dtype: str = "float32"
    maximum_sequence_region_size: int = _SEARCH.maximum_sequence_region_size
    minimum_topdown_search_size: int = _SEARCH.minimum_topdown_search_size
    top_percent_to_mutate: float = _SEARCH.top_percent_to_mutate
    minimum_schemes_to_mutate: int = _SEARCH.minimum_schemes_to_mutate
    maximum_mutations: int = _SEARCH.maximum_mutations
    maximum_generation_attempts: int = _SEARCH.maximum_generation_attempts
    pattern_cache_minimum_distance: int = _SEARCH.pattern_cache_minimum_distance
    pattern_cache_max_entries_per_pattern: int = _SEARCH.pattern_cache_max_entries_per_pattern
    schemes_per_region: int = _SEARCH.schemes_per_region
    calibration_data: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> search.Config:
        """Check the values, and return them as the `Config` of `search.region`.

        Raises:
            BadOption: a value is none of those that there are.
        """
        for name, known in (("default_quant_type", get_args(QuantType)), ("default_dq_dtype", tuple(FLOAT_TYPES))):
            if getattr(self, name) not in known:
                raise BadOption(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")
        return search.Config(**{f.name: getattr(self, f.name) for f in fields(search.Config)})


@dataclass
class PatternSchemes:
    """The schemes of one pattern that were tried or are to be."""

    pattern: RegionPattern = field(default_factory=lambda: RegionPattern("EMPTY"))
    schemes: list[InsertionScheme] = field(default_factory=list)

    @property
    def pattern_signature(self) -> str:
        """That of the pattern; empty where it is not known, as in files of a tuning run."""
        return self.pattern.signature

    @property
    def pattern_size(self) -> int:
        """Number of nodes of the pattern."""
        return self.pattern.size

    @property
    def num_schemes(self) -> int:
        return len(self.schemes)

    @property
    def best_scheme(self) -> InsertionScheme | None:
        """The fastest that was measured; None before that."""
        measured = [s for s in self.schemes if s.latency_ms != inf and not s.error]
        return min(measured, key=lambda s: s.latency_ms, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The schemes as values of JSON; of the pattern its name, size, operators and digest."""
        own = self.pattern
        known = {"pattern_signature": own.signature, "pattern_size": own.size, "ops": [*own.ops], "digest": own.digest}
        return {**known, "schemes": [scheme.to_dict() for scheme in self.schemes]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], pattern: RegionPattern | None = None) -> Self:
        """What `to_dict` gave, or ModelOpt's own; of that pattern, if it is given."""
        known = data["pattern_signature"], data.get("pattern_size", 0), tuple(data.get("ops", ()))
        schemes = [InsertionScheme.from_dict(scheme) for scheme in data.get("schemes", ())]
        return cls(pattern or RegionPattern(*known, data.get("digest", "")), schemes)


@dataclass
class PatternCache:
    """Schemes worth trying again by pattern, in memory and as the file that a tuning run reads and writes."""

    pattern_schemes: list[PatternSchemes] = field(default_factory=list)
    minimum_distance: int = _SEARCH.pattern_cache_minimum_distance
    max_entries_per_pattern: int = _SEARCH.pattern_cache_max_entries_per_pattern

    @property
    def num_patterns(self) -> int:
        return len(self.pattern_schemes)

    @property
    def total_schemes(self) -> int:
        """Number of schemes of all patterns."""
        return sum(own.num_schemes for own in self.pattern_schemes)

    def get_pattern_schemes(self, pattern_signature: RegionPattern | str) -> PatternSchemes | None:
        """The schemes of a pattern, or of the pattern of a signature."""
        pattern = RegionPattern(pattern_signature) if isinstance(pattern_signature, str) else pattern_signature
        return next((own for own in self.pattern_schemes if own.pattern == pattern), None)

    def has_pattern(self, pattern_signature: RegionPattern | str) -> bool:
        return self.get_pattern_schemes(pattern_signature) is not None

    def add_pattern_schemes(self, pattern_schemes: PatternSchemes) -> None:
        """Keep the fastest of old and new schemes, each of them different enough from all faster ones."""
        own, kept = self._own(pattern_schemes.pattern), list[InsertionScheme]()
        for scheme in sorted((*own.schemes, *pattern_schemes.schemes), key=lambda s: s.latency_ms):
            if not scheme.error and all(scheme.distance(other) >= max(self.minimum_distance, 1) for other in kept):
                kept.append(scheme)
        own.schemes = kept[: self.max_entries_per_pattern]

    def add_pattern_from_region(
        self, region: Region, graph: GraphLike, quantized_tensors: Collection[str] | None = None
    ) -> None:
        """Add the pattern of a region, with the scheme of the points at which a quantized model has pairs: those whose
        tensor is among `quantized_tensors`. Without them it has all points."""
        model = as_model(graph)
        pattern = pattern_of(model, region)
        scheme = pattern.everything
        if quantized_tensors is not None:
            edges = [edge for tensor in quantized_tensors for edge in model.edges(tensor)]
            scheme = scheme_of(model, pattern, pattern.instances[0], edges)
        self.add_pattern_schemes(PatternSchemes(RegionPattern.of(pattern), [InsertionScheme.of(scheme)]))

    def put_first(self, pattern: RegionPattern, scheme: InsertionScheme) -> None:
        """Have a scheme tried before all others of its pattern."""
        own = self._own(pattern)
        own.schemes = [scheme, *(s for s in own.schemes if s.distance(scheme))]

    def merge(self, other: PatternCache, prefer_existing: bool = True) -> None:
        """Take over the schemes of another cache. A scheme that both have keeps the latency it has here if so asked."""
        for theirs in other.pattern_schemes:
            own = self._own(theirs.pattern)
            last, first = (own, theirs) if prefer_existing else (theirs, own)
            merged = {scheme.hash: scheme for scheme in (*first.schemes, *last.schemes)}
            own.schemes = []
            self.add_pattern_schemes(PatternSchemes(own.pattern, [*merged.values()]))

    def to_dict(self) -> dict[str, Any]:
        """The cache as values of JSON."""
        return {
            "minimum_distance": self.minimum_distance,
            "max_entries_per_pattern": self.max_entries_per_pattern,
            "pattern_schemes": [own.to_dict() for own in self.pattern_schemes],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave, or ModelOpt's own; patterns of the latter are those of no model here."""
        own = [PatternSchemes.from_dict(entry) for entry in data.get("pattern_schemes", ())]
        numbers = ("minimum_distance", "max_entries_per_pattern")
        return cls(own, **{name: data[name] for name in numbers if name in data})

    def save(self, output_path: str | Path) -> None:
        """Write the file: what a tuning run reads of it, and the schemes as they are here."""
        rows = {own.pattern.digest: [(s.core, s.ratio) for s in own.schemes] for own in self.pattern_schemes}
        content = cache.content_of(rows, [own.pattern for own in self.pattern_schemes])
        write_yaml(Path(output_path), {**content, "interface": self.to_dict()}, "record")

    @classmethod
    def load(cls, input_path: str | Path) -> Self:
        """Read a file of `save`, of a tuning run, or of ModelOpt, whose patterns are those of no model here.

        Raises:
            BadOption: the file is missing, or is no pattern cache.
        """
        path = Path(input_path)
        content = parsed_yaml(path, "pattern cache")
        known = content.get("interface", content) if isinstance(content, dict) else {}
        if "pattern_schemes" in known:
            try:
                return cls.from_dict(known)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise BadOption(f"{path} is no pattern cache: {wrong_part(error)}") from error
        entries = cache.read_cache(path).items()
        return cls([PatternSchemes(RegionPattern("", digest=d), [*map(InsertionScheme.of, s)]) for d, s in entries])

    def _own(self, pattern: RegionPattern) -> PatternSchemes:
        known = self.get_pattern_schemes(pattern)
        if known is None:
            known = PatternSchemes(pattern)
            self.pattern_schemes.append(known)
        return known
