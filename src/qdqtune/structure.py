"""Structure without names: which nodes are alike, and how the nodes of a part of the graph are numbered.

The numbering is a function of structure: operators, attributes, wiring, kinds of constants. Names, shapes and the
order of commutative inputs do not enter. It comes from three passes of Weisfeiler-Lehman labels (what follows a node,
what precedes it, what follows it again) and a sort by depth. Nodes that are still equal are told apart by their
surroundings in the whole model, and only then by graph order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple

import onnx
from google.protobuf.message import Message
from onnx import numpy_helper

from qdqtune.graph import GRAPH, Model, Node

HEAVY = frozenset({
    "Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "DeformConv", "LSTM", "GRU", "RNN", "Attention",
    "MultiHeadAttention", "FusedConv", "FusedGemm", "FusedMatMul", "If", "Loop", "Scan",
})  # fmt: skip
"""Operators that carry most of the work: a fusion group starts at them."""

COMMUTATIVE = frozenset({
    "Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum", "Mean", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
})  # fmt: skip
"""Operators whose inputs may stand in any order."""

PARAMETERS: Mapping[str, frozenset[int]] = {
    "BatchNormalization": frozenset({1, 2, 3, 4}),
    "Clip": frozenset({1, 2}),
    "Conv": frozenset({2}),
    "ConvTranspose": frozenset({2}),
    "Dropout": frozenset({1, 2}),
    "Gemm": frozenset({2}),
    "GroupNormalization": frozenset({1, 2}),
    "GRU": frozenset({3}),
    "InstanceNormalization": frozenset({1, 2}),
    "LSTM": frozenset({3, 7}),
    "LayerNormalization": frozenset({1, 2}),
    "NonMaxSuppression": frozenset({2, 3, 4}),
    "OneHot": frozenset({0, 1, 2}),
    "Pad": frozenset({1, 2, 3}),
    "QuantizeLinear": frozenset({1, 2}),
    "DequantizeLinear": frozenset({0, 1, 2}),
    "RNN": frozenset({3}),
    "Range": frozenset({0, 1, 2}),
    "Resize": frozenset({1, 2, 3}),
    "Shape": frozenset({0}),
    "Size": frozenset({0}),
    "Upsample": frozenset({1}),
}
"""Inputs that are no data: limits, scales, statistics, and biases (which follow from the other two inputs)."""


TAKES_CONSTANT_DATA = HEAVY | {"Add", "Sub", "Mul", "Div", "Concat", "Gather"}
"""Operators of which a constant input can carry a pair: engines have integer kernels for them."""

KINDS: Mapping[int, str] = {
    onnx.TensorProto.UNDEFINED: "?",
    onnx.TensorProto.DOUBLE: "d",
    onnx.TensorProto.BOOL: "b",
    onnx.TensorProto.STRING: "s",
}


def can_carry(model: Model, tensor: str, node: int, slot: int) -> bool:
    """Whether a Q/DQ pair can stand where input `slot` of node number `node` (or the graph, GRAPH) uses `tensor`.

    A tensor of unknown type cannot: nobody knows the type that its scale must have. Nor can a tensor that a body
    captures (slot -1), a parameter of an operator, or a constant that is neither a weight nor an elementwise operand.
    """
    info = model.tensors.get(tensor)
    if info is None or not info.is_float or slot < 0:
        return False
    if node == GRAPH:
        return tensor not in model.constants
    user = model.nodes[node]
    if tensor in model.constants and (user.domain or user.op not in TAKES_CONSTANT_DATA):
        return False
    return bool(user.domain) or slot not in PARAMETERS.get(user.op, ())


def may_be_float(model: Model, tensor: str) -> bool:
    """Whether a tensor holds floats as far as one knows: an unknown type may be float."""
    info = model.tensors.get(tensor)
    return info is None or info.is_float


class Operand(NamedTuple):
    """One input of a node: missing, a constant, or an activation that a node makes (`producer`) or a caller feeds (-1).

    `slot` is the input's number in the node, -1 for a captured tensor; `position` the tensor's number among the
    outputs of its producer or the inputs of the graph; `kind` the class of its type, for constants with their rank.
    A `free` operand may change places with the others: in commutative operators, and among captured tensors. One that
    `carries` can have a Q/DQ pair.
    """

    source: Literal["missing", "constant", "activation"]
    tensor: str
    slot: int
    free: bool
    carries: bool
    kind: str
    producer: int = -1
    position: int = 0


@dataclass(frozen=True, eq=False)
class Listing:
    """A part of the graph in canonical order.

    `nodes` are node indices; `operands[k]` the inputs of the k-th in canonical order; `borders` the activations that
    enter, `exits` the (canonical node number, output number) that leave, with whether a use outside can carry a pair.
    `lines` describe all of it: equal lines mean that equal numbers correspond.
    """

    nodes: tuple[int, ...]
    operands: tuple[tuple[Operand, ...], ...]
    borders: tuple[str, ...]
    exits: Mapping[tuple[int, int], bool]
    lines: tuple[str, ...]


class Structure:
    """What is known of the nodes of a model by structure alone. Made once per model, in linear time."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.texts = tuple(_operator(n, model) for n in model.nodes)
        self._place = {t: (-1, i) for i, t in enumerate(model.inputs)}
        self._place.update({t: (n.index, i) for n in model.nodes for i, t in enumerate(n.outputs) if t})
        self.operands = tuple(tuple(self._operands(n)) for n in model.nodes)
        self.carriers: dict[str, list[int]] = {t: [GRAPH] for t in model.outputs if can_carry(model, t, GRAPH, 0)}
        for node, operands in enumerate(self.operands):
            for o in operands:
                if o.carries:
                    self.carriers.setdefault(o.tensor, []).append(node)
        self._hashes: dict[str, int] = {}

    def _operands(self, node: Node) -> Iterator[Operand]:
        constants, free = self.model.constants, node.op in COMMUTATIVE and not node.domain
        for slot, tensor in (*enumerate(node.inputs), *((-1, t) for t in node.captures)):
            any_place, carries = free or slot < 0, can_carry(self.model, tensor, node.index, slot)
            if not tensor:
                yield Operand("missing", tensor, slot, any_place, carries, "")
            elif tensor in constants:
                kind = f"{self.kind(tensor)}{len(constants[tensor].shape)}"
                yield Operand("constant", tensor, slot, any_place, carries, kind)
            else:
                place = self._place.get(tensor, (-1, -1))
                yield Operand("activation", tensor, slot, any_place, carries, self.kind(tensor), *place)

    def kind(self, tensor: str) -> str:
        """The class of a tensor's type: `f` float that can be quantized, `d` double, `i`, `b`, `s`, or `?`."""
        info = self.model.tensors.get(tensor)
        return "?" if info is None else "f" if info.is_float else KINDS.get(info.dtype, "i")

    def hash(self, text: str) -> int:
        """64 bits of a text, remembered."""
        if text not in self._hashes:
            self._hashes[text] = int(_digest(text.encode()), 16)
        return self._hashes[text]

    @cached_property
    def fingerprints(self) -> Mapping[int, int]:
        """A label of each node within the whole model: tells apart nodes that look alike inside their own region."""
        return _Labels(_Part(self, [range(len(self.model.nodes))])).nodes

    def listing(self, parts: Sequence[Sequence[int]]) -> Listing:
        """The canonical order of the nodes of `parts`; how they are divided into parts is structure as well."""
        return _Numbering(_Part(self, parts)).run()


