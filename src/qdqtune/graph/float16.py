"""A float32 model as a float16 one, for engines that take precision from the graph.

ONNX Runtime's converter does it. It knows which operators are unsafe in half precision and casts around them, and
clips finite constants to what float16 holds, so that a mask of -3e38 stays a mask. It works on one protobuf in memory:
large constants are shown to it as graph inputs, and converted here when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Literal

import onnx
from onnx import TensorProto, helper

from qdqtune.errors import BadModel, one_line
from qdqtune.graph.constants import replace
from qdqtune.graph.loading import checked, load
from qdqtune.graph.model import Constant, Model
from qdqtune.graph.rewriting import folded

Precision = Literal["fp32", "fp16"]

OPSET = 19
"""Pairs on float16 tensors need it."""

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def load_as(
    path: Path,
    precision: Precision,
    fix_inputs: Mapping[str, float | int | str],
    min_opset: int,
    *,
    fold: bool = False,
) -> Model:
    """`load`, in float16 if `precision` says so, and with the opset that pairs on float16 tensors need.

    With `fold`, layers take in what scales and shifts their channels: see `folded`.

    Raises:
        BadModel: the file cannot be used, or not be converted.
        BadOption: `fix_inputs` names no input, or a value does not fit.
    """
    model = load(path, fix_inputs=fix_inputs, min_opset=min_opset)
    is_half = precision == "fp16" or any(info.dtype in HALF for info in model.tensors.values())
    if model.opset < OPSET and is_half:
        model = load(path, fix_inputs=fix_inputs, min_opset=OPSET)
    model = folded(model) if fold else model
    return to_float16(model) if precision == "fp16" else model


def to_float16(model: Model) -> Model:
    """`model` (opset 19 or later) in float16. Graph inputs and outputs stay float32, with a Cast at each.

    The operators of the converter's own list stay in float32, and so do nodes of other domains, whose kernels nobody
    knows.

    Raises:
        BadModel: the model cannot be converted.
    """
    from onnxruntime.transformers import float16  # slow to import

    blocked_ops = set(float16.DEFAULT_OP_BLOCK_LIST)
    blocked = {n.index for n in model.nodes if n.domain or n.op in blocked_ops}
    full = {c for c in model.large if all(use.slot >= 0 and use.node in blocked for use in model.uses(c))}
    try:
        proto = float16.convert_float_to_float16(
            _shown(model, full),
            keep_io_types=[*model.inputs, *model.outputs],
            disable_shape_infer=True,
            op_block_list=sorted(blocked_ops),  # in bodies too
            node_block_list=[model.nodes[i].name for i in blocked],
        )
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise BadModel(f"cannot convert the model to float16: {one_line(error)}") from error
    replace(proto.graph.input, [v for v in proto.graph.input if v.name not in model.large])
    replace(proto.graph.node, _once(proto.graph.node))
    try:
        return checked(proto, {name: c if name in full else _half(c) for name, c in model.large.items()})
    except BadModel as error:
        raise BadModel(f"cannot convert the model to float16: {error}") from error


def _shown(model: Model, full: Set[str]) -> onnx.ModelProto:
    """A copy with a type for what custom operators make, and with the large constants as graph inputs.

    Those in `full`, which stay in float32, are left out: the converter does not miss them.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for name, constant in model.large.items():
        if name not in full:
            proto.graph.input.append(helper.make_tensor_value_info(name, constant.dtype, constant.shape))
    for name in (t for node in model.nodes if node.domain for t in node.outputs):
        if name and name not in model.tensors:
            proto.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return proto


def _half(constant: Constant) -> Constant:
    """A float32 constant in float16, converted when it is read; others as they are."""
    if constant.dtype != TensorProto.FLOAT:
        return constant
    from onnxruntime.transformers.float16 import convert_np_to_float16

    key = f"{constant.key}:float16"
    return Constant(key, TensorProto.FLOAT16, constant.shape, lambda: convert_np_to_float16(constant.array()))


def _once(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes without repeats: the converter makes a Cast for each float32 reader of a tensor, all of one name."""
    return list({node.name: node for node in nodes}.values())
