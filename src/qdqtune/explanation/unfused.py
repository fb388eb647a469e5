"""Finds what an engine did not fuse in a Q/DQ model, and concludes the likely reason from the graph.

An operator runs in 8 bits if all its operands come from DQs, its result goes into Qs, and the engine has a kernel. The
condition that does not hold is the likely reason; engines do not report theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from qdqtune.graph.model import GRAPH, Model, Node
from qdqtune.graph.operators import (
    ASKS_SHAPE,
    COMPUTE,
    CONTROL_FLOW,
    FUSED_BEHIND,
    INTEGER_KERNELS,
    MOVERS,
    QDQ,
    SETTINGS_FROM,
)
from qdqtune.placement.possible import IN_BODIES
from qdqtune.placement.reading import Pair, pairs_of, weight_only_formats
from qdqtune.types import Array, Layer, NumericFormat

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
    """A layer that a better placement might avoid, if it `fails`; otherwise a note. `nodes` are the ONNX nodes of the
    layer. `cause` is the node that `reason` is about: findings with the same cause belong together.

    - "standalone pair": a Q or a DQ that runs as a separate kernel.
    - "float compute": an operator that runs in float although its inputs carry pairs.
    - "reformat": a layer next to a quantized one that only moves values. It fails if the other side is float.
    - "elsewhere": nodes that an execution provider leaves to another. It fails if they carry pairs.
    - "boundary": a conversion that float inputs or outputs of the model need, or that the user allows.
    """

    reason: str
    cause: str = ""
    fails: bool = True
    kind: Symptom = "standalone pair"
    nodes: tuple[str, ...] = ()
    layer: str = ""
    time_ms: float | None = None


def is_low(precision: str) -> bool:
    """Whether a layer's precision is 8 bits or less."""
    return LOW.match(precision) is not None


def is_float(precision: str) -> bool:
    """Whether a precision is a float type of more than 8 bits; false for an unknown one, as `is_low`."""
    return FLOAT.match(precision) is not None and not is_low(precision)


def check(model: Model, layers: Sequence[Layer], numbers: NumericFormat | None = None) -> tuple[Finding, ...]:
    """The findings about a Q/DQ model, in the order of the engine's layers.

    Names in `layers` that are no nodes of `model` are ignored. `numbers` is the engine's numeric format; if given,
    pairs in another format are a possible reason.
    """
    graph = _Graph(model, layers, numbers)
    findings = ((layer, graph.finding(number)) for number, layer in enumerate(layers))
    return tuple(replace(each, layer=layer.name, time_ms=layer.time_ms) for layer, each in findings if each is not None)


def allow(findings: Iterable[Finding], wildcards: Sequence[str]) -> tuple[Finding, ...]:
    """The findings; those with a node or cause that matches a wildcard become boundaries, which do not fail."""

    def is_meant(finding: Finding) -> bool:
        names = (*finding.nodes, finding.cause)
        return finding.fails and any(fnmatchcase(name, wildcard) for name in names for wildcard in wildcards)

    return tuple(
        replace(f, kind="boundary", reason=f"allowed: {f.reason}", fails=False) if is_meant(f) else f for f in findings
    )


