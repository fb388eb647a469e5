"""Ranges and scales: how ranges are found, and the arithmetic of quantization, for pairs and for weight formats.

Formulas are those of ONNX: q = saturate(round_half_even(x / scale) + zero_point) and x' = (q - zero_point) * scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

from qdqtune.types import Array, NumericFormat, QType, WeightFormat

LARGEST_WIDE = 127 * 256 + 127
"""The largest weight in 16 bits. With one above that, QNN's simulator sums up in steps 8 times as large (68 in place of
80 dB to the CPU): as if it split a weight into two bytes and rounded the upper one, which then overflows."""


@dataclass(frozen=True, slots=True)
class Range:
    """The lowest and the highest value of a tensor: finite, low <= high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.low) and np.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"not a range: [{self.low}, {self.high}]")

    def __or__(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))

    @property
    def magnitude(self) -> float:
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True)
class Ranges:
    """The result of calibration: `activations` has the range of each activation.

    For a model that came with Q/DQ pairs, it also has the ranges of other constants, and `weights` the scales of
    weights. `shifts`: corrections of biases by node name and output channel, for nodes whose input and weight carry
    pairs. `is_given`: the user gave the ranges, so none is widened to share its scale with others. `wide`: ranges for
    activations in 16 bits, of all values, as clipping gains nothing there; where it has none, `activations` counts.
    """

    activations: Mapping[str, Range]
    weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    shifts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    is_given: bool = False
    wide: Mapping[str, Range] = field(default_factory=dict)


Method = Literal["minmax", "percentile", "mse"]


@dataclass(frozen=True)
class Calibration:
    """How ranges are found. minmax: all values. percentile: `percentile` % of the values, without outliers at both
    ends. mse: the least squared error. `bias_correction` corrects biases to keep the means of layers' outputs."""

    method: Method = "minmax"
    percentile: float = 99.99
    bias_correction: bool = False

    def __post_init__(self) -> None:
        if not 50 < self.percentile <= 100:  # from a placement file
            raise ValueError("percentile lies in (50, 100]")

    def chosen(self, ranges: Ranges) -> Calibration:
        """This calibration, without bias correction if `ranges` have none: it was tried, and gained nothing."""
        return replace(self, bias_correction=bool(ranges.shifts))

    def __str__(self) -> str:
        percentile = f" {self.percentile}" if self.method == "percentile" else ""
        return self.method + percentile + (" with bias correction" if self.bias_correction else "")


DEFAULT_CALIBRATION = Calibration("mse", bias_correction=True)
"""How commands calibrate by default."""


@dataclass(frozen=True, eq=False)
class Quantization:
    """How one tensor is quantized. `scale` is float32: a scalar, or a vector along `axis`."""

    qtype: QType
    scale: Array
    zero_point: int = 0
    axis: int | None = None

    def covers(self, low: float, high: float) -> bool:
        """Whether saturation keeps all values from `low` to `high`, so that a clamp to these is not needed. Values may
        exceed `high` by half a step."""
        scale = float(self.scale)
        lowest, highest = ((end - self.zero_point) * scale for end in (self.qtype.low, self.qtype.high))
        return lowest >= low - 5e-7 * scale and highest <= high + 0.5 * scale


def of_range(values: Range, fmt: NumericFormat, dtype: Any = np.float32, *, wide: bool = False) -> Quantization:
    """The scale and zero point of an activation with this range, in the engine's format, in 8 bits or if `wide` in 16.

    Symmetric: scale = max|x| / the largest number. Asymmetric: the range is widened to hold zero, which must be exact
    for padding and Relu, then scale = (high - low) / 255 (or / 65535) and zero point = round(-low / scale). If all
    values are zero, the range is taken as up to 1. The scale is at least the smallest normal number of `dtype`, the
    tensor's type, since engines may take subnormal ones for zero.
    """
    qtype = QType.UINT8 if fmt.unsigned and values.low >= 0 else fmt.activation
    qtype = fmt.wide if wide and fmt.wide is not None else qtype
    if fmt.symmetric or qtype is QType.FP8:
        return Quantization(qtype, _positive(_full(values.magnitude) / qtype.high, dtype))
    low, high = min(values.low, 0.0), max(values.high, 0.0)
    scale = _positive(_full(high - low) / (qtype.high - qtype.low), dtype)
    zero_point = int(np.clip(np.rint(qtype.low - low / np.float64(scale)), qtype.low, qtype.high))
    return Quantization(qtype, scale, zero_point)


