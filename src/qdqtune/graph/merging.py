"""Replaces the nodes that exporters write for one operator by that operator, for which engines have a kernel.

A pattern reads one tensor. Tensors between its nodes are read by no other node, no body of an If or a Loop, and are no
graph outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.graph.inference import infer
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import GRAPH, Constant, Model, Node, rebuild
from qdqtune.graph.operators import reduced_axes
from qdqtune.graph.simplifying import UniqueNames, names_in
from qdqtune.types import Array

FORMULA_TOLERANCE = 1e-4
"""Relative tolerance of the numbers in a formula: exporters write 0.7071 and 1.4142135."""


@dataclass(frozen=True)
class Match:
    """Nodes that together compute `op` of the tensor `source`. `operands` are its further inputs: names of constants,
    or new constants."""

    op: str
    nodes: tuple[Node, ...]
    source: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    operands: tuple[str | Array, ...] = ()

    @property
    def last(self) -> Node:
        """The node that makes the result."""
        return max(self.nodes, key=lambda node: node.index)


Matcher = Callable[[Model, Node], Match | None]
"""Finds the match that a node characterizes (the Erf of a Gelu, say), if there is one."""


def with_merged(model: Model, matcher: Matcher, opset: int) -> Model:
    """`model` with one node for each match, at least at `opset`; the same object if there is no match.

    Raises:
        BadModel: the opset cannot be raised.
    """
    if next(_closed(model, matcher), None) is None:
        return model
    model = with_opset(model, opset)
    taken: set[int] = set()
    matches: dict[int, Match] = {}
    for match in _closed(model, matcher):
        own = {node.index for node in match.nodes}
        if not own & taken:
            taken |= own
            matches[match.last.index] = match
    names, added = UniqueNames(names_in(model.proto.graph)), dict[str, Constant]()
    nodes = []
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        if (found := matches.get(node.index)) is not None:
            nodes.append(_merged_node(found, names, added))
        elif node.index not in taken:
            nodes.append(proto)
    return rebuild(model, nodes, added)


def _merged_node(match: Match, names: UniqueNames, added: dict[str, Constant]) -> onnx.NodeProto:
    inputs = [match.source]
    for operand in match.operands:
        if not isinstance(operand, str):
            name = names.fresh(f"{match.last.name}.{len(inputs)}")
            added[name], operand = Constant.of(operand), name
        inputs.append(operand)
    return helper.make_node(match.op, inputs, [match.last.outputs[0]], match.last.name, **match.attributes)


def _closed(model: Model, matcher: Matcher) -> Iterator[Match]:
    """Float32 matches whose inner tensors have no other readers."""
    for node in model.nodes:
        match = None if node.domain else matcher(model, node)
        if match is None or not _is_float32(model, match.source):
            continue
        own, result = {n.index for n in match.nodes}, match.last.outputs[0]
        inner = [t for n in match.nodes for t in n.outputs if t and t != result]
        if all(use.node in own and use.slot >= 0 for t in inner for use in model.uses(t)):
            yield match


def _is_float32(model: Model, tensor: str) -> bool:
    info = model.tensors.get(tensor)
    return info is not None and info.dtype == TensorProto.FLOAT and info.shape is not None


# ---- the formulas


def gelu(model: Model, node: Node) -> Match | None:
    """Matches x (1 + erf(x / sqrt 2)) / 2 at its Erf, with the factors in any order."""
    if node.op != "Erf" or (inner := maker(model, node.inputs[0])) is None or (one := reader(model, node)) is None:
        return None
    inside, outside = _with_number(model, inner), _with_number(model, one)
    if inside is None or not _is_close(_factor(inner, inside), math.sqrt(0.5)) or not _is_plus(one, outside, 1.0):
        return None
    source = inside[0]
    product = _product(model, one, source, 0.5)
    return None if product is None else Match("Gelu", (inner, node, one, *product), source)


def hard_swish(model: Model, node: Node) -> Match | None:
    """Matches x HardSigmoid(x) of slope 1/6 or x clip(x + 3, 0, 6) / 6, at the HardSigmoid or Clip."""
    if node.op == "HardSigmoid":
        slope, shift = node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5)
        product = _product(model, node, node.inputs[0], 1.0)
        if product is None or not _is_close(slope, 1 / 6) or not _is_close(shift, 0.5):
            return None
        return Match("HardSwish", (node, *product), node.inputs[0])
    found = _hard_step(model, node)
    product = None if found is None else _product(model, node, found.source, 1 / 6)
    return None if found is None or product is None else Match("HardSwish", (*found.nodes, *product), found.source)


def _hard_step(model: Model, node: Node) -> Match | None:
    """Matches clip(x + 3, 0, 6) at its Clip; the match names no operator."""
    if node.op != "Clip" or len(node.inputs) < 3 or (inner := maker(model, node.inputs[0])) is None:
        return None
    low, high, inside = number(model, node.inputs[1]), number(model, node.inputs[2]), _with_number(model, inner)
    if low != 0.0 or high != 6.0 or inside is None or not _is_plus(inner, inside, 3.0):
        return None
    return Match("", (inner, node), inside[0])


def layer_norm(model: Model, node: Node) -> Match | None:
    """Matches (x - mean x) / sqrt(var x + epsilon) over the last axis, and a scale and bias vector, at its Sub."""
    if node.op != "Sub" or (mean := maker(model, node.inputs[1])) is None or mean.inputs[0] != node.inputs[0]:
        return None
    source = node.inputs[0]
    root = _root_of_squares(model, node.outputs[0])
    if root is None or not _is_mean(model, mean):
        return None
    return _divided("LayerNormalization", model, source, (mean, node), node.outputs[0], root)


def rms_norm(model: Model, node: Node) -> Match | None:
    """Matches x / sqrt(mean x^2 + epsilon) over the last axis, and a scale vector behind it, at its x^2."""
    if not _is_square(model, node) or (root := _root_of_squares(model, node.inputs[0])) is None:
        return None
    centred = maker(model, node.inputs[0])
    if centred is not None and centred.op == "Sub":
        return None  # the variance of a LayerNormalization
    return _divided("RMSNormalization", model, node.inputs[0], (), node.inputs[0], root)


@dataclass(frozen=True)
class _Root:
    """Nodes that compute sqrt(mean t^2 + epsilon)."""

    nodes: tuple[Node, ...]
    epsilon: float


def _divided(op: str, model: Model, source: str, before: tuple[Node, ...], numerator: str, root: _Root) -> Match | None:
    """Matches numerator / root, and the scale and bias that may follow, as a normalization `op`."""
    last = root.nodes[-1]
    quotient = reader(model, last)
    if quotient is None or source not in model.tensors:
        return None
    nodes = (*before, *root.nodes, quotient)
    if _is_inverse(model, quotient, last):
        if (product := reader(model, quotient)) is None or product.op != "Mul":
            return None
        nodes, is_quotient = (*nodes, product), numerator in product.inputs
        quotient = product
    else:
        is_quotient = quotient.op == "Div" and tuple(quotient.inputs) == (numerator, last.outputs[0])
    width = (model.tensors[source].shape or (None,))[-1]
    if not is_quotient or width is None:
        return None
    operands: list[str | Array] = [np.ones(width, np.float32)]
    if (factor := _vector_behind(model, quotient, "Mul", width)) is not None:
        quotient, operands = factor[0], [factor[1]]
        nodes = (*nodes, quotient)
    if op == "LayerNormalization" and (shift := _vector_behind(model, quotient, "Add", width)) is not None:
        operands.append(shift[1])
        nodes = (*nodes, shift[0])
    return Match(op, nodes, source, {"axis": -1, "epsilon": root.epsilon}, tuple(operands))


def _is_inverse(model: Model, node: Node, of: Node) -> bool:
    """Whether a node computes 1 / x of the output of `of`: PyTorch's exporters write torch.rsqrt in both ways."""
    is_quotient = node.op == "Div" and node.inputs[1] == of.outputs[0]
    return node.op == "Reciprocal" or (is_quotient and number(model, node.inputs[0]) == 1.0)


