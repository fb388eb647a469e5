"""Leaf regions: a heavy operator with the cheap ones that an engine would fuse behind it, or a short sequence."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtune.graph.model import GRAPH
from qdqtune.graph.operators import ELEMENTWISE
from qdqtune.search.regions.by_topology import Flow, Outline
from qdqtune.search.regions.structure import Structure


def form(flow: Flow, structure: Structure, outline: Outline, units: Sequence[int], max_size: int) -> list[list[int]]:
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
        """The clusters in graph order."""
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
