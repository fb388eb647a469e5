"""What does not change in a scenario: the search that is asked for, and the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqtune.calibration.scales import DEFAULT_CALIBRATION, Calibration
from qdqtune.engines import EngineSpec
from runs import settings

SCORE = "score.py"
"""The file of a metric of the user's, beside the model."""

METRIC = """
import numpy as np

def score(predict):
    wide = predict({"x": np.linspace(-2, 2, 8 * 8 * 64, dtype=np.float32).reshape(8, 8, 64)})["y"]
    return float(np.round(-np.abs(wide).mean(), 3))
"""

MODES: Mapping[str, Mapping[str, Any]] = {
    "cut": {"builds": 6},
    "region": {"builds": 8},
    "subgraph": {"builds": 4},
    "front": {"mode": "cut", "front": True, "builds": 12},
}
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "asymmetric": {"asymmetric": True},
    "refusing": {"faults": {"refuse": "second"}},
    "without times": {"hide_times": True},
}
CALIBRATIONS = {"minmax": Calibration(), "usual": DEFAULT_CALIBRATION}
ASKS: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "limits": {"min_sqnr": 40.0, "accuracy_samples": 3},
    "scores": {"scores": ("y:2",), "min_agreement": 1.0, "min_sqnr": None, "accuracy_samples": 3},
    "metric": {"metric": "cosine", "max_drop": 5e-4},
    "function": {"evaluate": SCORE, "max_drop": 0.01},
    "little time": {"time_budget": 0.8},
    "enough time": {"time_budget": 600.0},
}
"""Limits on accuracy, and budgets of time."""

OFTEN = ("cut", "cut", "cut", "region", "region", "region", "subgraph", "front")
"""How often each mode is drawn: the last two take twice as long."""

KINDS_OF_WORLDS = (
    ("plain", "minmax", 0),
    ("plain", "minmax", 1),
    ("asymmetric", "minmax", 0),
    ("asymmetric", "usual", 2),
    ("refusing", "minmax", 0),
    ("refusing", "minmax", 3),
    ("without times", "usual", 0),
    ("plain", "minmax", 0, 2),
    ("refusing", "minmax", 1, 3),
)
"""Engine, calibration, noise of latencies (0 is none), and workers."""


@dataclass(frozen=True)
class World:
    """What does not change in a scenario: the mode of the search, the engine, the noise of its latencies, and what
    else is asked for."""

    mode: str = "cut"
    engine: str = "plain"
    calibration: str = "minmax"
    noise: int = 0
    workers: int = 1
    asks: str = "nothing"

    @property
    def time_budget(self) -> float | None:
        """The seconds that a run may take."""
        return ASKS[self.asks].get("time_budget")

    def settings(self, model: Path) -> Any:
        """The command that is given."""
        engine = EngineSpec("fake", dict(ENGINES[self.engine]))
        how: dict[str, Any] = {
            "workers": self.workers,
            "mode": self.mode,
            "time_limit": 30.0,
            "calibration": CALIBRATIONS[self.calibration],
        }
        asked = dict(ASKS[self.asks])
        if "evaluate" in asked:
            asked["evaluate"] = f"{model.with_name(SCORE)}:score"
        return settings(model, engine=engine, **how | MODES[self.mode] | asked)
