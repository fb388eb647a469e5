"""Options of OpenVINO, readable without its library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from qdqtune.errors import BadOption

FLOAT_PRECISIONS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class OpenVinoOptions:
    """Options of OpenVINO."""

    threads: Annotated[int, "CPU threads"] = 1
    precision: Annotated[str, "of all that carries no Q/DQ pair: f32, f16 or bf16"] = "f32"
    denormals_as_zero: Annotated[bool, "take denormal numbers as zero"] = True

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise BadOption(f"`threads` must be a whole number from 1 on, not {self.threads}")
        if self.precision not in FLOAT_PRECISIONS:
            known = ", ".join(FLOAT_PRECISIONS)
            raise BadOption(f"engine 'openvino' has no precision {self.precision!r}; it has {known}")
