"""Constant folding: nodes whose results no input of the model changes, computed once.

What moves the values of a large constant is computed when somebody reads it, so that no weight is copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
from onnx import numpy_helper

from qdqtune.graph.folding import computed, drop_unused
from qdqtune.graph.loading import infer
from qdqtune.graph.model import LARGE, Constant, Model, Node, rebuild
from qdqtune.types import Array

MOST_BYTES = 2**20
"""Inputs or results that are computed at once hold no more than this, counted at 8 bytes a value."""


def constants_computed(model: Model) -> Model:
    """`model` without the nodes that only constants and shapes decide; the same object where there is none."""
    known = dict(model.constants)
    added: dict[str, Constant] = {}
    gone: set[int] = set()
    for node in model.nodes:
        if node.domain or set(node.outputs) & set(model.outputs) or node.captures:
            continue
        if (results := _results(model, node, known)) is not None:
            known |= results
            added |= results
            gone.add(node.index)
    if not gone:
        return model
    kept = [proto for node, proto in zip(model.nodes, model.proto.graph.node, strict=True) if node.index not in gone]
    result = rebuild(model, kept, added)
    large = dict(result.large)
    drop_unused(result.proto.graph, large)
    return Model(infer(result.proto, large), large)


def _results(model: Model, node: Node, known: Mapping[str, Constant]) -> dict[str, Constant] | None:
    """What a node makes if it is constant: its outputs by name."""
    if node.op == "Shape":
        info = model.tensors.get(node.inputs[0])
        if info is None or info.shape is None or None in info.shape:
            return None
        start, end = node.attributes.get("start", 0), node.attributes.get("end", len(info.shape))
        return {node.outputs[0]: Constant.of(np.array(info.shape[start:end], np.int64))}
    if not all(t in known for t in node.inputs if t):
        return None
    if (moved := _moved(node, known)) is not None:
        return {node.outputs[0]: moved}
    if sum(known[t].nbytes for t in node.inputs if t) > MOST_BYTES:
        return None
    inputs = [known[t].to_proto(t) for t in dict.fromkeys(node.inputs) if t]
    found = computed(model.proto, model.proto.graph.node[node.index], inputs, MOST_BYTES)
    return None if found is None else {t.name: Constant.of(numpy_helper.to_array(t)) for t in found}


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
        sizes = [constant.shape[i] if size == 0 else size for i, size in enumerate(wanted)]
        if sizes.count(-1):
            sizes[sizes.index(-1)] = int(np.prod(constant.shape)) // max(1, -int(np.prod(sizes)))
        shape = tuple(int(s) for s in sizes)
        return _changed(constant, f"R{shape}", shape, lambda v: v.reshape(shape))
    return None


def _changed(constant: Constant, how: str, shape: tuple[int, ...], change: Callable[[Array], Array]) -> Constant:
    key = hashlib.sha256(f"{constant.key}{how}".encode()).hexdigest()[:32]
    return Constant(key, constant.dtype, shape, lambda: np.ascontiguousarray(change(constant.array())))
