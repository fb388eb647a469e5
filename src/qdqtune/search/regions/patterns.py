"""Patterns: regions of equal structure, and insertion points that mean the same edges in each of them.

A signature is the listing of a region in canonical order (`structure`), so equal signatures are equal wiring, and the
numbers in a point name corresponding nodes, inputs and child regions in every instance. The nodes of a composite are
numbered over all its children; children, their inputs and their outputs in the order in which those numbers meet them.

A leaf has a point for each node input that can carry a pair, constants included, and for each output. A composite has
one for each activation that enters a child, each constant inside (NodeInput), and each output; edges inside a child are
left to the child's own pattern. Only points that resolve to an edge exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from qdqtune.graph.model import Model
from qdqtune.graph.operators import CONTROL_FLOW, HEAVY, INTEGER_KERNELS, MOVERS, may_be_float
from qdqtune.placement.possible import can_carry
from qdqtune.search.regions.discovery import (
    ChildInput,
    NodeInput,
    Point,
    Region,
    RegionOutput,
    Regions,
    RegionType,
    Scheme,
)
from qdqtune.search.regions.structure import Listing, Structure
from qdqtune.types import Edge, Placement, WeightFormat

Edges = Mapping[Point, frozenset[Edge]]

RUN_IN_8_BITS = HEAVY - CONTROL_FLOW | INTEGER_KERNELS | {"AveragePool", "MaxPool"}
"""Operators that engines run on quantized values."""


@dataclass(frozen=True)
class Pattern:
    """Regions of one structure, in graph order. The points are computed from the first one's listing."""

    signature: str
    instances: tuple[Region, ...] = field(compare=False, repr=False)
    model: Model = field(compare=False, repr=False)
    listings: Mapping[Region, Listing] = field(compare=False, repr=False)
    """The canonical order of the nodes of each instance."""

    @property
    def type(self) -> RegionType:
        """LEAF or COMPOSITE, the same for all instances."""
        return self.instances[0].type

    @cached_property
    def ops(self) -> tuple[str, ...]:
        return tuple(self.model.nodes[n].op for n in self.listings[self.instances[0]].nodes)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """All insertion points that a scheme can choose from, in canonical order."""
        return _points(self.instances[0], self.listings[self.instances[0]])

    @cached_property
    def edges(self) -> Mapping[Region, Edges]:
        """The edges of each point in each instance."""
        return _InstanceEdges(self.model, self.points, self.listings)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.signature.encode()).hexdigest()[:16]

    @property
    def everything(self) -> Scheme:
        return Scheme(frozenset(self.points))


def group(model: Model, regions: Regions) -> tuple[Pattern, ...]:
    """The patterns of all leaves and composites that have insertion points, in graph order of their first instances."""
    return tuple(p for p in alike(model, regions) if _has_points(p))


def alike(model: Model, regions: Regions) -> tuple[Pattern, ...]:
    """The patterns of all leaves and composites, with insertion points or without."""
    found: dict[str, dict[Region, Listing]] = {}
    for region in regions.walk():
        listing = regions.listings[region]
        found.setdefault(_signature(listing, region), {})[region] = listing
    return tuple(Pattern(signature, tuple(listings), model, listings) for signature, listings in found.items())


def tunable(model: Model, found: Iterable[Pattern]) -> tuple[Pattern, ...]:
    """The patterns that a search tunes: pairs cannot make the others faster. Around an operator that passes values on,
    they can keep its neighbours from converting."""
    return tuple(p for p in found if _holds(model, p.instances[0], RUN_IN_8_BITS | MOVERS))


def is_quantizable(model: Model, region: Region) -> bool:
    """Whether a region holds an operator on floats that engines can quantize."""
    return _holds(model, region, RUN_IN_8_BITS)


def _holds(model: Model, region: Region, operators: frozenset[str]) -> bool:
    """Whether a region holds a node with one of the `operators` that writes floats."""
    nodes = (model.nodes[n] for n in region.all_nodes())
    return any(node.op in operators and any(may_be_float(model, t) for t in node.outputs) for node in nodes)


