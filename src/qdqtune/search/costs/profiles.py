"""Fusion groups timed alone: which schemes to try on a group, and which groups to quantize, by these times.

A scheme is a set of positions for pairs within a group, so that one measurement holds for all equal groups. The Q of a
group's inputs and the DQ of its outputs are not part of its time: alone it needs both, but in the model its neighbours
may be quantized too. They have costs of their own, and the minimum cut of `qdqtune.search.cut` decides by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from qdqtune.errors import Failure
from qdqtune.graph import operators
from qdqtune.graph.model import Model
from qdqtune.graph.operators import elements
from qdqtune.placement import start_placements
from qdqtune.placement.possible import consistent
from qdqtune.search.costs.attribution import attribute
from qdqtune.search.costs.decisions import cut, margin
from qdqtune.search.costs.prices import Costs, Price, per_element
from qdqtune.search.costs.units import Decision, FormatShares, Partition, Unit, partition
from qdqtune.types import Edge, Layer, Measurement, Placement, WeightFormat

GroupPoint = tuple[int, int]
"""A position for a pair in a group: (n, slot) is input `slot` of its node `n`, (-1, k) all uses of output `k`."""

MAX_SCHEMES = 10
"""The most schemes with pairs that are tried on one group. Chosen, not measured."""

MIN_SAVING = 0.01
"""A group is quantized only if that saves this share of its float time; less is noise. Chosen, not measured."""


@dataclass(frozen=True)
class PricedScheme:
    """The ms of a group alone with one scheme, to compare with `Profile.float_ms`.

    `quantize` has the ms of Qs on tensors that the group reads, `dequantize` of DQs on tensors that it writes, by the
    tensor's first position. With a `weight_format` only weights are quantized, and `points` is empty.
    """

    scheme: str
    points: frozenset[GroupPoint]
    ms: float
    quantize: Mapping[GroupPoint, float] = field(default_factory=dict)
    dequantize: Mapping[GroupPoint, float] = field(default_factory=dict)
    weight_format: WeightFormat | None = None


@dataclass(frozen=True)
class Profile:
    """The times of a group alone. `failures` has the reason for each scheme without a time; under "", for the whole
    group."""

    float_ms: float
    options: tuple[PricedScheme, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)


def schemes(
    model: Model, possible: frozenset[Edge], format_shares: FormatShares = MappingProxyType({})
) -> dict[str, Placement]:
    """The schemes to try on a group given as `model`, by name, all different and none empty.

    An activation gets a pair only together with the weight; "output" means that outputs are written in 8 bits too. Of
    the weight formats that all its weights may have, the fastest with 4 bits and the fastest with 8 are tried.
    """
    parts = partition(model, possible, [[node.name for node in model.nodes]], format_shares)
    (unit,) = parts.units
    outputs = Placement.of(e for e in possible if e.is_graph_output)
    full = consistent(
        model, Placement.of((*unit.inputs, *unit.weights)) | start_placements.compute_inputs(model, possible)
    )
    inside = {"full" if unit.weights else "activation-only": full}
    inside |= {name: p - outputs for name, p in start_placements.placements(model, possible).items()}
    names: dict[Placement, str] = {}
    for name, placement in inside.items():
        if placement.edges and outputs.edges:
            names.setdefault(placement | outputs, f"{name}, output")
        names.setdefault(placement, name)
    names.setdefault(Placement.of(unit.weights), "weight-only")
    pairs = {name: placement for placement, name in list(names.items())[:MAX_SCHEMES] if placement.edges}
    promising = sorted(parts.weight_formats(unit), key=lambda s: (parts.share(unit, s), s.name))
    for weight_format in {s.family: s for s in reversed(promising)}.values():
        pairs[f"weights as {weight_format.name}"] = Placement.of((), ((e, weight_format) for e in unit.weight_only))
    return pairs


def points_of(model: Model, placement: Placement) -> frozenset[GroupPoint]:
    """The positions of a placement's pairs, in a group that is a model of its own."""
    return frozenset((-1 if e.is_graph_output else model.index_of[e.node], e.index) for e in placement)


