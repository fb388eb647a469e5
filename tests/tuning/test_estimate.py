"""What a run would take, estimated from one build."""

from pathlib import Path

import pytest

from qdqtune.tuning.estimate import estimate
from qdqtune.tuning.loop import tune
from runs import cost, out, settings


@pytest.mark.usefixtures("workers")
def test_an_estimate_builds_the_float_model_once_and_leaves_no_state(model: Path) -> None:
    expected = estimate(settings(model))
    assert expected.latency == pytest.approx(cost(model))
    assert expected.builds <= 32
    assert expected.patterns == 4
    assert expected.seconds > 0
    assert not out(model, "autotuner_state.yaml").exists()
    assert tune(settings(model)).summary["patterns"] == expected.patterns
