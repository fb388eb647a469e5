"""Decisions about units: reading them from a placement, changing them, and what each unit costs either way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType

from qdqtune.search.costs.observations import state, stored_in
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.units import Decision, Partition, Unit
from qdqtune.types import Placement, WeightFormat

DEPENDS = 1e-3
"""A margin depends on unmeasured prices if raising them changes it by more than this share of the raise."""


def decision_of(costs: Costs, placement: Placement) -> Decision:
    """The decision nearest to a placement; where a unit may run quantized or in float behind DQs, the cheaper one."""
    parts = costs.partition
    decision = nearest(parts, placement)
    for unit in parts.units:
        if unit.number not in decision.quantized and state(unit, parts, placement) == "handing":
            tensors = [e.tensor for e in unit.inputs]
            decision = min(
                decision,
                replace(decision, quantized=decision.quantized | {unit.number}),
                key=lambda d: costs.of_unit(unit, d) + sum(costs.of_tensor(t, d) for t in tensors),
            )
    return decision


def nearest(parts: Partition, placement: Placement) -> Decision:
    """The units that a placement makes run quantized, at least in part, and the tensors that it keeps in 8 bits.

    A unit without weights that reads such tensors and writes floats counts as a float unit behind DQs.
    """
    states = [state(u, parts, placement) for u in parts.units]
    stored = stored_in(parts, placement, states)
    formats = ((u.number, own) for u in parts.units if (own := parts.format_in(u, placement)) is not None)

    def runs(unit: Unit) -> bool:
        how = states[unit.number]
        if how == "handing":
            return bool(unit.weights) or any(e.tensor not in stored for e in unit.inputs)
        return how in ("quantized", "mixed")

    return Decision.of((unit.number for unit in parts.units if runs(unit)), stored, formats)


def margins(costs: Costs, decision: Decision) -> dict[str, float]:
    """By kind of unit, the ms that flipping a single unit between quantized and float would add, all else unchanged,
    summed over the units of the kind."""
    sums: dict[str, float] = {}
    for unit in costs.partition.units:
        if unit.inputs and costs.prices[unit.number].as_float > 0:
            sums[unit.kind] = sums.get(unit.kind, 0.0) + margin(costs, decision, unit)
    return sums


def margin(costs: Costs, decision: Decision, unit: Unit) -> float:
    """The ms that flipping one unit between quantized and float would add, all else unchanged."""
    parts = costs.partition
    leaving = [t for t in unit.outputs if t in parts.edges]
    near = {user for t in leaving for user in parts.users[t] if user is not None}
    near |= {parts.producer[t] for t in parts.storable(unit)}
    units = [parts.units[n] for n in {unit.number} | near]
    tensors = {*leaving, *(e.tensor for e in unit.inputs)}

    def cost(decided: Decision) -> float:
        return sum(costs.of_unit(u, decided) for u in units) + sum(costs.of_tensor(t, decided) for t in tensors)

    return cost(other(parts, decision, [unit.number], cheapest_formats(costs, [unit.number]))) - cost(decision)


def is_shown_by(costs: Costs, decision: Decision, unit: Unit) -> bool:
    """Whether builds have measured every price that the margin of a unit depends on."""
    return abs(margin(costs.raised, decision, unit) - margin(costs, decision, unit)) < DEPENDS * (costs.float_ms or 1.0)


def cheapest_formats(costs: Costs, units: Iterable[int]) -> dict[int, WeightFormat]:
    """The cheapest weight format of each unit in float; units that are cheapest with float weights are absent."""
    return {number: chosen for number in units if (chosen := costs.cheapest_float(number)[1]) is not None}


def flip(costs: Costs, decision: Decision, kinds: Collection[str]) -> Decision:
    """The decision with all units of some kinds flipped between quantized and float."""
    units = [u.number for u in costs.partition.units if u.kind in kinds and u.inputs]
    return other(costs.partition, decision, units, cheapest_formats(costs, units))


def other(
    parts: Partition,
    decision: Decision,
    units: Collection[int],
    weight_formats: Mapping[int, WeightFormat] = MappingProxyType({}),
) -> Decision:
    """A decision with some units flipped between quantized and float. Outputs of units that become quantized are
    stored, unless a reader has a weight format; units that become float get their format from `weight_formats`."""
    changed = decision.quantized ^ frozenset(units)
    kept = {n: chosen for n, chosen in decision.weight_formats if n not in changed}
    kept |= {n: weight_formats[n] for n in units if n not in changed and n in weight_formats}
    written = (t for n in units if n in changed for t in parts.units[n].outputs if t in parts.edges)
    fresh = {t for t in written if kept.keys().isdisjoint(parts.users[t])}
    lost = {t for n in units if n not in changed for t in parts.units[n].outputs}
    return Decision.of(changed, (decision.stored | fresh) - lost, kept.items())


@dataclass(frozen=True)
class UnitPrice:
    """One unit. All times in ms, as predicted with the final decisions about the units around it.

    `boundary_ms` is the cost of conversions and float outputs at its borders as decided, those shared with neighbours
    included. `margin_ms` is what flipping the unit between quantized and float would add; None where it can only be
    float, for the reason `unpriced`.
    """

    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    float_ms: float
    quantized_ms: float | None
    quantize_ms: float
    dequantize_ms: float
    handing_ms: float
    boundary_ms: float
    quantized: bool
    margin_ms: float | None
    seen: bool
    """Whether its quantized time was measured, not guessed."""
    unpriced: str = ""
    weight_format: str = ""
    """The weight format where its weights alone are quantized; `format_ms` has its time in each format."""
    format_ms: Mapping[str, float] = field(default_factory=dict)


def explain(costs: Costs, placement: Placement) -> tuple[UnitPrice, ...]:
    """A row for every unit, the largest time in float first.

    `quantize_ms`, `dequantize_ms` and `handing_ms` are the prices for its outputs: of their Qs if it runs in float, of
    their DQs in front of float consumers, and of writing floats if it runs quantized.
    """
    decision, parts = decision_of(costs, placement), costs.partition
    rows = []
    for unit in parts.units:
        price, able = costs.prices[unit.number], bool(unit.inputs)
        quantized = unit.number in decision.quantized
        leaving, chosen = [t for t in unit.outputs if t in parts.edges], decision.format_of.get(unit.number)
        plain = price.as_float if chosen is None else price.by_format[chosen]
        extra = costs.of_unit(unit, decision) - (price.as_quantized if quantized else plain)
        around = {*leaving, *(e.tensor for e in unit.inputs)}
        conversions = sum(costs.of_tensor(t, decision) for t in around)
        row = UnitPrice(
            nodes=tuple(parts.model.nodes[n].name for n in unit.nodes),
            operators=tuple(parts.model.nodes[n].op for n in unit.nodes),
            float_ms=price.as_float,
            quantized_ms=price.as_quantized if able else None,
            quantize_ms=sum(costs.quantize[t] for t in leaving),
            dequantize_ms=sum(costs.dequantize[t] for t in leaving),
            handing_ms=price.handing * len(leaving),
            boundary_ms=extra + conversions,
            quantized=quantized,
            margin_ms=margin(costs, decision, unit) if able else None,
            seen=price.seen,
            unpriced="" if able else "no pair can stand on its inputs",
            weight_format="" if chosen is None or quantized else chosen.name,
            format_ms={weight_format.name: ms for weight_format, ms in price.by_format.items()},
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda r: (-r.float_ms, r.nodes)))


def record(units: Sequence[UnitPrice]) -> list[Mapping[str, object]]:
    """The rows for a JSON file."""
    rows = [asdict(unit) for unit in units]
    return [{k: v for k, v in row.items() if v or k not in ("weight_format", "format_ms")} for row in rows]
