"""Makes the map of a model: groups of nodes, the tensors between them, and blocks of groups if there are many."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal

from qdqtune.explanation.report_values import Map, MapBlock, MapGroup, MapNode
from qdqtune.explanation.unfused import is_float
from qdqtune.graph.model import Model
from qdqtune.graph.operators import ASKS_SHAPE, QDQ, REARRANGES
from qdqtune.search.costs.attribution import NodeTime
from qdqtune.types import Edge, Layer, Placement

MOST_CELLS = 240
"""Most groups that are drawn without blocks: about what a screen shows. Chosen, not measured."""

REPEATS = 3
"""Least number of groups that share a bar. Chosen, not measured."""

INDEX = re.compile(r"(?<=[._/])\d+(?=[._/]|$)")
"""Matches the index of a module in a list, and the number that an exporter adds to a name."""

VIEWS = REARRANGES - {"Transpose"}
"""Operators that only change the shape: they join the group that makes their input."""

USUAL = 80
"""Most blocks that are shown on one level. Chosen, not measured."""

LEAST_BLOCKS = 4
"""Fewest blocks into which modules may divide groups, and fewest groups in each block on average."""

LEAST_GROUPS = 8
"""Least number of groups in a block where names show no modules."""


@dataclass(frozen=True)
class Ran:
    """A build: its placement, the layers that the engine ran, and the time of each node where it is known."""

    placement: Placement
    layers: Sequence[Layer] = ()
    spent: Mapping[str, NodeTime] = field(default_factory=dict)

    def own(self, nodes: Iterable[str]) -> float | None:
        """The time of some nodes in ms without their conversions; None if unknown."""
        return sum(self.spent[name].own for name in nodes) if self.spent else None

    def conversions(self, nodes: Iterable[str]) -> float:
        """The time in ms of the conversions that are attributed to some nodes."""
        return sum(self.spent[name].conversions for name in nodes) if self.spent else 0.0


def flows(model: Model, groups: Sequence[Sequence[str]]) -> tuple[tuple[int, int], ...]:
    """Pairs of groups, by number, of which the second reads from the first. Nodes outside of groups are ignored."""
    owner = {name: number for number, group in enumerate(groups) for name in group}
    pairs = set()
    for node in model.nodes:
        for tensor in (*node.inputs, *node.captures):
            if (maker := model.maker(tensor)) is not None:
                pairs.add((owner.get(maker.name), owner.get(node.name)))
    return tuple(sorted((a, b) for a, b in pairs if a is not None and b is not None and a != b))


def in_order(model: Model, groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The groups in topological order, ties in file order; groups in or behind a cycle come last, in file order."""
    in_file = sorted((tuple(g) for g in groups), key=lambda g: max(model.index_of[n] for n in g))
    waits = [0] * len(in_file)
    readers: list[list[int]] = [[] for _ in in_file]
    for a, b in flows(model, in_file):
        waits[b] += 1
        readers[a].append(b)
    ready = [number for number, count in enumerate(waits) if not count]
    ordered: dict[int, None] = {}
    while ready:
        number = heappop(ready)
        ordered[number] = None
        for reader in readers[number]:
            waits[reader] -= 1
            if not waits[reader]:
                heappush(ready, reader)
    return [in_file[n] for n in ordered] + [group for n, group in enumerate(in_file) if n not in ordered]


def blocks(groups: Sequence[Sequence[str]], operators: Mapping[str, str]) -> tuple[MapBlock, ...]:
    """Divide groups into blocks of consecutive ones, where modules begin as far as names show; none where all fit a
    screen. `operators` are by node name."""
    return _divided(groups, operators, [scope(group[0]) for group in groups], 0, len(groups))


