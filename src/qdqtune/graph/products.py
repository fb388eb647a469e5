"""Products with constant weights: as Gemm, or as MatMul and Add."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.graph.folding import Names, names_in
from qdqtune.graph.loading import infer
from qdqtune.graph.merging import reader
from qdqtune.graph.model import Constant, Model, Node, rebuild


def as_gemm(model: Model) -> Model:
    """`model` with a Gemm for each MatMul with constant weights whose only reader adds a constant bias.

    What has more than two dimensions is reshaped around it, if at most one of them is unknown.
    """
    names, added = Names(names_in(model.proto.graph)), dict[str, Constant]()
    sums: dict[int, list[onnx.NodeProto]] = {}
    gone: set[int] = set()
    for node in model.nodes:
        if (total := _sum(model, node)) is not None:
            sums[total.index] = _gemm(model, node, total, names, added)
            gone.add(node.index)
    if not sums:
        return model
    nodes: list[onnx.NodeProto] = []
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        if node.index not in gone:
            nodes += sums.get(node.index, [proto])
    result = rebuild(model, nodes, added)
    return Model(infer(result.proto, result.large), result.large)


def _sum(model: Model, node: Node) -> Node | None:
    """The Add behind a product, if both make a Gemm."""
    if node.op != "MatMul" or node.domain or (weight := model.constants.get(node.inputs[1])) is None:
        return None
    info, total = model.tensors.get(node.inputs[0]), reader(model, node)
    if len(weight.shape) != 2 or weight.dtype != TensorProto.FLOAT or info is None or info.shape is None:
        return None
    if total is None or total.op != "Add" or node.inputs[0] in model.constants:
        return None
    bias = model.constants.get(total.inputs[1 - total.inputs.index(node.outputs[0])])
    if bias is None or bias.shape != (weight.shape[1],):
        return None
    is_known = len(info.shape) >= 2 and info.shape[:-1].count(None) <= (1 if len(info.shape) > 2 else 2)
    return total if is_known else None


def _gemm(model: Model, node: Node, total: Node, names: Names, added: dict[str, Constant]) -> list[onnx.NodeProto]:
    shape = model.tensors[node.inputs[0]].shape or ()
    width, out = model.constants[node.inputs[1]].shape
    bias = total.inputs[1 - total.inputs.index(node.outputs[0])]
    if len(shape) == 2:
        return [helper.make_node("Gemm", [*node.inputs, bias], [total.outputs[0]], node.name)]

    def reshape(source: str, target: str, sizes: list[int], what: str) -> onnx.NodeProto:
        constant = names.fresh(f"{node.name}.{what}")
        added[constant] = Constant.of(np.array(sizes, np.int64))
        return helper.make_node("Reshape", [source, constant], [target], f"{node.name}.reshape_{what}")

    rows, product = names.fresh(f"{node.name}.rows"), names.fresh(f"{node.name}.product")
    sizes = [-1 if d is None else d for d in shape[:-1]]
    return [
        reshape(node.inputs[0], rows, [-1, width], "in"),
        helper.make_node("Gemm", [rows, node.inputs[1], bias], [product], node.name),
        reshape(product, total.outputs[0], [*sizes, out], "out"),
    ]
