"""Options that several commands share, and what the text behind an option means."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from qdqtune.calibration.calibrate import Method
from qdqtune.engines import MODULES, EngineSpec
from qdqtune.engines.shapes import ENGINES, OPTIONS
from qdqtune.errors import BadOption

Command = Callable[..., Any]


THREAD_ENGINES = frozenset({"onnxruntime", "openvino"})
MOST_THREADS = max(16, os.cpu_count() or 1)
"""More than the machine has slow it down without end: idle ones wait busily."""

LONGEST_SECONDS = 366 * 24 * 3600


class Number(click.FloatRange):
    """A float in a range, and neither nan nor infinite: comparisons with those let everything pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


def engine_options(command: Command) -> Command:
    """Which engine, and how it runs. `command` gets its name as `engine`, and name and options together as `spec`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        chosen = {name: given.pop(name) for name in OWN}
        spec = _spec(given["engine"], chosen, given.get("input_shapes"))
        return command(**given, spec=spec)

    engines = ", ".join(sorted(set(MODULES) - {"fake"})) + " or fake"
    every = [
        click.option("--engine", default="onnxruntime", show_default=True, metavar="NAME",
                     help=f"Engine to build and time on: {engines}."),
        click.option("--threads", type=click.IntRange(1, MOST_THREADS), default=1, show_default=True,
                     help="CPU threads of onnxruntime and openvino. One gives the most stable timing."),
        click.option("--provider", help="onnxruntime: execution provider (default: CPUExecutionProvider)."),
        click.option("--target", help="tensorrt-rtx: GPU to build for, such as sm89; needs none here."),
        click.option("--min-shapes", multiple=True, metavar="NAME:1x3x224x224", callback=shapes,
                     help="TensorRT: smallest sizes of a dynamic input. Repeatable."),
        click.option("--opt-shapes", multiple=True, metavar="NAME:1x3x224x224", callback=shapes,
                     help="TensorRT: sizes to tune for.  [default: --input-shape]"),
        click.option("--max-shapes", multiple=True, metavar="NAME:1x3x224x224", callback=shapes,
                     help="TensorRT: largest sizes."),
        click.option("--timing-cache", type=click.Path(), help="TensorRT: file of kernel times that builds share."),
        click.option("--plugin-libraries", "--plugins", multiple=True, type=click.Path(), metavar="FILE",
                     help="TensorRT: shared library with plug-ins. Repeatable."),
        click.option("--workspace-mb", type=click.IntRange(1), help="TensorRT: memory limit of the builder."),
        click.option("--builder-level", type=click.IntRange(0, 5), help="TensorRT: builder optimization level."),
        click.option("--trtexec", help="trtexec: the program.  [default: trtexec on the PATH]"),
        click.option("--trtexec-args", help="trtexec: more arguments, as one string."),
        click.option("--engine-option", "engine_options", multiple=True, metavar="NAME=VALUE",
                     help="Any other option of the engine; VALUE is JSON or text. Repeatable."),
        click.option("--time-limit", default="10m", show_default=True, callback=seconds,
                     help="Longest that one build or inference may take: 90s, 10m, 1h."),
    ]  # fmt: skip
    return _with(every, wrapped)


OWN = ("threads", "provider", "target", "min_shapes", "opt_shapes", "max_shapes", "timing_cache", "plugin_libraries",
       "workspace_mb", "builder_level", "trtexec", "trtexec_args", "engine_options")  # fmt: skip
"""Parameters that go into the engine's options."""


def data_options(command: Command) -> Command:
    """What the model is fed."""
    options = [
        click.option("--calibration-data", metavar="SOURCE",
                     help="An .npz (arrays named as the inputs), a folder of .npy/.npz, or module:callable. "
                          "Without it, seeded random inputs."),
        click.option("--calibration-samples", type=click.IntRange(1), help="Use at most this many samples."),
        click.option("--input-shape", "input_shapes", multiple=True, metavar="NAME:1x3x224x224", callback=shapes,
                     help="Shape of a dynamic input while measuring; what ships stays dynamic. Repeatable."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
                     help="Seed of everything random: inputs, order of rounds, mutations."),
    ]  # fmt: skip
    return _with(options, command)


