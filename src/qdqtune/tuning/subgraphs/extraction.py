"""A group of nodes as a model of its own, which an engine can build and time alone.

Its inputs are the tensors that other nodes make, its outputs those that other nodes read. Names stay as they are, so
that edges, ranges and scales of the whole model hold in the part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration.observe import outputs_on, with_outputs
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.shapes import Span
from qdqtune.errors import BadOption
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import Constant, Model
from qdqtune.types import Array, Sample

Sizes = Mapping[str, tuple[int, ...]]
"""Tensor to its shape."""

SHAPE_LENGTH = 64
"""Integer vectors up to this length that nodes compute are taken for shapes."""


@dataclass(frozen=True)
class Resolved:
    """The shape of every tensor while measuring, and of those whose sizes may vary the least and the largest."""

    sizes: Sizes
    spans: Mapping[str, Span] = field(default_factory=dict)


def resolve(
    model: Model, shaped: Model, sample: Sample, spans: Mapping[str, Span], budget: MemoryBudget | None = None
) -> Resolved:
    """Shapes of all tensors: by inference, and where that ends by running the model once.

    Args:
        model: with the sizes that the user's file leaves open.
        shaped: the same graph with the input shapes of the measurement.
        sample: what it is measured on.
        spans: the shapes that each dynamic input may take, where the engine is told so.
        budget: the memory budget of the engines that hold builds meanwhile, if they have one.

    Raises:
        BadOption: a span does not fit the model.
        BadModel: ONNX Runtime cannot run the model.
    """
    sizes = {name: np.shape(array) for name, array in sample.items()} | _known(shaped)
    made = [t for node in shaped.nodes for t in node.outputs if t]
    if unknown := [t for t in made if t not in sizes and t in shaped.tensors]:
        nodes = [helper.make_node("Shape", [t], [f"__shape_{i}"], f"__shape_{i}") for i, t in enumerate(unknown)]
        (shapes,) = outputs_on(with_outputs(shaped, nodes), [sample], budget)
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
    """The tensors that some nodes read from others, constants left out, and those that others read from them."""
    made = {t for n in nodes for t in model.nodes[n].outputs if t}
    read = dict.fromkeys(t for n in nodes for t in (*model.nodes[n].inputs, *model.nodes[n].captures) if t)
    inside = set(nodes)
    leaving = (
        t for n in nodes for t in model.nodes[n].outputs if t and any(u.node not in inside for u in model.uses(t))
    )
    return tuple(t for t in read if t not in made and t not in model.constants), tuple(leaving)


def is_shape(model: Model, tensor: str, sizes: Sizes) -> bool:
    """Whether nodes compute a tensor that looks like the sizes of another one."""
    info = model.tensors.get(tensor)
    integer = info is not None and info.dtype in (TensorProto.INT64, TensorProto.INT32)
    size = sizes.get(tensor, (SHAPE_LENGTH + 1,))
    return integer and tensor in model.producers and len(size) <= 1 and int(np.prod(size)) <= SHAPE_LENGTH


def extract(model: Model, nodes: Sequence[int], resolved: Resolved, baked: Mapping[str, Array]) -> Model:
    """Some nodes of a model as a model of their own. The weights are the whole model's.

    Inputs have the size of the measurement, or open sizes where they vary; those of `baked` become constants.

    Raises:
        BadOption: the type of a tensor at the border is unknown.
    """
    reads, writes = borders(model, nodes)
    inputs = tuple(t for t in reads if t not in baked)
    used = {t for n in nodes for t in (*model.nodes[n].inputs, *model.nodes[n].captures)}
    proto = onnx.ModelProto(
        ir_version=model.proto.ir_version, opset_import=model.proto.opset_import, functions=model.proto.functions
    )
    graph = proto.graph
    graph.name = "part"
    graph.node.extend(model.proto.graph.node[n] for n in nodes)
    graph.initializer.extend(t for t in model.proto.graph.initializer if t.name in used)
    graph.initializer.extend(Constant.of(baked[t]).to_proto(t) for t in reads if t in baked)
    spans = {} if len(inputs) < len(reads) else resolved.spans
    graph.input.extend(_value(model, t, _open(resolved.sizes.get(t), spans.get(t))) for t in inputs)
    graph.output.extend(_value(model, t, _open(resolved.sizes.get(t), spans.get(t))) for t in writes)
    made = {t for n in nodes for t in model.nodes[n].outputs if t} - set(writes)
    known = (t for t in sorted(made) if t in model.tensors)
    graph.value_info.extend(_value(model, t, _open(resolved.sizes.get(t), spans.get(t))) for t in known)
    large = {name: c for name, c in model.large.items() if name in used}
    return Model(proto, large)


def _open(size: tuple[int, ...] | None, span: Span | None) -> tuple[int | None, ...] | None:
    if span is None:
        return size
    return tuple(low if low == high else None for low, high in zip(span.low, span.high, strict=True))


def _value(model: Model, tensor: str, shape: Sequence[int | None] | None) -> onnx.ValueInfoProto:
    info = model.tensors.get(tensor)
    if info is None:
        raise BadOption(f"the type of tensor {tensor!r} is unknown")
    return helper.make_tensor_value_info(tensor, info.dtype, None if shape is None else list(shape))
