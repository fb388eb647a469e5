"""Patterns: regions of equal structure, and insertion points that mean the same edges in each of them.

A signature is the listing of a region in canonical order (`structure`), so equal signatures are equal wiring, and the
numbers in a point name corresponding nodes, inputs and child regions in every instance. The nodes of a composite are
numbered over all its children; children, their inputs and their outputs in the order in which those numbers meet them.

Points. Leaves: each node input that can carry a pair, constants included, and each output. Composites: each
activation that enters a child, each constant inside (NodeInput), and each output. What only lies inside a child is the
business of the child's own pattern. Only points that resolve to an edge exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from qdqtune.graph import GRAPH, Model
from qdqtune.regions import Regions
from qdqtune.structure import Listing, Structure, can_carry
from qdqtune.types import ChildInput, Edge, NodeInput, Placement, Point, Region, RegionKind, RegionOutput, Scheme

Edges = Mapping[Point, frozenset[Edge]]


@dataclass(frozen=True)
class Pattern:
    """Regions of one structure, in graph order. `points` are all insertion points that a scheme can choose from."""

    signature: str
    kind: RegionKind = field(compare=False)
    instances: tuple[Region, ...] = field(compare=False, repr=False)
    points: tuple[Point, ...] = field(compare=False)
    ops: tuple[str, ...] = field(compare=False)
    """The operators in canonical order."""
    edges: Mapping[Region, Edges] = field(compare=False, repr=False)
    """The edges of each point in each instance."""

    @cached_property
    def digest(self) -> str:
        """16 hex digits that stand for the signature."""
        return hashlib.sha256(self.signature.encode()).hexdigest()[:16]

    @property
    def everything(self) -> Scheme:
        """The scheme with all points."""
        return Scheme(frozenset(self.points))


def group(model: Model, regions: Regions) -> tuple[Pattern, ...]:
    """The patterns of all leaves and composites that have insertion points, in graph order of their first instances."""
    found: dict[str, dict[Region, Edges]] = {}
    ops: dict[str, tuple[str, ...]] = {}
    for region in regions.walk():
        listing = regions.listings[region]
        if edges := dict(_points(model, listing, region)):
            signature = _signature(listing, region)
            found.setdefault(signature, {})[region] = edges
            ops.setdefault(signature, tuple(model.nodes[n].op for n in listing.nodes))
    return tuple(_pattern(signature, ops[signature], edges) for signature, edges in found.items())


def resolve(model: Model, pattern: Pattern, region: Region, scheme: Scheme) -> frozenset[Edge]:
    """The edges that a scheme of `pattern` means in `region`.

    Raises:
        ValueError: the region is no instance of the pattern, or the scheme has points that the pattern lacks.
    """
    edges = _edges_of(model, pattern, region)
    if unknown := scheme.points - edges.keys():
        raise ValueError(f"pattern {pattern.digest} has no point {min(unknown, key=repr)}")
    return frozenset().union(*(edges[p] for p in scheme.points))


def scheme_of(model: Model, pattern: Pattern, region: Region, edges: Collection[Edge]) -> Scheme:
    """The points of `pattern` whose edges in `region` are all among `edges`: what `resolve` undoes.

    Raises:
        ValueError: the region is no instance of the pattern.
    """
    wanted = edges if isinstance(edges, frozenset | set) else frozenset(edges)
    return Scheme(frozenset(p for p, own in _edges_of(model, pattern, region).items() if own <= wanted))


def place(model: Model, patterns: Iterable[Pattern], choice: Mapping[str, Scheme]) -> Placement:
    """The union, over all instances, of the schemes chosen by pattern digest. Patterns without a choice add nothing."""
    chosen = [(p, choice[p.digest]) for p in patterns if p.digest in choice]
    return Placement.of(e for p, scheme in chosen for r in p.instances for e in resolve(model, p, r, scheme))


def _pattern(signature: str, ops: tuple[str, ...], edges: Mapping[Region, Edges]) -> Pattern:
    first = next(iter(edges))
    return Pattern(signature, first.kind, tuple(edges), tuple(edges[first]), ops, edges)


def _edges_of(model: Model, pattern: Pattern, region: Region) -> Edges:
    if region in pattern.edges:
        return pattern.edges[region]
    listing = Structure(model).listing([c.all_nodes() for c in region.children] or [region.nodes])
    if _signature(listing, region) != pattern.signature:
        raise ValueError(f"region {region.id} is no instance of pattern {pattern.digest}")
    return dict(_points(model, listing, region))


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


def _points(model: Model, listing: Listing, region: Region) -> Iterator[tuple[Point, frozenset[Edge]]]:
    """Every point that resolves to an edge, with its edges, in canonical order."""
    child = _children(region, listing)
    for number, node in enumerate(listing.nodes):
        for k, operand in enumerate(listing.operands[number]):
            in_sight = operand.source == "constant" or (operand.source == "activation" and not child)
            if in_sight and operand.carries:
                yield NodeInput(number, k), frozenset({Edge(operand.tensor, model.nodes[node].name, operand.slot)})
    if child:
        yield from _child_inputs(model, listing, child)
    yield from _outputs(model, listing, child)


def _child_inputs(
    model: Model, listing: Listing, child: Mapping[int, int]
) -> Iterator[tuple[ChildInput, frozenset[Edge]]]:
    entries: dict[int, dict[str, set[Edge]]] = {}
    for node, operands in zip(listing.nodes, listing.operands, strict=True):
        for o in operands:
            if o.source == "activation" and child.get(o.producer) != child[node]:
                edges = entries.setdefault(child[node], {}).setdefault(o.tensor, set())
                if o.carries:
                    edges.add(Edge(o.tensor, model.nodes[node].name, o.slot))
    for region in sorted(entries):
        for k, edges in enumerate(entries[region].values()):
            if edges:
                yield ChildInput(region, k), frozenset(edges)


def _outputs(
    model: Model, listing: Listing, child: Mapping[int, int]
) -> Iterator[tuple[RegionOutput, frozenset[Edge]]]:
    inside = frozenset(listing.nodes)
    counts: dict[int, int] = {}
    for (number, output), carries in listing.exits.items():
        node = listing.nodes[number]
        point = RegionOutput(output, node=number)
        if child:
            k = counts[child[node]] = counts.get(child[node], -1) + 1
            point = RegionOutput(k, region=child[node])
        if carries:
            yield point, frozenset(_uses_outside(model, model.nodes[node].outputs[output], inside))


def _uses_outside(model: Model, tensor: str, inside: frozenset[int]) -> Iterator[Edge]:
    for node, slot in model.uses(tensor):
        if node not in inside and can_carry(model, tensor, node, slot):
            yield Edge(tensor, "" if node == GRAPH else model.nodes[node].name, slot)
