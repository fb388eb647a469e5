"""Makes the map of a model: groups of nodes, the tensors between them, and blocks of groups if there are many."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from posixpath import commonpath

from qdqtune.explanation.units import IN_ADVANCE, Explanation, total
from qdqtune.graph.model import Model
from qdqtune.graph.operators import ASKS_SHAPE, QDQ, REARRANGES

MOST_CELLS = 240
"""Most groups that are drawn without blocks: about what a screen shows. Chosen, not measured."""

REPEATS = 3
"""Least number of groups that share a bar. Chosen, not measured."""

INDEX = re.compile(r"(?<=[._/])\d+(?=[._/]|$)")
"""Matches the index of a module in a list, and the number that an exporter adds to a name."""

VIEWS = REARRANGES - {"Transpose"}
"""Operators that only change the shape: they join the group that makes their input."""

SHAPES = "computing shapes"
"""The state of a group of nodes that compute shapes alone."""

USUAL = 80
"""Most blocks that are shown on one level. Chosen, not measured."""

LEAST_BLOCKS = 4
"""Fewest blocks into which modules may divide groups, and fewest groups in each block on average."""

LEAST_GROUPS = 8
"""Least number of groups in a block where names show no modules."""


@dataclass(frozen=True)
class MapNode:
    """A node of the model, with the state of its unit, and why (see `units.Explanation`)."""

    name: str
    op: str
    state: str
    why: str = ""


@dataclass(frozen=True)
class MapGroup:
    """Nodes, by number, that the engine runs together, with reshapes of their results; or all nodes that it computes
    in advance, or that compute shapes alone. Times come from profiled inferences; None where the engine
    gives none. `conversion_ms` is the time of the pairs at the group's borders in the tuned model.

    `error_db` is the output SQNR if only the results of this group were rounded; None if it was not measured.
    """

    nodes: tuple[int, ...]
    label: str
    state: str
    float_ms: float | None
    tuned_ms: float | None
    conversion_ms: float
    error_db: float | None


@dataclass(frozen=True)
class MapBlock:
    """The groups from `first` up to, not including, `last` under one name; many groups form inner blocks."""

    label: str
    first: int
    last: int
    blocks: tuple[MapBlock, ...] = ()


@dataclass(frozen=True)
class Map:
    """A model as a map: nodes, groups of them, pairs of groups of which the second reads from the first, and blocks."""

    nodes: tuple[MapNode, ...]
    groups: tuple[MapGroup, ...]
    flows: tuple[tuple[int, int], ...]
    blocks: tuple[MapBlock, ...]
    tuned: str
    """The name of what ships, which `tuned_ms` of groups is about; empty if that is the float model."""
    before: str = "float"
    """The model that `float_ms` of groups is about: float, or rewritten float."""


def blocks(names: Sequence[str], first: int = 0) -> tuple[MapBlock, ...]:
    """Divide the groups from number `first` on, whose first nodes have these names, into blocks of consecutive ones:
    where modules begin, at the deepest level that a screen can show, else into equal parts; none where all fit one."""
    if len(names) <= MOST_CELLS:
        return ()
    scopes = [scope(name) for name in names]
    starts: Sequence[int] = range(0, len(names), max(math.ceil(len(names) / USUAL), LEAST_GROUPS))
    for depth in range(1, 1 + max(map(len, scopes))):
        modules = [n for n in range(len(names)) if n == 0 or scopes[n - 1][:depth] != scopes[n][:depth]]
        if LEAST_BLOCKS <= len(modules) <= min(USUAL, len(names) / LEAST_BLOCKS):
            starts = modules
    parts = []
    for a, b in pairwise([*starts, len(names)]):
        module = commonpath("/".join(each) for each in scopes[a:b])
        label = "/".join(module.split("/")[-2:]) or f"groups {first + a + 1} to {first + b}"
        parts.append(MapBlock(label, first + a, first + b, blocks(names[a:b], first + a)))
    return tuple(parts)


def scope(name: str) -> tuple[str, ...]:
    """The modules in a node's name: those of /encoder/layer.0/attention/MatMul are encoder, layer.0, attention."""
    return tuple(part for part in name.split("/") if part)[:-1]


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
    """Lists of group numbers. Groups that repeat share a list: at least `REPEATS` of one label, whose names differ only
    in the index of the module, as /layers.0/MatMul and /layers.1/MatMul. Every other group has a list to itself."""
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
    rows: Sequence[Explanation],
    error_db: Mapping[str, float],
    tuned: str = "",
    floats: str = "float",
    kernels: Iterable[Sequence[str]] = (),
) -> Map:
    """The map of a model whose units have these `rows`. `tuned` is the name of what ships, empty if that is the float
    model, which is called `floats`. `error_db`: output SQNR by tensor, if only that one is rounded.

    Units of one of the `kernels`, sets of nodes that run together, form a group. A unit that only changes a shape joins
    the group that makes its input. Nodes that the engine computes in advance form a group, and nodes that compute
    shapes.
    """
    of_shapes, first_of = _shape_nodes(model), {name: kernel[0] for kernel in kernels for name in kernel}
    home = dict[str, int]()
    groups = list[list[Explanation]]()
    hidden: dict[str, list[Explanation]] = {IN_ADVANCE: [], SHAPES: []}
    for row in sorted(rows, key=lambda row: max(map(model.index_of.__getitem__, row.nodes))):
        if row.state == IN_ADVANCE or of_shapes.issuperset(row.nodes):
            hidden[IN_ADVANCE if row.state == IN_ADVANCE else SHAPES].append(row)
            continue
        inputs = model.node(row.nodes[0]).inputs
        maker = model.maker(inputs[0]) if inputs else None
        source = maker.name if maker is not None and VIEWS.issuperset(row.operators) else ""
        number = home.get(source, home.get(first_of.get(row.nodes[0], ""), len(groups)))
        if number == len(groups):
            groups.append([])
        groups[number].append(row)
        home.update(dict.fromkeys(row.nodes, number))
    flows = set[tuple[int, int]]()
    for node in model.nodes:
        for tensor in (*node.inputs, *node.captures):
            maker = model.maker(tensor)
            if maker is not None and maker.name in home and node.name in home:
                flows.add((home[maker.name], home[node.name]))
    parts = blocks([group[0].nodes[0] for group in groups])
    states = [group[0].state for group in groups]
    for state, members in hidden.items():
        if members:
            groups.append(members)
            states.append(state)
    nodes = list[MapNode]()
    boxes = list[MapGroup]()
    for group, state in zip(groups, states, strict=True):
        first = len(nodes)
        nodes += [
            MapNode(name, op, row.state, row.why)
            for row in group
            for name, op in zip(row.nodes, row.operators, strict=True)
        ]
        written = [tensor for node in nodes[first:] for tensor in model.node(node.name).outputs]
        conversions = sum(row.conversion_ms for row in group)
        ms = total(row.ms for row in group) if tuned else None
        boxes.append(
            MapGroup(
                nodes=tuple(range(first, len(nodes))),
                label=state if state in hidden else group_label([node.op for node in nodes[first:]]),
                state=state,
                float_ms=total(row.float_ms for row in group),
                tuned_ms=None if ms is None else ms - conversions,
                conversion_ms=conversions if tuned else 0.0,
                error_db=min((error_db[tensor] for tensor in written if tensor in error_db), default=None),
            )
        )
    crossing = sorted((a, b) for a, b in flows if a != b)
    return Map(tuple(nodes), tuple(boxes), tuple(crossing), parts, tuned, floats)
