"""Regions by name: the modules of the PyTorch program, which its exporter left in node names.

The node `/encoder/layer.0/attention/self/query/MatMul` lies in module encoder/layer.0/attention/self/query.
"""

from __future__ import annotations

from qdqtune.graph.model import Model
from qdqtune.graph.operators import ELEMENTWISE
from qdqtune.search.regions.by_topology import Flow, Outline

NAMED_SHARE = 0.6
"""The share of nodes that must carry module names for `has_module_names` to say so."""

Path = tuple[str, ...]


def has_module_names(model: Model) -> bool:
    """Whether most nodes have names such as `/a/b/Op`."""
    return sum(len(_path(n.name) or ()) > 0 for n in model.nodes) > NAMED_SHARE * len(model.nodes)


def outline(flow: Flow, whole: int) -> Outline:
    """Each module as a group, but for small ones: at most `whole` nodes with at most one heavy operator.

    A node without a path goes where its producer is, or else its user. An elementwise operator that alone uses a
    module's result belongs to the module.
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
    _draw_in(flow, home, parent)
    return Outline(parent, home)


def _path(name: str) -> Path | None:
    """The module path in a node name, () for a node of the model itself; None where the name tells nothing."""
    return tuple(name.split("/")[1:-1]) if name.startswith("/") else None


def _paths(flow: Flow) -> list[Path]:
    paths = [_path(n.name) for n in flow.model.nodes]
    for vertices, neighbours in ((flow.order, flow.before), (flow.order[::-1], flow.after)):
        for node in (v - flow.first for v in vertices if v >= flow.first):
            if paths[node] is None:
                near = (paths[v - flow.first] for v in neighbours[flow.first + node] if v >= flow.first)
                paths[node] = next((path for path in near if path is not None), None)
    return [path or () for path in paths]


def _draw_in(flow: Flow, home: list[int], parent: list[int]) -> None:
    """Move epilogues: an elementwise node right behind the group that feeds it, and that feeds nothing else."""
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
