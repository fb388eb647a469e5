"""Rewrites of a float model, by name. Each keeps every output up to rounding, and may allow an engine to fuse more.

`folded` merges nodes that scale or shift channels behind a layer into the layer's weights and bias. Engines do so with
float weights, but not if these come out of a DequantizeLinear: a BatchNormalization there would run by itself.
The other rewrites replace the nodes that exporters write for one operator by that operator, for which engines have a
kernel; which of them make a model faster is measured. A pattern reads one tensor. Tensors between its nodes are read by
no other node, no body of an If or a Loop, and are no graph outputs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.inference import weights_computed
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import GRAPH, Constant, Model, Node, rebuild
from qdqtune.graph.operators import ARITHMETIC, COMPUTE, is_dilated, output_channels, reduced_axes
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
        return max(self.nodes, key=lambda node: node.index)


Matcher = Callable[[Model, Node], Match | None]
"""Finds the match that a node characterizes (the Erf of a Gelu, say), if there is one."""


def with_merged(model: Model, matcher: Matcher, opset: int) -> Model:
    """`model` with one node for each match, at least at `opset`; the same object if there is no match."""
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
        found = matches.get(node.index)
        if found is not None:
            inputs = [found.source]
            for operand in found.operands:
                if not isinstance(operand, str):
                    name = names.fresh(f"{node.name}.{len(inputs)}")
                    added[name], operand = Constant.of(operand), name
                inputs.append(operand)
            nodes.append(helper.make_node(found.op, inputs, [node.outputs[0]], node.name, **found.attributes))
        elif node.index not in taken:
            nodes.append(proto)
    return rebuild(model, nodes, added)


def _closed(model: Model, matcher: Matcher) -> Iterator[Match]:
    for node in model.nodes:
        match = None if node.domain else matcher(model, node)
        info = None if match is None else model.tensors.get(match.source)
        if match is None or info is None or info.dtype != TensorProto.FLOAT or info.shape is None:
            continue
        own, result = {n.index for n in match.nodes}, match.last.outputs[0]
        inner = [t for n in match.nodes for t in n.outputs if t and t != result]
        if all(use.node in own and use.slot >= 0 for t in inner for use in model.uses(t)):
            yield match


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
    source, factor = node.inputs[0] if node.inputs else "", 1.0
    nodes: tuple[Node, ...] = (node,)
    if node.op == "HardSigmoid":
        slope, shift = node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5)
        if not _is_close(slope, 1 / 6) or not _is_close(shift, 0.5):
            return None
    elif node.op == "Clip" and [number(model, bound) for bound in node.inputs[1:]] == [0.0, 6.0]:
        inner = maker(model, source)
        inside = None if inner is None else _with_number(model, inner)
        if inner is None or inside is None or not _is_plus(inner, inside, 3.0):
            return None
        source, nodes, factor = inside[0], (inner, node), 1 / 6
    else:
        return None
    product = _product(model, node, source, factor)
    return None if product is None else Match("HardSwish", (*nodes, *product), source)


def layer_norm(model: Model, node: Node) -> Match | None:
    """Matches (x - mean x) / sqrt(var x + epsilon) over the last axis, and a scale and bias vector, at its Sub."""
    if node.op != "Sub" or (mean := maker(model, node.inputs[1])) is None or mean.inputs[0] != node.inputs[0]:
        return None
    source = node.inputs[0]
    root = _root_of_squares(model, node.outputs[0])
    if root is None or not _is_mean(model, mean):
        return None
    return _divided("LayerNormalization", model, source, (mean, node), node.outputs[0], *root)


def rms_norm(model: Model, node: Node) -> Match | None:
    """Matches x / sqrt(mean x^2 + epsilon) over the last axis, and a scale vector behind it, at its x^2."""
    if not _is_square(model, node) or (root := _root_of_squares(model, node.inputs[0])) is None:
        return None
    centred = maker(model, node.inputs[0])
    if centred is not None and centred.op == "Sub":
        return None  # the variance of a LayerNormalization
    return _divided("RMSNormalization", model, node.inputs[0], (), node.inputs[0], *root)


def _divided(
    op: str, model: Model, source: str, before: tuple[Node, ...], numerator: str, root: tuple[Node, ...], epsilon: float
) -> Match | None:
    """Matches numerator / root, and the scale and bias that may follow, as a normalization `op`."""
    last = root[-1]
    quotient = reader(model, last)
    if quotient is None or source not in model.tensors:
        return None
    nodes = (*before, *root, quotient)
    is_quotient = quotient.op == "Div" and quotient.inputs[1] == last.outputs[0]
    # PyTorch's exporters write torch.rsqrt in both ways, and multiply with it.
    if quotient.op == "Reciprocal" or (is_quotient and number(model, quotient.inputs[0]) == 1.0):
        if (product := reader(model, quotient)) is None or product.op != "Mul":
            return None
        nodes, is_quotient = (*nodes, product), numerator in product.inputs
        quotient = product
    else:
        is_quotient = is_quotient and quotient.inputs[0] == numerator
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
    return Match(op, nodes, source, {"axis": -1, "epsilon": epsilon}, tuple(operands))


def _root_of_squares(model: Model, tensor: str) -> tuple[tuple[Node, ...], float] | None:
    """The nodes that compute sqrt(mean t^2 + epsilon) of a tensor t, and epsilon."""
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
    return (square, mean, plus, root), epsilon[1]


def _is_square(model: Model, node: Node) -> bool:
    if node.op == "Mul":
        return node.inputs[0] == node.inputs[1]
    return node.op == "Pow" and number(model, node.inputs[1]) == 2.0


def _is_mean(model: Model, node: Node) -> bool:
    if node.op != "ReduceMean" or not node.attributes.get("keepdims", 1):
        return False
    info = model.tensors.get(node.inputs[0])
    rank = None if info is None or info.shape is None else len(info.shape)
    axes = reduced_axes(model, node)
    return len(axes) == 1 and rank is not None and axes[0] in (-1, rank - 1)


def _vector_behind(model: Model, node: Node, op: str, width: int) -> tuple[Node, str] | None:
    after = reader(model, node)
    if after is None or after.op != op:
        return None
    other = other_operand(after, node.outputs[0])
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


def other_operand(node: Node, tensor: str) -> str:
    """The input of an operator of two that is not `tensor`."""
    return node.inputs[1 - node.inputs.index(tensor)]


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
            other = other_operand(after, node.outputs[0])
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


FOLD = "fold"
"""The rewrite that runs make by default: the nodes that it removes would need pairs of their own."""


@dataclass(frozen=True)
class Rewrite:
    """A rewrite: its function, which returns the same object if there is nothing to do.

    `makes` is the operator that it creates, if any.
    """

    apply: Callable[[Model], Model]
    makes: str = ""


def without_reciprocals(model: Model) -> Model:
    """`model` with a Div of 1 by x for each Reciprocal of x; the same object if there is none.

    The 1 is a constant, which gets a pair of its own with a scale that fits it.
    """
    reciprocals = {node.index for node in model.nodes if node.op == "Reciprocal" and not node.domain}
    names, ones = UniqueNames(names_in(model.proto.graph)), dict[int, str]()
    added, nodes = dict[str, Constant](), []
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        info = model.tensors.get(node.inputs[0]) if node.index in reciprocals else None
        if info is None:
            nodes.append(proto)
            continue
        if info.dtype not in ones:
            ones[info.dtype] = names.fresh("one")
            added[ones[info.dtype]] = Constant.of(np.ones((), onnx.helper.tensor_dtype_to_np_dtype(info.dtype)))
        inputs = [ones[info.dtype], node.inputs[0]]
        nodes.append(onnx.helper.make_node("Div", inputs, [node.outputs[0]], node.name))
    return rebuild(model, nodes, added) if added else model


def without_needless_dilations(model: Model) -> Model:
    """`model` with a dilation of 1 for each convolution whose kernel is one point, which no dilation changes; the same
    object if there is none."""
    weights = ((node, model.constants.get(node.inputs[1])) for node in model.nodes if is_dilated(node))
    needless = {node.index for node, weight in weights if weight is not None and set(weight.shape[2:]) == {1}}
    nodes: list[onnx.NodeProto] = []
    for index, proto in enumerate(model.proto.graph.node):
        nodes.append(proto)
        if index in needless:
            nodes[-1] = deepcopy(proto)
            for attribute in nodes[-1].attribute:
                if attribute.name == "dilations":
                    attribute.ints[:] = [1] * len(attribute.ints)
    return rebuild(model, nodes, {}) if needless else model


REWRITES: Mapping[str, Rewrite] = {
    "hardswish": Rewrite(partial(with_merged, matcher=hard_swish, opset=14), "HardSwish"),
    "gelu": Rewrite(partial(with_merged, matcher=gelu, opset=20), "Gelu"),
    "layernorm": Rewrite(partial(with_merged, matcher=layer_norm, opset=17), "LayerNormalization"),
    "rmsnorm": Rewrite(partial(with_merged, matcher=rms_norm, opset=23), "RMSNormalization"),
    "dilations": Rewrite(without_needless_dilations),
    "division": Rewrite(without_reciprocals),
}
"""The rewrites by name, in the order in which they are applied, except `fold`."""

REWRITE_NAMES = (FOLD, *REWRITES)


@dataclass(frozen=True)
class Rewrites:
    """The rewrites of a float model: weights are always computed (`weights_computed`), then follow `folded`, if set,
    those of `merged`, which the engine would make by itself, and those of `names`, each in order. One of `merged` that
    fails is left out."""

    folded: bool = False
    names: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.folded, bool) or not {*self.names, *self.merged} <= REWRITES.keys():
            unknown = ", ".join(sorted(map(str, {*self.names, *self.merged} - REWRITES.keys())))
            raise ValueError(f"there is no rewrite {unknown}; there are {', '.join(REWRITE_NAMES)}")

    def of(self, model: Model) -> Model:
        """The rewritten model."""
        return self.made(model)[0]

    def made(self, model: Model) -> tuple[Model, Rewrites]:
        """The rewritten model, and these rewrites with those of `merged` alone that found something to do."""
        model, merged = weights_computed(model), list[str]()
        if self.folded:
            model = folded(model)
        for name in self.merged:
            with suppress(BadModel):
                before, model = model, REWRITES[name].apply(model)
                merged += [name] if model is not before else []
        for name in self.names:
            model = REWRITES[name].apply(model)
        return model, replace(self, merged=tuple(merged))


def between(before: Collection[str], after: Collection[str]) -> tuple[str, ...]:
    """The names of the rewrites that create operators in `after` which are not in `before`."""
    return ordered([name for name, r in REWRITES.items() if r.makes in after and r.makes not in before])


def allowed(value: str, merged: tuple[str, ...] = ()) -> Rewrites:
    """The rewrites that the option `rewrites` names: `auto` (at first `fold` and those that the engine makes by itself,
    `merged`), `off`, or names with commas."""
    if value in ("auto", "off"):
        return Rewrites(True, merged=merged) if value == "auto" else Rewrites()
    names = {name.strip() for name in value.split(",")}
    try:
        return Rewrites(FOLD in names, ordered(names - {FOLD}))
    except ValueError as error:
        raise BadOption(f"`rewrites` {value}: {error}, or say auto or off") from error


def ordered(names: Collection[str]) -> tuple[str, ...]:
    """Names in the order of REWRITES, unknown ones last."""
    known = [name for name in REWRITES if name in names]
    return (*known, *sorted(set(names) - set(known)))


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer and the nodes behind it that are folded into it: `output` is the layer's result without its bias, times
    `scale`, plus `shift`. Both are float64 [channels]; `shift` includes the bias.
    """

    node: Node
    output: str
    scale: Array
    shift: Array


