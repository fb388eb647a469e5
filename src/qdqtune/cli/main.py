"""The command line: arguments become settings, errors become one line and an exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from qdqtune.calibration.calibrate import Calibration
from qdqtune.calibration.samples import open_samples
from qdqtune.cli import options, report
from qdqtune.cli.engines import build_command, check_command, doctor_command
from qdqtune.cli.inspect import as_json, render
from qdqtune.cli.layers import layers_command
from qdqtune.cli.quantize import quantize_command, rules_command
from qdqtune.commands.apply import apply
from qdqtune.commands.compare import comparable, compare_files
from qdqtune.engines import EngineSpec, shapes
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.runner import unlogged
from qdqtune.engines.shapes import check_spans
from qdqtune.errors import ConstraintUnmet, EngineFailure, QdqtuneError
from qdqtune.graph.loading import load, with_input_shapes
from qdqtune.measurement.timing import Plan
from qdqtune.placement.files import read_placement_file
from qdqtune.search.region import Config
from qdqtune.search.regions import discovery, patterns
from qdqtune.tuning.loop import estimate, tune
from qdqtune.tuning.proof import FINAL
from qdqtune.tuning.settings import EFFORTS, Settings
from qdqtune.version import __version__

NO_IMPROVEMENT, INTERRUPTED, DEFECT = 3, 130, 70

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --timing_runs is --timing-runs
}


def main(
    arguments: Sequence[str] | None = None, command: click.Command | None = None, name: str = "qdqtune"
) -> NoReturn:
    """Run the command line (or another `command`) and exit: 0 done, 2 usage or bad input, 3 no improvement, 4 a
    constraint unmet, 5 engine unavailable or baseline failed, 70 a defect of qdqtune, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        run = command or app
        with run.make_context(name, given) as context:  # `run.main` would turn a closed pipe into code 1
            code = run.invoke(context)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as done:  # --help and --version
        sys.exit(done.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        asked = getattr(error, "ctx", None)
        hint = f" (see {asked.command_path} --help)" if asked is not None else ""
        _fail(error.format_message().rstrip(".") + hint, 2)
    except QdqtuneError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone
        _drop_output()
        sys.exit(0)
    except OSError as error:
        _drop_output()
        _fail(str(error), 2)
    except Exception:  # noqa: BLE001  (a defect: shown whole, and never mistaken for one of the promised codes)
        Console(stderr=True).print_exception()
        _fail("this is a defect of qdqtune: please report it with the lines above", DEFECT)


def _say(text: str, style: str = "") -> None:
    """One line for people. Standard output is for results."""
    line = " ".join(text.splitlines())
    Console(stderr=True).print(line, style=style, highlight=False, soft_wrap=True, markup=False)


def _fail(text: str, code: int) -> NoReturn:
    _say(f"error: {text}", "red")
    sys.exit(code)


def _drop_output() -> None:
    """Forget what cannot be written any more, or the interpreter would try it again at its end and fail."""
    with contextlib.suppress(io.UnsupportedOperation):  # standard output was replaced by something in memory
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="qdqtune")
def app() -> None:
    """Find where Q/DQ pairs belong in an ONNX model, by measuring on the engine that you deploy on.

    \b
    qdqtune tune model.onnx --calibration-data samples.npz    search, prove, write optimized_final.onnx
    qdqtune quantize model.onnx --calibration-data data.npz   pairs by rules, without a search
    qdqtune compare a.onnx b.onnx                             time your own files against each other
    qdqtune apply model.onnx --placement placement.yaml       the same pairs on retrained weights
    qdqtune inspect model.onnx                                regions and patterns of a model
    qdqtune layers model.onnx                                 what the engine made of it, layer by layer
    qdqtune check quantized.onnx                              which pairs the engine does not fuse, and why
    qdqtune build model.onnx -o model.engine                  save the engine's own format
    qdqtune doctor                                            which engines are usable here
    """


@app.command("tune")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output-dir", type=click.Path(path_type=Path), default=Path("qdqtune_output"), show_default=True,
              help="Where everything goes. The same folder again resumes.")  # fmt: skip
@click.option("--mode", type=click.Choice(["cut", "region", "subgraph"]), default="cut", show_default=True,
              help="How to search. cut: price every fusion group from layer times and take the optimum of the prices. "
                   "region: vary the result of the cut pattern by pattern; takes about five times as long. subgraph: "
                   "time every distinct fusion group alone, then put together what gains and check it on the whole "
                   "model.")  # fmt: skip
