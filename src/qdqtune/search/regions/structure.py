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
from functools import cached_property
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


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _written(node: Node, model: Model) -> str:
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
    attributes = [
        f"{a.name}={_attribute(onnx.helper.get_attribute_value(a))}"
        for a in sorted(node.attribute, key=lambda a: a.name)
    ]
    return node.op_type + (f"{{{','.join(attributes)}}}" if attributes else "")


@dataclass(frozen=True, eq=False)
class Listing:
    """A part of the graph in canonical order.

    `nodes` are node indices; `inputs[k]` are the inputs of the k-th, `orders[k]` their canonical order. `borders` are
    the activations that enter, `exits` the outputs that leave, as (canonical node number, output number). `lines`
    describe all of it as text: if they are equal, equal numbers correspond.
    """

    nodes: tuple[int, ...]
    inputs: tuple[Inputs, ...]
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
        self._hashes: dict[str, int] = {}
        users, carriers = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        carries = []
        for node in model.nodes:
            at_inputs = [can_carry(model, t, node.index, slot) for slot, t in enumerate(node.inputs)]
            carries.append((*at_inputs, *(False for _ in node.captures)))
            for tensor, carrying in zip((*node.inputs, *node.captures), carries[-1], strict=True):
                users[tensor].append(node.index)
                if carrying:
                    carriers[tensor].append(node.index)
        for tensor in model.outputs:
            users[tensor].append(GRAPH)
            if can_carry(model, tensor, GRAPH, 0):
                carriers[tensor].append(GRAPH)
        letter = self.type_letter
        self.tensors = {t: Tensor("activation", t, letter(t), -1, i) for i, t in enumerate(model.inputs)}
        """All tensors by name, and MISSING by the empty name."""
        for node in model.nodes:
            for i, t in enumerate(node.outputs):
                uses = tuple(users[t]), tuple(carriers[t])
                self.tensors[t] = Tensor("activation", t, letter(t), node.index, i, *uses)
        for t, constant in model.constants.items():
            self.tensors[t] = Tensor("constant", t, f"{letter(t)}{len(constant.shape)}")
        self.tensors[""] = MISSING
        self.inputs = tuple(map(self._inputs, model.nodes, carries))

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
        if text not in self._hashes:
            self._hashes[text] = int(_digest(text.encode()), 16)
        return self._hashes[text]

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

_Producers = Sequence[tuple[int, Sequence[int]]]
"""The producers inside a part that a node reads, by the role of the input (one for all commutative inputs)."""