def signature(parts: Partition, unit: Unit, sizes: Mapping[str, tuple[int, ...]]) -> str:
    """A text, equal for two groups exactly if operators, wiring, shapes, what is constant, and possible pairs are."""
    model = parts.model
    numbers, wires = dict[str, int](), []
    for node in (model.nodes[n] for n in unit.nodes):
        tensors = [*node.inputs, *node.captures, *node.outputs]
        able = [e.index for e in node.into if e in parts.possible]
        wires.append(([numbers.setdefault(t, len(numbers)) for t in tensors], able))
    shapes = [(sizes.get(t, t), t in model.constants) for t in numbers]
    leaving = [(numbers[t], bool(parts.edges.get(t))) for t in unit.outputs]
    return str((unit.kind, wires, shapes, leaving))


@dataclass(frozen=True)
class SchemeResult:
    """The measurement of one scheme: its layers, and rounds of the group with it (b) and in float (a). `result` is None
    if the layers were too slow to time it; `layers` is empty if the engine reports none."""

    scheme: str
    placement: Placement
    result: Measurement | Failure | None
    layers: tuple[Layer, ...] = ()


def profile_of(model: Model, floats: Sequence[Layer], answers: Sequence[SchemeResult]) -> Profile:
    """The profile of a group from layer times, or from latencies if the engine reports no layers. Reformat layers are
    ignored, as they depend on the memory layouts of neighbours.

    Args:
        model: the group alone.
        floats: its layers in float.
        answers: the measurements of its schemes.
    """
    rounds = [answer.result for answer in answers if isinstance(answer.result, Measurement)]
    float_ms = 1e3 * float(np.median([s for measured in rounds for s in measured.a])) if rounds else 0.0
    if floats:
        float_ms = sum(layer.time_ms or 0.0 for layer in _without_reformats(model, floats))
    options, failures = list[PricedScheme](), dict[str, str]()
    for answer in answers:
        ratio, placement = None, answer.placement
        if isinstance(answer.result, Failure):
            failures[answer.scheme] = answer.result.reason
            continue
        if answer.result is not None:
            ratio = float(np.median(np.asarray(answer.result.b) / np.asarray(answer.result.a)))
        weight_format = next(iter(placement.weight_formats.values()), None)
        option = PricedScheme(answer.scheme, points_of(model, placement), 0.0, weight_format=weight_format)
        if floats:  # the time of the rounds is divided among kernels, Qs and DQs by their layer times
            own = _without_reformats(model, answer.layers)
            before, after, counted = (sum(x.time_ms or 0.0 for x in group) for group in (floats, answer.layers, own))
            total = counted if ratio is None or not after else counted * ratio * before / after
            times = attribute(model, placement, own, total)
            read = {t: ms for t, ms in times.quantize.items() if t in model.inputs}
            q = {min((use.node, use.slot) for use in model.uses(t)): ms for t, ms in read.items()}
            d = {(-1, model.outputs.index(t)): ms for t, ms in times.dequantize.items() if t in model.outputs}
            alone = total - sum(q.values()) - sum(d.values())
            options.append(replace(option, ms=alone, quantize=q, dequantize=d))
        elif ratio is not None:
            options.append(replace(option, ms=float_ms * ratio))
    return Profile(float_ms, tuple(options), failures)


def _without_reformats(model: Model, layers: Sequence[Layer]) -> list[Layer]:
    return [x for x in layers if x.kind not in ("reformat", "copy") or any(n in model.index_of for n in x.nodes)]


def passthrough_profile(parts: Partition, unit: Unit, float_ms: float) -> Profile:
    """The assumed profile of a group too small to be measured: in 8 bits it takes its float time if it only moves data;
    else it stays in float."""
    nodes = [parts.model.nodes[n] for n in unit.nodes]
    if not unit.inputs or unit.weights or any(n.domain or n.op not in operators.MOVERS for n in nodes):
        return Profile(float_ms)
    inside = {e for n in nodes for e in n.into if e in parts.possible}
    position = {parts.model.nodes[n].name: k for k, n in enumerate(unit.nodes)}
    points = {(position[e.node], e.index) for e in inside} | {(-1, k) for k in range(len(unit.outputs))}
    return Profile(float_ms, (PricedScheme("passing", frozenset(points), float_ms),))