def folded(model: Model) -> Model:
    """`model` with each BatchNormalization, and each arithmetic operation with one constant number or one per channel,
    folded into the Conv, ConvTranspose or Gemm in front.

    The layer gets the output name of the last node that is folded, so that edges keep their names. A tensor in between
    that has another reader, or is a graph output, ends the folding.
    """
    layers: dict[str, _Layer] = {}
    gone: set[int] = set()
    for node in model.nodes:
        if (layer := _layer(model, node)) is not None:
            layers[layer.output] = layer
            continue
        sources = [t for t in dict.fromkeys(node.inputs) if t in layers and len(model.uses(t)) == 1]
        constants = sum(t in model.constants for t in node.inputs)
        if node.domain or len(sources) != 1 or constants != len(node.inputs) - 1:
            continue
        (source,) = sources
        if (found := _scale_and_shift(model, node, source, layers[source])) is not None:
            before, (factor, addend) = layers.pop(source), found
            scale, shift = before.scale * factor, before.shift * factor + addend
            layers[node.outputs[0]] = replace(before, output=node.outputs[0], scale=scale, shift=shift)
            gone.add(node.index)
    changed = {layer.node.index: layer for layer in layers.values() if layer.output != layer.node.outputs[0]}
    return _with_changed_layers(model, changed, gone) if changed else model


