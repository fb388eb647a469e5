"""Regions of a graph, the points in them that may carry a pair, and schemes of such points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from qdqtune.types import WeightFormat


class RegionType(Enum):
    """ModelOpt's terms: a leaf holds nodes, a composite holds regions, the root is the whole graph."""

    LEAF = "LEAF"
    COMPOSITE = "COMPOSITE"
    ROOT = "ROOT"


@dataclass(frozen=True, eq=False)
class Region:
    """A part of the graph: node indices in graph order, child regions, and the tensors that cross its border."""

    id: int
    level: int
    type: RegionType
    nodes: tuple[int, ...] = ()
    children: tuple[Region, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.type is RegionType.LEAF and (self.children or not self.nodes):
            raise ValueError(f"leaf region {self.id} must hold nodes and no regions")

    def walk(self) -> Iterator[Region]:
        """This region and everything under it, parents first."""
        stack = [self]
        while stack:
            region = stack.pop()
            yield region
            stack.extend(reversed(region.children))

    def all_nodes(self) -> tuple[int, ...]:
        """The node indices of this region and everything under it, in graph order."""
        return tuple(sorted(i for region in self.walk() for i in region.nodes))


@dataclass(frozen=True, order=True, slots=True)
class NodeInput:
    """Input `input_index` of the pattern's node number `node_index`."""

    node_index: int
    input_index: int


@dataclass(frozen=True, order=True, slots=True)
class ChildInput:
    """Border input `input_index` of the pattern's child region number `region_index`."""

    region_index: int
    input_index: int


@dataclass(frozen=True, order=True, slots=True)
class RegionOutput:
    """Output `output_index` of the pattern's node number `node_index`, or of its child region `region_index`."""

    output_index: int
    node_index: int | None = None
    region_index: int | None = None

    def __post_init__(self) -> None:
        if (self.node_index is None) == (self.region_index is None):
            raise ValueError("a region output comes from a node or from a child region, one of the two")


Point = NodeInput | ChildInput | RegionOutput


@dataclass(frozen=True)
class Scheme:
    """The insertion points of a pattern that carry a pair, and those of weights with a weight format."""

    points: frozenset[Point] = frozenset()
    weight_formats: frozenset[tuple[Point, WeightFormat]] = frozenset()

    def distance(self, other: Scheme) -> int:
        """Number of points in which two schemes differ."""
        return len((self.points ^ other.points) | {point for point, _ in self.weight_formats ^ other.weight_formats})
