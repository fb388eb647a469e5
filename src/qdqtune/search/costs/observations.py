"""Measured times of units and conversions: each build prices every unit in the state that its placement puts it in.

The states are described in `prices`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from statistics import median
from typing import Literal

import onnx

from qdqtune.graph.model import Model
from qdqtune.graph.operators import elements
from qdqtune.search.costs.attribution import BuildTimes
from qdqtune.search.costs.units import Partition, Unit
from qdqtune.types import Edge, Placement

State = Literal["float", "fed", "handing", "mixed", "quantized"]
Behind = Literal["quantized", "both", "float"]
Conversion = Literal["quantize", "dequantize"]

RANKS: Sequence[State] = ("float", "fed", "handing", "mixed", "quantized")
"""The states of a unit, from the least quantized to the most."""

UNEQUAL = 1.5
"""Equal units whose times differ by more than this factor do not do equal work; smaller differences are noise of the
measurement. Chosen, not measured."""

NEGLIGIBLE = 1e-3
"""Share of the float build's time below which two layer times do not count as different. Chosen, not measured."""


def state(unit: Unit, partition: Partition, placement: Placement) -> State:
    """The state of a unit in a placement, as `prices` describes them."""
    placed = placement.edges
    if not placed.isdisjoint(unit.inner):
        return "mixed"  # the engine cannot run it as one kernel
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


def behind(unit: Unit, partition: Partition, stored: Container[str]) -> Behind:
    """What a unit reads: tensors stored in 8 bits, floats, or both; "quantized" also if it reads graph inputs alone."""
    found = {t in stored for t in partition.storable(unit)}
    return "both" if len(found) > 1 else "float" if found == {False} else "quantized"


def stored_in(partition: Partition, placement: Placement, states: Sequence[State]) -> frozenset[str]:
    """The tensors that stay in 8 bits: with pairs on all their edges, written by a unit in state quantized."""
    of, all_paired = partition.producer, placement.edges.issuperset
    return frozenset(
        t for t, es in partition.edges.items() if t in of and states[of[t]] == "quantized" and all_paired(es)
    )


UnitKey = tuple[str, str, Behind]
"""Kind of unit; its state, or the name of the weight format of its weights; and what it reads."""


@dataclass
class Observations:
    """Measured times of units by kind, and of conversions by tensor. Each entry comes from the latest build that has
    it."""

    units: dict[UnitKey, list[float]] = field(default_factory=dict)
    disturbed: dict[str, float] = field(default_factory=dict)
    """By kind, the extra ms of a float unit that reads or writes tensors with pairs."""
    quantize: dict[str, float] = field(default_factory=dict)
    dequantize: dict[str, float] = field(default_factory=dict)
    sizes: list[tuple[float, float]] = field(default_factory=list)
    """Bytes and ms of all conversions that ran."""
    medians: dict[UnitKey, list[float]] = field(default_factory=dict)
    """By key, the median of each build that has it: their spread is the doubt about a price."""
    per_consumer: bool = False
    """Whether a build ran several DQs of one tensor, one for each consumer."""


def observe(partition: Partition, builds: Sequence[BuildTimes]) -> tuple[Partition, Observations]:
    """The observations of some builds, the float model's first; and the partition, with kinds split where the float
    build took unequal time for equal units."""
    before = partition.spent(builds[0].nodes)
    partition, found = _split_kinds(partition, before, sum(builds[0].nodes.values())), Observations()
    for times in builds:
        _add_build(found, partition, times, before)
    return partition, found


def _split_kinds(parts: Partition, before: Sequence[float], float_ms: float) -> Partition:
    """The same units, with kinds split where the float build took unequal time for units of one kind.

    The time of some operators depends on the values: a softmax over masked scores works on subnormal numbers.
    """
    kinds: dict[str, list[tuple[float, Unit]]] = {}
    for unit in parts.units:
        kinds.setdefault(unit.kind, []).append((before[unit.number], unit))
    units = list(parts.units)
    for alike in kinds.values():
        ordered = sorted(alike, key=lambda pair: (pair[0], pair[1].number))
        group, last = 0, ordered[0][0]
        for spent, unit in ordered:
            group += spent > UNEQUAL * last and spent - last > NEGLIGIBLE * float_ms
            last = spent
            units[unit.number] = replace(unit, kind=f"{unit.kind} {group}") if group else unit
    return replace(parts, units=tuple(units))