def _layer(model: Model, node: Node) -> _Layer | None:
    """A Conv, ConvTranspose or Gemm as a `_Layer` with nothing folded; None unless weights and bias are constant."""
    if node.op not in COMPUTE - {"MatMul"} or node.domain or node.inputs[1] not in model.constants:
        return None
    channels = output_channels(node, model.constants[node.inputs[1]].shape)
    bias = np.zeros(1)
    if len(node.inputs) > 2 and node.inputs[2]:
        constant = model.constants.get(node.inputs[2])
        if constant is None or constant.shape not in ((), (1,), (channels,), (1, channels)):
            return None
        bias = constant.array().astype(np.float64).reshape(-1) * node.attributes.get("beta", 1.0)
    return _Layer(node, node.outputs[0], np.ones(channels), np.broadcast_to(bias, channels))


def _scale_and_shift(model: Model, node: Node, source: str, layer: _Layer) -> tuple[Array, Array] | None:
    """What `node` multiplies the channels of `source` by, and then adds: float64 vectors [channels] or [1].

    None if it does something else, or with numbers that are not finite.
    """
    others = [model.constants[t] for t in node.inputs if t != source]
    one, zero = np.ones(1), np.zeros(1)
    found = None
    if node.op == "BatchNormalization" and node.inputs[0] == source:
        if not node.attributes.get("training_mode", 0) and all(c.shape == layer.scale.shape for c in others):
            gamma, beta, mean, variance = (c.array().astype(np.float64) for c in others)
            scale = gamma / np.sqrt(variance + node.attributes.get("epsilon", 1e-5))
            found = scale, beta - mean * scale
    elif node.op in ARITHMETIC and (value := _by_channel(model, layer, others[0])) is not None:
        match node.op, node.inputs[0] == source:
            case "Mul", _:
                found = value, zero
            case "Add", _:
                found = one, value
            case "Sub", True:
                found = one, -value
            case "Sub", False:
                found = -one, value
            case "Div", True if value.all():
                found = 1 / value, zero
    return found if found is not None and all(np.isfinite(part).all() for part in found) else None


