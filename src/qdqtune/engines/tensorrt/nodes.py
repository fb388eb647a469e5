"""Which ONNX nodes a TensorRT layer covers: the grammar of layer names, and the graph for what the names leave out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx

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
        found, position = [], 0
        for start in starts:
            if start < position:
                continue
            fitting = [e for e in ends if start < e <= start + self._longest and layer[start:e] in self._known]
            if fitting:
                position = max(fitting)
                found.append(self._known[layer[start:position]])
        return tuple(found)


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

    `names` are those of the model.

    Raises:
        BadOption: the layers mention no node of the model, or mostly others.
    """
    graph = _Graph(model, names)
    home = _claimed(graph, layers)
    for number, (name, _) in enumerate(layers):
        if foreign := FOREIGN.search(name):
            home |= dict.fromkeys(graph.between(*foreign.groups(), free=set(graph.order) - set(home)), number)
    folded = graph.constant - set(home)
    folded -= graph.behind(folded, home)
    _absorb(graph, home, folded)
    covered: list[list[str]] = [[] for _ in layers]
    for name in graph.order:
        if name in home:
            covered[home[name]].append(name)
    return [tuple(names) for names in covered], tuple(n for n in graph.order if n not in home)


def _claimed(graph: _Graph, layers: Sequence[tuple[str, Sequence[str]]]) -> dict[str, int]:
    """The layer of each node that one mentions. Of several, the one whose name it is; else the first."""
    home: dict[str, int] = {}
    for number, (layer, names) in enumerate(layers):
        for name in graph.names.mentioned(layer):
            if name in names:
                home.setdefault(name, number)
    for number, (_, names) in enumerate(layers):
        for name in names:
            home.setdefault(name, number)
    named = [names for layer, names in layers if not MADE_UP.match(layer)]
    strangers = sum(not names for names in named)
    if not home or 2 * strangers > len(named):
        raise BadOption(
            "the layer information hardly names a node of the model: it is of another model, or was exported "
            "without --profilingVerbosity=detailed"
        )
    return home


class _Graph:
    """The nodes by name, in graph order, and their neighbours."""

    def __init__(self, model: onnx.ModelProto, names: Names) -> None:
        nodes = names.nodes
        self.order = tuple(nodes)
        self.names = names
        self.operators = {name: n.op_type for name, n in nodes.items()}
        maker = {tensor: name for name, n in nodes.items() for tensor in n.output if tensor}
        self.before: dict[str, list[str]] = {}
        self.after: dict[str, list[str]] = {name: [] for name in nodes}
        self.constant: set[str] = set()
        fixed = {t.name for t in model.graph.initializer}
        for name, node in nodes.items():
            read = [t for t in node.input if t] + [t for body in bodies(node) for t in sorted(captured(body))]
            self.before[name] = list(dict.fromkeys(maker[t] for t in read if t in maker))
            for earlier in self.before[name]:
                self.after[earlier].append(name)
            if all(t in fixed for t in read) and not node.op_type.startswith("Random"):
                self.constant.add(name)
                fixed.update(node.output)

    def between(self, first: str, last: str, *, free: Collection[str]) -> set[str]:
        """The nodes of `free` on paths from `first` to `last`, names that need not be nodes."""
        begin, end = self.names.mentioned(first), self.names.mentioned(last)
        return (_reached(begin, self.after) & _reached(end, self.before)).intersection(free)

    def behind(self, nodes: Collection[str], home: dict[str, int]) -> set[str]:
        """Constant nodes that follow one with a home: they are in the same layer (a DQ of weights behind its Q)."""
        found = set()
        for name in self.order:
            owner = next((home[b] for b in self.before[name] if b in self.constant and b in home), None)
            if name in nodes and owner is not None:
                home[name] = owner
                found.add(name)
        return found


def _reached(start: Iterable[str], neighbours: Mapping[str, Sequence[str]]) -> set[str]:
    seen, stack = set(start), list(start)
    while stack:
        fresh = set(neighbours[stack.pop()]) - seen
        seen |= fresh
        stack.extend(fresh)
    return seen


def _absorb(graph: _Graph, home: dict[str, int], folded: Collection[str]) -> None:
    """Give every node that is left to a neighbour's layer.

    TensorRT moves a DQ forward, into what reads it; everything else went into what made its input. Where that side has
    no layer, or is the model's border, the other side has it.
    """
    left = [n for n in graph.order if n not in home and n not in folded]
    eager = True
    while left:
        before = len(left)
        for name in left:
            if not eager or graph.operators[name] != "DequantizeLinear":
                _join(name, graph.before[name], home)
        for name in reversed(left):
            if name not in home and (not eager or graph.operators[name] == "DequantizeLinear"):
                _join(name, graph.after[name], home)
        left = [n for n in left if n not in home]
        if len(left) == before and not eager:
            break
        eager = eager and len(left) < before


def _join(name: str, neighbours: Iterable[str], home: dict[str, int]) -> None:
    owner = next((home[n] for n in neighbours if n in home), None)
    if owner is not None:
        home.setdefault(name, owner)
