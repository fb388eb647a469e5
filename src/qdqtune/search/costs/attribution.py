"""Divides the layer times of a build among nodes and tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from qdqtune.graph.model import Model
from qdqtune.graph.operators import is_float, work
from qdqtune.types import Layer, Placement

CONVERSION = re.compile(r"^(?P<tensor>.*)_(?P<op>Quantize|Dequantize)Linear(_\d+)?$")
"""Matches the names of inserted Q and DQ nodes; group `tensor` is the tensor that they convert."""

DYNAMIC_CONVERSION = re.compile(r"^(?P<tensor>.*)_DynamicQuantizeLinear(_\d+)?$")
"""Matches the names of inserted DynamicQuantizeLinear nodes; group `tensor` is the tensor that they read."""


@dataclass(frozen=True)
class BuildTimes:
    """The times of a build in ms: of each node of the model, and of the conversions (Q, DQ) of each tensor."""

    placement: Placement
    nodes: Mapping[str, float]
    quantize: Mapping[str, float]
    dequantize: Mapping[str, float]
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each node the precision of its kernel and the nodes that this runs."""

    @cached_property
    def paired(self) -> frozenset[str]:
        return frozenset(e.tensor for e in self.placement.edges)


def attribute(model: Model, placement: Placement, layers: Sequence[Layer], ms: float) -> BuildTimes:
    """Divide a layer report among nodes and tensors, scaled so that the times add up to `ms`, the latency of the build.

    A layer with several nodes is divided by their work. A layer that names no node (a reformat) counts for the next one
    that does, since it runs for it; the last ones count for the node before. A DynamicQuantizeLinear is divided equally
    among the products that read it.
    """
    total = sum(layer.time_ms or 0.0 for layer in layers)
    scale = ms / total if total > 0 else 0.0
    nodes, kernels = defaultdict[str, float](float), dict[str, tuple[str, ...]]()
    converted = {"Quantize": defaultdict[str, float](float), "Dequantize": defaultdict[str, float](float)}
    waiting = 0.0
    dynamic = defaultdict[str, list[str]](list)
    for edge, weight_format in placement.weight_formats.items():
        if weight_format.dynamic and edge.node in model.index_of:
            dynamic[model.node(edge.node).inputs[0]].append(edge.node)
    for layer in layers:
        own = scale * (layer.time_ms or 0.0)
        real = [n for n in layer.nodes if n in model.index_of]
        added = [n for n in layer.nodes if n not in model.index_of]
        pairs = list(filter(None, map(CONVERSION.match, added)))
        quantized = [match["tensor"] for match in map(DYNAMIC_CONVERSION.match, added) if match]
        readers = dynamic.get(quantized[0], []) if quantized else []
        if real:
            weights = np.array([1.0 + work(model, model.node(n)) for n in real])
            for name, part in zip(real, weights / weights.sum(), strict=True):
                nodes[name] += float((own + waiting) * part)
            kernels.update(dict.fromkeys(real, (layer.precision, *real)))
            waiting = 0.0
        elif pairs:
            for match in pairs:
                converted[match["op"]][match["tensor"]] += own / len(pairs)
        elif readers:
            for name in readers:
                nodes[name] += own / len(readers)
        else:
            waiting += own
    if waiting and nodes:
        nodes[next(reversed(nodes))] += waiting
    return BuildTimes(placement, dict(nodes), dict(converted["Quantize"]), dict(converted["Dequantize"]), kernels)


MOST_SCALED = 2.0
"""Times of nodes with pairs beside them are scaled by less than this factor. Chosen, not measured."""


def with_float_times(model: Model, build: BuildTimes, floats: BuildTimes) -> BuildTimes:
    """The times of a build, where nodes without pairs beside them that run in the same kernel as in the float build
    (`floats`) get their time there, and the other nodes share the rest of the latency.

    Layer times do not add up to the latency, because of waits between kernels and of profiling, above all with several
    threads. If all nodes were scaled alike, float nodes would seem slower in a slow build, and the float model slower
    than it is.
    """
    touched = build.paired | {edge.tensor for edge, _ in build.placement.weight_only}
    kept = (n for n in model.nodes if build.kernels.get(n.name) == floats.kernels.get(n.name))
    same = {n.name for n in kept if n.name in build.nodes and touched.isdisjoint((*n.inputs, *n.outputs))}
    took, before = (sum(times.nodes.get(name, 0.0) for name in same) for times in (build, floats))
    total = sum(sum(times.values()) for times in (build.nodes, build.quantize, build.dequantize))
    if not same or total <= took or not 1 / MOST_SCALED < (factor := (total - before) / (total - took)) < MOST_SCALED:
        return build
    nodes = {name: floats.nodes.get(name, ms) if name in same else factor * ms for name, ms in build.nodes.items()}
    q, d = ({tensor: factor * ms for tensor, ms in paid.items()} for paid in (build.quantize, build.dequantize))
    return replace(build, nodes=nodes, quantize=q, dequantize=d)


class NodeTime(NamedTuple):
    """The ms of a node itself in a build, and of the conversions that `node_times` charges to it."""

    own: float = 0.0
    conversions: float = 0.0


def node_times(model: Model, times: BuildTimes) -> Mapping[str, NodeTime]:
    """The time of every node in a build; empty where the engine reports no times.

    Each conversion counts once: a Q for the node that writes the tensor (for a model input, its first reader), a DQ for
    its first reader (for a model output, the node that writes it).
    """
    if not any(times.nodes.values()):
        return {}
    spent = {node.name: NodeTime(times.nodes.get(node.name, 0.0)) for node in model.nodes}
    for paid, from_writer in ((times.quantize, True), (times.dequantize, False)):
        for tensor, took in paid.items():
            maker = model.maker(tensor)
            readers = [model.nodes[use.node].name for use in model.uses(tensor) if use.node >= 0]
            writers = [] if maker is None else [maker.name]
            for name in (writers + readers if from_writer else readers + writers)[:1]:  # none for an added bias
                spent[name] = spent[name]._replace(conversions=spent[name].conversions + took)
    return spent


def group_ms(model: Model, group: Collection[str], times: BuildTimes) -> float | None:
    """The ms of a fusion group in a build, with its conversions; None unless pairs stand inside it, or on every float
    tensor that enters or leaves it, so that the build shows its time in 8 bits."""
    nodes = [model.node(name) for name in group]
    inside = {node.index for node in nodes}
    made = {t for node in nodes for t in node.outputs}
    entering = {t for node in nodes for t in node.inputs if t and t not in made and t not in model.constants}
    leaving = {t for t in made if any(u.node not in inside for u in model.uses(t))}
    is_split = any(e.tensor in made and e in times.placement for node in nodes for e in node.into)
    if not is_split and not all(t in times.paired or not is_float(model, t) for t in entering | leaving):
        return None
    spent = sum(times.nodes.get(n, 0.0) for n in group)
    spent += sum(times.quantize.get(t, 0.0) for t in made)
    return spent + sum(times.dequantize.get(t, 0.0) for t in made | entering)
