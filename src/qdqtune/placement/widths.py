"""How many bits the tensors of a placement have.

A node writes as many bits as it reads. Where a reader of a tensor wants other bits, a DequantizeLinear of the one type
and a QuantizeLinear of the other convert it; engines make one operator of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import is_float
from qdqtune.placement.possible import weight_role
from qdqtune.types import Edge, Placement

NO_WIDE = "{} has no 16 bits: pairs of 16 bits have 8 here"
"""What users are told of a placement with 16 bits on an engine without."""


def wide_tensors(model: Model, placement: Placement) -> frozenset[str]:
    """The activations with a pair that are stored in 16 bits: those of nodes that read 16 bits, if only through values
    without a pair; and what comes as floats and has a reader in 16 bits."""
    if not placement.wide:
        return frozenset()
    reads: dict[str, bool | None] = {}
    for node in model.nodes:
        bits = _bits_read(model, placement, node, reads)
        reads |= dict.fromkeys(filter(None, node.outputs), bits)
    stored = {e.tensor for e in placement.edges} - model.constants.keys()
    wanted = {e.tensor for e in placement.wide}
    return frozenset(t for t in stored if (t in wanted if (bits := reads.get(t)) is None else bits))


def wide_weights(model: Model, placement: Placement) -> frozenset[str]:
    """The weights that are stored in 16 bits."""
    constants = (edge for edge in placement.wide if edge.tensor in model.constants)
    return frozenset(edge.tensor for edge in constants if weight_role(model, edge) is not None)


def computable(model: Model, placement: Placement) -> Placement:
    """The placement with 8 bits for weights whose node reads no activation in 16: engines have no such kernels."""
    wide = {e.node for e in placement.wide if e.tensor not in model.constants}
    weights = wide_weights(model, placement)
    alone = frozenset(e for e in placement.wide if e.tensor in weights and e.node not in wide)
    return replace(placement, wide=placement.wide - alone) if alone else placement


def _bits_read(model: Model, placement: Placement, node: Node, reads: dict[str, bool | None]) -> bool | None:
    """Whether a node reads 16 bits; None if it reads floats only. `reads` has the same for the maker of each tensor."""
    activations = [e for e in node.into if e.tensor not in model.constants and is_float(model, e.tensor)]
    paired = [e in placement.wide for e in activations if e in placement.edges]
    known: Iterable[bool | None] = paired or (reads.get(e.tensor) for e in activations)
    found = [bits for bits in known if bits is not None]
    return any(found) if found else None


def conversions(model: Model, placement: Placement, stored: frozenset[str]) -> frozenset[Edge]:
    """The edges that are read in other bits than their tensor is `stored` in. A graph output is given as stored."""
    if not placement.wide:
        return frozenset()
    return frozenset(
        e
        for e in placement.edges
        if not e.is_graph_output and e.tensor not in model.constants and (e in placement.wide) != (e.tensor in stored)
    )
