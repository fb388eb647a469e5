"""`python -m qdqtune.autotune`: flags of ModelOpt's autotuner become those of `qdqtune tune`, which does the rest."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from qdqtune import cli
from qdqtune.autotune.benchmark import default_engine, rounds_for
from qdqtune.autotune.workflows import builds_for, complete
from qdqtune.engines import EngineSpec
from qdqtune.errors import BadOption
from qdqtune.settings import EFFORTS
from qdqtune.shapes import spans

MODES, PRESETS = ("region", "subgraph"), tuple(EFFORTS)
TENSORRT = ("tensorrt", "trtexec")
ELSEWHERE = "remoteAutoTuningConfig"
AS_THEY_ARE = ("pattern_cache", "qdq_baseline", "state_file", "node_filter_list", "schemes_per_region", "warmup_runs")
"""Options that `tune` has under the same name."""


@click.command(context_settings=cli.CONTEXT | {"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("-m", "--onnx-path", "--model", "model", type=click.Path(path_type=Path), required=True,
              help="ONNX file.")  # fmt: skip
@click.option("-o", "--output-dir", "--output", type=click.Path(path_type=Path), default=Path("autotuner_output"),
              show_default=True, help="Where everything goes. The same folder again resumes.")  # fmt: skip
@click.option("--mode", "modes", type=click.Choice([*MODES, *PRESETS]), multiple=True, default=["region", "default"],
              show_default=True,
              help="How to search, and how much to spend on it. Give one of either kind, or one.")  # fmt: skip
@click.option("-s", "--schemes-per-region", type=click.IntRange(1), metavar="N",
              help="Give every pattern N schemes, however long it takes. Without it the preset limits the builds of "
                   "the whole search (24, 52 or 400).")  # fmt: skip
@click.option("--pattern-cache", help="Pattern cache of an earlier run to start from.")
@click.option("--qdq-baseline", help="A quantized version of the model to start from.")
@click.option("--state-file", help="[default: OUTPUT_DIR/autotuner_state.yaml]")
@click.option("--node-filter-list", help="File of node-name wildcards, one a line: other regions stay in float.")
@click.option("--quant-type", type=click.Choice(["int8", "fp8"]), default="int8", show_default=True)
@click.option("--default-dq-dtype", type=click.Choice(["float16", "float32", "bfloat16"]), default="float32",
              show_default=True, help="Type of tensors whose type cannot be inferred.")  # fmt: skip
@click.option(
    "--engine", metavar="NAME", help="Engine to time on.  [default: tensorrt if it works here, or onnxruntime]"
)
@click.option("--use-trtexec", is_flag=True, help="The same as --engine trtexec.")
@click.option("--timing-cache", default=str(Path(tempfile.gettempdir()) / "trtexec_timing.cache"), show_default=True,
              help="TensorRT: file of kernel times that builds share.")  # fmt: skip
@click.option("--warmup-runs", type=click.IntRange(0), help="Inferences of each model before its rounds.  [2]")
@click.option(
    "--timing-runs",
    type=click.IntRange(1),
    help="Least inferences of each model in a comparison that is not decided earlier.  [40 | 96 | 192]",
)
@click.option("--plugin-libraries", "--plugins", multiple=True, help="TensorRT: shared libraries with plug-ins.")
@click.option("--trtexec-benchmark-args", "--trtexec-args", help="trtexec: more arguments, as one string.")
@click.option("--graph-json", help="Subgraph mode: the layers of the float model, as TensorRT has exported them.")
@click.option("--incremental-validation/--no-incremental-validation", default=None,
              help="Subgraph mode: check each group on the whole model, and keep those that gain.  [on]")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="A line for every candidate.")
@click.pass_context
def command(context: click.Context, /, **given: Any) -> int:
    """Find the fastest Q/DQ placement for a model, by the flags of ModelOpt's autotuner.

    All other flags go to `qdqtune tune`: --calibration-data, --builds, --time-budget, --input-shape, --json, ... The
    exit code is 0 also where nothing faster was found; the files are all there.

    \b
    python -m qdqtune.autotune --onnx_path model.onnx --output_dir results
    python -m qdqtune.autotune --model model.onnx --mode subgraph --mode quick
    """
    name, why = (given["engine"], "as you asked") if given["engine"] else _engine(given["use_trtexec"])
    click.echo(f"engine: {name} ({why})", err=True)
    arguments = ["tune", str(given["model"]), "--engine", name, *_translated(given, name), *context.args]
    with cli.app.make_context("qdqtune", arguments) as tuning:
        code: int = cli.app.invoke(tuning)
    state = Path(given["state_file"] or given["output_dir"] / "autotuner_state.yaml")
    if code in (0, cli.NO_IMPROVEMENT) and state.exists() and "subgraph" not in given["modes"]:
        complete(given["model"], given["output_dir"], state)
    return 0 if code == cli.NO_IMPROVEMENT else code


def _engine(use_trtexec: bool) -> tuple[str, str]:
    return ("trtexec", "--use_trtexec") if use_trtexec else default_engine()


def _translated(given: Mapping[str, Any], engine: str) -> Iterator[str]:
    """Arguments of `tune`.

    Raises:
        BadOption: a flag asks for what cannot be done here.
    """
    chosen = {kind: ([m for m in given["modes"] if m in kind] or [default])[-1]
              for kind, default in ((MODES, "region"), (PRESETS, "default"))}  # fmt: skip
    yield from ("-o", str(given["output_dir"]), "--mode", chosen[MODES], "--effort", chosen[PRESETS])
    yield from ("--quant-type", given["quant_type"], "--default-dq-dtype", given["default_dq_dtype"])
    if given["pattern_cache"] is not None and chosen[MODES] != "region":
        _note("--pattern-cache means something with --mode region only")
        given = {**given, "pattern_cache": None}
    for name in AS_THEY_ARE:
        if given[name] is not None:
            yield from ("--" + name.replace("_", "-"), str(given[name]))
    if given["schemes_per_region"] is not None and chosen[MODES] == "region":
        yield from ("--builds", str(builds_for(given["schemes_per_region"], given["model"])))
    if given["timing_runs"] is not None:
        yield from ("--timing-runs", str(rounds_for(given["timing_runs"])))
    if given["verbose"]:
        yield "--verbose"
    yield from _of_the_engine(given, engine)
    checked = given["incremental_validation"]
    if chosen[MODES] != "subgraph" and (given["graph_json"] is not None or checked is not None):
        _note("--graph-json and --incremental-validation mean something with --mode subgraph only")
    elif given["graph_json"] is not None:
        yield from ("--graph-json", given["graph_json"])
    if chosen[MODES] == "subgraph" and checked is not None:
        yield "--incremental-validation" if checked else "--no-incremental-validation"


def _of_the_engine(given: Mapping[str, Any], engine: str) -> Iterator[str]:
    extra = given["trtexec_benchmark_args"] or ""
    if ELSEWHERE in extra:
        raise BadOption(f"--{ELSEWHERE} times on another machine, qdqtune on its own: run it on that machine")
    if engine in TENSORRT:
        yield from ("--timing-cache", given["timing_cache"])
        for library in given["plugin_libraries"]:
            yield from ("--plugin-libraries", library)
    elif given["plugin_libraries"]:
        _note(f"{engine} loads no TensorRT plug-ins, so --plugin_libraries is passed over")
    if engine == "trtexec" and extra:
        yield f"--trtexec-args={extra}"
    elif extra:
        for tensor, (_, usual, _) in spans(EngineSpec("trtexec", {"trtexec_args": extra})).items():
            yield from ("--input-shape", f"{tensor}:{'x'.join(map(str, usual))}")
        _note(f"{engine} takes no arguments of trtexec: of --trtexec_benchmark_args only shapes are used")


def _note(text: str) -> None:
    click.echo(f"note: {text}", err=True)


def _spread(arguments: Sequence[str]) -> Iterator[str]:
    """One flag for each value, where one flag had several: --plugins a.so b.so."""
    flag, number = "", 0
    for argument in arguments:
        if argument.startswith("-"):
            flag, number = argument.replace("_", "-"), 0
        elif flag in ("--plugin-libraries", "--plugins"):
            number += 1
            if number > 1:
                yield flag
        yield argument


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit, as `qdqtune.cli.main` does, but for code 3."""
    given = sys.argv[1:] if arguments is None else arguments
    cli.main([*_spread(given)], command, "python -m qdqtune.autotune")


if __name__ == "__main__":
    main()