@click.option("--cut-seed/--no-cut-seed", default=True, show_default=True,
              help="region: begin with what the cut finds in the first dozen builds; or with rules alone.")  # fmt: skip
@click.option("--graph-json", type=click.Path(path_type=Path), metavar="FILE",
              help="subgraph: take the fusion groups from this file of trtexec --exportLayerInfo (with "
                   "--profilingVerbosity=detailed), not from the engine at hand.")  # fmt: skip
@click.option("--incremental-validation/--no-incremental-validation", default=True, show_default=True,
              help="subgraph: look on the whole model for groups that do not pay, in batches that are halved where "
                   "they are rejected; or take all groups that gain alone, or none.")  # fmt: skip
@click.option("--quant-type", type=click.Choice(["int8", "fp8"]), default="int8", show_default=True,
              help="Numbers of the pairs; fp8 is E4M3, where the engine has it, and needs opset 19.")  # fmt: skip
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True,
              help="fp16: make MODEL float16 first, as TensorRT takes precision from the graph. Its inputs and "
                   "outputs keep their types.")  # fmt: skip
@options.engine_options
@options.data_options
@options.range_options
@options.limit_options
@click.option("--fix-input", "fix_inputs", multiple=True, metavar="NAME=VALUE", callback=options.fixed,
              help="Make an input constant; an If that it decides is folded. Repeatable.")  # fmt: skip
@click.option("--effort", type=click.Choice(list(EFFORTS)), default="default", show_default=True,
              help="Preset of --builds, --schemes-per-region and --timing-runs; explicit flags win.")  # fmt: skip
@click.option(
    "--builds",
    type=int,
    help="Engine builds that the search may spend.  "
    "[by --effort: cut 8, 12, 30; region 24, 52, 400; subgraph 4, 7, 24]",
)
@click.option("-s", "--schemes-per-region", type=click.IntRange(0),
              help="region: candidates per pattern.  [4 | 50 | 200]")  # fmt: skip
@click.option("--time-budget", callback=options.seconds, help="Stop searching after this long: 90s, 10m, 1h.")
@click.option("--timing-runs", type=click.IntRange(12), help="Most rounds of one comparison.  [20 | 48 | 96]")
@click.option("--warmup-runs", type=click.IntRange(0), default=2, show_default=True,
              help="Inferences of each model before its rounds.")  # fmt: skip
@click.option("--regions", "region_method", type=click.Choice(["auto", "names", "topology"]), default="auto",
              show_default=True, help="Divide the graph by node names, by topology, or by what fits.")  # fmt: skip
@click.option("--node-filter-list", type=click.Path(path_type=Path),
              help="File of node-name wildcards, one a line: other regions stay in float.")  # fmt: skip
@click.option("--default-dq-dtype", type=click.Choice(["float16", "float32", "bfloat16"]),
              help="Type of tensors whose type cannot be inferred (behind custom operators).")  # fmt: skip
@click.option("--qdq-baseline", type=click.Path(path_type=Path), help="A quantized version of the model to start from.")
@click.option("--from-qdq", is_flag=True, help="MODEL has Q/DQ pairs: strip them, keep their scales, start from them.")
@click.option("--pattern-cache", type=click.Path(path_type=Path),
              help="region: try the schemes in the pattern cache of an earlier run.")  # fmt: skip
