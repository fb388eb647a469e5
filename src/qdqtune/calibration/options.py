"""Options for the inputs of a model, and for how its ranges are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import click

from qdqtune.calibration.samples import files_named
from qdqtune.calibration.scales import DEFAULT_CALIBRATION, Calibration, Method
from qdqtune.errors import BadOption
from qdqtune.graph.rewrites import REWRITE_NAMES as REWRITTEN
from qdqtune.options import (
    COUNT,
    FILE,
    SHAPES,
    SWITCH,
    TEXT,
    Anything,
    Assignments,
    MaybeFile,
    MaybeInt,
    Number,
    Option,
    Options,
    Reads,
    ShapesByInput,
    Text,
    ValuesByInput,
    choice,
    option,
)


@dataclass(kw_only=True)
class DataOptions(Options):
    """Options for the inputs of a model, except the source of samples."""

    calibration_samples: MaybeInt = option(
        COUNT,
        None,
        "Use at most this many samples for calibration, at even distances; of a callable, the first. Outputs are "
        "compared on others where there are enough.",
        "Data",
    )
    input_shapes: ShapesByInput = option(
        SHAPES,
        None,
        "Shape of a dynamic input while measuring; what ships stays dynamic. Repeatable.",
        "Model",
        short="sizes of dynamic inputs for measuring",
        flags="--input-shape",
        metavar="NAME:1x3x224x224",
        is_repeated=True,
    )
    seed: Option[int, int] = option(
        click.IntRange(0),
        0,
        "Seed of everything random: inputs, order of rounds, mutations.",
        "Search",
    )


def samples_option(**how: Any) -> Any:
    return option(
        Anything(Reads(files_named, path_type=str)),
        None,
        "An .npz (arrays named as the inputs), a folder of .npy/.npz, or module:callable. Also a folder of pictures, a "
        ".txt with a text a line, or a split of datasets on disk, which preprocessor_config.json or tokenizer.json, "
        "beside them or the model, turn into arrays. Without it, seeded random inputs.",
        "Data",
        short=".npz, pictures, .txt, or module:callable",
        metavar="SOURCE",
        **how,
    )


@dataclass(kw_only=True)
class RangeOptions(Options):
    """Options for how ranges are found."""

    calibration_method: Option[Method | None, Method | None] = option(
        choice(*get_args(Method)),
        None,
        "How ranges are found. minmax: all values; percentile: without outliers; entropy: with the least loss of "
        "information; mse: with the least squared error.",
        "Accuracy",
        default_in_words=DEFAULT_CALIBRATION.method,
    )
    bias_correction: Option[bool | None, bool | None] = option(
        SWITCH,
        None,
        "Take back in the bias of each quantized layer what quantizing does to the mean of its outputs; kept only if "
        "outputs come closer to the float model's.",
        "Accuracy",
        default_in_words="yes",
    )
    percentile: Option[float | None, float | None] = option(
        Number(50, 100, min_open=True),
        None,
        "Share of values, in %, that percentile keeps.",
        "Data",
        default_in_words=f"{DEFAULT_CALIBRATION.percentile}",
    )

    @property
    def says_how(self) -> bool:
        return any(value is not None for value in self._given)

    @property
    def calibration(self) -> Calibration:
        """How ranges are found: the given options, and defaults for the others."""
        usual = (
            DEFAULT_CALIBRATION.method,
            DEFAULT_CALIBRATION.percentile,
            DEFAULT_CALIBRATION.bias_correction,
        )
        return Calibration(*(u if given is None else given for given, u in zip(self._given, usual, strict=True)))  # type: ignore[arg-type]

    @property
    def _given(self) -> tuple[object, ...]:
        return self.calibration_method, self.percentile, self.bias_correction


@dataclass(kw_only=True)
class CacheOption(Options):
    """The option for a file with scales."""

    calibration_cache: MaybeFile = option(
        FILE,
        None,
        "Take scales from a calibration cache in place of data: TensorRT's (calib.cache of trtexec or Polygraphy), "
        "ONNX Runtime's tables, TAO's JSON. Tensors that it lacks stay in float.",
        "Data",
        metavar="FILE",
    )


def check_cache(ranges: RangeOptions, cache: CacheOption) -> None:
    """Refuse a calibration cache together with options for how ranges are found.

    Raises:
        BadOption: both are given.
    """
    if cache.calibration_cache is not None and ranges.says_how:
        names = "`calibration_method`, `bias_correction`, `percentile`"
        raise BadOption(f"`calibration_cache` brings the scales: leave {names} out")


@dataclass(kw_only=True)
class RewriteOption(Options):
    """The option for rewrites of the float model."""

    rewrites: Text = option(
        TEXT,
        "auto",
        "auto: change the float model first where no output changes and it pays; apply does what its placement says. "
        f"off: keep the graph as it is. Or what you name, by commas: {', '.join(REWRITTEN)}.",
        "Model",
        metavar="auto|off|NAMES",
    )


@dataclass(kw_only=True)
class FixOption(Options):
    """The option for inputs that become constants."""

    fix_inputs: ValuesByInput = option(
        Assignments("fixes nothing", numbers_only=True),
        None,
        "Make an input constant; an If that it decides is folded. Repeatable.",
        "Model",
        flags="--fix-input",
        metavar="NAME=VALUE",
        is_repeated=True,
    )
