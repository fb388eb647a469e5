"""What a run would take, what its observer is told, and what region mode begins with."""

from pathlib import Path

import pytest

from observers import Log
from qdqtune.errors import BadOption
from qdqtune.search.regions.cache import read_cache
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


@pytest.mark.parametrize("cut_seed", [True, False])
@pytest.mark.usefixtures("workers")
def test_a_pattern_cache_is_tried_first(model: Path, cut_seed: bool) -> None:
    first = tune(settings(model))
    cache = out(model, "autotuner_state_pattern_cache.yaml")
    assert set(read_cache(cache))
    again = settings(model, pattern_cache=cache, output_dir=model.parent / "warm", builds=8, cut_seed=cut_seed)
    warm = tune(again)
    assert warm.history[0].proposal.origin == "pattern cache"
    assert warm.history[0].accepted
    assert warm.placement == first.placement
    with pytest.raises(BadOption, match="no pattern cache"):
        tune(settings(model, pattern_cache=out(model, "placement.yaml"), output_dir=model.parent / "w"))
