"""How a user wants ranges and biases found, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from qdqtune.calibration.scales import Ranges

Method = Literal["minmax", "percentile", "entropy", "mse", "auto"]

AUTO: tuple[Method, ...] = ("mse", "percentile", "minmax", "entropy")
"""What method auto chooses from."""


@dataclass(frozen=True)
class Calibration:
    """How ranges are found.

    minmax: all values. percentile: the share of them given in %, without outliers at both ends. entropy: the least
    divergence of the distribution. mse: the least squared error. auto: which of these keeps the outputs closest to the
    float model's; mse where nobody looks at outputs. With `bias_correction` quantized layers keep the means of their
    outputs as well, with `equalization` channels may be scaled alike first (see `measurement.fitting`).
    """

    method: Method = "minmax"
    percentile: float = 99.99
    bias_correction: bool = False
    equalization: bool = False

    def __post_init__(self) -> None:
        if not 50 < self.percentile <= 100:
            raise ValueError("percentile lies in (50, 100]")
        if self.method not in get_args(Method):
            raise ValueError(f"no calibration method is called {self.method!r}")
        for name in ("bias_correction", "equalization"):  # files give what they like
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is true or false, not {getattr(self, name)!r}")

    def chosen(self, ranges: Ranges) -> Calibration:
        """How `ranges` were found in the end, so that it can be repeated."""
        named: Mapping[str, Method] = {m: m for m in get_args(Method)}
        method = named.get(ranges.method, self.method)
        return replace(self, method=method, bias_correction=bool(ranges.shifts), equalization=bool(ranges.factors))

    def __str__(self) -> str:
        percentile = f" {self.percentile}" if self.method == "percentile" else ""
        return self.method + percentile + (" with bias correction" if self.bias_correction else "")


CLOSEST = Calibration("auto", bias_correction=True, equalization=True)
"""What brings outputs closest to the float model's: what commands do unless told otherwise."""
