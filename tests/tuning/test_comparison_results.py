"""What comparisons gave, as values."""

import pytest

from qdqtune.timing.ratios import Plan
from qdqtune.tuning.comparison_results import Compared
from qdqtune.types import Measurement


def test_times_agree_with_the_ratio_where_the_machine_drifts() -> None:
    """Both models take ten times as long in the last round, and b runs in it twice: the medians alone would mislead."""
    rounds = Measurement((1.0, 1.0, 10.0, 10.0), (0.9, 9.0, 9.0, 9.0))
    found = Compared.of([rounds, rounds], Plan((2,)))
    assert found.b_seconds / found.a_seconds == pytest.approx(found.ratio.median)
