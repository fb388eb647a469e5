"""What a run knows once it is open."""

from pathlib import Path

import pytest

from decoders import CALLS, WEIGHTS, cost, decoder, mean, settings, written
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.run import open_run, prepared


@pytest.mark.usefixtures("workers")
def test_a_budget_knows_that_a_round_calls_every_workload(tmp_path: Path) -> None:
    model = written(tmp_path, decoder(), CALLS)
    with (
        prepared(settings(model, WEIGHTS), Silent()) as ready,
        open_run(ready) as run,
    ):
        assert run.bench.floats.seconds == pytest.approx(mean(model))
        assert run.bench.floats.turn_seconds == pytest.approx(1.5 * sum(cost(model, call) for call in CALLS.values()))
