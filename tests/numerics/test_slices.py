"""A part of an output that loses its values is found where the whole hides it; healthy outputs have no lost part."""

from collections.abc import Callable

import numpy as np
import pytest

from qdqtune.numerics.accuracy import MOST_SLICES, Slice, accuracy, concern, slice_cell, worst_slice
from qdqtune.timing.limits import Limits
from qdqtune.types import Accuracy, Array

SAMPLES = 24

Make = Callable[[np.random.Generator], Array]
"""Values of an output for all samples, batch first."""


def in_8_bits(values: Array) -> Array:
    """As a pair with one scale for all gives them back."""
    low, high = min(values.min(), 0), max(values.max(), 0)
    scale = (high - low) / 255
    return (np.clip(np.round(values / scale), low / scale, high / scale) * scale).astype(np.float32)


def judged(exact: Array, actual: Array) -> Slice | None:
    return worst_slice("y", [(exact[i : i + 1], actual[i : i + 1]) for i in range(len(exact))])


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
    assert found is not None
    assert (found.name, found.is_lost) == (where, True)
    assert found.db < 6
    assert 10 * np.log10(np.square(exact).sum() / np.square(exact - actual).sum()) > 40


@pytest.mark.parametrize("name", HEALTHY)
def test_no_part_of_a_healthy_output_is_lost(name: str) -> None:
    exact = HEALTHY[name](np.random.default_rng(0)).astype(np.float32)
    found = judged(exact, in_8_bits(exact))
    assert found is None or not found.is_lost


def test_a_small_part_with_a_scale_of_its_own_is_healthy_and_classes_that_do_not_occur_say_nothing() -> None:
    rng = np.random.default_rng(0)
    scores = sigmoid(4 * rng.normal(size=(SAMPLES, 20, 50)) - np.where(np.arange(20) < 15, 20, 4)[:, None])
    parts = [a.astype(np.float32) for a in (640 * rng.random((SAMPLES, 4, 50)), scores)]
    found = judged(np.concatenate(parts, 1), np.concatenate([in_8_bits(part) for part in parts], 1))
    assert found is not None
    assert not found.is_lost


def test_noise_that_the_whole_shows_hides_nothing() -> None:
    rng = np.random.default_rng(0)
    exact = boxes_and_scores(rng)
    found = judged(exact, exact + rng.normal(scale=60, size=exact.shape))
    assert found is not None
    assert not found.is_lost
    assert found.db < 0


def test_a_slice_that_is_only_somewhat_worse_than_a_whole_at_the_floor_is_not_lost() -> None:
    rng = np.random.default_rng(0)
    exact, noise = rng.normal(size=(2, 4000, 100))
    noise *= np.where(np.arange(100) == 7, 10 ** (-5 / 20), 10 ** (-21 / 20))
    found = judged(exact, exact + noise)
    assert found is not None
    assert found.db == pytest.approx(5, abs=0.5)
    assert not found.is_lost


def test_one_of_many_channels_of_the_same_size_may_be_lost() -> None:
    exact = np.random.default_rng(0).normal(size=(SAMPLES, 300)).astype(np.float32)
    actual = exact.copy()
    actual[:, 7] = exact[:, 8]
    found = judged(exact, actual)
    assert found is not None
    assert (found.name, found.is_lost) == ("y[:, 7]", True)


def test_axes_of_unlike_or_many_indices_have_no_slices() -> None:
    rng = np.random.default_rng(0)
    samples = [rng.normal(size=(1, length, 2)) for length in (20, 30)]
    found = worst_slice("y", [(array, array + 0.01) for array in samples])
    assert found is not None
    assert found.name in ("y[:, :, 0]", "y[:, :, 1]")
    long = rng.normal(size=(16, MOST_SLICES + 1))
    assert worst_slice("y", [(long, long + 0.01)]) is None
    assert worst_slice("y", [(long, long.ravel())]) is None


def test_a_lost_part_misses_a_limit_on_the_outputs_and_no_limit_lets_it_pass() -> None:
    exact = boxes_and_scores(np.random.default_rng(0)).astype(np.float32)
    reference = [{"n": np.arange(3), "y": exact[i : i + 1]} for i in range(SAMPLES)]
    actual = in_8_bits(exact)
    found = accuracy(reference, [{"n": np.arange(3), "y": actual[i : i + 1]} for i in range(SAMPLES)])
    assert found.sqnr_db is not None
    assert found.sqnr_db > 40
    told = concern(found)
    assert told is not None
    assert told.startswith("y[:, :, 4:7] lost its values: ")
    assert told.endswith(f"hidden in an output SQNR of {found.sqnr_db:.1f} dB")
    assert Limits(min_sqnr=20.0).missed(found) == told
    assert not Limits(min_sqnr=3.0).is_exact_enough(found)
    assert Limits().is_exact_enough(found)
    assert slice_cell(found).endswith(" dB (lost)")


def test_the_worst_slice_of_healthy_outputs_is_told_as_well() -> None:
    exact = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype(np.float32)
    found = accuracy([{"y": exact}], [{"y": exact + np.float32([0, 0, 0.1, 0])}])
    assert concern(found) is None
    assert slice_cell(found).startswith("y[:, 2] ")
    assert slice_cell(Accuracy()) == slice_cell(None) == ""
