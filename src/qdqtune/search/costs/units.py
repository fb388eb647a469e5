"""Units: sets of nodes that are quantized together, and the placement of pairs that a decision about them means.

A unit is a set of nodes that the engine runs as one kernel; no pair stands inside it. A decision says for each unit
whether it is quantized, and for each tensor that units write whether it is stored in 8 bits, as some kernels read 8
bits and write floats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Literal

from qdqtune.graph.model import Model
from qdqtune.graph.operators import COMPUTE
from qdqtune.placement import start_placements
from qdqtune.types import Edge, Layer, Placement, WeightFormat

FormatShares = Mapping[Edge, Mapping[WeightFormat, float]]
"""For each use of a weight, its possible weight formats, with the time of its product relative to float."""

WORTHWHILE_SHARE = 0.8
"""A family of weight formats is built if its products take at most this share of float time. Chosen, not measured."""

NEARLY_FASTEST = 1.1
"""Weight formats up to this factor slower than the fastest count as equally fast; the one with the most bits is taken.
Chosen, not measured."""

IN_WORDS = {"w4": "weights in 4 bits", "w8": "weights in 8 bits", **dict.fromkeys(("d8", "d7"), "dynamic quantization")}
"""Names of the families of weight formats, for users."""

Group = tuple[str, ...]
"""Names of nodes that an engine runs as one kernel, in graph order."""

State = Literal["float", "handing", "mixed", "quantized"]


@dataclass(frozen=True)
class Unit:
    """A set of nodes (by index) that is quantized as a whole.

    Its edges are `inputs` from outside, `weights` from constants, and `inner` between its nodes. `outputs` are the
    tensors that others read, `storable` the tensors of `inputs` that another unit writes. `weight_only` are the uses of
    weights that may have a weight format. Constants of elementwise operators that are fused behind a product count as
    inner: that arithmetic is in float.
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
    """Equal for units with equal operators, attributes and shapes, whose measurements count for each other."""


@dataclass(frozen=True)
class Decision:
    """The units that are quantized (by number), the tensors stored in 8 bits, and the weight formats of float units."""

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
        return dict(self.weight_formats)


