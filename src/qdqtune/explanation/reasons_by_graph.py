"""Reasons concluded from the graph: why an engine left a part of a Q/DQ model in float.

An operator runs in 8 bits if all its operands come from DQs, its result goes into Qs, and the engine has a kernel. A
condition that does not hold is the likely reason; engines do not report theirs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

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
from qdqtune.placement.insertion import ONNX_TYPE
from qdqtune.types import Layer, NumericFormat

UNKNOWN = "for a reason that the graph does not show"

LOW = re.compile(r"(u?int|[ui]|fp|f|float)[48]", re.IGNORECASE)
FLOAT = re.compile(r"bf|tf|fp|f|half", re.IGNORECASE)

PASSES = MOVERS | {"Cast"}
"""Operators that may stand between an input of the graph and its Q, or between a DQ and an output."""
KEEPS_VALUES = MOVERS - {"AveragePool", "MaxPool", "Resize"}
"""Operators that keep all values: integers pass through if both sides have one scale."""
USUAL = COMPUTE | MOVERS | INTEGER_KERNELS
"""Operators that most engines run in 8 bits: a missing kernel is an unlikely reason."""
AROUND_SOFTMAX = MOVERS | QDQ | {"Add", "Cast", "Div", "Dropout", "Mul", "Where"}
"""Operators that may stand between the products of attention and their Softmax."""


@dataclass(frozen=True)
class Reason:
    """Why a conversion runs, and the node that causes it. `is_boundary`: the model needs it there."""

    text: str
    cause: str = ""
    is_boundary: bool = False


@dataclass(frozen=True)
class Operand:
    """A float tensor that a node computes with, and its `dq` if it has a pair.

    `source` is the float tensor in front of the pair; None where the pair is on a constant that is stored quantized.
    """

    tensor: str
    dq: Node | None
    source: str | None
    is_constant: bool


def is_low(precision: str) -> bool:
    """Whether a layer's precision is one of 8 bits or less."""
    return LOW.match(precision) is not None


def is_float(precision: str) -> bool:
    """Whether a precision is a float type of more than 8 bits. An unknown one is neither low nor float."""
    return FLOAT.match(precision) is not None and not is_low(precision)


def is_conversion(node: Node) -> bool:
    return node.op in QDQ


def named(node: Node) -> str:
    return f"{node.name} ({node.op})"


