"""What products meet: second moments of their inputs on samples, which tell what an error of each weight does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from qdqtune.calibration.observe import observe
from qdqtune.graph.model import Model
from qdqtune.types import Array, Sample


def moments(model: Model, tensors: Sequence[str], samples: Iterable[Sample]) -> dict[str, Array]:
    """The sum of x x^T over the rows x of each tensor [..., in] and all samples, [in, in] in float64.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    sums: dict[str, Array] = {}
    for _, tensor, values in observe(model, list(tensors), samples):
        rows = np.asarray(values, np.float64).reshape(-1, values.shape[-1])
        sums[tensor] = sums[tensor] + rows.T @ rows if tensor in sums else rows.T @ rows
    return sums
