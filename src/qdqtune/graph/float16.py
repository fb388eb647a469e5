"""Converts a float32 model to float16 or bfloat16, for engines that take precision from the graph.

Operators that are unsafe in half precision stay in float32, by the list of ONNX Runtime's converter. So do nodes with
bodies and operators of other domains. Between two nodes in float32 no cast to half precision and back is inserted,
which would round. Casts have the names that ONNX Runtime's converter gives them. Finite constants are clipped to the
range of float16, so that a mask of -3e38 stays a mask. Large constants are converted when they are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtune.errors import BadModel
from qdqtune.graph.loading import checked, load
from qdqtune.graph.model import GRAPH, Constant, Model, Use, bodies
from qdqtune.graph.rewrites import Rewrites
from qdqtune.graph.simplifying import rename
from qdqtune.types import Array

Precision = Literal["fp32", "fp16", "bf16"]
HalfPrecision = Literal["fp16", "bf16"]

HALF_TYPES: Mapping[HalfPrecision, int] = MappingProxyType({"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16})

OPSET = 19
"""The least opset for pairs on float16 tensors."""

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)

BLOCK = 2**18
"""Values that are rounded at a time: they fit into a core's cache."""

NO_REWRITES = Rewrites()

TYPE_ATTRIBUTES = frozenset({"dtype", "to"})
"""Attributes that name the type of a result."""

COMPARISONS = frozenset({"Max", "Min"})
"""Operators that are converted although the converter's list calls them unsafe: their result is one of their inputs, so
they do not round, and kernels for half precision exist since opset 12."""


def load_for(
    path: Path,
    precision: Precision,
    fix_inputs: Mapping[str, float | int | str],
    min_opset: int,
    rewrites: Rewrites = NO_REWRITES,
) -> tuple[Model, Rewrites]:
    """The rewritten model, still in float32, in an opset that has pairs at `precision`; and the rewrites it got."""
    model = load(path, fix_inputs=fix_inputs, min_opset=min_opset)
    is_half = precision != "fp32" or any(info.dtype in HALF for info in model.tensors.values())
    if model.opset < OPSET and is_half:
        model = load(path, fix_inputs=fix_inputs, min_opset=OPSET)
    return rewrites.made(model)


def is_float32(model: Model) -> bool:
    return any(_holds_float32(model, t) for t in model.producers)


def converted(model: Model, precision: Precision, kept: Collection[str] = ()) -> Model:
    """`model` in a precision. Half precision needs opset 19.

    Graph inputs and outputs stay float32 and get a Cast. Nodes that are `blocked` or named in `kept` stay float32, and
    so do tensors that only such nodes read."""
    if precision == "fp32":
        return model
    half = HALF_TYPES[precision]
    in_full = blocked(model) | {n.index for n in model.nodes if n.name in kept}
    floats = [t for t, info in model.tensors.items() if info.dtype == TensorProto.FLOAT]
    floats += [t for t, i in model.producers.items() if model.nodes[i].domain and t not in model.tensors]
    graph_inputs = [v.name for v in model.proto.graph.input]
    made_in_full = {*graph_inputs, *(t for t, i in model.producers.items() if i in in_full)}

    def is_full(tensor: str, use: Use) -> bool:
        if use.node == GRAPH or use.node in in_full:
            return True
        return model.nodes[use.node].op == "Resize" and use.slot == 2  # its scales are float32 always

    in_half = {t for t in floats if not all(is_full(t, use) for use in model.uses(t))}
    shown = [t for t in model.outputs if t in model.producers]
    interface = {t: f"graph_input_cast_{i}" for i, t in enumerate(graph_inputs)}
    interface |= {t: f"graph_output_cast_{i}" for i, t in enumerate(shown)}
    halves = {t: interface.get(t, t) for t in floats}
    full = {t: f"{t}_cast_to_fp16" if t in made_in_full else f"{t}_cast_to_fp32" for t in floats}
    full |= {t: t for t in floats if t in interface or (t in model.constants and t not in in_half)}

    proto, casts = deepcopy(model.proto), list[onnx.NodeProto]()
    listed = {v.name: v for v in (*proto.graph.input, *proto.graph.output)}
    for tensor in sorted(floats, key=lambda t: t not in interface):
        is_read = any(is_full(tensor, use) for use in model.uses(tensor))
        own = interface.get(tensor, "").replace("_cast_", "_cast")
        if tensor in made_in_full and tensor in in_half:
            name = own if tensor in graph_inputs else f"{halves[tensor]}_cast_to_fp16_node"
            casts.append(helper.make_node("Cast", [full[tensor]], [halves[tensor]], name, to=half))
        elif tensor not in made_in_full and is_read and full[tensor] != halves[tensor]:
            name = own or f"{tensor}_cast_to_fp32_node"
            casts.append(helper.make_node("Cast", [halves[tensor]], [full[tensor]], name, to=TensorProto.FLOAT))
        if tensor in listed and tensor in interface:
            proto.graph.value_info.append(listed[tensor])
            proto.graph.value_info[-1].name = halves[tensor]
    known = set(halves.values())
    for node, copy in zip(model.nodes, proto.graph.node, strict=True):
        names = full if node.index in in_full else halves
        rename(copy, {t: names[t] for t in (*node.reads, *node.outputs) if t in names})
        if node.index not in in_full:
            _convert(copy, half)
        if node.op == "Resize" and len(node.inputs) > 2:
            copy.input[2] = full.get(node.inputs[2], node.inputs[2])
    for value in proto.graph.value_info:
        is_half = value.name in known and full.get(value.name) != value.name
        if is_half and value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = half
    for constant in proto.graph.initializer:
        if constant.name in in_half and constant.name in model.constants:
            _convert_tensor(constant, half)
    proto.graph.node.extend(casts)
    try:
        return checked(proto, {t: in_type(c, half) if t in in_half else c for t, c in model.large.items()})
    except BadModel as error:
        raise BadModel(f"cannot convert the model to float16: {error}") from error


