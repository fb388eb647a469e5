"""Prices of units and conversions, learned from the layer reports of a few builds.

Every build prices every unit at once, in the state that its placement puts the unit in:

    float      no pair on its inputs                                      c0
    quantized  pairs on all inputs, and on all uses of its outputs        c1
    handing    pairs on all inputs, none on its outputs                   c1 + o
    mixed      anything else: says nothing about the unit

A Q that runs by itself behind a float unit is the price q of its tensor, a DQ that runs in front of a float unit its
price d. Conversions that run although the units on both sides are quantized belong to the unit that did not absorb
them. What was never seen is guessed low, so that it is tried: prices of equal units are shared, conversions follow
a + b * bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx

from qdqtune.graph import Model
from qdqtune.strategies.region import work
from qdqtune.strategies.units import Partition, Unit
from qdqtune.types import Edge, Layer, Placement

State = Literal["float", "quantized", "handing", "mixed"]

HOPE = 0.25
"""An unseen quantized unit is hoped to take this share of its float time."""

CONVERSION = re.compile(r"^(?P<tensor>.*)_(?P<op>Quantize|Dequantize)Linear(_\d+)?$")


@dataclass(frozen=True)
class Priced:
    """A build: where its pairs stood, what its layers took, and its latency as a ratio to the float build's."""

    placement: Placement
    layers: tuple[Layer, ...]
    ratio: float = 1.0


@dataclass(frozen=True)
class Times:
    """A build's layer times in ms by what they were spent on: nodes of the model, and conversions of tensors."""

    placement: Placement
    nodes: Mapping[str, float]
    quantize: Mapping[str, float]
    dequantize: Mapping[str, float]


def attribute(model: Model, build: Priced, float_ms: float) -> Times:
    """Spread a report over nodes and tensors, scaled so that it adds up to the latency that the rounds found.

    A layer of several nodes is shared out by their work. Layers that name nothing (reformats) are charged to the next
    one that does, for whose sake they run.
    """
    total = sum(layer.time_ms or 0.0 for layer in build.layers)
    scale = build.ratio * float_ms / total if total > 0 else 0.0
    nodes: dict[str, float] = {}
    converted: dict[str, dict[str, float]] = {"Quantize": {}, "Dequantize": {}}
    waiting = 0.0
    for layer in build.layers:
        own = scale * (layer.time_ms or 0.0)
        real = [n for n in layer.nodes if n in model.index_of]
        pairs = [m for n in layer.nodes if n not in model.index_of and (m := CONVERSION.match(n))]
        if real:
            weights = np.array([1.0 + work(model, model.nodes[model.index_of[n]]) for n in real])
            for name, part in zip(real, weights / weights.sum(), strict=True):
                nodes[name] = nodes.get(name, 0.0) + float((own + waiting) * part)
            waiting = 0.0
        elif pairs:
            for match in pairs:
                spent = converted[match["op"]]
                spent[match["tensor"]] = spent.get(match["tensor"], 0.0) + own / len(pairs)
        else:
            waiting += own
    return Times(build.placement, nodes, converted["Quantize"], converted["Dequantize"])


def state(unit: Unit, partition: Partition, placement: Placement) -> State:
    """What a placement makes of a unit."""
    entering = [e in placement for e in unit.inputs]
    if not any(entering):
        return "float"
    leaving = [e in placement for t in unit.outputs for e in partition.edges.get(t, ())]
    if not all(entering) or not all(e in placement for e in unit.weights):
        return "mixed"
    return "quantized" if all(leaving) else "mixed" if any(leaving) else "handing"


@dataclass
class _Samples:
    """Prices seen so far, the latest build last. Units are known by kind."""

    units: dict[tuple[str, State], list[float]] = field(default_factory=dict)
    quantize: dict[str, float] = field(default_factory=dict)
    dequantize: dict[str, float] = field(default_factory=dict)
    sizes: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Costs:
    """Prices in ms for every unit (by number) and every tensor that crosses a border."""

    partition: Partition
    as_float: tuple[float, ...]
    as_quantized: tuple[float, ...]
    handing: tuple[float, ...]
    quantize: Mapping[str, float]
    dequantize: Mapping[str, float]
    seen: frozenset[int]
    """Units whose quantized price was measured."""

    def total(self, quantized: Collection[int], stored: Collection[str]) -> float:
        """The predicted ms of a decision."""
        found = 0.0
        for unit in self.partition.units:
            runs = unit.number in quantized
            found += self.as_quantized[unit.number] if runs else self.as_float[unit.number]
            if runs and any(t not in stored for t in unit.outputs if t in self.partition.edges):
                found += self.handing[unit.number]
        for tensor, edges in self.partition.edges.items():
            users = [None if e.is_graph_output else self.partition.owner[e.node] for e in edges]
            if tensor in stored:
                found += self.dequantize[tensor] * sum(u is None or u not in quantized for u in users)
            elif any(u in quantized for u in users if u is not None):
                found += self.quantize[tensor]
        return found


