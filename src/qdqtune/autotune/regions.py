"""Regions as scripts make and read them, and their patterns, which the core finds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from qdqtune.errors import InputError
from qdqtune.graph.model import Model
from qdqtune.search.regions import discovery as division
from qdqtune.search.regions import patterns
from qdqtune.search.regions import region as core
from qdqtune.search.regions.patterns import Pattern
from qdqtune.search.regions.structure import Listing, Structure

RegionType = core.RegionType


class AutotunerError(InputError):
    """The interface was used in a way that has no answer."""


class InvalidSchemeError(AutotunerError):
    """There is no such region, scheme or insertion point."""


class Region:
    """A part of the graph: indices of nodes in `QDQAutotuner.graph.nodes`, and child regions."""

    def __init__(self, region_id: int = 0, level: int = 0, region_type: RegionType = RegionType.LEAF) -> None:
        self.id, self.level, self.type = region_id, level, region_type
        self.parent: Region | None = None
        self.children: list[Region] = []
        self.nodes: set[int] = set()
        self.inputs: list[str] = []
        self.outputs: list[str] = []

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

    def remove_child(self, child: Region) -> None:
        """Take a child out."""
        child.parent = None
        self.children.remove(child)

    def get_children(self) -> list[Region]:
        """The child regions, in a list of its own."""
        return list(self.children)

    def get_nodes(self) -> list[int]:
        """The nodes directly in this region, in graph order."""
        return sorted(self.nodes)

    def get_region_nodes_and_descendants(self) -> set[int]:
        """The nodes of this region and of all under it."""
        return {n for region in self.walk() for n in region.nodes}

    def walk(self) -> Iterator[Region]:
        """This region and everything under it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


class CombinedRegionSearch:
    """The division of a model into regions, for scripts that want it without an autotuner."""

    def __init__(
        self, graph: Model, maximum_sequence_region_size: int = 10, minimum_topdown_search_size: int = 10
    ) -> None:
        self._found = division.find(
            graph, max_sequence_size=maximum_sequence_region_size, min_topdown_size=minimum_topdown_search_size
        )

    def search_regions(self) -> list[Region]:
        """The regions at the top, in graph order, with their children."""
        return [Region.of(top) for top in self._found.root.children]


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
