"""Region discovery: the graph as a hierarchy of regions that are tuned together.

Phase 1 divides the nodes into top regions: by divergence and convergence of the graph (topology), or by the modules of
the PyTorch program, which its exporter left in node names (names). Phase 2 refines those that are large or hold several
heavy operators into composites, down to leaves (`leaves`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from qdqtune.graph.model import Model
from qdqtune.graph.operators import ELEMENTWISE
from qdqtune.search.regions import by_topology, leaves
from qdqtune.search.regions.by_topology import Flow, Outline
from qdqtune.search.regions.region import Region, RegionType
from qdqtune.search.regions.structure import Listing, Structure

NAMED_SHARE = 0.6
"""Method auto takes module names if more than this share of nodes have them. Chosen, not measured."""

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Regions:
    """The hierarchy under `root`, whose children are the top regions, and the method that found it.

    `listings` has the canonical order of the nodes of each region but the root.
    """

    root: Region
    method: Literal["names", "topology"]
    listings: Mapping[Region, Listing] = field(repr=False)

    @property
    def phase1(self) -> int:
        """Number of regions of the first partition."""
        return len(self.root.children)

    @property
    def phase2(self) -> int:
        """How many of the first partition's regions were refined into composites; the rest are leaves."""
        return sum(r.type is RegionType.COMPOSITE for r in self.root.children)

    def walk(self) -> Iterator[Region]:
        """All leaves and composites, parents first, in graph order."""
        regions = self.root.walk()
        next(regions)
        return regions

    @property
    def leaves(self) -> tuple[Region, ...]:
        """The regions that hold nodes; every node of the model is in exactly one of them."""
        return tuple(r for r in self.walk() if r.type is RegionType.LEAF)

    @property
    def composites(self) -> tuple[Region, ...]:
        """The regions that hold regions."""
        return tuple(r for r in self.walk() if r.type is RegionType.COMPOSITE)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collection meanwhile: it would take a fourth of the time and find nothing to free."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def find(
    model: Model,
    method: Literal["auto", "names", "topology"] = "auto",
    *,
    max_sequence_size: int = 10,
    min_topdown_size: int = 10,
) -> Regions:
    """Divide a model into regions.

    Regions are numbered from 0, parents first, children in graph order; the root is number -1 at level -1. A region's
    inputs are the activations that enter it, its outputs what is used outside, both in canonical order (`structure`).
    `max_sequence_size` bounds leaves. Blocks of at most `min_topdown_size` nodes with at most one heavy operator are
    not divided. Method auto takes names where more than 60 % of the nodes have them.
    """
    if method == "auto":
        method = "names" if has_module_names(model) else "topology"
    flow = Flow(model)
    blocks = by_topology.nest(flow, min_topdown_size)
    groups = outline_by_names(flow, min_topdown_size) if method == "names" else by_topology.outline(flow, blocks)
    groups = _without_wrappers(flow, groups)
    structure = Structure(model)
    parts = leaves.form(flow, structure, groups, by_topology.units(flow, blocks), max_sequence_size)
    assembly = _Assembly(structure)
    return Regions(assembly.root(_tree(groups, parts)), method, assembly.listings)


def _without_wrappers(flow: Flow, groups: Outline) -> Outline:
    """Remove groups of groups that hold most of the model's heavy operators: a whole encoder is too large to be tuned
    as one region."""
    heavy, children = [0] * len(groups.parent), [0] * len(groups.parent)
    for node, home in enumerate(groups.home):
        heavy[home] += flow.heavy[flow.first + node]
    for g in range(len(groups.parent) - 1, 0, -1):
        heavy[groups.parent[g]] += heavy[g]
        children[groups.parent[g]] += 1
    instead = list(range(len(groups.parent)))
    for g in range(1, len(groups.parent)):
        if children[g] > 1 and 2 * heavy[g] > heavy[0]:
            instead[g] = instead[groups.parent[g]]
    return Outline([instead[p] for p in groups.parent], [instead[h] for h in groups.home])


@dataclass(eq=False)
class _Tree:
    """A region before it is numbered. `nodes` includes the nodes of its children."""

    nodes: list[int]
    children: Sequence[_Tree] = ()


def _tree(groups: Outline, parts: Sequence[list[int]]) -> _Tree:
    """The leaves in their groups; a group that would hold only one region is replaced by that region."""
    held: list[list[_Tree]] = [[] for _ in groups.parent]
    for nodes in parts:
        held[groups.home[nodes[0]]].append(_Tree(nodes))
    for group in range(len(held) - 1, 0, -1):
        if len(held[group]) > 1:
            children = sorted(held[group], key=lambda d: d.nodes[0])
            held[group] = [_Tree(sorted(n for d in children for n in d.nodes), children)]
        held[groups.parent[group]] += held[group]
    top = sorted(held[0], key=lambda d: d.nodes[0])
    return _Tree(sorted(n for d in top for n in d.nodes), top)


