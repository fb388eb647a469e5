"""Units: the sets of nodes that are quantized together, and which pairs a decision about them means.

A unit is a set of nodes that the engine runs as one kernel; no pair stands inside it. A decision says for each unit
whether it runs quantized, and for each tensor that a unit writes whether it is stored in 8 bits: some kernels read 8
bits and write floats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from qdqtune.graph.model import Model
from qdqtune.graph.operators import COMPUTE
from qdqtune.placement import start_placements
from qdqtune.types import Edge, Layer, Placement, WeightFormat

FormatShares = Mapping[Edge, Mapping[WeightFormat, float]]
"""By edge of a weight, the weight formats that it may have, each with the time of the weight's matrix product alone as
a share of its float time."""

WORTHWHILE_SHARE = 0.8
"""All weights in so many bits are worth a build if their products take on average at most this share of their float
time. Chosen, not measured."""

NEARLY_FASTEST = 1.1
"""Weight formats that take up to this factor longer than the fastest count as equally fast; the one with the most bits
per weight is taken. Chosen, not measured."""

IN_WORDS = {"w4": "weights in 4 bits", "w8": "weights in 8 bits", **dict.fromkeys(("d8", "d7"), "dynamic quantization")}
"""Names of placements of one family of weight formats."""

Group = tuple[str, ...]
"""Names of nodes that an engine runs together, in graph order."""

State = Literal["float", "handing", "mixed", "quantized"]


@dataclass(frozen=True)
class Unit:
    """A unit: its nodes by index. `inputs` are the edges that enter, `weights` those of constants, `inner` those
    between its nodes, `outputs` the tensors that leave, `weight_only` the uses of weights that may have a weight
    format, `storable` the tensors that it reads through `inputs` and that another unit writes.

    Constants of elementwise operators that are fused behind a product count as inner: that arithmetic is in float.
    """

    number: int
    nodes: tuple[int, ...]
    inputs: tuple[Edge, ...]
    weights: tuple[Edge, ...]
    inner: tuple[Edge, ...]
    outputs: tuple[str, ...]
    weight_only: tuple[Edge, ...]
    storable: tuple[str, ...]
    kind: str
    """Equal for units with equal operators, attributes and shapes, which share their measurements."""


@dataclass(frozen=True)
class Decision:
    """Which units run quantized, by number, which tensors are stored in 8 bits, and the weight formats of float
    units."""

    quantized: frozenset[int] = frozenset()
    stored: frozenset[str] = frozenset()
    weight_formats: frozenset[tuple[int, WeightFormat]] = frozenset()

    @staticmethod
    def of(
        quantized: Iterable[int], stored: Iterable[str] = (), weight_formats: Iterable[tuple[int, WeightFormat]] = ()
    ) -> Decision:
        return Decision(frozenset(quantized), frozenset(stored), frozenset(weight_formats))

    @cached_property
    def format_of(self) -> Mapping[int, WeightFormat]:
        """The weight format of each float unit that has one, by its number."""
        return dict(self.weight_formats)


@dataclass(frozen=True)
class Partition:
    """All units of a model. Only `possible` edges ever carry a pair. `format_shares` are the weight formats that
    weights may have: a unit that runs in float has all its weights in one format, which affects no other unit."""

    model: Model
    possible: frozenset[Edge]
    units: tuple[Unit, ...]
    format_shares: FormatShares = field(default_factory=dict)

    @cached_property
    def owner(self) -> Mapping[str, int]:
        """Node name to the number of its unit."""
        return {self.model.nodes[n].name: u.number for u in self.units for n in u.nodes}

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """The number of the unit that writes each tensor that leaves a unit; graph inputs are absent."""
        return {t: u.number for u in self.units for t in u.outputs}

    @cached_property
    def edges(self) -> Mapping[str, tuple[Edge, ...]]:
        """Every possible edge of each tensor that crosses a border, graph outputs included."""
        crossing: dict[str, list[Edge]] = {}
        for unit in self.units:
            for edge in unit.inputs:
                crossing.setdefault(edge.tensor, []).append(edge)
        outputs = sorted(Edge(tensor, "", slot) for slot, tensor in enumerate(self.model.outputs))
        for edge in outputs:
            if edge in self.possible and edge.tensor in self.producer:
                crossing.setdefault(edge.tensor, []).append(edge)
        return {t: tuple(es) for t, es in crossing.items()}

    def leaving(self, unit: Unit) -> list[str]:
        """The outputs of a unit that may carry pairs."""
        return [t for t in unit.outputs if t in self.edges]

    def weight_formats(self, unit: Unit) -> tuple[WeightFormat, ...]:
        """The weight formats that all of the `weight_only` of a unit may have."""
        first, *others = [self.format_shares[e] for e in unit.weight_only] or [{}]
        return tuple(s for s in first if all(s in other for other in others))

    def share(self, unit: Unit, weight_format: WeightFormat) -> float:
        """The time of a unit's products alone in a weight format, as a share of their float time."""
        shares = [self.format_shares[e].get(weight_format, 1.0) for e in unit.weight_only]
        return sum(shares) / len(shares)

    def spent(self, nodes: Mapping[str, float]) -> list[float]:
        """The time of each unit, from the times of nodes by name."""
        names = [node.name for node in self.model.nodes]
        return [sum([nodes.get(names[n], 0.0) for n in unit.nodes]) for unit in self.units]

    @cached_property
    def users(self) -> Mapping[str, tuple[int | None, ...]]:
        """The units that read each tensor of `edges`, each once; None stands for a graph output."""
        owner = self.owner.get
        return {t: tuple(dict.fromkeys([owner(e.node) for e in edges])) for t, edges in self.edges.items()}

    def near(self, unit: Unit) -> set[int]:
        """A unit, those that read what it writes, and those that write what it reads, where a pair can stand."""
        numbers = {unit.number}
        numbers.update(user for t in self.leaving(unit) for user in self.users[t] if user is not None)
        numbers.update(self.producer[t] for t in unit.storable)
        return numbers

    def placement(self, decision: Decision) -> Placement:
        """The placement of a decision: a stored tensor has pairs on all its edges, any other only where a quantized
        unit reads it; a float unit has its weights in its weight format."""
        edges = {e for n in decision.quantized for e in (*self.units[n].inputs, *self.units[n].weights)}
        edges.update(e for t in decision.stored for e in self.edges.get(t, ()))
        floats = ((self.units[n], s) for n, s in decision.weight_formats if n not in decision.quantized)
        weight_only = ((e, s) for u, s in floats if not is_fed(u, decision) for e in u.weight_only)
        return Placement.of(edges, weight_only)

    def decision(self, placement: Placement) -> Decision:
        """The units that a placement makes run quantized, at least in part, and the tensors that it keeps in 8 bits.

        A unit without weights that reads such tensors and writes floats counts as a float unit behind DQs.
        """
        states = [state(u, self, placement) for u in self.units]
        stored = stored_in(self, placement, states)
        quantized, formats = set[int](), dict[int, WeightFormat]()
        for unit, how in zip(self.units, states, strict=True):
            hands_on = how == "handing" and (unit.weights or any(e.tensor not in stored for e in unit.inputs))
            if hands_on or how in ("quantized", "mixed"):
                quantized.add(unit.number)
            weight_format = format_in(unit, placement)
            if weight_format is not None:
                formats[unit.number] = weight_format
        return Decision.of(quantized, stored, formats.items())


