"""Ranges of all candidate tensors, in memory that does not grow with the number of samples.

Each tensor's values are counted in a histogram, from which its range is taken, so that no values are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from qdqtune.calibration import scales
from qdqtune.calibration.observe import observe
from qdqtune.calibration.scales import Calibration, Range, Ranges
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.facts import ASYMMETRIC
from qdqtune.graph.model import Model
from qdqtune.types import Array, NumericFormat, QType, Sample

THRESHOLD_STEP = 16
"""Bins between two clipping thresholds that are tried: 128 thresholds at most. Chosen, not measured."""

EXACT_ERRORS = 4
"""How many thresholds, those with the least estimated errors, get their exact error. Chosen, not measured."""


class Histogram:
    """Counts of values in 2 x 2048 equal bins around zero, which double in width when a value is outside."""

    BINS = 2048

    def __init__(self, *, counts: bool = True) -> None:
        """Without `counts`, only the lowest and the highest value are kept."""
        self._has_counts = counts
        self._counts = np.zeros(2 * self.BINS, np.int64)
        self._width = 0.0
        self._low, self._high = np.inf, -np.inf

    def add(self, values: Array) -> None:
        flat = values.reshape(-1)
        if flat.dtype != np.float32:
            flat = flat.astype(np.float64)
        if not flat.size:
            return
        self._low = float(np.minimum(self._low, flat.min()))  # unlike min, these keep a NaN
        self._high = float(np.maximum(self._high, flat.max()))
        if self.whole is None or not self._has_counts:
            return
        top = max(-self._low, self._high)
        if self._width == 0.0 and top > 0:
            self._width = float(2.0 ** max(-120.0, np.ceil(np.log2(top / self.BINS))))  # float32 holds the inverse
        while top > self._width * self.BINS:
            merged = self._counts.reshape(-1, 2).sum(axis=1)
            self._counts[:] = 0
            self._counts[self.BINS // 2 : self.BINS // 2 + self.BINS] = merged
            self._width *= 2
        if self._width == 0.0:
            self._counts[self.BINS] += flat.size
            return
        bins = flat * flat.dtype.type(1 / self._width)  # a power of two: no rounding
        np.floor(bins, out=bins)  # in place it takes half the time
        bins += self.BINS
        found = np.bincount(bins.astype(np.intp), minlength=2 * self.BINS + 1)
        found[-2] += found[-1]  # the upper end belongs to the last bin
        self._counts += found[:-1]

    @property
    def whole(self) -> Range | None:
        """The range of all values; None if one is not finite, or if there are none."""
        return Range(self._low, self._high) if np.isfinite(self._low) and np.isfinite(self._high) else None

    def range(self, percentile: float) -> Range | None:
        """The range without half of (100 - percentile) % of the values at each end; None as `whole`."""
        if self.whole is None:
            return None
        tail = (100 - percentile) / 200 * self._counts.sum()
        below, above = np.cumsum(self._counts), np.cumsum(self._counts[::-1])
        first = int(np.searchsorted(below, tail, side="right"))
        last = 2 * self.BINS - 1 - int(np.searchsorted(above, tail, side="right"))
        low, high = (first - self.BINS) * self._width, (last + 1 - self.BINS) * self._width
        return Range(max(low, self._low), min(max(high, max(low, self._low)), self._high))

    def least_error(self, numbers: NumericFormat) -> Range | None:
        """The range for which quantization has the least mean squared error, of rounding inside and clipping outside.

        First both ends are moved in together, then, unless the format is symmetric, each by itself. None as `whole`.
        """
        whole = self.whole
        if whole is None or self._width == 0.0:
            return whole
        used = np.flatnonzero(self._counts)
        counts = self._counts[used].astype(np.float64)
        centres = np.where(used == self.BINS, 0.0, (used + 0.5 - self.BINS) * self._width)  # zeros are mostly exact

        def squared_error(tried: Range) -> float:
            how = scales.of_range(tried, numbers)
            return float((counts * np.square(centres - scales.dequantize(scales.quantize(centres, how), how))).sum())

        def best(lows: Array, highs: Array) -> Range:
            lows, highs = np.maximum(lows, whole.low), np.minimum(highs, whole.high)
            lows, highs = lows[lows <= highs], highs[lows <= highs]
            order = np.arange(len(lows))
            if numbers.activation is not QType.FP8:
                estimates = _estimated_errors(counts, centres, lows, highs, numbers)
                order = np.argsort(estimates, kind="stable")[:EXACT_ERRORS]
            tried = [Range(float(lows[i]), float(highs[i])) for i in order]
            return min(tried, key=lambda r: (squared_error(r), -r.high + r.low))

        # The steps of FP8 grow with the values.
        step = 8 * THRESHOLD_STEP if numbers.activation is QType.FP8 else THRESHOLD_STEP
        tops = np.arange(step, self.BINS + step, step) * self._width
        found = best(-tops, tops)
        if not numbers.symmetric:
            found = best(-tops, np.full(len(tops), found.high))
            found = best(np.full(len(tops), found.low), tops)
        return found


def _estimated_errors(counts: Array, centres: Array, lows: Array, highs: Array, numbers: NumericFormat) -> Array:
    """An estimate for each range: the clipping errors, and step^2 / 12 for each value inside that is not zero."""
    low, high = np.minimum(lows, 0.0), np.maximum(highs, 0.0)
    if numbers.symmetric:
        step = np.maximum(-low, high) / np.where(numbers.unsigned & (low >= 0), 255, 127)
    else:
        step = (high - low) / 255
    first, last = np.searchsorted(centres, low), np.searchsorted(centres, high, side="right")
    n, s, q = (np.concatenate([[0.0], np.cumsum(counts * centres**k)]) for k in range(3))
    below = q[first] - 2 * low * s[first] + low**2 * n[first]
    above = (q[-1] - q[last]) - 2 * high * (s[-1] - s[last]) + high**2 * (n[-1] - n[last])
    inside = n[last] - n[first] - counts[centres == 0].sum()
    return np.asarray(below + above + inside * np.square(step) / 12)


def candidate_tensors(model: Model) -> tuple[str, ...]:
    """The float activations that nodes or outputs of the main graph read, in graph order; without empty ones."""
    found = []
    for tensor in (*model.inputs, *(o for n in model.nodes for o in n.outputs if o)):
        info = model.tensors.get(tensor)
        is_filled = info is not None and info.is_float and 0 not in (info.shape or ())
        if is_filled and any(use.slot >= 0 for use in model.uses(tensor)):
            found.append(tensor)
    return tuple(found)


def calibrate(
    model: Model,
    samples: Iterable[Sample],
    how: Calibration | None = None,
    *,
    numbers: NumericFormat = ASYMMETRIC,
    tensors: Sequence[str] | None = None,
    execution: Execution = EXECUTION,
) -> Ranges:
    """Ranges of candidate tensors (all, or `tensors`) over all samples, by running the float model on ONNX Runtime. A
    tensor with a NaN or an infinite value (an attention mask, say) gets no range. Without `how` the method is minmax;
    `numbers` matter to method mse only. Biases are not corrected here."""
    how = how or Calibration()
    tensors = candidate_tensors(model) if tensors is None else tensors
    if not tensors:
        return Ranges({})
    histograms = {tensor: Histogram(counts=how.method != "minmax") for tensor in tensors}
    for tensor, values in observe(model, tensors, samples, execution=execution):
        histograms[tensor].add(values)
    ranges: dict[str, Range] = {}
    for tensor, histogram in histograms.items():
        found = histogram.whole
        if how.method == "percentile":
            found = histogram.range(how.percentile)
        elif how.method == "mse":
            found = histogram.least_error(numbers)
        if found is not None:
            ranges[tensor] = found
    return Ranges(ranges)
