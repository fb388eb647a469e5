"""Fusion groups timed alone: which schemes to try on one, and which groups run quantized by these times.

A scheme is a set of points (positions within the group), so that a measurement holds for all equal groups. A group's
own time leaves out the Q of what it reads and the DQ of what it writes: alone it pays both, in the model its neighbours
may be quantized as well. These conversions have prices of their own, and the minimum cut of `qdqtune.search.cut`
decides by both which groups run quantized.
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
"""Input `slot` of the group's node number `n` as (n, slot); all uses of the group's output number `k` as (-1, k)."""

MAX_SCHEMES = 10
"""Schemes with pairs that are tried on one group, at most. Chosen, not measured."""

MIN_SAVING = 0.01
"""A group is quantized only if that saves this share of its float time: less is noise of the measurement. Chosen, not
measured."""


@dataclass(frozen=True)
class PricedScheme:
    """The ms of a group alone in one scheme, to compare with `Profile.float_ms`.

    `quantize` has the ms of the Qs on tensors that the group reads, `dequantize` of the DQs on tensors that it writes,
    by the first point of the tensor. With a `weight_format`, only weights are quantized and `points` is empty.
    """

    scheme: str
    points: frozenset[GroupPoint]
    ms: float
    quantize: Mapping[GroupPoint, float] = field(default_factory=dict)
    dequantize: Mapping[GroupPoint, float] = field(default_factory=dict)
    weight_format: WeightFormat | None = None


@dataclass(frozen=True)
class Profile:
    """The times of a group alone; `failures` has the reason for each scheme that has no time."""

    float_ms: float
    options: tuple[PricedScheme, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)


def schemes(
    model: Model, possible: frozenset[Edge], format_shares: FormatShares = MappingProxyType({})
) -> dict[str, Placement]:
    """Schemes to try on a group that stands alone as `model`, by name, each placement once and none empty.

    An activation never carries a pair without its weight; "output" means that what the group writes is stored in 8 bits
    too. Of the weight formats that all its weights may have, the fastest with 4 bits and the fastest with 8 are tried.
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
    """The points of a placement on a group that stands alone."""
    return frozenset((-1 if e.is_graph_output else model.index_of[e.node], e.index) for e in placement)


def signature(parts: Partition, unit: Unit, sizes: Mapping[str, tuple[int, ...]]) -> str:
    """A text, equal for two groups exactly if their kind, wiring, shapes, constants and possible pairs are."""
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
    """The measurement of one scheme: the layers, and the paired rounds (b) against the float form (a).

    `result` is None where the layers were too slow already; `layers` is empty where the engine reports none.
    """

    scheme: str
    placement: Placement
    result: Measurement | Failure | None
    layers: tuple[Layer, ...] = ()


def profile_of(model: Model, floats: Sequence[Layer], answers: Sequence[SchemeResult]) -> Profile:
    """The profile of a group from its layer times, or from its latency where the engine reports no layers. Reformats
    are left out, since they depend on the layouts of neighbours.

    Args:
        model: the group alone.
        floats: its layers in float.
        answers: the results of all its schemes.
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
    """The profile of a group that is too small to be measured: if it only passes values on, it is assumed to take its
    float time in 8 bits as well; otherwise it stays in float."""
    nodes = [parts.model.nodes[n] for n in unit.nodes]
    if not unit.inputs or unit.weights or any(n.domain or n.op not in operators.MOVERS for n in nodes):
        return Profile(float_ms)
    inside = {e for n in nodes for e in n.into if e in parts.possible}
    position = {parts.model.nodes[n].name: k for k, n in enumerate(unit.nodes)}
    points = {(position[e.node], e.index) for e in inside} | {(-1, k) for k in range(len(unit.outputs))}
    return Profile(float_ms, (PricedScheme("passing", frozenset(points), float_ms),))


@dataclass(frozen=True)
class GroupSelection:
    """Which groups run quantized, and which weight formats the others have, by times that were taken alone."""

    costs: Costs
    decision: Decision
    profiles: Mapping[int, Profile]

    @property
    def parts(self) -> Partition:
        return self.costs.partition

    def option(self, number: int) -> PricedScheme | None:
        """The chosen scheme of a group; None for a float group with float weights. For a quantized group, the scheme
        that stores the outputs in 8 bits if the decision stores all of them, else the one that stores none."""
        if number not in self.decision.quantized:
            chosen = self.decision.format_of.get(number)
            own = self.profiles[number].options if chosen is not None else ()
            return next((option for option in own if option.weight_format == chosen), None)
        unit = self.parts.units[number]
        storing, handing = _storing_and_handing(self.parts, unit, self.profiles[number])
        stores = all(t in self.decision.stored for t in self.parts.leaving(unit))
        return (storing or handing) if stores else (handing or storing)

    def placement(self) -> Placement:
        """The pairs of all chosen schemes; a tensor that is stored in 8 bits has pairs on all its edges."""
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
        """By group with pairs or a weight format, the ms that it is expected to save, conversions included."""
        units, prices = (self.parts.units[n] for n in sorted(self.decision.quantized)), self.costs.prices
        saved = {u.number: margin(self.costs, self.decision, u) for u in units}
        return saved | {
            n: prices[n].as_float - prices[n].by_format[way] for n, way in sorted(self.decision.format_of.items())
        }

    @property
    def ratio(self) -> float:
        """The expected time of the model as a share of the float model's."""
        return self.costs.total(self.decision) / self.costs.float_ms


def select(parts: Partition, profiles: Mapping[int, Profile]) -> GroupSelection:
    """The cheapest selection of groups for times that were taken alone, without effects of neighbours on each other,
    which are not known yet. A group without a scheme gets a quantized price above any possible sum."""
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
    """The best scheme that stores all outputs in 8 bits, and the best that stores none."""
    leaving = {(-1, k) for k, t in enumerate(unit.outputs) if parts.edges.get(t)}

    pairs = sorted((o for o in profile.options if o.weight_format is None), key=lambda o: o.ms)
    storing = next((o for o in pairs if leaving and leaving <= o.points), None)
    return storing, next((o for o in pairs if not leaving & o.points), None)


def _conversions(parts: Partition, profiles: Mapping[int, Profile], which: str) -> dict[str, float]:
    """The price of a Q or DQ (`which`) of every tensor between groups: measured, or by the median price per element."""
    seen: dict[str, list[float]] = {}
    for unit in parts.units:
        for option in profiles[unit.number].options:
            for (number, index), spent in getattr(option, which).items():
                node = parts.model.nodes[unit.nodes[number]]
                seen.setdefault(unit.outputs[index] if number < 0 else node.inputs[index], []).append(spent)
    exact = {tensor: float(np.median(spent)) for tensor, spent in seen.items()}
    usual = per_element(parts.model, *exact.items())
    return {t: exact.get(t, usual * elements(parts.model, t)) for t in parts.edges}