def _divided(
    groups: Sequence[Sequence[str]],
    operators: Mapping[str, str],
    scopes: Sequence[tuple[str, ...]],
    first: int,
    last: int,
) -> tuple[MapBlock, ...]:
    if last - first <= MOST_CELLS:
        return ()
    modules = _by_module(scopes, first, last)
    size = max(math.ceil((last - first) / USUAL), LEAST_GROUPS)
    parts = []
    for a, b in pairwise([*(modules or range(first, last, size)), last]):
        named = [operators[name] for group in groups[a:b] for name in group]
        label = block_label(named, scopes[a:b], is_module=bool(modules))
        parts.append(MapBlock(label, a, b, _divided(groups, operators, scopes, a, b)))
    return tuple(parts)


def _by_module(scopes: Sequence[tuple[str, ...]], first: int, last: int) -> list[int]:
    """Numbers of the groups that begin a module, at the deepest level that a screen can show; empty if none fits."""
    for depth in range(max(map(len, scopes[first:last])), 0, -1):
        inner = [n for n in range(first + 1, last) if scopes[n - 1][:depth] != scopes[n][:depth]]
        if LEAST_BLOCKS <= len(inner) + 1 <= min(USUAL, (last - first) / LEAST_BLOCKS):
            return [first, *inner]
    return []


def everywhere(model: Model) -> frozenset[Edge]:
    """Every use of a float tensor by a node, constants aside."""
    uses = ((t, n.name, slot) for n in model.nodes for slot, t in enumerate(n.inputs) if t not in model.constants)
    return frozenset(Edge(*use) for use in uses if (info := model.tensors.get(use[0])) is not None and info.is_float)


def op_of(model: Model, name: str) -> str:
    return model.node(name).op


def scope(name: str) -> tuple[str, ...]:
    """The modules in a node's name: those of /encoder/layer.0/attention/MatMul are encoder, layer.0, attention."""
    return tuple(part for part in name.split("/") if part)[:-1]


def shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many modules two `scope`s have in common, from the outermost."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def block_label(operators: Sequence[str], scopes: Sequence[tuple[str, ...]], *, is_module: bool) -> str:
    """A name for a block: its first and last module unless `is_module`; else its module, else common operators."""
    depth = min(shared(scopes[0], other) for other in scopes)
    ends = [scope[depth] for scope in (scopes[0], scopes[-1]) if len(scope) > depth]
    if len(set(ends)) == 2 and not is_module:
        return " – ".join(ends)
    if common := scopes[0][:depth]:
        return "/".join(common[-2:])
    return " · ".join(op for op, _ in Counter(operators).most_common(2))


def group_label(operators: Sequence[str]) -> str:
    """The operators of a group, each once: Conv + Relu. Q, DQ and views count only if there is nothing else."""
    return " + ".join(dict.fromkeys(op for op in operators if op not in QDQ | VIEWS) or dict.fromkeys(operators))


