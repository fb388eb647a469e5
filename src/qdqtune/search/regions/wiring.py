"""Nodes as they enter signatures: operators, attributes and what each input reads, without names and shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import onnx
from google.protobuf.message import Message
from onnx import numpy_helper

from qdqtune.graph.model import GRAPH, Model, Node
from qdqtune.graph.operators import COMMUTATIVE
from qdqtune.placement.possible import can_carry

TYPE_LETTERS: Mapping[int, str] = {
    onnx.TensorProto.UNDEFINED: "?",
    onnx.TensorProto.DOUBLE: "d",
    onnx.TensorProto.BOOL: "b",
    onnx.TensorProto.STRING: "s",
}


FREE = -2
"""The role of every input that may change places with others."""


class Tensor(NamedTuple):
    """What an input reads: nothing, a constant, or an activation that a node writes (`producer`) or the caller feeds
    (-1).

    `position` is the tensor's number among the outputs of its producer or the inputs of the graph; `letter` stands for
    its type, for constants with their rank. Outputs of nodes have `users` (GRAPH is the graph) and, among them,
    `carriers`: where a Q/DQ pair can stand.
    """

    source: Literal["missing", "constant", "activation"]
    name: str
    letter: str
    producer: int = -1
    position: int = 0
    users: tuple[int, ...] = ()
    carriers: tuple[int, ...] = ()


MISSING = Tensor("missing", "", "")


class Inputs(NamedTuple):
    """The inputs of one node in the order of the file, from number `captured` on the tensors that its bodies capture.

    `roles` tell the inputs apart: the number of each, or FREE in a commutative operator and for captured tensors. Free
    inputs come last. Where one `carries`, a Q/DQ pair can stand.
    """

    tensors: tuple[Tensor, ...]
    roles: tuple[int, ...]
    carries: tuple[bool, ...]
    captured: int


class Wiring:
    """The nodes of a model as they enter signatures, made once per model in linear time."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.texts = tuple([written(n, model) for n in model.nodes])
        carries = [self._carries(n) for n in model.nodes]
        self.tensors = self._tensors(carries)
        """All tensors by name, and MISSING by the empty name."""
        self.inputs = tuple(map(self._inputs, model.nodes, carries))
        self._hashes: dict[str, int] = {}

    def _carries(self, node: Node) -> tuple[bool, ...]:
        at_inputs = [can_carry(self.model, t, node.index, slot) for slot, t in enumerate(node.inputs)]
        return (*at_inputs, *(False for _ in node.captures))

    def _tensors(self, carries: Sequence[Sequence[bool]]) -> Mapping[str, Tensor]:
        model = self.model
        users: dict[str, list[int]] = {t: [] for t in model.producers}
        carriers: dict[str, list[int]] = {t: [] for t in model.producers}
        uses = (
            (t, n.index, c)
            for n in model.nodes
            for t, c in zip((*n.inputs, *n.captures), carries[n.index], strict=True)
        )
        leaving = ((t, GRAPH, can_carry(model, t, GRAPH, 0)) for t in model.outputs)
        for tensor, user, carrying in chain(uses, leaving):
            if tensor in users:
                users[tensor].append(user)
                if carrying:
                    carriers[tensor].append(user)
        letter = self.type_letter
        known = {t: Tensor("activation", t, letter(t), -1, i) for i, t in enumerate(model.inputs)}
        for node in model.nodes:
            for i, t in enumerate(node.outputs):
                if t:
                    known[t] = Tensor("activation", t, letter(t), node.index, i, tuple(users[t]), tuple(carriers[t]))
        for t, constant in model.constants.items():
            known[t] = Tensor("constant", t, f"{letter(t)}{len(constant.shape)}")
        return {**known, "": MISSING}

    def _inputs(self, node: Node, carries: tuple[bool, ...]) -> Inputs:
        free = node.op in COMMUTATIVE and not node.domain
        names, count = (*node.inputs, *node.captures), len(node.inputs)
        tensors = [self.tensors.get(t) or Tensor("activation", t, self.type_letter(t), -1, -1) for t in names]
        roles = (FREE,) * len(names) if free else (*range(count), *(FREE for _ in node.captures))
        return Inputs(tuple(tensors), roles, carries, count)

    def type_letter(self, tensor: str) -> str:
        """The class of a tensor's type: `f` float that can be quantized, `d` double, `i`, `b`, `s`, or `?`."""
        info = self.model.tensors.get(tensor)
        return "?" if info is None else "f" if info.is_float else TYPE_LETTERS.get(info.dtype, "i")

    def hash(self, text: str) -> int:
        """A 64-bit hash of a text, cached."""
        if text not in self._hashes:
            self._hashes[text] = int(digest(text.encode()), 16)
        return self._hashes[text]


def digest(content: bytes) -> str:
    """16 hex digits of some bytes."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def written(node: Node, model: Model) -> str:
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


def _attribute(value: object) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
        return str(value) if len(value) <= 32 else digest(value.encode())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, onnx.TensorProto):
        array = numpy_helper.to_array(value)
        return f"{array.dtype}{list(array.shape)}:{digest(array.tobytes())}"
    if isinstance(value, onnx.GraphProto):
        return "[" + " ".join(_body_node(n) for n in value.node) + "]"
    if isinstance(value, Message):
        return digest(value.SerializeToString(deterministic=True))
    if isinstance(value, Iterable):
        text = ",".join(_attribute(v) for v in value)
        return f"[{text}]" if len(text) <= 256 else digest(text.encode())
    return str(value)


def _body_node(node: onnx.NodeProto) -> str:
    attributes = [
        f"{a.name}={_attribute(onnx.helper.get_attribute_value(a))}"
        for a in sorted(node.attribute, key=lambda a: a.name)
    ]
    return node.op_type + (f"{{{','.join(attributes)}}}" if attributes else "")
