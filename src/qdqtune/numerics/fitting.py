"""Ranges of a placement, and biases that keep its outputs close to the float model's.

They are decided before anything is timed, so that what a search measures is what ships; no pair moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qdqtune.calibration.calibrate import tensors_with_pairs, unknown_ranges
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import Calibration, Range, Ranges
from qdqtune.engines.reused_workers import reused_workers
from qdqtune.graph.model import Model
from qdqtune.graph.operators import work
from qdqtune.numerics.biases import NotRunnableError, biased_placement
from qdqtune.numerics.sessions import InferenceCount
from qdqtune.types import Deaf, Listener, NumericFormat, Placement

BIAS_SAMPLES = 64
"""Samples of calibration that biases are corrected by, if `WORK` allows so many; `LEAST_SAMPLES` in any case."""

BIAS_RUNS = 4
"""Inferences for each of them: of the float model; with ranges alone; with what biases lack; with corrected biases."""

LEAST_SAMPLES = 4

WORK = 3e11
"""Multiplications that all runs together may take: five to fifteen seconds on two cores."""

OVERHEAD = 1e6
"""Multiplications in the time that an operator with a pair takes to start and to round."""


def fitted(
    prepared: Prepared,
    how: Calibration,
    numbers: NumericFormat,
    placed: Callable[[Ranges], Placement],
    listener: Listener | None = None,
    *,
    bias_samples: int = BIAS_SAMPLES,
    only_placed: bool = False,
) -> Ranges:
    """Ranges by `how`, with corrected biases where these bring the outputs closer to the float model's.

    `placed` gives the placement for ranges; a placement of fewer pairs uses the same ranges. With `only_placed` no
    other tensors need have ranges, which saves time. `bias_samples` at most correct biases. The `listener` is told
    stages and progress.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    model, listener = prepared.shaped, listener or Deaf()
    with reused_workers(prepared.execution) as execution:
        prepared = replace(prepared, execution=execution)
        tensors = tensors_with_pairs(model, placed(unknown_ranges(model))) if only_placed else None
        listener.stage(f"calibrating on {prepared.samples.origin}")
        ranges = prepared.ranges(how, numbers, tensors)
        if tensors and not all(tensor in ranges.activations for tensor in tensors):
            ranges = prepared.ranges(how, numbers)  # rules may place others in their stead
        ranges = with_known_ranges(model, ranges, numbers)
        placement = placed(ranges)
        if not how.bias_correction or not placement.edges:
            return ranges
        listener.stage("correcting biases")
        return _with_biases(prepared, numbers, ranges, placement, listener, bias_samples)


def with_wide(prepared: Prepared, found: Ranges, numbers: NumericFormat) -> Ranges:
    """The ranges with those of activations in 16 bits, where an engine has them: all values that samples show."""
    if numbers.wide is None:
        return found
    return replace(found, wide=prepared.ranges(Calibration("minmax"), numbers).activations)


def _with_biases(
    prepared: Prepared,
    numbers: NumericFormat,
    ranges: Ranges,
    placement: Placement,
    listener: Listener,
    most: int,
) -> Ranges:
    """`ranges` with corrected biases, if the outputs gain by them; judged on each sample with the biases that the
    others give."""
    model = prepared.shaped
    samples = prepared.calibration.spread(_affordable_samples(model, most))
    ran = InferenceCount(listener, BIAS_RUNS * len(samples)).add
    try:
        with biased_placement(model, placement, numbers, ranges, samples, ran, prepared.execution) as biased:
            if not biased.is_correctable:
                return ranges
            offsets = biased.offsets()
            if biased.noise(offsets).db() <= biased.noise().db():
                return ranges
            return replace(ranges, shifts=biased.shifts(offsets))
    except NotRunnableError:
        return ranges


def inferences(model: Model, how: Calibration, samples: int) -> int:
    """About how many inferences of the model with its pairs `fitted` takes, beside calibration on that many
    samples."""
    return BIAS_RUNS * min(samples, _affordable_samples(model, BIAS_SAMPLES)) if how.bias_correction else 0


def _affordable_samples(model: Model, most: int) -> int:
    """On how many samples `WORK` allows to correct biases, `most` at most."""
    each = BIAS_RUNS * sum(work(model, node) + OVERHEAD for node in model.nodes)
    return max(LEAST_SAMPLES, min(most, int(WORK / max(each, 1.0))))


def with_known_ranges(model: Model, ranges: Ranges, numbers: NumericFormat) -> Ranges:
    """`ranges` with [0, 1] for outputs of Softmax that reach 0.5 on the samples, in uint8: their scale is 1/255.

    A probability of 1 that no sample showed would be clipped, and since most values are near zero, methods clip the
    ones that matter. Where attention spreads over hundreds of positions no value comes near 1, and steps of 1/255
    would leave nothing of them.
    """
    if numbers.symmetric:
        return ranges
    made = {n.outputs[0] for n in model.nodes if n.op == "Softmax" and not n.domain}
    known = {t: Range(0.0, 1.0) for t, r in ranges.activations.items() if t in made and r.high >= 0.5}
    return replace(ranges, activations={**ranges.activations, **known})