@dataclass(frozen=True)
class Partition:
    """All units of a model. Only `possible` edges ever have a pair. `format_shares` are the weight formats that weights
    may have; all weights of a float unit have the same, which affects no other unit."""

    model: Model
    possible: frozenset[Edge]
    units: tuple[Unit, ...]
    format_shares: FormatShares = field(default_factory=dict)

    @cached_property
    def owner(self) -> Mapping[str, int]:
        """The number of each node's unit, by name of the node."""
        return {self.model.nodes[n].name: u.number for u in self.units for n in u.nodes}

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """The number of the unit that writes each tensor read by others; graph inputs are absent."""
        return {t: u.number for u in self.units for t in u.outputs}

    @cached_property
    def edges(self) -> Mapping[str, tuple[Edge, ...]]:
        """The possible edges of each tensor between units, uses as graph outputs included."""
        outputs = sorted(Edge(tensor, "", slot) for slot, tensor in enumerate(self.model.outputs))
        shown = (e for e in outputs if e in self.possible and e.tensor in self.producer)
        crossing = defaultdict[str, list[Edge]](list)
        for edge in chain(*(unit.inputs for unit in self.units), shown):
            crossing[edge.tensor].append(edge)
        return {t: tuple(es) for t, es in crossing.items()}

    def leaving(self, unit: Unit) -> list[str]:
        """The outputs of a unit that may have pairs."""
        return [t for t in unit.outputs if t in self.edges]

    def weight_formats(self, unit: Unit) -> tuple[WeightFormat, ...]:
        """The weight formats that all weights of a unit may have."""
        first, *others = [self.format_shares[e] for e in unit.weight_only] or [{}]
        return tuple(s for s in first if all(s in other for other in others))

    def share(self, unit: Unit, weight_format: WeightFormat) -> float:
        """The time of a unit's matrix products in a weight format, relative to float."""
        shares = [self.format_shares[e].get(weight_format, 1.0) for e in unit.weight_only]
        return sum(shares) / len(shares)

    def spent(self, nodes: Mapping[str, float]) -> list[float]:
        """The time of each unit: the sum over its nodes."""
        names = [node.name for node in self.model.nodes]
        return [sum([nodes.get(names[n], 0.0) for n in unit.nodes]) for unit in self.units]

    @cached_property
    def users(self) -> Mapping[str, tuple[int | None, ...]]:
        """The units that read each tensor of `edges`; None stands for a use as graph output."""
        owner = self.owner.get
        return {t: tuple(dict.fromkeys([owner(e.node) for e in edges])) for t, edges in self.edges.items()}

    def near(self, unit: Unit) -> set[int]:
        """The unit and those that share a tensor with it on which a pair can stand."""
        numbers = {unit.number}
        numbers.update(user for t in self.leaving(unit) for user in self.users[t] if user is not None)
        numbers.update(self.producer[t] for t in unit.storable)
        return numbers

    def placement(self, decision: Decision) -> Placement:
        """The placement that a decision means: a stored tensor has pairs on all its edges, others only where a
        quantized unit reads them; the weights of a float unit have its weight format."""
        edges = {e for n in decision.quantized for e in (*self.units[n].inputs, *self.units[n].weights)}
        edges.update(e for t in decision.stored for e in self.edges.get(t, ()))
        floats = ((self.units[n], s) for n, s in decision.weight_formats if n not in decision.quantized)
        weight_only = ((e, s) for u, s in floats if not is_fed(u, decision) for e in u.weight_only)
        return Placement.of(edges, weight_only)

    def decision(self, placement: Placement) -> Decision:
        """The decision that a placement means: the units that it quantizes at least in part, the tensors that it stores
        in 8 bits, and the weight formats of units.

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
    """The state of a unit in a placement.

    - "quantized": all that it reads and writes has pairs.
    - "handing": only outputs lack some; it hands on floats.
    - "mixed": pairs stand inside it; or in a unit with weights on activations and weights, but not on all of them.
    - "float": everything else.
    """
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
    """The tensors stored in 8 bits: those with pairs on all edges that a unit in state "quantized" writes."""
    of, all_paired = partition.producer, placement.edges.issuperset
    return frozenset(
        t for t, es in partition.edges.items() if t in of and states[of[t]] == "quantized" and all_paired(es)
    )


def is_fed(unit: Unit, decision: Decision) -> bool:
    """Whether a unit reads a tensor stored in 8 bits. A float unit that does gets no weight format: behind a DQ,
    engines take such a weight for half of a pair, and no kernel reads it."""
    return not decision.stored.isdisjoint(unit.storable)


def format_in(unit: Unit, placement: Placement) -> WeightFormat | None:
    """The weight format that all of a unit's weights have in a placement; None if they have different ones, or none."""
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
    """Divide a model into units: the given groups (names of nodes), and each other node by itself. Names that the model
    lacks are ignored; a node in two groups stays in the first."""
    taken: set[int] = set()
    sets: list[tuple[int, ...]] = []
    for group in groups:
        inside = sorted({model.index_of[n] for n in group if n in model.index_of} - taken)
        taken.update(inside)
        sets += [tuple(inside)] if inside else []
    sets += [(n.index,) for n in model.nodes if n.index not in taken]
    units = []
    for number, nodes in enumerate(sorted(sets)):
        read = [e for n in nodes for e in sorted(model.nodes[n].into)]
        written = [t for n in nodes for t in model.nodes[n].outputs if t]
        made = set(written)
        edges = [e for e in read if e in possible]
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
                weight_only=tuple(sorted(e for e in read if e in format_shares)),
                storable=tuple(dict.fromkeys(e.tensor for e in entering if e.tensor in model.producers)),
                kind=kind_of(model, nodes),
            )
        )
    return Partition(model, possible, tuple(units), format_shares)


