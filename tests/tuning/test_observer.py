"""Events of a run: in order, and passed on as far as an observer takes them."""

from pathlib import Path

import pytest

from observers import Log
from qdqtune.tuning.loop import tune
from runs import settings


@pytest.mark.usefixtures("workers")
def test_the_observer_gets_every_trial_in_order(model: Path) -> None:
    log = Log()
    result = tune(settings(model, builds=17), log)
    assert [t.number for t, _, _ in log.trials] == list(range(1, len(result.history) + 1))
    assert [t.placement for t, _, _ in log.trials] == [t.placement for t in result.history]
    assert {verdict for _, verdict, _ in log.trials} == {"faster", "slower"}
    spent = [state.builds for _, _, state in log.trials]
    assert spent == sorted(spent)
    assert spent[-1] == 1 + len(result.history) == result.summary["builds"]
    assert log.trials[-1][2].best_ratio == pytest.approx(result.summary["ratio"])
    assert not any(state.replayed for _, _, state in log.trials)
