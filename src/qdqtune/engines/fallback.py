"""What an execution provider leaves to another: the nodes, the reasons, and the tensors that are copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from qdqtune.graph.model import Model
from qdqtune.types import Layer

FEW = 3
"""The most nodes that a line names."""


@dataclass(frozen=True)
class Left:
    """A node that runs elsewhere, and why. One that ONNX Runtime has added has a name that the file does not have."""

    node: str
    reason: str


@dataclass(frozen=True)
class Fallback:
    """The nodes that run elsewhere, of `nodes` that run, and their `borders`: the tensors that are copied between these
    and the provider. `ms` is the time of these nodes and of the copies; None where no layer has a time."""

    nodes: int
    left: tuple[Left, ...]
    borders: tuple[str, ...]
    ms: float | None

    def in_words(self) -> str:
        """A line: how many nodes, at what cost, and the first of them with their reasons."""
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
    """What the layers of a provider say about where the nodes of `model` run. A node that no layer names, such as one
    of constants, is on the side of what it reads."""
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
