"""Region discovery: the graph as a hierarchy of regions that are tuned together, with points that may carry a pair.

Phase 1 divides the nodes into top regions: by divergence and convergence of the graph (topology), or by the modules of
the PyTorch program, which its exporter left in node names (names). Phase 2 refines those that are large or hold several
heavy operators into composites, down to leaves: a heavy operator with the cheap ones that an engine would fuse behind
it, or a short sequence.

By topology, regions are where the graph diverges, and where all branches meet again. Every node (or graph input) with
several users opens a block that ends at its immediate post-dominator, the first node that all paths from it pass.
Blocks are intervals of one depth-first order, so that nesting is a matter of comparing numbers; post-dominators come
from lowest common ancestors by jump pointers, in O(n log n) whatever the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Literal, NamedTuple

from qdqtune.graph.model import GRAPH, Model
from qdqtune.graph.operators import ELEMENTWISE, HEAVY, LAST_AXIS_NORMALIZATIONS, REARRANGES, may_be_float
from qdqtune.search.regions.structure import Listing, Structure


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
        stack = [self]
        while stack:
            region = stack.pop()
            yield region
            stack.extend(reversed(region.children))

    def all_nodes(self) -> tuple[int, ...]:
        """The node indices of this region and everything under it, in graph order."""
        return tuple(sorted(i for region in self.walk() for i in region.nodes))


PointKind = Literal["node_input", "child_input", "node_output", "child_output"]


@dataclass(frozen=True, order=True, slots=True)
class Point:
    """An insertion point: input or output `number` of a pattern's node, or of its child region, number `owner`."""

    kind: PointKind
    owner: int
    number: int


Scheme = frozenset[Point]
"""The insertion points of a pattern that carry a pair."""

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
        return tuple(r for r in self.walk() if r.type is RegionType.COMPOSITE)


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
    blocks = nested_blocks(flow, min_topdown_size)
    groups = outline_by_names(flow, min_topdown_size) if method == "names" else outline_by_topology(flow, blocks)
    groups = _without_wrappers(flow, groups)
    structure = Structure(model)
    parts = leaves_within(flow, structure, groups, units_of(flow, blocks), max_sequence_size)
    return _numbered(structure, _tree(groups, parts), method)


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


def _numbered(structure: Structure, tree: _Tree, method: Literal["names", "topology"]) -> Regions:
    """The regions of a tree, made without recursion, since hierarchies can be deep."""
    model, order, stack = structure.model, list[tuple[_Tree, int]](), [(tree, -1)]
    while stack:
        order.append(stack.pop())
        own, level = order[-1]
        stack.extend((child, level + 1) for child in reversed(own.children))
    regions: dict[int, Region] = {}
    listings: dict[Region, Listing] = {}
    for number in range(len(order) - 1, 0, -1):
        own, level = order[number]
        listing = structure.listing([child.nodes for child in own.children] or [own.nodes])
        outputs = tuple(model.nodes[listing.nodes[n]].outputs[k] for n, k in listing.exits)
        children = tuple(regions.pop(id(child)) for child in own.children)
        kind, nodes = (RegionType.COMPOSITE, ()) if children else (RegionType.LEAF, tuple(own.nodes))
        region = Region(number - 1, level, kind, nodes, children, listing.borders, outputs)
        regions[id(own)], listings[region] = region, listing
    tops = tuple(regions[id(child)] for child in tree.children)
    inputs = tuple(t for t in model.inputs if any(use.node != GRAPH for use in model.uses(t)))
    outputs = tuple(t for t in model.outputs if t in model.producers)
    return Regions(Region(-1, -1, RegionType.ROOT, (), tops, inputs, outputs), method, listings)


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


EPILOGUE = 3
"""The most nodes that a block takes in behind the point where it converges. Chosen, not measured."""

NESTING = 6
"""The most levels of blocks. Outer blocks of deeper nests are dropped, so that the work stays linear in the nodes."""


CONTINUING = ELEMENTWISE | REARRANGES | LAST_AXIS_NORMALIZATIONS
"""Operators that a block may take in behind its convergence."""


