"""Keywords that are options of the command line under the same names, with underscores: typed, checked, converted.

A value means what its text means to the command line, so that both have the same defaults, limits and errors. Options
that map names to values take a dictionary, those that can be repeated a list; None is an option that is not given (for
a limit: none).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import click

from qdqtune.calibration.methods import Calibration, Method
from qdqtune.cli.options import Limit
from qdqtune.commands.quantize import Selection
from qdqtune.errors import BadOption
from qdqtune.library.inputs import WorkloadsLike
from qdqtune.types import QuantType

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Shapes = Mapping[str, Sequence[int]]
Names = str | Sequence[str]
Duration = float | str
"""Seconds, or 90s, 10m, 1h."""


class EngineOptions(TypedDict, total=False):
    """Which engine, and how it runs; `engine_option` holds any other option of the engine by name."""

    threads: int
    provider: str | None
    target: str | None
    min_shapes: Shapes
    opt_shapes: Shapes
    max_shapes: Shapes
    timing_cache: str | Path | None
    plugin_libraries: Names
    workspace_mb: int | None
    builder_level: int | None
    trtexec: str | None
    trtexec_args: str | None
    engine_option: Mapping[str, Any]
    time_limit: Duration


class DataOptions(TypedDict, total=False):
    """What the model is fed, besides `calibration_data`."""

    calibration_samples: int | None
    input_shape: Shapes
    seed: int


class RangeOptions(TypedDict, total=False):
    """How scales are found."""

    calibration_method: Method
    calibration_cache: str | Path | None
    rewrites: str
    bias_correction: bool
    equalize: bool
    percentile: float


class RunOptions(EngineOptions, DataOptions, total=False):
    """Options of what runs a model on an engine."""


class CompareOptions(RunOptions, total=False):
    """Options of `compare`."""

    deploy_threads: Sequence[int] | None
    timing_runs: int
    warmup_runs: int
    workload: WorkloadsLike


class LayersOptions(RunOptions, total=False):
    """Options of `layers`."""

    runs: int


class CheckOptions(LayersOptions, total=False):
    """Options of `check`."""

    allow_boundary: Names


class BuildOptions(EngineOptions, total=False):
    """Options of `build`."""


class ApplyOptions(DataOptions, RangeOptions, total=False):
    """Options of `apply`."""

    time_limit: Duration
    precision: Literal["fp32", "fp16"]


class InspectOptions(TypedDict, total=False):
    """Options of `inspect`."""

    regions: Literal["auto", "names", "topology"]
    max_sequence_size: int
    include_all_regions: bool
    fix_input: Mapping[str, float | str]


class QuantizeOptions(DataOptions, RangeOptions, total=False):
    """Options of `quantize`; `selection`, `calibration`, `input_shapes` and `fix_inputs` are those of its `Request`."""

    quant_type: QuantType
    time_limit: Duration
    precision: Literal["fp32", "fp16"]
    per_channel: bool | None
    placement_like: str | None
    weight_only: str | None
    weight_rounding: Literal["nearest", "gptq"]
    nodes_to_quantize: Names
    op_types_to_quantize: Names
    nodes_to_exclude: Names
    op_types_to_exclude: Names
    fix_input: Mapping[str, float | str]
    report: bool
    selection: Selection
    calibration: Calibration
    input_shapes: Mapping[str, tuple[int, ...]]
    fix_inputs: Mapping[str, float | int | str]


class TuneOptions(RunOptions, RangeOptions, total=False):
    """Options of `tune`."""

    output_dir: str | Path
    mode: Literal["cut", "region", "subgraph"]
    cut_seed: bool
    formats: str | None
    weight_rounding: Literal["nearest", "gptq"]
    graph_json: str | Path | None
    incremental_validation: bool
    quant_type: QuantType
    precision: Literal["fp32", "fp16"]
    min_sqnr: float | Literal["auto"] | None
    min_agreement: float | Literal["auto"] | None
    max_drop: float | Literal["auto"] | None
    fix_input: Mapping[str, float | str]
    effort: Literal["quick", "default", "extensive"]
    builds: int | None
    schemes_per_region: int | None
    front: bool
    time_budget: Duration | None
    timing_runs: int | None
    warmup_runs: int
    regions: Literal["auto", "names", "topology"]
    node_filter_list: str | Path | None
    default_dq_dtype: Literal["float16", "float32", "bfloat16"] | None
    qdq_baseline: str | Path | None
    from_qdq: bool
    pattern_cache: str | Path | None
    price_cache: str | Path | None
    state_file: str | Path | None
    report: bool
    restart: bool
    deploy_threads: Sequence[int] | None
    workers: int | None
    cores_per_worker: int | None
    ray: str | None
    workload: WorkloadsLike


NOT_KEYWORDS = frozenset(
    {"json", "quiet", "verbose", "dry_run", "pick", "html", "no_report", "report_file", "tune", "tune_args"}
)
"""Options of the command line about what it prints, or with functions of their own."""


EXPORTED = frozenset({"graph_json", "profile_json"})
"""Options of `check` and `layers` by which nothing is run; `tune` groups by the first."""


def keywords_of(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their longest name, with underscores."""
    options = [p for p in command.params if isinstance(p, click.Option)]
    named = {max(option.opts, key=len).lstrip("-").replace("-", "_"): option for option in options}
    without = NOT_KEYWORDS if command.name == "tune" else NOT_KEYWORDS | EXPORTED
    return {name: option for name, option in named.items() if name not in without}


