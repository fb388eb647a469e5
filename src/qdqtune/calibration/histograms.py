"""Counts of values, and the range that each calibration method takes from them.

The counts of a tensor take a fixed amount of memory: 2 x 2048 bins that double in width when a value falls outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from qdqtune.calibration import scales
from qdqtune.calibration.scales import Range
from qdqtune.types import Array, NumericFormat

STEP = 16
"""Bins between two thresholds that are tried: up to 128 of them."""


class Histogram:
    """Counts of values in 2 x 2048 equal bins around zero; the bins double in width when a value falls outside."""

    BINS = 2048

    def __init__(self) -> None:
        self._counts = np.zeros(2 * self.BINS, np.int64)
        self._width = 0.0
        self._low, self._high = np.inf, -np.inf
        self._broken = False

    def add(self, values: Array) -> None:
        """Count all values of one array."""
        flat = values.reshape(-1).astype(np.float64)
        if not flat.size or self._broken:
            return
        low, high = float(flat.min()), float(flat.max())
        self._broken = not (np.isfinite(low) and np.isfinite(high))
        if self._broken:
            return
        self._low, self._high = min(self._low, low), max(self._high, high)
        top = max(-self._low, self._high)
        if self._width == 0.0 and top > 0:
            self._width = float(2.0 ** np.ceil(np.log2(top / self.BINS)))
        while top > self._width * self.BINS:
            self._double()
        if self._width == 0.0:
            self._counts[self.BINS] += flat.size
            return
        index = np.clip(np.floor(flat / self._width).astype(np.int64) + self.BINS, 0, 2 * self.BINS - 1)
        self._counts += np.bincount(index, minlength=2 * self.BINS)

    def _double(self) -> None:
        merged = self._counts.reshape(-1, 2).sum(axis=1)
        self._counts[:] = 0
        self._counts[self.BINS // 2 : self.BINS // 2 + self.BINS] = merged
        self._width *= 2

    @property
    def whole(self) -> Range | None:
        """The interval of all values; None if one was not finite, or there is none."""
        return None if self._broken or not self._counts.any() else Range(self._low, self._high)

    def range(self, percentile: float) -> Range | None:
        """The interval that leaves out half of (100 - percentile) % of the values at each end; None if not finite."""
        if self.whole is None:
            return None
        tail = (100 - percentile) / 200 * self._counts.sum()
        below, above = np.cumsum(self._counts), np.cumsum(self._counts[::-1])
        first = int(np.searchsorted(below, tail, side="right"))
        last = 2 * self.BINS - 1 - int(np.searchsorted(above, tail, side="right"))
        low, high = (first - self.BINS) * self._width, (last + 1 - self.BINS) * self._width
        return Range(max(low, self._low), min(max(high, max(low, self._low)), self._high))

    def least_error(self, numbers: NumericFormat) -> Range | None:
        """The range whose quantization has the least mean squared error: rounding inside, clipping outside.

        Both ends move in together first, then each by itself.
        """
        return self._best(numbers, _squared_error, by_itself=True)

    def least_divergence(self, numbers: NumericFormat) -> Range | None:
        """The range that loses least information: the least Kullback-Leibler divergence of the quantized distribution.

        P holds the counts within the range, with what lies outside at its ends; Q spreads the counts of each quantized
        value over the bins that gave it. After Migacz, "8-bit inference with TensorRT", GTC 2017, for any format. A
        pair keeps zeros exactly, so those of a Relu say nothing: their bin counts as its neighbour does.
        """
        return self._best(numbers, _divergence, by_itself=False)

    def _best(
        self, numbers: NumericFormat, cost: Callable[[Array, Array, Range, NumericFormat], float], *, by_itself: bool
    ) -> Range | None:
        whole = self.whole
        if whole is None or self._width == 0.0:
            return whole
        used = np.flatnonzero(self._counts)
        counts = self._counts[used].astype(np.float64)
        centres = np.where(used == self.BINS, 0.0, (used + 0.5 - self.BINS) * self._width)  # zeros are mostly exact

        def best(tried: Iterator[Range]) -> Range:
            return min(tried, key=lambda r: (cost(counts, centres, r, numbers), -r.high + r.low))

        tops = [n * self._width for n in range(STEP, self.BINS + STEP, STEP)]
        found = best(r for t in tops if (r := _within(whole, -t, t)) is not None)
        if by_itself and not numbers.symmetric:
            found = best(r for t in tops if (r := _within(whole, -t, found.high)) is not None)
            found = best(r for t in tops if (r := _within(whole, found.low, t)) is not None)
        return found


def _within(whole: Range, low: float, high: float) -> Range | None:
    """The part of a range between two bounds, if there is any."""
    low, high = max(whole.low, low), min(whole.high, high)
    return Range(low, high) if low <= high else None


def _squared_error(counts: Array, centres: Array, tried: Range, numbers: NumericFormat) -> float:
    how = scales.of_range(tried, numbers)
    return float((counts * np.square(centres - scales.dequantize(scales.quantize(centres, how), how))).sum())


def _divergence(counts: Array, centres: Array, tried: Range, numbers: NumericFormat) -> float:
    inside = (centres >= tried.low) & (centres <= tried.high)
    if not inside.any():
        return np.finfo(np.float64).max
    kept = counts[inside]
    codes = scales.quantize(centres[inside], scales.of_range(tried, numbers)).astype(np.float64)
    _, group = np.unique(codes, return_inverse=True)
    spread = (np.bincount(group, kept) / np.bincount(group))[group]
    zero = np.flatnonzero(centres[inside] == 0.0)
    if zero.size and kept.size > 1:
        kept[zero] = np.minimum(kept[zero], kept[zero + 1] if zero[0] + 1 < kept.size else kept[zero - 1])
    whole = kept.copy()
    whole[0] += counts[centres < tried.low].sum()
    whole[-1] += counts[centres > tried.high].sum()
    p, q = whole / whole.sum(), spread / spread.sum()
    return float((p * np.log(p / q)).sum())