@click.option("--state-file", type=click.Path(path_type=Path), help="[default: OUTPUT_DIR/autotuner_state.yaml]")
@click.option("--restart", is_flag=True, help="Forget what the state file knows.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and how long it would take.")
@click.option("--json", "as_machine", is_flag=True, help="Print summary.json instead of the table.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.option("-v", "--verbose", is_flag=True, help="A line for every candidate, also on a terminal.")
def tune_command(model: Path, dry_run: bool, as_machine: bool, quiet: bool, verbose: bool, **given: Any) -> int:
    """Find the fastest Q/DQ placement for MODEL.

    Writes baseline.onnx and optimized_final.onnx, which is proven faster on fresh builds or else equals the baseline;
    placement.yaml, summary.json, a pattern cache and logs/. By --mode also units.json (the prices behind the cut),
    region_models/ or subgraphs/. Stop it with Ctrl-C and type the same command to go on. Exit code 3: nothing faster
    was found; 4: only what misses --min-sqnr or --max-drop was.

    \b
    qdqtune tune model.onnx --calibration-data samples.npz -o out
    qdqtune tune model.onnx --effort quick --input-shape image:1x3x224x224
    """
    settings = _settings(model, given)
    progress = report.progress(Console(stderr=True, quiet=quiet), verbose=verbose)
    try:
        with progress as observer:
            if dry_run:
                expected = estimate(settings, observer)
                print(json.dumps(vars(expected), indent=2) if as_machine else report.estimate_lines(expected))
                return 0
            result = tune(settings, observer)
    except KeyboardInterrupt:
        without = " without --restart" if settings.restart else ""
        _say(f"interrupted: what was measured is kept; the same command{without} goes on from there")
        return INTERRUPTED
    why = report.failure_note(result, settings.output_dir / "logs")
    for note in (*result.notes, *filter(None, [why])):
        _say(f"note: {note}")
    if as_machine:
        print(json.dumps(dict(result.summary), indent=2))
    else:
        if verbose and result.units:
            Console().print(report.units_table(result))
        if result.groups:
            Console().print(report.groups_table(result))
        Console().print(report.result_table(result))
        print(report.result_line(result, settings.output_dir / FINAL))
    return 0 if result.improved else ConstraintUnmet.exit_code if result.unmet else NO_IMPROVEMENT


def _settings(model: Path, given: Mapping[str, Any]) -> Settings:
    effort = EFFORTS[given["effort"]]
    runs = given["timing_runs"]
    looks = effort.looks if runs is None else (*(n for n in effort.looks if n < runs), runs)
    schemes = given["schemes_per_region"]
    return Settings(
        model=model,
        output_dir=given["output_dir"],
        engine=options.with_timing_cache(given["spec"], given["output_dir"]),
        mode=given["mode"],
        quant_type=given["quant_type"],
        precision=given["precision"],
        calibration_data=given["calibration_data"],
        calibration_samples=given["calibration_samples"],
        calibration=Calibration(given["calibration_method"], given["percentile"]),
        fix_inputs=given["fix_inputs"],
        input_shapes=given["input_shapes"] or shapes.usual_shapes(given["spec"], given["calibration_data"]),
        regions=given["region_method"],
        config=Config(schemes_per_region=effort.schemes_per_region if schemes is None else schemes),
        plan=replace(Plan(), looks=looks, warmup=given["warmup_runs"]),
        proof=effort.proof,
        builds=effort.builds[given["mode"]] if given["builds"] is None else given["builds"],
        time_budget=given["time_budget"],
        time_limit=given["time_limit"],
        seed=given["seed"],
        node_filter=options.wildcards(given["node_filter_list"]),
        default_dq_dtype=given["default_dq_dtype"],
        state_file=given["state_file"],
        pattern_cache=given["pattern_cache"],
        qdq_baseline=given["qdq_baseline"],
        from_qdq=given["from_qdq"],
        min_sqnr=given["min_sqnr"],
        max_drop=given["max_drop"],
        evaluate=given["evaluate"],
        graph_json=given["graph_json"],
        incremental_validation=given["incremental_validation"],
        cut_seed=given["cut_seed"],
        restart=given["restart"],
    )


@app.command("compare")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@options.engine_options
@options.data_options
@click.option(
    "--timing-runs", type=click.IntRange(12), default=24, show_default=True, help="Rounds per pair of builds."
)
@click.option("--warmup-runs", type=click.IntRange(0), default=2, show_default=True,
              help="Inferences of each model before its rounds.")  # fmt: skip
@click.option("--json", "as_machine", is_flag=True, help="Print JSON instead of the table.")
def compare_command(
    files: Sequence[Path], engine: str, spec: EngineSpec,
    time_limit: float, calibration_data: str | None, calibration_samples: int | None,
    input_shapes: Mapping[str, tuple[int, ...]], seed: int, timing_runs: int, warmup_runs: int, as_machine: bool,
) -> int:  # fmt: skip
    """Time every other of FILES against the first, in interleaved rounds on two fresh builds of both.

    A ratio below 1 means less time than the first file takes. The true ratio lies outside its interval at most twice
    in a thousand comparisons. Exit code 5: the engine refuses one of the files.

    \b
    qdqtune compare model.onnx qdqtune_output/optimized_final.onnx
    """
    models = comparable(files)
    check_spans(spec, models[0])
    shaped = with_input_shapes(models[0], input_shapes) if input_shapes else models[0]
    samples = open_samples(calibration_data, shaped, seed=seed, limit=calibration_samples).first(4)
    plan = Plan((timing_runs,), warmup=warmup_runs)
    with (
        report.progress(Console(stderr=True)) as observer,
        unlogged(spec, time_limit_s=time_limit) as runner,
    ):
        rows = compare_files(files, runner, samples, plan, seed=seed, observer=observer)
    if as_machine:
        print(json.dumps({"first": str(files[0]), "others": [row.as_json() for row in rows]}, indent=2))
    else:
        Console().print(report.comparison_table(str(files[0]), rows))
    refused = [row for row in rows if row.ratio is None]
    for row in refused:
        _say(f"error: {row.file} cannot be compared: {row.reason}", "red")
    return EngineFailure.exit_code if refused else 0


@app.command("apply")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--placement", type=click.Path(path_type=Path), required=True, help="placement.yaml of a tuning run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="[default: MODEL with .qdq.onnx]")
@click.option("--engine", metavar="NAME", help="Engine whose numeric format to use; it need not be installed here.  "
              "[default: that of the placement]")  # fmt: skip
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True,
              help="fp16: make MODEL float16 first, as the run that found the placement did.")  # fmt: skip