def given_of(command: click.Command, arguments: Sequence[object], keywords: Mapping[str, object]) -> dict[str, Any]:
    """The values of a command's options by parameter, as the command line would have them.

    Raises:
        BadOption: a keyword is no option of the command, or its value cannot be used.
    """
    known = keywords_of(command)
    tokens = [token for name, value in keywords.items() for token in _tokens(name, value, command, known)]
    try:
        context = command.make_context(str(command.name), [*tokens, "--", *map(str, arguments)])
    except click.ClickException as error:
        raise BadOption(_in_python(error.format_message().rstrip("."))) from error
    return dict(context.params)


def split_fields(
    kind: type[DataclassInstance], command: click.Command, keywords: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, Any]]:
    """Keywords that are options of a command, and those that are fields of what they become."""
    known, names = keywords_of(command), {field.name for field in fields(kind)}
    options = {name: value for name, value in keywords.items() if name in known or name not in names}
    return options, {name: value for name, value in keywords.items() if name not in options}


def _tokens(name: str, value: object, command: click.Command, known: Mapping[str, click.Option]) -> Iterator[str]:
    option = known.get(name)
    if option is None:
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(known))}"
        raise BadOption(f"{command.name} has no option {name!r}{hint}")
    flag = max(option.opts, key=len)
    if option.is_flag:
        if not isinstance(value, bool) and value is not None:
            raise BadOption(f"{name} is True or False, not {value!r}")
        if value is False and option.secondary_opts:
            yield option.secondary_opts[0]
        elif value:
            yield flag
    elif value is None:
        if isinstance(option.type, Limit):
            yield from (flag, "none")
    else:
        for text in _texts(name, value, option):
            yield from (flag, text)


def _texts(name: str, value: object, option: click.Option) -> Iterator[str]:
    if isinstance(value, Mapping):
        if not option.multiple:
            raise BadOption(f"{name} is one value, not a dictionary")
        for key, item in value.items():
            if isinstance(item, Sequence) and not isinstance(item, str):
                yield f"{key}:{'x'.join(map(str, item))}"
            else:
                yield f"{key}={item if isinstance(item, str) else json.dumps(item)}"
    elif option.multiple and isinstance(value, Sequence) and not isinstance(value, str):
        yield from map(str, value)
    elif isinstance(value, bool):
        raise BadOption(f"{name} is no yes or no, so not {value!r}")
    else:
        yield str(value)


def _in_python(message: str) -> str:
    """What the command line says, with keywords in place of flags."""
    told = re.sub(r"^Invalid value for (.+?): ", r"\1: ", message)
    flags = re.compile(r"'(?:-\w' / ')?--([\w-]+)'")
    return flags.sub(lambda flag: flag[1].replace("-", "_"), told)