def _by_channel(model: Model, layer: _Layer, constant: Constant) -> Array | None:
    """A constant operand as float64 [1] or [channels]; None if it varies along other axes."""
    rank = len(model.constants[layer.node.inputs[1]].shape)
    sizes = (*(1,) * (rank - len(constant.shape)), *constant.shape)
    if len(sizes) != rank or sizes not in ((1,) * rank, (1, layer.scale.size, *(1,) * (rank - 2))):
        return None
    return constant.array().astype(np.float64).reshape(-1)


def _with_changed_layers(model: Model, changed: dict[int, _Layer], gone: set[int]) -> Model:
    names = UniqueNames(names_in(model.proto.graph))
    added: dict[str, Constant] = {}

    def free(tensor: str, wanted: str) -> str:
        """The name of the changed constant: its own if it has no other reader, else a new one."""
        return tensor if tensor and len(model.uses(tensor)) == 1 else names.fresh(wanted)

    nodes = []
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        if node.index in gone:
            continue
        copy = deepcopy(proto)
        if (layer := changed.get(node.index)) is not None:
            weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else ""
            inputs = [node.inputs[0], free(weight, weight), free(bias, f"{node.name}.bias")]
            before = model.constants[weight]
            added[inputs[1]] = _times(before, _along_outputs(node, before.shape, layer.scale))
            added[inputs[2]] = Constant.of(layer.shift.astype(onnx.helper.tensor_dtype_to_np_dtype(before.dtype)))
            del copy.input[:]
            copy.input.extend(inputs)
            copy.output[0] = layer.output
            for attribute in [a for a in copy.attribute if a.name == "beta"]:
                copy.attribute.remove(attribute)
        nodes.append(copy)
    return rebuild(model, nodes, added)


def _along_outputs(node: Node, shape: Sequence[int], scale: Array) -> Array:
    """Numbers for the output channels of a layer, in a shape that broadcasts over its weights."""
    if node.op == "ConvTranspose":  # [in, out / group, ...], the inputs group by group
        group = node.attributes.get("group", 1)
        rows = np.repeat(scale.reshape(group, -1), shape[0] // group, axis=0)
        return rows.reshape(*shape[:2], *(1,) * (len(shape) - 2))
    axis = 1 if node.op == "Gemm" and not node.attributes.get("transB", 0) else 0
    return scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def _times(constant: Constant, factor: Array) -> Constant:
    """A float constant times a float64 `factor` that broadcasts over it, computed when it is read."""
    key = hashlib.sha256(f"{constant.key}{factor.shape}".encode() + factor.tobytes()).hexdigest()[:32]

    def product() -> Array:
        values = constant.array()
        return np.asarray((values * factor).astype(values.dtype, copy=False))

    return Constant(key, constant.dtype, constant.shape, product)