def state(unit: Unit, partition: Partition, placement: Placement) -> State:
    """The state of a unit in a placement: "quantized" if all that it reads and writes has pairs, "handing" if not all
    that it writes, "mixed" if pairs stand inside it or not on all that it reads."""
    placed = placement.edges
    if not placed.isdisjoint(unit.inner):
        return "mixed"  # the engine cannot run it as one kernel
    entering = [e in placed for e in unit.inputs]
    weights = [e in placed for e in unit.weights]
    if not any(entering) or (weights and not any(weights)):
        return "float"
    if not all(entering) or not all(weights):
        return "mixed" if weights else "float"
    leaving = [e in placed for t in unit.outputs for e in partition.edges.get(t, ())]
    return "quantized" if all(leaving) else "handing"


def stored_in(partition: Partition, placement: Placement, states: Sequence[State]) -> frozenset[str]:
    """The tensors that stay in 8 bits: with pairs on all their edges, written by a unit in state quantized."""
    of, all_paired = partition.producer, placement.edges.issuperset
    return frozenset(
        t for t, es in partition.edges.items() if t in of and states[of[t]] == "quantized" and all_paired(es)
    )


def is_fed(unit: Unit, decision: Decision) -> bool:
    """Whether a unit reads a tensor that is stored in 8 bits. A float unit that does keeps its weights as floats:
    behind a DQ, engines take weights in a weight format for half of a pair, and no kernel reads them."""
    return not decision.stored.isdisjoint(unit.storable)


