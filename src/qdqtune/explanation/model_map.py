"""The map of a model in the report: groups of nodes in the order in which they run; a repeated block is one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qdqtune.explanation.formatting import counted
from qdqtune.explanation.units import IN_ADVANCE, Explanation, total
from qdqtune.graph.inference import constant_nodes
from qdqtune.graph.model import Model
from qdqtune.graph.operators import ASKS_SHAPE, QDQ, REARRANGES

VIEWS = REARRANGES - {"Transpose"}
"""Operators that only change the shape: they join the group that makes their input."""

SHAPES = "computing shapes"
"""The state of a group of nodes that compute shapes alone."""

LONGEST = 200
"""Most groups in a block that repeats."""

LEAST_REPEATED = 6
"""Fewest groups in all repeats of a block that become one row. Chosen, not measured."""

BARS = 24
"""Most groups in the chart of times; one more bar is for all others."""

USUAL, MOST = 6, 40
"""A row ends at the end of a module from `USUAL` groups on, and at `MOST` groups anyway. Chosen, not measured."""


@dataclass(frozen=True)
class MapNode:
    name: str
    op: str
    state: str
    why: str = ""


@dataclass(frozen=True)
class MapGroup:
    """Nodes that the engine runs together, with reshapes of their results; `count` is above 1 if it stands for several
    such groups. One group has all nodes that the engine computes in advance, one those that only compute shapes. Times
    come from profiled inferences, if the engine gives any. `conversion_ms` of `tuned_ms` is for pairs at its borders.

    `error_db` is the output SQNR if only this group's results are rounded; None if it was not measured.
    """

    nodes: tuple[MapNode, ...]
    label: str
    state: str
    float_ms: float | None
    tuned_ms: float | None
    conversion_ms: float
    error_db: float | None
    count: int = 1

    @property
    def name(self) -> str:
        """The name of the first node that is no Q or DQ."""
        return next((node.name for node in self.nodes if node.op not in QDQ), self.nodes[0].name)

    @property
    def longest(self) -> float:
        return max(self.float_ms or 0.0, self.tuned_ms or 0.0)

    @property
    def reasons(self) -> Mapping[tuple[str, str], Sequence[str]]:
        names: dict[tuple[str, str], list[str]] = {}
        for node in self.nodes:
            names.setdefault((node.state, node.why), []).append(node.name)
        return names


def together(groups: Sequence[MapGroup]) -> MapGroup:
    """Several groups merged into one."""
    return replace(
        groups[0],
        nodes=tuple(node for group in groups for node in group.nodes),
        float_ms=total(group.float_ms for group in groups),
        tuned_ms=total(group.tuned_ms for group in groups),
        conversion_ms=sum(group.conversion_ms for group in groups),
        error_db=min((group.error_db for group in groups if group.error_db is not None), default=None),
        count=sum(group.count for group in groups),
    )


@dataclass(frozen=True)
class MapRow:
    """Groups that run one after the other. Each stands for all `times` repeats of it, if its block repeats."""

    name: str
    groups: tuple[MapGroup, ...]
    times: int = 1


@dataclass(frozen=True)
class Map:
    rows: tuple[MapRow, ...]
    tuned: str = ""
    """The name of what ships, which `tuned_ms` is about; empty if that is the float model."""
    before: str = "float"
    """The model that `float_ms` is about: float, or rewritten float."""

    @property
    def groups(self) -> Sequence[MapGroup]:
        return [group for row in self.rows for group in row.groups]

    @property
    def bars(self) -> Sequence[MapGroup]:
        """The slowest groups, and one for all others; empty if times are unknown."""
        groups = sorted((group for group in self.groups if group.longest), key=lambda group: -group.longest)
        rest = [replace(together(groups[BARS:]), label="all others")] if groups[BARS:] else []
        return [*groups[:BARS], *rest]


def rows_of(groups: Sequence[MapGroup], keys: Sequence[object]) -> tuple[MapRow, ...]:
    """Groups in rows: a block of groups whose `keys` repeat is one row; other rows end where a module ends."""
    rows, alone = list[MapRow](), list[MapGroup]()

    def end() -> None:
        if alone:
            rows.append(MapRow(_name(alone[:1], alone[-1:]), tuple(alone)))
            alone.clear()

    at = 0
    while at < len(groups):
        length, times = _repeats(keys, at)
        if length * times >= LEAST_REPEATED:
            end()
            blocks = [groups[start : start + length] for start in range(at, at + length * times, length)]
            rows.append(MapRow(_name(blocks[0], blocks[-1]), tuple(map(together, zip(*blocks, strict=True))), times))
            at += length * times
            continue
        is_new = alone and scope(alone[-1].name)[:2] != scope(groups[at].name)[:2]
        if len(alone) >= (USUAL if is_new else MOST):
            end()
        alone.append(groups[at])
        at += 1
    end()
    return tuple(rows)


def _repeats(keys: Sequence[object], at: int) -> tuple[int, int]:
    """For the block at index `at` whose repeats cover the most groups: its length, and how often it occurs in a row."""
    best = 1, 1
    for length in range(1, min(LONGEST, (len(keys) - at) // 2) + 1):
        if keys[at + length] != keys[at]:
            continue
        block, times = keys[at : at + length], 1
        while block == keys[at + times * length : at + (times + 1) * length]:
            times += 1
        if times > 1 and length * times > best[0] * best[1]:
            best = length, times
    return best


def _name(first: Sequence[MapGroup], last: Sequence[MapGroup]) -> str:
    """The most frequent module among the first groups, and that among the last ones."""
    return " to ".join(dict.fromkeys(Counter(map(_module, block)).most_common(1)[0][0] for block in (first, last)))


def _module(group: MapGroup) -> str:
    """The module of a group: the upper two levels of its name; its name if it has none."""
    return "/".join(scope(group.name)[:2]) or group.name.strip("/")


def scope(name: str) -> tuple[str, ...]:
    """The modules in a node's name: encoder, layer.0, attention for /encoder/layer.0/attention/MatMul."""
    return tuple(part for part in name.split("/") if part)[:-1]


