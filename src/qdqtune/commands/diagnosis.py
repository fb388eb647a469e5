"""What `debug` has found: guilty tensors, wrong parts of the model, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qdqtune.commands.probes import UNKNOWN_NOISE, WrongPart
from qdqtune.numerics.slices import ANOTHER_SIZE
from qdqtune.placement.file_pairs import Kind
from qdqtune.types import Placement, sqnr_of

# The limits are chosen, not measured.

OFF = 0.05
"""Two ranges are alike if they differ by less than this share of the tensor's range."""

MOVED = 8.0
"""A bias was changed by more than rounding if it is more than this many steps of its scale off the float bias."""

COARSE = 3.0
"""A pair's range is too wide if it is this many times that of the float tensor: it wastes more than a bit."""

SENSITIVE = "its range fits: the network is sensitive there"

Cause = Literal["numbers", "engine"]


@dataclass(frozen=True)
class Suspect:
    """A tensor whose pair breaks the outputs, or does most damage where no single one breaks them.

    `cause` says what is wrong: the numbers of the pair, or what the engine computes from them. `nodes` are the nodes to
    keep in float: those that read the tensor through the pair, or the node that makes a graph output. Noise is relative
    to the signal at the outputs, measured with `company` pairs in the model and no others: `noise` with this pair,
    `without` without it. `float_range` are the values of the float tensor on the samples, `quantized_range` those that
    the pair can represent. `joined` are the ranges of the tensors that a Concat joins to this one, if it does.
    """

    tensor: str
    kind: Kind
    cause: Cause
    nodes: tuple[str, ...]
    noise: float
    without: float
    company: int
    float_range: tuple[float, float]
    quantized_range: tuple[float, float]
    scale: tuple[float, float]
    zero_point: tuple[float, float]
    joined: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """In words, what is wrong with the pair, judged by its range and that of the float tensor."""
        if self.cause == "engine":
            return "the engine computes other values than the pair says"
        low, high = self.quantized_range
        least, most = self.float_range
        if not np.isfinite(self.quantized_range).all():
            return "its scale is no finite number"
        if low == high:
            return "its pair can give one value only"
        if self.kind == "bias" and max(abs(low - least), abs(high - most)) > MOVED * max(map(abs, self.scale)):
            return "it was moved to make up for what other pairs do (bias correction), and does harm where they do not"
        width = max(most - least, np.finfo(np.float64).tiny)
        if self.kind != "activation":
            off = max(abs(low - least), abs(high - most)) > OFF * width
            return "its constant has other values than the float one" if off else SENSITIVE
        cut = max(low - least, most - high, 0.0) / width
        if cut > OFF:
            return f"its pair cuts off {100 * min(cut, 1):.0f} % of the range"
        if high - low > COARSE * max(most - least, most, -least):
            return f"its pair spends its steps on a range {(high - low) / width:.3g} times as wide"
        sizes = {name: max(map(abs, ends)) for name, ends in self.joined.items()}
        if sizes and max(sizes.values()) > ANOTHER_SIZE * min(sizes.values()):
            told = ", ".join(f"{name} up to {size:.4g}" for name, size in sizes.items())
            return f"a Concat gives one scale to parts of unlike size: {told}"
        return SENSITIVE

    def to_dict(self) -> dict[str, Any]:
        """The tensor as JSON values; NaN and infinite ends of ranges are text, since JSON has no such numbers."""
        levels = {"with_db": sqnr_of(self.noise), "without_db": sqnr_of(self.without)}
        kept = {name: value for name, value in asdict(self).items() if name not in ("noise", "without")}
        for name in ("float_range", "quantized_range", "scale", "zero_point"):
            kept[name] = [end if np.isfinite(end) else str(end) for end in kept[name]]
        return kept | levels | {"reason": self.reason}


@dataclass(frozen=True)
class Diagnosis:
    """The result of `debug`. Noise is relative to the signal, of the worst output; see `probes.noise`.

    `noise` is that of `file` on the `engine` on all `samples`. The next values are measured on the `examined` worst
    samples: `noise_there` of the file, `by_numbers` of its pairs as ONNX defines them (None: not needed), and `rest`
    without the guilty pairs. `largest` is filled where `rest` is above the limit and no pair stands out. `pairs` counts
    examined pairs, those on biases included, and `unexamined` what else is quantized in a file that is not healthy;
    `runs` counts how often samples went through a model.
    """

    pairs: int
    samples: int
    runs: int
    limit: float
    noise: float
    examined: int
    noise_there: float
    by_numbers: float | None = None
    rest: float | None = None
    guilty: tuple[Suspect, ...] = ()
    largest: tuple[Suspect, ...] = ()
    wrong_parts: tuple[WrongPart, ...] = ()
    unexamined: int = 0
    notes: tuple[str, ...] = ()
    placement: Placement = field(default_factory=Placement)
    is_held_out: bool = False
    file: Path = Path()
    engine: str = ""

    @property
    def is_healthy(self) -> bool:
        """Whether the outputs are as close as asked for."""
        return self.noise <= self.limit

    @property
    def unexplained(self) -> bool:
        """Whether the outputs are broken and nothing was found that breaks them."""
        return not (self.is_healthy or self.guilty or self.wrong_parts)

    @property
    def excluded(self) -> tuple[str, ...]:
        """The nodes to keep in float, which removes all guilty pairs."""
        return tuple(dict.fromkeys(node for suspect in self.guilty for node in suspect.nodes))

    @property
    def weight_only(self) -> str | None:
        """The `weight_only` of `quantize` that stores weights as the file does; None where it has pairs."""
        formats = {weight_format for _, weight_format in self.placement.weight_only}
        if self.placement.edges or not formats:
            return None
        names = {each.name for each in formats}
        return min(names if len(names) == 1 else {each.family for each in formats})

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values. SQNR in dB, None for equal outputs, -30 if outputs are not finite."""
        return {
            "model": str(self.file),
            "engine": self.engine,
            "edges": len(self.placement),
            "weights": len(self.placement.weight_only),
            "pairs": self.pairs,
            "unexamined": self.unexamined,
            "samples": self.samples,
            "held_out": self.is_held_out,
            "runs": self.runs,
            "min_sqnr_db": sqnr_of(self.limit),
            "healthy": self.is_healthy,
            "output_sqnr_db": sqnr_of(self.noise),
            "finite": self.noise < UNKNOWN_NOISE,
            "examined": {"samples": self.examined, "output_sqnr_db": sqnr_of(self.noise_there)},
            "sqnr_db_as_defined": None if self.by_numbers is None else sqnr_of(self.by_numbers),
            "rest_sqnr_db": None if self.rest is None else sqnr_of(self.rest),
            "guilty": [suspect.to_dict() for suspect in self.guilty],
            "largest": [suspect.to_dict() for suspect in self.largest],
            "wrong_parts": [
                {"nodes": part.nodes, "sqnr_db": sqnr_of(part.noise), "reason": part.reason}
                for part in self.wrong_parts
            ],
            "nodes_to_exclude": self.excluded,
            "notes": self.notes,
        }
