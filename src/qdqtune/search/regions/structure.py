"""Canonical orders: the nodes of a part of the graph, numbered independently of names and shapes.

The numbers depend on operators, attributes, what inputs read, and types of constants. Nodes are sorted by depth, then
by operator, outputs and inputs; only nodes equal in all of these keep graph order. Inputs of commutative operators are
sorted by what they read.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
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


class Tensor(NamedTuple):
    """What an input reads: nothing, a constant, or an activation, from node `producer` or from outside the model (-1).

    `position` is its number among the outputs of the producer or the inputs of the graph; `letter` stands for its type,
    and for constants also their rank.
    """

    source: Literal["missing", "constant", "activation"]
    name: str
    letter: str
    producer: int = -1
    position: int = 0


class Read(NamedTuple):
    """Input `slot` of a node, or a tensor that its subgraphs capture. `carries`: a Q/DQ pair can stand there.
    `is_free`: it may change places with other free ones, as inputs of commutative operators and captured tensors may.
    """

    tensor: Tensor
    slot: int
    carries: bool
    is_free: bool
    is_captured: bool


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _written(node: Node, model: Model) -> str:
    attributes = {name: _attribute(value) for name, value in node.attributes.items()}
    if node.attributes.get("group", 1) != 1 and _is_depthwise(node, model):
        attributes["group"] = "depthwise"  # the number is the number of channels, a shape
    return _call(f"{node.domain}.{node.op}" if node.domain else node.op, attributes)


def _call(op: str, attributes: Mapping[str, str]) -> str:
    text = ",".join(f"{name}={value}" for name, value in sorted(attributes.items()))
    return f"{op}{{{text}}}" if text else op


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
        return str(value) if len(value) <= 32 else _digest(value.encode())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, onnx.TensorProto):
        array = numpy_helper.to_array(value)
        return f"{array.dtype}{list(array.shape)}:{_digest(array.tobytes())}"
    if isinstance(value, onnx.GraphProto):
        nodes = []
        for node in value.node:
            attributes = {a.name: _attribute(onnx.helper.get_attribute_value(a)) for a in node.attribute}
            nodes.append(_call(node.op_type, attributes))
        return f"[{' '.join(nodes)}]"
    if isinstance(value, Message):
        return _digest(value.SerializeToString(deterministic=True))
    if isinstance(value, Iterable):
        text = ",".join(_attribute(v) for v in value)
        return f"[{text}]" if len(text) <= 256 else _digest(text.encode())
    return str(value)


@dataclass(frozen=True, eq=False)
class Listing:
    """A part of the graph in canonical order.

    `nodes` are node indices; `reads[k]` are the inputs of the k-th, in canonical order too.
    `borders` are the activations from outside, `exits` the outputs used outside, as (canonical node number, output
    number). `lines` describe all of it as text: if two listings have equal lines, equal numbers correspond.
    """

    nodes: tuple[int, ...]
    reads: tuple[tuple[Read, ...], ...]
    borders: tuple[str, ...]
    exits: tuple[tuple[int, int], ...]
    lines: tuple[str, ...]


class Structure:
    """A model's nodes prepared for canonical orders of its parts, in linear time."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.texts = tuple(_written(n, model) for n in model.nodes)
        letter = self.type_letter
        self.tensors = {t: Tensor("activation", t, letter(t), -1, i) for i, t in enumerate(model.inputs)}
        for node in model.nodes:
            self.tensors |= {t: Tensor("activation", t, letter(t), node.index, i) for i, t in enumerate(node.outputs)}
        for t, constant in model.constants.items():
            self.tensors[t] = Tensor("constant", t, f"{letter(t)}{len(constant.shape)}")
        self.tensors[""] = Tensor("missing", "", "")
        self.users = defaultdict[str, list[int]](list)
        self.carriers = defaultdict[str, list[int]](list)
        """For each tensor, the users (GRAPH: a graph output) in front of which a pair can stand."""
        self.reads = tuple(map(self._reads, model.nodes))
        for tensor in model.outputs:
            self._use(tensor, GRAPH, carries=can_carry(model, tensor, GRAPH, 0))

    def _reads(self, node: Node) -> tuple[Read, ...]:
        is_free = node.op in COMMUTATIVE and not node.domain
        reads = []
        for slot, name in enumerate((*node.inputs, *node.captures)):
            is_captured = slot >= len(node.inputs)
            tensor = self.tensors.get(name) or Tensor("activation", name, self.type_letter(name), -1, -1)
            carries = not is_captured and can_carry(self.model, name, node.index, slot)
            reads.append(Read(tensor, slot, carries, is_free or is_captured, is_captured))
            if name:
                self._use(name, node.index, carries=carries)
        return tuple(reads)

    def _use(self, tensor: str, user: int, *, carries: bool) -> None:
        self.users[tensor].append(user)
        if carries:
            self.carriers[tensor].append(user)

    def type_letter(self, tensor: str) -> str:
        """The class of a tensor's type: `f` for quantizable floats, `d` double, `i` integer, `b` bool, `s` string, or
        `?`."""
        info = self.model.tensors.get(tensor)
        if info is None:
            return "?"
        return "f" if info.is_float else TYPE_LETTERS.get(info.dtype, "i")

    def listing(self, nodes: Collection[int]) -> Listing:
        order = sorted(nodes)  # graph order is topological
        inside, number, border = set(order).issuperset, dict[int, int](), dict[str, int]()
        levels, depth = defaultdict[int, list[int]](list), dict[int, int]()
        for node in order:
            depth[node] = 1 + max([depth.get(read.tensor.producer, 0) for read in self.reads[node]], default=0)
            levels[depth[node]].append(node)

        def written(node: int) -> str:
            """For each output its type; then ! if uses outside can have a pair, or ' if there are uses but none can."""
            texts = []
            for name in self.model.nodes[node].outputs:
                text = self.tensors[name].letter or "_"
                if not inside(self.users[name]):
                    text += "'" if inside(self.carriers[name]) else "!"
                texts.append(text)
            return ",".join(texts)

        def rank(tensor: Tensor) -> tuple[int, int, int, str]:
            """The order in which inputs of a node are listed: results of numbered nodes, numbered tensors from outside,
            other tensors from outside, constants."""
            if tensor.producer in number:
                return 0, number[tensor.producer], tensor.position, ""
            if tensor.name in border:
                return 1, border[tensor.name], 0, ""
            if tensor.source == "activation":
                return 2, tensor.position, 0, self.texts[tensor.producer] if tensor.producer >= 0 else ""
            return 3, 0, 0, tensor.letter

        def ordered(node: int) -> tuple[Read, ...]:
            free = sorted((read for read in self.reads[node] if read.is_free), key=lambda read: rank(read.tensor))
            return (*(read for read in self.reads[node] if not read.is_free), *free)

        def look(node: int) -> tuple[str, str, list[tuple[int, int, int, str]]]:
            return self.texts[node], written(node), [rank(read.tensor) for read in ordered(node)]

        def read_text(read: Read) -> str:
            source, name, letter, producer, position = read.tensor
            if producer in number:
                text = f"%{number[producer]}.{position}" if position else f"%{number[producer]}"
            elif source == "activation":
                text = f"x{border.setdefault(name, len(border))}:{letter}"
            else:
                return "_" if source == "missing" else f"const:{letter}"
            return f"captured {text}" if read.is_captured else text

        reads, lines, exits = list[tuple[Read, ...]](), list[str](), list[tuple[int, int]]()
        for _, level in sorted(levels.items()):
            for node in sorted(level, key=look):
                reads.append(ordered(node))
                results = written(node)
                inputs = ", ".join(map(read_text, reads[-1]))
                lines.append(f"{self.texts[node]}({inputs})->{results}")
                number[node] = len(number)
                exits += [(number[node], k) for k, text in enumerate(results.split(",")) if text.endswith(("!", "'"))]
        return Listing(tuple(number), tuple(reads), tuple(border), tuple(exits), tuple(lines))
