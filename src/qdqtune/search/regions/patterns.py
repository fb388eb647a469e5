"""Patterns: regions of equal structure, and insertion points that mean corresponding edges in each of them.

A signature is the listing of a region in canonical order (`structure`): equal signatures have equal wiring, and the
numbers in a point mean corresponding nodes, inputs and child regions in every instance. The nodes of a composite are
numbered over all its children; children, their inputs and outputs in the order of those numbers.

A leaf has a point for each node input that can have a pair, constants included, and for each output. A composite has
one for each activation that enters a child, each constant inside, and each output; edges inside a child belong to the
child's own pattern. Points without an edge are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from qdqtune.graph.model import Model
from qdqtune.graph.operators import CONTROL_FLOW, HEAVY, INTEGER_KERNELS, MOVERS, may_be_float
from qdqtune.placement.possible import can_carry
from qdqtune.search.regions.discovery import Point, Region, Regions, RegionType, Scheme
from qdqtune.search.regions.structure import Listing
from qdqtune.types import Edge

RUN_IN_8_BITS = HEAVY - CONTROL_FLOW | INTEGER_KERNELS | {"AveragePool", "MaxPool"}
"""Operators that engines run in 8 bits."""


@dataclass(frozen=True)
class Pattern:
    """Regions of equal structure, in graph order. Its points are those of the first one."""

    signature: str
    instances: tuple[Region, ...] = field(compare=False, repr=False)
    model: Model = field(compare=False, repr=False)
    listings: Mapping[Region, Listing] = field(compare=False, repr=False)
    """The canonical node order of each instance."""

    @property
    def type(self) -> RegionType:
        return self.instances[0].type

    @cached_property
    def ops(self) -> tuple[str, ...]:
        return tuple(self.model.nodes[n].op for n in self.listings[self.instances[0]].nodes)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """All insertion points of the pattern, in canonical order."""
        return tuple(self.edges[self.instances[0]])

    @cached_property
    def edges(self) -> Mapping[Region, Mapping[Point, frozenset[Edge]]]:
        """The edges of each point, in each instance."""
        return {region: _edges(self.model, region, listing) for region, listing in self.listings.items()}

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.signature.encode()).hexdigest()[:16]

    @property
    def everything(self) -> Scheme:
        return frozenset(self.points)


def group(model: Model, regions: Regions) -> tuple[Pattern, ...]:
    """The patterns of all leaves and composites with insertion points, in graph order of their first instances."""
    return tuple(p for p in alike(model, regions.listings) if p.points)


def alike(model: Model, listings: Mapping[Region, Listing]) -> tuple[Pattern, ...]:
    """The patterns of these regions, also those without insertion points."""
    alike_by_signature: dict[str, dict[Region, Listing]] = {}
    for region, listing in listings.items():
        alike_by_signature.setdefault(_signature(listing, region), {})[region] = listing
    return tuple(
        Pattern(signature, tuple(listings), model, listings) for signature, listings in alike_by_signature.items()
    )


def tunable(model: Model, found: Iterable[Pattern]) -> tuple[Pattern, ...]:
    """The patterns worth tuning; pairs cannot make others faster. (Around an operator that only moves data, they can
    save its neighbours conversions.)"""
    return tuple(p for p in found if _holds(model, p.instances[0], RUN_IN_8_BITS | MOVERS))


def is_quantizable(model: Model, region: Region) -> bool:
    """Whether a region has a float operator that engines can quantize."""
    return _holds(model, region, RUN_IN_8_BITS)


def _holds(model: Model, region: Region, operators: frozenset[str]) -> bool:
    nodes = (model.nodes[n] for n in region.all_nodes())
    return any(node.op in operators and any(may_be_float(model, t) for t in node.outputs) for node in nodes)


def resolve(pattern: Pattern, region: Region, scheme: Scheme) -> frozenset[Edge]:
    """The edges of a scheme in an instance of its pattern."""
    edges = pattern.edges[region]
    unknown = scheme - edges.keys()
    if unknown:
        raise ValueError(f"pattern {pattern.digest} has no point {min(unknown, key=repr)}")
    return frozenset().union(*map(edges.__getitem__, scheme))


def scheme_of(pattern: Pattern, region: Region, edges: Collection[Edge]) -> Scheme:
    """The points of an instance whose edges are all in `edges`: the inverse of `resolve`."""
    wanted = frozenset(edges)
    return frozenset(point for point, own in pattern.edges[region].items() if own <= wanted)


def _children(region: Region, listing: Listing) -> dict[int, int]:
    """For each node index the number of its child region; children are numbered in the order of the listing, and nodes
    outside of child regions are children of their own."""
    child_of: dict[int, int] = {}
    for k, child in enumerate(region.children):
        child_of |= dict.fromkeys(child.all_nodes(), k)
    if child_of:
        child_of |= dict.fromkeys(region.nodes, len(region.children))
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


def _edges(model: Model, region: Region, listing: Listing) -> Mapping[Point, frozenset[Edge]]:
    """The edges of every point of a region that has any, in canonical order."""
    child, inside = _children(region, listing), frozenset(listing.nodes)
    edges: dict[Point, set[Edge]] = {}
    entering: dict[int, dict[str, set[Edge]]] = {}
    for number, node in enumerate(listing.nodes):
        into = model.nodes[node].into
        for k, read in enumerate(listing.reads[number]):
            own = {into[read.slot]} if read.carries else set[Edge]()
            if not child or read.tensor.source != "activation":
                edges[Point("node_input", number, k)] = own
            elif child.get(read.tensor.producer) != child[node]:
                entering.setdefault(child[node], {}).setdefault(read.tensor.name, set()).update(own)
    for c in sorted(entering):
        for k, own in enumerate(entering[c].values()):
            edges[Point("child_input", c, k)] = own
    counts: dict[int, int] = {}
    for number, output in listing.exits:
        node = listing.nodes[number]
        point = Point("node_output", number, output)
        if child:
            k = counts[child[node]] = counts.get(child[node], -1) + 1
            point = Point("child_output", child[node], k)
        tensor = model.nodes[node].outputs[output]
        uses = (use for use in model.uses(tensor) if use.node not in inside)
        edges[point] = {model.edge(tensor, use) for use in uses if can_carry(model, tensor, use.node, use.slot)}
    return {point: frozenset(own) for point, own in edges.items() if own}
