"""Makes the map of a model: groups of nodes, the tensors between them, and blocks of groups if there are many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal

import numpy as np

from qdqtune.explanation.report_values import Map, MapBlock, MapGroup, MapNode
from qdqtune.explanation.unfused import is_float
from qdqtune.graph.model import Model
from qdqtune.graph.operators import ASKS_SHAPE, QDQ, REARRANGES
from qdqtune.search.costs.attribution import NodeTime
from qdqtune.types import Edge, Layer, Placement

MOST_CELLS = 240
"""Most groups that are drawn without blocks: about what a screen shows. Chosen, not measured."""

MOST_FLAT = 60
"""Most groups that are drawn without blocks if sequences of groups repeat. Chosen, not measured."""

REPEATS = 3
"""Least number of times in a row that a sequence of groups occurs to count as a repeated block."""

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
    found = set()
    for node in model.nodes:
        for tensor in (*node.inputs, *node.captures):
            if (maker := model.maker(tensor)) is not None:
                found.add((owner.get(maker.name), owner.get(node.name)))
    return tuple(sorted((a, b) for a, b in found if a is not None and b is not None and a != b))


def in_order(model: Model, groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The groups in topological order, ties in file order; groups in or behind a cycle come last, in file order."""
    told = sorted((tuple(g) for g in groups), key=lambda g: max(model.index_of[n] for n in g))
    waits = [0] * len(told)
    readers: list[list[int]] = [[] for _ in told]
    for a, b in flows(model, told):
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
    return [told[n] for n in ordered] + [group for n, group in enumerate(told) if n not in ordered]


def blocks(
    groups: Sequence[Sequence[str]], operators: Mapping[str, str], between: Sequence[tuple[int, int]]
) -> tuple[MapBlock, ...]:
    """Divide groups into blocks of consecutive ones; none where all fit a screen and nothing repeats.

    Blocks begin where a sequence of groups repeats; else where modules begin; else where few tensors cross the border.
    `operators` are by node name, `between` is the result of `flows`.
    """
    if len(groups) <= MOST_FLAT:
        return ()
    crossing = [0] * (len(groups) + 1)
    for a, b in between:
        low, high = min(a, b), max(a, b)
        crossing[low + 1] += 1
        crossing[high + 1] -= 1
    for border in range(1, len(crossing)):
        crossing[border] += crossing[border - 1]
    scopes = [scope(group[0]) for group in groups]
    return _divided(groups, operators, crossing, scopes, 0, len(groups))


def _divided(
    groups: Sequence[Sequence[str]],
    operators: Mapping[str, str],
    crossing: Sequence[int],
    scopes: Sequence[tuple[str, ...]],
    first: int,
    last: int,
) -> tuple[MapBlock, ...]:
    count = last - first
    if count <= MOST_FLAT:
        return ()
    begins, size = _repeated([group_label([operators[n] for n in g]) for g in groups[first:last]])
    again = {first + begin: number for number, begin in enumerate(begins, 1)}
    if count <= MOST_CELLS and not again:
        return ()
    modules = [] if again else _by_module(scopes, first, last)
    ends = {end for a in again for end in (a, a + size)} | {first}
    borders = sorted(ends - {last}) if again else modules or _evenly(crossing, first, last)
    names, made = _module_of_each([scopes[a : a + size] for a in again]), []
    for a, b in pairwise([*borders, last]):
        named = [operators[n] for g in groups[a:b] for n in g]
        label = block_label(named, scopes[a:b], is_module=bool(modules or again))
        if a in again:
            label = names[again[a] - 1] if names else f"block {again[a]} of {len(again)}"
        made.append(MapBlock(label, a, b, _divided(groups, operators, crossing, scopes, a, b)))
    return tuple(made)


