"""Histograms, and the ranges that percentile, mse and entropy take from them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import FP8, INT8, UINT8, normal
from qdqtune.calibration.calibrate import Histogram
from qdqtune.calibration.scales import Range
from range_errors import Array, close, error

pytestmark = pytest.mark.usefixtures("workers")


def filled(*parts: Array) -> Histogram:
    histogram = Histogram()
    for part in parts:
        histogram.add(part)
    return histogram


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9, 100.0])
@pytest.mark.parametrize("kind", ["normal", "one sided", "shifted"])
def test_percentiles_are_within_a_bin_of_those_of_numpy(percentile: float, kind: str) -> None:
    values = normal(50_000).astype(np.float64)
    values = {"normal": values, "one sided": np.abs(values), "shifted": values + 20}[kind]
    found = filled(*np.split(values, 10)).range(percentile)
    assert found is not None
    bin_width = 2.0 ** np.ceil(np.log2(np.abs(values).max())) / Histogram.BINS
    close(found, values, percentile, bin_width)
    if percentile == 100:
        assert found == Range(values.min(), values.max())


@settings(derandomize=True, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), min_size=1, max_size=6))
def test_counts_are_those_of_one_histogram_with_the_final_bins(parts: list[list[float]]) -> None:
    """Widening merges bins exactly: the order of the samples does not matter, nor that they came in parts."""
    arrays = [np.array(part, np.float64) for part in parts]
    forward, backward = filled(*arrays), filled(*arrays[::-1])
    assert forward._width == backward._width or not forward._width
    np.testing.assert_array_equal(forward._counts, backward._counts)
    whole = np.concatenate(arrays)
    assert forward._counts.sum() == whole.size
    if forward._width:
        edges = np.arange(-Histogram.BINS, Histogram.BINS + 1) * forward._width
        np.testing.assert_array_equal(forward._counts, np.histogram(whole, edges)[0])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([np.zeros(5)], Range(0, 0)),
        ([np.zeros(5), np.ones(5)], Range(0, 1)),
        ([np.full(3, 7.0)], Range(7, 7)),
        ([np.full(3, -7.0)], Range(-7, -7)),
        ([np.full(3, 2.0**-149), np.full(3, 2.0**127)], Range(2.0**-149, 2.0**127)),
        ([np.zeros(0)], None),
        ([np.ones(3), np.float64([1, np.nan])], None),
        ([np.float64([1, -np.inf]), np.ones(3)], None),
    ],
)
def test_odd_histograms(parts: list[Array], expected: Range | None) -> None:
    histogram = filled(*parts)
    assert histogram.range(100.0) == expected
    if len(parts) == 1 or expected is None:
        assert histogram.least_error(INT8) == histogram.least_divergence(INT8) == expected


NUMBERS = {"uint8": UINT8, "int8": INT8, "fp8": FP8}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("kind", ["normal", "relu", "heavy", "shifted"])
def test_mse_comes_close_to_the_best_range_that_a_fine_search_finds(kind: str, numbers: str) -> None:
    values = normal(20_000).astype(np.float64)
    values = {"normal": values, "relu": np.maximum(values, 0), "heavy": values**3, "shifted": values - 2}[kind]
    found = filled(*np.split(values, 4)).least_error(NUMBERS[numbers])
    assert found is not None
    top = np.abs(values).max()
    shrunk = [Range(max(-t, values.min()), min(t, values.max())) for t in np.linspace(top / 200, top, 200)]
    assert error(values, found, NUMBERS[numbers]) <= 1.05 * min(error(values, r, NUMBERS[numbers]) for r in shrunk)


def test_mse_moves_the_ends_of_an_asymmetric_range_by_themselves() -> None:
    values = np.concatenate([normal(200_000), [6.0]])
    found = filled(values).least_error(UINT8)
    assert found is not None
    assert found.high < 5  # one value, where all others gain
    assert error(values, found, UINT8) < min(error(values, Range(-t, t), UINT8) for t in (found.high, 4.0, 5.0, 6.0))


def migacz(magnitudes: Array, bin_width: float) -> dict[float, float]:
    """Divergence by threshold, as the original method has it: every number of bins from 128 on, one after the other."""
    counts = np.histogram(magnitudes, np.arange(2049) * bin_width)[0].astype(float)
    counts[0] = counts[1]
    found = {}
    for i in range(128, int(np.flatnonzero(counts)[-1]) + 2):
        p, held = counts[:i].copy(), counts[:i] > 0
        p[-1] += counts[i:].sum()
        level = np.arange(i) * 128 // i
        means = np.bincount(level, counts[:i]) / np.maximum(np.bincount(level, held), 1)
        q = np.where(held, means[level], 0.0)
        q[-1] = q[-1] or 0.0001
        p, q = p / p.sum(), q / q.sum()
        found[(i + 0.5) * bin_width] = float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())
    return found


@pytest.mark.parametrize("kind", ["normal", "relu", "heavy", "outliers"])
def test_entropy_finds_a_threshold_as_good_as_the_original_method_does(kind: str) -> None:
    values = normal(50_000).astype(np.float64)
    made = {"normal": values, "relu": np.maximum(values, 0), "heavy": values**3}
    values = made.get(kind, np.append(values, [15.0, -14.0]))
    found = filled(values).least_divergence(INT8)
    assert found is not None
    top = np.abs(values).max()
    bin_width = 2.0 ** np.ceil(np.log2(top / Histogram.BINS))
    divergences = migacz(np.abs(values), bin_width)
    best = min(divergences.values())
    threshold = min(divergences, key=lambda t: abs(t - found.magnitude))
    assert abs(found.magnitude - min(threshold, top)) <= bin_width
    assert divergences[threshold] <= 1.15 * best
    assert divergences[threshold] < 0.9 * np.median([*divergences.values()])


KEPT: dict[str, tuple[Array, float]] = {
    "an even distribution": (np.linspace(-1, 1, 50_000), 0.05),
    # Where a range holds fewer bins than codes nothing is merged, so that a tiny one would seem to lose nothing.
    "large values beside many small ones": (np.append(normal(50_000) * 0.02, np.linspace(-4, 4, 20_000)), 0.05),
    # As a spectrum in decibels has them: in a range that ends at the smallest one, one bin would hold all.
    "values far from zero": (8 + normal(50_000), 0.05),
    # A pair keeps zeros exactly, however many they are.
    "what a Relu lets pass": (np.append(np.abs(normal(20_000)), np.zeros(200_000)), 0.001),
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", KEPT)
def test_entropy_keeps_what_counts(name: str, numbers: str) -> None:
    values, share = KEPT[name]
    found = filled(values).least_divergence(NUMBERS[numbers])
    assert found is not None
    assert np.mean(np.abs(values) > found.magnitude) < share
