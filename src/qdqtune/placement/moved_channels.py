"""Channels that a Q/DQ model has scaled, read back: else its pairs would say nothing of the float model's values.

Weights keep the largest magnitude of a channel through rounding, so that those of both models tell the factors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qdqtune.calibration.equalization import Factor, Site, factors, sites
from qdqtune.graph.model import Constant, Model
from qdqtune.placement.reading import strip_pairs
from qdqtune.types import Array

CLOSE = 0.1
"""How far from a whole number the logarithm of a ratio may be that a power of two has made."""


def moved_channels(float_model: Model, qdq_model: Model) -> tuple[Factor, ...]:
    """The factors by which `qdq_model` has scaled channels of `float_model`; none where weights differ otherwise.

    What was moved away on one side is there on the other: where most constants of a site say otherwise, one of them is
    wrong, and nothing has moved.
    """
    plain = strip_pairs(qdq_model)
    found: list[tuple[Factor, ...]] = []
    for site in sites(float_model):
        exponents = _exponents(float_model, plain, site)
        if any(exponents):
            found.append(tuple(factors(float_model, site, exponents)))
    every = [factor for of_site in found for factor in of_site]
    agreeing = (f for f in found if 2 * sum(_agrees(float_model, plain, one, every) for one in f) > len(f))
    return tuple(factor for of_site in agreeing for factor in of_site)


def _agrees(before: Model, after: Model, factor: Factor, every: Sequence[Factor]) -> bool:
    """Whether a constant is nearer to what it should be with its factor than without, beside those of other sites."""
    constant, known = _at(after, factor), before.constants[factor.edge.tensor]
    if constant is None or constant.shape != known.shape:
        return False
    values, scaled = constant.array().astype(np.float64), known.array().astype(np.float64)
    for one in every:
        scaled = scaled * one.array() if one.edge == factor.edge else scaled
    off = [float(np.abs(values - expected).sum()) for expected in (scaled, scaled / factor.array())]
    return off[0] <= off[1]


def _at(model: Model, factor: Factor) -> Constant | None:
    """The constant that a model has where the factor belongs."""
    index = model.index_of.get(factor.edge.node)
    inputs = () if index is None else model.nodes[index].inputs
    return model.constants.get(inputs[factor.edge.index]) if factor.edge.index < len(inputs) else None


def _exponents(before: Model, after: Model, site: Site) -> list[int]:
    unmoved = [0] * site.channels
    made = factors(before, site, unmoved)[0]
    constant = _at(after, made)
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
