"""What products meet: second moments of their inputs on samples, which tell what an error of each weight does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from qdqtune.calibration.observe import observe
from qdqtune.graph.model import Model
from qdqtune.types import Array, Sample

Key = TypeVar("Key")
Found = TypeVar("Found")

Moments = Callable[[Model], Mapping[str, Array]]
"""The moments of the tensors that products of a model read, by tensor: of the model as it is, or equalized."""


def no_moments(_: Model) -> Mapping[str, Array]:
    """Of nothing: every weight is rounded to the nearest."""
    return MappingProxyType({})


class Awaited(Mapping[Key, Found]):
    """What is to be found of some tensors, all of it when the first is asked for."""

    def __init__(self, keys: Iterable[Key], find: Callable[[], Mapping[Key, Found]]) -> None:
        self._keys, self._find = dict.fromkeys(keys), find

    @cached_property
    def _found(self) -> Mapping[Key, Found]:
        return self._find()

    def __getitem__(self, key: Key) -> Found:
        return self._found[key]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


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
    for tensor, values in observe(model, list(tensors), samples):
        flat = np.asarray(values, np.float64).reshape(-1, values.shape[-1])
        sums[tensor] = sums[tensor] + flat.T @ flat if tensor in sums else flat.T @ flat
        rows[tensor] = rows.get(tensor, 0) + len(flat)
    return {tensor: _shrunk(total / rows[tensor], rows[tensor]) for tensor, total in sums.items()}


def _shrunk(mean: Array, rows: int) -> Array:
    inputs = len(mean)
    share = inputs / (inputs + rows)
    return np.asarray((1 - share) * mean + share * np.trace(mean) / inputs * np.eye(inputs))
