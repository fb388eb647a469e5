"""Converts a float32 model to float16 or bfloat16, for engines that take precision from the graph.

ONNX Runtime's converter makes the float16 model. It puts casts around operators that are unsafe in half precision, and
clips finite constants to the range of float16, so that a mask of -3e38 stays a mask. It needs the whole protobuf in
memory, so it gets large constants as graph inputs; they are converted here when they are read. Casts to float16 and
back between two nodes in float32 are removed, because they would round. A bfloat16 model is made of the float16
model, with bfloat16 in place of float16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtune.errors import BadModel, one_line
from qdqtune.graph.constants import replace
from qdqtune.graph.loading import checked, load
from qdqtune.graph.model import GRAPH, Constant, Model, bodies, captured, rebuild
from qdqtune.graph.rewrites import Rewrites
from qdqtune.graph.simplifying import UniqueNames, names_in, rename
from qdqtune.types import Array

Precision = Literal["fp32", "fp16", "bf16"]
HalfPrecision = Literal["fp16", "bf16"]

HALF_TYPES: Mapping[HalfPrecision, int] = MappingProxyType({"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16})

OPSET = 19
"""The least opset for pairs on float16 tensors."""

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)

NO_REWRITES = Rewrites()

COMPARISONS = frozenset({"Max", "Min"})
"""Operators on the converter's list of unsafe ones that are converted all the same: their result is one of their
inputs, so that they do not round, and kernels for half precision exist since opset 12."""


def load_for(
    path: Path,
    precision: Precision,
    fix_inputs: Mapping[str, float | int | str],
    min_opset: int,
    rewrites: Rewrites = NO_REWRITES,
) -> tuple[Model, Rewrites]:
    """A model with at least the opset that pairs at `precision` need, and the rewrites that were made of it. It is not
    converted."""
    model = load(path, fix_inputs=fix_inputs, min_opset=min_opset)
    is_half = precision != "fp32" or any(info.dtype in HALF for info in model.tensors.values())
    if model.opset < OPSET and is_half:
        model = load(path, fix_inputs=fix_inputs, min_opset=OPSET)
    return rewrites.made(model)


def is_float32(model: Model) -> bool:
    """Whether any node makes float32 values, which could be converted."""
    return any(_holds_float32(model, t) for node in model.nodes for t in node.outputs)


def converted(model: Model, precision: Precision, kept: Collection[str] = ()) -> Model:
    """`model` in a precision, except the nodes named in `kept` (see `to_float16`). Half precision needs opset 19."""
    if precision == "fp32":
        return model
    half = to_float16(model, kept)
    return half if precision == "fp16" else _as_bfloat16(model, half)


def to_float16(model: Model, kept: Collection[str] = ()) -> Model:
    """`model` (opset 19 or later) in float16. Graph inputs and outputs stay float32, with a Cast at each where a node
    reads or makes it.

    These nodes stay in float32, and the tensors between them too: operators on the converter's list of unsafe ones
    (except `COMPARISONS`), nodes of other domains, whose kernels are unknown, and nodes named in `kept`."""
    from onnxruntime.transformers import float16  # slow to import

    model = _with_outputs_apart(model)
    unmade = {t for t in model.outputs if t not in model.producers}
    in_full = {n.index for n in model.nodes if n.name in kept} | blocked(model)
    full = {c for c in model.large if all(use.slot >= 0 and use.node in in_full for use in model.uses(c))}
    full |= unmade & model.large.keys()
    try:
        proto = float16.convert_float_to_float16(
            _for_converter(model, full, unmade),
            keep_io_types=[*model.inputs, *model.overridable, *model.outputs],
            disable_shape_infer=True,
            op_block_list=sorted(_unsafe()),  # in bodies too
            node_block_list=[model.nodes[i].name for i in in_full],
        )
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise BadModel(f"cannot convert the model to float16: {one_line(error)}") from error
    replace(proto.graph.input, model.proto.graph.input)
    replace(proto.graph.output, model.proto.graph.output)
    proto.graph.initializer.extend(t for t in model.proto.graph.initializer if t.name in unmade | model.overridable)
    # The converter makes a Cast for each float32 reader of a tensor, all of one name: keep one.
    replace(proto.graph.node, list({node.name: node for node in proto.graph.node}.values()))
    if kept:
        _remove_needless_casts(proto.graph)
    try:
        stays = {name for name, c in model.large.items() if name in full or c.dtype != TensorProto.FLOAT}
        return checked(
            proto, {t: c if t in stays else _in_type(c, TensorProto.FLOAT16) for t, c in model.large.items()}
        )
    except BadModel as error:
        raise BadModel(f"cannot convert the model to float16: {error}") from error


def blocked(model: Model) -> set[int]:
    """Indices of the nodes that always stay in float32."""
    return {n.index for n in model.nodes if n.domain or n.op in _unsafe()}


def kept_in(half: Model, model: Model) -> set[str]:
    """The names of the nodes that were in `kept` when `half` was made of `model`."""
    full = {n.name for n in half.nodes if n.op != "Cast" for t in n.outputs if _holds_float32(half, t)}
    always = blocked(model)
    return {n.name for n in model.nodes if n.name in full and n.index not in always}


def _holds_float32(model: Model, tensor: str) -> bool:
    return tensor in model.tensors and model.tensors[tensor].dtype == TensorProto.FLOAT


def rounded_to_float16(values: Array) -> Array:
    """Float32 values as float16, as the converter rounds them, in a twentieth of its time: finite values stay finite,
    and only zero becomes zero."""
    limits = np.finfo(np.float16)
    with np.errstate(over="ignore"):
        half = np.asarray(values, np.float32).astype(np.float16)
    for wrong, limit in (
        ((half == 0) & (values != 0), limits.smallest_subnormal),
        (np.isinf(half) & np.isfinite(values), limits.max),
    ):
        if wrong.any():
            half[wrong] = np.copysign(limit, values[wrong])
    return half


@cache
def _unsafe() -> frozenset[str]:
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    return frozenset(DEFAULT_OP_BLOCK_LIST) - COMPARISONS


def _remove_needless_casts(graph: onnx.GraphProto) -> None:
    """Remove the converter's casts to float16 and back between two float32 tensors, in place."""
    makers = {node.output[0]: node for node in graph.node if node.op_type == "Cast"}
    inputs, outputs = ({value.name for value in part} for part in (graph.input, graph.output))
    same: dict[str, str] = {}
    gone: set[str] = set()
    for back in makers.values():
        is_back = back.name.endswith("_cast_to_fp32_node") or back.name.startswith("graph_output_cast")
        there = makers.get(back.input[0]) if is_back else None
        if there is None or not _is_to_half(there):
            continue
        source, target = there.input[0], back.output[0]
        if target not in outputs:
            same[target] = source
        elif source not in inputs:  # its producer makes the output itself
            same[source] = target
        else:
            continue
        gone.add(back.name)
    nodes = [node for node in graph.node if node.name not in gone]
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = [_final_name(name, same) for name in names]
    read = {name for node in nodes for name in (*node.input, *(c for b in bodies(node) for c in captured(b)))} | outputs
    replace(graph.node, [n for n in nodes if not _is_to_half(n) or n.output[0] in read])


