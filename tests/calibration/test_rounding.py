"""Weights alone become integers: blocks by least squared error."""

import numpy as np
import pytest

from qdqtune.calibration.rounding import LazyMapping, compensated, error_propagation, integer_ends, rounded_weight
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


@pytest.mark.parametrize("name", ["w4b32", "w4b32a", "w8"])
def test_errors_are_compensated_where_inputs_are_correlated(name: str) -> None:
    """By the outputs of the product, on inputs that the rounding has not seen."""
    random = np.random.default_rng(3)
    mixing = random.standard_normal((64, 64)) @ np.diag(np.logspace(0, -1.5, 64))
    seen, unseen = (random.standard_normal((n, 64)) @ mixing.T for n in (400, 200))
    weight_format = WeightFormat.named(name)

    def noise(values: np.ndarray) -> float:
        return float(np.square(unseen @ (values - WEIGHT)).sum() / np.square(unseen @ WEIGHT).sum())

    usual, better = (
        rounded_weight(WEIGHT, weight_format),
        compensated(WEIGHT, weight_format, error_propagation(seen.T @ seen)),
    )
    assert noise(better.values()) < 0.6 * noise(usual.values())
    assert np.array_equal(better.scale, usual.scale)
    assert better.integers.dtype == usual.integers.dtype


def test_inputs_that_are_never_met_do_no_harm() -> None:
    moment = np.zeros((64, 64))
    moment[:8, :8] = np.eye(8)
    assert np.isfinite(compensated(WEIGHT, WeightFormat(4, 32), error_propagation(moment)).values()).all()


def test_a_missing_key_of_the_computation_is_no_missing_key_of_the_mapping() -> None:
    def find() -> dict[str, int]:
        return {"a": dict[str, int]()["b"]}

    assert LazyMapping("a", find).get("c") is None
    with pytest.raises(KeyError, match="b"):
        LazyMapping("a", find).get("a")
