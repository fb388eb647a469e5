"""Weights alone become integers: blocks by least squared error."""

import numpy as np
import pytest

from qdqtune.calibration.rounding import integer_ends, rounded_weight
from qdqtune.types import WeightFormat

WEIGHT = np.random.default_rng(0).standard_normal((64, 24)).astype(np.float32)


def error(name: str, weight: np.ndarray = WEIGHT) -> float:
    return float(np.square(rounded_weight(weight, WeightFormat.named(name)).values() - weight).mean())


@pytest.mark.parametrize("name", ["w8", "w8b32", "w8a", "w8b32a", "w4b16", "w4b32", "w4b32a"])
def test_integers_and_scales_stand_for_the_weights(name: str) -> None:
    weight_format = WeightFormat.named(name)
    assert weight_format.name == name
    found = rounded_weight(WEIGHT, weight_format)
    low, high = integer_ends(weight_format)
    integers = found.integers.astype(int)
    assert integers.min() >= low
    assert integers.max() <= high
    assert found.scale.shape == ((64 // weight_format.block, 24) if weight_format.block else (24,))
    assert (found.zero_point is None) == weight_format.symmetric
    largest = np.abs(WEIGHT).max() * (1 if weight_format.bits == 4 else 0.01)
    assert np.abs(found.values() - WEIGHT).max() < largest


def test_searched_steps_lose_less_than_those_of_the_largest_values() -> None:
    blocks = WEIGHT.reshape(2, 32, 24)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 7
    usual = np.square(np.clip(np.rint(blocks / step), -8, 7) * step - blocks).mean()
    assert error("w4b32") < 0.85 * usual
    assert error("w8b32") < error("w8") < error("w4b16") < error("w4b32")


def test_a_zero_point_pays_for_weights_of_one_sign() -> None:
    assert error("w4b32a", np.abs(WEIGHT)) < 0.5 * error("w4b32", np.abs(WEIGHT))


def test_weights_that_are_zero_stay_zero_and_scales_are_what_the_type_holds() -> None:
    weight = np.zeros((32, 4), np.float16)
    weight[:, 0] = 1e-7
    for name in ("w4b32", "w4b32a", "w8"):
        found = rounded_weight(weight, WeightFormat.named(name))
        assert found.scale.dtype == np.float16
        assert (found.scale > 0).all()
        assert np.array_equal(found.values()[:, 1:], weight[:, 1:])


@pytest.mark.parametrize("name", ["w4", "w5b32", "w8b24", "w4b8", "int8", ""])
def test_what_is_no_weight_format_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"weight format|blocks"):
        WeightFormat.named(name)
