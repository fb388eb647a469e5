"""Canonical orders: the nodes of a part of the graph, numbered by structure alone, without names and shapes.

The numbers depend on operators, attributes, what each input reads and types of constants; not on names, shapes or the
order of commutative inputs. They come from three passes of Weisfeiler-Lehman labels (what follows a node, what precedes
it, what follows it again) and a sort by depth. Nodes that are still equal are told apart by their surroundings in the
whole model, and only then by graph order.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
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
    its type, for constants with their rank.
    """

    source: Literal["missing", "constant", "activation"]
    name: str
    letter: str
    producer: int = -1
    position: int = 0


class Read(NamedTuple):
    """An input of a node, or a tensor that its bodies capture. Where it `carries`, a Q/DQ pair can stand.

    `role` tells the inputs of a node apart: the number of each, or FREE in a commutative operator and for captured
    tensors.
    """

    tensor: Tensor
    role: int
    carries: bool
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

    `nodes` are node indices; `reads[k]` is what the k-th reads in the order of the file, `orders[k]` its canonical
    order. `borders` are the activations that enter, `exits` the outputs that leave, as (canonical node number, output
    number). `lines` describe all of it as text: if they are equal, equal numbers correspond.
    """

    nodes: tuple[int, ...]
    reads: tuple[tuple[Read, ...], ...]
    orders: tuple[Sequence[int], ...]
    borders: tuple[str, ...]
    exits: tuple[tuple[int, int], ...]
    lines: tuple[str, ...]


class Structure:
    """The nodes of a model as they enter signatures, made once per model in linear time, with canonical orders of its
    parts."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.texts = tuple(_written(n, model) for n in model.nodes)
        self.hash = cache(lambda text: int(_digest(text.encode()), 16))
        letter = self.type_letter
        self.tensors = {t: Tensor("activation", t, letter(t), -1, i) for i, t in enumerate(model.inputs)}
        for node in model.nodes:
            self.tensors |= {t: Tensor("activation", t, letter(t), node.index, i) for i, t in enumerate(node.outputs)}
        for t, constant in model.constants.items():
            self.tensors[t] = Tensor("constant", t, f"{letter(t)}{len(constant.shape)}")
        self.tensors[""] = Tensor("missing", "", "")
        self.users = defaultdict[str, list[int]](list)
        self.carriers = defaultdict[str, list[int]](list)
        """By tensor those of its users (GRAPH is the graph) where a Q/DQ pair can stand."""
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
            reads.append(Read(tensor, FREE if is_free or is_captured else slot, carries, is_captured))
            if name:
                self._use(name, node.index, carries=carries)
        return tuple(reads)

    def _use(self, tensor: str, user: int, *, carries: bool) -> None:
        self.users[tensor].append(user)
        if carries:
            self.carriers[tensor].append(user)

    def type_letter(self, tensor: str) -> str:
        """The class of a tensor's type: `f` float that can be quantized, `d` double, `i`, `b`, `s`, or `?`."""
        info = self.model.tensors.get(tensor)
        if info is None:
            return "?"
        return "f" if info.is_float else TYPE_LETTERS.get(info.dtype, "i")

    @cached_property
    def fingerprints(self) -> Mapping[int, int]:
        """A label of each node within the whole model: it distinguishes nodes that look alike inside their own
        region."""
        return _Part(self, [range(len(self.model.nodes))]).labels

    def listing(self, parts: Sequence[Sequence[int]]) -> Listing:
        """The canonical order of the nodes of `parts`; how they are divided into parts is structure as well."""
        return _Part(self, parts).listing()


_Rank = tuple[int, int, int, int, int]
"""The sort key of inputs that may change places: group, label, surroundings, producer, position."""


