"""The rewrites of a float model, by name. Each keeps every output up to rounding, and may allow an engine to fuse more.

`folded` multiplies what scales and shifts channels behind a layer into the layer's weights and bias. Engines do so with
float weights, but not where these come out of a DequantizeLinear: a BatchNormalization there would run by itself.
Which of the other rewrites make a model faster is measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import onnx

from qdqtune.errors import BadOption
from qdqtune.graph.inference import constants_computed
from qdqtune.graph.loading import with_opset
from qdqtune.graph.merging import as_gemm, gelu, hard_swish, layer_norm, rms_norm, with_merged
from qdqtune.graph.model import Constant, Model, Node, rebuild
from qdqtune.graph.operators import ARITHMETIC, COMPUTE
from qdqtune.graph.simplifying import UniqueNames, names_in
from qdqtune.types import Array

FOLD = "fold"
"""The rewrite that every run makes unless it is told not to: without it pairs stand where they need not be."""


@dataclass(frozen=True)
class Rewrite:
    """What it does, in words, and the function that does it: it returns the very model where there is nothing to do.

    `makes` is the operator that it leaves behind, if it leaves one.
    """

    does: str
    apply: Callable[[Model], Model]
    makes: str = ""


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
    "opset21": Rewrite("the operators of opset 21", partial(with_opset, opset=21)),
})  # fmt: skip
"""By name, in the order in which they are made."""

REWRITE_NAMES = (FOLD, *REWRITES)


@dataclass(frozen=True)
class Rewrites:
    """Which rewrites a float model has seen before its pairs were placed. Each is repeated on another model's weights.

    `folded`: layers have taken in what scales and shifts their channels (see `rewriting.folded`); then those in
    `names`, one after the other.
    """

    folded: bool = False
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.folded, bool) or not set(self.names) <= REWRITES.keys():
            unknown = ", ".join(sorted(map(str, set(self.names) - REWRITES.keys())))
            raise ValueError(f"there is no rewrite {unknown}; there are {', '.join(REWRITE_NAMES)}")

    def of(self, model: Model) -> Model:
        """`model` after them.

        Raises:
            BadModel: its opset cannot be raised.
        """
        model = folded(model) if self.folded else model
        for name in self.names:
            model = REWRITES[name].apply(model)
        return model


def between(before: Collection[str], after: Collection[str]) -> tuple[str, ...]:
    """The names of the rewrites that make operators which are in `after` and not in `before`."""
    return ordered([name for name, r in REWRITES.items() if r.makes in after and r.makes not in before])


def allowed(said: str) -> Rewrites:
    """What a user asks for with `auto` (before anything is measured), `off`, or names and commas.

    Raises:
        BadOption: there is no rewrite of such a name.
    """
    if said in ("auto", "off"):
        return Rewrites(said == "auto")
    names = {name.strip() for name in said.split(",")}
    try:
        return Rewrites(FOLD in names, ordered(names - {FOLD}))
    except ValueError as error:
        raise BadOption(f"--rewrites {said}: {error}, or say auto or off") from error


def ordered(names: Collection[str]) -> tuple[str, ...]:
    """Names in the order of the table, and those that it lacks behind."""
    known = [name for name in REWRITES if name in names]
    return (*known, *sorted(set(names) - set(known)))


@dataclass(frozen=True, eq=False)
class _Layer:
    """A node whose output is that of its own weights times `scale`, plus `shift`: float64 vectors [channels].

    `output` is the tensor that has taken in all of it.
    """

    node: Node
    output: str
    scale: Array
    shift: Array


@dataclass(frozen=True, eq=False)
class _Affine:
    """A node that multiplies the channels of a tensor and adds to them: one number, or one a channel."""

    source: str
    scale: Array
    shift: Array


def folded(model: Model) -> Model:
    """`model` with BatchNormalization, and arithmetic with one constant or one a channel, drawn into the Conv,
    ConvTranspose or Gemm in front.

    The layer writes under the name of what it has taken in, so that edges behind keep their names; so do its weights.
    What somebody else reads too, or leaves the graph between, stays as it is.
    """
    layers: dict[str, _Layer] = {}
    gone: set[int] = set()
    for node in model.nodes:
        if (layer := _layer(model, node)) is not None:
            layers[layer.output] = layer
            continue
        for affine in _affine(model, node, layers):
            before = layers.pop(affine.source)
            scale, shift = before.scale * affine.scale, before.shift * affine.scale + affine.shift
            layers[node.outputs[0]] = replace(before, output=node.outputs[0], scale=scale, shift=shift)
            gone.add(node.index)
    changed = {layer.node.index: layer for layer in layers.values() if layer.output != layer.node.outputs[0]}
    return _written(model, changed, gone) if changed else model


def _layer(model: Model, node: Node) -> _Layer | None:
    """A layer as it stands, if its weights and its bias are constants that can take in more."""
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


def _affine(model: Model, node: Node, layers: dict[str, _Layer]) -> Iterator[_Affine]:
    """What `node` does to the channels of one of `layers` whose output nobody else reads; nothing if it is not that."""
    sources = [t for t in dict.fromkeys(node.inputs) if t in layers and len(model.uses(t)) == 1]
    others = [model.constants[t] for t in node.inputs if t in model.constants]
    if node.domain or len(sources) != 1 or len(others) != len(node.inputs) - 1:
        return
    (source,) = sources
    layer = layers[source]
    if node.op == "BatchNormalization" and node.inputs[0] == source:
        if not node.attributes.get("training_mode", 0) and all(c.shape == layer.scale.shape for c in others):
            gamma, beta, mean, variance = (c.array().astype(np.float64) for c in others)
            scale = gamma / np.sqrt(variance + node.attributes.get("epsilon", 1e-5))
            yield from _finite(source, scale, beta - mean * scale)
    elif node.op in ARITHMETIC and (value := _by_channel(model, layer, others[0])) is not None:
        one, zero = np.ones(1), np.zeros(1)
        match node.op, node.inputs[0] == source:
            case "Mul", _:
                yield from _finite(source, value, zero)
            case "Add", _:
                yield from _finite(source, one, value)
            case "Sub", True:
                yield from _finite(source, one, -value)
            case "Sub", False:
                yield from _finite(source, -one, value)
            case "Div", True if value.all():
                yield from _finite(source, 1 / value, zero)


def _finite(source: str, scale: Array, shift: Array) -> Iterator[_Affine]:
    if np.isfinite(scale).all() and np.isfinite(shift).all():
        yield _Affine(source, scale, shift)


def _by_channel(model: Model, layer: _Layer, constant: Constant) -> Array | None:
    """An operand as one number, or as one a channel of a layer's output; None if it varies otherwise."""
    rank = len(model.constants[layer.node.inputs[1]].shape)
    sizes = (*(1,) * (rank - len(constant.shape)), *constant.shape)
    if len(sizes) != rank or sizes not in ((1,) * rank, (1, layer.scale.size, *(1,) * (rank - 2))):
        return None
    return constant.array().astype(np.float64).reshape(-1)


