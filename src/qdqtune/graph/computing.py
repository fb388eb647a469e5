"""Constant folding: nodes whose results no input of the model changes, computed once.

What moves the values of a large constant is computed when somebody reads it, so that no weight is copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from qdqtune.graph.folding import computed, drop_unused
from qdqtune.graph.loading import INFERENCE_ERRORS, infer
from qdqtune.graph.model import LARGE, Constant, Model, Node, TensorInfo, rebuild
from qdqtune.types import Array

MOST_BYTES = 2**20
"""Inputs or results that are computed at once hold no more than this, counted at 8 bytes a value."""


def constants_computed(model: Model) -> Model:
    """`model` without the nodes that only constants and shapes decide; the same object where there is none."""
    made, _ = decided(model)
    kept, added = [], dict[str, Constant]()
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        outputs = [t for t in node.outputs if t]
        if made.keys() >= set(outputs) and not set(outputs) & set(model.outputs):
            added |= {t: made[t] for t in outputs}
        else:
            kept.append(proto)
    if not added:
        return model
    result = rebuild(model, kept, added)
    large = dict(result.large)
    drop_unused(result.proto.graph, large)
    return Model(infer(result.proto, large), large)


def decided(model: Model) -> tuple[dict[str, Constant], dict[str, TensorInfo]]:
    """What nodes make that only constants and shapes decide, and the type and shape of every tensor.

    Inference of a whole graph ends where such a node has to be computed: the pads of a Pad, the sizes of a Reshape.
    With these known, what follows is inferred node by node.
    """
    known, infos = dict(model.constants), dict(model.tensors)
    made: dict[str, Constant] = {}
    for node in model.nodes:
        if node.domain or node.captures:
            continue
        if (results := _results(model, node, known, infos)) is not None:
            known |= results
            made |= results
            infos |= {t: TensorInfo(c.dtype, c.shape) for t, c in results.items()}
        elif not all(is_sized(infos.get(t)) for t in node.outputs if t):
            infos |= _inferred(model, node, known, infos)
    return made, infos


def is_sized(info: TensorInfo | None) -> bool:
    """Whether all sizes of a tensor are known."""
    return info is not None and info.sizes is not None


def _results(
    model: Model, node: Node, known: Mapping[str, Constant], infos: Mapping[str, TensorInfo]
) -> dict[str, Constant] | None:
    """What a node makes if it is constant: its outputs by name."""
    if node.op == "Shape":
        info = infos.get(node.inputs[0])
        if info is None or (sizes := info.sizes) is None:
            return None
        start, end = node.attributes.get("start", 0), node.attributes.get("end", len(sizes))
        return {node.outputs[0]: Constant.of(np.array(sizes[start:end], np.int64))}
    if not all(t in known for t in node.inputs if t):
        return None
    if (moved := _moved(node, known)) is not None:
        return {node.outputs[0]: moved}
    if sum(known[t].nbytes for t in node.inputs if t) > MOST_BYTES:
        return None
    inputs = [known[t].to_proto(t) for t in dict.fromkeys(node.inputs) if t]
    found = computed(model.proto, model.proto.graph.node[node.index], inputs, MOST_BYTES)
    return None if found is None else {t.name: Constant.of(numpy_helper.to_array(t)) for t in found}


def _inferred(
    model: Model, node: Node, known: Mapping[str, Constant], infos: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Types and shapes of what one node makes, by those of what it reads."""
    names = [t for t in dict.fromkeys(node.inputs) if t]
    if any(t not in infos for t in names):
        return {}
    make = onnx.helper.make_tensor_type_proto
    types = {t: make(infos[t].dtype, infos[t].shape) for t in names}
    data = {t: known[t].to_proto(t) for t in names if t in known and known[t].nbytes < LARGE}
    proto, opsets = model.proto.graph.node[node.index], list(model.proto.opset_import)
    try:
        schema = onnx.defs.get_schema(node.op, model.opset, "")
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=opsets)
    except (*INFERENCE_ERRORS, onnx.defs.SchemaError):
        return {}
    values = (onnx.ValueInfoProto(name=t, type=of) for t, of in found.items() if of.HasField("tensor_type"))
    return {v.name: _both(infos.get(v.name), TensorInfo.of(v)) for v in values}


def _both(one: TensorInfo | None, other: TensorInfo) -> TensorInfo:
    """All that is known of a tensor."""
    if one is None or one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return other if one is None or one.shape is None else one
    sizes = zip(one.shape, other.shape, strict=True)
    return TensorInfo(one.dtype, tuple(b if a is None else a for a, b in sizes))


def _moved(node: Node, known: Mapping[str, Constant]) -> Constant | None:
    """A large constant in another order or shape, read when it is asked for."""
    constant = known.get(node.inputs[0]) if node.inputs else None
    if constant is None or constant.nbytes < LARGE:
        return None
    if node.op == "Transpose":
        axes = tuple(node.attributes.get("perm", range(len(constant.shape))[::-1]))
        return _changed(constant, f"T{axes}", tuple(constant.shape[a] for a in axes), lambda v: v.transpose(axes))
    if node.op == "Reshape" and not node.attributes.get("allowzero", 0):
        wanted = known[node.inputs[1]].array().tolist()
        if 0 in wanted[len(constant.shape) :]:  # no size to keep
            return None
        sizes = [constant.shape[i] if size == 0 else size for i, size in enumerate(wanted)]
        if sizes.count(-1):
            sizes[sizes.index(-1)] = int(np.prod(constant.shape)) // max(1, -int(np.prod(sizes)))
        shape = tuple(int(s) for s in sizes)
        return _changed(constant, f"R{shape}", shape, lambda v: v.reshape(shape))
    return None


def _changed(constant: Constant, how: str, shape: tuple[int, ...], change: Callable[[Array], Array]) -> Constant:
    key = hashlib.sha256(f"{constant.key}{how}".encode()).hexdigest()[:32]
    return Constant(key, constant.dtype, shape, lambda: np.ascontiguousarray(change(constant.array())))