class _Part:
    """Some nodes of the model, which get labels, and from these numbers, level by level; what a node reads is numbered
    before the node."""

    def __init__(self, structure: Structure, parts: Sequence[Sequence[int]]) -> None:
        self._structure, self._inputs = structure, structure.inputs
        self._part_of = {n: p for p, nodes in enumerate(parts) for n in nodes}
        self._order = sorted(self._part_of)  # graph order is topological
        self._inside = set(self._part_of).issuperset
        self._results = {n: self._results_of(n) for n in self._order}
        self._number: dict[int, int] = {}
        self._border: dict[str, int] = {}

    def _results_of(self, node: int) -> str:
        """How the listing writes a node's outputs: type, and ! (a use outside can carry a pair) or ' (none can)."""
        texts = []
        for name in self._structure.model.nodes[node].outputs:
            tensor = self._structure.tensors[name]
            mark = "" if self._inside(tensor.users) else "'" if self._inside(tensor.carriers) else "!"
            texts.append((tensor.letter or "_") + mark)
        return ",".join(texts)

    # ------------------------------------------------ labels, on demand: a chain has only one order, and needs none

    @cached_property
    def labels(self) -> Mapping[int, int]:
        """Weisfeiler-Lehman labels of the nodes, equal where structure is equal, in three passes: what follows a node,
        what precedes it, what follows it again."""
        hashed, texts = self._structure.hash, self._structure.texts
        producers = {n: self._producers_by_role(n) for n in self._order}
        labels = {n: _mix(hashed(texts[n]), hashed(self._results[n])) for n in self._order}
        labels = self._with_producers(self._with_users(producers, labels))
        return self._with_users(producers, labels)

    @cached_property
    def _border_labels(self) -> Mapping[str, int]:
        return self._labels_of_borders(self.labels)

    def _producers_by_role(self, node: int) -> _Producers:
        producers_of: dict[tuple[int, int], list[int]] = {}
        inputs = self._inputs[node]
        for tensor, role in zip(inputs.tensors, inputs.roles, strict=True):
            home = self._part_of.get(tensor.producer)
            if home is not None:
                key = role, 2 * tensor.position + (home != self._part_of[node])
                producers_of.setdefault(key, []).append(tensor.producer)
        return [(_mix(*role), producers) for role, producers in producers_of.items()]

    def _with_users(self, producers: Mapping[int, _Producers], labels: Mapping[int, int]) -> dict[int, int]:
        """New labels, from the last node to the first: each with the new labels of the node's users."""
        new, below = dict[int, int](), dict.fromkeys(labels, 0)
        for n in reversed(self._order):
            new[n] = _mix(labels[n], below[n])
            for role, read in producers[n]:
                label = _mix(new[n], role)
                for producer in read:
                    below[producer] += label
        return new

    def _labels_of_borders(self, labels: Mapping[int, int]) -> dict[str, int]:
        """Labels of the activations that enter the part: each with the labels of its uses inside."""
        borders: dict[str, int] = {}
        for n in self._order:
            for tensor, role in zip(self._inputs[n].tensors, self._inputs[n].roles, strict=True):
                if tensor.source == "activation" and tensor.producer not in self._part_of:
                    borders[tensor.name] = borders.get(tensor.name, 0) + _mix(labels[n], role)
        return borders

    def _with_producers(self, labels: Mapping[int, int]) -> dict[int, int]:
        """New labels, from the first node to the last: each with the new labels of the node's producers."""
        new, borders = dict[int, int](), self._labels_of_borders(labels)
        for n in self._order:
            above = 0
            for tensor, role in zip(self._inputs[n].tensors, self._inputs[n].roles, strict=True):
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
            depth[n] = 1 + max([depth.get(t.producer, 0) for t in self._inputs[n].tensors], default=0)
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
        inputs_of = tuple(self._inputs[n] for n in nodes)
        return Listing(nodes, inputs_of, tuple(orders), tuple(self._border), tuple(exits), tuple(lines))

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
        tensors = self._inputs[node].tensors
        return [self._rank(tensors[k])[:3] for k in self._order_of_inputs(node)]

    def _order_of_inputs(self, node: int) -> Sequence[int]:
        """The numbers of a node's inputs, with those that may stand in any order in canonical order."""
        tensors, roles, _, _ = self._inputs[node]
        fixed, free = range(len(roles) - roles.count(FREE)), range(len(roles) - roles.count(FREE), len(roles))
        return (*fixed, *sorted(free, key=lambda k: self._rank(tensors[k]))) if len(free) > 1 else range(len(roles))

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
        (tensors, _, _, captured), number, border = self._inputs[node], self._number, self._border
        for k in order:
            source, name, letter, producer, position, _, _ = tensors[k]
            if producer in number:
                text = f"%{number[producer]}.{position}" if position else f"%{number[producer]}"
            elif source == "activation":
                text = f"x{border.setdefault(name, len(border))}:{letter}"
            else:
                yield "_" if source == "missing" else f"const:{letter}"
                continue
            yield f"captured {text}" if k >= captured else text


def _mix(a: int, b: int) -> int:
    """A 64-bit hash of two numbers, in this order. Python's own hash is not the same on every platform."""
    x = (a ^ (b * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 31)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 29)
