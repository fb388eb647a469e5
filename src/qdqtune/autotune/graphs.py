"""ONNX models, GraphSurgeon graphs and regions of scripts, as the values that the core works on."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Self

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qdqtune.errors import BadOption, InputError
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.graph.operators import COMMUTATIVE
from qdqtune.search.regions import discovery as core
from qdqtune.search.regions.discovery import Regions
from qdqtune.search.regions.patterns import Pattern, alike
from qdqtune.search.regions.structure import Listing, Structure

RegionType = core.RegionType

GraphLike = Any
"""A model of the core, an ONNX model, or a graph of GraphSurgeon, a library that is never imported here."""


class AutotunerError(InputError):
    """The interface was used in a way that has no answer."""


class NotInGraphError(AutotunerError, ValueError):
    """There is no such tensor or node."""


class AutotunerNotInitializedError(AutotunerError):
    """`initialize` comes first."""


class InvalidSchemeError(AutotunerError):
    """There is no such region, scheme or insertion point."""


def as_proto(graph: GraphLike) -> onnx.ModelProto:
    """An ONNX model, of a GraphSurgeon graph made by the library that the graph itself comes from."""
    if isinstance(graph, onnx.ModelProto):
        return graph
    library = _library(graph)
    if library is None:
        raise AutotunerError(f"a graph is an onnx.ModelProto or a GraphSurgeon graph, not {type(graph).__name__}")
    made: onnx.ModelProto = library.export_onnx(graph)
    return made


def _library(graph: GraphLike) -> Any:
    found = sys.modules.get(type(graph).__module__.partition(".")[0])
    return found if hasattr(graph, "toposort") and hasattr(found, "export_onnx") else None


def as_model(graph: GraphLike) -> Model:
    """The model of a graph whose nodes are numbered alike in both.

    Raises:
        AutotunerError: it is no graph, or nodes went away when it was loaded (constants, Identity), so that indices
            would mean others.
        BadModel: it is invalid.
    """
    if isinstance(graph, Model):
        return graph
    if hasattr(graph, "toposort") and _library(graph) is None:
        return _sketch(graph.nodes, getattr(graph, "inputs", ()), getattr(graph, "outputs", ()))
    proto = as_proto(graph)
    model = _loaded(proto.SerializeToString(deterministic=True))
    if [list(node.output) for node in proto.graph.node] != [list(node.outputs) for node in model.nodes]:
        raise AutotunerError(
            "the nodes of this graph are numbered otherwise than those of the loaded model, where constants and "
            "Identity are no nodes: give the autotuner's graph"
        )
    return model


def model_with(graph: GraphLike, node: Any) -> tuple[Model, int]:
    """The model of a graph and the index of one of its nodes; of a node that is not in it, a model of that alone."""
    model = as_model(graph)
    outputs = getattr(node, "outputs", None) or getattr(node, "output", None) or [""]
    index = model.producers.get(getattr(outputs[0], "name", outputs[0]), model.index_of.get(str(node)))
    return (_sketch([node], node.inputs, ()), 0) if index is None else (model, index)


def _sketch(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Model:
    """What nodes of GraphSurgeon's form say that no library exports: operators and tensors, without attributes. Tensors
    that no node makes are `inputs` or weights."""
    tensors = {t.name: t for node in nodes for t in (*node.inputs, *node.outputs)}
    infos = {
        name: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(t.dtype)), t.shape)
        for name, t in tensors.items()
        if t.dtype is not None
    }
    computed = {t.name for node in nodes for t in node.outputs} | {t.name for t in inputs}
    weights = [
        numpy_helper.from_array(np.zeros(tensors[n].shape, tensors[n].dtype), n) for n in infos.keys() - computed
    ]
    protos = [
        helper.make_node(n.op, [t.name for t in n.inputs], [t.name for t in n.outputs], n.name or f"{n.op}_{index}")
        for index, n in enumerate(nodes)
    ]
    first, last = ([infos[t.name] for t in side if t.name in infos] for side in (inputs, outputs))
    return Model(helper.make_model(helper.make_graph(protos, "", first, last, weights, value_info=[*infos.values()])))


@lru_cache(maxsize=1)
def _loaded(content: bytes) -> Model:
    """Kept, because scripts ask about one region of a graph after the other."""
    return load_proto(onnx.ModelProto.FromString(content))


def get_tensor_consumer_node_indices(graph: GraphLike) -> dict[str, list[int]]:
    """By tensor, the indices of the nodes that read it, once for each input."""
    if isinstance(graph, onnx.ModelProto):
        graph = graph.graph
    users: dict[str, list[int]] = {}
    for index, node in enumerate(graph.node if isinstance(graph, onnx.GraphProto) else graph.nodes):
        for tensor in node.input if isinstance(graph, onnx.GraphProto) else node.inputs:
            users.setdefault(getattr(tensor, "name", tensor), []).append(index)
    users.pop("", None)
    return users


def get_symmetric_ops() -> set[str]:
    """Operators whose inputs may change places."""
    return set(COMMUTATIVE)


def escaped(name: str) -> str:
    """The wildcard that means just one name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def nodes_of(model: Model, operators: Collection[str]) -> list[str]:
    """The nodes of some operators, as wildcards. A model must have some."""
    names = [escaped(node.name) for node in model.nodes if node.op in operators]
    if not names:
        raise BadOption(f"the model has no {', '.join(sorted(operators))}")
    return names


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
        above = self.parent
        while above is not None and above is not potential_ancestor:
            above = above.parent
        return above is not None

    def add_node(self, node_index: int) -> None:
        self.nodes.add(node_index)

    def get_nodes(self, *, sort: bool = True) -> list[int]:
        """The nodes directly in this region, in graph order."""
        return sorted(self.nodes) if sort else list(self.nodes)

    def get_region_nodes_and_descendants(self) -> set[int]:
        return {n for region in self.walk() for n in region.nodes}

    def get_size_of_region_and_descendants(self) -> int:
        return len(self.get_region_nodes_and_descendants())

    def contains_node(self, node_index: int) -> bool:
        """Whether a node is directly in this region."""
        return node_index in self.nodes

    def contains_node_within_region_and_descendants(self, node_index: int) -> bool:
        return node_index in self.get_region_nodes_and_descendants()

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


def pattern_of(model: Model, region: Region) -> Pattern:
    """The pattern of a region, with this region as its only instance."""
    return patterns_of(model, [region])[region]


def patterns_of(model: Model, regions: Iterable[Region]) -> dict[Region, Pattern]:
    """The patterns of some regions, and of all under them, as the search finds those of its own.

    Raises:
        AutotunerError: a region has no nodes, or nodes that the model lacks.
    """
    regions = tuple(regions)
    below = {r for region in regions for child in region.children for r in child.walk()}
    structure, listings, cores = _structure(model), dict[core.Region, Listing](), dict[Region, core.Region]()
    tops = tuple(_core(r, structure, listings, cores) for r in regions if r not in below)
    root = core.Region(-1, -1, RegionType.ROOT, (), tops)
    found = {c: pattern for pattern in alike(model, Regions(root, "topology", listings)) for c in pattern.instances}
    return {region: found[c] for region, c in cores.items()}


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
