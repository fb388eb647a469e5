"""Which ONNX nodes a TensorRT layer covers: those in its name, and those between them in the graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

import onnx

from qdqtune.engines.coverage import Claim, cover
from qdqtune.errors import BadOption
from qdqtune.graph.loading import node_names
from qdqtune.graph.model import bodies, captured

BREAK = re.compile(r" \+ | \|\| |, |\.\.\.|[()\[\]{}]|_myl\d+_\d+")
FOREIGN = re.compile(r"\{ForeignNode\[(.*)\.\.\.(.*)\]\}")
UNNAMED = re.compile(r"\(Unnamed Layer\* \d+\) \[\w+\]")
COPY_NODE = "Reformatting CopyNode for "
MADE_UP = re.compile(
    rf"{COPY_NODE}|__my[le]|.*\(Unnamed Layer\* |"
    r"(copied_)?(un)?squeeze_(node_)?after_|(re)?shape_after_|transpose_(before|after)_"
)
"""Beginnings of the names of layers that TensorRT adds itself."""


class NodeNames:
    """Finds the names of a model's nodes, as `loading.load` gives them, in the names of TensorRT's layers.

    TensorRT's parser calls a node without a name `node_of_` and its first output. Such names are found for every node,
    since a report may belong to a file whose nodes had no names.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        names = node_names(graph)
        self.nodes = dict(zip(names, graph.node, strict=True))
        parsed = {f"node_of_{node.output[0]}": name for name, node in self.nodes.items() if node.output}
        self._known = parsed | {name: name for name in names}
        self._longest = max(map(len, self._known), default=0)

    def known(self, name: str) -> str | None:
        """The name of the node that TensorRT calls `name`; None if there is no such node."""
        return self._known.get(name)

    def mentioned(self, layer: str) -> tuple[str, ...]:
        """The nodes in a layer's name. A node's name may hold separators: the longest name that fits is taken."""
        breaks = list(BREAK.finditer(layer))
        starts = [0, *(b.end() for b in breaks)]
        ends = [*(b.start() for b in breaks), len(layer)]
        names, position = [], 0
        for start in starts:
            if start < position:
                continue
            fitting = [e for e in ends if start < e <= start + self._longest and layer[start:e] in self._known]
            if fitting:
                position = max(fitting)
                names.append(self._known[layer[start:position]])
        return tuple(names)


def mentioned(layer: str) -> tuple[str, ...]:
    """The names in a layer's name: `a + b`, `PWN(PWN(a), b)`, `a || b`, `{ForeignNode[a...b]}`, `a_myl0_2`.

    This is for reports without a model, so names of constants (`conv1.weight`) are among them.
    """
    if foreign := FOREIGN.fullmatch(layer):
        return tuple(dict.fromkeys(part for end in foreign.groups() for part in mentioned(end)))
    parts = []
    for part in re.split(r" \+ | \|\| |, ", UNNAMED.sub("(Unnamed Layer* ", layer)):
        plain = re.sub(r"_myl\d+_\d+$", "", part)
        while plain.startswith("PWN("):
            plain = plain.removeprefix("PWN(")
        while plain.endswith(")") and plain.count(")") > plain.count("("):
            plain = plain.removesuffix(")")
        if plain and not MADE_UP.match(plain):
            parts.append(plain)
    return tuple(parts)


def assign(
    model: onnx.ModelProto, names: NodeNames, layers: Sequence[tuple[str, Sequence[str]]]
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The nodes of each layer, and the nodes that were folded. Every node of the model is in one of these.

    `names` are those of the model, `layers` the name of each layer with the nodes that it mentions. Nodes that no layer
    mentions are assigned by `coverage.cover`: TensorRT, too, fuses a DQ with its reader and other nodes with the
    producer of their input.

    Raises:
        BadOption: no layer mentions a node of the model, or most mention none.
    """
    home = _mentioned_in(names, layers)
    for number, (name, _) in enumerate(layers):
        if foreign := FOREIGN.search(name):
            for between in _between(names, *foreign.groups()):
                home.setdefault(between, number)
    claims: list[list[str]] = [[] for _ in layers]
    for name, number in home.items():
        claims[number].append(name)
    named = deepcopy(model.graph)
    for node, name in zip(named.node, names.nodes, strict=True):
        node.name = name
    return cover(named, [Claim(tuple(own)) for own in claims])


def _mentioned_in(names: NodeNames, layers: Sequence[tuple[str, Sequence[str]]]) -> dict[str, int]:
    """The number of the layer for each mentioned node: the first with the node in its name, or else in its metadata."""
    home: dict[str, int] = {}
    for number, (layer, own) in enumerate(layers):
        for name in names.mentioned(layer):
            if name in own:
                home.setdefault(name, number)
    for number, (_, own) in enumerate(layers):
        for name in own:
            home.setdefault(name, number)
    named = [own for layer, own in layers if not MADE_UP.match(layer)]
    if not home or 2 * sum(not own for own in named) > len(named):
        raise BadOption(
            "the layer information hardly names a node of the model: it is of another model, or was exported "
            "without --profilingVerbosity=detailed"
        )
    return home


def _between(names: NodeNames, first: str, last: str) -> set[str]:
    """The nodes on paths from a node in the name `first` to one in the name `last`."""
    maker = {tensor: name for name, node in names.nodes.items() for tensor in node.output if tensor}
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {name: [] for name in names.nodes}
    for name, node in names.nodes.items():
        read = {*node.input, *(tensor for body in bodies(node) for tensor in captured(body))}
        before[name] = [maker[tensor] for tensor in read if tensor in maker]
        for earlier in before[name]:
            after[earlier].append(name)
    return _reached(names.mentioned(first), after) & _reached(names.mentioned(last), before)


def _reached(start: Iterable[str], neighbours: Mapping[str, Sequence[str]]) -> set[str]:
    """The names that can be reached from `start` along `neighbours`; `start` is included."""
    seen, stack = set(start), list(start)
    while stack:
        fresh = set(neighbours[stack.pop()]) - seen
        seen |= fresh
        stack.extend(fresh)
    return seen
