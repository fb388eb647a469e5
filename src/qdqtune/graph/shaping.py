"""Sizes of a model's inputs, and those of all tensors that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import onnx

from qdqtune.errors import BadOption
from qdqtune.graph.computing import decided, is_sized
from qdqtune.graph.loading import infer
from qdqtune.graph.model import Model, TensorInfo


def with_input_shapes(model: Model, shapes: Mapping[str, tuple[int | None, ...]]) -> Model:
    """`model` with these sizes of inputs, and all that follows from them; a symbol gets one value everywhere. A size
    stays as it is where None stands.

    Raises:
        BadOption: an unknown input, another rank, or a size that contradicts a static or symbolic dimension.
    """
    if shapes:
        model = _fed(model, shapes)
    inputs = (info for name, info in model.tensors.items() if name in model.inputs)
    made = (t for node in model.nodes for t in node.outputs if t)
    if not all(map(is_sized, inputs)) or all(is_sized(model.tensors.get(t)) for t in made):
        return model
    return _with_infos(model, decided(model)[1])


def _fed(model: Model, shapes: Mapping[str, tuple[int | None, ...]]) -> Model:
    proto = deepcopy(model.proto)
    inputs = {v.name: v for v in proto.graph.input if v.type.HasField("tensor_type")}
    symbols: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            raise BadOption(f"cannot shape input {name!r}: the model's inputs are {', '.join(inputs)}")
        tensor = inputs[name].type.tensor_type
        if not tensor.HasField("shape"):
            tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in shape)
        dims = tensor.shape.dim
        if len(dims) != len(shape):
            raise BadOption(f"input {name!r} has {len(dims)} dimensions, not {len(shape)}")
        for i, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            if size is None:
                continue
            least = 1 if i == 0 else 0  # a cache may be empty, a batch not
            known = dim.dim_value if dim.dim_value > 0 else symbols.get(dim.dim_param, max(size, least))
            if known != size:
                raise BadOption(f"input {name!r}: dimension {i} cannot be {size}; it is {dim.dim_param or known}")
            if dim.dim_param:
                symbols[dim.dim_param] = size
            dim.dim_value = size
    for info in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_value = symbols[dim.dim_param]
    return Model(infer(proto, model.large), model.large)


def _with_infos(model: Model, infos: Mapping[str, TensorInfo]) -> Model:
    """`model` with types and shapes that inference of the whole graph has not found."""
    proto = deepcopy(model.proto)
    listed = {v.name: v for v in (*proto.graph.value_info, *proto.graph.output)}
    for name in (t for node in model.nodes for t in node.outputs if t):
        if name in infos and infos[name] != model.tensors.get(name):
            info = listed.get(name) or proto.graph.value_info.add(name=name)
            info.CopyFrom(onnx.helper.make_tensor_value_info(name, infos[name].dtype, infos[name].shape))
    return Model(proto, model.large)