def resolve(model: Model, pattern: Pattern, region: Region, scheme: Scheme) -> frozenset[Edge]:
    """The edges of a scheme of `pattern` in `region`.

    Raises:
        ValueError: the region is no instance of the pattern, or the scheme has points that the pattern lacks.
    """
    edges = _edges_of(model, pattern, region)
    if unknown := scheme.points - edges.keys():
        raise ValueError(f"pattern {pattern.digest} has no point {min(unknown, key=repr)}")
    return frozenset().union(*(edges[p] for p in scheme.points))


def scheme_of(
    model: Model,
    pattern: Pattern,
    region: Region,
    edges: Collection[Edge],
    weight_formats: Mapping[Edge, WeightFormat] = MappingProxyType({}),
) -> Scheme:
    """The scheme of `pattern` in `region` for some edges and weight formats: the inverse of `resolve` and `formats_at`.
    Its points are those whose edges are all among `edges`, and those whose weights all have the same one of
    `weight_formats`.

    Raises:
        ValueError: the region is no instance of the pattern.
    """
    wanted = edges if isinstance(edges, frozenset | set) else frozenset(edges)
    points = _edges_of(model, pattern, region).items()
    found = ((p, {weight_formats.get(e) for e in own}) for p, own in points if weight_formats)
    formats = ((p, s) for p, (s, *others) in found if s is not None and not others)
    return Scheme(frozenset(p for p, own in points if own <= wanted), frozenset(formats))


def formats_at(pattern: Pattern, weight_formats: Iterable[tuple[Point, WeightFormat]]) -> dict[Edge, WeightFormat]:
    """The weight formats by edge that points of a pattern mean, over all its instances."""
    wanted = dict(weight_formats)
    parts = (item for edges in pattern.edges.values() for item in edges.items()) if wanted else ()
    return {edge: wanted[point] for point, own in parts if point in wanted for edge in own}


def place(model: Model, patterns: Iterable[Pattern], choice: Mapping[str, Scheme]) -> Placement:
    """The union, over all instances, of the schemes chosen by pattern digest. Patterns without a choice add nothing."""
    chosen = [(p, choice[p.digest]) for p in patterns if p.digest in choice]
    edges = {e for p, scheme in chosen for r in p.instances for e in resolve(model, p, r, scheme)}
    formats = {e: s for p, scheme in chosen for e, s in formats_at(p, scheme.weight_formats).items() if e not in edges}
    return Placement.of(edges, formats.items())


class _PointInput(NamedTuple):
    """An input of a node that can carry a pair: node and input by their canonical numbers, and the slot in the file."""

    node: int
    number: int
    slot: int


class _ChildEntry(NamedTuple):
    """Where an activation enters a child: node of the model and slot, and whether a pair can stand there."""

    node: int
    slot: int
    tensor: str
    carries: bool


class _Exit(NamedTuple):
    """An output with a use outside that can carry a pair: its point, the node of the model, and its number there."""

    point: RegionOutput
    node: int
    output: int


class _InstanceEdges(Mapping[Region, Edges]):
    """The edges of each instance, computed on demand: many commands never ask for them."""

    def __init__(self, model: Model, points: Sequence[Point], listings: Mapping[Region, Listing]) -> None:
        self._model, self._points, self._listings = model, points, listings
        self._found: dict[Region, Edges] = {}

    def __getitem__(self, region: Region) -> Edges:
        if region not in self._found:
            self._found[region] = _edges(self._model, self._points, region, self._listings[region])
        return self._found[region]

    def __contains__(self, region: object) -> bool:
        return region in self._listings

    def __iter__(self) -> Iterator[Region]:
        return iter(self._listings)

    def __len__(self) -> int:
        return len(self._listings)


def _edges_of(model: Model, pattern: Pattern, region: Region) -> Edges:
    if region in pattern.edges:
        return pattern.edges[region]
    listing = Structure(model).listing([c.all_nodes() for c in region.children] or [region.nodes])
    if _signature(listing, region) != pattern.signature:
        raise ValueError(f"region {region.id} is no instance of pattern {pattern.digest}")
    return _edges(model, pattern.points, region, listing)


def _children(region: Region, listing: Listing) -> dict[int, int]:
    """Node index to the number of the child region that it is in; children are numbered as the listing meets them."""
    child_of = {n: c.id for c in region.children for n in c.all_nodes()}
    number: dict[int, int] = {}
    return {n: number.setdefault(child_of[n], len(number)) for n in listing.nodes if child_of}


