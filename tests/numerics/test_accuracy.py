"""Output error in dB, of whole outputs and of the parts that the whole hides."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from models import build
from qdqtune.numerics.accuracy import (
    MOST_SLICES,
    Slice,
    accuracy,
    closeness_of,
    concern,
    is_finite,
    slice_cell,
    sqnr_db,
    worst_slice,
)
from qdqtune.numerics.scores import NO_SCORES, copies_in
from qdqtune.timing.limits import Limits
from qdqtune.types import Accuracy, Array


def test_noise_is_summed_over_samples_and_the_worst_float_output_counts() -> None:
    reference = [{"y": np.float32([3, 4])}, {"y": np.float32([0, 5])}]
    outputs = [{"y": np.float32([3, 4.5])}, {"y": np.float32([0.5, 5])}]
    assert sqnr_db(reference, outputs) == pytest.approx(10 * np.log10(50 / 0.5))
    reference = [{"a": np.ones(4, np.float32), "b": np.ones(4, np.float16), "n": np.arange(4)}]
    outputs = [{"a": np.full(4, 1.5, np.float32), "b": np.full(4, 1.1, np.float16), "n": np.zeros(4, np.int64)}]
    assert sqnr_db(reference, outputs) == pytest.approx(10 * np.log10(4))
    both = accuracy(reference, outputs)
    assert (both.by_output, both.worst_output) == (
        {"a": pytest.approx(6.02, abs=0.01), "b": pytest.approx(20, abs=0.1)},
        "a",
    )
    assert "is 6.0 dB (a, the worst output), and" in str(Limits(min_sqnr=20.0).missed(both))
    assert accuracy(reference[:1], [reference[0] | {"b": outputs[0]["b"]}]).by_output["a"] is None


def test_float16_is_squared_without_overflow_and_ratios_are_finite_numbers_whatever_the_outputs() -> None:
    reference, outputs = [{"y": np.full(9, 60000, np.float16)}], [{"y": np.full(9, 59968, np.float16)}]
    assert sqnr_db(reference, outputs) == pytest.approx(20 * np.log10(60000 / 32))
    silence, loud = [{"y": np.zeros((1, 4), np.float32)}], [{"y": np.full((1, 4), 3e38, np.float32)}]
    assert -np.inf < (sqnr_db(silence, loud) or 0) < -100
    assert sqnr_db(loud, silence) == 0
    same = [{"y": np.float32([1, 2]), "n": np.array([3]), "e": np.zeros((0, 4), np.float32)}]
    assert sqnr_db(same, same) is None
    assert sqnr_db([{"n": np.array([3])}], [{"n": np.array([4])}]) is None


@pytest.mark.parametrize(("value", "expected"), [(1.0, True), (np.nan, False), (np.inf, False), (-np.inf, False)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
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


def test_equal_copies_of_inputs_prove_nothing() -> None:
    net = build("""net (int64[2] ids, float[2] x) => (int64[2] same, int64[1] size, int64 best, float[2] y) {
        y, "" = Dropout(x)
        most = Constant <value_int = 5> ()
        same = Clip(ids, "", most)
        size = Shape(x)
        best = ArgMax <keepdims = 0> (y)
    }""")
    copies = copies_in(net)
    assert copies == {"same", "size"}
    reference = [{"same": np.array([1, 2]), "size": np.array([2])}]
    scores = replace(NO_SCORES, copies=copies)
    assert accuracy(reference, reference, scores).agreement is None
    assert accuracy(reference, [{**reference[0], "same": np.array([1, 3])}], scores).agreement == 0.5


def test_a_sample_of_another_shape_has_nothing_right() -> None:
    def sample(length: int) -> dict[str, Array]:
        best = np.arange(length, dtype=np.int64)
        return {"y": np.eye(8, dtype=np.float32)[None, best], "n": best}

    judged = accuracy([sample(6)] * 4, [*[sample(6)] * 3, sample(2)])
    assert judged.sqnr_db == pytest.approx(10 * np.log10(24 / 8))
    assert judged.lowest_db == pytest.approx(10 * np.log10(6 / 8))
    assert judged.agreement == judged.top1 == 0.75
    assert judged.other_shapes == 1
    assert str(concern(judged)).startswith("1 of 4 samples gave outputs of another shape")
    assert "1 of 4 samples" in str(Limits(min_agreement=0.8).missed(judged))
    longer = accuracy([sample(6)], [{name: array[..., None] for name, array in sample(6).items()}], NO_SCORES)
    assert (longer.agreement, longer.other_shapes) == (0.0, 1)


SAMPLES = 24

Make = Callable[[np.random.Generator], Array]
"""Values of an output for all samples, batch first."""


def in_8_bits(values: Array) -> Array:
    """As a pair with one scale for all gives them back."""
    low, high = min(values.min(), 0), max(values.max(), 0)
    scale = (high - low) / 255
    return (np.clip(np.round(values / scale), low / scale, high / scale) * scale).astype(np.float32)


def judged(exact: Array, actual: Array) -> Slice:
    found = worst_slice({"y": [(exact[i : i + 1], actual[i : i + 1]) for i in range(len(exact))]})
    return found or Slice("", np.inf, False)


def sigmoid(logits: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-logits)))


def boxes_and_scores(rng: np.random.Generator) -> Array:
    return np.concatenate([640 * rng.random((SAMPLES, 50, 4)), 0.08 * rng.random((SAMPLES, 50, 3))], 2)


LOST: dict[str, tuple[Make, str]] = {
    "scores beside boxes": (boxes_and_scores, "y[:, :, 4:7]"),
    "the same with channels first": (lambda rng: boxes_and_scores(rng).transpose(0, 2, 1), "y[:, 4:7, :]"),
    "one score beside 14 coordinates": (
        lambda rng: np.concatenate([320 * rng.random((SAMPLES, 50, 14)), 0.5 * rng.random((SAMPLES, 50, 1))], 2),
        "y[:, :, 14]",
    ),
    "an offset beside which the values vary little": (lambda rng: 1000 + rng.random((SAMPLES, 1)), "y[:, 0]"),
}

HEALTHY: dict[str, Make] = {
    "channels of unlike size": lambda rng: rng.normal(size=(SAMPLES, 96)) * np.exp(2 * rng.normal(size=96)),
    "a channel that is hardly used": lambda rng: rng.normal(size=(SAMPLES, 96)) * np.where(np.arange(96) == 5, 1e-3, 1),
    "padding": lambda rng: rng.normal(size=(SAMPLES, 64, 8)) * (np.arange(64) < 40)[:, None],
    "rounding of floats in padding": lambda rng: (
        rng.normal(size=(SAMPLES, 64, 8)) * np.where(np.arange(64) < 40, 1, 1e-8)[:, None]
    ),
    "classes that the samples do not have": lambda rng: sigmoid(
        2 * rng.normal(size=(SAMPLES, 20)) + np.where(np.arange(20) < 18, -12, 2)
    ),
    "a mask": lambda rng: sigmoid(
        np.where(abs(np.arange(32) - 16) < 6, 8, -14) + rng.normal(size=(SAMPLES, 1, 32, 32))
    ),
    "bins of a spectrum": lambda rng: (
        np.abs(rng.normal(size=(SAMPLES, 129, 8))) * 10 ** -np.linspace(0, 4, 129)[:, None]
    ),
    "one value": lambda rng: rng.normal(size=(SAMPLES, 1)),
    "no parts": lambda rng: rng.normal(size=(SAMPLES,)),
    "hardly any samples": lambda rng: np.concatenate([640 * rng.random((3, 4)), 0.08 * rng.random((3, 3))], 1),
}


@pytest.mark.parametrize("name", LOST)
def test_a_part_that_the_whole_hides_is_named(name: str) -> None:
    make, where = LOST[name]
    exact = make(np.random.default_rng(0)).astype(np.float32)
    actual = in_8_bits(exact)
    found = judged(exact, actual)
    assert (found.name, found.is_lost) == (where, True)
    assert found.db < 6
    assert 10 * np.log10(np.square(exact).sum() / np.square(exact - actual).sum()) > 40


@pytest.mark.parametrize("name", HEALTHY)
def test_no_part_of_a_healthy_output_is_lost(name: str) -> None:
    exact = HEALTHY[name](np.random.default_rng(0)).astype(np.float32)
    assert not judged(exact, in_8_bits(exact)).is_lost


def test_noise_that_the_whole_shows_hides_nothing() -> None:
    rng = np.random.default_rng(0)
    exact = boxes_and_scores(rng)
    found = judged(exact, exact + rng.normal(scale=60, size=exact.shape))
    assert not found.is_lost
    assert found.db < 0


def test_a_slice_that_is_only_somewhat_worse_than_a_whole_at_the_floor_is_not_lost() -> None:
    rng = np.random.default_rng(0)
    exact, noise = rng.normal(size=(2, 4000, 100))
    noise *= np.where(np.arange(100) == 7, 10 ** (-5 / 20), 10 ** (-21 / 20))
    found = judged(exact, exact + noise)
    assert found.db == pytest.approx(5, abs=0.5)
    assert not found.is_lost


def test_one_of_many_channels_of_the_same_size_may_be_lost() -> None:
    exact = np.random.default_rng(0).normal(size=(SAMPLES, 300)).astype(np.float32)
    actual = exact.copy()
    actual[:, 7] = exact[:, 8]
    found = judged(exact, actual)
    assert (found.name, found.is_lost) == ("y[:, 7]", True)


def test_axes_of_unlike_or_many_indices_have_no_slices() -> None:
    rng = np.random.default_rng(0)
    samples = [rng.normal(size=(1, length, 2)) for length in (20, 30)]
    found = worst_slice({"y": [(array, array + 0.01) for array in samples]})
    assert found.name in ("y[:, :, 0]", "y[:, :, 1]")
    long = rng.normal(size=(16, MOST_SLICES + 1))
    assert worst_slice({"y": [(long, long + 0.01)]}) is None
    assert worst_slice({"y": [(long, long.ravel())]}) is None


def test_a_lost_part_misses_a_limit_on_the_outputs_and_no_limit_lets_it_pass() -> None:
    exact = boxes_and_scores(np.random.default_rng(0)).astype(np.float32)
    reference = [{"n": np.arange(3), "y": exact[i : i + 1]} for i in range(SAMPLES)]
    actual = in_8_bits(exact)
    found = accuracy(reference, [{"n": np.arange(3), "y": actual[i : i + 1]} for i in range(SAMPLES)])
    told = Limits(min_sqnr=20.0).missed(found)
    assert told.startswith("the output SQNR of all samples is 0.0 dB (y, smaller values, the worst output)")
    assert not Limits(min_sqnr=3.0).is_exact_enough(found)
    assert Limits().is_exact_enough(found)
    assert slice_cell(found).endswith(" dB (lost)")
