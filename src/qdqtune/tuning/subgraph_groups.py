"""Groups of nodes that an engine runs as one kernel, and such a group as a model of its own.

Groups come from the engine's layer report, from one that TensorRT wrote elsewhere, or from rules. A group's inputs are
the tensors that it reads from other nodes, its outputs those that other nodes read. Names stay the same, so that edges,
ranges and scales of the whole model apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration.observe import outputs_on, with_outputs
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.tensorrt.options import Span
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.errors import BadOption
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import Constant, Model
from qdqtune.search.costs.units import Group, usual_groups
from qdqtune.types import Array, Edge, Layer, Sample

Sizes = Mapping[str, tuple[int, ...]]

SHAPE_LENGTH = 64
"""Computed integer vectors up to this length are assumed to hold shapes. Chosen, not measured."""


@dataclass(frozen=True)
class Grouping:
    """Every node of a model once: in a group, or in `folded`, if the engine computes it in advance. `nameless` are
    layers that name no node of the model."""

    groups: tuple[Group, ...]
    folded: Group
    nameless: tuple[str, ...]


def from_layers(model: Model, layers: Sequence[Layer]) -> Grouping:
    """One group for each layer. A node that two layers name belongs to the first; others are groups of their own."""
    taken: set[str] = set()
    groups: list[Group] = []
    folded: list[str] = []
    nameless = []
    for layer in layers:
        own = [name for name in dict.fromkeys(layer.nodes) if name in model.index_of]
        fresh = tuple(sorted(set(own) - taken, key=model.index_of.__getitem__))
        taken.update(fresh)
        if layer.kind == "folded":
            folded += fresh
        elif fresh:
            groups.append(fresh)
        if not own:
            nameless.append(layer.name)
    groups += [(node.name,) for node in model.nodes if node.name not in taken]
    groups.sort(key=lambda group: model.index_of[group[0]])
    return Grouping(tuple(groups), tuple(folded), tuple(nameless))


def from_file(model: Model, path: Path) -> Grouping:
    """The groups in a layer report written by trtexec --exportLayerInfo."""
    proto = deepcopy(model.proto)
    for name in model.large:  # whose names `read_report` looks up
        proto.graph.initializer.add(name=name)
    try:
        layers = read_report(path, None, proto)
    except BadOption as error:
        raise BadOption(f"`graph_json` {path}: {error}") from error
    return from_layers(model, layers)


def by_rules(model: Model, possible: frozenset[Edge]) -> Grouping:
    """Groups by rule, for an engine without a layer report: each compute operator with what usually fuses into it."""
    return from_layers(model, [Layer(group[0], group, "", None, "compute") for group in usual_groups(model, possible)])


# ---------------------------------------------------------------- a group as a model of its own


@dataclass(frozen=True)
class Resolved:
    """The shapes of all tensors in the measurement; `spans` has the smallest, usual and largest if they vary."""

    sizes: Sizes
    spans: Mapping[str, Span] = field(default_factory=dict)


def resolve(
    model: Model,
    shaped: Model,
    sample: Sample,
    spans: Mapping[str, Span],
    execution: Execution = EXECUTION,
) -> Resolved:
    """Find the shapes of all tensors by shape inference and, where that fails, by running the model once on `sample`.
    `shaped` is the model with that sample's input shapes; `spans` are the sizes that dynamic inputs may have."""
    sizes = {name: np.shape(array) for name, array in sample.items()} | _known(shaped)
    made = _made(shaped, range(len(shaped.nodes)))
    unknown = [t for t in made if t not in sizes and t in shaped.tensors]
    if unknown:
        nodes = [helper.make_node("Shape", [t], [f"__shape_{i}"], f"__shape_{i}") for i, t in enumerate(unknown)]
        (shapes,) = outputs_on(with_outputs(shaped, nodes), [sample], execution)
        sizes |= {t: tuple(map(int, shapes[node.output[0]])) for t, node in zip(unknown, nodes, strict=True)}
    varying = {name: span for name, span in spans.items() if name in model.inputs and span.low != span.high}
    if not varying:
        return Resolved(sizes)
    low, usual, high = (
        _known(with_input_shapes(model, {n: s[i] for n, s in spans.items() if n in model.inputs})) for i in range(3)
    )
    both = {t: Span(low[t], usual[t], high[t]) for t in low if t in usual and t in high and low[t] != high[t]}
    return Resolved(sizes, both)


def _known(model: Model) -> dict[str, tuple[int, ...]]:
    sizes = ((name, info.sizes) for name, info in model.tensors.items())
    return {name: known for name, known in sizes if known is not None}


def borders(model: Model, nodes: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The inputs of a group (tensors that it reads from other nodes, without constants), and its outputs (tensors that
    other nodes read)."""
    made, inside = _made(model, nodes), set(nodes)
    reads = tuple(t for t in _used(model, nodes) if t not in made and t not in model.constants)
    writes = tuple(t for t in made if any(use.node not in inside for use in model.uses(t)))
    return reads, writes


def _made(model: Model, nodes: Sequence[int]) -> dict[str, None]:
    return dict.fromkeys(t for n in nodes for t in model.nodes[n].outputs if t)


def _used(model: Model, nodes: Sequence[int]) -> dict[str, None]:
    return dict.fromkeys(t for n in nodes for t in model.nodes[n].reads)


def is_shape(model: Model, tensor: str, sizes: Sizes) -> bool:
    """Whether a computed tensor probably holds the shape of another, judged by type and length."""
    info = model.tensors.get(tensor)
    integer = info is not None and info.dtype in (TensorProto.INT64, TensorProto.INT32)
    size = sizes.get(tensor, (SHAPE_LENGTH + 1,))
    return integer and tensor in model.producers and len(size) <= 1 and int(np.prod(size)) <= SHAPE_LENGTH


def extract(model: Model, nodes: Sequence[int], resolved: Resolved, baked: Mapping[str, Array]) -> Model:
    """A group of nodes as a model that shares the weights of the whole one. Inputs have the measured shapes, or open
    sizes where they vary; those in `baked` become constants."""
    reads, writes = borders(model, nodes)
    inputs = [t for t in reads if t not in baked]
    made, used = _made(model, nodes), _used(model, nodes)
    spans = {} if len(inputs) < len(reads) else resolved.spans

    def values(tensors: Iterable[str]) -> Iterator[onnx.ValueInfoProto]:
        for tensor in tensors:
            if tensor not in model.tensors:
                raise BadOption(f"the type of tensor {tensor!r} is unknown")
            shape: Sequence[int | None] | None = resolved.sizes.get(tensor)
            span = spans.get(tensor)
            if span is not None:
                shape = [low if low == high else None for low, high in zip(span.low, span.high, strict=True)]
            yield helper.make_tensor_value_info(tensor, model.tensors[tensor].dtype, shape)

    proto = onnx.ModelProto(
        ir_version=model.proto.ir_version, opset_import=model.proto.opset_import, functions=model.proto.functions
    )
    graph = proto.graph
    graph.name = "part"
    graph.node.extend(model.proto.graph.node[n] for n in nodes)
    graph.initializer.extend(t for t in model.proto.graph.initializer if t.name in used)
    graph.initializer.extend(Constant.of(baked[t]).to_proto(t) for t in reads if t in baked)
    graph.input.extend(values(inputs))
    graph.output.extend(values(writes))
    graph.value_info.extend(values(t for t in sorted(made.keys() - writes) if t in model.tensors))
    return Model(proto, {name: c for name, c in model.large.items() if name in used})
