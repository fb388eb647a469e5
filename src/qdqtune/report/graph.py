"""A model as a map: groups of nodes, who reads from whom, and blocks of groups where there are many of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from qdqtune.commands.reasons import is_float, is_low
from qdqtune.graph.model import Model
from qdqtune.graph.operators import QDQ
from qdqtune.report.values import Block, Group, Map, Node
from qdqtune.search.costs.attribution import Times
from qdqtune.types import Edge, Layer, Placement

MOST = 240
"""As many cells as a screen shows at once; more groups than that form blocks."""

USUAL = 80
"""The most blocks that a level is divided into."""

FEWEST = 4
"""The fewest blocks that modules may form, and the fewest groups of one on average."""

LEAST = 8
"""Groups of a block where names tell of no modules: fewer are not worth a step down."""


@dataclass(frozen=True)
class Ran:
    """A build: where its pairs stood, the layers that the engine ran, and what they took, where it told."""

    placement: Placement
    layers: tuple[Layer, ...]
    times: Times | None


def flows(model: Model, groups: Sequence[Sequence[str]]) -> tuple[tuple[int, int], ...]:
    """Who reads from whom, by number of group; nodes in none are passed over."""
    owner = {name: number for number, group in enumerate(groups) for name in group}
    found = set()
    for node in model.nodes:
        for tensor in (*node.inputs, *node.captures):
            if (maker := model.maker(tensor)) is not None:
                found.add((owner.get(maker.name), owner.get(node.name)))
    return tuple(sorted((a, b) for a, b in found if a is not None and b is not None and a != b))


def in_order(model: Model, groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The groups so that each comes behind those it reads from, else as in the file. In a circle, as in the file."""
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
) -> tuple[Block, ...]:
    """Blocks of consecutive groups, none where all groups fit a screen. Borders lie where modules begin, or
    where few values cross."""
    if len(groups) <= MOST:
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
) -> tuple[Block, ...]:
    count = last - first
    if count <= MOST:
        return ()
    modules = _by_module(scopes, first, last)
    made = []
    for a, b in pairwise([*(modules or _evenly(crossing, first, last)), last]):
        named = [operators[n] for g in groups[a:b] for n in g]
        label = block_label(named, scopes[a:b], is_module=bool(modules))
        made.append(Block(label, a, b, _divided(groups, operators, crossing, scopes, a, b)))
    return tuple(made)


def _by_module(scopes: Sequence[tuple[str, ...]], first: int, last: int) -> list[int]:
    """Where modules begin, as deep as their number fits a screen; nothing where names tell of none."""
    for depth in range(max(map(len, scopes[first:last])), 0, -1):
        inner = [n for n in range(first + 1, last) if scopes[n - 1][:depth] != scopes[n][:depth]]
        if FEWEST <= len(inner) + 1 <= min(USUAL, (last - first) / FEWEST):
            return [first, *inner]
    return []


def _evenly(crossing: Sequence[int], first: int, last: int) -> list[int]:
    """Borders at about equal distances, where few values cross."""
    size = max((last - first) / USUAL, LEAST)
    borders, slack = [first], max(1, int(size * 0.45))
    for number in range(1, math.ceil((last - first) / size)):
        ideal = first + round(number * size)
        window = range(max(borders[-1] + 1, ideal - slack), min(last, ideal + slack + 1))
        if window:
            borders.append(min(window, key=lambda b: (crossing[b], abs(b - ideal))))
    return borders


def everywhere(model: Model) -> frozenset[Edge]:
    """Every use of a float value by a node: where pairs might stand as far as the graph tells."""
    uses = ((t, n.name, slot) for n in model.nodes for slot, t in enumerate(n.inputs) if t not in model.constants)
    return frozenset(Edge(*use) for use in uses if (info := model.tensors.get(use[0])) is not None and info.is_float)


def op_of(model: Model, name: str) -> str:
    """The operator of a node."""
    return model.node(name).op


def scope(name: str) -> tuple[str, ...]:
    """The modules that a name stands in: /encoder/layer.0/attention/MatMul is in encoder, layer.0, attention."""
    return tuple(part for part in name.split("/") if part)[:-1]


def shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many modules two names have in common, from the outermost."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def block_label(operators: Sequence[str], scopes: Sequence[tuple[str, ...]], *, is_module: bool) -> str:
    """The module that a block is, or from which module to which it goes, or else the operators that it has most of."""
    depth = min(shared(scopes[0], other) for other in scopes)
    ends = [scope[depth] for scope in (scopes[0], scopes[-1]) if len(scope) > depth]
    if len(set(ends)) == 2 and not is_module:
        return " – ".join(ends)
    if common := scopes[0][:depth]:
        return "/".join(common[-2:])
    return " · ".join(op for op, _ in Counter(operators).most_common(2))


def group_label(operators: Sequence[str]) -> str:
    """Operators in order, each once: Conv + Relu. Pairs are named where there is nothing else."""
    return " + ".join(dict.fromkeys(op for op in operators if op not in QDQ) or dict.fromkeys(operators))


def draw(
    model: Model,
    groups: Sequence[Sequence[str]],
    folded: Collection[str],
    before: Ran,
    after: Ran | None,
    error_db: Mapping[str, float],
    whys: Mapping[str, str],
    tuned: str = "tuned",
) -> Map:
    """The map of a model whose nodes form `groups`; `error_db` by tensor, `whys` by name of node."""
    ordered = in_order(model, groups)
    between = flows(model, ordered)
    parts = blocks(ordered, {node.name: node.op for node in model.nodes}, between)
    if folded:
        ordered.append(tuple(sorted(folded, key=model.index_of.__getitem__)))
    quantized = _quantized(model, before, after)
    numbers = {name: number for number, name in enumerate(n for group in ordered for n in group)}
    nodes = tuple(Node(name, op_of(model, name), name in quantized, whys.get(name, "")) for name in numbers)
    told = tuple(_group(model, g, numbers, folded, before, after, quantized, error_db) for g in ordered)
    return Map(nodes, told, between, parts, tuned)


def _group(
    model: Model,
    group: Sequence[str],
    numbers: Mapping[str, int],
    folded: Collection[str],
    before: Ran,
    after: Ran | None,
    quantized: Collection[str],
    error_db: Mapping[str, float],
) -> Group:
    operators = [op_of(model, name) for name in group]
    eight = sum(name in quantized for name in group)
    nodes = [model.node(n) for n in group]
    written = [t for node in nodes for t in node.outputs if t in error_db]
    float_ms = _spent(before, group)
    tuned_ms = None if after is None else _spent(after, group)
    return Group(
        tuple(numbers[name] for name in group),
        group_label(operators),
        "folded" if all(n in folded for n in group) else "8 bit" if eight else "float",
        float_ms,
        tuned_ms,
        0.0 if after is None else _converted(model, group, after),
        min((error_db[t] for t in written), default=None),
    )


def _quantized(model: Model, before: Ran, after: Ran | None) -> frozenset[str]:
    """Nodes that run on 8 bits: pairs stand before them, and their layer, where the engine tells, is not in float. Of
    a build by itself the layers alone tell."""
    if after is None:
        return frozenset(name for layer in before.layers if is_low(layer.precision) for name in layer.nodes)
    fed = {e.node for e in after.placement if e.tensor not in model.constants}
    told = {name: layer.precision for layer in after.layers for name in layer.nodes}
    return frozenset(name for name in fed if not is_float(told.get(name, "")))


def _spent(ran: Ran, group: Sequence[str]) -> float | None:
    if ran.times is None or not ran.times.nodes:
        return None
    return sum(ran.times.nodes.get(name, 0.0) for name in group)


def _converted(model: Model, group: Sequence[str], ran: Ran) -> float:
    """What conversions at the borders of a group take: a Q goes with who writes the value (or, for an input of the
    model, with its first reader), a DQ with its first reader."""
    if ran.times is None:
        return 0.0
    spent = 0.0
    inside = set(group)
    for name in group:
        node = model.node(name)
        spent += sum(ran.times.quantize.get(t, 0.0) for t in node.outputs)
        for tensor in dict.fromkeys(t for t in node.inputs if t):
            uses = model.uses(tensor)
            first = next((model.nodes[u.node].name for u in uses if u.node >= 0), "")
            if first in inside and first == name:
                spent += ran.times.dequantize.get(tensor, 0.0)
                spent += 0.0 if tensor in model.producers else ran.times.quantize.get(tensor, 0.0)
    for name in group:  # what is read by nobody but the graph
        for tensor in model.node(name).outputs:
            if tensor and all(u.node < 0 for u in model.uses(tensor)):
                spent += ran.times.dequantize.get(tensor, 0.0)
    return spent