def fusion_groups(model: Model, layers: Sequence[Layer]) -> list[Group]:
    """The groups of two or more nodes that one layer of a report runs together."""
    known = [tuple(n for n in layer.nodes if n in model.index_of) for layer in layers if layer.kind == "compute"]
    return [group for group in known if len(group) > 1]


def inner_edges(model: Model, group: Collection[str], possible: frozenset[Edge]) -> tuple[Edge, ...]:
    """The edges between nodes of a group that may have a pair, in graph order."""
    nodes = [model.nodes[number] for number in sorted({model.index_of[name] for name in group})]
    made = {t for node in nodes for t in node.outputs}
    return tuple(e for node in nodes for e in node.into if e.tensor in made and e in possible)


def split(model: Model, group: Collection[str], cuts: Collection[Edge]) -> list[Group]:
    """The parts into which pairs on the inner edges `cuts` divide a group."""
    nodes = [model.node(name) for name in sorted(group, key=model.index_of.__getitem__)]
    bare = ((model.maker(e.tensor), node) for node in nodes for e in node.into if e not in cuts)
    parts = joined([n.index for n in nodes], ((a.index, b.index) for a, b in bare if a is not None and a.name in group))
    return [tuple(model.nodes[n].name for n in part) for part in parts]


def joined(nodes: Sequence[int], pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The connected sets of nodes, where `pairs` are the connections; each in the order of `nodes`."""
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
    """A text for the operators, attributes and shapes of nodes: equal texts take equal time."""

    def shape(tensor: str) -> str:
        info = model.tensors.get(tensor)
        return "?" if info is None else f"{info.dtype}{info.shape}"

    return ";".join(
        f"{n.domain}:{n.op}{sorted((k, str(v)) for k, v in n.attributes.items())}"
        f"({','.join(shape(t) for t in n.inputs)})->{','.join(shape(t) for t in n.outputs)}"
        for n in (model.nodes[i] for i in nodes)
    )


def usual_groups(model: Model, possible: frozenset[Edge]) -> list[Group]:
    """Groups of two or more nodes as engines usually fuse them: connected by edges on which
    `start_placements.everything` sets no pair."""
    bare = possible - start_placements.everything(model, possible).edges
    pairs = ((model.producers[e.tensor], model.index_of[e.node]) for e in bare if e.node)
    sets = joined(range(len(model.nodes)), pairs)
    return [tuple(model.nodes[n].name for n in nodes) for nodes in sets if len(nodes) > 1]


def formats_in(placements: Iterable[Placement]) -> FormatShares:
    """The weight formats that weights have in some placements, with relative time 1, as it is unknown."""
    found: dict[Edge, dict[WeightFormat, float]] = {}
    for placement in placements:
        for edge, weight_format in placement.weight_formats.items():
            found.setdefault(edge, {})[weight_format] = 1.0
    return found


def expected_share(format_shares: FormatShares, placement: Placement) -> float:
    """The mean relative time of the products whose weights have a weight format in a placement."""
    shares = [format_shares[edge][weight_format] for edge, weight_format in placement.weight_only]
    return sum(shares) / len(shares)


def weights_by_family(format_shares: FormatShares) -> dict[str, Placement]:
    """For each family of weight formats (4 bits, 8 bits, dynamic), by name, a placement without pairs that puts all
    weights that allow it into a format of the family: of those at most `NEARLY_FASTEST` times as slow as the fastest,
    the most exact.

    Families are left out whose products should take `WORTHWHILE_SHARE` of their float time or more.
    """
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
    """`format_shares` with sizes relative to float32 in place of relative times."""
    return {edge: {s: s.bytes_per_weight / 4 for s in shares} for edge, shares in format_shares.items()}