class _Part:
    """Some nodes of the model, which get labels, and from these numbers, level by level; what a node reads is numbered
    before the node."""

    def __init__(self, structure: Structure, parts: Sequence[Sequence[int]]) -> None:
        self._structure, self._reads = structure, structure.reads
        self._part_of: dict[int, int] = {}
        for number, nodes in enumerate(parts):
            self._part_of |= dict.fromkeys(nodes, number)
        self._order = sorted(self._part_of)  # graph order is topological
        self._inside = set(self._part_of).issuperset
        self._results = {n: self._results_of(n) for n in self._order}
        self._number: dict[int, int] = {}
        self._border: dict[str, int] = {}

    def _results_of(self, node: int) -> str:
        """How the listing writes a node's outputs: type, and ! (a use outside can carry a pair) or ' (none can)."""
        texts = []
        for name in self._structure.model.nodes[node].outputs:
            text = self._structure.tensors[name].letter or "_"
            if not self._inside(self._structure.users[name]):
                text += "'" if self._inside(self._structure.carriers[name]) else "!"
            texts.append(text)
        return ",".join(texts)

    # ------------------------------------------------ labels, on demand: a chain has only one order, and needs none

    @cached_property
    def labels(self) -> Mapping[int, int]:
        """Weisfeiler-Lehman labels of the nodes, equal where structure is equal, in three passes: what follows a node,
        what precedes it, what follows it again."""
        hashed, texts = self._structure.hash, self._structure.texts
        labels = {n: _mix(hashed(texts[n]), hashed(self._results[n])) for n in self._order}
        return self._with_users(self._with_producers(self._with_users(labels)))

    @cached_property
    def _border_labels(self) -> Mapping[str, int]:
        return self._labels_of_borders(self.labels)

    def _with_users(self, labels: Mapping[int, int]) -> dict[int, int]:
        new, below = dict[int, int](), dict.fromkeys(labels, 0)
        for n in reversed(self._order):
            new[n] = _mix(labels[n], below[n])
            for tensor, role, _, _ in self._reads[n]:
                if tensor.producer in below:
                    crosses = self._part_of[tensor.producer] != self._part_of[n]
                    below[tensor.producer] += _mix(new[n], _mix(role, 2 * tensor.position + crosses))
        return new

    def _labels_of_borders(self, labels: Mapping[int, int]) -> dict[str, int]:
        borders: dict[str, int] = {}
        for n in self._order:
            for tensor, role, _, _ in self._reads[n]:
                if tensor.source == "activation" and tensor.producer not in self._part_of:
                    borders[tensor.name] = borders.get(tensor.name, 0) + _mix(labels[n], role)
        return borders

    def _with_producers(self, labels: Mapping[int, int]) -> dict[int, int]:
        """New labels, from the first node to the last: each with the new labels of the node's producers."""
        new, borders = dict[int, int](), self._labels_of_borders(labels)
        for n in self._order:
            above = 0
            for tensor, role, _, _ in self._reads[n]:
                if tensor.producer in new:
                    label = _mix(new[tensor.producer], tensor.position)
                else:
                    kind = self._structure.hash(tensor.source + tensor.letter)
                    label = _mix(borders.get(tensor.name, 0), kind)
                above += _mix(label, role)
            new[n] = _mix(labels[n], above)
        return new

    # ------------------------------------------------ numbers

    def listing(self) -> Listing:
        levels: dict[int, list[int]] = {}
        depth: dict[int, int] = {}
        for n in self._order:
            depth[n] = 1 + max([depth.get(read.tensor.producer, 0) for read in self._reads[n]], default=0)
            levels.setdefault(depth[n], []).append(n)
        orders, lines = list[Sequence[int]](), list[str]()
        exits: list[tuple[int, int]] = []
        for _, level in sorted(levels.items()):
            for node in self._sorted(level):
                orders.append(self._order_of_inputs(node))
                inputs = ", ".join(self._texts_of_inputs(node, orders[-1]))
                lines.append(f"{self._structure.texts[node]}({inputs})->{self._results[node]}")
                number = self._number[node] = len(self._number)
                texts = self._results[node].split(",")
                exits += [(number, k) for k, text in enumerate(texts) if text.endswith(("!", "'"))]
        nodes = tuple(self._number)
        reads = tuple(self._reads[n] for n in nodes)
        return Listing(nodes, reads, tuple(orders), tuple(self._border), tuple(exits), tuple(lines))

    def _sorted(self, level: Sequence[int]) -> Iterator[int]:
        if len(level) == 1:
            yield from level
            return
        for _, alike in groupby(sorted(level, key=self.labels.__getitem__), self.labels.__getitem__):
            nodes = list(alike)
            if len(nodes) > 1:
                prints = self._structure.fingerprints
                nodes.sort(key=lambda n: (self._surroundings(n), prints[n], n))
            yield from nodes

    def _surroundings(self, node: int) -> list[tuple[int, ...]]:
        return [self._rank(self._reads[node][k].tensor)[:3] for k in self._order_of_inputs(node)]

    def _order_of_inputs(self, node: int) -> Sequence[int]:
        """The numbers of a node's inputs, with those that may stand in any order in canonical order."""
        reads = self._reads[node]
        free = [k for k, read in enumerate(reads) if read.role == FREE]  # behind all others
        if len(free) < 2:
            return range(len(reads))
        return (*range(free[0]), *sorted(free, key=lambda k: self._rank(reads[k].tensor)))

    def _rank(self, tensor: Tensor) -> _Rank:
        """Numbered nodes come first, then numbered borders, other borders by label and surroundings, constants."""
        producer, label, surroundings = tensor.producer, 0, 0
        if producer in self._number:
            group, label = 0, self._number[producer]
        elif tensor.name in self._border:
            group, label = 1, self._border[tensor.name]
        elif tensor.source == "activation":
            group, label = 2, self._border_labels[tensor.name]
            surroundings = self._structure.fingerprints[producer] if producer >= 0 else 0
        else:
            group, label = 3, self._structure.hash(tensor.letter)
        return group, label, surroundings, producer, tensor.position

    def _texts_of_inputs(self, node: int, order: Iterable[int]) -> Iterator[str]:
        number, border = self._number, self._border
        for k in order:
            (source, name, letter, producer, position), _, _, is_captured = self._reads[node][k]
            if producer in number:
                text = f"%{number[producer]}.{position}" if position else f"%{number[producer]}"
            elif source == "activation":
                text = f"x{border.setdefault(name, len(border))}:{letter}"
            else:
                yield "_" if source == "missing" else f"const:{letter}"
                continue
            yield f"captured {text}" if is_captured else text


def _mix(a: int, b: int) -> int:
    """A 64-bit hash of two numbers, in this order. Python's own hash is not the same on every platform."""
    x = (a ^ (b * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 31)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 29)
