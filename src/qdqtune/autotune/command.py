"""`python -m qdqtune.autotune` itself: ModelOpt's flags become those of `qdqtune tune`, which does the rest."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from qdqtune.autotune.benchmark import default_engine, rounds_for
from qdqtune.autotune.options import AutotuneOptions
from qdqtune.autotune.utils import COUNTS, MODE_PRESETS, StoreWithExplicitFlag, add_flag
from qdqtune.autotune.workflows import RegionLogs
from qdqtune.cli import main as cli
from qdqtune.cli import tune
from qdqtune.cli.command import CHATTER, SILENCE, Guarded, is_verbose, parameters
from qdqtune.commands.inputs import MODEL as MODEL_FILE
from qdqtune.commands.paths import typed
from qdqtune.engines import EngineSpec
from qdqtune.engines.options import TIMING_CACHE_FILE
from qdqtune.engines.tensorrt.options import usual_shapes
from qdqtune.options import Reads, options_of
from qdqtune.tuning.folder import SUMMARY
from qdqtune.tuning.settings import EFFORTS

MODES, TENSORRT = ("region", "subgraph"), ("tensorrt", "trtexec")
TIMING_CACHE = str(Path(tempfile.gettempdir()) / "trtexec_timing.cache")
"""Where TensorRT keeps kernel times if no file is named. Other engines do not care what lies there."""

OF_TUNE = options_of(AutotuneOptions)


def option(flags: str, help: str | None, type: click.ParamType[Any] | None = None, **how: Any) -> click.Option:
    """An option that tells its default. `flags` are its names, and that of its parameter where that is another."""
    shows = how.pop("show_default", how.get("default") not in (None, ""))
    return click.Option(flags.split(), help=help, type=type, show_default=shows, **how)


def of_tune(name: str, flags: str, **changed: Any) -> click.Option:
    """An option of `tune` with other flags, and with what else is changed."""
    own = OF_TUNE[name]
    how = {"help": own.help, "type": typed(own.kind), "default": own.default, "metavar": own.metavar, **changed}
    return option(f"{flags} {name}", **how)


MODEL = option("-m --onnx-path --model model", "ONNX file.", MODEL_FILE, required=True)
MODE_HELP = "How to search, and how much to spend on it. Give one of either kind, or one."
SCHEMES_HELP = (
    "Give every pattern N schemes, however long it takes. Without it the preset limits the builds of the whole search "
    "(24, 52 or 400)."
)
RUNS_HELP = "Least inferences of each model in a comparison that is not decided earlier.  [40 | 96 | 192]"
ENGINE_HELP = "Engine to time on.  [default: tensorrt if it works here, or onnxruntime]"

OWN = (
    MODEL,
    of_tune("output_dir", "-o --output-dir --output", default=Path("autotuner_output")),
    option("--mode", MODE_HELP, click.Choice([*MODES, *EFFORTS]), default=["region", "default"], multiple=True),
    option("-s --schemes-per-region", SCHEMES_HELP, click.IntRange(1), metavar="N"),
    of_tune("default_dq_dtype", "--default-dq-dtype", default="float32"),
    of_tune("engine", "--engine", default=None, help=ENGINE_HELP),
    option("--use-trtexec", "The same as --engine trtexec.", is_flag=True),
    option("--trtexec-benchmark-args --trtexec-args trtexec_args", "trtexec: more arguments, as one string."),
    option("--timing-cache", f"TensorRT: file of kernel times that builds share.  [default: {TIMING_CACHE}]",
           TIMING_CACHE_FILE, metavar="PATH"),
    option("--plugin-libraries --plugins plugin_libraries", "TensorRT: shared library with plug-ins. Repeatable.",
           Reads(path_type=str), metavar="FILE", multiple=True),
    option("--timing-runs", RUNS_HELP, click.IntRange(1)),
    of_tune("min_sqnr", "--min-sqnr", default="none"),
    of_tune("min_agreement", "--min-agreement", default="none"),
)  # fmt: skip
"""Flags that differ from those of `tune`, in name, default or meaning."""


def run(**given: Any) -> int:
    """Find the fastest Q/DQ placement for a model, by the flags of ModelOpt's autotuner.

    The exit code is 0 also where nothing faster was found; the files are all there.

    \b
    python -m qdqtune.autotune --onnx_path model.onnx --output_dir results
    python -m qdqtune.autotune --model model.onnx --mode subgraph --mode quick
    """
    if (point := given.pop("pick")) is not None:
        return tune.ship_point(given["output_dir"], point, as_machine=given["as_machine"])
    asked = "trtexec" if given.pop("use_trtexec") else given["engine"]
    given["engine"], why = (asked, "as you asked") if asked else default_engine()
    _note(f"engine: {given['engine']} ({why})")
    modes = given["mode"]
    given["mode"] = next((mode for mode in reversed(modes) if mode in MODES), "region")
    given["effort"] = next((mode for mode in reversed(modes) if mode in EFFORTS), given["effort"])
    _log_to_stderr(verbose=is_verbose())
    for name, mode in (("pattern_cache", "region"), ("graph_json", "subgraph")):
        if given[name] is not None and given["mode"] != mode:
            _note(f"note: --{name} means something with --mode {mode} only")
            given[name] = None
    if given["timing_runs"] is not None:
        given["timing_runs"] = rounds_for(given["timing_runs"])
    how = {name: given.pop(name) for name in ("dry_run", "as_machine")}
    if given["mode"] == "subgraph":
        code = tune.run(AutotuneOptions(**_for_engine(given)), **how)
    else:
        logs = RegionLogs(given["output_dir"])
        code = tune.run(AutotuneOptions(**_for_engine(given)), logs, **how)
        logs.finish()
    if code in (0, tune.NO_IMPROVEMENT) and not how["dry_run"]:
        tell_results(given["output_dir"] / SUMMARY, as_machine=how["as_machine"])
    return 0 if code == tune.NO_IMPROVEMENT else code


def tell_results(summary: Path, *, as_machine: bool = False) -> None:
    """The lines that scripts look for: on standard error where standard output is for a machine."""
    if not summary.exists():
        return
    told = json.loads(summary.read_text(encoding="utf-8"))
    before, after = told["baseline_ms"], told["final_ms"]
    if after is None:
        click.echo(f"Baseline: {before:.3f} ms", err=as_machine)
        return
    speedup = f"{before / after:.3f}x speedup"
    for line in (
        f"Baseline: {before:.3f} ms",
        f"Final: {after:.3f} ms ({speedup})",
        f"Results: {before:.3f} ms -> {after:.3f} ms ({speedup})",
    ):
        click.echo(line, err=as_machine)


def _log_to_stderr(*, verbose: bool) -> None:
    """Show the package's log from warnings on; all of it with --verbose."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("qdqtune").setLevel(logging.DEBUG if verbose else logging.WARNING)