def _root_of_squares(model: Model, tensor: str) -> _Root | None:
    squares = [model.nodes[u.node] for u in model.uses(tensor) if u.node != GRAPH and u.slot >= 0]
    square = next((n for n in squares if _is_square(model, n)), None)
    mean = None if square is None else reader(model, square)
    plus = None if mean is None else reader(model, mean)
    root = None if plus is None else reader(model, plus)
    if square is None or mean is None or plus is None or root is None or root.op != "Sqrt" or plus.op != "Add":
        return None
    epsilon = _with_number(model, plus)
    if epsilon is None or not 0 < epsilon[1] < 1 or not _is_mean(model, mean):
        return None
    return _Root((square, mean, plus, root), epsilon[1])


def _is_square(model: Model, node: Node) -> bool:
    if node.op == "Mul":
        return node.inputs[0] == node.inputs[1]
    return node.op == "Pow" and number(model, node.inputs[1]) == 2.0


def _is_mean(model: Model, node: Node) -> bool:
    """Whether a node computes means over the last axis and keeps it with size 1."""
    if node.op != "ReduceMean" or not node.attributes.get("keepdims", 1):
        return False
    info = model.tensors.get(node.inputs[0])
    rank = None if info is None or info.shape is None else len(info.shape)
    axes = reduced_axes(model, node)
    return len(axes) == 1 and rank is not None and axes[0] in (-1, rank - 1)