class _Part:
    """Some nodes of the model and their outputs, before they are numbered."""

    def __init__(self, structure: Structure, parts: Sequence[Sequence[int]]) -> None:
        self.structure = structure
        self.part_of = {n: p for p, nodes in enumerate(parts) for n in nodes}
        self.order = sorted(self.part_of)  # graph order is topological
        self.results = {n: self._results(n) for n in self.order}

    def _results(self, node: int) -> str:
        """How the listing writes a node's outputs: kind, and ! (a use outside can carry a pair) or ' (none can)."""
        model, carriers, inside = self.structure.model, self.structure.carriers, self.part_of
        texts = []
        for tensor in model.nodes[node].outputs:
            if any(user not in inside for user in carriers.get(tensor, ())):
                mark = "!"
            else:
                mark = "'" if any(user not in inside for user, _ in model.uses(tensor)) else ""
            texts.append(self.structure.kind(tensor) + mark if tensor else "_")
        return ",".join(texts)

    @cached_property
    def labels(self) -> _Labels:
        """Made when they are needed: a chain has only one order."""
        return _Labels(self)


class _Labels:
    """Weisfeiler-Lehman labels of some nodes and of the activations that enter them: equal where structure is equal."""

    def __init__(self, part: _Part) -> None:
        self._part = part
        self._uses: dict[int, list[tuple[int, int]]] = {n: [] for n in part.order}
        self._entries: dict[str, list[tuple[int, int]]] = {}
        structure = part.structure
        for n in part.order:
            for o in structure.operands[n]:
                role = -2 if o.free else o.slot
                if o.producer in part.part_of:
                    crosses = part.part_of[o.producer] != part.part_of[n]
                    self._uses[o.producer].append((n, _mix(role, 2 * o.position + crosses)))
                elif o.source == "activation":
                    self._entries.setdefault(o.tensor, []).append((n, role))
        seeds = {n: _mix(structure.hash(structure.texts[n]), structure.hash(part.results[n])) for n in part.order}
        after = self._sweep_users(seeds)
        self.nodes = self._sweep_users(self._sweep_producers(after, self._enter(after)))
        self.borders = self._enter(self.nodes)

    def _sweep_users(self, labels: Mapping[int, int]) -> dict[int, int]:
        """Each label with those of the node's users, theirs with their users', and so on."""
        new: dict[int, int] = {}
        for n in reversed(self._part.order):
            new[n] = _mix(labels[n], sum(_mix(new[user], role) for user, role in self._uses[n]))
        return new

    def _enter(self, labels: Mapping[int, int]) -> dict[str, int]:
        return {t: sum(_mix(labels[user], role) for user, role in uses) for t, uses in self._entries.items()}

    def _sweep_producers(self, labels: Mapping[int, int], borders: Mapping[str, int]) -> dict[int, int]:
        """Each label with those of the node's inputs, theirs with their inputs', and so on."""
        structure, new = self._part.structure, dict[int, int]()
        for n in self._part.order:
            above = 0
            for o in structure.operands[n]:
                if o.producer in self._part.part_of:
                    known = _mix(new[o.producer], o.position)
                else:
                    known = _mix(borders.get(o.tensor, 0), structure.hash(o.source + o.kind))
                above += _mix(known, -2 if o.free else o.slot)
            new[n] = _mix(labels[n], above)
        return new


