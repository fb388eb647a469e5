"""`python -m qdqtune.autotune`: ModelOpt's flags become those of `qdqtune tune`, which does the rest.

Ctrl-C ends it quietly from its first moment on.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # while the rest is being imported

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from qdqtune.autotune.autotuner import default_engine, rounds_for
from qdqtune.autotune.workflows import AutotuneOptions, RegionLogs
from qdqtune.cli import main as cli
from qdqtune.cli import tune
from qdqtune.cli.command import CHATTER, SILENCE, Guarded, is_verbose, parameters
from qdqtune.commands.inputs import MODEL as MODEL_FILE
from qdqtune.commands.paths import typed
from qdqtune.engines import EngineSpec
from qdqtune.engines.options import TIMING_CACHE_FILE
from qdqtune.engines.tensorrt.options import usual_shapes
from qdqtune.errors import reading
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
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("qdqtune").setLevel(logging.DEBUG if is_verbose() else logging.WARNING)
    for name, mode in (("pattern_cache", "region"), ("graph_json", "subgraph")):
        if given[name] is not None and given["mode"] != mode:
            _note(f"note: --{name} means something with --mode {mode} only")
            given[name] = None
    if given["timing_runs"] is not None:
        given["timing_runs"] = rounds_for(given["timing_runs"])
    how = {name: given.pop(name) for name in ("dry_run", "as_machine")}
    logs = RegionLogs(given["output_dir"]) if given["mode"] == "region" else None
    code = tune.run(AutotuneOptions(**_for_engine(given)), logs, **how)
    if logs:
        logs.finish()
    if code in (0, tune.NO_IMPROVEMENT) and not how["dry_run"]:
        _tell_results(given["output_dir"] / SUMMARY, as_machine=how["as_machine"])
    return 0 if code == tune.NO_IMPROVEMENT else code


def _tell_results(summary: Path, *, as_machine: bool) -> None:
    """The lines that scripts look for: on standard error where standard output is for a machine."""
    if not summary.exists():
        return
    values = json.loads(summary.read_text(encoding="utf-8"))
    before, after = values["baseline_ms"], values["final_ms"]
    click.echo(f"Baseline: {before:.3f} ms", err=as_machine)
    if after is not None:
        speedup = f"({before / after:.3f}x speedup)"
        click.echo(f"Final: {after:.3f} ms {speedup}", err=as_machine)
        click.echo(f"Results: {before:.3f} ms -> {after:.3f} ms {speedup}", err=as_machine)


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


_THEIRS = (*OWN, *tune.tune_command.params)
_MORE = (one for one in parameters(AutotuneOptions) if one.name not in {own.name for own in _THEIRS} - {"node_filter"})
_REPLACED = {own.name for own in OWN}

command = Guarded(
    tune.tune_command.name,
    context_settings=cli.CONTEXT,
    callback=run,
    help=run.__doc__,
    params=[*OWN, *_MORE, *(p for p in tune.tune_command.params if p.name not in _REPLACED), SILENCE, CHATTER],
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit, as `qdqtune.cli.main.main` does, but for code 3."""
    words, flag, number = list[str](), "", 0
    for argument in sys.argv[1:] if arguments is None else arguments:
        if argument.startswith("-"):
            flag, number = argument.replace("_", "-"), 0
        elif flag in ("--plugin-libraries", "--plugins"):
            number += 1
            if number > 1:  # ModelOpt's flag takes several files, click's is repeated
                words.append(flag)
        words.append(argument)
    cli.main(words, command, "python -m qdqtune.autotune")


def exit_code(program: Callable[[], object]) -> int:
    """Run a program that exits. Gives the exit code."""
    try:
        program()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def run_autotune() -> int:
    """Run the command with the arguments of the program. Gives the exit code."""
    return exit_code(main)


# ModelOpt's parser, for programs that take it as a part of their own

DEFAULT_NUM_SCHEMES, DEFAULT_WARMUP_RUNS, DEFAULT_TIMING_RUNS = 50, 50, 100
MODE_PRESETS = {
    "quick": {"schemes_per_region": 30, "warmup_runs": 10, "timing_runs": 50},
    "default": {"schemes_per_region": 50, "warmup_runs": 50, "timing_runs": 100},
    "extensive": {"schemes_per_region": 200, "warmup_runs": 50, "timing_runs": 200},
}
"""What the modes mean to `apply_mode_presets`. `python -m qdqtune.autotune` limits builds besides (`EFFORTS`)."""


def add_flag(parser: argparse.ArgumentParser, flags: str, **how: Any) -> None:
    """Add a flag by its names, each spelled with underscores and with dashes; its value has that of the first long
    one."""
    spelled = (form for name in flags.split() for form in (name, name[:2] + name[2:].replace("_", "-")))
    parser.add_argument(*dict.fromkeys(spelled), **how)


def get_parser() -> argparse.ArgumentParser:
    """ModelOpt's flags; what a mode presets is None until `apply_mode_presets`."""
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
    add_flag(parser, "-s --schemes_per_region", type=int, dest="num_schemes")
    add_flag(parser, "--warmup_runs", type=int)
    add_flag(parser, "--timing_runs", type=int)
    return parser


def apply_mode_presets(args: argparse.Namespace) -> None:
    """Put the presets of `args.mode`, or of the default one, where their own option was not given."""
    for name, number in MODE_PRESETS.get(args.mode, MODE_PRESETS["default"]).items():
        target = "num_schemes" if name == "schemes_per_region" else name
        if getattr(args, target) is None:
            setattr(args, target, number)


def get_node_filter_list(node_filter_list_path: str | Path | None) -> list[str] | None:
    """The wildcards of a file, one a line; lines that begin with # are comments. None without a file."""
    if node_filter_list_path is None:
        return None
    with reading(node_filter_list_path):
        lines = Path(node_filter_list_path).read_text(encoding="utf-8").splitlines()
    return [name for line in lines if (name := line.strip()) and not name.startswith("#")]


if __name__ == "__main__":
    main()