def blocked(model: Model) -> set[int]:
    """Indices of the nodes that always stay in float32: unsafe operators, nodes of other domains, whose kernels are
    unknown, nodes with bodies, and nodes that read a constant that is a graph output."""
    shown = model.constants.keys() & set(model.outputs)
    with_bodies = {i for i, node in enumerate(model.proto.graph.node) if any(True for _ in bodies(node))}
    alone = (n.index for n in model.nodes if n.domain or n.op in _unsafe() or not shown.isdisjoint(n.inputs))
    return with_bodies.union(alone)


def kept_in(half: Model, model: Model) -> set[str]:
    """The names that `converted` had as `kept` when it made `half` from `model`."""
    makers = (half.nodes[i] for t, i in half.producers.items() if _holds_float32(half, t))
    full, always = {n.name for n in makers if n.op != "Cast"}, blocked(model)
    return {n.name for n in model.nodes if n.name in full and n.index not in always}


def _holds_float32(model: Model, tensor: str) -> bool:
    return tensor in model.tensors and model.tensors[tensor].dtype == TensorProto.FLOAT


def rounded_to_float16(values: Array) -> Array:
    """Float32 values as float16, fast, as ONNX Runtime's converter does: finite values stay finite, only 0 becomes
    0."""
    values = np.asarray(values, np.float32)
    half = np.empty(values.shape, np.float16)
    blocks = [slice(at, at + BLOCK) for at in range(0, values.size, BLOCK)]
    exact, rounded = values.ravel(), half.reshape(-1)
    if len(blocks) < 2:
        return _round(exact, rounded).reshape(values.shape)
    with ThreadPoolExecutor() as threads:  # NumPy leaves the other cores to other threads
        deque(threads.map(lambda block: _round(exact[block], rounded[block]), blocks), 0)
    return half


def _round(values: Array, half: Array) -> Array:
    """`values` written to `half`, which it returns."""
    limits = np.finfo(np.float16)
    with np.errstate(over="ignore"):
        half[:] = values
    if np.count_nonzero(np.abs(values) < limits.smallest_subnormal) > values.size - np.count_nonzero(values):
        wrong = (half == 0) & (values != 0)
        half[wrong] = np.copysign(limits.smallest_subnormal, values[wrong])
    # A minimum that is no number fails the comparison.
    if values.size and not (-limits.max <= values.min() and values.max() <= limits.max):
        wrong = np.isinf(half) & np.isfinite(values)
        half[wrong] = np.copysign(limits.max, values[wrong])
    return half


@cache
def _unsafe() -> frozenset[str]:
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    return frozenset(DEFAULT_OP_BLOCK_LIST) - COMPARISONS


def _convert(node: onnx.NodeProto, half: int) -> None:
    """Convert float32 attributes of a node to half precision, in place."""
    for attribute in node.attribute:
        if attribute.t.data_type == TensorProto.FLOAT:
            _convert_tensor(attribute.t, half)
        if attribute.name in TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT:
            attribute.i = half
    if node.op_type in ("RandomNormal", "RandomUniform") and all(a.name != "dtype" for a in node.attribute):
        node.attribute.append(helper.make_attribute("dtype", half))
    if node.op_type == "ConstantOfShape" and not node.attribute:
        node.attribute.append(helper.make_attribute("value", helper.make_tensor("value", half, [1], [0])))


def _convert_tensor(tensor: onnx.TensorProto, half: int) -> None:
    constant = in_type(Constant.of(numpy_helper.to_array(tensor)), half)
    tensor.ClearField("float_data")
    tensor.data_type, tensor.raw_data = half, bytes(constant.data())


def in_type(constant: Constant, half: int) -> Constant:
    """A constant in half precision, converted when it is read."""

    def read() -> Array:
        values = constant.array()
        return rounded_to_float16(values) if half == TensorProto.FLOAT16 else values.astype(ml_dtypes.bfloat16)

    name = "float16" if half == TensorProto.FLOAT16 else "bfloat16"
    return Constant(f"{constant.key}:{name}", half, constant.shape, read)
