"""Options for the inputs of a model, and for how its ranges are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

import numpy.typing as npt

from qdqtune.calibration.samples import files_named
from qdqtune.calibration.scales import DEFAULT_CALIBRATION, Calibration, Method
from qdqtune.errors import BadOption
from qdqtune.graph.rewrites import REWRITE_NAMES as REWRITTEN
from qdqtune.options import (
    COUNT,
    FILE,
    SHAPES,
    SOURCE,
    SWITCH,
    TEXT,
    VALUES,
    MaybeFile,
    Option,
    Options,
    ShapesByInput,
    ValuesByInput,
    choice,
    number_in,
    one_of,
)

Batch = Mapping[str, npt.ArrayLike] | npt.ArrayLike
"""Arrays by input name, or the array of the only input: one sample, or several along a first axis."""

SamplesLike = str | Path | Batch | Iterable[Batch] | Callable[[], Iterable[Batch]]
"""Samples: a dictionary of arrays, an iterable of them, a function that returns one, or a source as on the command line
(a file, a folder, module:callable)."""


class DataOptions(Options):
    calibration_data: Option[str | None] = SOURCE(
        "An .npz (arrays named as the inputs), a folder of .npy/.npz, or module:callable. Also a folder of pictures, "
        "or a .txt with a text a line, made arrays by preprocessor_config.json or tokenizer.json beside them or the "
        "model. Without it, seeded random inputs.",
        "Data",
        ".npz, pictures, .txt, or module:callable",
        metavar="SOURCE",
        reads=files_named,
    )
    calibration_samples: int | None = COUNT(
        "Use at most this many samples for calibration, at even distances; of a callable, the first. Outputs are "
        "compared on others where there are enough.",
        "Data",
    )
    input_shapes: ShapesByInput = SHAPES(
        "Shape of a dynamic input while measuring; what ships stays dynamic. Repeatable.",
        "Model",
        "sizes of dynamic inputs for measuring",
        flags="--input-shape",
    )
    seed: int = COUNT("Seed of everything random: inputs, order of rounds, mutations.", "Search", default=0, least=0)


def _method(value: Any) -> str:
    name, colon, share = str(value).partition(":")
    if colon and name == "percentile":
        return f"percentile:{number_in(51, 100, float, (), share)}"
    return one_of(get_args(Method), value)


class RangeOptions(Options):
    calibration_method: str | None = choice(
        Method,
        "How ranges are found. minmax: all values; percentile: without outliers, percentile:99.9 without a thousandth; "
        "mse: with the least squared error.",
        "Accuracy",
        convert=_method,
        default_in_words=DEFAULT_CALIBRATION.method,
    )
    bias_correction: bool | None = SWITCH(
        "Take back in the bias of each quantized layer what quantizing does to the mean of its outputs; kept only if "
        "outputs come closer to the float model's.",
        "Accuracy",
        default=None,
        default_in_words="yes",
    )

    def __post_init__(self) -> None:
        if self.has_method and getattr(self, "calibration_cache", None) is not None:
            raise BadOption(
                "`calibration_cache` brings the scales: leave `calibration_method` and `bias_correction` out"
            )

    @property
    def has_method(self) -> bool:
        """Whether the user has set any option about ranges."""
        return self.calibration_method is not None or self.bias_correction is not None

    @property
    def calibration(self) -> Calibration:
        usual = DEFAULT_CALIBRATION
        name, _, share = (self.calibration_method or usual.method).partition(":")
        corrects = usual.bias_correction if self.bias_correction is None else self.bias_correction
        return Calibration(cast(Method, name), float(share or usual.percentile), corrects)


class CacheOption(Options):
    calibration_cache: MaybeFile = FILE(
        "Take scales from a calibration cache of TensorRT (calib.cache of trtexec or Polygraphy) in place of data. "
        "Tensors that it lacks stay in float.",
        "Data",
    )


class RewriteOption(Options):
    rewrites: str = TEXT(
        "auto: change the float model first where no output changes and it pays; apply does what its placement says. "
        f"off: keep the graph as it is. Or what you name, by commas: {', '.join(REWRITTEN)}.",
        "Model",
        default="auto",
        metavar="auto|off|NAMES",
    )


class FixOption(Options):
    fix_inputs: ValuesByInput = VALUES(
        "Make an input constant; an If that it decides is folded. Repeatable.", "Model", flags="--fix-input"
    )
