"""What a run gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qdqtune.timing.ratios import Ratio
from qdqtune.tuning.modes.mode import Recorded
from qdqtune.tuning.records import Shipped
from qdqtune.types import Placement, Trial


@dataclass(frozen=True)
class Result:
    """What came out: the placement that ships (empty without an improvement), the summary, and every trial.

    `ratio` is final to baseline on the shipped files; None where nothing better was found. `shipped` says what
    optimized_final.onnx is: the tuned model, the baseline, or a copy of the user's file. `recorded` is what the mode
    knows besides.
    """

    shipped: Shipped
    placement: Placement
    ratio: Ratio | None
    summary: Mapping[str, Any]
    history: tuple[Trial, ...]
    notes: tuple[str, ...]
    recorded: Recorded = field(default_factory=Recorded)

    @property
    def improved(self) -> bool:
        """Whether the shipped model is faster than the baseline, beyond noise."""
        return self.shipped == "tuned"

    @property
    def unmet(self) -> bool:
        """Whether candidates were faster, but none of them holds the limits on accuracy."""
        return self.summary["constraint_met"] is False
