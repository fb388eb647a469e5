"""Output error in dB."""

import numpy as np
import pytest

from qdqtune.numerics.accuracy import accuracy, closeness_of, is_finite, noisiest, sqnr_db
from qdqtune.timing.limits import Limits
from qdqtune.types import Accuracy


def test_noise_is_summed_over_samples_and_the_worst_float_output_counts() -> None:
    reference = [{"y": np.float32([3, 4])}, {"y": np.float32([0, 5])}]
    outputs = [{"y": np.float32([3, 4.5])}, {"y": np.float32([0.5, 5])}]
    assert sqnr_db(reference, outputs) == pytest.approx(10 * np.log10(50 / 0.5))
    reference = [{"a": np.ones(4, np.float32), "b": np.ones(4, np.float16), "n": np.arange(4)}]
    outputs = [{"a": np.full(4, 1.5, np.float32), "b": np.full(4, 1.1, np.float16), "n": np.zeros(4, np.int64)}]
    assert sqnr_db(reference, outputs) == pytest.approx(10 * np.log10(4))


def test_the_noisiest_samples_are_those_of_the_worst_output() -> None:
    reference = [{"y": np.float32([8, 8]), "z": np.float32([8, 8])} for _ in range(4)]
    errors = [0.1, 2.0, 0.0, 1.0]
    outputs = [{"y": s["y"] + error, "z": s["z"] + 0.5 - error / 4} for s, error in zip(reference, errors, strict=True)]
    assert noisiest(reference, outputs, 2) == [1, 3]
    assert noisiest(reference, reference, 2) == [0, 1]


def test_float16_is_squared_without_overflow_and_a_signal_of_zeros_is_all_noise() -> None:
    reference, outputs = [{"y": np.full(9, 60000, np.float16)}], [{"y": np.full(9, 59968, np.float16)}]
    assert sqnr_db(reference, outputs) == pytest.approx(20 * np.log10(60000 / 32))
    nothing = sqnr_db([{"y": np.zeros(2, np.float32)}], [{"y": np.float32([0.1, 0])}])
    assert nothing is not None
    assert nothing < -100


def test_equal_outputs_and_outputs_without_floats_have_no_ratio() -> None:
    same = [{"y": np.float32([1, 2]), "n": np.array([3]), "e": np.zeros((0, 4), np.float32)}]
    assert sqnr_db(same, same) is None
    assert sqnr_db([{"n": np.array([3])}], [{"n": np.array([4])}]) is None


@pytest.mark.parametrize(("value", "expected"), [(1.0, True), (np.nan, False), (np.inf, False), (-np.inf, False)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_finite_outputs(value: float, expected: bool, dtype: type) -> None:
    outputs = [{"y": np.ones(3, dtype)}, {"y": np.array([1, value], dtype), "n": np.array([1]), "s": np.array(["a"])}]
    assert is_finite(outputs) == expected


def test_the_spread_is_that_of_single_samples_of_the_worst_output() -> None:
    reference = [{"a": np.float32([10, 0]), "b": np.float32([1, 0])} for _ in range(3)]
    outputs = [{"a": np.float32([10 + error, 0]), "b": np.float32([1, 0.001])} for error in (1, 0.1, 0)]
    found = accuracy(reference, outputs)
    assert found.sqnr_db == pytest.approx(10 * np.log10(300 / 1.01), abs=1e-4)
    assert (found.lowest_db, found.highest_db) == (pytest.approx(20, abs=1e-3), None)
    assert found.samples == 3
    assert closeness_of(found) == "24.7 dB (20.0 to equal over 3 samples)"
    found = accuracy(reference[:2], outputs[:2])
    assert closeness_of(found) == "23.0 dB (20.0 to 40.0 over 2 samples)"


def test_first_samples_show_what_all_have_at_most() -> None:
    reference = [{"a": np.float32([value, 0])} for value in (1, 10, 10)]
    outputs = [{"a": np.float32([2, 0])}, {"a": np.float32([10, 1])}]
    (first, both) = accuracy(reference, outputs[:1]), accuracy(reference, outputs)
    assert (first.samples, first.sqnr_db) == (1, 0.0)
    assert first.at_most_db == pytest.approx(10 * np.log10(201))
    assert (both.samples, both.at_most_db) == (2, pytest.approx(10 * np.log10(201 / 2)))
    assert accuracy(reference, [*outputs, reference[2]]).sqnr_db == both.at_most_db
    limits = Limits(min_sqnr=22.0)
    assert [limits.is_surely_missed(found) for found in (first, both)] == [False, True]
    assert not limits.is_surely_missed(accuracy(reference, [*outputs, reference[2]]))
    told = "the output SQNR of all samples is at most 20.0 dB, as the first 2 show, and 22 dB are asked for"
    assert limits.missed(both) == told
    assert "at most 23.0 dB, as the first one shows, and 24 dB" in str(Limits(min_sqnr=24.0).missed(first))
    assert "is 29.96 dB, and 30 dB are asked for" in str(Limits(min_sqnr=30.0).missed(Accuracy(29.96)))


def test_integers_count_by_how_many_are_equal_in_the_worst_output() -> None:
    reference = [{"ids": np.array([1, 2, 3, 4]), "flag": np.array([True]), "s": np.array(["a"])}] * 2
    outputs = [{**reference[0], "ids": np.array([1, 2, 3, 0])}, reference[1]]
    found = accuracy(reference, outputs)
    assert found.agreement == 7 / 8
    assert found.sqnr_db is None
    assert closeness_of(found) == "87.5% of the integers equal"
    assert accuracy([{"y": np.ones(3)}], [{"y": np.ones(3)}]).agreement is None


def test_what_one_of_two_shapes_lacks_counts_as_zeros() -> None:
    reference = [{"y": np.array([[3.0, 4.0]], np.float32), "n": np.array([1, 2, 3])}]
    outputs = [{"y": np.array([[3.0], [0.0]], np.float32), "n": np.array([[1, 2]])}]
    judged = accuracy(reference, outputs)
    assert judged.sqnr_db == pytest.approx(10 * np.log10(25 / 16))
    assert judged.agreement == pytest.approx(2 / 3)


def test_ratios_are_finite_numbers_whatever_the_outputs() -> None:
    silence, loud = [{"y": np.zeros((1, 4), np.float32)}], [{"y": np.full((1, 4), 3e38, np.float32)}]
    for reference, outputs in ((silence, loud), (loud, silence)):
        found = accuracy(reference, outputs).sqnr_db
        assert found is not None
        assert np.isfinite(found)
