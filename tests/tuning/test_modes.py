"""What a mode begins with: the pattern cache of an earlier run in region mode."""

from pathlib import Path

import pytest

from qdqtune.errors import BadOption
from qdqtune.search.regions.cache import read_cache
from qdqtune.tuning.loop import tune
from runs import out, settings


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