def _is_to_half(node: onnx.NodeProto) -> bool:
    """Whether a node is one of the converter's casts to float16."""
    return node.name.endswith("_cast_to_fp16_node") or node.name.startswith("graph_input_cast")


def _final_name(name: str, same: Mapping[str, str]) -> str:
    while name in same:
        name = same[name]
    return name


def _as_bfloat16(model: Model, half: Model) -> Model:
    """`half`, which was made of `model`, with bfloat16 in place of float16 where `model` has float32."""
    was = {t for t, info in model.tensors.items() if info.dtype == TensorProto.FLOAT16}
    own = {n.name for n in model.nodes if n.op == "Cast"}
    proto = deepcopy(half.proto)
    for value in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16 and value.name not in was:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16 and tensor.name not in was:
            tensor.CopyFrom(_bfloat16(tensor, model.constants.get(tensor.name)))
    for node in proto.graph.node:
        for attribute in node.attribute:
            is_own = node.name in own and model.nodes[model.index_of[node.name]].attributes["to"] == TensorProto.FLOAT16
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT16 and not is_own:
                attribute.i = TensorProto.BFLOAT16
            if attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT16:
                attribute.t.CopyFrom(_bfloat16(attribute.t, None))
    large = {
        t: _in_type(model.constants.get(t, c), TensorProto.BFLOAT16) if t not in was else c
        for t, c in half.large.items()
    }
    kept = {t: half.large[t] for t in half.large if half.large[t].dtype != TensorProto.FLOAT16}
    return checked(proto, large | kept)


def _bfloat16(tensor: onnx.TensorProto, before: Constant | None) -> onnx.TensorProto:
    """A float16 tensor in bfloat16, rounded from the float32 constant `before` if there is one."""
    values = numpy_helper.to_array(tensor) if before is None else before.array()
    made: onnx.TensorProto = numpy_helper.from_array(values.astype(ml_dtypes.bfloat16), tensor.name)
    return made


def _with_outputs_apart(model: Model) -> Model:
    """The model in which nodes read copies of the constants that are graph outputs, which stay in float32."""
    taken = UniqueNames(names_in(model.proto.graph) | model.large.keys())
    copies = {
        t: taken.fresh(t) for t in model.outputs if t in model.constants and any(u.node != GRAPH for u in model.uses(t))
    }
    if not copies:
        return model
    nodes = [deepcopy(node) for node in model.proto.graph.node]
    for node in nodes:
        rename(node, copies)
    return rebuild(model, nodes, {copy: model.constants[t] for t, copy in copies.items()})


def _for_converter(model: Model, full: Set[str], unmade: Set[str]) -> onnx.ModelProto:
    """A protobuf for the converter: a type for each output of a custom operator, and large constants as graph inputs,
    except those in `full`, which stay in float32. It lacks what the converter would change in the interface: outputs
    that no node makes (`unmade`), and the defaults of inputs.
    """
    proto = deepcopy(model.proto)
    replace(proto.graph.output, [v for v in proto.graph.output if v.name not in unmade])
    kept_out = unmade | model.overridable
    replace(proto.graph.initializer, [t for t in proto.graph.initializer if t.name not in kept_out])
    for name, constant in model.large.items():
        if name not in full:
            proto.graph.input.append(helper.make_tensor_value_info(name, constant.dtype, constant.shape))
    for name in (t for node in model.nodes if node.domain for t in node.outputs):
        if name and name not in model.tensors:
            proto.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return proto


def _in_type(constant: Constant, dtype: int) -> Constant:
    """A constant as float16 or bfloat16, converted when it is read."""
    if dtype == TensorProto.FLOAT16:
        return Constant(f"{constant.key}:float16", dtype, constant.shape, lambda: rounded_to_float16(constant.array()))
    key = f"{constant.key}:bfloat16"
    return Constant(key, dtype, constant.shape, lambda: constant.array().astype(ml_dtypes.bfloat16))
