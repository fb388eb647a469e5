"""What a cut search knows about each unit, and what it decided: a result that explains itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from qdqtune.search.costs.optimum import decision_of, margin
from qdqtune.search.costs.prices import Costs
from qdqtune.types import Placement


@dataclass(frozen=True)
class UnitPrice:
    """One unit. All times in ms, as the search predicts them beside the final decisions about the units around it.

    `boundary_ms` is what the conversions and float outputs at its borders cost as decided, those that neighbours
    share included. `margin_ms` is what the other decision would cost more; None where the unit can only be float, as
    `unpriced` says.
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
    """How its weights are stored where they alone are quantized, and what each way would take."""
    stored_ms: Mapping[str, float] = field(default_factory=dict)


def explain(costs: Costs, placement: Placement) -> tuple[UnitPrice, ...]:
    """A row for every unit, the largest time in float first.

    `quantize_ms`, `dequantize_ms` and `handing_ms` are the prices for its outputs: of a Q behind it as a float, of a DQ
    in front of a float consumer, and of handing floats over while it runs quantized.
    """
    decision, parts = decision_of(costs, placement), costs.partition
    rows = []
    for unit in parts.units:
        price, able = costs.prices[unit.number], bool(unit.inputs)
        quantized = unit.number in decision.quantized
        leaving, way = [t for t in unit.outputs if t in parts.edges], decision.way.get(unit.number)
        plain = price.as_float if way is None else price.stored[way]
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
            weight_format="" if way is None or quantized else way.name,
            stored_ms={weight_format.name: ms for weight_format, ms in price.stored.items()},
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda r: (-r.float_ms, r.nodes)))


def record(units: Sequence[UnitPrice]) -> list[Mapping[str, object]]:
    """The rows for a JSON file."""
    rows = [asdict(unit) for unit in units]
    return [{k: v for k, v in row.items() if v or k not in ("weight_format", "stored_ms")} for row in rows]