def _vector_behind(model: Model, node: Node, op: str, width: int) -> tuple[Node, str] | None:
    """The only reader of a node, if it is an `op` with a constant vector along the last axis, and that constant."""
    after = reader(model, node)
    if after is None or after.op != op:
        return None
    other = after.inputs[1 - after.inputs.index(node.outputs[0])]
    constant = model.constants.get(other)
    is_vector = constant is not None and constant.shape == (width,) and constant.dtype == TensorProto.FLOAT
    return (after, other) if is_vector else None


# ---- parts of formulas


def maker(model: Model, tensor: str) -> Node | None:
    """The node that makes a tensor, if it is of the default domain."""
    node = model.maker(tensor)
    return None if node is None or node.domain else node


def reader(model: Model, node: Node) -> Node | None:
    """The only reader of a node's first output; None if it is also read elsewhere, in a body, or as a graph output."""
    uses = model.uses(node.outputs[0])
    if len(uses) != 1 or uses[0].node == GRAPH or uses[0].slot < 0 or model.nodes[uses[0].node].domain:
        return None
    return model.nodes[uses[0].node]


def number(model: Model, tensor: str) -> float | None:
    """The value of a constant with one float32 element; None for other tensors."""
    constant = model.constants.get(tensor)
    if constant is None or constant.shape not in ((), (1,)) or constant.dtype != TensorProto.FLOAT:
        return None
    return float(constant.array().reshape(-1)[0])


def _with_number(model: Model, node: Node) -> tuple[str, float] | None:
    """The tensor and the number that an Add, Mul or Div combines; a Div has the number as divisor."""
    if node.op not in ("Add", "Mul", "Div") or len(node.inputs) != 2:
        return None
    left, right = node.inputs
    if (value := number(model, right)) is not None and left not in model.constants:
        return left, value
    if node.op != "Div" and (value := number(model, left)) is not None and right not in model.constants:
        return right, value
    return None


def _factor(node: Node, joined: tuple[str, float]) -> float | None:
    """The factor of a Mul, or of a Div by a number, with `joined` from `_with_number`; else None."""
    if node.op == "Mul":
        return joined[1]
    return 1 / joined[1] if node.op == "Div" and joined[1] else None


def _is_plus(node: Node, joined: tuple[str, float] | None, value: float) -> bool:
    return node.op == "Add" and joined is not None and _is_close(joined[1], value)


def _is_close(value: float | None, wanted: float) -> bool:
    return value is not None and math.isclose(value, wanted, rel_tol=FORMULA_TOLERANCE)


def _product(model: Model, node: Node, source: str, wanted: float) -> tuple[Node, ...] | None:
    """The nodes behind `node` that multiply its output by `source` once, and by numbers with the product `wanted`."""
    nodes: list[Node] = []
    value, seen = 1.0, False
    while not (seen and _is_close(value, wanted)):
        after = reader(model, node)
        if after is None or after.op not in ("Mul", "Div") or len(nodes) > 4:
            return None
        nodes.append(after)
        if (joined := _with_number(model, after)) is not None:
            value *= _factor(after, joined) or 0.0
        else:
            other = after.inputs[1 - after.inputs.index(node.outputs[0])]
            inner = maker(model, other)
            scaled = None if inner is None or inner.op == "Add" else _with_number(model, inner)
            if seen or after.op != "Mul":
                return None
            if other != source:
                if inner is None or scaled is None or scaled[0] != source:
                    return None
                value *= _factor(inner, scaled) or 0.0
                nodes.append(inner)
            seen = True
        node = after
    return tuple(nodes)


def as_gemm(model: Model) -> Model:
    """`model` with a Gemm for each MatMul with constant weights whose only reader adds a constant bias.

    Inputs of more than two dimensions are reshaped around it, if at most one leading dimension is unknown.
    """
    names, added = UniqueNames(names_in(model.proto.graph)), dict[str, Constant]()
    sums: dict[int, list[onnx.NodeProto]] = {}
    gone: set[int] = set()
    for node in model.nodes:
        if (total := _bias_add(model, node)) is not None:
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


def _bias_add(model: Model, node: Node) -> Node | None:
    """The Add behind a MatMul, if both can become a Gemm."""
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


def _gemm(
    model: Model, node: Node, total: Node, names: UniqueNames, added: dict[str, Constant]
) -> list[onnx.NodeProto]:
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
