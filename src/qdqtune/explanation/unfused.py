"""What an engine did not fuse in a Q/DQ model, and the likely reason, concluded from the graph.

An operator runs in 8 bits if all its operands come from DQs, its result goes into Qs, and the engine has a kernel. A
condition that does not hold is the likely reason; engines do not report theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
from onnx import TensorProto, helper

from qdqtune.calibration.scales import NUMPY_TYPE
from qdqtune.graph.model import GRAPH, Constant, Model, Node
from qdqtune.graph.operators import (
    ASKS_SHAPE,
    CLAMPS,
    COMPUTE,
    FUSED_BEHIND,
    INTEGER_KERNELS,
    MOVERS,
    QDQ,
    SETTINGS_FROM,
)
from qdqtune.placement.reading import tables_of, weight_only_formats
from qdqtune.types import Layer, NumericFormat

Symptom = Literal["standalone pair", "float compute", "reformat", "elsewhere", "boundary"]

UNKNOWN = "for a reason that the graph does not show"

LOW = re.compile(r"(u?int|[ui]|fp|f|float)[48]", re.IGNORECASE)
FLOAT = re.compile(r"bf|tf|fp|f|half", re.IGNORECASE)

PASSES = MOVERS | {"Cast"}
"""Operators that may stand between an input of the graph and its Q, or between a DQ and an output."""
KEEPS_VALUES = MOVERS - {"AveragePool", "MaxPool", "Resize"}
"""Operators that keep all values: integers pass through if both sides have one scale."""
USUAL = COMPUTE | MOVERS | INTEGER_KERNELS
"""Operators that most engines run in 8 bits: a missing kernel is an unlikely reason."""


@dataclass(frozen=True)
class Finding:
    """A layer that a better placement might avoid, if it `fails`; otherwise a note.

    Kinds: "standalone pair", a Q or a DQ that runs as a kernel of its own; "float compute", an operator that runs in
    float although its inputs carry pairs; "reformat", a layer beside a quantized one that only moves values (it fails
    if the other side is float); "elsewhere", nodes that an execution provider leaves to another (it fails if they carry
    pairs); "boundary", a conversion that is needed because the model's inputs and outputs are float, or that the user
    allows. `nodes` are the ONNX nodes of the layer; `cause` is the node that `reason` is about: findings with one cause
    belong together.
    """

    kind: Symptom
    layer: str
    nodes: tuple[str, ...]
    time_ms: float | None
    reason: str
    cause: str = ""
    fails: bool = True


def is_low(precision: str) -> bool:
    """Whether a layer's precision is one of 8 bits or less."""
    return LOW.match(precision) is not None


def is_float(precision: str) -> bool:
    """Whether a precision is a float type of more than 8 bits. An unknown one is neither low nor float."""
    return FLOAT.match(precision) is not None and not is_low(precision)


def check(model: Model, layers: Sequence[Layer], numbers: NumericFormat | None = None) -> tuple[Finding, ...]:
    """The findings about a Q/DQ model, in the order of the engine's layers.

    `layers` name nodes of `model`; other names are ignored. `numbers` is the numeric format of the engine: with it,
    pairs in another format are given as a reason.
    """
    findings = _Findings(model, layers, numbers)
    return tuple(f for number in range(len(layers)) if (f := findings.of_layer(number)) is not None)


def allow(findings: Iterable[Finding], wildcards: Sequence[str]) -> tuple[Finding, ...]:
    """The findings, where those with a node or cause that matches a wildcard become boundaries."""

    def is_meant(finding: Finding) -> bool:
        names = (*finding.nodes, finding.cause)
        return finding.fails and any(fnmatchcase(name, wildcard) for name in names for wildcard in wildcards)

    return tuple(
        replace(f, kind="boundary", reason=f"allowed: {f.reason}", fails=False) if is_meant(f) else f for f in findings
    )


class _Reason(NamedTuple):
    """Why a conversion runs, and the node that causes it. `is_boundary`: the model needs it there."""

    text: str
    cause: str = ""
    is_boundary: bool = False


