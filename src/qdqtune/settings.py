"""What a tuning run is told, and the presets of `--effort`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from qdqtune.calibration import Calibration
from qdqtune.engines import EngineSpec, QuantType
from qdqtune.errors import BadOption
from qdqtune.strategies.region import Config
from qdqtune.timing import Plan

FINAL_BUILDS = 9
"""Builds that are no candidates: the float model, and two of each file in the two comparisons of the proof."""

TRIAL_BUILDS = 3
"""Builds that a candidate may take."""


@dataclass(frozen=True)
class Effort:
    """How much a run may spend: schemes per region, builds in all, rounds of a comparison and of the final proof."""

    schemes_per_region: int
    builds: int
    looks: tuple[int, ...]
    final_rounds: int


EFFORTS: Mapping[str, Effort] = MappingProxyType(
    {
        "quick": Effort(4, 30, (12, 20), 16),
        "default": Effort(50, 60, (12, 20, 32, 48), 24),
        "extensive": Effort(200, 400, (12, 24, 48, 96), 48),
    }
)


@dataclass(frozen=True)
class Settings:
    """Everything that a tuning run is told. Budgets (`builds`, `time_budget`) may grow when a run is resumed.

    `time_budget` and `time_limit` are in seconds: of the search, and of one request to the engine.
    """

    model: Path
    output_dir: Path = Path("qdqtune_output")
    engine: EngineSpec = field(default_factory=lambda: EngineSpec("onnxruntime"))
    mode: Literal["region"] = "region"
    quant_type: QuantType = "int8"
    calibration_data: str | None = None
    calibration_samples: int | None = None
    accuracy_samples: int = 4
    calibration: Calibration = field(default_factory=Calibration)
    fix_inputs: Mapping[str, float | int | str] = field(default_factory=dict)
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    regions: Literal["auto", "names", "topology"] = "auto"
    config: Config = field(default_factory=Config)
    plan: Plan = field(default_factory=Plan)
    final_rounds: int = EFFORTS["default"].final_rounds
    builds: int = EFFORTS["default"].builds
    time_budget: float | None = None
    time_limit: float = 600.0
    seed: int = 0
    node_filter: tuple[str, ...] = ()
    default_dq_dtype: Literal["float16", "float32", "bfloat16"] | None = None
    state_file: Path | None = None
    pattern_cache: Path | None = None
    qdq_baseline: Path | None = None
    from_qdq: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        least = FINAL_BUILDS + TRIAL_BUILDS
        if self.builds < least:
            raise BadOption(f"--builds {self.builds} leaves no candidate: give at least {least}")
        if self.final_rounds < 10:
            raise BadOption("the final proof needs at least 10 rounds")
        if self.time_budget is not None and self.time_budget <= 0:
            raise BadOption("--time-budget is above zero")
        if self.from_qdq and self.qdq_baseline:
            raise BadOption("--from-qdq and --qdq-baseline exclude each other")

    @property
    def search_builds(self) -> int:
        """Builds that the search may spend."""
        return self.builds - FINAL_BUILDS

    @property
    def state(self) -> Path:
        """The state file."""
        return self.state_file or self.output_dir / "autotuner_state.yaml"