def _with_views(model: Model, groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The groups, with each group that holds VIEWS only joined to the group that makes its input."""
    owner = {name: number for number, group in enumerate(groups) for name in group}
    joined: dict[int, list[str]] = {number: [] for number in range(len(groups))}
    home = list(range(len(groups)))
    for number in sorted(joined, key=lambda n: model.index_of[groups[n][0]]):
        nodes = [model.node(name) for name in groups[number]]
        maker = model.maker(nodes[0].inputs[0]) if nodes[0].inputs else None
        if maker is not None and maker.name in owner and all(node.op in VIEWS for node in nodes):
            home[number] = home[owner[maker.name]]
        joined[home[number]] += groups[number]
    return [tuple(group) for group in joined.values() if group]


def _shape_nodes(model: Model) -> frozenset[str]:
    """Nodes that depend on shapes and constants only, and make no graph output."""
    nodes, apart = set[str](), set(model.constants)
    for node in model.nodes:
        read = [tensor for tensor in (*node.inputs, *node.captures) if tensor]
        is_apart = node.op in ASKS_SHAPE or apart.issuperset(read)
        if is_apart and set(node.outputs).isdisjoint(model.outputs):
            nodes.add(node.name)
            apart.update(node.outputs)
    return frozenset(nodes)


def alike(drawn: Map) -> list[list[int]]:
    """Lists of group numbers: groups whose names differ in the index of their module alone share a list, as those of
    /layers.0/MatMul and /layers.1/MatMul; others are alone in one."""
    together: dict[object, list[int]] = {}
    for number, group in enumerate(drawn.groups):
        name = drawn.nodes[group.nodes[0]].name
        has_index = INDEX.search("/".join(scope(name))) is not None
        together.setdefault((group.label, INDEX.sub("", name)) if has_index else number, []).append(number)
    lists: list[list[int]] = []
    for numbers in together.values():
        lists += [numbers] if len(numbers) >= REPEATS else [[number] for number in numbers]
    return lists


def draw(
    model: Model,
    groups: Sequence[Sequence[str]],
    folded: Collection[str],
    before: Ran,
    after: Ran | None,
    error_db: Mapping[str, float],
    whys: Mapping[str, str],
    tuned: str = "tuned",
    floats: str = "float",
) -> Map:
    """The map of a model whose nodes form `groups`, with the builds `before` and `after`, which are called `floats` and
    `tuned`. `folded`: nodes that the engine computes in advance. `error_db`: output SQNR by tensor, if only that
    one is rounded. `whys`: reasons by node name."""
    of_shapes = _shape_nodes(model)
    shapes = [group for group in groups if of_shapes.issuperset(group)]
    ordered = in_order(model, _with_views(model, [group for group in groups if not of_shapes.issuperset(group)]))
    between = flows(model, ordered)
    parts = blocks(ordered, {node.name: node.op for node in model.nodes})
    for apart in ([name for group in shapes for name in group], folded):
        if apart:
            ordered.append(tuple(sorted(apart, key=model.index_of.__getitem__)))
    hidden: dict[str, Literal["shapes", "folded"]] = dict.fromkeys((n for g in shapes for n in g), "shapes")
    hidden |= dict.fromkeys(folded, "folded")
    quantized = _quantized(model, after)
    numbers = {name: number for number, name in enumerate(n for group in ordered for n in group)}
    nodes = tuple(MapNode(name, op_of(model, name), name in quantized, whys.get(name, "")) for name in numbers)
    wide = frozenset(edge.node for edge in after.placement.wide) if after is not None else frozenset[str]()
    boxes = tuple(_group(model, g, numbers, hidden, before, after, quantized, wide, error_db) for g in ordered)
    return Map(nodes, boxes, between, parts, tuned, floats)


def _group(
    model: Model,
    group: Sequence[str],
    numbers: Mapping[str, int],
    hidden: Mapping[str, Literal["shapes", "folded"]],
    before: Ran,
    after: Ran | None,
    quantized: frozenset[str],
    wide: frozenset[str],
    error_db: Mapping[str, float],
) -> MapGroup:
    operators = [op_of(model, name) for name in group]
    low: Literal["8 bit", "16 bit"] = "8 bit" if wide.isdisjoint(group) else "16 bit"
    nodes = [model.node(n) for n in group]
    written = [t for node in nodes for t in node.outputs if t in error_db]
    return MapGroup(
        tuple(numbers[name] for name in group),
        group_label(operators),
        hidden.get(group[0]) or ("float" if quantized.isdisjoint(group) else low),
        before.own(group),
        None if after is None else after.own(group),
        0.0 if after is None else after.conversions(group),
        min((error_db[t] for t in written), default=None),
    )


def _quantized(model: Model, after: Ran | None) -> frozenset[str]:
    """Nodes that run in 8 bits: they read tensors with pairs, and their layer, if known, is not in float."""
    if after is None:
        return frozenset()
    fed = {e.node for e in after.placement if e.tensor not in model.constants}
    precisions = {name: layer.precision for layer in after.layers for name in layer.nodes}
    return frozenset(name for name in fed if not is_float(precisions.get(name, "")))
