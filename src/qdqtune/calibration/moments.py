"""What products meet: second moments of their inputs on samples, which tell what an error of each weight does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from qdqtune.calibration.observe import observe
from qdqtune.graph.model import Model
from qdqtune.types import Array, Sample


def moments(model: Model, tensors: Sequence[str], samples: Iterable[Sample]) -> dict[str, Array]:
    """The mean of x x^T over the rows x of each tensor [..., in] and all samples, [in, in] in float64.

    Fewer rows than inputs know little of how inputs belong together: the mean is drawn to a multiple of the identity by
    the share in / (in + rows), so that rounding by it does no worse than rounding to the nearest.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    sums: dict[str, Array] = {}
    rows: dict[str, int] = {}
    for _, tensor, values in observe(model, list(tensors), samples):
        flat = np.asarray(values, np.float64).reshape(-1, values.shape[-1])
        sums[tensor] = sums[tensor] + flat.T @ flat if tensor in sums else flat.T @ flat
        rows[tensor] = rows.get(tensor, 0) + len(flat)
    return {tensor: _shrunk(total / rows[tensor], rows[tensor]) for tensor, total in sums.items()}


def _shrunk(mean: Array, rows: int) -> Array:
    inputs = len(mean)
    share = inputs / (inputs + rows)
    return np.asarray((1 - share) * mean + share * np.trace(mean) / inputs * np.eye(inputs))