def _add_build(found: Observations, partition: Partition, times: BuildTimes, before: Sequence[float]) -> None:
    """Add the times of a build to `found`; `before` are the times of the units in the float build."""
    states = [state(u, partition, times.placement) for u in partition.units]
    stored = stored_in(partition, times.placement, states)
    paired: dict[str, list[Edge]] = {}
    for edge in times.placement.edges & partition.possible:
        paired.setdefault(edge.tensor, []).append(edge)
    took = partition.spent(times.nodes)
    paid = _charged_dequantizations(
        partition, times, paired, states, [a / b if b > 0 else 0.0 for a, b in zip(took, before, strict=True)]
    )
    fresh: dict[UnitKey, list[float]] = {}
    more: dict[str, list[float]] = {}
    for unit, how, spent in zip(partition.units, states, took, strict=True):
        if how in ("quantized", "handing"):
            spent += paid.get(unit.number, 0.0)
            if how == "quantized":
                spent += sum(times.quantize.get(t, 0.0) for t in unit.outputs)
        given = any(t in paired for t in unit.outputs)
        if (chosen := partition.format_in(unit, times.placement)) is not None:
            # A DQ of weights that runs by itself counts for the unit.
            spent += sum(times.dequantize.get(e.tensor, 0.0) for e in partition.weight_only_edges(unit))
            if how == "float":
                fresh.setdefault((unit.kind, chosen.name, "float"), []).append(spent)
        elif how == "fed" or (how == "float" and given):
            more.setdefault(unit.kind, []).append(spent - before[unit.number])
        elif how != "mixed" and not (how == "float" and times.placement):  # float prices are those of the float build
            fresh.setdefault((unit.kind, how, behind(unit, partition, stored)), []).append(spent)
    found.units |= fresh
    found.disturbed |= {kind: max(0.0, median(ms)) for kind, ms in more.items()}
    for key, ms in fresh.items():
        found.medians.setdefault(key, []).append(median(ms))
    found.per_consumer |= any(n > 1 for n in times.copies.values())
    for op, seen in (("quantize", times.quantize), ("dequantize", times.dequantize)):
        for tensor, spent in seen.items():
            if tensor in partition.edges:
                each = spent / times.copies[tensor] if op == "dequantize" else spent
                getattr(found, op)[tensor] = each
                found.sizes.append((bytes_of(partition.model, tensor), each))
    for tensor, op in _absorbed(partition, times, states):
        getattr(found, op)[tensor] = 0.0


def _absorbed(partition: Partition, times: BuildTimes, states: Sequence[State]) -> Iterator[tuple[str, Conversion]]:
    """Conversions between a float and a quantized unit without a layer of their own: a kernel converts while it reads
    or writes."""
    placed = times.placement.edges
    for tensor, edges in partition.edges.items():
        read = {states[partition.owner[e.node]] for e in edges if e.node and e in placed}
        made = states[partition.producer[tensor]] if tensor in partition.producer else "float"
        if made in ("float", "fed", "handing") and read & {"quantized", "handing"} and tensor not in times.quantize:
            yield tensor, "quantize"
        if made == "quantized" and read & {"float", "fed"} and tensor not in times.dequantize:
            yield tensor, "dequantize"


def _charged_dequantizations(
    partition: Partition,
    times: BuildTimes,
    paired: Mapping[str, Sequence[Edge]],
    states: Sequence[State],
    slowness: Sequence[float],
) -> Mapping[int, float]:
    """By unit, the ms of the DQs that it is charged for. A DQ that ran is charged to the consumer that is the least
    quantized, judged by its state and then by its slowness (its time over that in the float build): the others absorbed
    theirs. `paired` are the edges with pairs by tensor."""
    paid: dict[int, float] = {}
    for tensor, spent in times.dequantize.items():
        edges = paired.get(tensor, ())
        users = {partition.owner[e.node] for e in edges if e.node}
        copies = max(0, times.copies[tensor] - sum(e.is_graph_output for e in edges))
        for user in nsmallest(copies, users, key=lambda u: (RANKS.index(states[u]), -slowness[u], u)):
            paid[user] = paid.get(user, 0.0) + spent / times.copies[tensor]
    return paid


def bytes_of(model: Model, tensor: str) -> float:
    """The bytes of a tensor of floats; 0 where its shape is not known."""
    info = model.tensors.get(tensor)
    if info is None or info.shape is None:
        return 0.0
    return elements(model, tensor) * float(onnx.helper.tensor_dtype_to_np_dtype(info.dtype).itemsize)
