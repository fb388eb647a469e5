"""What builds have shown of units and conversions: each build prices every unit in the state that it puts the unit in.

See `prices` for what the states are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

import onnx

from qdqtune.graph.model import Model
from qdqtune.graph.operators import elements
from qdqtune.search.costs.attribution import Times
from qdqtune.search.costs.units import Partition, Unit
from qdqtune.types import Placement

State = Literal["float", "fed", "handing", "mixed", "quantized"]
Behind = Literal["quantized", "both", "float"]
Conversion = Literal["quantize", "dequantize"]

UNEQUAL = 1.5
"""Equal units whose times differ by this factor do not do equal work; less is noise."""

NEGLIGIBLE = 1e-3
"""Of the float build's time: below, two layers' times are not told apart."""


def state(unit: Unit, partition: Partition, placement: Placement) -> State:
    """What a placement makes of a unit."""
    placed = placement.edges
    if not placed.isdisjoint(unit.inner):
        return "mixed"  # not the unit any more
    entering = [e in placed for e in unit.inputs]
    weights = [e in placed for e in unit.weights]
    if not any(entering):
        return "float"
    if weights and not any(weights):
        return "fed"
    if not all(entering) or not all(weights):
        return "mixed" if weights else "fed"
    leaving = [e in placed for t in unit.outputs for e in partition.edges.get(t, ())]
    return "quantized" if all(leaving) else "handing"


def behind(unit: Unit, partition: Partition, placement: Placement, states: Sequence[State] = ()) -> Behind:
    """Whether the tensors that a unit reads are stored quantized: by pairs on all their edges, behind a unit that runs
    quantized. Tensors that come from no unit say nothing. `states` are those of all units where they are known."""
    stored = [is_stored(t, partition, placement, states) for t in partition.storable(unit)]
    return "quantized" if all(stored) else "both" if any(stored) else "float"


def is_stored(tensor: str, partition: Partition, placement: Placement, states: Sequence[State] = ()) -> bool:
    """Whether a tensor that a unit writes stays in 8 bits."""
    number = partition.producer[tensor]
    how = states[number] if states else state(partition.units[number], partition, placement)
    return how == "quantized" and placement.edges.issuperset(partition.edges[tensor])


Sample = tuple[str, str, Behind]
"""Kind of unit, its state or the name of the storage of its weights, and what it reads."""


@dataclass
class Samples:
    """Prices seen so far, those of the latest build that has any. Units are known by kind."""

    units: dict[Sample, list[float]] = field(default_factory=dict)
    disturbed: dict[str, float] = field(default_factory=dict)
    """By kind, what a float unit takes more among pairs."""
    quantize: dict[str, float] = field(default_factory=dict)
    dequantize: dict[str, float] = field(default_factory=dict)
    sizes: list[tuple[float, float]] = field(default_factory=list)
    medians: dict[Sample, list[float]] = field(default_factory=dict)
    per_consumer: bool = False


def gathered(partition: Partition, builds: Sequence[Times]) -> tuple[Partition, Samples]:
    """What builds have shown, the first of them the float model's; and the units, equal ones told apart where the float
    build took unequal time for them."""
    partition, samples = _told_apart(partition, builds[0]), Samples()
    for times in builds:
        _take(samples, partition, times, builds[0])
    return partition, samples


def _told_apart(parts: Partition, floats: Times) -> Partition:
    """The same units, equal ones of a kind each only where the float build took equal time for them.

    The time of some operators depends on the values: a softmax over masked scores works on subnormal numbers.
    """
    kinds: dict[str, list[tuple[float, Unit]]] = {}
    for unit in parts.units:
        kinds.setdefault(unit.kind, []).append((_spent(unit, parts, floats), unit))
    negligible = NEGLIGIBLE * sum(floats.nodes.values())
    units = list(parts.units)
    for alike in kinds.values():
        ordered = sorted(alike, key=lambda pair: (pair[0], pair[1].number))
        group, last = 0, ordered[0][0]
        for spent, unit in ordered:
            group += spent > UNEQUAL * last and spent - last > negligible
            last = spent
            units[unit.number] = replace(unit, kind=f"{unit.kind} {group}") if group else unit
    return replace(parts, units=tuple(units))


def _take(samples: Samples, partition: Partition, times: Times, floats: Times) -> None:
    states = [state(u, partition, times.placement) for u in partition.units]
    paid = _conversions(partition, times, floats, states)
    fresh: dict[Sample, list[float]] = {}
    more: dict[str, list[float]] = {}
    for unit, how in zip(partition.units, states, strict=True):
        spent = _spent(unit, partition, times)
        if how in ("quantized", "handing"):
            spent += paid.get(unit.number, 0.0)
            if how == "quantized":
                spent += sum(times.quantize.get(t, 0.0) for t in unit.outputs)
        given = any(e in times.placement for t in unit.outputs for e in partition.reading.get(t, ()))
        before = _spent(unit, partition, floats)
        if (way := partition.way(unit, times.placement)) is not None:
            # A DQ of weights that no kernel drew in runs for the unit alone.
            spent += sum(times.dequantize.get(e.tensor, 0.0) for e in partition.compressible(unit))
            if how == "float":
                fresh.setdefault((unit.kind, way.name, "float"), []).append(spent)
        elif how == "fed" or (how == "float" and given and spent > UNEQUAL * before):
            more.setdefault(unit.kind, []).append(spent - before)
        elif how != "mixed":
            fresh.setdefault((unit.kind, how, behind(unit, partition, times.placement, states)), []).append(spent)
    samples.units |= fresh
    samples.disturbed |= {kind: max(0.0, median(ms)) for kind, ms in more.items()}
    for key, ms in fresh.items():
        samples.medians.setdefault(key, []).append(median(ms))
    samples.per_consumer |= any(n > 1 for n in times.copies.values())
    for op, seen in (("quantize", times.quantize), ("dequantize", times.dequantize)):
        for tensor, spent in seen.items():
            if tensor in partition.edges:
                each = spent / times.copies[tensor] if op == "dequantize" else spent
                getattr(samples, op)[tensor] = each
                samples.sizes.append((bytes_of(partition.model, tensor), each))
    for tensor, op in _absorbed(partition, times, states):
        getattr(samples, op)[tensor] = 0.0


def _absorbed(partition: Partition, times: Times, states: Sequence[State]) -> Iterator[tuple[str, Conversion]]:
    """Conversions between a float and a quantized unit that no layer ran by itself: a kernel did them on the way."""
    for tensor, edges in partition.edges.items():
        read = {states[partition.owner[e.node]] for e in edges if e.node and e in times.placement}
        made = states[partition.producer[tensor]] if tensor in partition.producer else "float"
        if made in ("float", "fed", "handing") and read & {"quantized", "handing"} and tensor not in times.quantize:
            yield tensor, "quantize"
        if made == "quantized" and read & {"float", "fed"} and tensor not in times.dequantize:
            yield tensor, "dequantize"


def _spent(unit: Unit, partition: Partition, times: Times) -> float:
    return sum(times.nodes.get(partition.model.nodes[n].name, 0.0) for n in unit.nodes)


def _conversions(partition: Partition, times: Times, floats: Times, states: Sequence[State]) -> Mapping[int, float]:
    """DQs that ran by unit. Each is for the sake of the consumer that is the least quantized, judged by its state and
    then by its time compared with its time in the float build: the others absorbed theirs."""
    ranks = ("float", "fed", "handing", "mixed", "quantized")
    paid: dict[int, float] = {}
    for tensor, spent in times.dequantize.items():
        edges = [e for e in partition.reading.get(tensor, ()) if e in times.placement]
        users = sorted(
            {partition.owner[e.node] for e in edges if e.node},
            key=lambda u: (ranks.index(states[u]), -_slowness(partition.units[u], partition, times, floats), u),
        )
        copies = times.copies[tensor] - sum(e.is_graph_output for e in edges)
        for user in users[: max(copies, 0)]:
            paid[user] = paid.get(user, 0.0) + spent / times.copies[tensor]
    return paid


def _slowness(unit: Unit, partition: Partition, times: Times, floats: Times) -> float:
    before = _spent(unit, partition, floats)
    return _spent(unit, partition, times) / before if before > 0 else 0.0


def bytes_of(model: Model, tensor: str) -> float:
    """Of a tensor of floats; 0 where its shape is not known."""
    info = model.tensors.get(tensor)
    if info is None or info.shape is None:
        return 0.0
    return elements(model, tensor) * float(onnx.helper.tensor_dtype_to_np_dtype(info.dtype).itemsize)
