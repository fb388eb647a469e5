"""How far the channels of activations are moved into the weights behind them, so that one scale serves all of them.

After Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv 1906.04721), for
convolutions, and Xiao et al., "SmoothQuant" (arXiv 2211.10438), for products behind a LayerNormalization. Weights have
a scale for each output channel, so that a producer loses nothing and neither does a depthwise reader, whose channels
are made alike; for all others it is

    s_j = max|X_j| ^ 1/2 / max|W_j| ^ 1/2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx
from onnx import helper

from qdqtune.calibration.observe import outputs_on, with_outputs
from qdqtune.graph.equalization import Factor, Site, factors, largest_weights
from qdqtune.graph.model import Model
from qdqtune.types import Array, Sample

SHARE = 0.5
"""How much of what is uneven the weights take."""

LARGEST = 8
"""Channels are moved by 2^8 at most."""


def equalizing(model: Model, found: Sequence[Site], samples: Iterable[Sample]) -> tuple[Factor, ...]:
    """The factors that make channels alike, as far as samples show them; none where they are already."""
    largest = _largest_activations(model, found, samples)
    moved = [(site, _exponents(model, site, largest[site.tensor])) for site in found]
    return tuple(factor for site, by in moved if any(by) for factor in factors(model, site, by))


def _exponents(model: Model, site: Site, activations: Array) -> list[int]:
    """log2(s), rounded, less its median; 0 of channels that are always 0."""
    weights = largest_weights(model, site)
    with np.errstate(divide="ignore"):
        logarithms = np.log2(activations)
        wanted = SHARE * logarithms - (1 - SHARE) * np.log2(weights) if weights.any() else logarithms
    known = np.isfinite(wanted)
    if not known.any():
        return [0] * site.channels
    rounded = np.rint(np.where(known, wanted - np.median(wanted[known]), 0))
    return [int(e) for e in np.clip(rounded, -LARGEST, LARGEST)]


def _largest_activations(model: Model, found: Sequence[Site], samples: Iterable[Sample]) -> dict[str, Array]:
    """max|X_j| of what readers take, over all samples, [channels] by the tensor of the site."""
    read = {site.tensor: list(dict.fromkeys(model.nodes[r].inputs[0] for r in site.readers)) for site in found}
    nodes: list[onnx.NodeProto] = []
    shown: dict[str, str] = {}
    for site in found:
        for tensor in read[site.tensor]:
            rank = len(model.tensors[tensor].shape or ())
            axes = [i for i in range(rank) if i != site.axis]
            shown[tensor] = f"__channels_{len(shown)}"
            nodes += _largest(model, tensor, axes, shown[tensor])
    largest: dict[str, Array] = {}
    for outputs in outputs_on(with_outputs(model, nodes, shown.values()), samples) if shown else ():
        for tensor, name in shown.items():
            largest[tensor] = np.maximum(largest.get(tensor, 0.0), outputs[name].astype(np.float64))
    return {tensor: np.max([largest[t] for t in tensors], axis=0) for tensor, tensors in read.items()}


def _largest(model: Model, tensor: str, axes: Sequence[int], name: str) -> list[onnx.NodeProto]:
    """Nodes that find the largest magnitudes along some axes."""
    magnitude = helper.make_node("Abs", [tensor], [f"{name}_abs"], f"{name}_abs")
    if model.opset < 18:
        largest = helper.make_node("ReduceMax", [f"{name}_abs"], [name], name, axes=axes, keepdims=0)
        return [magnitude, largest]
    along = helper.make_node("Constant", [], [f"{name}_axes"], f"{name}_axes", value_ints=axes)
    largest = helper.make_node("ReduceMax", [f"{name}_abs", f"{name}_axes"], [name], name, keepdims=0)
    return [magnitude, along, largest]
