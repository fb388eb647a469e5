"""Configuration and schemes, under the names that scripts know. Both turn into values of the core."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, Self, get_args

from qdqtune.autotune.insertion_points import (
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    NodeInputInsertionPoint,
)
from qdqtune.errors import BadOption
from qdqtune.search import region as search
from qdqtune.search.regions.region import ChildInput, NodeInput, RegionOutput, Scheme
from qdqtune.tuning.subject import FLOAT_TYPES
from qdqtune.types import QuantType


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
    maximum_sequence_region_size: int = 10
    minimum_topdown_search_size: int = 10
    top_percent_to_mutate: float = 0.1
    minimum_schemes_to_mutate: int = 10
    maximum_mutations: int = 3
    maximum_generation_attempts: int = 100
    pattern_cache_minimum_distance: int = 4
    pattern_cache_max_entries_per_pattern: int = 32
    schemes_per_region: int = 50
    calibration_data: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> search.Config:
        """The constants of the search, as the core has them.

        Raises:
            BadOption: a value is none of those that there are.
        """
        for name, known in (("default_quant_type", get_args(QuantType)), ("default_dq_dtype", tuple(FLOAT_TYPES))):
            if getattr(self, name) not in known:
                raise BadOption(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")
        return search.Config(**{f.name: getattr(self, f.name) for f in fields(search.Config)})


@dataclass
class InsertionScheme:
    """Insertion points of a pattern that carry a pair, what the model takes with them, and to that without any pair."""

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
        points, made = sorted(scheme.points, key=repr), cls()
        made.node_inputs = [NodeInputInsertionPoint.of(p) for p in points if isinstance(p, NodeInput)]
        made.child_region_inputs = [ChildRegionInputInsertionPoint.of(p) for p in points if isinstance(p, ChildInput)]
        made.region_outputs = [ChildRegionOutputInsertionPoint.of(p) for p in points if isinstance(p, RegionOutput)]
        return made

    @property
    def core(self) -> Scheme:
        """The scheme as the core has it."""
        return Scheme(
            frozenset(point.core for point in (*self.node_inputs, *self.child_region_inputs, *self.region_outputs))
        )

    @property
    def is_profiled(self) -> bool:
        """Whether it was measured, or could not be."""
        return self.error or self.latency_ms != inf

    @property
    def is_empty(self) -> bool:
        """Whether it has no points."""
        return not (self.node_inputs or self.child_region_inputs or self.region_outputs)

    @property
    def hash(self) -> str:
        """32 hex digits that stand for the points, in whatever order they are listed."""
        return hashlib.sha256(repr(sorted(map(repr, self.core.points))).encode()).hexdigest()[:32]

    def distance(self, other: InsertionScheme) -> int:
        """Number of points in which two schemes differ."""
        return self.core.distance(other.core)

    def to_dict(self) -> dict[str, Any]:
        """The scheme as plain values."""
        return {
            "latency_ms": self.latency_ms,
            "error": self.error,
            "profile_timestamp": self.profile_timestamp,
            "nodes_insertion_points": [point.to_dict() for point in self.node_inputs],
            "child_region_inputs": [point.to_dict() for point in self.child_region_inputs],
            "region_outputs": [point.to_dict() for point in self.region_outputs],
            "hash": self.hash,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave; what is missing is as in a new scheme."""
        return cls(
            [NodeInputInsertionPoint.from_dict(point) for point in data.get("nodes_insertion_points", ())],
            [ChildRegionInputInsertionPoint.from_dict(point) for point in data.get("child_region_inputs", ())],
            [ChildRegionOutputInsertionPoint.from_dict(point) for point in data.get("region_outputs", ())],
            data.get("latency_ms", inf),
            data.get("error", False),
            data.get("profile_timestamp"),
        )