class Flow:
    """The activation graph. Vertices are the graph inputs and then the nodes; edges are tensors and captures."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.first = len(model.inputs)
        """The vertex of node 0."""
        vertex = {t: i for i, t in enumerate(model.inputs)}
        vertex.update({t: self.first + n for t, n in model.producers.items()})
        inputs = [{vertex[t] for t in (*n.inputs, *n.captures) if t in vertex} for n in model.nodes]
        self.before: list[tuple[int, ...]] = [()] * self.first + [tuple(sorted(vertices)) for vertices in inputs]
        users: list[list[int]] = [[] for _ in self.before]
        for here, vertices in enumerate(self.before):
            for v in vertices:
                users[v].append(here)
        self.after = [tuple(vertices) for vertices in users]
        self.heavy = [False] * self.first + [n.op in HEAVY for n in model.nodes]
        self.is_float = [True] * self.first + [any(may_be_float(model, t) for t in n.outputs if t) for n in model.nodes]
        self.leaves_graph = [False] * len(self.before)
        for tensor in model.outputs:
            if tensor in vertex:
                self.leaves_graph[vertex[tensor]] = True
        self.order = self._depth_first()
        """All vertices, producers first; what only one user needs stands right before it."""
        self.position = {v: i for i, v in enumerate(self.order)}

    def op(self, node: int) -> str:
        return self.model.nodes[node].op

    def _depth_first(self) -> list[int]:
        """Producers are visited in graph order: side inputs that branches share (masks) then come before them."""
        done = [False] * len(self.before)
        order: list[int] = []
        for sink in (v for v, users in enumerate(self.after) if not users):
            stack = [(sink, iter(self.before[sink]))]
            done[sink] = True
            while stack:
                vertex, producers = stack[-1]
                for producer in producers:
                    if not done[producer]:
                        done[producer] = True
                        stack.append((producer, iter(self.before[producer])))
                        break
                else:
                    order.append(vertex)
                    stack.pop()
        return order


class Block(NamedTuple):
    """The vertices at positions `start` + 1 to `end` of the depth-first order: after a divergence, to its end."""

    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Nest:
    """Blocks that contain each other or are disjoint, outer ones first.

    `parent` is the index of the block around each, or -1. A `small` block is not worth dividing: it has at most one
    heavy operator and at most as many nodes as the caller said.
    """

    blocks: Sequence[Block]
    parent: Sequence[int]
    small: Sequence[bool]


@dataclass(frozen=True, eq=False)
class Outline:
    """Nested groups of nodes: `home[n]` is the innermost group of node n, `parent[g]` the group around g (< g).

    Group 0 is the whole graph, its own parent.
    """

    parent: Sequence[int]
    home: Sequence[int]


def nested_blocks(flow: Flow, whole: int) -> Nest:
    """The blocks of a graph. Those of at most `whole` nodes, with at most one heavy operator, are small."""
    kept = sorted(_without_crossings(_blocks(flow), len(flow.order)), key=lambda b: (b.start, -b.end))
    sizes = [0, *accumulate(int(v >= flow.first) for v in flow.order)]
    heavies = [0, *accumulate(int(flow.heavy[v]) for v in flow.order)]
    parent, stack = [], list[int]()
    for i, block in enumerate(kept):
        while stack and kept[stack[-1]].end <= block.start:
            stack.pop()
        parent.append(stack[-1] if stack else -1)
        stack.append(i)
    small = [
        sizes[b.end + 1] - sizes[b.start + 1] <= whole and heavies[b.end + 1] - heavies[b.start + 1] <= 1 for b in kept
    ]
    return Nest(kept, parent, small)


def outline_by_topology(flow: Flow, found: Nest) -> Outline:
    """The blocks that are not small, as nested groups; of deep nests only the innermost levels."""
    height = [0] * len(found.blocks)
    for i in reversed(range(len(found.blocks))):
        if not found.small[i] and found.parent[i] >= 0:
            height[found.parent[i]] = max(height[found.parent[i]], height[i] + 1)
    parent, home = [0], [0] * len(flow.model.nodes)
    for i, block in enumerate(found.blocks):
        if not found.small[i] and height[i] < NESTING:
            parent.append(home[flow.order[block.end] - flow.first])
            for node in _members(flow, block):
                home[node] = len(parent) - 1
    return Outline(parent, home)


def units_of(flow: Flow, found: Nest) -> list[int]:
    """For each node the last node of the outermost small block around it, or itself."""
    unit = list(range(len(flow.model.nodes)))
    for i, block in enumerate(found.blocks):
        if found.small[i] and (found.parent[i] < 0 or not found.small[found.parent[i]]):
            for node in _members(flow, block):
                unit[node] = flow.order[block.end] - flow.first
    return unit


def _members(flow: Flow, block: Block) -> list[int]:
    """The nodes of a block: those that depend on its start, and those that nothing else needs.

    What others share, such as a mask that happens to be made inside the interval, is not among them.
    """
    span = flow.order[block.start + 1 : block.end + 1]
    inside = {flow.order[block.start]}
    for vertex in span:
        if not inside.isdisjoint(flow.before[vertex]):
            inside.add(vertex)
    for vertex in reversed(span):
        if vertex not in inside and not flow.leaves_graph[vertex] and inside.issuperset(flow.after[vertex]):
            inside.add(vertex)
    return [v - flow.first for v in span if v in inside and v >= flow.first]


def _blocks(flow: Flow) -> list[Block]:
    """A block for each divergence: to its convergence, and the operators that continue it."""
    ends = post_dominators(flow)
    starts_of: dict[int, list[int]] = {}
    for vertex in flow.order:
        if len(flow.after[vertex]) > 1 and ends[vertex] >= 0:
            starts_of.setdefault(_epilogue(flow, ends[vertex]), []).append(flow.position[vertex])
    # many blocks can end at one node (dense connections, masks): the innermost and the outermost are enough
    return [Block(start, end) for end, starts in starts_of.items() for start in sorted({min(starts), max(starts)})]


def _epilogue(flow: Flow, vertex: int) -> int:
    """The position where a block that converges at `vertex` ends."""
    for _ in range(EPILOGUE):
        if flow.leaves_graph[vertex] or len(flow.after[vertex]) != 1:
            break
        follower = flow.after[vertex][0]
        next_in_order = flow.position[follower] == flow.position[vertex] + 1
        if flow.op(follower - flow.first) not in CONTINUING or len(flow.before[follower]) > 1 or not next_in_order:
            break
        vertex = follower
    return flow.position[vertex]


def _without_crossings(found: Sequence[Block], length: int) -> list[Block]:
    """Keep the shorter of two blocks that cross, as blocks of unrelated branches in one part of the order may do."""
    inner = list(range(length + 1))  # inner[p]: the next border from p on that lies inside no kept block

    def open_border(p: int) -> int:
        while inner[p] != p:
            inner[p] = p = inner[inner[p]]
        return p

    kept = []
    for block in sorted(found, key=lambda b: (b.end - b.start, b)):
        if open_border(block.start) == block.start and open_border(block.end) == block.end:
            kept.append(block)
            border = open_border(block.start + 1)
            while border < block.end:
                inner[border] = border + 1
                border = open_border(border)
    return kept


def post_dominators(flow: Flow) -> list[int]:
    """For each vertex the first vertex that all its paths to the end pass; -1 if there is none.

    A path ends at a vertex without users. What no graph output depends on is no path, and an output that is used
    further (a cache, a hidden state) does not end one. Ancestors are found with skew-binary jump pointers.
    """
    end = len(flow.order)
    parent, depth, jump = [end] * (end + 1), [0] * (end + 1), [end] * (end + 1)
    live = [False] * (end + 1)

    def common(a: int, b: int) -> int:
        while depth[a] != depth[b]:
            if depth[a] < depth[b]:
                a, b = b, a
            a = jump[a] if depth[jump[a]] >= depth[b] else parent[a]
        while a != b:
            a, b = (jump[a], jump[b]) if jump[a] != jump[b] else (parent[a], parent[b])
        return a

    for vertex in reversed(flow.order):
        users = [u for u in flow.after[vertex] if live[u]]
        live[vertex] = bool(users) or flow.leaves_graph[vertex]
        above = users[0] if users else end
        for user in users[1:]:
            above = common(above, user)
        parent[vertex], depth[vertex] = above, depth[above] + 1
        higher = jump[above]
        even = depth[above] - depth[higher] == depth[higher] - depth[jump[higher]]
        jump[vertex] = jump[higher] if even else above
    return [p if p != end else -1 for p in parent[:-1]]


def leaves_within(
    flow: Flow, structure: Structure, outline: Outline, units: Sequence[int], max_size: int
) -> list[list[int]]:
    """Divide the nodes into leaves within the groups of the outline, with at most `max_size` nodes unless a unit has
    more.

    `units[n]` is the last node of the unit (small block) of node n; a unit whose nodes lie in several groups is
    ignored. Leaves are in graph order of their first nodes, and so are the nodes in each.
    """
    clusters = _Clusters(flow, structure, outline, units, max_size)
    clusters.follow_producers()
    clusters.join_consumers()
    clusters.join_producers()
    return clusters.result()


class _Clusters:
    """Sets of nodes that grow; each is named after the last node of the unit that it started with."""

    def __init__(self, flow: Flow, structure: Structure, outline: Outline, units: Sequence[int], max_size: int) -> None:
        self._flow, self._structure, self._home, self._max_size = flow, structure, outline.home, max_size
        torn = {u for n, u in enumerate(units) if outline.home[n] != outline.home[u]}
        self._unit = [n if u in torn else u for n, u in enumerate(units)]
        self._cluster = list(self._unit)
        self._members: dict[int, list[int]] = {}
        for v in flow.order:
            if v >= flow.first:
                self._members.setdefault(self._unit[v - flow.first], []).append(v - flow.first)
        self._sole_user = [self._sole_user_of(v) for v in range(len(flow.order))]
        self._heavy = {u: any(flow.heavy[flow.first + n] for n in nodes) for u, nodes in self._members.items()}
        self._depth = [0] * len(flow.order)
        for v in flow.order:
            self._depth[v] = 1 + max((self._depth[b] for b in flow.before[v]), default=0)

    def result(self) -> list[list[int]]:
        return sorted(sorted(nodes) for nodes in self._members.values())

    def follow_producers(self) -> None:
        """Join each light unit to a producer that feeds nothing else: the epilogue of a heavy operator, or a sequence.

        Of several such producers, an elementwise operator joins the heavy one at the end of the longest path (a
        residual Add is fused into the last convolution); other operators, such as Concat, start a leaf.
        """
        flow = self._flow
        for unit in self._in_order():
            nodes, feeds_only = list(self._members[unit]), self._sole_user
            if self._heavy[unit] or not any(feeds_only[b] == unit for n in nodes for b in flow.before[flow.first + n]):
                continue
            before = {b for n in nodes for b in flow.before[flow.first + n] if not self._is_in(b, unit)}
            data = [b for b in before if flow.is_float[b]]
            if len(data) > 1 and len(nodes) == 1 and flow.op(unit) not in ELEMENTWISE:
                continue
            sources = [b for b in data or before if b >= flow.first and feeds_only[b] == unit]
            sources = [b for b in sources if self._fits(self._cluster[b - flow.first], unit)]
            if sources:
                self._join(unit, self._cluster[self._best(sources) - flow.first])

    def _best(self, sources: Sequence[int]) -> int:
        """The heaviest, deepest source; of equal ones a choice by structure, so that equal blocks choose alike."""
        rank = {b: (self._heavy[self._cluster[b - self._flow.first]], self._depth[b]) for b in sources}
        highest = max(rank.values())
        first = [b for b in sources if rank[b] == highest]
        if len(first) == 1:
            return first[0]
        texts, prints = self._structure.texts, self._structure.fingerprints
        return max(first, key=lambda b: (texts[b - self._flow.first], prints[b - self._flow.first], b))

    def join_consumers(self) -> None:
        """Join each light cluster to its only consumer, unless it feeds activations to a heavy one, which starts a
        leaf."""
        for cluster in reversed(self._in_order()):
            users = set[int]() if self._heavy[cluster] else self._users(cluster)
            if len(users) == 1:
                (user,) = users
                if (
                    user != GRAPH
                    and self._fits(cluster, user)
                    and not (self._heavy[user] and self._gives_floats(cluster))
                ):
                    self._join(cluster, user)

    def join_producers(self) -> None:
        """Join shape arithmetic to the one cluster whose shapes it reads."""
        flow = self._flow
        for cluster in self._in_order():
            if self._heavy[cluster] or self._gives_floats(cluster):
                continue
            before = {b for n in self._members[cluster] for b in flow.before[flow.first + n]}
            if any(b < flow.first for b in before):
                continue
            sources = {self._cluster[b - flow.first] for b in before} - {cluster}
            if len(sources) == 1 and self._fits(source := sources.pop(), cluster):
                self._join(cluster, source)

    def _in_order(self) -> list[int]:
        flow = self._flow
        return sorted(self._members, key=lambda c: flow.position[flow.first + self._members[c][-1]])

    def _is_in(self, vertex: int, unit: int) -> bool:
        return vertex >= self._flow.first and self._unit[vertex - self._flow.first] == unit

    def _sole_user_of(self, vertex: int) -> int:
        """The only other unit that uses a vertex, -1 if there is none or if there are several."""
        flow = self._flow
        users = {self._unit[u - flow.first] for u in flow.after[vertex]}
        if vertex >= flow.first:
            users.discard(self._unit[vertex - flow.first])
        return users.pop() if len(users) == 1 and not flow.leaves_graph[vertex] else -1

    def _users(self, cluster: int) -> set[int]:
        """The other clusters (GRAPH for a graph output) that use a cluster's results."""
        flow, users = self._flow, set[int]()
        for v in (flow.first + n for n in self._members[cluster]):
            users.update([self._cluster[u - flow.first] for u in flow.after[v]])
            if flow.leaves_graph[v]:
                users.add(GRAPH)
        return users - {cluster}

    def _gives_floats(self, cluster: int) -> bool:
        """Whether a result that is used outside is float."""
        flow = self._flow
        floats = (v for v in (flow.first + n for n in self._members[cluster]) if flow.is_float[v])
        return any(
            flow.leaves_graph[v] or any(self._cluster[u - flow.first] != cluster for u in flow.after[v]) for v in floats
        )

    def _fits(self, a: int, b: int) -> bool:
        return self._home[a] == self._home[b] and len(self._members[a]) + len(self._members[b]) <= self._max_size

    def _join(self, source: int, target: int) -> None:
        for node in self._members[source]:
            self._cluster[node] = target
        self._members[target] += self._members.pop(source)
        self._heavy[target] |= self._heavy.pop(source)
