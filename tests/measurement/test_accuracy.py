"""Output error in dB."""

from __future__ import annotations

import numpy as np
import pytest

from qdqtune.measurement.accuracy import cosine, is_finite, sqnr_db


def test_noise_is_summed_over_samples_before_the_ratio_is_taken() -> None:
    reference = [{"y": np.float32([3, 4])}, {"y": np.float32([0, 5])}]
    outputs = [{"y": np.float32([3, 4.5])}, {"y": np.float32([0.5, 5])}]
    assert sqnr_db(reference, outputs) == pytest.approx(10 * np.log10(50 / 0.5))


def test_the_worst_float_output_counts() -> None:
    reference = [{"a": np.ones(4, np.float32), "b": np.ones(4, np.float16), "n": np.arange(4)}]
    outputs = [{"a": np.full(4, 1.5, np.float32), "b": np.full(4, 1.1, np.float16), "n": np.zeros(4, np.int64)}]
    assert sqnr_db(reference, outputs) == pytest.approx(10 * np.log10(4))


def test_float16_is_squared_without_overflow() -> None:
    reference, outputs = [{"y": np.full(9, 60000, np.float16)}], [{"y": np.full(9, 59968, np.float16)}]
    assert sqnr_db(reference, outputs) == pytest.approx(20 * np.log10(60000 / 32))


def test_equal_outputs_and_outputs_without_floats_have_no_ratio() -> None:
    same = [{"y": np.float32([1, 2]), "n": np.array([3])}]
    assert sqnr_db(same, same) is None
    assert sqnr_db([{"n": np.array([3])}], [{"n": np.array([4])}]) is None


def test_a_signal_of_zeros_is_all_noise() -> None:
    found = sqnr_db([{"y": np.zeros(2, np.float32)}], [{"y": np.float32([0.1, 0])}])
    assert found is not None
    assert found < -100


def test_samples_must_correspond() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        sqnr_db([{"y": np.ones(1)}] * 2, [{"y": np.ones(1)}])


@pytest.mark.parametrize(("value", "expected"), [(1.0, True), (np.nan, False), (np.inf, False), (-np.inf, False)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_finite_outputs(value: float, expected: bool, dtype: type) -> None:
    outputs = [{"y": np.ones(3, dtype)}, {"y": np.array([1, value], dtype), "n": np.array([1]), "s": np.array(["a"])}]
    assert is_finite(outputs) == expected


def test_the_cosine_is_taken_over_all_samples_of_the_worst_output() -> None:
    reference = [
        {"a": np.float32([3, 0]), "b": np.float32([1, 1]), "n": np.array([1])},
        {"a": np.float32([0, 4]), "b": np.float32([1, 1]), "n": np.array([1])},
    ]
    outputs = [
        {"a": np.float32([6, 0]), "b": np.float32([1, 0]), "n": np.array([2])},
        {"a": np.float32([0, 8]), "b": np.float32([1, 1]), "n": np.array([2])},
    ]
    assert cosine(reference, outputs) == pytest.approx(3 / np.sqrt(4 * 3))
    assert cosine(reference, reference) == pytest.approx(1)


def test_outputs_without_floats_or_of_zeros_have_no_angle() -> None:
    assert cosine([{"n": np.array([3])}], [{"n": np.array([4])}]) is None
    assert cosine([{"y": np.zeros(2)}], [{"y": np.ones(2)}]) is None
