"""Rewrites of a float model, by name. Each keeps every output up to rounding, and may allow an engine to fuse more.

`folded` merges nodes that scale or shift channels behind a layer into the layer's weights and bias. Engines do so with
float weights, but not if these come out of a DequantizeLinear: a BatchNormalization there would run by itself.
Which of the other rewrites make a model faster is measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import onnx

from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.inference import constants_computed, weights_computed
from qdqtune.graph.loading import with_opset
from qdqtune.graph.merging import as_gemm, gelu, hard_swish, layer_norm, rms_norm, with_merged
from qdqtune.graph.model import Constant, Model, Node, rebuild
from qdqtune.graph.operators import ARITHMETIC, COMPUTE, is_dilated
from qdqtune.graph.simplifying import UniqueNames, names_in
from qdqtune.types import Array

FOLD = "fold"
"""The rewrite that runs make by default: the nodes that it removes would need pairs of their own."""


@dataclass(frozen=True)
class Rewrite:
    """A rewrite: its description, and its function, which returns the same object if there is nothing to do.

    `makes` is the operator that it creates, if any.
    """

    does: str
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
            nodes[-1] = onnx.NodeProto.FromString(proto.SerializeToString())
            for attribute in nodes[-1].attribute:
                if attribute.name == "dilations":
                    attribute.ints[:] = [1] * len(attribute.ints)
    return rebuild(model, nodes, {}) if needless else model


REWRITES: Mapping[str, Rewrite] = MappingProxyType({
    "constants": Rewrite("compute what only constants and shapes decide", constants_computed),
    "hardswish": Rewrite(
        "x clip(x + 3, 0, 6) / 6 as one HardSwish", partial(with_merged, matcher=hard_swish, opset=14), "HardSwish"
    ),
    "gelu": Rewrite("x (1 + erf(x / sqrt 2)) / 2 as one Gelu", partial(with_merged, matcher=gelu, opset=20), "Gelu"),
    "layernorm": Rewrite(
        "means, squares and a root as one LayerNormalization",
        partial(with_merged, matcher=layer_norm, opset=17),
        "LayerNormalization",
    ),
    "rmsnorm": Rewrite(
        "squares, their mean and a root as one RMSNormalization",
        partial(with_merged, matcher=rms_norm, opset=23),
        "RMSNormalization",
    ),
    "gemm": Rewrite("MatMul and Add with constants as one Gemm", as_gemm, "Gemm"),
    "dilations": Rewrite("the dilation of kernels of one point as 1", without_needless_dilations),
    "division": Rewrite("each Reciprocal as a division of one", without_reciprocals),
    "opset21": Rewrite("the operators of opset 21", partial(with_opset, opset=21)),
})  # fmt: skip
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
        """The rewritten model.

        Raises:
            BadModel: the opset cannot be raised.
        """
        return self.made(model)[0]

    def made(self, model: Model) -> tuple[Model, Rewrites]:
        """The rewritten model, and these rewrites with those of `merged` alone that found something to do.

        Raises:
            BadModel: the opset cannot be raised.
        """
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
    `merged`), `off`, or names with commas.

    Raises:
        BadOption: a name is unknown.
    """
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
        source = _source(model, node, layers)
        if source is not None and (found := _scale_and_shift(model, node, source, layers[source])) is not None:
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
    shape = model.constants[node.inputs[1]].shape
    match node.op:
        case "Gemm":
            channels = shape[0 if node.attributes.get("transB", 0) else 1]
        case "ConvTranspose":
            channels = shape[1] * node.attributes.get("group", 1)
        case _:
            channels = shape[0]
    bias = np.zeros(1)
    if len(node.inputs) > 2 and node.inputs[2]:
        constant = model.constants.get(node.inputs[2])
        if constant is None or constant.shape not in ((), (1,), (channels,), (1, channels)):
            return None
        bias = constant.array().astype(np.float64).reshape(-1) * node.attributes.get("beta", 1.0)
    return _Layer(node, node.outputs[0], np.ones(channels), np.broadcast_to(bias, channels))


def _source(model: Model, node: Node, layers: Mapping[str, _Layer]) -> str | None:
    """The input of `node` that one of `layers` makes and nothing else reads, if the other inputs are constants."""
    sources = [t for t in dict.fromkeys(node.inputs) if t in layers and len(model.uses(t)) == 1]
    constants = sum(t in model.constants for t in node.inputs)
    return sources[0] if not node.domain and len(sources) == 1 and constants == len(node.inputs) - 1 else None


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
