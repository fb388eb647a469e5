"""ModelOpt's regions, and its ways to divide a graph into them. As a program it is `region_inspect`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import chain
from typing import Any, Self, TextIO

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qdqtune.errors import InputError
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.search.regions import discovery
from qdqtune.search.regions.discovery import RegionType as RegionType
from qdqtune.search.regions.patterns import Pattern, alike, is_quantizable
from qdqtune.search.regions.structure import Listing, Structure
from qdqtune.tuning.subgraph_groups import borders

GraphLike = Any
"""A `Model`, an ONNX model, or a GraphSurgeon graph, whose library is never imported here."""


class AutotunerError(InputError): ...


class AutotunerNotInitializedError(AutotunerError): ...


class InvalidSchemeError(AutotunerError): ...


# Graphs


def as_proto(graph: GraphLike) -> onnx.ModelProto:
    """The graph as an ONNX model; a GraphSurgeon graph is exported by its own library."""
    if isinstance(graph, Model):
        return graph.to_proto()
    if isinstance(graph, onnx.ModelProto):
        return graph
    library = _library(graph)
    if not library:
        raise AutotunerError(f"a graph is an onnx.ModelProto or a GraphSurgeon graph, not {type(graph).__name__}")
    proto: onnx.ModelProto = library.export_onnx(graph)
    return proto


def _library(graph: GraphLike) -> Any:
    library = sys.modules.get(type(graph).__module__.partition(".")[0])
    return library if hasattr(graph, "toposort") and hasattr(library, "export_onnx") else None


def as_model(graph: GraphLike) -> Model:
    """The graph as a `Model` with the same node indices; raises AutotunerError if loading it changes them."""
    if isinstance(graph, Model):
        return graph
    if hasattr(graph, "toposort") and not _library(graph):
        return sketch(graph.nodes, getattr(graph, "inputs", ()), getattr(graph, "outputs", ()))
    proto = as_proto(graph)
    model = _loaded(proto.SerializeToString(deterministic=True))
    if [list(node.output) for node in proto.graph.node] != [list(node.outputs) for node in model.nodes]:
        raise AutotunerError(
            "the nodes of this graph are numbered otherwise than those of the loaded model, where constants and "
            "Identity are no nodes: give the autotuner's graph"
        )
    return model


@lru_cache(maxsize=1)
def _loaded(content: bytes) -> Model:
    """Cached, because scripts ask about many regions of one graph."""
    return load_proto(onnx.ModelProto.FromString(content))


def sketch(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Model:
    """A model of GraphSurgeon nodes that its library cannot export. Tensors that no node computes become weights of
    zeros, except `inputs`."""
    tensors = {t.name: t for node in nodes for t in (*node.inputs, *node.outputs) if t.dtype is not None}
    infos = {
        name: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(t.dtype)), t.shape)
        for name, t in tensors.items()
    }
    computed = {t.name for node in nodes for t in node.outputs} | {t.name for t in inputs}
    weights = [
        numpy_helper.from_array(np.zeros(t.shape, t.dtype), name) for name, t in tensors.items() if name not in computed
    ]
    protos = [
        helper.make_node(n.op, [t.name for t in n.inputs], [t.name for t in n.outputs], n.name or f"{n.op}_{index}")
        for index, n in enumerate(nodes)
    ]
    first, last = ([infos[t.name] for t in side if t.name in infos] for side in (inputs, outputs))
    return Model(helper.make_model(helper.make_graph(protos, "", first, last, weights, value_info=[*infos.values()])))


# Regions


class Region:
    """A part of the graph: its own `nodes` (indices in `QDQAutotuner.graph.nodes`), and regions with further ones."""

    def __init__(self, region_id: int = 0, level: int = 0, region_type: RegionType = RegionType.LEAF) -> None:
        self.id, self.level, self.type = region_id, level, region_type
        self.parent: Region | None = None
        self.children: list[Region] = []
        self.nodes: set[int] = set()
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.metadata: dict[str, str] = {}

    @classmethod
    def of(cls, region: discovery.Region) -> Self:
        copy = cls(region.id, region.level, region.type)
        copy.nodes, copy.inputs, copy.outputs = set(region.nodes), list(region.inputs), list(region.outputs)
        for child in region.children:
            copy.add_child(cls.of(child))
        return copy

    def add_child(self, child: Region) -> None:
        child.parent = self
        self.children.append(child)

    def remove_child(self, child: Region) -> bool:
        if child not in self.children:
            return False
        child.parent = None
        self.children.remove(child)
        return True

    def get_children(self, *, sort: bool = False) -> list[Region]:
        """A copy of the list of child regions; if `sort`, by level and then by size, both descending."""
        return sorted(self.children, key=lambda child: (-child.level, -len(child.all_nodes())) if sort else 0)

    def get_nodes(self, *, sort: bool = True) -> list[int]:
        return sorted(self.nodes)

    def all_nodes(self) -> set[int]:
        return set().union(*(region.nodes for region in self.walk()))

    get_region_nodes_and_descendants = all_nodes

    def merge(self, other: Region) -> None:
        self.nodes |= other.nodes
        for child in other.get_children():
            self.add_child(child)

    def walk(self) -> Iterator[Region]:
        yield self
        for child in self.children:
            yield from child.walk()


def leaves_first(tops: Iterable[Region]) -> list[Region]:
    """All regions in the trees `tops`: first those without children, then the others, each in the order of `walk`."""
    return sorted(chain.from_iterable(top.walk() for top in tops), key=lambda r: bool(r.children))


def pattern_of(model: Model, region: Region) -> Pattern:
    return patterns_of(model, [region])[region]


def patterns_of(model: Model, regions: Iterable[Region]) -> dict[Region, Pattern]:
    structure = _structure(model)
    listings: dict[Any, Listing] = {}
    for region in dict.fromkeys(chain.from_iterable(top.walk() for top in regions)):
        nodes = region.all_nodes()
        if not nodes or not nodes.issubset(range(len(model.nodes))):
            last = len(model.nodes) - 1
            raise AutotunerError(
                f"region {region.id} needs nodes between 0 and {last}: indices in the autotuner's graph.nodes"
            )
        listings[region] = structure.listing(nodes)
    pattern_by_region: dict[Any, Pattern] = {}
    for pattern in alike(model, listings):
        pattern_by_region |= dict.fromkeys(pattern.instances, pattern)
    return pattern_by_region


@lru_cache(maxsize=1)
def _structure(model: Model) -> Structure:
    """Cached, because scripts ask about many regions of one model."""
    return Structure(model)


def has_quantizable_operations(region: Region, graph: GraphLike) -> bool:
    """Whether a region or its child regions have an operator on floats that engines quantize. True for an empty region
    that is not a leaf."""
    if region.type is not RegionType.LEAF and not region.all_nodes():
        return True
    model = as_model(graph)
    return is_quantizable(model, pattern_of(model, region).instances[0])


# The division


class RegionSearchBase:
    """A graph, and a region to start from: by default one of all nodes."""

    def __init__(self, graph: GraphLike, root: Region | None = None) -> None:
        self.graph = as_model(graph)
        self.root = root or Region(0, 0, RegionType.ROOT)
        if root is None:
            self.root.nodes = set(range(len(self.graph.nodes)))
            self.root.inputs, self.root.outputs = list(self.graph.inputs), list(self.graph.outputs)

    def _tops(self, method: Any = "auto", largest: int = 10, least: int = 10) -> list[Region]:
        found = discovery.find(self.graph, method, max_sequence_size=largest, min_topdown_size=least)
        return [Region.of(top) for top in found.tops]

    def compute_region_boundaries(self, region: Region) -> None:
        reads, writes = borders(self.graph, sorted(region.all_nodes()))
        region.inputs, region.outputs = list(reads), list(writes)

    def print_tree(
        self, region: Region | None = None, indent: int = 0, max_items: int = 20, file: TextIO | None = None
    ) -> None:
        """Print a region, by default the root, and all below it, each with at most `max_items` nodes and tensors."""
        shown = region or self.root
        lines = [
            f"├─ Region {shown.id} (Level {shown.level}, Type: {shown.type.value})",
            f"│  ├─ Direct nodes: {len(shown.nodes)}",
            f"│  ├─ Total nodes: {len(shown.all_nodes())}",
            f"│  ├─ Children: {len(shown.children)}",
        ]
        ops = [f"{self.graph.nodes[n].op} ({self.graph.nodes[n].name})" for n in shown.get_nodes()]
        for title, names in (("Inputs", shown.inputs), ("Outputs", shown.outputs), ("Nodes", ops)):
            lines.append(f"│  ├─ {title}: {len(names)}")
            lines += [f"│  │    - {name}" for name in names[:max_items]]
        print(*("  " * indent + line for line in lines), sep="\n", file=file)
        for child in shown.children:
            self.print_tree(child, indent + 1, max_items, file)


class CombinedRegionSearch(RegionSearchBase):
    def __init__(
        self, graph: GraphLike, maximum_sequence_region_size: int = 10, minimum_topdown_search_size: int = 10
    ) -> None:
        super().__init__(graph)
        self._sizes = maximum_sequence_region_size, minimum_topdown_search_size

    def search_regions(self) -> list[Region]:
        return self._tops("auto", *self._sizes)


class TorchRegionBuilder(RegionSearchBase):
    """Divides a graph by node names such as `/encoder/layer.0/Conv`, as `--regions names` does."""

    def build_regions(self, linearize: bool = True, only_quantizable: bool = False) -> list[Region]:
        """All regions, those without children first; with `linearize=False` only the top-level ones."""
        tops = self._tops("names")
        regions = leaves_first(tops) if linearize else tops
        return [r for r in regions if not only_quantizable or has_quantizable_operations(r, self.graph)]


class RegionPartitioner(RegionSearchBase):
    """ModelOpt's first phase: divides the nodes into regions without children."""

    def partition_graph(self) -> list[Region]:
        tops = self._tops()
        for top in tops:
            top.nodes, top.children, top.type = top.all_nodes(), [], RegionType.LEAF
        return tops


class TopDownRegionBuilder(RegionSearchBase):
    """ModelOpt's second phase: divides one region of the first."""

    def __init__(
        self, graph: GraphLike, root: Region, next_region_id: int = 0, maximum_sequence_region_size: int = 10
    ) -> None:
        super().__init__(graph, root)
        self._next_id, self._size = next_region_id, maximum_sequence_region_size

    def build_composite_region(self) -> Region:
        """The region with its nodes in child regions."""
        wanted = self.root.all_nodes()
        whole = Region(self._next_id, self.root.level, RegionType.COMPOSITE)
        whole.inputs, whole.outputs = list(self.root.inputs), list(self.root.outputs)
        for region in leaves_first(self._tops(largest=self._size)):
            if region.nodes & wanted:
                region.nodes &= wanted
                region.id, region.level = self._next_id + 1 + len(whole.children), whole.level + 1
                whole.add_child(region)
        return whole


if __name__ == "__main__":
    sys.exit(import_module("qdqtune.autotune.region_inspect").main())