def format_in(unit: Unit, placement: Placement) -> WeightFormat | None:
    """The weight format that all of the `weight_only` of a unit have in a placement; None if they differ."""
    if not placement.weight_only:
        return None
    formats = {placement.weight_formats.get(e) for e in unit.weight_only}
    return formats.pop() if len(formats) == 1 else None


def partition(
    model: Model,
    possible: frozenset[Edge],
    groups: Iterable[Collection[str]],
    format_shares: FormatShares = MappingProxyType({}),
) -> Partition:
    """Units of the given groups of node names; every node in none of them is a unit of its own."""
    taken: set[int] = set()
    sets: list[tuple[int, ...]] = []
    for group in groups:
        inside = sorted({model.index_of[n] for n in group if n in model.index_of} - taken)
        taken.update(inside)
        sets += [tuple(inside)] if inside else []
    sets += [(n.index,) for n in model.nodes if n.index not in taken]
    able, formatted = defaultdict[str, list[Edge]](list), defaultdict[str, list[Edge]](list)
    for by_node, all_edges in ((able, possible), (formatted, format_shares)):
        for edge in all_edges:
            by_node[edge.node].append(edge)
    units = []
    for number, nodes in enumerate(sorted(sets)):
        names = [model.nodes[n].name for n in nodes]
        written = [t for n in nodes for t in model.nodes[n].outputs if t]
        made = set(written)
        edges = [e for name in names for e in sorted(able[name])]
        entering = tuple(e for e in edges if e.tensor not in made and e.tensor not in model.constants)
        constants = tuple(e for e in edges if e.tensor in model.constants)
        weights = tuple(e for e in constants if model.node(e.node).op in COMPUTE) or constants
        units.append(
            Unit(
                number,
                nodes,
                inputs=entering,
                weights=weights,
                inner=tuple(e for e in edges if e not in entering and e not in weights),
                outputs=tuple(t for t in written if any(use.node not in nodes for use in model.uses(t))),
                weight_only=tuple(sorted(e for name in names for e in formatted[name])),
                storable=tuple(dict.fromkeys(e.tensor for e in entering if e.tensor in model.producers)),
                kind=kind_of(model, nodes),
            )
        )
    return Partition(model, possible, tuple(units), format_shares)


def fusion_groups(model: Model, layers: Sequence[Layer]) -> list[Group]:
    """The sets of two or more model nodes, by name, that one layer runs together."""
    known = [tuple(n for n in layer.nodes if n in model.index_of) for layer in layers if layer.kind == "compute"]
    return [group for group in known if len(group) > 1]


def inner_edges(model: Model, group: Collection[str], possible: frozenset[Edge]) -> tuple[Edge, ...]:
    """The possible edges between nodes of a group, in graph order."""
    nodes = [model.nodes[number] for number in sorted({model.index_of[name] for name in group})]
    made = {t for node in nodes for t in node.outputs}
    return tuple(e for node in nodes for e in node.into if e.tensor in made and e in possible)