class _Findings:
    def __init__(self, model: Model, layers: Sequence[Layer], numbers: NumericFormat | None) -> None:
        self._model = model
        self._layers = layers
        self._numbers = numbers
        self._formats = weight_only_formats(model)
        self._tables = tuple(table.dq.name for table in tables_of(model))
        home = {name: layer for layer in layers for name in layer.nodes}
        self._alone = {name for name, layer in home.items() if layer.kind == "quantize"}
        low = {name for name, layer in home.items() if is_low(layer.precision) and layer.kind != "folded"}
        self._low = low - self._alone

    def of_layer(self, number: int) -> Finding | None:
        layer = self._layers[number]
        if layer.name.startswith(self._tables) or layer.kind in ("folded", "unknown"):
            return None
        nodes = self._nodes_of(layer)
        pairs = [node for node in nodes if node.op in QDQ]
        others = [node for node in nodes if node.op not in QDQ]
        apart = [node for node in nodes if node.name in self._formats]
        if layer.kind == "quantize" and apart:
            name = self._formats[apart[0].name].name
            reason = f"the engine does not draw weights of {name} into the product behind"
            return _finding("standalone pair", layer, apart, _Reason(reason))
        if layer.elsewhere:
            # The conversions at the model's float inputs and outputs may run anywhere.
            is_border = bool(pairs) and not others and not self._conversion(number, pairs).fails
            fails = not is_border and (bool(pairs) or any(map(self._is_meant_for_8_bits, others)))
            kind: Symptom = "boundary" if is_border else "elsewhere"
            return _finding(kind, layer, nodes, _Reason(f"runs {layer.elsewhere}"), fails=fails)
        if layer.kind == "quantize" or (pairs and not others and layer.kind != "copy"):
            finding = self._conversion(number, pairs)
            # A compute kernel that names only a Q is the rest of the operator in front of it, and no conversion.
            return None if layer.kind == "compute" and finding.fails else finding
        if not others:
            return self._inserted(number)
        meant = [node for node in others if self._is_meant_for_8_bits(node)]
        if not meant or not is_float(layer.precision):
            return None
        first = next((node for node in meant if node.op in COMPUTE), meant[0])
        return _finding("float compute" if layer.kind == "compute" else "reformat", layer, meant, self._in_float(first))

    def _nodes_of(self, layer: Layer) -> list[Node]:
        return [self._model.node(name) for name in layer.nodes if name in self._model.index_of]

    def _conversion(self, number: int, pairs: Sequence[Node]) -> Finding:
        layer = self._layers[number]
        if not pairs:
            text = f"the engine names no node for it, and may have added it: it runs {self._place(number)}"
            return _finding("standalone pair", layer, (), _Reason(text))
        reasons = [self._of_quantize(n) if n.op == "QuantizeLinear" else self._of_dequantize(n) for n in pairs]
        certain = [reason for reason in reasons if reason.text != UNKNOWN and not reason.is_boundary]
        border = next((reason for reason in reasons if reason.is_boundary), None)
        if border is not None and not certain:
            return _finding("boundary", layer, pairs, border, fails=False)
        unknown = _Reason(f"runs as a kernel of its own {UNKNOWN}")
        return _finding("standalone pair", layer, pairs, certain[0] if certain else unknown)

    def _is_meant_for_8_bits(self, node: Node) -> bool:
        """Whether a convolution or product has a pair; or another operator has pairs on all inputs, and one of its
        pairs runs as a layer that need not be there: else it is float arithmetic in a kernel that reads and writes
        8 bits, which costs nothing."""
        operands = self._operands(node)
        dqs = [dq for tensor in operands if (dq := self._dq(tensor)) is not None]
        if not dqs or any(dq.name in self._formats for dq in dqs):
            return False  # nothing, or only its weights, is quantized
        infos = [self._model.tensors.get(output) for output in node.outputs]
        if not any(info is not None and info.is_float for info in infos):
            return False
        if node.op in COMPUTE:
            return True
        if len(dqs) < len(operands):
            return False
        behind = [q for tensor in node.outputs for q in self._readers(tensor) if q.op == "QuantizeLinear"]
        before = [dq for dq in dqs if not self._of_dequantize(dq).is_boundary]
        return any(conversion.name in self._alone for conversion in before + behind)

    def _inserted(self, number: int) -> Finding | None:
        layer = self._layers[number]
        if layer.kind == "compute" or (layer.kind == "copy" and not layer.time_ms):
            return None  # a copy that takes no time is not run
        beside = [neighbour for neighbour in self._neighbours(number) if neighbour is not None]
        if not any(is_low(neighbour.precision) for neighbour in beside):
            return None
        text = f"the engine changes layout or type {self._place(number)}"
        if len(beside) < 2:
            return _finding("boundary", layer, (), _Reason(text), fails=False)
        in_float = [neighbour for neighbour in beside if is_float(neighbour.precision)]
        around = [node for neighbour in in_float for node in self._nodes_of(neighbour)]
        cause = next((node.name for node in around if node.op not in QDQ), "")
        return _finding("reformat", layer, (), _Reason(text, cause), fails=bool(in_float))

    def _neighbours(self, number: int) -> tuple[Layer | None, Layer | None]:
        before = next((x for x in reversed(self._layers[:number]) if x.kind == "compute"), None)
        return before, next((x for x in self._layers[number + 1 :] if x.kind == "compute"), None)

    def _place(self, number: int) -> str:
        before, behind = (None if x is None else f"{x.name} ({x.precision})" for x in self._neighbours(number))
        if before and behind:
            return f"between {before} and {behind}"
        return f"behind {before}" if before else f"in front of {behind}"

    # ---- reasons

    def _of_quantize(self, q: Node) -> _Reason:
        tensor = q.inputs[0]
        maker = self._model.maker(tensor)
        if tensor in self._model.constants:
            return _Reason("it quantizes a constant, which the engine has not done in advance")
        if self._comes_from_input(tensor):
            dqs = self._readers(q.outputs[0])
            readers = [node for dq in dqs for node in self._readers(dq.outputs[0])]
            if not all(dq.name in self._alone for dq in dqs) or any(node.name in self._low for node in readers):
                return _Reason("first Q behind a float input of the model", is_boundary=True)
            return self._fused_in_float(readers[0]) if readers else _Reason(UNKNOWN)
        if maker is None:
            return _Reason(UNKNOWN)
        unmoved = tensor
        while (mover := self._model.maker(unmoved)) is not None and mover.op in KEEPS_VALUES:
            unmoved = mover.inputs[0]
        before = self._dq(unmoved)
        if before is not None and (before.index == maker.index or not self._same_numbers(before, q)):
            return self._twice(before, q)
        if maker.name not in self._low:
            return self._fused_in_float(maker)
        others = [node for node in self._readers(tensor) if node.op != "QuantizeLinear"]
        if others or tensor in self._model.outputs:
            users = self._users(tensor, others)
            return _Reason(f"the result of {_named(maker)} is read in float as well: {users}", maker.name)
        return _Reason(UNKNOWN) if before is None else self._twice(before, q)

    def _of_dequantize(self, dq: Node) -> _Reason:
        tensor = end = dq.outputs[0]
        outputs = self._model.outputs
        while len(behind := self._readers(end)) == 1 and behind[0].op in PASSES and end not in outputs:
            end = behind[0].outputs[0]
        if not behind and end in outputs:
            return _Reason("last DQ in front of a float output of the model", is_boundary=True)
        readers = self._readers(tensor)
        if again := next((node for node in readers if node.op == "QuantizeLinear"), None):
            return self._twice(dq, again)
        in_float = [node for node in readers if node.name not in self._low]
        if not in_float:
            return _Reason(f"{tensor} is an output of the model as well" if tensor in outputs else UNKNOWN)
        first, others = self._fused_in_float(in_float[0]), len(readers) - len(in_float)
        also = f"; {others} of {len(readers)} readers take 8 bits" if others else ""
        return first._replace(text=first.text + also)

    def _fused_in_float(self, node: Node) -> _Reason:
        """Why a node, or the one in front of it that engines fuse it with, runs in float."""
        before = self._model.maker(node.inputs[0]) if node.op in FUSED_BEHIND else None
        if before is not None and before.op not in QDQ and before.name not in self._low:
            return self._fused_in_float(before)
        return self._in_float(node)

    def _twice(self, dq: Node, q: Node) -> _Reason:
        if self._same_numbers(dq, q):
            return _Reason(f"{q.name} follows {dq.name} with the same scale: one pair is enough")
        return _Reason(f"{q.name} follows {dq.name} with another scale: give both pairs one")

    def _in_float(self, node: Node) -> _Reason:
        operands = self._operands(node)
        bare = [tensor for tensor in operands if self._dq(tensor) is None]
        causes = [self._clamp_before, self._kernel, self._scale, self._type, self._output]
        if node.op in USUAL:
            causes = [self._clamp_before, self._clamp_behind, self._scale, self._type, self._bias, self._output]
            causes.append(self._kernel)
        if len(bare) == len(operands):
            reason = "none of its inputs carries a pair" if len(operands) > 1 else "its input carries no pair"
        elif bare and node.op in COMPUTE and any(map(self._is_constant, operands)):
            has, lacks = ("activation", "weight") if self._is_constant(bare[0]) else ("weight", "activation")
            reason = f"only its {has} carries a pair, its {lacks} {bare[0]} does not"
        elif bare:
            paired = len(operands) - len(bare)
            reason = f"only {paired} of its {len(operands)} inputs carries a pair, {bare[0]} does not"
        else:
            reason = next((text for cause in causes if (text := cause(node))), UNKNOWN)
        return _Reason(f"{_named(node)} runs in float: {reason}", node.name)

    def _clamp_before(self, node: Node) -> str:
        q = self._q(self._operands(node)[0])
        before = None if q is None else self._model.maker(q.inputs[0])
        if node.op in FUSED_BEHIND and before is not None and before.op in COMPUTE:
            return f"a pair stands between {_named(before)} and it, which engines fuse: put the pair behind it instead"
        return ""

    def _clamp_behind(self, node: Node) -> str:
        """Why an engine that drops superfluous clamps, but fuses none, cannot drop the one behind a node."""
        readers = self._readers(node.outputs[0])
        if self._numbers is None or not self._numbers.drop_clamps or len(readers) != 1 or readers[0].op not in CLAMPS:
            return ""
        clamp = readers[0]
        for q in self._readers(clamp.outputs[0]):
            zero = self._constant(q, 2) if q.op == "QuantizeLinear" else None
            if zero is not None and np.any(zero.array() != np.iinfo(zero.array().dtype).min):
                return f"{_named(clamp)} behind it has to run, since {q.name} keeps values below 0"
        return ""

    def _scale(self, node: Node) -> str:
        for tensor in self._operands(node):
            dq, q = self._dq(tensor), self._q(tensor)
            if dq is None:
                continue
            scale = self._constant(dq, 1)
            if scale is None:
                return f"the scale of {dq.name} is no constant"
            if q is not None and not self._same_numbers(q, dq):
                return f"{q.name} and {dq.name} differ in scale or zero point"
            if np.size(scale.array()) > 1 and not self._is_constant(tensor):
                return f"{dq.name} has a scale for each channel of an activation, and engines want one for all"
            if np.size(scale.array()) > 1 and self._numbers is not None and not self._numbers.per_channel:
                return f"{dq.name} has a scale for each channel, and this engine wants one for all"
        return ""

    def _type(self, node: Node) -> str:
        """The type of a pair that the engine does not take, unless it took the same elsewhere."""
        for number, tensor in enumerate(self._operands(node)):
            dq = self._dq(tensor)
            if dq is None or self._numbers is None:
                continue
            zero = self._constant(dq, 2)
            if self._numbers.symmetric and zero is not None and np.any(zero.array().astype(np.float32)):
                return f"the zero point of {dq.name} is not 0, and this engine takes symmetric pairs only"
            wanted = self._numbers.weight if self._is_constant(tensor) else self._numbers.activation
            dtype = self._dtype(dq)
            others = (self._operands(other)[number : number + 1] for other in self._like(node))
            taken = {self._dtype(self._dq(tensor)) for tensor in chain.from_iterable(others)}
            expected = helper.np_dtype_to_tensor_dtype(np.dtype(NUMPY_TYPE[wanted]))
            if dtype is not None and dtype not in (expected, *taken):
                return (
                    f"{dq.name} takes {TensorProto.DataType.Name(dtype).lower()}, and this engine wants {wanted.value}"
                )
        return ""

    def _bias(self, node: Node) -> str:
        """A text about a bias in another form than the engine wants, unless it took the same elsewhere."""
        is_quantized = self._has_quantized_bias(node)
        if self._numbers is None or is_quantized is None:
            return ""
        if any(self._has_quantized_bias(other) == is_quantized for other in self._like(node)):
            return ""
        if self._numbers.bias == "int32" and not is_quantized:
            return f"its bias {node.inputs[2]} is in float, and this engine wants it in int32 behind a DQ"
        if self._numbers.bias == "float" and is_quantized:
            return f"its bias {node.inputs[2]} comes out of a DQ, and this engine wants it in float"
        return ""

    def _has_quantized_bias(self, node: Node) -> bool | None:
        if node.op not in COMPUTE or len(node.inputs) < 3 or not node.inputs[2]:
            return None
        return self._dq(node.inputs[2]) is not None

    def _output(self, node: Node) -> str:
        tensor = node.outputs[0]
        readers = self._readers(tensor)
        while node.op in COMPUTE | {"Add"} and len(readers) == 1 and readers[0].op in FUSED_BEHIND:
            tensor = readers[0].outputs[0]
            readers = self._readers(tensor)
        others = [reader for reader in readers if reader.op != "QuantizeLinear"]
        if not others and tensor not in self._model.outputs:
            return ""
        return f"its output carries no pair on the way to {self._users(tensor, others)}"

    def _kernel(self, node: Node) -> str:
        """Convolutions and products with a weight have integer kernels everywhere, except for ConvTranspose."""
        if self._like(node):
            return ""
        if node.op not in COMPUTE or node.op == "ConvTranspose":
            return f"no {node.op} of this model runs in 8 bits: this engine seems to have no such kernel"
        if node.op == "MatMul" and not any(map(self._is_constant, self._operands(node))):
            return "it multiplies two activations, as in attention: not every engine runs these in 8 bits"
        return ""

    # ---- the graph

    def _operands(self, node: Node) -> list[str]:
        """The float tensors that the node computes with, without biases."""
        end = 2 if node.op in COMPUTE else SETTINGS_FROM.get(node.op, len(node.inputs))
        infos = {tensor: self._model.tensors.get(tensor) for tensor in node.inputs[:end] if tensor}
        return [t for t, info in infos.items() if self._dq(t) is not None or (info is not None and info.is_float)]

    def _dq(self, tensor: str) -> Node | None:
        maker = self._model.maker(tensor)
        return maker if maker is not None and maker.op == "DequantizeLinear" else None

    def _q(self, tensor: str) -> Node | None:
        """The Q of the pair that a tensor comes out of; None without a pair, or if it is stored quantized."""
        dq = self._dq(tensor)
        maker = None if dq is None else self._model.maker(dq.inputs[0])
        return maker if maker is not None and maker.op == "QuantizeLinear" else None

    def _is_constant(self, tensor: str) -> bool:
        """Whether a tensor is constant in front of its pair."""
        conversion = self._q(tensor) or self._dq(tensor)
        return (tensor if conversion is None else conversion.inputs[0]) in self._model.constants

    def _readers(self, tensor: str) -> list[Node]:
        """The nodes that read a tensor's values. Those that ask for its shape do not count."""
        users = dict.fromkeys(use.node for use in self._model.uses(tensor) if use.node != GRAPH)
        return [node for i in users if (node := self._model.nodes[i]).op not in ASKS_SHAPE]

    def _like(self, node: Node) -> list[Node]:
        """Nodes of the same operator that run in 8 bits: what they have cannot be a reason."""
        return [other for other in self._model.nodes if other.op == node.op and other.name in self._low]

    def _dtype(self, dq: Node | None) -> int | None:
        info = None if dq is None else self._model.tensors.get(dq.inputs[0])
        return None if info is None else info.dtype

    def _same_numbers(self, a: Node, b: Node) -> bool:
        for slot in (1, 2):
            if a.inputs[slot : slot + 1] == b.inputs[slot : slot + 1]:
                continue
            first, second = self._constant(a, slot), self._constant(b, slot)
            if first is None or second is None or not np.array_equal(first.array(), second.array()):
                return False
        return True

    def _users(self, tensor: str, nodes: Sequence[Node]) -> str:
        users = [_named(n) for n in nodes] + ["the model's output"] * (tensor in self._model.outputs)
        return ", ".join(users[:2]) + (f" and {len(users) - 2} more" if len(users) > 2 else "")

    def _comes_from_input(self, tensor: str) -> bool:
        while (maker := self._model.maker(tensor)) and maker.op in PASSES and maker.name not in self._low:
            tensor = maker.inputs[0]
        return tensor in self._model.inputs

    def _constant(self, node: Node, slot: int) -> Constant | None:
        return self._model.constants.get(node.inputs[slot]) if len(node.inputs) > slot else None


def _finding(kind: Symptom, layer: Layer, nodes: Iterable[Node], reason: _Reason, *, fails: bool = True) -> Finding:
    names = tuple(node.name for node in nodes)
    return Finding(kind, layer.name, names, layer.time_ms, reason.text, reason.cause, fails)


def _named(node: Node) -> str:
    return f"{node.name} ({node.op})"