def range_options(command: Command) -> Command:
    """How scales are found."""
    options = [
        click.option("--calibration-method", type=click.Choice(get_args(Method)), default="minmax",
                     show_default=True, help="How ranges are found: all values; without outliers; with the least "
                     "loss of information; with the least squared error."),
        click.option("--percentile", type=Number(50, 100, min_open=True), default=99.99, show_default=True,
                     help="Share of the values, in %, that method percentile keeps."),
    ]  # fmt: skip
    return _with(options, command)


def limit_options(command: Command) -> Command:
    """What a result must hold besides being fast."""
    options = [
        click.option("--min-sqnr", type=Number(), metavar="DB",
                     help="Take only what keeps the signal this far above the error at the outputs, in dB; 20 is an "
                          "error of a tenth, 30 of a thirtieth. Exit code 4 if nothing faster does."),
        click.option("--evaluate", metavar="MODULE:CALLABLE",
                     help="Your metric, higher is better: callable(predict) -> number, where predict takes {input: "
                          "array} and returns {output: array}. Also path/to/file.py:callable. Reported before and "
                          "after."),
        click.option("--max-drop", type=Number(min=0), metavar="X",
                     help="Take only what keeps the metric of --evaluate within X of the float model's."),
    ]  # fmt: skip
    return _with(options, command)


def _with(options: Sequence[Command], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


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


def shapes(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes by input name, of NAME:1x3x224x224; NAME: is a scalar."""
    found = {}
    for value in values:
        name, _colon, sizes = value.rpartition(":")
        if not name or not re.fullmatch(r"\d+(x\d+)*|", sizes):
            raise click.BadParameter(f"{value!r} is no shape: give NAME:1x3x224x224")
        found[name] = tuple(int(size) for size in sizes.split("x") if size)
    return found


def fixed(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, float | int | str]:
    """Values by input name, of NAME=VALUE."""
    found: dict[str, float | int | str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} fixes nothing: give NAME=VALUE")
        found[name] = _value(text) if isinstance(_value(text), int | float) else text
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _spec(engine: str, given: Mapping[str, Any], input_shapes: Mapping[str, Sequence[int]] | None) -> EngineSpec:
    """The engine with the options that were given; the engine itself refuses those that it does not know.

    `threads` has a default and goes only to engines that have threads; the shapes that a model is measured with are
    what an engine for fixed shapes is built for.

    Raises:
        BadOption: an option is not NAME=VALUE.
    """
    free = given["engine_options"]
    chosen = {name: given[name] for name in OWN if given[name] and name not in ("threads", "engine_options")}
    for name in OPTIONS:
        if name in chosen:
            chosen[name] = {tensor: list(shape) for tensor, shape in chosen[name].items()}
    if engine in THREAD_ENGINES:
        chosen["threads"] = given["threads"]
    if engine in ENGINES and input_shapes and "opt_shapes" not in chosen:
        chosen["opt_shapes"] = {tensor: list(shape) for tensor, shape in input_shapes.items()}
    if "plugin_libraries" in chosen:
        chosen["plugin_libraries"] = list(chosen["plugin_libraries"])
    for option in free:
        name, equals, text = option.partition("=")
        if not equals:
            raise BadOption(f"--engine-option {option} sets nothing: give NAME=VALUE")
        chosen[name] = _value(text)
    return EngineSpec(engine, chosen)


def with_timing_cache(spec: EngineSpec, folder: Path) -> EngineSpec:
    """The engine with its timing cache beside the output, where the user has named none."""
    if spec.name not in ("tensorrt", "trtexec") or "timing_cache" in spec.options:
        return spec
    return EngineSpec(spec.name, {**spec.options, "timing_cache": str(folder.absolute() / "timing.cache")})


def wildcards(path: Path | None) -> tuple[str, ...]:
    """The lines of a --node-filter-list; empty lines and those that begin with # do not count.

    Raises:
        BadOption: the file cannot be read, or holds nothing.
    """
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadOption(f"cannot read --node-filter-list {path}: {why}") from error
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise BadOption(f"--node-filter-list {path} holds no wildcard")
    return found