def split(model: Model, group: Collection[str], cuts: Collection[Edge]) -> list[Group]:
    """The parts that a group is divided into by pairs on the inner edges `cuts`."""
    nodes = [model.node(name) for name in sorted(group, key=model.index_of.__getitem__)]
    bare = ((model.maker(e.tensor), node) for node in nodes for e in node.into if e not in cuts)
    parts = joined([n.index for n in nodes], ((a.index, b.index) for a, b in bare if a is not None and a.name in group))
    return [tuple(model.nodes[n].name for n in part) for part in parts]


def joined(nodes: Sequence[int], pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The sets of nodes that pairs of them connect, each in the order of `nodes`."""
    group = {node: [node] for node in nodes}
    for a, b in pairs:
        small, large = sorted((group[a], group[b]), key=len)
        if small is not large:
            large += small
            group.update(dict.fromkeys(small, large))
    sets: dict[int, list[int]] = {}
    for node in nodes:
        sets.setdefault(id(group[node]), []).append(node)
    return [tuple(each) for each in sets.values()]


def kind_of(model: Model, nodes: tuple[int, ...]) -> str:
    """The operators, attributes and shapes of some nodes as text: equal kinds take equal time."""

    def shape(tensor: str) -> str:
        info = model.tensors.get(tensor)
        if info is None:
            return "?"
        return f"{info.dtype}{info.shape}"

    return ";".join(
        f"{n.domain}:{n.op}{sorted((k, str(v)) for k, v in n.attributes.items())}"
        f"({','.join(shape(t) for t in n.inputs)})->{','.join(shape(t) for t in n.outputs)}"
        for n in (model.nodes[i] for i in nodes)
    )


def usual_groups(model: Model, possible: frozenset[Edge]) -> list[Group]:
    """Groups of two or more nodes as engines usually run them: joined by edges that `everything` leaves bare."""
    bare = possible - start_placements.everything(model, possible).edges
    pairs = ((model.producers[e.tensor], model.index_of[e.node]) for e in bare if e.node)
    sets = joined(range(len(model.nodes)), pairs)
    return [tuple(model.nodes[n].name for n in nodes) for nodes in sets if len(nodes) > 1]


def formats_in(placements: Iterable[Placement]) -> FormatShares:
    """The weight formats that weights have in some placements, with share 1 since nothing is known about their time."""
    found: dict[Edge, dict[WeightFormat, float]] = {}
    for placement in placements:
        for edge, weight_format in placement.weight_formats.items():
            found.setdefault(edge, {})[weight_format] = 1.0
    return found


def expected_share(format_shares: FormatShares, placement: Placement) -> float:
    """The mean share of the float time of the products whose weights have a weight format."""
    shares = [format_shares[edge][weight_format] for edge, weight_format in placement.weight_only]
    return sum(shares) / len(shares)


def weights_by_family(format_shares: FormatShares) -> dict[str, Placement]:
    """For each family of weight formats (4 bits, 8 bits, dynamic), by its name in words, a placement that quantizes the
    weights of all products that the family fits, and has no pairs.

    A weight gets the most exact format of those that take at most `NEARLY_FASTEST` times as long as the fastest of the
    family. A family is left out if its products are expected to take `WORTHWHILE_SHARE` of their float time or more."""
    seeds = {}
    for family in sorted({s.family for shares in format_shares.values() for s in shares}):
        formats = {}
        for edge, shares in format_shares.items():
            able = {s: share for s, share in shares.items() if s.family == family}
            near = [s for s, share in able.items() if share <= NEARLY_FASTEST * min(able.values())]
            if near:
                formats[edge] = max(near, key=lambda s: s.bytes_per_weight)
        placement = Placement.of((), formats.items())
        if expected_share(format_shares, placement) < WORTHWHILE_SHARE:
            seeds[IN_WORDS[family]] = placement
    return seeds


def shares_by_bytes(format_shares: FormatShares) -> FormatShares:
    """`format_shares` with the size of each weight format, as a share of float32, in place of its time."""
    return {edge: {s: s.bytes_per_weight / 4 for s in shares} for edge, shares in format_shares.items()}