def _signature(listing: Listing, region: Region) -> str:
    lines = [f"%{k}={line}" for k, line in enumerate(listing.lines)]
    if not region.children:
        return f"LEAF({'; '.join(lines)})"
    parts: dict[int, list[str]] = {}
    for child, line in zip(_children(region, listing).values(), lines, strict=True):
        parts.setdefault(child, []).append(line)
    return f"COMPOSITE({' | '.join('; '.join(part) for part in parts.values())})"


def _has_points(pattern: Pattern) -> bool:
    region = pattern.instances[0]
    listing = pattern.listings[region]
    child = _children(region, listing)
    return (
        any(True for _ in _node_inputs(listing, child))
        or any(entry.carries for entry in _entering(listing, child))
        or any(listing.exits.values())
    )


def _points(region: Region, listing: Listing) -> tuple[Point, ...]:
    """Every point that resolves to an edge, in canonical order."""
    child = _children(region, listing)
    entries = _entries(listing, child)
    return (
        *(NodeInput(read.node, read.number) for read in _node_inputs(listing, child)),
        *(ChildInput(c, k) for c in sorted(entries) for k, carries in enumerate(entries[c].values()) if carries),
        *(leaving.point for leaving in _outputs(listing, child)),
    )


def _edges(model: Model, points: Iterable[Point], region: Region, listing: Listing) -> Edges:
    edges_at: dict[Point, set[Edge]] = {p: set() for p in points}

    def add(point: Point, node: int, slot: int) -> None:
        edges_at[point].add(model.nodes[node].into[slot])

    child, inside = _children(region, listing), frozenset(listing.nodes)
    for read in _node_inputs(listing, child):
        add(NodeInput(read.node, read.number), listing.nodes[read.node], read.slot)
    numbers = {c: {tensor: k for k, tensor in enumerate(entered)} for c, entered in _entries(listing, child).items()}
    for entry in _entering(listing, child):
        if entry.carries:
            add(ChildInput(child[entry.node], numbers[child[entry.node]][entry.tensor]), entry.node, entry.slot)
    for leaving in _outputs(listing, child):
        edges_at[leaving.point].update(_uses_outside(model, model.nodes[leaving.node].outputs[leaving.output], inside))
    return {point: frozenset(edges) for point, edges in edges_at.items()}


def _node_inputs(listing: Listing, child: Mapping[int, int]) -> Iterator[_PointInput]:
    """The inputs that can carry a pair; of a composite the constants only."""
    for number, inputs in enumerate(listing.inputs):
        for k, slot in enumerate(listing.orders[number]):
            if inputs.carries[slot] and not (child and inputs.tensors[slot].source == "activation"):
                yield _PointInput(number, k, slot)


def _entering(listing: Listing, child: Mapping[int, int]) -> Iterator[_ChildEntry]:
    """The inputs through which activations enter a child."""
    for number, node in enumerate(listing.nodes if child else ()):
        tensors, _, carries, _ = listing.inputs[number]
        for slot in listing.orders[number]:
            tensor = tensors[slot]
            if tensor.source == "activation" and child.get(tensor.producer) != child[node]:
                yield _ChildEntry(node, slot, tensor.name, carries[slot])


def _entries(listing: Listing, child: Mapping[int, int]) -> Mapping[int, Mapping[str, bool]]:
    """The activations that enter each child, in canonical order, and whether a pair can stand where one does."""
    entries: dict[int, dict[str, bool]] = {}
    for entry in _entering(listing, child):
        entered = entries.setdefault(child[entry.node], {})
        entered[entry.tensor] = entry.carries or entered.get(entry.tensor, False)
    return entries


def _outputs(listing: Listing, child: Mapping[int, int]) -> Iterator[_Exit]:
    """Every output with a use outside that can carry a pair."""
    counts: dict[int, int] = {}
    for (number, output), carries in listing.exits.items():
        node = listing.nodes[number]
        point = RegionOutput(output, node_index=number)
        if child:
            k = counts[child[node]] = counts.get(child[node], -1) + 1
            point = RegionOutput(k, region_index=child[node])
        if carries:
            yield _Exit(point, node, output)


def _uses_outside(model: Model, tensor: str, inside: frozenset[int]) -> Iterator[Edge]:
    for use in model.uses(tensor):
        if use.node not in inside and can_carry(model, tensor, use.node, use.slot):
            yield model.edge(tensor, use)
