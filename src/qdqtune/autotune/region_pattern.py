"""What regions of equal structure have in common, under the name that scripts know."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Self

from qdqtune.autotune.graphs import GraphLike, InvalidSchemeError, Region, as_model, pattern_of
from qdqtune.autotune.insertion_points import InsertionScheme, resolved
from qdqtune.search.regions.patterns import Pattern


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
            object.__setattr__(self, "digest", self.get_hash()[:16])

    def __str__(self) -> str:
        return self.signature

    @classmethod
    def of(cls, pattern: Pattern) -> Self:
        """A pattern of the core."""
        return cls(pattern.signature, len(pattern.ops), pattern.ops, pattern.digest)

    @classmethod
    def from_region(cls, region: Region, graph: GraphLike) -> Self:
        """The pattern of a region; of one without nodes the empty one."""
        if not region.get_region_nodes_and_descendants():
            return cls("EMPTY")
        return cls.of(pattern_of(as_model(graph), region))

    @property
    def is_empty(self) -> bool:
        return self.size == 0 or self.signature == "EMPTY"

    @property
    def is_composite(self) -> bool:
        return self.signature.startswith("COMPOSITE(")

    @property
    def is_leaf(self) -> bool:
        return not self.is_composite and not self.is_empty

    def get_hash(self) -> str:
        """32 hex digits that stand for the signature."""
        return hashlib.sha256(self.signature.encode()).hexdigest()[:32]

    def get_short_signature(self, max_length: int = 80) -> str:
        return self.signature if len(self.signature) <= max_length else f"{self.signature[: max_length - 3]}..."

    def get_full_insertion_scheme(self, region: Region, graph: GraphLike) -> InsertionScheme:
        """All insertion points of a region that has this pattern."""
        self._check(region, graph)
        return InsertionScheme.of(pattern_of(as_model(graph), region).everything)

    def matches(
        self, other: RegionPattern | Region, graph: GraphLike | None = None, scheme: InsertionScheme | None = None
    ) -> Any:
        """Whether a pattern is the same (bool); with a region its nodes in the pattern's order (list[int]), None if it
        has another one; with a scheme as well what that means there (set[ResolvedInsertionPoint]).

        Raises:
            InvalidSchemeError: a region without a graph, or a scheme for a region of another pattern.
        """
        if isinstance(other, RegionPattern):
            return self == other
        if graph is None:
            raise InvalidSchemeError("a region is compared in its graph: give the graph as well")
        if scheme is not None:
            self._check(other, graph)
            return resolved(as_model(graph), other, scheme.core)
        if self != self.from_region(other, graph):
            return None
        if self.is_empty:
            return []
        pattern = pattern_of(as_model(graph), other)
        return list(pattern.listings[pattern.instances[0]].nodes)

    def _check(self, region: Region, graph: GraphLike) -> None:
        if self != self.from_region(region, graph):
            raise InvalidSchemeError(f"{region} has another pattern")

    def format_tree(self, region: Region, graph: GraphLike, indent: int = 0) -> str:
        """A region and all under it: its pattern, its size and its operators, a line each."""
        model, margin = as_model(graph), "  " * indent
        pattern = RegionPattern.from_region(region, model)
        ops = ", ".join(model.nodes[n].op for n in region.get_nodes())
        lines = [f"{margin}Region {region.id}: {pattern.get_short_signature()} ({pattern.size} nodes)"]
        lines += [f"{margin}  Nodes: {ops}"] if ops else []
        lines += [self.format_tree(child, model, indent + 1) for child in region.get_children()]
        return "\n".join(lines)
