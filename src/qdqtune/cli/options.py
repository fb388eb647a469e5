"""Options that several commands share, what the text behind an option means, and how options become values.

A command gets the values of its options by parameter. An option whose parameter has the name of a field is that field
(`named`); what follows from several options is made of them here (`engine`, `calibration`, `Data`).
"""

from __future__ import annotations

import glob
import math
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from qdqtune.calibration import prepare
from qdqtune.calibration.methods import CLOSEST, Calibration, Method
from qdqtune.engines import MODULES, TENSORRT_FAMILY, THREADED, EngineSpec
from qdqtune.engines.shapes import OPTIONS, check_inputs
from qdqtune.errors import BadOption, parsed_json
from qdqtune.graph.float16 import Precision
from qdqtune.graph.loading import files_of
from qdqtune.graph.model import Model
from qdqtune.graph.outputs import check_output
from qdqtune.graph.rewrites import NAMES as REWRITTEN

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Given = Mapping[str, Any]
"""Values of options by parameter."""

MOST_THREADS = max(16, os.cpu_count() or 1)
"""More than the machine has slow it down without end: idle ones wait busily."""

LONGEST_SECONDS = 366 * 24 * 3600


# What the text behind an option means


class Number(click.FloatRange):
    """A float in a range, and neither nan nor infinite: comparisons with those let everything pass."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()


class Limit(Number):
    """A number, `none` for no limit, or `auto` for the usual one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        if value in ("none", "auto"):
            return None if value == "none" else value
        return super().convert(value, param, ctx)


