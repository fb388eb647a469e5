"""Which nodes an engine runs together: groups from its own layer report, or from one that TensorRT wrote elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import onnx

from qdqtune.engines.tensorrt.report import read_report
from qdqtune.errors import BadOption
from qdqtune.graph.model import Model
from qdqtune.search.costs.units import Group, usual_groups
from qdqtune.types import Edge, Layer


@dataclass(frozen=True)
class Grouping:
    """Every node of a model once: in a group, or among those that the engine computes in advance.

    `nameless` are layers that name no node of the model, `origin` says for people where the groups come from.
    """

    groups: tuple[Group, ...]
    folded: Group
    nameless: tuple[str, ...]
    origin: str

    def lines(self) -> list[str]:
        """The whole of it for a log."""
        head = f"{len(self.groups)} groups {self.origin}"
        groups = [f"  {' + '.join(group)}" for group in self.groups]
        folded = [f"{len(self.folded)} nodes are computed in advance: {', '.join(self.folded)}"] if self.folded else []
        nameless = [f"layer {name!r} names no node of the model" for name in self.nameless]
        return [head, *groups, *folded, *nameless]


def from_layers(model: Model, layers: Sequence[Layer], origin: str) -> Grouping:
    """The nodes of each layer as a group. A node that two layers name is the first one's; one that none does stands
    alone."""
    taken: set[str] = set()
    groups: list[Group] = []
    folded: list[str] = []
    nameless = []
    for layer in layers:
        own = [name for name in dict.fromkeys(layer.nodes) if name in model.index_of]
        fresh = tuple(sorted(set(own) - taken, key=model.index_of.__getitem__))
        taken.update(fresh)
        if layer.kind == "folded":
            folded += fresh
        elif fresh:
            groups.append(fresh)
        if not own:
            nameless.append(layer.name)
    groups += [(node.name,) for node in model.nodes if node.name not in taken]
    groups.sort(key=lambda group: model.index_of[group[0]])
    return Grouping(tuple(groups), tuple(folded), tuple(nameless), origin)


def from_file(model: Model, path: Path) -> Grouping:
    """The groups of a graph.json, as trtexec's --exportLayerInfo writes it.

    Raises:
        BadOption: it cannot be read, is cut short, or is of another model.
    """
    try:
        layers = read_report(path, None, _named(model))
    except BadOption as error:
        raise BadOption(f"--graph-json {path}: {error}") from error
    return from_layers(model, layers, f"from {path.name}")


def by_rules(model: Model, possible: frozenset[Edge]) -> Grouping:
    """Compute operators with what engines usually fuse into them: for engines that report no layers."""
    layers = [Layer(group[0], tuple(group), "", None, "compute") for group in usual_groups(model, possible)]
    return from_layers(model, layers, "as engines usually fuse, since this one reports no layers")


def _named(model: Model) -> onnx.ModelProto:
    """The graph with a name for each constant, as what reads a report asks for."""
    proto = deepcopy(model.proto)
    for name in model.large:
        proto.graph.initializer.add(name=name)
    return proto
