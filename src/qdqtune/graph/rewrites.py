"""Rewrites of a float model, by name. Each keeps every output up to rounding, and may allow an engine to fuse more.

`folded` merges nodes that scale or shift channels behind a layer into the layer's weights and bias, as engines do, but
not with weights that come out of a DequantizeLinear. `sizes` makes constants of values that known sizes decide. The
others replace the nodes that exporters write for one operator by that operator. Tensors between these nodes have no
other reader and are no graph outputs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.inference import known_sizes_computed, weights_computed
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import GRAPH, Constant, Model, Node, rebuild
from qdqtune.graph.operators import ARITHMETIC, COMPUTE, is_dilated, output_channels, reduced_axes
from qdqtune.graph.simplifying import UniqueNames, names_in
from qdqtune.types import Array

FORMULA_TOLERANCE = 1e-4
"""Relative tolerance of the numbers in a formula: exporters write 0.7071 and 1.4142135."""


@dataclass(frozen=True)
class Match:
    """A single operator that replaces a group of nodes: it computes their result from the tensor `source`. `operands`
    are its further inputs: names of constants, or new constants."""

    op: str
    source: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    operands: tuple[str | Array, ...] = ()


Matcher = Callable[[Model, Node], Match | None]
"""Finds the operator that makes the result of a node, if there is one."""


def with_merged(model: Model, op: str, matcher: Matcher, opset: int) -> Model:
    """`model` with one node `op` for each group that `matcher` finds, in `opset` or later; the same object if none."""
    taken: set[int] = set()
    matches: dict[int, Match] = {}
    for node in reversed(model.nodes):
        match = None if node.domain or node.index in taken else matcher(model, node)
        info = None if match is None or match.op != op else model.tensors.get(match.source)
        if match is None or info is None or info.dtype != TensorProto.FLOAT or info.shape is None:
            continue
        own, pending = set[int](), [node]  # the nodes that compute the result from the source and constants
        while pending:
            last = pending.pop()
            own.add(last.index)
            read = (t for t in last.inputs if t != match.source and t in model.producers)
            pending += [model.nodes[model.producers[t]] for t in read]
        inner = [t for index in own - {node.index} for t in model.nodes[index].outputs if t]
        if own.isdisjoint(taken) and all(use.node in own and use.slot >= 0 for t in inner for use in model.uses(t)):
            taken |= own
            matches[node.index] = match
    if not matches:
        return model
    model = with_opset(model, opset)
    names, added = UniqueNames(names_in(model.proto.graph)), dict[str, Constant]()
    written = []
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        found = matches.get(node.index)
        if found is not None:
            inputs = [found.source]
            for operand in found.operands:
                if not isinstance(operand, str):
                    name = names.fresh(f"{node.name}.{len(inputs)}")
                    added[name], operand = Constant.of(operand), name
                inputs.append(operand)
            written.append(helper.make_node(op, inputs, [node.outputs[0]], node.name, **found.attributes))
        elif node.index not in taken:
            written.append(proto)
    return rebuild(model, written, added)


# ---- the formulas


FACTORS: Mapping[str, int] = {"Mul": 2, "Div": 1, "Reciprocal": 0}
"""How many inputs of an operator are factors of its result; the others are divisors."""


def product(model: Model, tensor: str) -> tuple[float, list[str], list[str]]:
    """Writes a tensor as number * factors / divisors: follows Mul, Div and Reciprocal nodes backwards while nothing
    else reads their results. Returns the number, the factors, and the divisors."""
    factors: list[str] = []
    divisors: list[str] = []
    value, pending = 1.0, [(tensor, True)]
    while pending:
        part, is_factor = pending.pop()
        constant, node = number(model, part), maker(model, part)
        if constant is not None:
            value *= constant if is_factor or not constant else 1 / constant
        elif node is None or node.op not in FACTORS or (part != tensor and len(model.uses(part)) > 1):
            (factors if is_factor else divisors).append(part)
        else:
            pending += [(t, is_factor == (i < FACTORS[node.op])) for i, t in enumerate(node.inputs)]
    return value, factors, divisors


Gate = tuple[str, float]
"""The tensor x that a gate(x) reads, and the constant factor of x * gate(x)."""


def gelu_gate(model: Model, tensor: str) -> Gate | None:
    """Matches 1 + erf(x / sqrt 2), the part of a Gelu that is multiplied with x / 2."""
    one, other = _sum(model, tensor)
    erf = maker(model, other)
    if erf is None or erf.op != "Erf" or not _is_close(one, 1.0):
        return None
    scale, factors, divisors = product(model, erf.inputs[0])
    is_scaled = len(factors) == 1 and not divisors and _is_close(scale, math.sqrt(0.5))
    return (factors[0], 0.5) if is_scaled else None


def hard_swish_gate(model: Model, tensor: str) -> Gate | None:
    """Matches the part of a HardSwish that is multiplied with x: HardSigmoid(x) of slope 1/6, or clip(x + 3, 0, 6)."""
    node = maker(model, tensor)
    if node is not None and node.op == "HardSigmoid":
        slope, shift = node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5)
        return (node.inputs[0], 1.0) if _is_close(slope, 1 / 6) and _is_close(shift, 0.5) else None
    if node is None or node.op != "Clip" or [number(model, bound) for bound in node.inputs[1:]] != [0.0, 6.0]:
        return None
    three, source = _sum(model, node.inputs[0])
    return (source, 1 / 6) if _is_close(three, 3.0) else None


def gated(model: Model, node: Node, op: str, gate: Callable[[Model, str], Gate | None]) -> Match | None:
    """Matches x * gate(x) * c, where `gate` says which constant c makes it the operator `op`."""
    scale, factors, divisors = product(model, node.outputs[0])
    for i, tensor in enumerate(factors):
        found = gate(model, tensor)
        others = factors[:i] + factors[i + 1 :]
        if found is not None and others == [found[0]] and not divisors and _is_close(scale, found[1]):
            return Match(op, found[0])
    return None


def normalization(model: Model, node: Node) -> Match | None:
    """Matches t / sqrt(mean t^2 + epsilon) over the last axis as RMSNormalization, or as LayerNormalization of x if t
    is x - mean x. A scale vector, and for LayerNormalization a bias vector, may follow."""
    biases = [t for t in node.inputs if t in model.constants] if node.op == "Add" else []
    whole = next((t for t in node.inputs if t not in biases), "") if biases else node.outputs[0]
    factor, factors, divisors = product(model, whole)
    scales = [t for t in factors if t in model.constants]
    numerators = [t for t in factors if t not in model.constants]
    if factor != 1 or len(divisors) != 1 or len(numerators) != 1 or len(scales) > 1:
        return None
    (numerator,) = numerators
    root, centred = maker(model, divisors[0]), maker(model, numerator)
    epsilon, average = _sum(model, root.inputs[0]) if root is not None and root.op == "Sqrt" else (0.0, "")
    square = maker(model, _averaged(model, average))
    if square is None or not 0 < epsilon < 1:
        return None
    is_power = square.op == "Pow" and square.inputs[0] == numerator and number(model, square.inputs[1]) == 2.0
    if not is_power and (square.op != "Mul" or square.inputs != (numerator, numerator)):
        return None
    op, source = "RMSNormalization", numerator
    if centred is not None and centred.op == "Sub":
        op, source = "LayerNormalization", centred.inputs[0]
        if _averaged(model, centred.inputs[1]) != source:
            return None
    info = model.tensors.get(source)
    width = (info.shape or (None,))[-1] if info is not None else None
    vectors = [model.constants[t] for t in (*scales, *biases)]
    if width is None or any(c.shape != (width,) or c.dtype != TensorProto.FLOAT for c in vectors):
        return None
    if op == "RMSNormalization" and biases:
        return None
    scale = scales[0] if scales else np.ones(width, np.float32)
    return Match(op, source, {"axis": -1, "epsilon": epsilon}, (scale, *biases))


# ---- parts of formulas


def maker(model: Model, tensor: str) -> Node | None:
    """The node that makes a tensor, if it is of the default domain."""
    node = model.maker(tensor)
    return None if node is None or node.domain else node


def reader(model: Model, node: Node) -> Node | None:
    """The only reader of a node's first output. None if it is also read elsewhere, in a body, or as a graph output, or
    if the reader is no operator of ONNX."""
    uses = model.uses(node.outputs[0])
    if len(uses) != 1 or uses[0].node == GRAPH or uses[0].slot < 0 or model.nodes[uses[0].node].domain:
        return None
    return model.nodes[uses[0].node]


def number(model: Model, tensor: str) -> float | None:
    """The value of a float32 constant of shape [] or [1]; None for other tensors."""
    constant = model.constants.get(tensor)
    if constant is None or constant.shape not in ((), (1,)) or constant.dtype != TensorProto.FLOAT:
        return None
    return float(constant.array().reshape(-1)[0])


def _sum(model: Model, tensor: str) -> tuple[float, str]:
    """The constant number and the other tensor whose sum a tensor is; (0, "") if it is no such sum."""
    node = maker(model, tensor)
    for i, part in enumerate(node.inputs if node is not None and node.op == "Add" else ()):
        if node is not None and (shift := number(model, part)) is not None:
            return shift, node.inputs[1 - i]
    return 0.0, ""


def _averaged(model: Model, tensor: str) -> str:
    """The tensor whose mean over the last axis a tensor is; empty if it is no such mean."""
    node = maker(model, tensor)
    if node is None or node.op != "ReduceMean" or not node.attributes.get("keepdims", 1):
        return ""
    info, axes = model.tensors.get(node.inputs[0]), reduced_axes(model, node)
    rank = 0 if info is None or info.shape is None else len(info.shape)
    return node.inputs[0] if rank and len(axes) == 1 and axes[0] in (-1, rank - 1) else ""


def _is_close(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=FORMULA_TOLERANCE)


FOLD = "fold"
"""The rewrite that is always on by default: the nodes that it removes would need pairs of their own."""


@dataclass(frozen=True)
class Rewrite:
    """A function that returns the rewritten model, or else the same object; and the operator that it `makes`, if
    any."""

    apply: Callable[[Model], Model]
    makes: str = ""


def merging(op: str, matcher: Matcher, opset: int) -> Rewrite:
    return Rewrite(partial(with_merged, op=op, matcher=matcher, opset=opset), op)


def without_reciprocals(model: Model) -> Model:
    """`model` with 1 / x for each float32 Reciprocal of x, so that the 1 gets its own pair; the same object if none."""
    one, nodes, is_changed = UniqueNames(names_in(model.proto.graph)).fresh("one"), [], False
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        info = model.tensors.get(node.inputs[0]) if node.op == "Reciprocal" and not node.domain else None
        if info is not None and info.dtype == TensorProto.FLOAT:
            is_changed = True
            nodes.append(helper.make_node("Div", [one, node.inputs[0]], [node.outputs[0]], node.name))
        else:
            nodes.append(proto)
    return rebuild(model, nodes, {one: Constant.of(np.ones((), np.float32))}) if is_changed else model


def without_needless_dilations(model: Model) -> Model:
    """`model` without dilations of 1x1 convolutions, where they have no effect; the same object if there is none."""
    nodes, is_changed = list(model.proto.graph.node), False
    for node in filter(is_dilated, model.nodes):
        weight = model.constants.get(node.inputs[1])
        if weight is not None and set(weight.shape[2:]) == {1}:
            is_changed, nodes[node.index] = True, deepcopy(nodes[node.index])
            (dilations,) = (a for a in nodes[node.index].attribute if a.name == "dilations")
            dilations.ints[:] = [1] * len(dilations.ints)
    return rebuild(model, nodes, {}) if is_changed else model


REWRITES: Mapping[str, Rewrite] = {
    "sizes": Rewrite(known_sizes_computed),
    "hardswish": merging("HardSwish", partial(gated, op="HardSwish", gate=hard_swish_gate), 14),
    "gelu": merging("Gelu", partial(gated, op="Gelu", gate=gelu_gate), 20),
    "layernorm": merging("LayerNormalization", normalization, 17),
    "rmsnorm": merging("RMSNormalization", normalization, 23),
    "dilations": Rewrite(without_needless_dilations),
    "division": Rewrite(without_reciprocals),
}
"""The rewrites by name, in the order in which they are applied, except `fold`."""

REWRITE_NAMES = (FOLD, *REWRITES)


@dataclass(frozen=True)
class Rewrites:
    """The rewrites to apply to a float model, in this order: constant weights are computed (always), `folded` if set,
    `merged` (those that the engine makes by itself; one that fails is skipped), then `names`."""

    folded: bool = False
    names: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.folded, bool) or not {*self.names, *self.merged} <= REWRITES.keys():
            unknown = ", ".join(sorted(map(str, {*self.names, *self.merged} - REWRITES.keys())))
            raise ValueError(f"there is no rewrite {unknown}; there are {', '.join(REWRITE_NAMES)}")

    def of(self, model: Model) -> Model:
        return self.made(model)[0]

    def made(self, model: Model) -> tuple[Model, Rewrites]:
        """The rewritten model, and these rewrites without those of `merged` that changed nothing."""
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
    """The names of the rewrites that make operator types which are in `after` and not in `before`."""
    return ordered([name for name, r in REWRITES.items() if r.makes in after and r.makes not in before])


def allowed(value: str, merged: tuple[str, ...] = ()) -> Rewrites:
    """The rewrites that option `rewrites` names: `auto` (`fold` and `merged`), `off`, or a list with commas."""
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
    `scale`, plus `shift`. Both are float64 [channels]; `shift` includes the bias."""

    node: Node
    output: str
    scale: Array
    shift: Array


