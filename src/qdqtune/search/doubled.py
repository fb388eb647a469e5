"""Values that an engine would round twice: where it moves a Q from behind a node into the kernels in front of it, pairs
on what that node reads make these kernels run two.

OpenVINO does so with a Concat. Layer reports tell: a layer that does the Q of a tensor, and not the node that makes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from qdqtune.graph.model import Model
from qdqtune.search.costs.attribution import CONVERSION
from qdqtune.types import Edge, Layer, Placement, Trial


def movers(model: Model, history: Iterable[Trial]) -> frozenset[str]:
    """The nodes over which the builds so far have moved a Q into another node's kernel."""
    return frozenset(name for trial in history for layer in trial.layers or () for name in _crossed(model, layer))


def _crossed(model: Model, layer: Layer) -> Iterable[str]:
    if layer.kind == "compute" and not model.index_of.keys().isdisjoint(layer.nodes):
        for match in filter(None, map(CONVERSION.match, layer.nodes)):
            maker = model.maker(match["tensor"]) if match["op"] == "Quantize" else None
            if maker is not None and maker.name not in layer.nodes:
                yield maker.name


def rounded_once(model: Model, placement: Placement, nodes: Collection[str]) -> Placement:
    """A placement without the pairs on what some nodes read, where all that read these nodes have pairs."""
    needless: set[Edge] = set()
    for name in nodes:
        node = model.node(name)
        read = [edge for tensor in node.outputs if tensor for edge in model.edges(tensor)]
        if read and all(edge in placement for edge in read):
            needless.update(edge for edge in node.into if edge in placement)
    return Placement(placement.edges - needless, placement.compressed)