def group_label(operators: Sequence[str]) -> str:
    """The operators of a group, each once: Conv + Relu. Q, DQ and reshapes only count if there is nothing else."""
    return " + ".join(dict.fromkeys(op for op in operators if op not in QDQ | VIEWS) or dict.fromkeys(operators))


def draw(
    model: Model,
    rows: Sequence[Explanation],
    error_db: Mapping[str, float],
    tuned: str = "",
    floats: str = "float",
    kernels: Iterable[Sequence[str]] = (),
) -> Map:
    """The map of a model from the `rows` of its units. `tuned` names the file that ships, empty if that is the float
    model, which is called `floats`. `error_db`: output SQNR by tensor, if only that one is rounded.

    Units of one of the `kernels` (sets of names of nodes that run together) form a group. A unit that only changes a
    shape joins the group that makes its input.
    """
    outputs = set(model.outputs)
    of_shapes = constant_nodes(model, model.constants, ASKS_SHAPE, lambda node: outputs.isdisjoint(node.outputs)).keys()
    first_of = {name: kernel[0] for kernel in kernels for name in kernel}
    home = dict[str, int]()
    groups = list[list[Explanation]]()
    hidden: dict[str, list[Explanation]] = {IN_ADVANCE: [], SHAPES: []}
    for row in sorted(rows, key=lambda row: max(map(model.index_of.__getitem__, row.nodes))):
        if row.state == IN_ADVANCE or of_shapes >= set(row.nodes):
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
    drawn = [(group[0].state, group) for group in groups]
    drawn += [(state, members) for state, members in hidden.items() if members]
    boxes, keys = list[MapGroup](), list[object]()
    for state, group in drawn:
        nodes = tuple(
            MapNode(name, op, row.state, row.why)
            for row in group
            for name, op in zip(row.nodes, row.operators, strict=True)
        )
        written = [tensor for node in nodes for tensor in model.node(node.name).outputs]
        touched = [tensor for node in nodes for tensor in model.node(node.name).inputs] + written
        conversions = sum(row.conversion_ms for row in group)
        boxes.append(
            MapGroup(
                nodes=nodes,
                label=counted(len(nodes), "node") if state in hidden else group_label([node.op for node in nodes]),
                state=state,
                float_ms=total(row.float_ms for row in group),
                tuned_ms=total(row.ms for row in group) if tuned else None,
                conversion_ms=conversions if tuned else 0.0,
                error_db=min((error_db[tensor] for tensor in written if tensor in error_db), default=None),
            )
        )
        keys.append((boxes[-1].label, state, [info and info.shape for info in map(model.tensors.get, touched)]))
    count = len(groups)
    apart = [MapRow(box.state, (box,)) for box in boxes[count:]]
    return Map((*rows_of(boxes[:count], keys[:count]), *apart), tuned, floats)
