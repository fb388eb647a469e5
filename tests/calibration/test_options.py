"""Options for ranges: what is given counts, and a cache of scales excludes them."""

from pathlib import Path

import pytest

from qdqtune.calibration.options import CacheOption, RangeOptions, check_cache
from qdqtune.calibration.scales import DEFAULT_CALIBRATION, Calibration
from qdqtune.errors import BadOption


def test_what_is_given_counts_and_defaults_stand_for_the_rest() -> None:
    assert RangeOptions().calibration == DEFAULT_CALIBRATION
    given = RangeOptions(calibration_method="percentile:99")
    assert given.calibration == Calibration("percentile", 99.0, DEFAULT_CALIBRATION.bias_correction)
    assert RangeOptions(calibration_method="percentile:99.99999").calibration.percentile == 99.99999


@pytest.mark.parametrize(
    "given", [{"calibration_method": "percentile:99"}, {"bias_correction": False}, {"calibration_method": "mse"}]
)
def test_a_cache_of_scales_excludes_how_ranges_are_found(given: dict[str, object]) -> None:
    cache = CacheOption(calibration_cache=Path("c.cache"))
    check_cache(RangeOptions(), cache)
    check_cache(RangeOptions(**given), CacheOption())
    with pytest.raises(BadOption, match="brings the scales: leave `calibration_method`"):
        check_cache(RangeOptions(**given), cache)


@pytest.mark.parametrize("percentile", [50.0, 100.1, 0.0])
def test_percentiles_that_make_no_sense(percentile: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        Calibration("percentile", percentile)
