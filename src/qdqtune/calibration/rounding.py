"""Rounding of weights to their weight formats (`types.WeightFormat`).

A block is `WeightFormat.block` weights that are summed into one output; its scale and zero point are those with the
least squared error. Scales from the largest value alone would be too coarse where a few weights are large. With second
moments of the inputs, `compensated` rounds so that the outputs change least (GPTQ, arXiv 2210.17323).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from qdqtune.calibration.observe import observe
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.graph.model import Model
from qdqtune.types import Array, Sample, WeightFormat

SHRINKS = (1.0, 0.93, 0.86, 0.78, 0.68)
"""Shares of a block's range that are tried with 4 bits; weights beyond saturate, which pays where few are large. With 8
bits the whole range is as good. Chosen, not measured."""

DAMPING = 0.01
"""Share of the mean diagonal that is added to a moment's diagonal, so that it can be inverted: as in GPTQ."""

PANEL = 128
"""Inputs after which the errors are passed to all later ones at once: as in GPTQ."""

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
        repeats = len(self.integers) // len(self.scale) if self.scale.ndim == 2 else 1

        def spread(numbers: Array) -> Array:
            return np.repeat(numbers, repeats, axis=0) if numbers.ndim == 2 else numbers

        shifted = self.integers.astype(np.float32)
        if self.zero_point is not None:
            shifted = shifted - spread(self.zero_point.astype(np.float32))
        return np.asarray(shifted * spread(self.scale.astype(np.float32)))


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
    wide = max(1, CACHED_WEIGHTS // rows)
    parts = [
        _least_error_scale(
            np.asarray(weight[:, first : first + wide], np.float32).reshape(rows // block, block, -1), weight_format
        )
        for first in range(0, columns, wide)
    ]
    scale = np.concatenate([scale for scale, _ in parts], axis=1)
    scale = representable(scale, weight.dtype)
    zero = None if weight_format.symmetric else np.concatenate([zero for _, zero in parts], axis=1)
    integers = rounded(weight, scale, zero, weight_format)
    kind = INTEGER_TYPE[weight_format.bits, weight_format.symmetric]
    if weight_format.block is None:
        scale, zero = scale[0], None if zero is None else zero[0]
    return RoundedWeight(integers.astype(kind), scale, None if zero is None else zero.astype(kind))


def representable(scale: Array, dtype: np.dtype[np.generic]) -> Array:
    """Scales rounded to `dtype`, no less than its smallest normal number; 1 instead of 0."""
    smallest = float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]
    return np.where(scale == 0, 1.0, np.maximum(scale, smallest)).astype(dtype)


def rounded(weight: Array, scale: Array, zero: Array | None, weight_format: WeightFormat) -> Array:
    """The nearest integers of a weight [in, out], as int8 or uint8; `scale` is [in / block, out]."""
    low, high = integer_ends(weight_format)
    block = len(weight) // len(scale)
    result = np.empty(weight.shape, np.int8 if weight_format.symmetric else np.uint8)
    most = max(1, CACHED_WEIGHTS // weight.shape[1])
    for number, own in enumerate(scale.astype(np.float32)):
        end = (number + 1) * block
        for first in range(number * block, end, most):
            rows = slice(first, min(first + most, end))
            steps = np.rint(np.asarray(weight[rows], np.float32) / own)
            result[rows] = np.clip(steps if zero is None else steps + zero[number], low, high)
    return result


def _least_error_scale(weight: Array, weight_format: WeightFormat) -> tuple[Array, Array]:
    """Scale and zero point [blocks, out] of the least squared error over a weight [blocks, block, out]."""
    least: Array | None = None
    best = zero = np.zeros(())
    shifted, product = np.empty_like(weight), np.empty_like(weight)
    for scale, centre in _candidate_scales(weight, weight_format):
        _round_into(weight, scale, centre, weight_format, shifted)
        if weight_format.bits == 4:  # the scale that fits these integers best
            power = np.square(shifted, out=product).sum(axis=1, keepdims=True)
            fitting = np.multiply(shifted, weight, out=product).sum(axis=1, keepdims=True)
            fitting /= np.where(power == 0, 1, power)
            scale = np.where(fitting > 0, fitting, scale)
            _round_into(weight, scale, centre, weight_format, shifted)
        np.subtract(np.multiply(shifted, scale, out=product), weight, out=product)
        error = np.square(product, out=product).sum(axis=1, keepdims=True)
        if least is None:
            least, best, zero = error, scale, centre
        better = error < least
        least, best, zero = (np.where(better, a, b) for a, b in ((error, least), (scale, best), (centre, zero)))
    return best[:, 0], zero[:, 0]


def _round_into(weight: Array, scale: Array, centre: Array, weight_format: WeightFormat, shifted: Array) -> None:
    """Write clip(round(weight / scale) + centre) - centre to `shifted`: the integers, less the zero point `centre`."""
    np.rint(np.divide(weight, scale, out=shifted), out=shifted)
    np.add(shifted, centre, out=shifted)
    np.clip(shifted, *integer_ends(weight_format), out=shifted)
    np.subtract(shifted, centre, out=shifted)


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


def error_propagation(moment: Array) -> Array:
    """How the rounding error of each input is passed to later ones: the upper Cholesky factor [in, in] of the inverse
    of `moment`, in float32. `moment` [in, in] is the mean of x x^T over the inputs x of a product.
    """
    damped = np.asarray(moment, np.float64).copy()
    damped[np.diag_indices(len(damped))] += DAMPING * np.trace(damped) / len(damped) + np.finfo(np.float32).tiny
    return np.asarray(np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32))


def compensated(weight: Array, weight_format: WeightFormat, upper: Array) -> RoundedWeight:
    """A weight [in, out], rounded so that the squared error of the product's outputs is small (GPTQ, arXiv 2210.17323).

    Inputs are rounded one after the other, with the scales of `rounded_weight`. The error of each is passed to the
    later ones by `upper` (see `error_propagation`), which helps where inputs are correlated.
    """
    start = rounded_weight(weight, weight_format)
    (rows, columns), (low, high) = weight.shape, integer_ends(weight_format)
    block = weight_format.block or rows
    scale = start.scale.astype(np.float32).reshape(-1, columns)
    zero = (
        np.zeros_like(scale) if start.zero_point is None else start.zero_point.astype(np.float32).reshape(-1, columns)
    )
    left, integers = np.array(weight, np.float32), np.empty((rows, columns), np.int16)
    for first in range(0, rows, PANEL):
        last = min(first + PANEL, rows)
        errors = np.empty((last - first, columns), np.float32)
        for i in range(first, last):
            own, centre = scale[i // block], zero[i // block]
            integers[i] = np.clip(np.rint(left[i] / own) + centre, low, high)
            errors[i - first] = (left[i] - (integers[i] - centre) * own) / upper[i, i]
            left[i + 1 : last] -= upper[i, i + 1 : last, None] * errors[i - first]
        left[last:] -= upper[first:last, last:].T @ errors
    return RoundedWeight(integers.astype(start.integers.dtype), start.scale, start.zero_point)


Key = TypeVar("Key")
Found = TypeVar("Found")

Moments = Callable[[Model], Mapping[str, Array]]
"""Gives the moments of tensors that products of a model read, by tensor, for a model or its equalized form."""


def no_moments(_: Model) -> Mapping[str, Array]:
    """No moments: every weight is rounded to the nearest."""
    return MappingProxyType({})


class LazyMapping(Mapping[Key, Found]):
    """A mapping with known keys whose values are computed, all at once, when the first is read."""

    def __init__(self, keys: Iterable[Key], find: Callable[[], Mapping[Key, Found]]) -> None:
        self._keys, self._find = dict.fromkeys(keys), find

    @cached_property
    def _found(self) -> Mapping[Key, Found]:
        return self._find()

    def __getitem__(self, key: Key) -> Found:
        return self._found[key]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def get(self, key: Any, default: Any = None) -> Any:
        """As of every mapping, but a KeyError of the computation is not taken for a key that is missing."""
        if key not in self._keys:
            return default
        return self[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def moments(
    model: Model, tensors: Sequence[str], samples: Iterable[Sample], execution: Execution = EXECUTION
) -> dict[str, Array]:
    """The mean of x x^T over the rows x of each tensor [..., in] and all samples, [in, in] in float64.

    Few rows tell little of the correlation of inputs. The mean is shrunk towards a multiple of the identity by the
    share in / (in + rows), so that rounding with it is no worse than rounding to the nearest.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    sums: dict[str, Array] = {}
    rows: dict[str, int] = {}
    for tensor, values in observe(model, list(tensors), samples, execution=execution):
        flat = np.asarray(values, np.float64).reshape(-1, values.shape[-1])
        sums[tensor] = sums[tensor] + flat.T @ flat if tensor in sums else flat.T @ flat
        rows[tensor] = rows.get(tensor, 0) + len(flat)
    return {tensor: _shrunk(total / rows[tensor], rows[tensor]) for tensor, total in sums.items()}


def _shrunk(mean: Array, rows: int) -> Array:
    inputs = len(mean)
    share = inputs / (inputs + rows)
    return np.asarray((1 - share) * mean + share * np.trace(mean) / inputs * np.eye(inputs))
