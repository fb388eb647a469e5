"""Killed at any step and started again, a run ends with the same files as one that nobody disturbed.

What a driver has on disk at some of its steps, on the fake engine, is what a kill leaves there.
"""

import shutil
from pathlib import Path

import pytest

from qdqtune.tuning.loop import tune
from qdqtune.tuning.store import Store
from runs import settings

STATE = "autotuner_state.yaml"
SHIPPED = (STATE, "baseline.onnx", "optimized_final.onnx", "placement.yaml")
MODES = {
    "cut": {"builds": 6},
    "region": {"builds": 8, "mode": "region"},
    "subgraph": {"builds": 4, "mode": "subgraph"},
    "front": {"builds": 14, "front": True},
}
EACH = 9
"""Every so many steps of a driver are looked at."""


def shipped(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in SHIPPED}


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("mode", MODES)
def test_what_a_driver_leaves_at_any_step_is_gone_on_with(model, mode, monkeypatch):
    """A driver that is killed leaves what is on disk: so what is there at its steps is what a kill leaves."""
    out, steps = model.parent / "out", [0]
    append, replace = Store._append, Path.replace

    def step() -> None:
        steps[0] += 1
        if steps[0] % EACH == 0:
            shutil.copytree(out, model.parent / f"killed_{steps[0]}")

    def appended(self: Store, record: dict[str, object]) -> None:
        append(self, record)
        step()

    def replaced(self: Path, target: Path) -> Path:
        step()
        return replace(self, target)

    asked = {"mode": "cut"} | MODES[mode]
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_append", appended)
        patch.setattr(Path, "replace", replaced)
        expected = tune(settings(model, **asked))
    left = sorted(model.parent.glob("killed_*"))
    assert len(left) >= 2
    for folder in left:
        found = tune(settings(model, output_dir=folder, **asked))
        assert found.history == expected.history, folder.name
        assert shipped(folder) == shipped(out), folder.name
        assert not list(folder.glob(".qdqtune-*")), folder.name
