"""Which ONNX nodes a TensorRT layer covers: the grammar of layer names, and the graph for what the names leave out."""

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
"""Beginnings of names that TensorRT gives to what it adds itself."""


class Names:
    """The names of a model's nodes, as `loading.load` has them, to be found in what TensorRT calls its layers.

    Its parser calls a node without a name `node_of_` and the node's first output. That is understood for every node,
    since a report may be that of a file whose nodes had no names before it was loaded.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        names = node_names(graph)
        self.nodes = dict(zip(names, graph.node, strict=True))
        parsed = {f"node_of_{node.output[0]}": name for name, node in self.nodes.items() if node.output}
        self._known = parsed | {name: name for name in names}
        self._longest = max(map(len, self._known), default=0)

    def known(self, name: str) -> str | None:
        """The name of the node that TensorRT calls `name`."""
        return self._known.get(name)

    def mentioned(self, layer: str) -> tuple[str, ...]:
        """The nodes in a layer's name. Node names may hold anything of the grammar: the longest that fits is taken."""
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
    """What a layer's name mentions: `a + b`, `PWN(PWN(a), b)`, `a || b`, `{ForeignNode[a...b]}`, `a_myl0_2`.

    Without the model's names that is all that is left of it after division, constants (`conv1.weight`) included.
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
    model: onnx.ModelProto, names: Names, layers: Sequence[tuple[str, Sequence[str]]]
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Every node of the model in one of the layers (name, nodes that it mentions), and the nodes that were folded.

    `names` are those of the model. What no layer mentions is `coverage`'s to find: TensorRT, too, moves a DQ forward,
    into what reads it, and fuses everything else with what makes its input.

    Raises:
        BadOption: the layers mention no node of the model, or mostly others.
    """
    home = _claimed(names, layers)
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


def _claimed(names: Names, layers: Sequence[tuple[str, Sequence[str]]]) -> dict[str, int]:
    """The layer of each node that one mentions. Of several, the one whose name it is; else the first."""
    home: dict[str, int] = {}
    for number, (layer, own) in enumerate(layers):
        for name in names.mentioned(layer):
            if name in own:
                home.setdefault(name, number)
    for number, (_, own) in enumerate(layers):
        for name in own:
            home.setdefault(name, number)
    named = [own for layer, own in layers if not MADE_UP.match(layer)]
    strangers = sum(not own for own in named)
    if not home or 2 * strangers > len(named):
        raise BadOption(
            "the layer information hardly names a node of the model: it is of another model, or was exported "
            "without --profilingVerbosity=detailed"
        )
    return home


def _between(names: Names, first: str, last: str) -> set[str]:
    """The nodes on paths from `first` to `last`, names that need not be nodes."""
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
    seen, stack = set(start), list(start)
    while stack:
        fresh = set(neighbours[stack.pop()]) - seen
        seen |= fresh
        stack.extend(fresh)
    return seen
