"""Regions as scripts make and read them, and their patterns, which the core finds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from qdqtune.autotune.errors import AutotunerError
from qdqtune.graph.model import Model
from qdqtune.search.regions import discovery as division
from qdqtune.search.regions import patterns
from qdqtune.search.regions import region as core
from qdqtune.search.regions.patterns import Pattern
from qdqtune.search.regions.structure import Listing, Structure

RegionType = core.RegionType


class Region:
    """A part of the graph: indices of nodes in `QDQAutotuner.graph.nodes`, and child regions."""

    def __init__(self, region_id: int = 0, level: int = 0, region_type: RegionType = RegionType.LEAF) -> None:
        self.id, self.level, self.type = region_id, level, region_type
        self.parent: Region | None = None
        self.children: list[Region] = []
        self.nodes: set[int] = set()
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.metadata: dict[str, str] = {}

    @classmethod
    def of(cls, region: core.Region) -> Self:
        """A region that was found, and all under it."""
        made = cls(region.id, region.level, region.type)
        made.nodes, made.inputs, made.outputs = set(region.nodes), list(region.inputs), list(region.outputs)
        for child in region.children:
            made.add_child(cls.of(child))
        return made

    def __repr__(self) -> str:
        return f"Region(id={self.id}, level={self.level}, type={self.type.value}, nodes={len(self.nodes)})"

    def add_child(self, child: Region) -> None:
        """Put a region under this one."""
        child.parent = self
        self.children.append(child)

    def remove_child(self, child: Region) -> bool:
        """Take a child out; False if it is none."""
        if child not in self.children:
            return False
        child.parent = None
        self.children.remove(child)
        return True

    def get_children(self, *, sort: bool = False) -> list[Region]:
        """The child regions, in a list of its own; if so asked, the higher levels first, then the larger ones."""
        if not sort:
            return list(self.children)
        return sorted(self.children, key=lambda c: (-c.level, -c.get_size_of_region_and_descendants()))

    def is_descendant_of(self, potential_ancestor: Region) -> bool:
        """Whether this region lies somewhere under another."""
        above = self.parent
        while above is not None and above is not potential_ancestor:
            above = above.parent
        return above is not None

    def add_node(self, node_index: int) -> None:
        """Put a node right into this region."""
        self.nodes.add(node_index)

    def get_nodes(self, *, sort: bool = True) -> list[int]:
        """The nodes directly in this region, in graph order."""
        return sorted(self.nodes) if sort else list(self.nodes)

    def get_region_nodes_and_descendants(self) -> set[int]:
        """The nodes of this region and of all under it."""
        return {n for region in self.walk() for n in region.nodes}

    def get_size_of_region_and_descendants(self) -> int:
        """The number of these."""
        return len(self.get_region_nodes_and_descendants())

    def contains_node(self, node_index: int) -> bool:
        """Whether a node is directly in this region."""
        return node_index in self.nodes

    def contains_node_within_region_and_descendants(self, node_index: int) -> bool:
        """Whether a node is in this region or under it."""
        return any(node_index in region.nodes for region in self.walk())

    def merge(self, other: Region) -> None:
        """Take over the nodes and the children of another region."""
        self.nodes |= other.nodes
        for child in other.get_children():
            self.add_child(child)

    def walk(self) -> Iterator[Region]:
        """This region and everything under it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def leaves_first(tops: Iterable[Region]) -> list[Region]:
    """All regions of some trees: the leaves, then those that hold regions, both in the order of `walk`."""
    return sorted((r for top in tops for r in top.walk()), key=lambda r: bool(r.children))


@dataclass(frozen=True)
class Grouping:
    """What some regions are to the core, and the patterns of those in which a pair can stand.

    Raises (when made):
        AutotunerError: a region has no nodes, or nodes that the model lacks.
    """

    regions: tuple[Region, ...]
    cores: Mapping[Region, core.Region]
    listings: Mapping[core.Region, Listing]
    patterns: Mapping[str, Pattern]
    """By digest."""

    @staticmethod
    def of(model: Model, regions: Iterable[Region]) -> Grouping:
        """Group regions of any origin as the search groups its own."""
        regions = tuple(regions)
        below = {r for region in regions for child in region.children for r in child.walk()}
        listings, cores = dict[core.Region, Listing](), dict[Region, core.Region]()
        tops = tuple(_core(r, _structure(model), listings, cores) for r in regions if r not in below)
        root = core.Region(-1, -1, RegionType.ROOT, (), tops)
        alike = patterns.group(model, division.Regions(root, "topology", listings))
        return Grouping(regions, cores, listings, {p.digest: p for p in alike})

    def nodes_of(self, region: Region) -> tuple[int, ...]:
        """The nodes of one of the regions in the order in which its pattern numbers them."""
        return tuple(self.listings[self.cores[region]].nodes)

    def pattern_of(self, model: Model, region: Region) -> Pattern:
        """The pattern of one of the regions; without points where no pair can stand."""
        core = self.cores[region]
        if pattern := next((p for p in self.patterns.values() if core in p.edges), None):
            return pattern
        listing = self.listings[core]
        return Pattern("; ".join(listing.lines), (core,), model, {core: listing})


@lru_cache(maxsize=1)
def _structure(model: Model) -> Structure:
    """Kept, because scripts ask about one region of a model after the other."""
    return Structure(model)


def _core(
    region: Region, structure: Structure, listings: dict[core.Region, Listing], cores: dict[Region, core.Region]
) -> core.Region:
    model, nodes, below = structure.model, region.get_nodes(), region.get_children()
    if not (nodes or below) or any(not 0 <= n < len(model.nodes) for n in nodes):
        raise AutotunerError(
            f"{region} needs nodes between 0 and {len(model.nodes) - 1}: indices in the autotuner's graph.nodes, "
            "where constants are no nodes"
        )
    if below and nodes:  # nodes beside child regions are a leaf of their own
        rest = Region(level=region.level + 1)
        rest.nodes, nodes = region.nodes, []
        below.append(rest)
    children = tuple(_core(child, structure, listings, cores) for child in below)
    listing = structure.listing([c.all_nodes() for c in children] or [nodes])
    kind = RegionType.COMPOSITE if children else RegionType.LEAF
    made = core.Region(len(listings), region.level, kind, tuple(nodes), children)  # scripts may give an id twice
    listings[made], cores[region] = listing, made
    return made