class _Numbering:
    """Turns labels into numbers, level by level; the operands of a node are numbered before the node."""

    def __init__(self, part: _Part) -> None:
        self._part, self._structure = part, part.structure
        self._number: dict[int, int] = {}
        self._border: dict[str, int] = {}
        self._listed: list[tuple[Operand, ...]] = []

    def run(self) -> Listing:
        """The listing of the nodes."""
        for _, level in sorted(self._levels().items()):
            for node in self._sorted_level(level) if len(level) > 1 else level:
                self._append(node)
        nodes = tuple(self._number)
        return Listing(nodes, tuple(self._listed), tuple(self._border), dict(self._exits(nodes)),
                       tuple(self._line(k, n) for k, n in enumerate(nodes)))  # fmt: skip

    def _levels(self) -> dict[int, list[int]]:
        depth: dict[int, int] = {}
        levels: dict[int, list[int]] = {}
        for n in self._part.order:
            depth[n] = 1 + max([depth.get(o.producer, 0) for o in self._structure.operands[n]], default=0)
            levels.setdefault(depth[n], []).append(n)
        return levels

    def _sorted_level(self, level: Iterable[int]) -> Iterator[int]:
        label = self._part.labels.nodes.__getitem__
        for _, alike in groupby(sorted(level, key=label), label):
            yield from self._told_apart(list(alike))

    def _told_apart(self, alike: list[int]) -> list[int]:
        if len(alike) > 1:
            prints = self._structure.fingerprints
            alike.sort(key=lambda n: ([self._key(o)[:3] for o in self._sorted(n)], prints[n], n))
        return alike

    def _append(self, node: int) -> None:
        operands = self._sorted(node)
        for o in operands:
            if o.source == "activation" and o.producer not in self._number:
                self._border.setdefault(o.tensor, len(self._border))
        self._number[node] = len(self._number)
        self._listed.append(operands)

    def _sorted(self, node: int) -> tuple[Operand, ...]:
        """The operands of a node; those that may stand in any order, in canonical order."""
        operands = self._structure.operands[node]
        free = [o for o in operands if o.free]
        if len(free) < 2:
            return operands
        unknown = {o.tensor for o in free if o.source == "activation"} - self._border.keys()
        several = len(unknown.difference(o.tensor for o in free if o.producer in self._number)) > 1
        return (*(o for o in operands if not o.free), *sorted(free, key=lambda o: self._key(o, several)))

    def _key(self, operand: Operand, several: bool = True) -> tuple[int, int, int, int, int, int]:
        """Sorts operands: numbered nodes, numbered borders, other borders by label and surroundings, constants."""
        producer, surroundings = operand.producer, 0
        if producer in self._number:
            group, label = 0, self._number[producer]
        elif operand.tensor in self._border:
            group, label = 1, self._border[operand.tensor]
        elif operand.source == "activation" and not several:
            group, label = 2, 0
        elif operand.source == "activation":
            group, label = 2, self._part.labels.borders[operand.tensor]
            surroundings = self._structure.fingerprints[producer] if producer >= 0 else 0
        else:
            group, label = 3, self._structure.hash(operand.kind)
        return group, label, surroundings, producer, operand.position, operand.slot

    def _exits(self, nodes: Iterable[int]) -> Iterator[tuple[tuple[int, int], bool]]:
        for number, node in enumerate(nodes):
            for k, text in enumerate(self._part.results[node].split(",")):
                if text[-1:] in ("!", "'"):
                    yield (number, k), text[-1] == "!"

    def _line(self, number: int, node: int) -> str:
        inputs = ", ".join(self._write(o) for o in self._listed[number])
        return f"{self._structure.texts[node]}({inputs})->{self._part.results[node]}"

    def _write(self, operand: Operand) -> str:
        if operand.source == "missing":
            return "_"
        if operand.source == "constant":
            return f"const:{operand.kind}"
        if operand.producer in self._number:
            text = f"%{self._number[operand.producer]}" + (f".{operand.position}" if operand.position else "")
        else:
            text = f"x{self._border[operand.tensor]}:{operand.kind}"
        return f"captured {text}" if operand.slot < 0 else text