def _repeated(labels: Sequence[str]) -> tuple[list[int], int]:
    """The starts and the length of a sequence of groups that repeats at least `REPEATS` times in a row and covers most
    of the groups; among several, that which covers the most groups, and among equals the shortest. Empty if there is
    none, or it repeats more than USUAL times."""
    numbers = np.unique(labels, return_inverse=True)[1]
    found, most = ([0], 1), len(labels) // 2
    for period in range(1, min(len(labels) // REPEATS, MOST_CELLS) + 1):
        differ = np.flatnonzero(numbers[:-period] != numbers[period:])
        ends = np.array([-1, *differ, len(numbers) - period])
        longest = int(np.argmax(np.diff(ends)))
        begin, times = int(ends[longest]) + 1, int(np.diff(ends)[longest] - 1) // period + 1
        if times >= REPEATS and times * period > most:
            found, most = ([begin + n * period for n in range(times)], period), times * period
    return found if found[1] >= LEAST_BLOCKS and len(found[0]) <= USUAL else ([], 0)


def _module_of_each(blocks: Sequence[Sequence[tuple[str, ...]]]) -> list[str]:
    """A name for each block, given the `scope` of each of its groups: the module of most groups, at the first depth at
    which all blocks differ. Empty if there is no such depth."""
    for depth in range(1, 1 + max((len(scope) for block in blocks for scope in block), default=0)):
        found = [Counter(scope[:depth] for scope in block).most_common(1)[0][0] for block in blocks]
        if len(set(found)) == len(blocks):
            return [scope[-1] for scope in found]
    return []


def _by_module(scopes: Sequence[tuple[str, ...]], first: int, last: int) -> list[int]:
    """Numbers of the groups that begin a module, at the deepest level that a screen can show; empty if none fits."""
    for depth in range(max(map(len, scopes[first:last])), 0, -1):
        inner = [n for n in range(first + 1, last) if scopes[n - 1][:depth] != scopes[n][:depth]]
        if LEAST_BLOCKS <= len(inner) + 1 <= min(USUAL, (last - first) / LEAST_BLOCKS):
            return [first, *inner]
    return []


def _evenly(crossing: Sequence[int], first: int, last: int) -> list[int]:
    """Borders at about equal distances where few tensors cross."""
    size = max((last - first) / USUAL, LEAST_GROUPS)
    borders, slack = [first], max(1, int(size * 0.45))
    for number in range(1, math.ceil((last - first) / size)):
        ideal = first + round(number * size)
        window = range(max(borders[-1] + 1, ideal - slack), min(last, ideal + slack + 1))
        if window:
            borders.append(min(window, key=lambda b: (crossing[b], abs(b - ideal))))
    return borders


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
    found, known = set[str](), set(model.constants)
    for node in model.nodes:
        read = [tensor for tensor in (*node.inputs, *node.captures) if tensor]
        is_apart = node.op in ASKS_SHAPE or known.issuperset(read)
        if is_apart and set(node.outputs).isdisjoint(model.outputs):
            found.add(node.name)
            known.update(node.outputs)
    return frozenset(found)


def alike(drawn: Map) -> list[list[int]]:
    """Lists of group numbers: groups at the same position of repeated blocks share a list, others are alone in one."""
    shapes = [tuple(g.label for g in drawn.groups[b.first : b.last]) for b in drawn.blocks]
    times, place = Counter(shapes), dict[int, tuple[object, ...]]()
    for block, shape in zip(drawn.blocks, shapes, strict=True):
        if times[shape] >= REPEATS and len(shape) >= LEAST_BLOCKS:
            place |= {n: (shape, n - block.first) for n in range(block.first, block.last)}
    found: dict[object, list[int]] = {}
    for number in range(len(drawn.groups)):
        found.setdefault(place.get(number, number), []).append(number)
    return list(found.values())


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
    parts = blocks(ordered, {node.name: node.op for node in model.nodes}, between)
    for apart in ([name for group in shapes for name in group], folded):
        if apart:
            ordered.append(tuple(sorted(apart, key=model.index_of.__getitem__)))
    hidden: dict[str, Literal["shapes", "folded"]] = dict.fromkeys((n for g in shapes for n in g), "shapes")
    hidden |= dict.fromkeys(folded, "folded")
    quantized = _quantized(model, after)
    numbers = {name: number for number, name in enumerate(n for group in ordered for n in group)}
    nodes = tuple(MapNode(name, op_of(model, name), name in quantized, whys.get(name, "")) for name in numbers)
    wide = frozenset(edge.node for edge in after.placement.wide) if after is not None else frozenset[str]()
    told = tuple(_group(model, g, numbers, hidden, before, after, quantized, wide, error_db) for g in ordered)
    return Map(nodes, told, between, parts, tuned, floats)


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
    told = {name: layer.precision for layer in after.layers for name in layer.nodes}
    return frozenset(name for name in fed if not is_float(told.get(name, "")))