def _written(model: Model, changed: dict[int, _Layer], gone: set[int]) -> Model:
    names = UniqueNames(names_in(model.proto.graph))
    added: dict[str, Constant] = {}

    def free(tensor: str, wanted: str) -> str:
        """A name for what takes the place of a constant: its own, if nobody else reads that."""
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
            added[inputs[1]] = times(before, along_outputs(node, before.shape, layer.scale))
            added[inputs[2]] = Constant.of(layer.shift.astype(onnx.helper.tensor_dtype_to_np_dtype(before.dtype)))
            del copy.input[:]
            copy.input.extend(inputs)
            copy.output[0] = layer.output
            for attribute in [a for a in copy.attribute if a.name == "beta"]:
                copy.attribute.remove(attribute)
        nodes.append(copy)
    return rebuild(model, nodes, added)


def along_outputs(node: Node, shape: Sequence[int], scale: Array) -> Array:
    """A factor for each output channel of a layer, in a shape that broadcasts over its weights."""
    if node.op == "ConvTranspose":  # [in, out / group, ...], the inputs group by group
        group = node.attributes.get("group", 1)
        rows = np.repeat(scale.reshape(group, -1), shape[0] // group, axis=0)
        return rows.reshape(*shape[:2], *(1,) * (len(shape) - 2))
    axis = 1 if node.op == "Gemm" and not node.attributes.get("transB", 0) else 0
    return scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def times(constant: Constant, factor: Array) -> Constant:
    """A float constant times what broadcasts over it, multiplied in float64 whenever somebody reads it."""
    key = hashlib.sha256(f"{constant.key}{factor.shape}".encode() + factor.tobytes()).hexdigest()[:32]

    def product() -> Array:
        values = constant.array()
        return np.asarray((values * factor).astype(values.dtype))

    return Constant(key, constant.dtype, constant.shape, product)
