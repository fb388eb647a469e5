"""Equalization from samples: by how much channels are scaled, and whether a placement gains by it.

Channels are scaled after Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv
1906.04721), for convolutions, and Xiao et al., "SmoothQuant" (arXiv 2211.10438), for products behind a
LayerNormalization. Weights have a scale for each output channel, so scaling costs neither the producer nor a depthwise
reader any precision; for these the channels of activations are made alike, and for all other readers

    s_j = max|X_j| ^ 1/2 / max|W_j| ^ 1/2

Where one channel sets the range of all, values beyond those of calibration are rare. Where all channels reach its ends,
any of them may exceed it: factors and ranges must not come from the samples that they are judged by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx
from onnx import helper

from qdqtune.calibration.calibrate import calibrate, tensors_with_pairs, unknown_ranges
from qdqtune.calibration.equalization import (
    NORMALIZED_BY_CHANNEL,
    Factor,
    Site,
    factors,
    largest_weights,
    scaled,
    sites,
)
from qdqtune.calibration.observe import outputs_on, with_outputs
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import Ranges
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.graph.model import Model
from qdqtune.numerics.adjustable import BETTER_DB, NotRunnableError, OutputNoise, adjustable_placement, together
from qdqtune.numerics.sessions import InferenceCount
from qdqtune.system.listener import Listener
from qdqtune.types import Array, NumericFormat, Placement, Sample

EQUALIZING_SAMPLES = 32
"""Samples that factors are judged by, at most. Chosen, not measured."""

EQUALIZING_RUNS = 10
"""Inferences for each of these samples, at most."""

MOVED_SHARE = 0.5
"""The exponent of max|X|: half of the difference between channels moves into the weights (SmoothQuant's alpha)."""

LARGEST_EXPONENT = 8
"""Channels are scaled by 2^8 at most. Chosen, not measured."""


def paying_factors(
    prepared: Prepared,
    numbers: NumericFormat,
    placed: Callable[[Ranges], Placement],
    most: int,
    listener: Listener,
) -> tuple[Factor, ...]:
    """The factors that bring the outputs of a placement closer to the float model's, on at most `most` samples.

    Layers behind normalizations are tried together, and all others together. `placed` gives the placement for ranges;
    the `listener` is told the progress.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    model, found = prepared.shaped, sites(prepared.shaped)
    samples = prepared.calibration.spread(min(most, EQUALIZING_SAMPLES)) if found else []
    if len(samples) < 2:
        return ()
    placement = placed(unknown_ranges(model))
    used = [site for site in found if any(model.nodes[r].into[0] in placement for r in site.readers)]
    normalized = [site for site in used if model.nodes[site.producer].op in NORMALIZED_BY_CHANNEL]
    kinds = [kind for kind in (normalized, [site for site in used if site not in normalized]) if kind]
    count = InferenceCount(listener, 3 * (1 + len(kinds)) * len(samples))  # see `_CrossValidation.improves`
    tensors = tensors_with_pairs(model, placement)
    validation = _CrossValidation(model, numbers, placed, tensors, samples, count.add, prepared.execution)
    paying: list[Site] = []
    try:
        for number, kind in enumerate(kinds, 1):
            if validation.improves(kind):
                paying += kind
            count.reach(count.most * number // len(kinds))
    except NotRunnableError:
        return ()
    return factors_on_samples(model, paying, prepared.calibration, prepared.execution) if paying else ()


class _CrossValidation:
    """Finds ranges and factors on each half of some samples, and judges them on the other half."""

    def __init__(
        self, model: Model, numbers: NumericFormat, placed: Callable[[Ranges], Placement], tensors: Sequence[str],
        samples: Sequence[Sample], ran: Callable[[int], None], execution: Execution,
    ) -> None:  # fmt: skip
        self._model, self._numbers, self._placed, self._ran = model, numbers, placed, ran
        self._execution, self._tensors = execution, tensors
        halves = samples[::2], samples[1::2]
        self._folds = (halves, halves[::-1])
        self._ranges: dict[int, Ranges] = {}
        self._before: dict[int, OutputNoise] = {}

    def ranges(self, fold: int) -> Ranges:
        """The ranges of the unscaled model on one half of the samples: the first for fold 0, the second for fold 1."""
        if fold not in self._ranges:
            self._ranges[fold] = self._calibrated(self._model, self._folds[fold][0])
        return self._ranges[fold]

    def improves(self, found: Sequence[Site]) -> bool:
        """Whether making channels alike at some sites brings the outputs closer on both halves: on one it may be
        chance. Each half takes three inferences for each of its samples, and as many once for the unscaled model."""
        before, after = [], []
        for fold, (given, judging) in enumerate(self._folds):
            factors = factors_on_samples(self._model, found, given, self._execution)
            if not factors:
                return False
            if fold not in self._before:
                self._before[fold] = self._noise(self._model, self.ranges(fold), judging)
            before.append(self._before[fold])
            changed = scaled(self._model, factors)
            after.append(self._noise(changed, self._calibrated(changed, given), judging))
            if after[-1].db() <= before[-1].db():
                return False
        return together(after).db() > together(before).db() + BETTER_DB

    def _calibrated(self, model: Model, samples: Sequence[Sample]) -> Ranges:
        numbers, tensors = self._numbers, self._tensors
        found = calibrate(model, samples, numbers=numbers, tensors=tensors, execution=self._execution)
        self._ran(len(samples))
        return found

    def _noise(self, model: Model, ranges: Ranges, samples: Sequence[Sample]) -> OutputNoise:
        how = self._numbers, ranges, samples, self._ran, self._execution
        with adjustable_placement(model, self._placed(ranges), *how) as adjustable:
            return adjustable.noise(ranges)


def factors_on_samples(
    model: Model, found: Sequence[Site], samples: Iterable[Sample], execution: Execution = EXECUTION
) -> tuple[Factor, ...]:
    """The factors that make channels alike on these samples; none for sites whose channels are alike already."""
    largest = _largest_activations(model, found, samples, execution)
    moved = [(site, _exponents(model, site, largest[site.tensor])) for site in found]
    return tuple(factor for site, by in moved if any(by) for factor in factors(model, site, by))


def _exponents(model: Model, site: Site, activations: Array) -> list[int]:
    """log2(s_j) of each channel, less their median, as whole numbers; 0 for channels that are always 0."""
    weights = largest_weights(model, site)
    with np.errstate(divide="ignore"):
        logarithms = np.log2(activations)
        wanted = MOVED_SHARE * logarithms - (1 - MOVED_SHARE) * np.log2(weights) if weights.any() else logarithms
    known = np.isfinite(wanted)
    if not known.any():
        return [0] * site.channels
    rounded = np.rint(np.where(known, wanted - np.median(wanted[known]), 0))
    return [int(e) for e in np.clip(rounded, -LARGEST_EXPONENT, LARGEST_EXPONENT)]


def _largest_activations(
    model: Model, found: Sequence[Site], samples: Iterable[Sample], execution: Execution
) -> dict[str, Array]:
    """max|X_j| of what the readers of a site read, over all samples: [channels], by the tensor of the site."""
    read = {site.tensor: list(dict.fromkeys(model.nodes[r].inputs[0] for r in site.readers)) for site in found}
    nodes: list[onnx.NodeProto] = []
    shown: dict[str, str] = {}
    for site in found:
        for tensor in read[site.tensor]:
            rank = len(model.tensors[tensor].shape or ())
            axes = [i for i in range(rank) if i != site.axis]
            shown[tensor] = f"__channels_{len(shown)}"
            nodes += _magnitude_nodes(model, tensor, axes, shown[tensor])
    largest: dict[str, Array] = {}
    magnitudes = with_outputs(model, nodes, shown.values())
    for outputs in outputs_on(magnitudes, samples, execution=execution) if shown else ():
        for tensor, name in shown.items():
            largest[tensor] = np.maximum(largest.get(tensor, 0.0), outputs[name].astype(np.float64))
    return {tensor: np.max([largest[t] for t in tensors], axis=0) for tensor, tensors in read.items()}


def _magnitude_nodes(model: Model, tensor: str, axes: Sequence[int], name: str) -> list[onnx.NodeProto]:
    """Nodes that compute the largest magnitudes along some axes as the output `name`."""
    magnitude = helper.make_node("Abs", [tensor], [f"{name}_abs"], f"{name}_abs")
    if model.opset < 18:
        largest = helper.make_node("ReduceMax", [f"{name}_abs"], [name], name, axes=axes, keepdims=0)
        return [magnitude, largest]
    along = helper.make_node("Constant", [], [f"{name}_axes"], f"{name}_axes", value_ints=axes)
    largest = helper.make_node("ReduceMax", [f"{name}_abs", f"{name}_axes"], [name], name, keepdims=0)
    return [magnitude, along, largest]
