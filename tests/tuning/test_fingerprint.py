"""What a run was made with: a change that matters is refused by its name, budgets may change."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models import feeds
from qdqtune.calibration.scales import Calibration
from qdqtune.engines import EngineSpec
from qdqtune.errors import BadState
from qdqtune.search.region import Config
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from runs import mixed, settings, write
from workers import in_process

STATE = "autotuner_state.yaml"


def another_model(model: Path) -> dict[str, Any]:
    proto = onnx.load(model)
    weight = next(i for i in proto.graph.initializer if i.name == "w3")
    weight.CopyFrom(onnx.numpy_helper.from_array(1.5 * onnx.numpy_helper.to_array(weight), "w3"))
    onnx.save(proto, model)
    return {}


def other_samples(model: Path) -> dict[str, Any]:
    np.savez(model.with_suffix(".npz"), x=np.stack([s["x"] for s in feeds(mixed(), 3, seed=5)]))
    return {}


CHANGES: dict[str, Any] = {
    "model": another_model,
    "calibration data": other_samples,
    "calibration method": {"calibration": Calibration("percentile", 99.9)},
    "seed": {"seed": 1},
    "quant type": {"quant_type": "fp8"},
    "rewrites": {"rewrites": "off"},
    "engine numbers": {"engine": EngineSpec("fake", {"asymmetric": True})},
    "regions": {"regions": "topology"},
    "node filter": {"node_filter": ("first",)},
    "input shapes": {"input_shapes": {"x": (8, 8, 64)}},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes]]:
    """A finished run, and its state."""
    with in_process():
        model = write(mixed(), tmp_path_factory.mktemp("done"))
        tune(settings(model, builds=4))
        yield model, (model.parent / "out" / STATE).read_bytes()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_matters_is_refused_by_its_name(done: tuple[Path, bytes], tmp_path: Path, name: str) -> None:
    _, state = done
    model = write(mixed(), tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / STATE).write_bytes(state)
    change = CHANGES[name](model) if callable(CHANGES[name]) else CHANGES[name]
    with pytest.raises(BadState, match=f"was made with (another )?{re.escape(name)}[ ,]") as refusal:
        tune(settings(model, builds=4, **change))
    assert len(str(refusal.value).splitlines()) == 1
    assert (tmp_path / "out" / STATE).read_bytes() == state
    assert tune(settings(model, builds=4, restart=True, **change)).history


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    "change",
    [
        {"builds": 6},
        {"time_budget": 100.0},
        {"time_limit": 9.0},
        {"min_sqnr": 30.0},
        {"config": Config(schemes_per_region=9)},
        {"plan": Plan((7, 20), 0.02, turn_seconds=0.0)},
        {"plan": Plan((12, 24, 48, 96), turn_seconds=0.0)},
    ],
)
def test_budgets_and_limits_may_change(done: tuple[Path, bytes], change: dict[str, Any]) -> None:
    model, state = done
    assert tune(settings(model, **{"builds": 4, **change})).history
    assert (model.parent / "out" / STATE).read_bytes().startswith(state)