def of_weight(
    values: Array,
    axis: int | None,
    fmt: NumericFormat,
    given: Iterable[float] | None = None,
    floor: Array | None = None,
    *,
    wide: bool = False,
) -> Quantization:
    """The symmetric scale of a weight, per channel along `axis` if the format says so.

    scale = max|w| / 127; / 64 where weights have 7 bits; / 448 for E4M3; if `wide` / `LARGEST_WIDE`. Scales that are
    `given` (by a model that came quantized) are kept; `floor` raises scales that are too small for an int32 bias.
    """
    axis, qtype = axis if fmt.per_channel else None, QType.INT16 if wide else fmt.weight
    if given is not None:
        scale = np.asarray(tuple(given), np.float64)
        scale = scale if axis is not None and scale.size == values.shape[axis] else scale.max()
    else:
        floats = values.astype(np.float32, copy=False)
        others = tuple(i for i in range(values.ndim) if i != axis) if axis is not None else None
        top = LARGEST_WIDE if wide else 64 if fmt.reduced_weights else fmt.weight.high
        magnitude = np.maximum(floats.max(axis=others, initial=0.0), -floats.min(axis=others, initial=0.0))
        scale = _full(magnitude) / top
    if floor is not None:
        scale = np.maximum(scale, floor)
    return Quantization(qtype, _positive(scale, values.dtype), 0, axis if np.ndim(scale) else None)


def quantize(values: Array, quantization: Quantization) -> Array:
    scaled = np.array(values, np.float32)  # in place, since a weight may be half of a model
    scaled /= _along(quantization, values.ndim)
    qtype = quantization.qtype
    if qtype is not QType.FP8:
        np.rint(scaled, out=scaled)
        scaled += quantization.zero_point
    return np.clip(scaled, qtype.low, qtype.high, out=scaled).astype(qtype.dtype)


def dequantize(values: Array, quantization: Quantization) -> Array:
    """(q - zero point) * scale, in float64."""
    zero, scale = quantization.zero_point, _along(quantization, values.ndim)
    return np.asarray((values.astype(np.float64) - zero) * scale.astype(np.float64))


def _along(quantization: Quantization, rank: int) -> Array:
    if quantization.axis is None:
        return quantization.scale
    return quantization.scale.reshape([-1 if i == quantization.axis else 1 for i in range(rank)])


def _full(magnitude: Any) -> Array:
    """The magnitude, or 1 (a small scale) in place of zero: with a scale of 1, the int32 bias of zero weights would be
    coarse, and QNN adds wrongly if an input has 64 times the scale of the sum (16,384 times in 16 bits)."""
    return np.where(np.asarray(magnitude) == 0, 1.0, np.asarray(magnitude, np.float64))


def _positive(scale: Any, dtype: Any) -> Array:
    return np.asarray(representable(np.asarray(scale), dtype).astype(np.float32))


def representable(scale: Array, dtype: Any) -> Array:
    """Scales rounded to `dtype`, no less than its smallest normal number; 1 instead of 0."""
    smallest = float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]
    return np.where(scale == 0, 1.0, np.maximum(scale, smallest)).astype(dtype)


# ---- weights in their weight formats (`types.WeightFormat`). A block is so many weights that are summed into one
# output; its scale and zero point are those with the least squared error. Scales from the largest value alone would be
# too coarse where a few weights are large.

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
    """A weight [in, out] as integers of that shape: values are (integer - zero point) * scale. Scale and zero point are
    [in / block, out], or [out] without blocks; signed integers have no zero point (None)."""

    integers: Array
    scale: Array
    zero_point: Array | None = None

    def values(self) -> Array:
        count = len(self.scale) if self.scale.ndim == 2 else 1
        blocks = self.integers.astype(np.float32).reshape(count, -1, self.integers.shape[1])
        if self.zero_point is not None:
            blocks = blocks - self.zero_point.astype(np.float32).reshape(count, 1, -1)
        scaled = blocks * self.scale.astype(np.float32).reshape(count, 1, -1)
        return np.asarray(scaled.reshape(self.integers.shape))


def integer_ends(weight_format: WeightFormat) -> tuple[int, int]:
    """The smallest and the largest integer of a weight format. Signed 8 bits exclude -128, as in pairs."""
    if not weight_format.symmetric:
        return 0, 2**weight_format.bits - 1
    high: int = 2 ** (weight_format.bits - 1) - 1
    return (-high - 1 if weight_format.bits == 4 else -high), high


def rounded_weight(weight: Array, weight_format: WeightFormat) -> RoundedWeight:
    """A float weight [in, out], rounded to a weight format. The block divides `in`; scales have the weight's type."""
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
    """Scale and zero point [blocks, out] with the least squared error, for a weight [blocks, block, out]."""
    least, best, zero = np.full(1, np.inf, np.float32), np.ones(1, np.float32), np.zeros(1, np.float32)
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
    """The integers of a weight minus the zero point `centre`."""
    steps = np.asarray(weight / scale)  # in place from here on, as memory takes most of the time
    np.rint(steps, out=steps)
    steps += centre
    np.clip(steps, *integer_ends(weight_format), out=steps)
    steps -= centre
    return steps


def _candidate_scales(weight: Array, weight_format: WeightFormat) -> Iterator[tuple[Array, Array]]:
    """Candidates for scales and zero points, each [blocks, 1, out]; a block of zeros gets scale 1."""
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
