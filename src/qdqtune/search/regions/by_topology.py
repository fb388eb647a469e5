"""Regions by topology: where the graph diverges, and where all branches meet again.

Every node (or graph input) with several users opens a block that ends at its immediate post-dominator, the first node
that all paths from it pass. Blocks are intervals of one depth-first order, so that nesting is a matter of comparing
numbers; post-dominators come from lowest common ancestors by jump pointers, in O(n log n) whatever the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from qdqtune.graph.model import Model
from qdqtune.graph.operators import ELEMENTWISE, HEAVY, LAST_AXIS_NORMALIZATIONS, REARRANGES, may_be_float

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
        """The operator of a node."""
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


def nest(flow: Flow, whole: int) -> Nest:
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


def outline(flow: Flow, found: Nest) -> Outline:
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


def units(flow: Flow, found: Nest) -> list[int]:
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