def folded(model: Model) -> Model:
    """`model` with each BatchNormalization, and each arithmetic operation with one constant number or one per channel,
    folded into the Conv, ConvTranspose or Gemm in front. The layer gets the output name of the last node that is
    folded, so that edges keep their names."""
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
            layers[node.outputs[0]] = _Layer(before.node, node.outputs[0], scale, shift)
            gone.add(node.index)
    changed = {layer.node.index: layer for layer in layers.values() if layer.output != layer.node.outputs[0]}
    if not changed:
        return model
    names, added = UniqueNames(names_in(model.proto.graph)), dict[str, Constant]()

    def free(tensor: str, wanted: str) -> str:
        """The name of the changed constant: its own if it has no other reader, else a new one."""
        return tensor if tensor and len(model.uses(tensor)) == 1 else names.fresh(wanted)

    nodes = []
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        if node.index in gone:
            continue
        nodes.append(deepcopy(proto))
        if node.index not in changed:
            continue
        layer, written = changed[node.index], nodes[-1]
        weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else ""
        inputs = [node.inputs[0], free(weight, weight), free(bias, f"{node.name}.bias")]
        values = model.constants[weight]
        added[inputs[1]] = _times(values, _along_outputs(node, values.shape, layer.scale))
        added[inputs[2]] = Constant.of(layer.shift.astype(onnx.helper.tensor_dtype_to_np_dtype(values.dtype)))
        written.input[:], written.output[0] = inputs, layer.output
        for attribute in [a for a in written.attribute if a.name == "beta"]:
            written.attribute.remove(attribute)
    return rebuild(model, nodes, added)


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
    """The factor and the summand that `node` applies to the channels of `source`: float64 vectors [channels] or [1].
    None if it does something else, or with numbers that are not finite."""
    others = [model.constants[t] for t in node.inputs if t != source]
    one, zero, channels = np.ones(1), np.zeros(1), layer.scale.size
    found = None
    if node.op == "BatchNormalization" and node.inputs[0] == source:
        if not node.attributes.get("training_mode", 0) and all(c.shape == (channels,) for c in others):
            gamma, beta, mean, variance = (c.array().astype(np.float64) for c in others)
            scale = gamma / np.sqrt(variance + node.attributes.get("epsilon", 1e-5))
            found = scale, beta - mean * scale
    elif node.op in ARITHMETIC:
        rank = len(model.constants[layer.node.inputs[1]].shape)
        sizes = (*(1,) * (rank - len(others[0].shape)), *others[0].shape)
        if sizes not in ((1,) * rank, (1, channels, *(1,) * (rank - 2))):
            return None  # it varies along other axes
        value = others[0].array().astype(np.float64).reshape(-1)
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


def _along_outputs(node: Node, shape: Sequence[int], scale: Array) -> Array:
    """Numbers for the output channels of a layer, reshaped to broadcast over its weights."""
    if node.op == "ConvTranspose":  # [in, out / group, ...], the inputs group by group
        group = node.attributes.get("group", 1)
        rows = np.repeat(scale.reshape(group, -1), shape[0] // group, axis=0)
        return rows.reshape(*shape[:2], *(1,) * (len(shape) - 2))
    axis = 1 if node.op == "Gemm" and not node.attributes.get("transB", 0) else 0
    return scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def _times(constant: Constant, factor: Array) -> Constant:
    """A float constant times a float64 `factor` that broadcasts over it, computed when it is read."""
    key = hashlib.sha256(f"{constant.key}{factor.shape}".encode() + factor.tobytes()).hexdigest()[:32]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(constant.dtype)
    return Constant(key, constant.dtype, constant.shape, lambda: (constant.array() * factor).astype(dtype))
