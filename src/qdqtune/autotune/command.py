"""`python -m qdqtune.autotune` itself: ModelOpt's flags become those of `qdqtune tune`, which does the rest."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from qdqtune.autotune.benchmark import default_engine, rounds_for
from qdqtune.autotune.flags import flag, option, repeated
from qdqtune.autotune.graphs import nodes_of
from qdqtune.autotune.workflows import RegionLogs
from qdqtune.cli import main as cli
from qdqtune.cli import tune
from qdqtune.cli.command import CHATTER, SILENCE, Guarded, is_verbose
from qdqtune.cli.models import inspect_command
from qdqtune.commands.inputs import MODEL as MODEL_FILE
from qdqtune.commands.paths import typed
from qdqtune.commands.tune import TuneOptions
from qdqtune.engines import EngineSpec
from qdqtune.engines.options import TIMING_CACHE
from qdqtune.engines.tensorrt.options import usual_shapes
from qdqtune.graph.loading import load
from qdqtune.options import Limit, OfRun, choice, options_of
from qdqtune.tuning.folder import SUMMARY
from qdqtune.tuning.settings import EFFORTS
from qdqtune.tuning.subject import tuned_patterns

MODES, TENSORRT = ("region", "subgraph"), ("tensorrt", "trtexec")

MODEL = option("-m --onnx-path --model model", "ONNX file.", MODEL_FILE, required=True)

AUTOTUNE = option(
    "--autotune",
    "Search on the engine, with this preset: --autotune=quick.",
    click.Choice([*EFFORTS]),
    is_flag=False,
    flag_value="default",
)

OWN = (
    MODEL,
    option(
        "-o --output-dir --output",
        "Where everything goes. The same folder again resumes.",
        OfRun(),
        default=Path("autotuner_output"),
    ),
    repeated(
        "--mode",
        None,
        "How to search, and how much to spend on it. Give one of either kind, or one.",
        type=click.Choice([*MODES, *EFFORTS]),
        default=["region", "default"],
        show_default=True,
    ),
    AUTOTUNE,
    option("--workflow", "The first kind of --mode, by another name.", click.Choice(MODES)),
    option("--quant-type --quantize-mode quant_type", "Numbers of the pairs.", choice("int8", "fp8"), default="int8"),
    option(
        "--precision --high-precision-dtype precision",
        options_of(TuneOptions)["precision"].help,
        choice("fp32", "fp16", "bf16"),
    ),
    option(
        "--calibration-data --calibration-data-path calibration_data",
        "Samples: an .npz (arrays named as the inputs), a folder of .npy/.npz, or module:callable.",
        typed(options_of(TuneOptions)["calibration_data"].kind),
        metavar="SOURCE",
    ),
    repeated(
        "--quantizable-ops --op-types-to-quantize quantizable_ops",
        "OPS",
        "Leave regions in float that hold none of these operators. Several with commas; repeatable.",
    ),
    flag("--strongly-typed", "What engines of TensorRT 10 and later are here in any case."),
    option(
        "-s --schemes-per-region",
        "Give every pattern N schemes, however long it takes. Without it the preset limits the builds of the whole "
        "search (24, 52 or 400).",
        click.IntRange(1),
        metavar="N",
    ),
    option(
        "--default-dq-dtype",
        "Type of tensors whose type cannot be inferred.",
        click.Choice(["float16", "float32", "bfloat16"]),
        default="float32",
    ),
    option("--engine", "Engine to time on.  [default: tensorrt if it works here, or onnxruntime]", metavar="NAME"),
    flag("--use-trtexec", "The same as --engine trtexec."),
    option("--trtexec-benchmark-args --trtexec-args trtexec_args", "trtexec: more arguments, as one string."),
    option(
        "--timing-cache",
        "TensorRT: file of kernel times that builds share.",
        TIMING_CACHE,
        default=str(Path(tempfile.gettempdir()) / "trtexec_timing.cache"),
    ),
    option(
        "--timing-runs",
        "Least inferences of each model in a comparison that is not decided earlier.  [40 | 96 | 192]",
        click.IntRange(1),
    ),
    option("--min-sqnr", "Take only what has this output SQNR in dB.", Limit(), metavar="DB", default="none"),
    option("--min-agreement", "Take only what keeps this share of integers.", Limit(), metavar="X", default="none"),
)
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
    modes = [*given["mode"], *filter(None, (given.pop("autotune"), given.pop("workflow")))]
    given["mode"] = next((mode for mode in reversed(modes) if mode in MODES), "region")
    given["effort"] = next((mode for mode in reversed(modes) if mode in EFFORTS), given["effort"])
    _log_to_stderr(verbose=is_verbose())
    for name, mode in (("pattern_cache", "region"), ("graph_json", "subgraph")):
        if given[name] is not None and given["mode"] != mode:
            _note(f"note: --{name} means something with --mode {mode} only")
            given[name] = None
    if given["timing_runs"] is not None:
        given["timing_runs"] = rounds_for(given["timing_runs"])
    given.pop("strongly_typed")
    operators = {name for names in given.pop("quantizable_ops") for name in names.replace(",", " ").split()}
    if operators:
        given["node_filter"] = (*given["node_filter"], *nodes_of(load(given["model"]), operators))
    how = {name: given.pop(name) for name in ("dry_run", "as_machine")}
    if given["mode"] == "subgraph":
        code = tune.run(TuneOptions(**_for_engine(given)), **how)
    else:
        patterns = tuned_patterns(given["model"], given["regions"], given["fix_inputs"])
        _note(f"patterns: {len(patterns)}, in {sum(len(p.instances) for p in patterns)} regions")
        logs = RegionLogs(given["output_dir"], patterns)
        code = tune.run(TuneOptions(**_for_engine(given)), logs, **how)
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
    """The options of `tune`, without what the engine does not know."""
    engine, unknown = given["engine"], set[str]()
    if engine != "trtexec" and given["trtexec_args"]:
        _note(f"note: {engine} takes no arguments of trtexec: of --trtexec_benchmark_args only shapes are used")
        usual = usual_shapes(EngineSpec("trtexec", {"trtexec_args": given["trtexec_args"]}), None)
        given = {**given, "input_shapes": usual | given["input_shapes"]}
        unknown |= {"trtexec_args"}
    if engine not in TENSORRT:
        if given["plugin_libraries"]:
            _note(f"note: {engine} loads no TensorRT plug-ins, so --plugin_libraries is passed over")
        unknown |= {"timing_cache", "plugin_libraries"}
    return {name: value for name, value in given.items() if name not in unknown}


def _note(text: str) -> None:
    click.echo(text, err=True)


def _like(ours: click.Command, own: Sequence[click.Parameter], **changed: Any) -> click.Command:
    """A command with the flags of one of ours, some of them replaced."""
    replaced = {option.name for option in own}
    params = [*own, *(option for option in ours.params if option.name not in replaced), SILENCE, CHATTER]
    given = {"callback": ours.callback, "help": ours.help, **changed}
    return Guarded(ours.name, context_settings=cli.CONTEXT, params=params, **given)


command = _like(tune.tune_command, OWN, callback=run, help=run.__doc__)


def spread(arguments: Sequence[str] | None, several: Collection[str]) -> list[str]:
    """The arguments (by default those of the program) with one flag for each value where a flag that takes several had
    them: --plugins a.so b.so."""
    made, flag, number = list[str](), "", 0
    for argument in sys.argv[1:] if arguments is None else arguments:
        if argument.startswith("-"):
            flag, number = argument.replace("_", "-"), 0
        elif flag in several:
            number += 1
            if number > 1:
                made.append(flag)
        made.append(argument)
    return made


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit, as `qdqtune.cli.main.main` does, but for code 3."""
    cli.main(spread(arguments, ("--plugin-libraries", "--plugins")), command, "python -m qdqtune.autotune")


def inspect(program: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Be one of the programs that show regions: `qdqtune inspect --tree` with the model as a flag."""
    given = sys.argv[1:] if arguments is None else arguments
    cli.main(["--tree", *given], _like(inspect_command, [MODEL]), f"python -m qdqtune.autotune.{program}")