class Reasons:
    """Finds reasons in a Q/DQ model, given the engine's layers and, if known, its numeric format `numbers`."""

    def __init__(self, model: Model, layers: Sequence[Layer], numbers: NumericFormat | None) -> None:
        self._model = model
        self._home = {name: layer for layer in layers for name in layer.nodes}
        self._numbers = numbers

    def runs_in_8_bits(self, node: Node) -> bool:
        layer = self._home.get(node.name)
        return layer is not None and layer.kind not in ("quantize", "folded") and is_low(layer.precision)

    def has_running_pair(self, node: Node) -> bool:
        """Whether a DQ in front of the node or a Q behind it is a layer of its own that need not be there."""
        dqs = [operand.dq for operand in self.operands(node) if operand.dq is not None]
        qs = [n for tensor in node.outputs for n in self._readers(tensor) if n.op == "QuantizeLinear"]
        return any(self._runs_alone(dq) and not self.of_dequantize(dq).is_boundary for dq in dqs) or any(
            map(self._runs_alone, qs)
        )

    def _runs_alone(self, node: Node) -> bool:
        layer = self._home.get(node.name)
        return layer is not None and layer.kind == "quantize"

    def operands(self, node: Node) -> list[Operand]:
        """The inputs that the node computes with, without biases."""
        end = 2 if node.op in COMPUTE else SETTINGS_FROM.get(node.op, len(node.inputs))
        return [operand for tensor in node.inputs[:end] if tensor and (operand := self._operand(tensor)) is not None]

    def of_quantize(self, q: Node) -> Reason:
        """Why a Q runs as a kernel: its input is made in float, or another node reads that input as well."""
        tensor = q.inputs[0]
        maker = self._model.maker(tensor)
        if tensor in self._model.constants:
            return Reason("it quantizes a constant, which the engine has not done in advance")
        if self._comes_from_input(tensor):
            dqs = self._readers(q.outputs[0])
            readers = [n for dq in dqs for n in self._readers(dq.outputs[0])]
            if not all(map(self._runs_alone, dqs)) or any(map(self.runs_in_8_bits, readers)):
                return Reason("first Q behind a float input of the model", is_boundary=True)
            return self._in_float(readers[0]) if readers else Reason(UNKNOWN)
        if maker is None:
            return Reason(UNKNOWN)
        before = self._unmoved(tensor)
        if before is not None and (before.index == maker.index or not self._same_numbers(before, q)):
            return Reason(self._twice(before, q))
        if not self.runs_in_8_bits(maker):
            return self._in_float(maker)
        others = [n for n in self._readers(tensor) if n.op != "QuantizeLinear"]
        if others or self._is_output(tensor):
            users = self._users(tensor, others)
            return Reason(f"the result of {named(maker)} is read in float as well: {users}", maker.name)
        return Reason(UNKNOWN if before is None else self._twice(before, q))

    def of_dequantize(self, dq: Node) -> Reason:
        """Why a DQ runs as a kernel: a node reads its output in float."""
        tensor = dq.outputs[0]
        if self._ends_at_output(tensor):
            return Reason("last DQ in front of a float output of the model", is_boundary=True)
        readers = self._readers(tensor)
        if again := next((n for n in readers if n.op == "QuantizeLinear"), None):
            return Reason(self._twice(dq, again))
        in_float = [n for n in readers if not self.runs_in_8_bits(n)]
        if not in_float:
            return Reason(f"{tensor} is an output of the model as well" if self._is_output(tensor) else UNKNOWN)
        first = self._in_float(in_float[0])
        others = len(readers) - len(in_float)
        told_too = f"; {others} of {len(readers)} readers take 8 bits" if others else ""
        return replace(first, text=first.text + told_too)

    def _in_float(self, node: Node) -> Reason:
        """Why a node, or the one in front of it that engines fuse it with, runs in float."""
        before = self._model.maker(node.inputs[0]) if node.op in FUSED_BEHIND else None
        if before is not None and not is_conversion(before) and not self.runs_in_8_bits(before):
            return self._in_float(before)
        return self.in_float(node)

    def in_float(self, node: Node) -> Reason:
        """That an operator runs in float, and why."""
        return Reason(f"{named(node)} runs in float: {self.of_float(node)}", node.name)

    def of_float(self, node: Node) -> str:
        """Why an operator runs in float, as far as the graph tells."""
        operands = self.operands(node)
        bare = [o for o in operands if o.dq is None]
        if len(bare) == len(operands):
            return "none of its inputs carries a pair" if len(operands) > 1 else "its input carries no pair"
        if bare:
            return _partial(node, operands)
        usual = (self._clamp_before, self._scales, self._clamp_behind, self._types, self._bias, self._bias_scale)
        causes = [*usual, self._output, self._kernel, self._attention]
        if node.op not in USUAL:
            causes = [self._clamp_before, self._kernel, self._scales, self._types, self._output]
        return next((reason for cause in causes if (reason := cause(node))), UNKNOWN)

    def _clamp_before(self, node: Node) -> str:
        source = self.operands(node)[0].source
        before = self._model.maker(source) if source else None
        if node.op in FUSED_BEHIND and before is not None and before.op in COMPUTE:
            return f"a pair stands between {named(before)} and it, which engines fuse: put the pair behind it instead"
        return ""

    def _clamp_behind(self, node: Node) -> str:
        """Why an engine that drops superfluous clamps, but fuses none, cannot drop the one behind a node."""
        readers = self._readers(node.outputs[0])
        if self._numbers is None or not self._numbers.drop_clamps or len(readers) != 1:
            return ""
        clamp = readers[0]
        qs = [n for n in self._readers(clamp.outputs[0]) if n.op == "QuantizeLinear"] * (clamp.op in CLAMPS)
        for q in qs:
            zero = self._constant(q, 2)
            if zero is not None and np.any(zero.array() != np.iinfo(zero.array().dtype).min):
                return f"{named(clamp)} behind it has to run, since {q.name} keeps values below 0"
        return ""

    def _scales(self, node: Node) -> str:
        """What engines do not take about the scales of its pairs."""
        causes = (self._scale(node, n, o, o.dq) for n, o in enumerate(self.operands(node)) if o.dq is not None)
        return next(filter(None, causes), "")

    def _types(self, node: Node) -> str:
        """What the engine does not take about the types of its pairs, unless it took the same elsewhere."""
        causes = (self._type(node, n, o, o.dq) for n, o in enumerate(self.operands(node)) if o.dq is not None)
        return next(filter(None, causes), "")

    def _scale(self, node: Node, number: int, operand: Operand, dq: Node) -> str:
        scale = self._constant(dq, 1)
        q = self._model.maker(dq.inputs[0])
        if scale is None:
            return f"the scale of {dq.name} is no constant"
        if q is not None and q.op == "QuantizeLinear" and not self._same_numbers(q, dq):
            return f"{q.name} and {dq.name} differ in scale or zero point"
        if np.size(scale.array()) == 1:
            return ""
        if not operand.is_constant:
            return f"{dq.name} has a scale for each channel of an activation, and engines want one for all"
        if self._numbers is not None and not self._numbers.per_channel:
            return f"{dq.name} has a scale for each channel, and this engine wants one for all"
        info = self._model.tensors.get(dq.outputs[0])
        wanted = _channel_axis(node, number)
        if info is None or info.shape is None or wanted is None:
            return ""
        axis: int = dq.attributes.get("axis", 1) % len(info.shape)
        if axis == wanted % len(info.shape):
            return ""
        return f"{dq.name} has its scales along axis {axis}, which is not that of the output channels"

    def _type(self, node: Node, number: int, operand: Operand, dq: Node) -> str:
        if self._numbers is None:
            return ""
        zero = self._constant(dq, 2)
        if self._numbers.symmetric and zero is not None and np.any(zero.array().astype(np.float32)):
            return f"the zero point of {dq.name} is not 0, and this engine takes symmetric pairs only"
        wanted = self._numbers.weight if operand.is_constant else self._numbers.activation
        dtype = self._dtype(dq)
        if dtype in (None, ONNX_TYPE[wanted]):
            return ""
        taken = [self.operands(n)[number : number + 1] for n in self._like(node)]
        if any(o.dq is not None and self._dtype(o.dq) == dtype for operands in taken for o in operands):
            return ""
        return f"{dq.name} takes {TensorProto.DataType.Name(dtype).lower()}, and this engine wants {wanted.value}"

    def _bias(self, node: Node) -> str:
        if self._numbers is None or (is_quantized := self._has_quantized_bias(node)) is None:
            return ""
        if any(self._has_quantized_bias(n) == is_quantized for n in self._like(node)):
            return ""
        if self._numbers.bias == "int32" and not is_quantized:
            return f"its bias {node.inputs[2]} is in float, and this engine wants it in int32 behind a DQ"
        if self._numbers.bias == "float" and is_quantized:
            return f"its bias {node.inputs[2]} comes out of a DQ, and this engine wants it in float"
        return ""

    def _bias_scale(self, node: Node) -> str:
        """A text about a bias that sums of products cannot take in: their scale is that of the input times that of the
        weights."""
        if not self._has_quantized_bias(node):
            return ""
        dqs = [self._model.maker(tensor) for tensor in node.inputs[:3]]
        scales = [None if dq is None else self._constant(dq, 1) for dq in dqs]
        values = [scale.array().astype(np.float64) for scale in scales if scale is not None]
        if len(values) < len(dqs):
            return ""
        of_input, of_weight, of_bias = values
        sizes = {np.size(of_weight), np.size(of_bias)} - {1}
        if len(sizes) < 2 and np.allclose(of_bias, of_input * of_weight, rtol=1e-5, atol=0):
            return ""
        return f"the scale of its bias {node.inputs[2]} is not that of its input times that of its weight"

    def _has_quantized_bias(self, node: Node) -> bool | None:
        if node.op not in COMPUTE or len(node.inputs) < 3 or not node.inputs[2]:
            return None
        dq = self._model.maker(node.inputs[2])
        return dq is not None and dq.op == "DequantizeLinear"

    def _like(self, node: Node) -> list[Node]:
        """Nodes of the same operator that run in 8 bits: what they have cannot be a reason."""
        return [n for n in self._model.nodes if n.op == node.op and self.runs_in_8_bits(n)]

    def _dtype(self, dq: Node) -> int | None:
        info = self._model.tensors.get(dq.inputs[0])
        return None if info is None else info.dtype

    def _output(self, node: Node) -> str:
        """The nodes that read the result in float, behind operators that engines fuse."""
        tensor = node.outputs[0]
        readers = self._readers(tensor)
        while node.op in COMPUTE | {"Add"} and len(readers) == 1 and readers[0].op in FUSED_BEHIND:
            tensor = readers[0].outputs[0]
            readers = self._readers(tensor)
        others = [n for n in readers if n.op != "QuantizeLinear"]
        if not others and not self._is_output(tensor):
            return ""
        return f"its output carries no pair on the way to {self._users(tensor, others)}"

    def _kernel(self, node: Node) -> str:
        """A text if no node of this operator runs in 8 bits.

        Convolutions and products have integer kernels everywhere, except for ConvTranspose.
        """
        if node.op in COMPUTE - {"ConvTranspose"} or self._like(node):
            return ""
        return f"no {node.op} of this model runs in 8 bits: this engine seems to have no such kernel"

    def _attention(self, node: Node) -> str:
        if node.op != "MatMul" or any(o.is_constant for o in self.operands(node)):
            return ""
        if not (self._meets_softmax(node, forward=True) or self._meets_softmax(node, forward=False)):
            return ""
        which = "it is one of the two products of attention"
        if self._numbers is not None and self._numbers.symmetric:
            return f"{which}: this engine fuses them in float16, or in FP8 with pairs on q, k, v and behind the Softmax"
        return f"{which}: not every engine runs them in 8 bits"

    def _meets_softmax(self, node: Node, *, forward: bool) -> bool:
        seen, stack = {node.index}, [node]
        while stack:
            here = stack.pop()
            makers = (self._model.maker(t) for t in here.inputs)
            near = [r for t in here.outputs for r in self._readers(t)] if forward else [m for m in makers if m]
            if any(n.op == "Softmax" for n in near):
                return True
            fresh = [n for n in near if n.op in AROUND_SOFTMAX and n.index not in seen]
            seen.update(n.index for n in fresh)
            stack.extend(fresh)
        return False

    def _unmoved(self, tensor: str) -> Node | None:
        """The DQ whose values a tensor holds, perhaps in another shape or order."""
        maker = self._model.maker(tensor)
        while maker is not None and maker.op in KEEPS_VALUES:
            maker = self._model.maker(maker.inputs[0])
        return maker if maker is not None and maker.op == "DequantizeLinear" else None

    def _twice(self, dq: Node, q: Node) -> str:
        if self._same_numbers(dq, q):
            return f"{q.name} follows {dq.name} with the same scale: one pair is enough"
        return f"{q.name} follows {dq.name} with another scale: give both pairs one"

    def _same_numbers(self, a: Node, b: Node) -> bool:
        for slot in (1, 2):
            if a.inputs[slot : slot + 1] == b.inputs[slot : slot + 1]:
                continue
            first, second = self._constant(a, slot), self._constant(b, slot)
            if first is None or second is None or not np.array_equal(first.array(), second.array()):
                return False
        return True

    def _users(self, tensor: str, nodes: Sequence[Node]) -> str:
        users = [named(n) for n in nodes] + ["the model's output"] * self._is_output(tensor)
        return ", ".join(users[:2]) + (f" and {len(users) - 2} more" if len(users) > 2 else "")

    def _operand(self, tensor: str) -> Operand | None:
        maker = self._model.maker(tensor)
        if maker is None or maker.op != "DequantizeLinear":
            info = self._model.tensors.get(tensor)
            is_known = info is not None and info.is_float
            return Operand(tensor, None, tensor, tensor in self._model.constants) if is_known else None
        q = self._model.maker(maker.inputs[0])
        source = q.inputs[0] if q is not None and q.op == "QuantizeLinear" else None
        fixed = (source or maker.inputs[0]) in self._model.constants
        return Operand(tensor, maker, source, fixed)

    def _comes_from_input(self, tensor: str) -> bool:
        while (maker := self._model.maker(tensor)) and maker.op in PASSES and not self.runs_in_8_bits(maker):
            tensor = maker.inputs[0]
        return tensor in self._model.inputs

    def _ends_at_output(self, tensor: str) -> bool:
        """Whether a tensor reaches graph outputs only."""
        while len(readers := self._readers(tensor)) == 1 and readers[0].op in PASSES and not self._is_output(tensor):
            tensor = readers[0].outputs[0]
        return not readers and self._is_output(tensor)

    def _readers(self, tensor: str) -> list[Node]:
        """The nodes that read a tensor's values. Those that ask for its shape do not count."""
        users = dict.fromkeys(use.node for use in self._model.uses(tensor) if use.node != GRAPH)
        return [node for i in users if (node := self._model.nodes[i]).op not in ASKS_SHAPE]

    def _is_output(self, tensor: str) -> bool:
        return tensor in self._model.outputs

    def _constant(self, node: Node, slot: int) -> Constant | None:
        return self._model.constants.get(node.inputs[slot]) if len(node.inputs) > slot else None


def _partial(node: Node, operands: Sequence[Operand]) -> str:
    """A text about a node of whose inputs only some have a pair."""
    bare = next(o for o in operands if o.dq is None)
    if node.op in COMPUTE and any(o.is_constant for o in operands):
        has, lacks = ("activation", "weight") if bare.is_constant else ("weight", "activation")
        return f"only its {has} carries a pair, its {lacks} {bare.tensor} does not"
    paired = sum(o.dq is not None for o in operands)
    return f"only {paired} of its {len(operands)} inputs carries a pair, {bare.tensor} does not"


def _channel_axis(node: Node, slot: int) -> int | None:
    """The axis of the output channels in a weight; negative if counted from the back."""
    if slot != 1:
        return None
    gemm = 0 if node.attributes.get("transB", 0) else 1
    return {"Conv": 0, "ConvTranspose": 1, "MatMul": -1, "Gemm": gemm}.get(node.op)