@options.data_options
@options.range_options
@click.option("--json", "as_machine", is_flag=True, help="Print JSON.")
def apply_command(
    model: Path, placement: Path, output: Path | None, engine: str | None, precision: Any,
    calibration_data: str | None, calibration_samples: int | None, input_shapes: Mapping[str, tuple[int, ...]],
    seed: int, calibration_method: Any, percentile: float, as_machine: bool,
) -> None:  # fmt: skip
    """Put the Q/DQ pairs of an earlier search into MODEL, with scales calibrated anew: no search, no timing.

    For a network that was trained again: its placement holds, its scales do not.
    """
    recorded = read_placement_file(placement)
    target = output or model.with_suffix(".qdq.onnx")
    numbers = numeric_format(engine or recorded.engine, "fp8" if recorded.quant_type == "fp8" else "int8")
    with report.progress(Console(stderr=True)) as observer:
        observer.stage(f"calibrating {model.name}")
        done = apply(model, placement, target, numbers, calibration_data=calibration_data,
                     calibration=Calibration(calibration_method, percentile), input_shapes=input_shapes,
                     samples=calibration_samples, seed=seed, precision=precision)  # fmt: skip
    if done.random_data:
        _say("note: no --calibration-data: the scales come from random inputs")
    if done.lost:
        _say(f"note: {len(done.lost)} edges are not in this model, the first: {done.lost[0]}")
    if as_machine:
        lost = [str(edge) for edge in done.lost]
        print(json.dumps({"output": str(target), "edges": len(done.placement), "lost": lost}, indent=2))
    else:
        print(f"{target}: {len(done.placement)} edges carry a Q/DQ pair")


@app.command("inspect")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--regions", "method", type=click.Choice(["auto", "names", "topology"]), default="auto",
              show_default=True, help="Divide the graph by node names, by topology, or by what fits.")  # fmt: skip
@click.option(
    "--max-sequence-size", type=click.IntRange(1), default=10, show_default=True, help="Largest leaf, in nodes."
)
@click.option("--include-all-regions", is_flag=True, help="Show regions without quantizable operators as well.")
@click.option("--fix-input", "fix_inputs", multiple=True, metavar="NAME=VALUE", callback=options.fixed,
              help="Make an input constant; an If that it decides is folded. Repeatable.")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Name every node and tensor.")
@click.option("--json", "as_machine", is_flag=True, help="Print JSON.")
def inspect_command(
    model: Path, method: Any, max_sequence_size: int, include_all_regions: bool,
    fix_inputs: Mapping[str, float | int | str], verbose: bool, as_machine: bool,
) -> None:  # fmt: skip
    """Show how MODEL divides into regions, and which of them share a pattern.

    More patterns mean a longer search: every pattern is tuned once, wherever it occurs.
    """
    graph = load(model, fix_inputs=fix_inputs)
    found = discovery.find(graph, method, max_sequence_size=max_sequence_size)
    grouped = patterns.group(graph, found)
    if as_machine:
        print(json.dumps(as_json(graph, found, grouped, include_all_regions=include_all_regions), indent=2))
    else:
        print(render(graph, found, grouped, include_all_regions=include_all_regions, verbose=verbose))


app.add_command(quantize_command)
app.add_command(rules_command)
app.add_command(layers_command)
app.add_command(build_command)
app.add_command(check_command)
app.add_command(doctor_command)
