"""Rounding of weights to their weight formats (`types.WeightFormat`).

A block is `WeightFormat.block` weights that are summed into one output; its scale and zero point are those with the
least squared error. Scales from the largest value alone would be too coarse where a few weights are large.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from qdqtune.calibration.scales import representable
from qdqtune.types import Array, WeightFormat

SHRINKS = (1.0, 0.93, 0.86, 0.78, 0.68)
"""Shares of a block's range that are tried with 4 bits; weights beyond saturate, which pays where few are large. With 8
bits the whole range is as good. Chosen, not measured."""

CACHED_WEIGHTS = 2**18
"""Weights that are processed at a time, so that they and the work arrays fit into a CPU cache. Chosen, not measured."""

INTEGER_TYPE = {
    (4, True): ml_dtypes.int4, (4, False): ml_dtypes.uint4,
    (7, True): np.int8, (8, True): np.int8, (8, False): np.uint8,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class RoundedWeight:
    """A weight [in, out] as integers of that shape; its values are (integer - zero point) * scale.

    `scale` is [in / block, out], or [out] without blocks. `zero_point` has the same shape; None for signed integers.
    """

    integers: Array
    scale: Array
    zero_point: Array | None = None

    def values(self) -> Array:
        """The float32 weights that the integers stand for."""
        count = len(self.scale) if self.scale.ndim == 2 else 1
        blocks = self.integers.astype(np.float32).reshape(count, -1, self.integers.shape[1])
        if self.zero_point is not None:
            blocks = blocks - self.zero_point.astype(np.float32).reshape(count, 1, -1)
        scaled = blocks * self.scale.astype(np.float32).reshape(count, 1, -1)
        return np.asarray(scaled.reshape(self.integers.shape))


def integer_ends(weight_format: WeightFormat) -> tuple[int, int]:
    """The smallest and the largest integer of a format. Signed ones of 8 bits exclude -128, as in pairs."""
    if not weight_format.symmetric:
        return 0, 2**weight_format.bits - 1
    high: int = 2 ** (weight_format.bits - 1) - 1
    return (-high - 1 if weight_format.bits == 4 else -high), high


def rounded_weight(weight: Array, weight_format: WeightFormat) -> RoundedWeight:
    """A weight [in, out] of float32 or float16, rounded to the nearest. The block divides `in`; scales have the type of
    the weight."""
    rows, columns = weight.shape
    block = weight_format.block or rows
    kind = INTEGER_TYPE[weight_format.bits, weight_format.symmetric]
    integers = np.empty(weight.shape, kind)
    scales, zeros = np.empty((2, rows // block, columns), np.float32)
    wide = max(1, CACHED_WEIGHTS // rows)
    for first in range(0, columns, wide):
        part = slice(first, first + wide)
        values = np.asarray(weight[:, part], np.float32).reshape(rows // block, block, -1)
        scale, zero = _least_error_scale(values, weight_format)
        scales[:, part], zeros[:, part] = representable(scale, weight.dtype), zero
        steps = np.rint(values / scales[:, None, part]) + zero[:, None]
        integers[:, part] = np.clip(steps, *integer_ends(weight_format)).reshape(rows, -1).astype(kind)
    if weight_format.block is None:
        scales, zeros = scales[0], zeros[0]
    zero_point = None if weight_format.symmetric else zeros.astype(kind)
    return RoundedWeight(integers, scales.astype(weight.dtype), zero_point)


def _least_error_scale(weight: Array, weight_format: WeightFormat) -> tuple[Array, Array]:
    """Scale and zero point [blocks, out] of the least squared error over a weight [blocks, block, out]."""
    least = np.array(np.inf)
    best = zero = np.zeros(())
    for scale, centre in _candidate_scales(weight, weight_format):
        shifted = _rounded(weight, scale, centre, weight_format)
        if weight_format.bits == 4:  # the scale that fits these integers best
            power = np.square(shifted).sum(axis=1, keepdims=True)
            fitting = (shifted * weight).sum(axis=1, keepdims=True) / np.where(power == 0, 1, power)
            scale = np.where(fitting > 0, fitting, scale)
            shifted = _rounded(weight, scale, centre, weight_format)
        shifted *= scale
        shifted -= weight
        error = np.square(shifted, out=shifted).sum(axis=1, keepdims=True)
        better = error < least
        least, best, zero = (np.where(better, a, b) for a, b in ((error, least), (scale, best), (centre, zero)))
    return best[:, 0], zero[:, 0]


def _rounded(weight: Array, scale: Array, centre: Array, weight_format: WeightFormat) -> Array:
    """The integers of a weight, less the zero point `centre`."""
    steps = np.asarray(weight / scale)  # in place from here on, as memory takes most of the time
    np.rint(steps, out=steps)
    steps += centre
    np.clip(steps, *integer_ends(weight_format), out=steps)
    steps -= centre
    return steps


def _candidate_scales(weight: Array, weight_format: WeightFormat) -> Iterator[tuple[Array, Array]]:
    """Candidates for scales and zero points, each [blocks, 1, out]; the scale of a block of zeros is 1."""
    low, high = integer_ends(weight_format)
    shares = SHRINKS if weight_format.bits == 4 else SHRINKS[:1]
    if weight_format.symmetric:
        top = np.abs(weight).max(axis=1, keepdims=True)
        for share in shares:
            yield np.where(top == 0, 1, top * share / high), np.zeros((1, 1, 1), np.float32)
        return
    bottom = np.minimum(weight.min(axis=1, keepdims=True), 0)
    top = np.maximum(weight.max(axis=1, keepdims=True), 0)
    for share in shares:
        span = (top - bottom) * share / high
        scale = np.where(span == 0, 1, span)
        yield scale, np.clip(np.rint(-bottom * share / scale), low, high)