def learn(partition: Partition, builds: Sequence[Times]) -> Costs:
    """Prices from the builds so far; a later build counts before an earlier one, being nearer to the solution."""
    samples = _Samples()
    for times in builds:
        _take(samples, partition, times)
    return _priced(partition, samples)


def _take(samples: _Samples, partition: Partition, times: Times) -> None:
    taken: set[tuple[str, State]] = set()
    for unit in partition.units:
        how = state(unit, partition, times.placement)
        if how == "mixed":
            continue
        spent = sum(times.nodes.get(partition.model.nodes[n].name, 0.0) for n in unit.nodes)
        if how != "float":
            spent += _absorbed_by(unit, partition, times, how)
        key = (unit.kind, how)
        if key not in taken:
            samples.units[key] = []
            taken.add(key)
        samples.units[key].append(spent)
    for op, seen in (("quantize", times.quantize), ("dequantize", times.dequantize)):
        for tensor, spent in seen.items():
            if tensor in partition.edges:
                users = len([e for e in partition.edges[tensor] if e in times.placement]) if op == "dequantize" else 1
                each = spent / max(users, 1)
                getattr(samples, op)[tensor] = each
                samples.sizes.append((_bytes(partition.model, tensor), each))


def _absorbed_by(unit: Unit, partition: Partition, times: Times, how: State) -> float:
    """The conversions around a unit with pairs on all its inputs: it had the chance to absorb them."""
    spent = 0.0
    for tensor in {e.tensor for e in (*unit.inputs, *unit.weights)}:
        users = [e for e in partition.edges.get(tensor, ()) if e in times.placement]
        mine = sum(e in unit.inputs for e in users)
        spent += times.dequantize.get(tensor, 0.0) * (mine / len(users) if users else 1.0)
    if how == "quantized":
        spent += sum(times.quantize.get(t, 0.0) for t in unit.outputs)
    return spent


def _priced(partition: Partition, samples: _Samples) -> Costs:
    fixed, per_byte = _line(samples.sizes)

    def conversion(tensor: str, seen: Mapping[str, float]) -> float:
        return seen.get(tensor, fixed + per_byte * _bytes(partition.model, tensor))

    def price(unit: Unit, how: State) -> float | None:
        found = samples.units.get((unit.kind, how))
        return float(np.median(found)) if found else None

    as_float, as_quantized, handing, seen = [], [], [], set()
    for unit in partition.units:
        c0, c1, c10 = price(unit, "float") or 0.0, price(unit, "quantized"), price(unit, "handing")
        if c1 is not None:
            seen.add(unit.number)
        as_float.append(c0)
        as_quantized.append(HOPE * c0 if c1 is None else c1)
        handing.append(0.0 if c10 is None else max(0.0, c10 - as_quantized[-1]))
    return Costs(
        partition, tuple(as_float), tuple(as_quantized), tuple(handing),
        {t: conversion(t, samples.quantize) for t in partition.edges},
        {t: conversion(t, samples.dequantize) for t in partition.edges}, frozenset(seen),
    )  # fmt: skip


def _line(sizes: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """a and b of a + b * bytes, both at least zero; zeros if nothing was seen."""
    points = np.array(list(sizes)).reshape(-1, 2)
    if len(points) == 0:
        return 0.0, 0.0
    per_byte = float(np.median(points[:, 1] / np.maximum(points[:, 0], 1)))
    if len(points) < 3 or np.ptp(points[:, 0]) == 0:
        return 0.0, per_byte
    slope, offset = np.polyfit(points[:, 0], points[:, 1], 1)
    return (max(0.0, float(offset)), float(slope)) if slope > 0 else (float(points[:, 1].mean()), 0.0)


def _bytes(model: Model, tensor: str) -> float:
    info = model.tensors.get(tensor)
    if info is None or info.shape is None:
        return 0.0
    return float(np.prod([d or 1 for d in info.shape]) * onnx.helper.tensor_dtype_to_np_dtype(info.dtype).itemsize)


def group_cost(model: Model, group: Collection[str], times: Times) -> float | None:
    """What a fusion group took in a build that has pairs on all edges that enter and leave it; None in any other."""
    inside = {model.index_of[n] for n in group}
    made = {t for n in inside for t in model.nodes[n].outputs}
    entering = {t for n in inside for t in model.nodes[n].inputs if t and t not in made and t not in model.constants}
    paired = {e.tensor for e in times.placement}
    leaving = {t for t in made if any(u.node not in inside for u in model.uses(t))}
    if not all(_paired(model, t, paired) for t in entering | leaving):
        return None
    spent = sum(times.nodes.get(n, 0.0) for n in group)
    spent += sum(times.quantize.get(t, 0.0) for t in made)
    return spent + sum(times.dequantize.get(t, 0.0) for t in made | entering)


def _paired(model: Model, tensor: str, paired: Collection[str]) -> bool:
    info = model.tensors.get(tensor)
    return tensor in paired or info is None or not info.is_float


def inner_pairs(edges: Iterable[Edge], placement: Placement) -> frozenset[Edge]:
    """Those of a group's inner edges that carry a pair."""
    return frozenset(e for e in edges if e in placement)
