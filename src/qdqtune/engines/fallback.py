"""Which nodes an execution provider leaves to another (the CPU, say), why, and the tensors copied between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from qdqtune.graph.model import Model
from qdqtune.types import Layer

FEW = 3
"""The most nodes that a message names."""


@dataclass(frozen=True)
class Left:
    """A node that the provider leaves to another, and why. Nodes that ONNX Runtime inserted are not in the file."""

    node: str
    reason: str


@dataclass(frozen=True)
class Fallback:
    """The nodes that another provider runs (`left`), of `nodes` in all. `borders` are the tensors copied between the
    two, `ms` the time of these nodes and of the copies, None if no layer has a time."""

    nodes: int
    left: tuple[Left, ...]
    borders: tuple[str, ...]
    ms: float | None

    def in_words(self) -> str:
        """One line: how many nodes, at what cost, and the reasons with the first node of each."""
        if not self.nodes:
            return "where the nodes run is not known: the engine gave no layers"
        if not self.left:
            return f"all {self.nodes} nodes run on the provider"
        reasons = Counter(left.reason for left in self.left)
        first = {left.reason: left.node for left in reversed(self.left)}
        told = [f"{first[why]}{f' and {n - 1} more' * (n > 1)} {why}" for why, n in reasons.items()]
        more = f"; {len(told) - FEW} more reasons" if len(told) > FEW else ""
        cost = f"{len(self.borders)} border{'s' * (len(self.borders) != 1)}"
        cost += "" if self.ms is None else f", {self.ms:.3g} ms there and in copies"
        return f"{len(self.left)} of {self.nodes} nodes run elsewhere, {cost}: {'; '.join(told[:FEW])}{more}"


def fallback(model: Model, layers: Sequence[Layer]) -> Fallback:
    """Find out from a provider's layer report which nodes of `model` another one runs. A node that no layer names, such
    as one that computes constants, counts as running where its inputs come from."""
    ran = [x for x in layers if x.kind not in ("folded", "unknown", "copy") and (x.nodes or x.kind != "reformat")]
    side = dict[str, bool]()
    for layer in ran:
        side |= dict.fromkeys(layer.nodes, bool(layer.elsewhere))
    left = list[Left]()
    for layer in (layer for layer in ran if layer.elsewhere):
        for name in layer.nodes or (layer.name,):
            left.append(Left(name, layer.elsewhere))
    crossed = dict[str, None]()
    for node in model.nodes:
        for tensor in node.inputs:
            maker = model.maker(tensor)
            if maker is None:
                continue
            here, there = side.setdefault(node.name, side.get(maker.name, False)), side.get(maker.name, False)
            if here != there:
                crossed[tensor] = None
    times = [x.time_ms for x in layers if x.elsewhere or x.kind == "copy"]
    has_times = any(layer.time_ms is not None for layer in ran)
    count = sum(len(layer.nodes) or 1 for layer in ran)
    return Fallback(count, tuple(left), tuple(crossed), sum(t or 0.0 for t in times) if has_times else None)