class _Assembly:
    """Makes regions with numbers, levels and borders of a `_Tree`."""

    def __init__(self, structure: Structure) -> None:
        self._model, self._structure = structure.model, structure
        self.listings: dict[Region, Listing] = {}

    def root(self, tree: _Tree) -> Region:
        """The whole hierarchy of a tree, made without recursion, since hierarchies can be deep."""
        order: list[tuple[_Tree, int]] = []
        stack = [(tree, -1)]
        while stack:
            order.append(stack.pop())
            stack.extend((child, order[-1][1] + 1) for child in reversed(order[-1][0].children))
        made: dict[int, Region] = {}
        for number in range(len(order) - 1, 0, -1):
            made[id(order[number][0])] = self._region(*order[number], number - 1, made)
        model = self._model
        used = tuple(t for t in model.inputs if any(n != -1 for n, _ in model.uses(t)))
        made_here = tuple(t for t in model.outputs if t in model.producers)
        return Region(-1, -1, RegionType.ROOT, (), tuple(made[id(c)] for c in tree.children), used, made_here)

    def _region(self, tree: _Tree, level: int, number: int, made: dict[int, Region]) -> Region:
        listing = self._structure.listing([c.nodes for c in tree.children] or [tree.nodes])
        outputs = tuple(self._model.nodes[listing.nodes[n]].outputs[k] for n, k in listing.exits)
        children = tuple(made.pop(id(c)) for c in tree.children)
        region_type = RegionType.COMPOSITE if children else RegionType.LEAF
        nodes = () if children else tuple(tree.nodes)
        region = Region(number, level, region_type, nodes, children, listing.borders, outputs)
        self.listings[region] = listing
        return region


def has_module_names(model: Model) -> bool:
    """Whether most nodes have names such as `/a/b/Op`."""
    return sum(len(_path(n.name) or ()) > 0 for n in model.nodes) > NAMED_SHARE * len(model.nodes)


def outline_by_names(flow: Flow, whole: int) -> Outline:
    """Nested groups of nodes: the modules with more than `whole` nodes or more than one heavy operator. The node
    `/encoder/layer.0/attention/self/query/MatMul` lies in module encoder/layer.0/attention/self/query.

    A node without a path belongs to the module of its producer, or else of its user. An elementwise operator that alone
    uses a module's result belongs to the module.
    """
    paths = _paths(flow)
    sizes: dict[Path, int] = {}
    heavies: dict[Path, int] = {}
    for node, path in enumerate(paths):
        for k in range(1, len(path) + 1):
            sizes[path[:k]] = sizes.get(path[:k], 0) + 1
            heavies[path[:k]] = heavies.get(path[:k], 0) + flow.heavy[flow.first + node]
    group: dict[Path, int] = {(): 0}
    parent = [0]
    home = []
    for path in paths:
        for k in range(1, len(path) + 1):
            around, module = group[path[: k - 1]], path[:k]
            if module in group:
                continue
            if sizes[module] <= whole and heavies[module] <= 1:
                group[module] = around
            else:
                group[module] = len(parent)
                parent.append(around)
        home.append(group[path])
    _move_epilogues(flow, home, parent)
    return Outline(parent, home)


def _path(name: str) -> Path | None:
    """The module path in a node name, () for a node of the model itself; None where the name has no path."""
    return tuple(name.split("/")[1:-1]) if name.startswith("/") else None


def _paths(flow: Flow) -> list[Path]:
    paths = [_path(n.name) for n in flow.model.nodes]
    for vertices, neighbours in ((flow.order, flow.before), (flow.order[::-1], flow.after)):
        for node in (v - flow.first for v in vertices if v >= flow.first):
            if paths[node] is None:
                near = (paths[v - flow.first] for v in neighbours[flow.first + node] if v >= flow.first)
                paths[node] = next((path for path in near if path is not None), None)
    return [path or () for path in paths]


def _move_epilogues(flow: Flow, home: list[int], parent: list[int]) -> None:
    """Move epilogues into the group that feeds them: elementwise nodes right behind it that alone use its result."""
    level = [0] * len(parent)
    for g in range(1, len(parent)):
        level[g] = level[parent[g]] + 1

    def is_inside(g: int, around: int) -> bool:
        while level[g] > level[around]:
            g = parent[g]
        return g == around

    for vertex in flow.order:
        node = vertex - flow.first
        if node < 0 or flow.op(node) not in ELEMENTWISE:
            continue
        sources = [
            b
            for b in flow.before[vertex]
            if b >= flow.first and len(flow.after[b]) == 1 and flow.is_float[b] and not flow.leaves_graph[b]
        ]
        if sources:
            last = max(sources, key=flow.position.__getitem__)
            if home[last - flow.first] != home[node] and is_inside(home[last - flow.first], home[node]):
                home[node] = home[last - flow.first]
