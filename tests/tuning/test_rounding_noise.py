"""What rounding does to the outputs is measured once, and read from the state file by later runs."""

from pathlib import Path

import pytest

from qdqtune.engines import EngineSpec
from qdqtune.tuning.loop import tune
from runs import settings


@pytest.mark.usefixtures("workers")
def test_noise_is_not_measured_twice(model: Path) -> None:
    noisy = settings(model, engine=EngineSpec("fake", {"noise": 0.02, "drift": 0.05}), builds=12)
    first = tune(noisy)
    assert tune(noisy).history == first.history
    assert tune(noisy).ratio == first.ratio
