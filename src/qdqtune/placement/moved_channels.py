"""Channels that a Q/DQ model has scaled, read back: else its pairs would say nothing of the float model's values.

Weights keep the largest magnitude of a channel through rounding, so that those of both models tell the factors.
"""

from __future__ import annotations

import numpy as np

from qdqtune.graph.equalization import Factor, Site, factors, sites
from qdqtune.graph.model import Model
from qdqtune.placement.reading import strip_pairs
from qdqtune.types import Array

CLOSE = 0.1
"""How far from a whole number the logarithm of a ratio may be that a power of two has made."""


def moved_channels(float_model: Model, qdq_model: Model) -> tuple[Factor, ...]:
    """The factors by which `qdq_model` has scaled channels of `float_model`; none where weights differ otherwise."""
    plain = strip_pairs(qdq_model)
    found: list[Factor] = []
    for site in sites(float_model):
        exponents = _exponents(float_model, plain, site)
        if any(exponents):
            found += factors(float_model, site, exponents)
    return tuple(found)


def _exponents(before: Model, after: Model, site: Site) -> list[int]:
    unmoved = [0] * site.channels
    made = factors(before, site, unmoved)[0]
    index = after.index_of.get(made.edge.node)
    inputs = () if index is None else after.nodes[index].inputs
    constant = after.constants.get(inputs[made.edge.index]) if made.edge.index < len(inputs) else None
    known = before.constants[made.edge.tensor]
    if constant is None or constant.shape != known.shape or len(made.exponents) != site.channels:
        return unmoved
    one, other = (_largest(c.array(), made.shape) for c in (known, constant))
    filled = (one > 0) & (other > 0)
    steps = np.log2(np.where(filled, one, 1.0)) - np.log2(np.where(filled, other, 1.0))
    whole = np.rint(steps)
    return [int(e) for e in whole] if (np.abs(steps - whole) < CLOSE).all() else unmoved


def _largest(values: Array, shape: tuple[int, ...]) -> Array:
    """The largest magnitudes of channels, which lie along the one axis of a factor's `shape` that is not 1."""
    padded = (1,) * (values.ndim - len(shape)) + shape
    others = tuple(i for i, size in enumerate(padded) if size == 1)
    return np.asarray(np.abs(values.astype(np.float64)).max(axis=others, initial=0.0))