class _Graph:
    def __init__(self, model: Model, layers: Sequence[Layer], numbers: NumericFormat | None) -> None:
        self._model = model
        self._layers = layers
        self._numbers = numbers
        self._formats = weight_only_formats(model)
        self._pairs = {pair.dq.name: pair for pair in pairs_of(model)}
        home = {name: layer for layer in layers for name in layer.nodes}
        converting = {name for name, layer in home.items() if layer.kind == "quantize" and name in model.index_of}
        self._alone = {name for name in converting if model.node(name).op in QDQ}
        self._moved = converting - self._alone
        """Nodes that the engine has moved behind the Q or in front of the DQ whose layer names them."""
        low = {name for name, layer in home.items() if is_low(layer.precision) and layer.kind != "folded"}
        self._low = low - self._alone
        self._low_operators = {node.op for node in model.nodes if node.name in self._low}

    def finding(self, number: int) -> Finding | None:
        """The finding about layer number `number`, without its name and time; None if there is none."""
        layer = self._layers[number]
        if layer.kind in ("folded", "unknown"):
            return None
        nodes = [self._model.node(name) for name in layer.nodes if name in self._model.index_of]
        pairs = [node for node in nodes if node.op in QDQ]
        others = [node for node in nodes if node.op not in QDQ]
        meant = [node for node in others if self._is_meant_for_8_bits(node)]
        stored = [self._formats[node.name].name for node in nodes if node.name in self._formats]
        conversion = None
        if layer.kind == "quantize" or (pairs and not others and layer.kind != "copy"):
            conversion = self._conversion(pairs)
        if layer.kind == "quantize" and stored:
            text = f"the engine does not draw weights of {stored[0]} into the product behind"
            return Finding(text, nodes=_names(pairs))
        if layer.elsewhere:
            # The conversions at the model's float inputs and outputs may run anywhere.
            is_border = conversion is not None and not conversion.fails
            fails = not is_border and bool(pairs or meant)
            kind: Symptom = "boundary" if is_border else "elsewhere"
            return Finding(f"runs {layer.elsewhere}", fails=fails, kind=kind, nodes=_names(nodes))
        if conversion is not None:
            # A compute kernel that names only a Q is the rest of the operator in front of it, and no conversion.
            return None if layer.kind == "compute" and conversion.fails else conversion
        if not others:
            return self._inserted(number)
        if not meant or not is_float(layer.precision):
            return None
        first = next((node for node in meant if node.op in COMPUTE), meant[0])
        kind = "float compute" if layer.kind == "compute" else "reformat"
        return replace(self._in_float(first), kind=kind, nodes=_names(meant))

    def _is_meant_for_8_bits(self, node: Node) -> bool:
        """Whether a node should run in 8 bits: a convolution or product with a pair; or another operator with pairs on
        all inputs, one of which runs as a separate, avoidable layer. (Otherwise it is float arithmetic inside a kernel
        that reads and writes 8 bits, which costs nothing.)"""
        operands = self._operands(node)
        dqs = [dq for dq in map(self._dq, operands) if dq is not None]
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
        before = [dq for dq in dqs if self._of_dequantize(dq).fails]
        return any(conversion.name in self._alone for conversion in before + behind)

    def _conversion(self, pairs: Sequence[Node]) -> Finding:
        if not pairs:
            return Finding("the engine names no node for it, and may have added it")
        findings = [self._of_quantize(n) if n.op == "QuantizeLinear" else self._of_dequantize(n) for n in pairs]
        foremost = min(findings, key=lambda each: (each.reason == UNKNOWN, not each.fails))
        return replace(foremost, nodes=_names(pairs))

    def _inserted(self, number: int) -> Finding | None:
        """The finding about a layer that the engine has added, if it takes time and is next to one in 8 bits."""
        layer = self._layers[number]
        before = next((x for x in reversed(self._layers[:number]) if x.kind == "compute"), None)
        behind = next((x for x in self._layers[number + 1 :] if x.kind == "compute"), None)
        beside = [each for each in (before, behind) if each is not None]
        is_free = layer.kind == "compute" or (layer.kind == "copy" and not layer.time_ms)
        if is_free or not any(is_low(each.precision) for each in beside):
            return None
        text = "the engine changes layout or type"
        if len(beside) < 2:
            return Finding(text, fails=False, kind="boundary")
        in_float = [each for each in beside if is_float(each.precision)]
        names = [name for each in in_float for name in each.nodes if name in self._model.index_of]
        cause = next((name for name in names if self._model.node(name).op not in QDQ), "")
        place = f" beside {_named(self._model.node(cause))}, which runs in float" if cause else ""
        return Finding(text + place, cause, fails=bool(in_float), kind="reformat")

    # ---- reasons

    def _of_quantize(self, q: Node) -> Finding:
        tensor = q.inputs[0]
        maker = self._model.maker(tensor)
        if self._comes_from_input(tensor):
            dqs = self._readers(q.outputs[0])
            readers = [node for dq in dqs for node in self._readers(dq.outputs[0])]
            if not all(dq.name in self._alone for dq in dqs) or any(node.name in self._low for node in readers):
                return Finding("first Q behind a float input of the model", fails=False, kind="boundary")
            return self._in_float(readers[0]) if readers else Finding(UNKNOWN)
        if maker is None:
            return Finding(UNKNOWN)
        unmoved = tensor
        while (mover := self._model.maker(unmoved)) is not None and mover.op in KEEPS_VALUES:
            unmoved = mover.inputs[0]
        before = self._dq(unmoved)
        first = self._pairs[before.name].q if before is not None and maker.name in self._moved else None
        if first is not None:
            return self._of_quantize(first)
        if before is not None and (before.index == maker.index or not self._same_numbers(before, q)):
            return self._twice(before, q)
        if maker.name not in self._low:
            return self._in_float(maker)
        users = self._float_users(tensor)
        if users:
            return Finding(f"the result of {_named(maker)} is read in float as well: {users}", maker.name)
        if before is not None:
            return self._twice(before, q)
        return Finding(UNKNOWN) if mover is None or mover.name in self._low else self._in_float(mover)

    def _of_dequantize(self, dq: Node) -> Finding:
        tensor = end = dq.outputs[0]
        outputs = self._model.outputs
        while len(behind := self._readers(end)) == 1 and behind[0].op in PASSES and end not in outputs:
            end = behind[0].outputs[0]
        if not behind and end in outputs:
            return Finding("last DQ in front of a float output of the model", fails=False, kind="boundary")
        readers = self._readers(tensor)
        again = [node for node in readers if node.op == "QuantizeLinear"]
        if again:
            return self._twice(dq, again[0])
        in_float = [node for node in readers if node.name not in self._low]
        if in_float:
            return self._in_float(in_float[0])
        return Finding(f"{tensor} is an output of the model as well" if tensor in outputs else UNKNOWN)

    def _twice(self, dq: Node, q: Node) -> Finding:
        if self._same_numbers(dq, q):
            return Finding(f"{q.name} follows {dq.name} with the same scale: one pair is enough")
        return Finding(f"{q.name} follows {dq.name} with another scale: give both pairs one")

    def _in_float(self, node: Node) -> Finding:
        """Why a node, or the one in front that engines fuse with it, runs in float."""
        before = self._model.maker(node.inputs[0]) if node.op in FUSED_BEHIND else None
        if before is not None and before.op not in QDQ and before.name not in self._low:
            return self._in_float(before)
        bare = [tensor for tensor in self._operands(node) if self._dq(tensor) is None]
        reasons = [
            self._without_pair(node, bare[0]) if bare else "",
            self._clamp(node),
            self._kernel(node) if node.op not in USUAL else "",
            self._numbers_of_pairs(node),
            self._output(node),
            self._kernel(node),
        ]
        return Finding(f"{_named(node)} runs in float: {next(filter(None, reasons), UNKNOWN)}", node.name)

    def _without_pair(self, node: Node, tensor: str) -> str:
        if node.op not in COMPUTE or not any(map(self._is_constant, self._operands(node))):
            return f"its input {tensor} carries no pair"
        return f"its {'weight' if self._is_constant(tensor) else 'activation'} {tensor} carries no pair"

    def _clamp(self, node: Node) -> str:
        pair = self._pair(next(iter(self._operands(node)), ""))
        before = None if pair is None else self._model.maker(pair.source)
        if node.op in FUSED_BEHIND and before is not None and before.op in COMPUTE:
            return f"a pair stands between {_named(before)} and it, which engines fuse: put the pair behind it instead"
        return ""

    def _numbers_of_pairs(self, node: Node) -> str:
        """A text if pairs have a number format that the engine lacks, and no such operator runs in 8 bits."""
        numbers = self._numbers
        if numbers is None or node.op in self._low_operators:
            return ""
        for pair in filter(None, map(self._pair, self._operands(node))):
            wanted = []
            if pair.scale.size > 1 and not (pair.is_constant and numbers.per_channel):
                wanted.append("one scale for all channels")
            if numbers.symmetric and np.any(pair.zero_point.astype(np.float32)):
                wanted.append("a zero point of 0")
            kind = numbers.weight if pair.is_constant else numbers.activation
            if pair.zero_point.dtype != kind.dtype:
                wanted.append(str(kind.dtype))
            if wanted:
                return f"this engine wants {' and '.join(wanted)} at {pair.dq.name}"
        return ""

    def _output(self, node: Node) -> str:
        tensor = node.outputs[0]
        readers = self._readers(tensor)
        while node.op in COMPUTE | {"Add"} and len(readers) == 1 and readers[0].op in FUSED_BEHIND:
            tensor = readers[0].outputs[0]
            readers = self._readers(tensor)
        users = self._float_users(tensor)
        return f"its output carries no pair on the way to {users}" if users else ""

    def _kernel(self, node: Node) -> str:
        """A text if there may be no integer kernel, as for ConvTranspose and products of two activations."""
        if node.op in CONTROL_FLOW:
            return IN_BODIES
        if node.op in self._low_operators:
            return ""
        if node.op not in COMPUTE or node.op == "ConvTranspose":
            return f"no {node.op} of this model runs in 8 bits: this engine seems to have no such kernel"
        if node.op == "MatMul" and not any(map(self._is_constant, self._operands(node))):
            return "it multiplies two activations, as in attention: not every engine runs these in 8 bits"
        return ""

    # ---- the graph

    def _operands(self, node: Node) -> list[str]:
        """The float inputs of a node, without biases."""
        end = 2 if node.op in COMPUTE else SETTINGS_FROM.get(node.op, len(node.inputs))
        infos = {tensor: self._model.tensors.get(tensor) for tensor in node.inputs[:end] if tensor}
        return [t for t, info in infos.items() if self._dq(t) is not None or (info is not None and info.is_float)]

    def _dq(self, tensor: str) -> Node | None:
        maker = self._model.maker(tensor)
        return maker if maker is not None and maker.op == "DequantizeLinear" else None

    def _pair(self, tensor: str) -> Pair | None:
        dq = self._dq(tensor)
        return None if dq is None else self._pairs.get(dq.name)

    def _is_constant(self, tensor: str) -> bool:
        pair = self._pair(tensor)
        return tensor in self._model.constants if pair is None else pair.is_constant

    def _readers(self, tensor: str) -> list[Node]:
        """The nodes that read a tensor's values and not only its shape."""
        users = dict.fromkeys(use.node for use in self._model.uses(tensor) if use.node != GRAPH)
        return [self._model.nodes[i] for i in users if self._model.nodes[i].op not in ASKS_SHAPE]

    def _same_numbers(self, a: Node, b: Node) -> bool:
        return all(np.array_equal(self._values(a, slot), self._values(b, slot)) for slot in (1, 2))

    def _values(self, conversion: Node, slot: int) -> Array | str:
        """The scale (slot 1) or zero point (slot 2) of a Q or DQ; the name of the tensor if it is no constant."""
        tensor = conversion.inputs[slot] if len(conversion.inputs) > slot else ""
        constant = self._model.constants.get(tensor)
        return tensor if constant is None else constant.array()

    def _float_users(self, tensor: str) -> str:
        """What reads a tensor in float, as text; empty if nothing does."""
        users = [_named(node) for node in self._readers(tensor) if node.op != "QuantizeLinear"]
        users += ["the model's output"] * (tensor in self._model.outputs)
        return ", ".join(users[:2]) + (f" and {len(users) - 2} more" if len(users) > 2 else "")

    def _comes_from_input(self, tensor: str) -> bool:
        maker = self._model.maker(tensor)
        while maker is not None and maker.op in PASSES and maker.name not in self._low:
            tensor = maker.inputs[0]
            maker = self._model.maker(tensor)
        return tensor in self._model.inputs


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _named(node: Node) -> str:
    return f"{node.name} ({node.op})"
