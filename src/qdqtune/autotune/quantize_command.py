"""`python -m qdqtune.autotune.quantization`: the flags of ModelOpt's quantization program, for `quantize`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from qdqtune.autotune.command import AUTOTUNE, spread, tell_results
from qdqtune.autotune.flags import flag, option, repeated
from qdqtune.autotune.utils import get_node_filter_list
from qdqtune.calibration.samples import files_named
from qdqtune.cli import main as cli
from qdqtune.cli.command import Guarded
from qdqtune.commands.inputs import MODEL
from qdqtune.engines.options import TIMING_CACHE
from qdqtune.errors import writing
from qdqtune.graph.saving import model_outputs
from qdqtune.options import FILE, Given, OfRun, Reads, Writes, choice
from qdqtune.system.checks import LOG_KIND, Output, mark, replaceable
from qdqtune.tuning.folder import SUMMARY

LEVELS = click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False)


def _log(path: Path, option: str, _: Given) -> list[Output]:
    """A log goes on where an earlier one ended."""
    return [Output(path, option, replaceable(LOG_KIND), is_appended=True)]


def _beside(given: Given) -> Path | None:
    """The quantized model, where no file is named for it."""
    path: Path = given["onnx_path"]
    return path.with_suffix(".quant.onnx") if path.name else None


FLAGS = (
    option("--onnx-path onnx_path", "The float model.", MODEL, required=True),
    option(
        "--output-path",
        "[default: ONNX_PATH with .quant.onnx]",
        Writes(lambda path, name, _: model_outputs(path, name), _beside),
    ),
    option("--quantize-mode", "Numbers of the pairs.", choice("int8", "fp8"), default="int8"),
    option(
        "--calibration-data-path calibration_data",
        "Samples: .npz or .npy. Random ones without it.",
        Reads(files_named, path_type=str),
        metavar="FILE",
    ),
    option("--calibration-method", "max is minmax.  [default: auto]", metavar="METHOD"),
    option("--calibration-cache-path", "Scales from a calibration cache.", FILE),
    option("--calibration-shapes", "Sizes of open inputs: input0:1x3x224x224,input1:1x8.", metavar="SHAPES"),
    option("--override-shapes", "The same.", metavar="SHAPES"),
    option("--high-precision-dtype", "Of what carries no pair.  [default: fp16]", choice("fp32", "fp16", "bf16")),
    repeated("--op-types-to-quantize", "OP ...", "Only these operators."),
    repeated("--op-types-to-exclude", "OP ...", "Operators that stay in float."),
    repeated("--nodes-to-quantize", "REGEX ...", "Only these nodes."),
    repeated("--nodes-to-exclude", "REGEX ...", "Nodes that stay in float."),
    option("--engine", "Whose rules and numbers, or what to time on.  [default: tensorrt]", metavar="NAME"),
    option("--log-level", "How much to tell on standard error.", LEVELS, default="INFO"),
    option("--log-file", "Tell it there as well.", Writes(_log)),
    AUTOTUNE,
    option("--autotune-output-dir", "Where the search goes on.  [default: OUTPUT_PATH with .autotune]", OfRun()),
    option(
        "--autotune-schemes-per-region autotune_num_schemes_per_region",
        "As what follows: see python -m qdqtune.autotune --help.",
        click.IntRange(1),
        metavar="N",
    ),
    option("--autotune-pattern-cache autotune_pattern_cache_file", None, FILE),
    option("--autotune-qdq-baseline", None, MODEL),
    option("--autotune-state-file", None, OfRun()),
    option("--autotune-node-filter-list", None, FILE),
    option("--autotune-timing-cache", None, TIMING_CACHE, metavar="FILE"),
    option("--autotune-warmup-runs", None, click.IntRange(1), metavar="N"),
    option("--autotune-timing-runs", None, click.IntRange(1), metavar="N"),
    option("--autotune-trtexec-args", None, metavar="ARGUMENTS"),
    flag("--autotune-use-trtexec", "Time with trtexec."),
    flag("--autotune-verbose", "What --log-level DEBUG tells."),
)

SWITCHES = (
    "calibrate-per-node direct-io-types disable-mha-qdq dq-only keep-intermediate-files simplify target-dla "
    "trust-calibration-data trust-remote-code use-external-data-format"
)
VALUES = "input-shapes-profile mha-accumulation-dtype model-id opset trt-rtx-backend use-zero-point"
LISTS = "calibration-eps op-types-to-exclude-fp16 passes trt-plugins trt-plugins-precision"
"""Other flags of that program: they reach `quantize`, which says what it makes of them."""

SEVERAL = frozenset(
    flag
    for option in (*FLAGS, *(click.Option([f"--{name}"], multiple=True) for name in LISTS.split()))
    if option.multiple
    for flag in option.opts
)
"""Flags that take any number of values."""


def _others() -> Iterator[click.Option]:
    for names, is_flag, multiple in ((SWITCHES, True, False), (VALUES, False, False), (LISTS, False, True)):
        for name in names.split():
            yield click.Option([f"--{name}"], is_flag=is_flag, multiple=multiple, hidden=True)


def run(quantize: Callable[..., None], **given: Any) -> int:
    """Quantize a model by the rules of an engine, or by a search, with the flags of ModelOpt's program.

    \b
    python -m qdqtune.autotune.quantization --onnx_path model.onnx --calibration_data_path calib.npz
    python -m qdqtune.autotune.quantization --onnx_path model.onnx --autotune=quick --output_path tuned.onnx
    """
    path, searches = given.pop("onnx_path"), given["autotune"] is not None
    _log_to(given["log_level"], given["log_file"])
    output = given.pop("output_path")
    folder = given.pop("autotune_output_dir") or output.with_suffix(".autotune")
    given["autotune_node_filter_list"] = get_node_filter_list(given["autotune_node_filter_list"])
    said = {name: value for name, value in given.items() if value not in (None, (), False)}
    keywords: dict[str, Any] = {name: list(v) if isinstance(v, tuple) else v for name, v in said.items()}
    quantize(path, output_path=output, **keywords, **({"autotune_output_dir": folder} if searches else {}))
    click.echo(f"{output} is the quantized model")
    if searches:
        tell_results(folder / SUMMARY)
    return 0


def _log_to(level: str, file: Path | None) -> None:
    """Show the package's log, in a file as well if there is one."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if file is not None:
        with writing(file), file.open("a") as begun:
            begun.write("" if begun.tell() else f"# {mark(LOG_KIND)}\n")
        handlers.append(logging.FileHandler(file))
    logging.basicConfig(format="%(message)s", handlers=handlers)
    logging.getLogger("qdqtune").setLevel(level.upper())


def main(quantize: Callable[..., None], arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program, whose work that function does, and exit, as `qdqtune.cli.main.main` does."""
    cli.main(spread(arguments, SEVERAL), command_for(quantize), "python -m qdqtune.autotune.quantization")


def command_for(quantize: Callable[..., None]) -> click.Command:
    """The program as a command, whose work a function does."""
    work = partial(run, quantize)
    return Guarded("quantization", cli.CONTEXT, callback=work, params=[*FLAGS, *_others()], help=run.__doc__)
