"""Makes the map of a model: groups of nodes, the tensors between them, and blocks of groups if there are many."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
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


def scope(name: str) -> tuple[str, ...]:
    """The modules in a node's name: those of /encoder/layer.0/attention/MatMul are encoder, layer.0, attention."""
    return tuple(part for part in name.split("/") if part)[:-1]


def block_label(operators: Sequence[str], scopes: Sequence[tuple[str, ...]], *, is_module: bool) -> str:
    """A name for a block: its first and last module unless `is_module`; else its module, else common operators."""
    same = takewhile(lambda names: len(set(names)) == 1, zip(*scopes, strict=False))
    common = [names[0] for names in same]
    ends = [scope[len(common)] for scope in (scopes[0], scopes[-1]) if len(scope) > len(common)]
    if len(set(ends)) == 2 and not is_module:
        return " – ".join(ends)
    if common:
        return "/".join(common[-2:])
    return " · ".join(op for op, _ in Counter(operators).most_common(2))


def group_label(operators: Sequence[str]) -> str:
    """The operators of a group, each once: Conv + Relu. Q, DQ and views count only if there is nothing else."""
    return " + ".join(dict.fromkeys(op for op in operators if op not in QDQ | VIEWS) or dict.fromkeys(operators))


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
    units: Sequence[Sequence[str]],
    before: Ran,
    after: Ran | None,
    error_db: Mapping[str, float],
    whys: Mapping[str, str],
    tuned: str = "tuned",
    floats: str = "float",
) -> Map:
    """The map of a model whose nodes form `units`, with the builds `before` and `after`, which are called `floats` and
    `tuned`. `error_db`: output SQNR by tensor, if only that one is rounded. `whys`: reasons by node name.

    A unit that only changes a shape joins the group that makes its input. Nodes that the engine computes in advance
    form a group, and nodes that compute shapes.
    """
    of_shapes = _shape_nodes(model)
    folded = {name for layer in before.layers if layer.kind == "folded" for name in layer.nodes}
    groups, home = list[list[str]](), dict[str, int]()
    hidden: dict[Literal["shapes", "folded"], list[str]] = {"shapes": [], "folded": []}
    for unit in sorted(units, key=lambda unit: max(model.index_of[name] for name in unit)):
        if folded.issuperset(unit) or of_shapes.issuperset(unit):
            hidden["folded" if folded.issuperset(unit) else "shapes"] += unit
            continue
        nodes = [model.node(name) for name in unit]
        maker = model.maker(nodes[0].inputs[0]) if nodes[0].inputs else None
        number = len(groups)
        if maker is not None and maker.name in home and all(node.op in VIEWS for node in nodes):
            number = home[maker.name]
        else:
            groups.append([])
        groups[number] += unit
        home.update(dict.fromkeys(unit, number))
    flows = set[tuple[int, int]]()
    for node in model.nodes:
        for tensor in (*node.inputs, *node.captures):
            maker = model.maker(tensor)
            if maker is not None and maker.name in home and home.get(node.name, home[maker.name]) != home[maker.name]:
                flows.add((home[maker.name], home[node.name]))
    parts = blocks(groups, {node.name: node.op for node in model.nodes})
    quantized = _quantized(model, after)
    precisions: dict[str, Literal["8 bit", "16 bit", "folded", "shapes"]] = dict.fromkeys(quantized, "8 bit")
    wide = frozenset[Edge]() if after is None else after.placement.wide
    precisions.update(dict.fromkeys({edge.node for edge in wide} & quantized, "16 bit"))
    for kind, names in hidden.items():
        precisions.update(dict.fromkeys(names, kind))
    groups += [sorted(names, key=model.index_of.__getitem__) for names in hidden.values() if names]
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    boxes = []
    for group in groups:
        nodes = [model.node(name) for name in group]
        ran = [precisions[name] for name in group if name in precisions]
        errors = [error_db[tensor] for node in nodes for tensor in node.outputs if tensor in error_db]
        own, conversions = _time(after, group)
        boxes.append(
            MapGroup(
                nodes=tuple(numbers[name] for name in group),
                label=group_label([node.op for node in nodes]),
                precision="16 bit" if "16 bit" in ran else ran[0] if ran else "float",
                float_ms=_time(before, group)[0],
                tuned_ms=own,
                conversion_ms=conversions,
                error_db=min(errors, default=None),
            )
        )
    drawn = tuple(MapNode(name, model.node(name).op, name in quantized, whys.get(name, "")) for name in numbers)
    return Map(drawn, tuple(boxes), tuple(sorted(flows)), parts, tuned, floats)


def _time(ran: Ran | None, group: Sequence[str]) -> tuple[float | None, float]:
    """The ms of a group in a build without its conversions, None if unknown, and those of its conversions."""
    if ran is None or not ran.spent:
        return None, 0.0
    return sum(ran.spent[name].own for name in group), sum(ran.spent[name].conversions for name in group)


def _quantized(model: Model, after: Ran | None) -> frozenset[str]:
    """Nodes that run in 8 bits: they read tensors with pairs, and their layer, if known, is not in float."""
    if after is None:
        return frozenset()
    fed = {e.node for e in after.placement if e.tensor not in model.constants}
    precisions = {name: layer.precision for layer in after.layers for name in layer.nodes}
    return frozenset(name for name in fed if not is_float(precisions.get(name, "")))
