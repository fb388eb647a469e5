"""What does not change in a scenario: the search that is asked for, and the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqtune.calibration.scales import DEFAULT_CALIBRATION, Calibration
from qdqtune.engines import EngineSpec
from runs import settings

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
    """What does not change in a scenario: the mode of the search, the engine, and the noise of its latencies."""

    mode: str = "cut"
    engine: str = "plain"
    calibration: str = "minmax"
    noise: int = 0
    workers: int = 1

    def settings(self, model: Path) -> Any:
        """The command that is given."""
        engine = EngineSpec("fake", dict(ENGINES[self.engine]))
        how: dict[str, Any] = {
            "workers": self.workers,
            "mode": self.mode,
            "time_limit": 30.0,
            "calibration": CALIBRATIONS[self.calibration],
        }
        return settings(model, engine=engine, **how | MODES[self.mode])
