"""The division of a model into regions, or one phase of it. As a program it is `region_inspect`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TextIO

from qdqtune.autotune.graphs import GraphLike, Region, RegionType, as_model
from qdqtune.search.regions import discovery
from qdqtune.tuning.subgraphs.groups import borders


class RegionSearchBase:
    """A graph, and a region to start from: by default one with all its nodes."""

    def __init__(self, graph: GraphLike, root: Region | None = None) -> None:
        self.graph = as_model(graph)
        self.root = root or Region(0, 0, RegionType.ROOT)
        if root is None:
            self.root.nodes = set(range(len(self.graph.nodes)))
            self.root.inputs, self.root.outputs = list(self.graph.inputs), list(self.graph.outputs)

    def compute_region_boundaries(self, region: Region) -> None:
        """Set the tensors that a region with all under it reads from outside, and those that are used there."""
        reads, writes = borders(self.graph, sorted(region.get_region_nodes_and_descendants()))
        region.inputs, region.outputs = list(reads), list(writes)

    def print_tree(
        self, region: Region | None = None, indent: int = 0, max_items: int = 20, file: TextIO | None = None
    ) -> None:
        """Print a region, by default the root, and all under it; of nodes and tensors at most `max_items` each."""
        shown = region or self.root
        print(f"{'  ' * indent}├─ Region {shown.id} (Level {shown.level}, Type: {shown.type.value})", file=file)
        nodes = [f"{n}: {self.graph.nodes[n].op} ({self.graph.nodes[n].name})" for n in shown.get_nodes()]
        for title, names in (
            (f"Direct nodes: {len(shown.nodes)}", []),
            (f"Total nodes: {shown.get_size_of_region_and_descendants()}", []),
            (f"Children: {len(shown.children)}", []),
            (f"Inputs: {len(shown.inputs)} tensors", shown.inputs),
            (f"Outputs: {len(shown.outputs)} tensors", shown.outputs),
            ("Nodes:", nodes),
        ):
            more = [f"... and {len(names) - max_items} more"] if len(names) > max_items else []
            for line in (title, *(f"  - {name}" for name in names[:max_items]), *more):
                print(f"{'  ' * indent}│  ├─ {line}", file=file)
        for child in shown.get_children():
            self.print_tree(child, indent + 1, max_items, file)


class CombinedRegionSearch(RegionSearchBase):
    """Both phases."""

    def __init__(
        self, graph: GraphLike, maximum_sequence_region_size: int = 10, minimum_topdown_search_size: int = 10
    ) -> None:
        super().__init__(graph)
        self._found = discovery.find(
            self.graph, max_sequence_size=maximum_sequence_region_size, min_topdown_size=minimum_topdown_search_size
        )

    def search_regions(self) -> list[Region]:
        """The regions at the top, in graph order, with their children."""
        return [Region.of(top) for top in self._found.root.children]


class RegionPartitioner(RegionSearchBase):
    """The first phase: divides the nodes among regions that have no children yet."""

    def partition_graph(self) -> list[Region]:
        """The regions, in graph order."""
        tops = [Region.of(top) for top in discovery.find(self.graph).root.children]
        for top in tops:
            top.nodes, top.children, top.type = top.get_region_nodes_and_descendants(), [], RegionType.LEAF
        return tops


class TopDownRegionBuilder(RegionSearchBase):
    """The second phase: what of the division lies in a region of the first."""

    def __init__(
        self, graph: GraphLike, root: Region, next_region_id: int = 0, maximum_sequence_region_size: int = 10
    ) -> None:
        super().__init__(graph, root)
        self._next_id, self._size = next_region_id, maximum_sequence_region_size

    def build_composite_region(self) -> Region:
        """The region with its nodes in child regions, down to leaves; a region that is a leaf has one."""
        wanted = self.root.get_region_nodes_and_descendants()
        whole = Region(region_type=RegionType.COMPOSITE)
        whole.inputs, whole.outputs = list(self.root.inputs), list(self.root.outputs)
        waiting = [Region.of(top) for top in discovery.find(self.graph, max_sequence_size=self._size).root.children]
        while waiting:
            part = waiting.pop(0)
            if part.children and not part.get_region_nodes_and_descendants() < wanted:
                waiting = part.children + waiting
            elif part.children or part.nodes & wanted:
                part.nodes &= wanted
                whole.add_child(part)
        for number, region in enumerate(whole.walk(), self._next_id):
            region.id = number
            region.level = self.root.level if region.parent is None else region.parent.level + 1
        return whole


if __name__ == "__main__":
    sys.exit(import_module("qdqtune.autotune.region_inspect").main())