@dataclass(frozen=True)
class GroupSelection:
    """The groups chosen to be quantized, and the weight formats of the others, by times measured alone."""

    costs: Costs
    decision: Decision
    profiles: Mapping[int, Profile]

    @property
    def parts(self) -> Partition:
        return self.costs.partition

    def option(self, number: int) -> PricedScheme | None:
        """The chosen scheme of a group; None for float with float weights. If the decision stores all outputs of a
        quantized group in 8 bits, the scheme that writes them so, else the one that writes floats."""
        if number not in self.decision.quantized:
            chosen = self.decision.format_of.get(number)
            own = self.profiles[number].options if chosen is not None else ()
            return next((option for option in own if option.weight_format == chosen), None)
        unit = self.parts.units[number]
        storing, handing = _storing_and_handing(self.parts, unit, self.profiles[number])
        stores = all(t in self.decision.stored for t in self.parts.leaving(unit))
        return (storing or handing) if stores else (handing or storing)

    def placement(self) -> Placement:
        """The pairs and weight formats of all chosen schemes; a tensor stored in 8 bits has pairs on all its edges."""
        parts, edges = self.parts, set[Edge]()
        for number in self.decision.quantized:
            option, nodes = self.option(number), parts.units[number].nodes
            points = option.points if option else frozenset()
            edges |= {parts.model.nodes[nodes[node]].into[slot] for node, slot in points if node >= 0}
        edges &= parts.possible
        for tensor in self.decision.stored:
            edges.update(parts.edges.get(tensor, ()))
        return Placement.of(edges, parts.placement(self.decision).weight_only)

    def savings(self) -> Mapping[int, float]:
        """The ms that each group with pairs or a weight format is expected to save, conversions included."""
        units, prices = (self.parts.units[n] for n in sorted(self.decision.quantized)), self.costs.prices
        saved = {u.number: margin(self.costs, self.decision, u) for u in units}
        return saved | {
            n: prices[n].as_float - prices[n].by_format[way] for n, way in sorted(self.decision.format_of.items())
        }

    @property
    def ratio(self) -> float:
        """The expected latency relative to the float model."""
        return self.costs.total(self.decision) / self.costs.float_ms


def select(parts: Partition, profiles: Mapping[int, Profile]) -> GroupSelection:
    """Choose the groups to quantize at the least total time, by times measured alone; effects of neighbours on each
    other are unknown yet. Groups without a scheme get a prohibitive time in 8 bits."""
    never = 1.0 + 2.0 * sum(profiles[u.number].float_ms for u in parts.units)
    prices = []
    for unit in parts.units:
        profile, leaving = profiles[unit.number], len(parts.leaving(unit))
        least = MIN_SAVING * profile.float_ms
        storing, giving = _storing_and_handing(parts, unit, profile)
        known = [option.ms for option in (storing, giving) if option is not None]
        more = (giving.ms if giving is not None else never) - min(known, default=0.0)
        allowed = parts.weight_formats(unit)
        by_format = {o.weight_format: least + o.ms for o in profile.options if o.weight_format in allowed}
        prices.append(
            Price(
                as_float=profile.float_ms,
                as_quantized=least + min(known, default=profile.float_ms + never),
                handing=max(0.0, more) / leaving if leaving else 0.0,
                by_format=by_format,
            )
        )
    quantize, dequantize = (_conversions(parts, profiles, which) for which in ("quantize", "dequantize"))
    costs = Costs(parts, tuple(prices), quantize, dequantize)
    return GroupSelection(costs, cut(costs), profiles)


def _storing_and_handing(
    parts: Partition, unit: Unit, profile: Profile
) -> tuple[PricedScheme | None, PricedScheme | None]:
    """The fastest scheme that writes all outputs in 8 bits, and the fastest that writes none so."""
    leaving = {(-1, k) for k, t in enumerate(unit.outputs) if parts.edges.get(t)}

    pairs = sorted((o for o in profile.options if o.weight_format is None), key=lambda o: o.ms)
    storing = next((o for o in pairs if leaving and leaving <= o.points), None)
    return storing, next((o for o in pairs if not leaving & o.points), None)


def _conversions(parts: Partition, profiles: Mapping[int, Profile], which: str) -> dict[str, float]:
    """The ms of the Q or DQ (`which`: "quantize" or "dequantize") on each tensor between groups: the median of its
    measurements, or an estimate per element."""
    seen: dict[str, list[float]] = {}
    for unit in parts.units:
        for option in profiles[unit.number].options:
            for (number, index), spent in getattr(option, which).items():
                node = parts.model.nodes[unit.nodes[number]]
                seen.setdefault(unit.outputs[index] if number < 0 else node.inputs[index], []).append(spent)
    exact = {tensor: float(np.median(spent)) for tensor, spent in seen.items()}
    usual = per_element(parts.model, *exact.items())
    return {t: exact.get(t, usual * elements(parts.model, t)) for t in parts.edges}
