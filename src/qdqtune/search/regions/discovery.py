"""Divides a graph into a hierarchy of regions that are tuned together.

Phase 1 divides the nodes into top regions: where branches of the graph diverge and meet again (method topology), or by
the PyTorch modules in exported node names (method names). Phase 2 divides those that are large or hold several heavy
operators (matrix products and the like) into composites, down to leaves: a heavy operator with the cheap ones that an
engine would fuse behind it, or a short sequence.

By topology, every node or graph input with several users opens a block that ends at its immediate post-dominator, the
first node that all paths from it pass. Blocks are intervals of one depth-first order, so that nesting is a matter of
comparing numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce
from itertools import accumulate, chain, count
from math import inf
from typing import Literal, NamedTuple

import msgspec

from qdqtune.graph.model import GRAPH, Model
from qdqtune.graph.operators import ELEMENTWISE, HEAVY, LAST_AXIS_NORMALIZATIONS, REARRANGES, may_be_float
from qdqtune.search.regions.structure import Listing, Structure


class RegionType(Enum):
    """ModelOpt's terms: a leaf has nodes, a composite has regions, the root is the whole graph."""

    LEAF = "LEAF"
    COMPOSITE = "COMPOSITE"
    ROOT = "ROOT"


@dataclass(frozen=True, eq=False)
class Region:
    """A part of the graph: node indices in graph order or child regions, and the tensors that enter and leave it."""

    id: int
    level: int
    nodes: tuple[int, ...] = ()
    children: tuple[Region, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def type(self) -> RegionType:
        return RegionType.COMPOSITE if self.children else RegionType.LEAF

    def walk(self) -> Iterator[Region]:
        """This region and all regions inside it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def all_nodes(self) -> tuple[int, ...]:
        """The nodes of this region and of those inside it, by index in graph order."""
        return tuple(sorted(chain.from_iterable(region.nodes for region in self.walk())))


PointKind = Literal["node_input", "child_input", "node_output", "child_output"]


class Point(msgspec.Struct, frozen=True, order=True, array_like=True):
    """An insertion point: input or output `number` of node `owner` of a pattern, or of child region `owner`. A list of
    three in files."""

    kind: PointKind
    owner: int
    number: int


Scheme = frozenset[Point]
"""The insertion points of a pattern that have a pair."""

NAMED_SHARE = 0.6
"""Method auto uses module names if more than this share of nodes have them. Chosen, not measured."""


@dataclass(frozen=True, eq=False)
class Regions:
    """The top regions, and the method that found them. `listings` has the canonical node order of all leaves and
    composites, parents first, in graph order."""

    tops: tuple[Region, ...]
    method: Literal["names", "topology"]
    listings: Mapping[Region, Listing] = field(repr=False)

    @property
    def leaves(self) -> tuple[Region, ...]:
        """The regions with nodes; every node of the model is in exactly one."""
        return tuple(region for region in self.listings if not region.children)


def find(
    model: Model,
    method: Literal["auto", "names", "topology"] = "auto",
    *,
    max_sequence_size: int = 10,
    min_topdown_size: int = 10,
) -> Regions:
    """Divide a model into regions.

    Regions are numbered from 0, parents first, children in graph order. A region's inputs are activations from outside,
    its outputs tensors used outside, both in canonical order (`structure`). `max_sequence_size` limits the nodes of a
    leaf. Blocks of at most `min_topdown_size` nodes with at most one heavy operator are not divided.
    """
    names = (node.name for node in model.nodes)  # a path is () for a node of the model itself, None where there is none
    paths = [tuple(name.split("/")[1:-1]) if name.startswith("/") else None for name in names]
    if method == "auto":
        method = "names" if sum(map(bool, paths)) > NAMED_SHARE * len(paths) else "topology"
    flow, structure = Flow(model), Structure(model)
    blocks = _blocks(flow, min_topdown_size)
    outline = _modules(flow, paths, min_topdown_size) if method == "names" else _divergences(flow, blocks)
    outline = _without_wrappers(flow, outline)
    leaves = _Clusters(flow, structure, outline.home, _units(flow, blocks), max_sequence_size).leaves()
    return _numbered(structure, _tree(outline, leaves), method)


class Flow:
    """The graph of activations. Vertex n is node n; input i of the graph is vertex i - len(inputs), below zero. Its
    edges are tensors, also those captured by subgraphs."""

    def __init__(self, model: Model) -> None:
        self.model = model
        vertex = {t: i - len(model.inputs) for i, t in enumerate(model.inputs)} | dict(model.producers)
        self.vertices = range(-len(model.inputs), len(model.nodes))
        self.before: dict[int, tuple[int, ...]] = dict.fromkeys(self.vertices, ())
        self.after: dict[int, list[int]] = {v: [] for v in self.vertices}
        for node in model.nodes:
            read = {vertex[t] for t in node.reads if t in vertex}
            self.before[node.index] = tuple(sorted(read))
            for v in self.before[node.index]:
                self.after[v].append(node.index)
        self.heavy = {node.index for node in model.nodes if node.op in HEAVY}
        self.floats = {v for t, v in vertex.items() if v < 0 or may_be_float(model, t)}
        self.leaves_graph = {vertex[t] for t in model.outputs if t in vertex}
        self.order = self._depth_first()
        """All vertices, producers first; one that only a single user needs comes right before it."""
        self.position = {v: i for i, v in enumerate(self.order)}

    def op(self, node: int) -> str:
        return self.model.nodes[node].op

    def _depth_first(self) -> list[int]:
        """Visits producers in graph order, so that side inputs shared by branches (masks) come first."""
        order, seen = list[int](), set[int]()
        for sink in (v for v in self.vertices if not self.after[v]):
            stack = [(sink, iter(self.before[sink]))]
            while stack:
                vertex, producers = stack[-1]
                producer = next((v for v in producers if v not in seen), None)
                if producer is None:
                    order.append(vertex)
                    stack.pop()
                else:
                    seen.add(producer)
                    stack.append((producer, iter(self.before[producer])))
        return order


@dataclass(frozen=True, eq=False)
class Outline:
    """Nested groups of nodes: `home[n]` is the innermost group of node n, `parent[g]` (< g) the group around g.

    Group 0 is the whole graph, its own parent.
    """

    parent: Sequence[int]
    home: Sequence[int]


def _without_wrappers(flow: Flow, outline: Outline) -> Outline:
    """Remove groups with inner groups and most of the model's heavy operators: an encoder is too large a region."""
    parent, groups = outline.parent, range(1, len(outline.parent))
    heavy = Counter(outline.home[node] for node in flow.heavy)
    for g in reversed(groups):
        heavy[parent[g]] += heavy[g]
    children = Counter(parent[g] for g in groups)
    instead = [0]
    for g in groups:
        instead.append(instead[parent[g]] if children[g] > 1 and 2 * heavy[g] > heavy[0] else g)
    return Outline([instead[p] for p in parent], [instead[h] for h in outline.home])


@dataclass(eq=False)
class _Tree:
    """A region without a number yet. `nodes` includes those of its children."""

    nodes: list[int]
    children: Sequence[_Tree] = ()

    @staticmethod
    def around(children: Iterable[_Tree]) -> _Tree:
        in_order = sorted(children, key=lambda child: child.nodes[0])
        return _Tree(sorted(chain.from_iterable(child.nodes for child in in_order)), in_order)


def _tree(outline: Outline, leaves: Sequence[list[int]]) -> _Tree:
    """The leaves in their groups; a group with only one region is replaced by it."""
    held: list[list[_Tree]] = [[] for _ in outline.parent]
    for nodes in leaves:
        held[outline.home[nodes[0]]].append(_Tree(nodes))
    for group in range(len(held) - 1, 0, -1):
        held[outline.parent[group]] += [_Tree.around(held[group])] if len(held[group]) > 1 else held[group]
    return _Tree.around(held[0])


def _numbered(structure: Structure, tree: _Tree, method: Literal["names", "topology"]) -> Regions:
    numbers, listings = count(), dict[Region, Listing]()

    def numbered(tree: _Tree, level: int) -> Region:
        number = next(numbers)
        children = tuple(numbered(child, level + 1) for child in tree.children)
        listing = structure.listing(tree.nodes)
        outputs = tuple(structure.model.nodes[listing.nodes[n]].outputs[k] for n, k in listing.exits)
        region = Region(number, level, () if children else tuple(tree.nodes), children, listing.borders, outputs)
        listings[region] = listing
        return region

    tops = tuple(numbered(top, 0) for top in tree.children)
    return Regions(tops, method, dict(sorted(listings.items(), key=lambda item: item[0].id)))


# ---------------------------------------------------------------- groups by names

Path = tuple[str, ...]


def _modules(flow: Flow, paths: list[Path | None], whole: int) -> Outline:
    """Nested groups: the modules with more than `whole` nodes or more than one heavy operator. The node
    `/encoder/layer.0/attention/self/query/MatMul` lies in module encoder/layer.0/attention/self/query.

    A node without a path belongs to the module of its producer, else of its user; an elementwise operator that is the
    only user of a module's result, to that module.
    """
    for vertices, neighbours in ((flow.order, flow.before), (flow.order[::-1], flow.after)):
        for node in vertices:
            if node >= 0 and paths[node] is None:
                near = (paths[v] for v in neighbours[node] if v >= 0)
                paths[node] = next((path for path in near if path is not None), None)
    modules = [path or () for path in paths]
    sizes, heavies = Counter[Path](), Counter[Path]()
    for node, path in enumerate(modules):
        for k in range(1, len(path) + 1):
            sizes[path[:k]] += 1
            heavies[path[:k]] += node in flow.heavy
    group: dict[Path, int] = {(): 0}
    parent, home = [0], list[int]()
    for path in modules:
        for k in range(1, len(path) + 1):
            around, module = group[path[: k - 1]], path[:k]
            if sizes[module] <= whole and heavies[module] <= 1:
                group[module] = around
            elif module not in group:
                group[module] = len(parent)
                parent.append(around)
        home.append(group[path])
    _move_epilogues(flow, home, parent)
    return Outline(parent, home)


def _move_epilogues(flow: Flow, home: list[int], parent: Sequence[int]) -> None:
    """Move elementwise nodes right behind a group into it, if they are the only users of its result."""
    for node in flow.order:
        if node < 0 or flow.op(node) not in ELEMENTWISE:
            continue
        sources = [b for b in flow.before[node] if b >= 0 and b in flow.floats and flow.after[b] == [node]]
        last = max((b for b in sources if b not in flow.leaves_graph), key=flow.position.__getitem__, default=node)
        group = home[last]
        while group > home[node]:
            group = parent[group]
        if group == home[node]:
            home[node] = home[last]


# ---------------------------------------------------------------- groups by topology

EPILOGUE = 3
"""How many nodes behind the point where its branches meet a block takes in. Chosen, not measured."""

NESTING = 6
"""The most levels of nested blocks. Outer blocks of deeper nests are dropped, so that the work stays linear."""

CONTINUING = ELEMENTWISE | REARRANGES | LAST_AXIS_NORMALIZATIONS
"""Operators that a block may take in behind the point where its branches meet."""


class Block(NamedTuple):
    """A divergence and all up to where its branches meet: the vertices at positions `start` + 1 to `end` of the
    depth-first order. It has `height` levels of blocks to divide, and is one itself unless it `is_small`."""

    start: int
    end: int
    is_small: bool
    height: int


def _blocks(flow: Flow, whole: int) -> list[Block]:
    """The blocks of a graph, nested or disjoint, outer ones first. Those of at most `whole` nodes with at most one
    heavy operator are small."""
    ends = post_dominators(flow)
    starts_of: dict[int, list[int]] = {}
    for vertex in flow.order:
        if len(flow.after[vertex]) > 1 and ends.get(vertex, GRAPH) != GRAPH:
            starts_of.setdefault(_epilogue(flow, ends[vertex]), []).append(flow.position[vertex])
    # many blocks can end at one node (dense connections, masks): the innermost and the outermost are enough
    spans = list[tuple[int, int]]()
    for end, starts in starts_of.items():
        spans += [(start, end) for start in {min(starts), max(starts)}]
    # of two blocks that cross, as those of unrelated branches may do, the shorter one is kept
    kept, inside = list[tuple[int, int]](), bytearray(len(flow.order) + 1)
    for start, end in sorted(spans, key=lambda span: (span[1] - span[0], span)):
        if not inside[start] and not inside[end]:
            kept.append((start, end))
            inside[start + 1 : end] = bytes([1]) * (end - start - 1)
    sizes = [0, *accumulate(v >= 0 for v in flow.order)]
    heavies = [0, *accumulate(v in flow.heavy for v in flow.order)]
    blocks, nested = list[Block](), list[Block]()
    for start, end in sorted(kept, key=lambda span: (-span[0], span[1])):  # inner blocks first
        small = sizes[end + 1] - sizes[start + 1] <= whole and heavies[end + 1] - heavies[start + 1] <= 1
        height = 0
        while nested and nested[-1].start < end:
            child = nested.pop()
            height = max(height, 0 if child.is_small else child.height + 1)
        nested.append(Block(start, end, small, height))
        blocks.append(nested[-1])
    return blocks[::-1]


def _epilogue(flow: Flow, vertex: int) -> int:
    for _ in range(EPILOGUE):
        if vertex in flow.leaves_graph or len(flow.after[vertex]) != 1:
            break
        (follower,) = flow.after[vertex]
        next_in_order = flow.position[follower] == flow.position[vertex] + 1
        if flow.op(follower) not in CONTINUING or len(flow.before[follower]) > 1 or not next_in_order:
            break
        vertex = follower
    return flow.position[vertex]


def post_dominators(flow: Flow) -> dict[int, int]:
    """For each vertex that a graph output depends on, the first vertex on all its paths to the end; GRAPH if there is
    none.

    A path ends at a vertex without users. An output that is used further (a cache, a hidden state) does not end one.
    """
    nearest: dict[int, int] = {}
    position = flow.position | {GRAPH: inf}  # no input of the graph post-dominates another vertex

    def common(a: int, b: int) -> int:
        while a != b:
            if position[a] < position[b]:
                a = nearest[a]
            else:
                b = nearest[b]
        return a

    for vertex in reversed(flow.order):
        users = [user for user in flow.after[vertex] if user in nearest]
        if users:
            nearest[vertex] = reduce(common, users)
        elif vertex in flow.leaves_graph:
            nearest[vertex] = GRAPH
    return nearest


def _divergences(flow: Flow, blocks: Sequence[Block]) -> Outline:
    """The tree of groups that branches make: one for each block (from a fork to where its branches join) that is not
    small and less than `NESTING` levels high. `home` has the group of each node."""
    parent, home = [0], [0] * len(flow.model.nodes)
    for block in blocks:
        if not block.is_small and block.height < NESTING:
            parent.append(home[flow.order[block.end]])
            for node in _members(flow, block):
                home[node] = len(parent) - 1
    return Outline(parent, home)


def _units(flow: Flow, blocks: Sequence[Block]) -> list[int]:
    """For each node the last node of the outermost small block around it, or the node itself."""
    unit, end = list(range(len(flow.model.nodes))), 0
    for block in blocks:
        if block.is_small and block.start >= end:
            end = block.end
            for node in _members(flow, block):
                unit[node] = flow.order[end]
    return unit


def _members(flow: Flow, block: Block) -> list[int]:
    """The nodes of a block: those that depend on its start, and those that only these need; not what others share, such
    as a mask that lies in the interval by chance."""
    span = flow.order[block.start + 1 : block.end + 1]
    inside = {flow.order[block.start]}
    for vertex in span:
        if not inside.isdisjoint(flow.before[vertex]):
            inside.add(vertex)
    for vertex in reversed(span):
        if vertex not in inside and vertex not in flow.leaves_graph and inside.issuperset(flow.after[vertex]):
            inside.add(vertex)
    return [v for v in span if v in inside and v >= 0]


# ---------------------------------------------------------------- leaves


class _Clusters:
    """Sets of nodes that grow into leaves within the groups of an outline (`home`), with at most `max_size` nodes
    unless a unit has more. Each has the number of the last node of the unit (small block) that it started with.

    `units[n]` is the last node of node n's unit; a unit with nodes in several groups is ignored.
    """

    def __init__(
        self, flow: Flow, structure: Structure, home: Sequence[int], units: Sequence[int], max_size: int
    ) -> None:
        self._flow, self._structure, self._home, self._max_size = flow, structure, home, max_size
        torn = {u for n, u in enumerate(units) if home[n] != home[u]}
        self._unit = {n: n if u in torn else u for n, u in enumerate(units)}
        self._cluster = dict(self._unit)
        self._members: dict[int, list[int]] = {}
        self._depth: dict[int, int] = {}
        for v in flow.order:
            self._depth[v] = 1 + max((self._depth[b] for b in flow.before[v]), default=0)
            if v >= 0:
                self._members.setdefault(self._unit[v], []).append(v)
        self._heavy = {self._unit[n] for n in flow.heavy}

    def leaves(self) -> list[list[int]]:
        self._follow_producers()
        self._join_consumers()
        return sorted(sorted(nodes) for nodes in self._members.values())

    def _follow_producers(self) -> None:
        """Join each unit without a heavy operator to a producer that feeds nothing else, as the epilogue of a heavy
        operator or as a sequence.

        With several such producers, an elementwise operator joins the heavy one at the end of the longest path (a
        residual Add is fused into the last convolution); other operators, such as Concat, start a leaf.
        """
        flow, unit_of = self._flow, self._unit
        for unit in self._in_order():
            if unit in self._heavy:
                continue
            before = {b for n in self._members[unit] for b in flow.before[n] if unit_of.get(b) != unit}
            data = before & flow.floats
            if len(data) > 1 and len(self._members[unit]) == 1 and flow.op(unit) not in ELEMENTWISE:
                continue
            sources = [
                b
                for b in data or before
                if b >= 0
                and b not in flow.leaves_graph
                and {unit_of[u] for u in flow.after[b]} - {unit_of[b]} == {unit}
                and self._fits(self._cluster[b], unit)
            ]
            if sources:
                self._join(unit, self._cluster[self._best(sources)])

    def _best(self, sources: Sequence[int]) -> int:
        """The source in a heavy cluster, else the deepest; operators decide ties, so that equal blocks choose alike."""
        cluster, depth, texts = self._cluster, self._depth, self._structure.texts
        return max(sources, key=lambda b: (cluster[b] in self._heavy, depth[b], texts[b], b))

    def _join_consumers(self) -> None:
        """Join each cluster without heavy operator to its only consumer, unless it feeds activations to a heavy one,
        which starts a leaf."""
        for cluster in reversed(self._in_order()):
            users = self._users(cluster, self._members[cluster])
            if cluster in self._heavy or len(users) != 1 or GRAPH in users:
                continue
            (user,) = users
            if self._fits(cluster, user) and not (user in self._heavy and self._gives_floats(cluster)):
                self._join(cluster, user)

    def _in_order(self) -> list[int]:
        return sorted(self._members, key=lambda c: self._flow.position[self._members[c][-1]])

    def _users(self, cluster: int, nodes: Iterable[int]) -> set[int]:
        """The other clusters (GRAPH: a graph output) that use results of these nodes."""
        users = set[int]()
        for n in nodes:
            users.update([self._cluster[u] for u in self._flow.after[n]])
            users.update([GRAPH] if n in self._flow.leaves_graph else ())
        return users - {cluster}

    def _gives_floats(self, cluster: int) -> bool:
        return bool(self._users(cluster, self._flow.floats.intersection(self._members[cluster])))

    def _fits(self, a: int, b: int) -> bool:
        return self._home[a] == self._home[b] and len(self._members[a]) + len(self._members[b]) <= self._max_size

    def _join(self, source: int, target: int) -> None:
        for node in self._members[source]:
            self._cluster[node] = target
        self._members[target] += self._members.pop(source)