def seconds(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Seconds of a duration such as 90s, 10m or 1.5h; a bare number is seconds."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|)", value.strip())
    if match is None or float(match[1]) <= 0:
        raise click.BadParameter(f"{value!r} is no duration: give 90s, 10m or 1.5h")
    duration = float(match[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[match[2]]
    if duration > LONGEST_SECONDS:
        raise click.BadParameter(f"{value!r} is longer than a year")
    return duration


def names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """The words of a list with commas."""
    return None if value is None else tuple(word for part in value.split(",") if (word := part.strip()))


def shapes(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes by input name, of NAME:1x3x224x224; NAME: is a scalar."""
    shape_of = {}
    for value in values:
        name, _colon, sizes = value.rpartition(":")
        if not name or not re.fullmatch(r"\d+(x\d+)*|", sizes):
            raise click.BadParameter(f"{value!r} is no shape: give NAME:1x3x224x224")
        shape_of[name] = tuple(int(size) for size in sizes.split("x") if size)
    return shape_of


def fixed(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, float | int | str]:
    """Values by input name, of NAME=VALUE."""
    value_of: dict[str, float | int | str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} fixes nothing: give NAME=VALUE")
        value_of[name] = _value(text) if isinstance(_value(text), int | float) else text
    return value_of


def wildcards(_: click.Context, __: click.Parameter, path: Path | None) -> tuple[str, ...]:
    """The lines of a --node-filter-list; empty lines and those that begin with # do not count.

    Raises:
        BadOption: the file cannot be read, or holds nothing.
    """
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadOption(f"cannot read --node-filter-list {path}: {why}") from error
    names = tuple(line for line in lines if line and not line.startswith("#"))
    if not names:
        raise BadOption(f"--node-filter-list {path} holds no wildcard")
    return names


def _value(text: str) -> Any:
    try:
        return parsed_json(text)
    except ValueError:
        return text


# How options are written


def option(flags: str, help: str | None, type: click.ParamType[Any] | None = None, **how: Any) -> click.Option:
    """An option that tells its default. `flags` are its names, and that of its parameter where that is another."""
    return click.Option(
        flags.split(),
        help=help,
        type=type,
        show_default=how.pop("show_default", how.get("default") not in (None, "")),
        **how,
    )


def flag(flags: str, help: str) -> click.Option:
    """An option that is given or not."""
    return click.Option(flags.split(), help=help, is_flag=True)


def repeated(flags: str, metavar: str | None, help: str, **how: Any) -> click.Option:
    """An option that can be given several times."""
    return click.Option(flags.split(), help=help, metavar=metavar, multiple=True, **how)


SHAPE = "NAME:1x3x224x224"
FILE = click.Path(path_type=Path)
QUANT_TYPES = click.Choice(["int8", "fp8"])
ENGINE_NAMES = ", ".join(sorted(set(MODULES) - {"fake"})) + " or fake"

MODEL = click.Argument(["model"], type=FILE)
AS_JSON = flag("--json as_machine", "Print JSON.")
HTML = option("--html", "Write what is found as one HTML file as well, for a browser; it works offline.", FILE)
JSON_FOR_TABLE = flag("--json as_machine", "Print JSON instead of the table.")

TIME_LIMIT = option(
    "--time-limit", "Longest that one build or inference may take: 90s, 10m, 1h.", default="10m", callback=seconds
)

PRECISION = option(
    "--precision",
    "Of what carries no pair; the inputs and outputs of MODEL keep their types. With fp16, nodes stay in float32 whose "
    "values leave its range. Not for onnxruntime.  [default: fp16 for tensorrt-rtx, and tensorrt and trtexec from "
    "version 10, which take types from the graph; else fp32]",
    click.Choice(get_args(Precision)),
)

ENGINE = (
    option("--engine", f"Engine to build and time on: {ENGINE_NAMES}.", metavar="NAME", default="onnxruntime"),
    option(
        "--threads",
        "CPU threads of onnxruntime and openvino. One gives the most stable timing.  [default: 1; a search takes the "
        "largest of --deploy-threads]",
        click.IntRange(1, MOST_THREADS),
    ),
    option("--provider", "onnxruntime: execution provider (default: CPUExecutionProvider)."),
    option("--target", "tensorrt-rtx: GPU to build for, such as sm89; needs none here."),
    repeated("--min-shapes", SHAPE, "TensorRT: smallest sizes of a dynamic input. Repeatable.", callback=shapes),
    repeated("--opt-shapes", SHAPE, "TensorRT: sizes to tune for.  [default: --input-shape]", callback=shapes),
    repeated("--max-shapes", SHAPE, "TensorRT: largest sizes.", callback=shapes),
    option("--timing-cache", "TensorRT: file of kernel times that builds share.", click.Path()),
    repeated(
        "--plugin-libraries --plugins",
        "FILE",
        "TensorRT: shared library with plug-ins. Repeatable.",
        type=click.Path(),
    ),
    option("--workspace-mb", "TensorRT: memory limit of the builder.", click.IntRange(1)),
    option("--builder-level", "TensorRT: builder optimization level.", click.IntRange(0, 5)),
    option("--trtexec", "trtexec: the program.  [default: trtexec on the PATH]"),
    option("--trtexec-args", "trtexec: more arguments, as one string."),
    repeated(
        "--engine-option engine_options",
        "NAME=VALUE",
        "Any other option of the engine; VALUE is JSON or text. Repeatable.",
    ),
    TIME_LIMIT,
)
"""Which engine, and how it runs."""

WORKERS = (
    option(
        "--workers",
        "Devices that measure side by side, each a GPU or cores of its own. Several models: one device a model.  "
        "[default: 1; with --ray all that there is room for]",
        click.IntRange(1),
    ),
    option("--cores-per-worker", "Cores of each worker, which no other uses.  [default: --threads]", click.IntRange(1)),
    option("--ray", "Workers on the Ray cluster at this address (auto: the one that runs here).", metavar="ADDRESS"),
)
"""How many measure at a time, and on what."""

DATA = (
    option(
        "--calibration-data",
        "An .npz (arrays named as the inputs), a folder of .npy/.npz, or module:callable. Without it, seeded random "
        "inputs.",
        metavar="SOURCE",
    ),
    option("--calibration-samples", "Use at most this many samples.", click.IntRange(1)),
    repeated(
        "--input-shape input_shapes",
        SHAPE,
        "Shape of a dynamic input while measuring; what ships stays dynamic. Repeatable.",
        callback=shapes,
    ),
    option("--seed", "Seed of everything random: inputs, order of rounds, mutations.", click.IntRange(0), default=0),
)
"""What the model is fed."""

RANGES = (
    option(
        "--calibration-method",
        "How ranges are found. minmax: all values; percentile: without outliers; entropy: with the least loss of "
        "information; mse: with the least squared error; auto: whichever of these keeps the outputs of the calibration "
        "samples closest to the float model's.",
        click.Choice(get_args(Method)),
        default=CLOSEST.method,
    ),
    option(
        "--bias-correction/--no-bias-correction",
        "Take back in the bias of each quantized layer what quantizing does to the mean of its outputs; kept only if "
        "outputs come closer to the float model's.",
        default=CLOSEST.bias_correction,
    ),
    option(
        "--equalize/--no-equalize",
        "Move what is uneven between channels into the weights behind them, if samples that set no scale gain by it.",
        default=CLOSEST.equalization,
    ),
    option(
        "--percentile", "Share of values, in %, that percentile keeps.", Number(50, 100, min_open=True), default=99.99
    ),
)
"""How scales are found."""

CACHE = option(
    "--calibration-cache",
    "Take scales from a calibration cache in place of data: TensorRT's (calib.cache of trtexec or Polygraphy), ONNX "
    "Runtime's tables, TAO's JSON. Tensors that it lacks stay in float.",
    FILE,
    metavar="FILE",
)

REWRITES = option(
    "--rewrites",
    "auto: change the float model first where no output changes and it pays; apply does what its placement says. off: "
    f"keep the graph as it is. Or what you name, by commas: {', '.join(REWRITTEN)}.",
    default="auto",
    metavar="auto|off|NAMES",
)

LIMITS = (
    option(
        "--min-sqnr",
        "Take only what keeps the signal this far above the error at the outputs, in dB; 20 is an error of a tenth, "
        "30 of a thirtieth; none takes the fastest at any price. Exit code 4 if nothing faster holds it.  [default: "
        "20, or none with --evaluate]",
        Limit(),
        metavar="DB",
        default="auto",
        show_default=False,
    ),
    option(
        "--min-agreement",
        "Take only what leaves this share of the integers in outputs as they are, class numbers or token ids say; or "
        "none.",
        Limit(min=0, max=1),
        metavar="SHARE",
        default=0.98,
    ),
    option(
        "--evaluate",
        "Your metric, higher is better: callable(predict) -> number, where predict takes {input: array} and returns "
        "{output: array}. Also path/to/file.py:callable. Reported before and after.",
        metavar="MODULE:CALLABLE",
    ),
    option(
        "--max-drop",
        "Take only what keeps the metric of --evaluate within X of the float model's, or none.  [default: 1 % of it]",
        Limit(min=0),
        metavar="X",
        default="auto",
        show_default=False,
    ),
)
"""What a result must hold besides being fast."""

FIX_INPUT = repeated(
    "--fix-input fix_inputs",
    "NAME=VALUE",
    "Make an input constant; an If that it decides is folded. Repeatable.",
    callback=fixed,
)
REGIONS = option(
    "--regions",
    "Divide the graph by node names, by topology, or by what fits.",
    click.Choice(["auto", "names", "topology"]),
    default="auto",
)
WARMUP_RUNS = option("--warmup-runs", "Inferences of each model before its rounds.", click.IntRange(0), default=2)
RUNS = option("--runs", "Inferences to take the times of.", click.IntRange(1), default=20)
PROFILE_JSON = option("--profile-json", "The times to it: what trtexec --exportProfile wrote.", FILE, metavar="FILE")


# How options become values


def check_page(html: Path | None, models: Sequence[Path], others: Sequence[Path | None] = ()) -> None:
    """Refuse a page that cannot be written, or that would overwrite what a command reads or writes, before any work.

    Raises:
        BadOption, OutputError: see above.
    """
    if html is not None:
        files = [file for model in models if model.is_file() for file in files_of(model)]
        check_output(html, {"model": files, "input": [file for file in others if file is not None]})


def command_line() -> tuple[str, ...]:
    """What was typed, program and all; nothing where no command line is at work."""
    context = click.get_current_context(silent=True)
    typed: tuple[str, ...] = (context.find_root().obj or ()) if context is not None else ()
    return typed


def named(kind: type[DataclassInstance], given: Given, but: Collection[str] = ()) -> dict[str, Any]:
    """The options that are fields of a dataclass, but for those whose field is something else than their value."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given.keys() - set(but)}


def calibration(given: Given) -> Calibration:
    """How ranges are found, of the options `RANGES`."""
    return Calibration(*(given[name] for name in ("calibration_method", "percentile", "bias_correction", "equalize")))


def says_how() -> bool:
    """Whether the user says how ranges are found."""
    source = click.get_current_context().get_parameter_source
    return any(source(str(option.name)) is not ParameterSource.DEFAULT for option in RANGES)


def check_cache(given: Given) -> None:
    """Raises BadOption where scales are to come from a file, and to be found as well."""
    if given["calibration_cache"] is not None and says_how():
        names = ", ".join(option.opts[0] for option in RANGES)
        raise BadOption(f"--calibration-cache brings the scales: leave {names} out")


@dataclass(frozen=True)
class Data(prepare.Data):
    """What a model is fed while it is measured: the values of the options `DATA`."""

    @classmethod
    def of(cls, given: Given) -> Data:
        """Pick them out of all options."""
        return cls(**named(cls, given))

    def prepared(self, model: Model, spec: EngineSpec, most: int = prepare.MOST_JUDGED) -> prepare.Prepared:
        """A model for an engine, and its samples: see `prepare`.

        Raises:
            BadOption: the engine or the user names shapes that the inputs cannot have.
            BadData: the samples do not fit the model.
        """
        check_inputs(spec, model)
        return prepare.prepare(model, self, most=most)


NOT_OWN = {"engine", "threads", "engine_options", "time_limit"}
OWN = [name for option in ENGINE if (name := option.human_readable_name) not in NOT_OWN]
"""Options that are the engine's own under the same name."""


def engine(given: Given) -> EngineSpec:
    """The engine of the options `ENGINE`, told what the user gave; it refuses by itself what it does not know.

    `threads` has a default and goes only to engines that have threads; the shapes that a model is measured with are
    what an engine for fixed shapes is built for.

    Raises:
        BadOption: an option is not NAME=VALUE.
    """
    name, input_shapes = given["engine"], given.get("input_shapes")
    chosen = {own: given[own] for own in OWN if given[own]}
    if name in TENSORRT_FAMILY and input_shapes and "opt_shapes" not in chosen:
        chosen["opt_shapes"] = input_shapes
    for own in OPTIONS:
        if own in chosen:
            chosen[own] = {tensor: list(shape) for tensor, shape in chosen[own].items()}
    if name in THREADED:
        chosen["threads"] = given["threads"] or 1
    if "plugin_libraries" in chosen:
        chosen["plugin_libraries"] = list(chosen["plugin_libraries"])
    for text in given["engine_options"]:
        key, equals, value = text.partition("=")
        if not equals:
            raise BadOption(f"--engine-option {text} sets nothing: give NAME=VALUE")
        chosen[key] = _value(value)
    return EngineSpec(name, chosen)


def to_exclude(nodes: Sequence[str]) -> str:
    """Options of quantize that keep these nodes in float, as a shell takes them."""
    return " ".join(f"--nodes-to-exclude {shlex.quote(glob.escape(node))}" for node in nodes)


def with_timing_cache(spec: EngineSpec, folder: Path) -> EngineSpec:
    """The engine with its timing cache beside the output, where the user has named none."""
    if spec.name not in ("tensorrt", "trtexec") or "timing_cache" in spec.options:
        return spec
    return EngineSpec(spec.name, {**spec.options, "timing_cache": str(folder.absolute() / "timing.cache")})
