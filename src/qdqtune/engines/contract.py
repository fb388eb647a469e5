"""What the layers of every engine must tell: for the tests of engines, and for `doctor --qualify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from qdqtune.errors import first_of
from qdqtune.graph.operators import COMPUTE
from qdqtune.types import Layer

STRANGE = 0.1
"""The largest share of the time that rows of a profile may take that fit no layer. Chosen, not measured."""


def wrong_nodes(operators: Mapping[str, str], layers: Sequence[Layer]) -> str:
    """Why the layers do not cover a model, whose nodes are `operators` by name: each node must be in one layer, and
    each product in one that computes. "" if they do."""
    named = Counter(node for layer in layers for node in layer.nodes)
    computed = {node for layer in layers if layer.kind == "compute" for node in layer.nodes}
    wrong = {
        "nodes in no layer": operators.keys() - named.keys(),
        "nodes in several layers": {node for node, count in named.items() if count > 1},
        "layers with names that are no nodes": named.keys() - operators.keys(),
        "products outside of layers that compute": {n for n, op in operators.items() if op in COMPUTE} - computed,
    }
    return next((f"{what}: {first_of(sorted(names))}" for what, names in wrong.items() if names), "")


def has_sensible_times(layers: Sequence[Layer]) -> bool:
    """Whether each layer that runs has a time, and next to none of it is in rows that fit no layer."""
    times = [layer.time_ms for layer in layers if layer.kind != "folded"]
    known = [time for time in times if time is not None]
    strange = sum(layer.time_ms or 0.0 for layer in layers if layer.kind == "unknown")
    is_whole = len(known) == len(times) and min(known) >= 0 and 0 < sum(known) < inf
    return is_whole and strange <= STRANGE * sum(known)