def _for_engine(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the search, with those flags that the engine knows as options of the engine."""
    options = dict(given)
    engine, arguments = options["engine"], options.pop("trtexec_args")
    cache, libraries = options.pop("timing_cache"), list(options.pop("plugin_libraries"))
    own = dict[str, Any]()
    if arguments and engine == "trtexec":
        own["trtexec_args"] = arguments
    elif arguments:
        _note(f"note: {engine} takes no arguments of trtexec: of --trtexec_benchmark_args only shapes are used")
        usual = usual_shapes(EngineSpec("trtexec", {"trtexec_args": arguments}), None)
        options["input_shapes"] = usual | options["input_shapes"]
    if engine in TENSORRT:
        own["timing_cache"] = str(cache or TIMING_CACHE)
    if libraries and engine in TENSORRT:
        own["plugin_libraries"] = libraries
    elif libraries:
        _note(f"note: {engine} loads no TensorRT plug-ins, so --plugin_libraries is passed over")
    return options | {"engine_options": own | dict(options["engine_options"])}


def _note(text: str) -> None:
    click.echo(text, err=True)


def like(ours: click.Command, own: Sequence[click.Parameter], **changed: Any) -> click.Command:
    """A command with the flags of one of ours, some of them replaced, and others besides."""
    replaced = {option.name for option in own}
    params = [*own, *(option for option in ours.params if option.name not in replaced), SILENCE, CHATTER]
    given = {"callback": ours.callback, "help": ours.help, **changed}
    return Guarded(ours.name, context_settings=cli.CONTEXT, params=params, **given)


NAMED = {one.name for one in (*OWN, *tune.tune_command.params)} - {"node_filter"}
MORE = tuple(one for one in parameters(AutotuneOptions) if one.name not in NAMED)
"""Flags that `tune` does not have, or calls otherwise."""

command = like(tune.tune_command, (*OWN, *MORE), callback=run, help=run.__doc__)


def spread(arguments: Sequence[str] | None) -> list[str]:
    """The arguments (by default those of the program) with a flag for each plug-in: --plugins a.so b.so."""
    words, flag, number = list[str](), "", 0
    for argument in sys.argv[1:] if arguments is None else arguments:
        if argument.startswith("-"):
            flag, number = argument.replace("_", "-"), 0
        elif flag in ("--plugin-libraries", "--plugins"):
            number += 1
            if number > 1:
                words.append(flag)
        words.append(argument)
    return words


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit, as `qdqtune.cli.main.main` does, but for code 3."""
    cli.main(spread(arguments), command, "python -m qdqtune.autotune")


def exit_code(program: Callable[[], object]) -> int:
    """Run a program that exits. Gives the exit code."""
    try:
        program()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def get_parser() -> argparse.ArgumentParser:
    """ModelOpt's flags as a parser of argparse, for programs that take it as a part of their own."""
    parser = argparse.ArgumentParser("python -m qdqtune.autotune", description="--help of the program tells more.")
    add_flag(parser, "-m --onnx_path --model", required=True)
    add_flag(parser, "-o --output_dir --output", default="./autotuner_output")
    add_flag(parser, "--mode", choices=[*MODES, *EFFORTS], default="default")
    add_flag(parser, "--quant_type", default="int8")
    add_flag(parser, "--default_dq_dtype", default="float32")
    add_flag(parser, "--timing_cache", default=TIMING_CACHE)
    for name in ("pattern_cache", "qdq_baseline", "state_file", "node_filter_list"):
        add_flag(parser, f"--{name}")
    add_flag(parser, "--plugin_libraries --plugins", nargs="+")
    add_flag(parser, "--trtexec_benchmark_args --trtexec_args")
    add_flag(parser, "--use_trtexec", action="store_true")
    add_flag(parser, "-v --verbose", action="store_true")
    for flags, dest in (("-s --schemes_per_region", "schemes_per_region"), ("--warmup_runs", "warmup_runs"),
                        ("--timing_runs", "timing_runs")):  # fmt: skip
        own = {"dest": COUNTS[dest], "explicit_attr": f"_explicit_{COUNTS[dest]}"}
        usual = MODE_PRESETS["default"][dest]
        add_flag(parser, flags, type=int, default=usual, action=StoreWithExplicitFlag, **own)
    return parser