def _mix(a: int, b: int) -> int:
    """64 bits of two numbers, in this order. Python's own hash is not the same on every platform."""
    x = (a ^ (b * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 31)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 29)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _operator(node: Node, model: Model) -> str:
    """An operator with its domain and attributes, as text."""
    attributes = {name: _attribute(value) for name, value in node.attributes.items()}
    if node.attributes.get("group", 1) != 1 and _is_depthwise(node, model):
        attributes["group"] = "depthwise"  # the number is the number of channels, a shape
    text = ",".join(f"{name}={value}" for name, value in sorted(attributes.items()))
    return (f"{node.domain}." if node.domain else "") + node.op + (f"{{{text}}}" if text else "")


def _is_depthwise(node: Node, model: Model) -> bool:
    info = model.tensors.get(node.inputs[1]) if len(node.inputs) > 1 else None
    if info is None or info.shape is None or len(info.shape) < 2:
        return False
    if node.op == "ConvTranspose":
        return bool(info.shape[0] == node.attributes["group"])
    return node.op == "Conv" and info.shape[1] == 1


def _attribute(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
        return str(value) if len(value) <= 32 else _digest(value.encode())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, onnx.TensorProto):
        array = numpy_helper.to_array(value)
        return f"{array.dtype}{list(array.shape)}:{_digest(array.tobytes())}"
    if isinstance(value, onnx.GraphProto):
        return "[" + " ".join(_body_node(n) for n in value.node) + "]"
    if isinstance(value, Message):
        return _digest(value.SerializeToString(deterministic=True))
    if isinstance(value, Iterable):
        text = ",".join(_attribute(v) for v in value)
        return f"[{text}]" if len(text) <= 256 else _digest(text.encode())
    return str(value)


def _body_node(node: onnx.NodeProto) -> str:
    attributes = [f"{a.name}={_attribute(onnx.helper.get_attribute_value(a))}"
                  for a in sorted(node.attribute, key=lambda a: a.name)]  # fmt: skip
    return node.op_type + (f"{{{','.join(attributes)}}}" if attributes else "")
