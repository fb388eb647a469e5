"""The command line: arguments become settings, errors become one line and an exit code."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from qdqtune import __version__, patterns, regions, report
from qdqtune.applying import apply
from qdqtune.calibration import Calibration
from qdqtune.comparing import compare_files
from qdqtune.data import open_samples
from qdqtune.engines import EngineSpec
from qdqtune.errors import BadOption, QdqtuneError
from qdqtune.inspection import as_json, render
from qdqtune.loading import load, with_input_shapes
from qdqtune.placements import read_placement_file
from qdqtune.runner import Runner
from qdqtune.settings import EFFORTS, Settings
from qdqtune.strategies.region import Config
from qdqtune.timing import Plan
from qdqtune.tune import estimate, tune

NO_IMPROVEMENT, INTERRUPTED, DEFECT = 3, 130, 70

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --timing_runs is --timing-runs
}

Command = Callable[..., Any]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 2 usage or bad input, 3 no improvement, 4 a constraint unmet,
    5 engine unavailable or baseline failed, 70 a defect of qdqtune, 130 interrupted.
    """
    console = Console(stderr=True)
    try:
        code = app.main(arguments, prog_name="qdqtune", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code if error.exit_code != 1 else 2)
    except QdqtuneError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        console.print("interrupted: what was measured is kept; the same command goes on from there", highlight=False)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(2)
    except Exception:  # noqa: BLE001  (a defect: shown whole, and never mistaken for one of the promised codes)
        console.print_exception()
        console.print("this is a defect of qdqtune: please report it with the lines above", style="red")
        sys.exit(DEFECT)


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="qdqtune")
def app() -> None:
    """Find where Q/DQ pairs belong in an ONNX model, by measuring on the engine that you deploy on.

    \b
    qdqtune tune model.onnx --calibration-data samples.npz    search, prove, write optimized_final.onnx
    qdqtune compare a.onnx b.onnx                             time your own files against each other
    qdqtune apply model.onnx --placement placement.yaml       the same pairs on retrained weights
    qdqtune inspect model.onnx                                regions and patterns of a model
    """


def _engine_options(command: Command) -> Command:
    options = [
        click.option("--engine", default="onnxruntime", show_default=True, help="Engine to build and time on."),
        click.option("--threads", type=click.IntRange(1), default=1, show_default=True,
                     help="CPU threads of the engine. One gives the most stable timing."),
        click.option("--provider", help="ONNX Runtime execution provider (default: CPUExecutionProvider)."),
        click.option("--engine-option", "engine_options", multiple=True, metavar="NAME=VALUE",
                     help="Any other option of the engine; VALUE is JSON or text. Repeatable."),
        click.option("--time-limit", default="10m", show_default=True, callback=_seconds,
                     help="Longest that one build or inference may take: 90s, 10m, 1h."),
    ]  # fmt: skip
    return _with(options, command)


def _data_options(command: Command) -> Command:
    options = [
        click.option("--calibration-data", metavar="SOURCE",
                     help="An .npz (arrays named as the inputs), a folder of .npy/.npz, or module:callable. "
                          "Without it, seeded random inputs."),
        click.option("--calibration-samples", type=click.IntRange(1), help="Use at most this many samples."),
        click.option("--input-shape", "input_shapes", multiple=True, metavar="NAME:1x3x224x224", callback=_shapes,
                     help="Shape of a dynamic input while measuring; what ships stays dynamic. Repeatable."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
                     help="Seed of everything random: inputs, order of rounds, mutations."),
    ]  # fmt: skip
    return _with(options, command)


def _range_options(command: Command) -> Command:
    options = [
        click.option("--calibration-method", type=click.Choice(["minmax", "percentile"]), default="minmax",
                     show_default=True, help="How ranges are found."),
        click.option("--percentile", type=click.FloatRange(50, 100, min_open=True), default=99.99, show_default=True,
                     help="Share of the values, in %, that method percentile keeps."),
    ]  # fmt: skip
    return _with(options, command)


def _with(options: Sequence[Command], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def _seconds(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|)", value.strip())
    if match is None or float(match[1]) <= 0:
        raise click.BadParameter(f"{value!r} is no duration: give 90s, 10m or 1.5h")
    return float(match[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[match[2]]


def _shapes(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for value in values:
        name, _colon, sizes = value.rpartition(":")
        if not name or not re.fullmatch(r"\d+(x\d+)*|", sizes):
            raise click.BadParameter(f"{value!r} is no shape: give NAME:1x3x224x224")
        shapes[name] = tuple(int(size) for size in sizes.split("x") if size)
    return shapes


def _fixed(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, float | int | str]:
    fixed: dict[str, float | int | str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} fixes nothing: give NAME=VALUE")
        fixed[name] = _value(text) if isinstance(_value(text), int | float) else text
    return fixed


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _spec(engine: str, threads: int, provider: str | None, options: Sequence[str]) -> EngineSpec:
    """The engine with its options. `threads` and `provider` go to the engines that know them."""
    chosen: dict[str, Any] = {"threads": threads} if engine in ("onnxruntime", "openvino") else {}
    if provider:
        chosen["provider"] = provider
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise BadOption(f"--engine-option {option} sets nothing: give NAME=VALUE")
        chosen[name] = _value(text)
    return EngineSpec(engine, chosen)


@app.command("tune")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output-dir", type=click.Path(path_type=Path), default=Path("qdqtune_output"), show_default=True,
              help="Where everything goes. The same folder again resumes.")  # fmt: skip
@click.option("--mode", type=click.Choice(["region"]), default="region", show_default=True,
              help="How to search. region: rules first, then pattern by pattern.")  # fmt: skip
@click.option("--quant-type", type=click.Choice(["int8", "fp8"]), default="int8", show_default=True)
@_engine_options
@_data_options
@_range_options
@click.option("--fix-input", "fix_inputs", multiple=True, metavar="NAME=VALUE", callback=_fixed,
              help="Make an input constant; an If that it decides is folded. Repeatable.")  # fmt: skip
@click.option("--effort", type=click.Choice(list(EFFORTS)), default="default", show_default=True,
              help="Preset of --builds, --schemes-per-region and --timing-runs; explicit flags win.")  # fmt: skip
@click.option("--builds", type=int, help="Engine builds that the run may spend.  [30 | 60 | 400 by --effort]")
@click.option("-s", "--schemes-per-region", type=click.IntRange(0), help="Candidates per pattern.  [4 | 50 | 200]")
@click.option("--time-budget", callback=_seconds, help="Stop searching after this long: 90s, 10m, 1h.")
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
@click.option("--pattern-cache", type=click.Path(path_type=Path), help="Pattern cache of an earlier run to start from.")
@click.option("--state-file", type=click.Path(path_type=Path), help="[default: OUTPUT_DIR/autotuner_state.yaml]")
@click.option("--restart", is_flag=True, help="Forget what the state file knows.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and how long it would take.")
@click.option("--json", "as_machine", is_flag=True, help="Print summary.json instead of the table.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.option("-v", "--verbose", is_flag=True, help="A line for every candidate, also on a terminal.")
def tune_command(model: Path, dry_run: bool, as_machine: bool, quiet: bool, verbose: bool, **given: Any) -> int:
    """Find the fastest Q/DQ placement for MODEL.

    Writes baseline.onnx and optimized_final.onnx, which is proven faster on fresh builds or else equals the baseline;
    placement.yaml, summary.json, a pattern cache, logs/ and region_models/. Stop it with Ctrl-C and type the same
    command to go on. Exit code 3: nothing faster was found.

    \b
    qdqtune tune model.onnx --calibration-data samples.npz -o out
    qdqtune tune model.onnx --effort quick --input-shape image:1x3x224x224
    """
    settings = _settings(model, given)
    console = Console(stderr=True, quiet=quiet)
    observer = report.Live(console) if console.is_terminal and not verbose else report.Plain(console)
    if dry_run:
        with observer:
            expected = estimate(settings, observer)
        print(json.dumps(vars(expected), indent=2) if as_machine else report.estimate_lines(expected))
        return 0
    with observer:
        result = tune(settings, observer)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    if as_machine:
        print(json.dumps(dict(result.summary), indent=2))
    else:
        Console().print(report.result_table(result))
        print(f"{'tuned' if result.improved else 'unchanged'} model: {settings.output_dir / 'optimized_final.onnx'}")
    return 0 if result.improved else NO_IMPROVEMENT


def _settings(model: Path, given: Mapping[str, Any]) -> Settings:
    effort = EFFORTS[given["effort"]]
    runs = given["timing_runs"]
    looks = effort.looks if runs is None else (*(n for n in effort.looks if n < runs), runs)
    schemes = given["schemes_per_region"]
    return Settings(
        model=model,
        output_dir=given["output_dir"],
        engine=_spec(given["engine"], given["threads"], given["provider"], given["engine_options"]),
        mode=given["mode"],
        quant_type=given["quant_type"],
        calibration_data=given["calibration_data"],
        calibration_samples=given["calibration_samples"],
        calibration=Calibration(given["calibration_method"], given["percentile"]),
        fix_inputs=given["fix_inputs"],
        input_shapes=given["input_shapes"],
        regions=given["region_method"],
        config=Config(schemes_per_region=effort.schemes_per_region if schemes is None else schemes),
        plan=replace(Plan(), looks=looks, warmup=given["warmup_runs"]),
        final_rounds=effort.final_rounds,
        builds=effort.builds if given["builds"] is None else given["builds"],
        time_budget=given["time_budget"],
        time_limit=given["time_limit"],
        seed=given["seed"],
        node_filter=_wildcards(given["node_filter_list"]),
        default_dq_dtype=given["default_dq_dtype"],
        state_file=given["state_file"],
        pattern_cache=given["pattern_cache"],
        qdq_baseline=given["qdq_baseline"],
        from_qdq=given["from_qdq"],
        restart=given["restart"],
    )


def _wildcards(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"cannot read --node-filter-list {path}: {error}") from error
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise BadOption(f"--node-filter-list {path} holds no wildcard")
    return found


@app.command("compare")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@_engine_options
@_data_options
@click.option(
    "--timing-runs", type=click.IntRange(12), default=24, show_default=True, help="Rounds per pair of builds."
)
@click.option("--warmup-runs", type=click.IntRange(0), default=2, show_default=True)
@click.option("--json", "as_machine", is_flag=True, help="Print JSON instead of the table.")
def compare_command(
    files: Sequence[Path], engine: str, threads: int, provider: str | None, engine_options: Sequence[str],
    time_limit: float, calibration_data: str | None, calibration_samples: int | None,
    input_shapes: Mapping[str, tuple[int, ...]], seed: int, timing_runs: int, warmup_runs: int, as_machine: bool,
) -> None:  # fmt: skip
    """Time the first of FILES against each other one, in interleaved rounds on two fresh builds of both.

    A ratio below 1 means faster than the first file; the interval holds the truth but for one time in a thousand.
    """
    model = load(files[0])
    shaped = with_input_shapes(model, input_shapes) if input_shapes else model
    samples = open_samples(calibration_data, shaped, seed=seed, limit=calibration_samples).first(4)
    plan = Plan((timing_runs,), warmup=warmup_runs)
    with (
        tempfile.TemporaryDirectory(prefix="qdqtune-") as folder,
        Runner(
            _spec(engine, threads, provider, engine_options), time_limit_s=time_limit, log_dir=Path(folder)
        ) as runner,
    ):
        rows = compare_files(files, runner, samples, plan, seed=seed)
    if as_machine:
        print(json.dumps({"first": str(files[0]), "others": [row.as_json() for row in rows]}, indent=2))
    else:
        Console().print(report.comparison_table(str(files[0]), rows))


@app.command("apply")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--placement", type=click.Path(path_type=Path), required=True, help="placement.yaml of a tuning run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="[default: MODEL with .qdq.onnx]")
@click.option("--engine", help="Engine whose numeric format to use.  [default: that of the placement]")
@_data_options
@_range_options
@click.option("--json", "as_machine", is_flag=True, help="Print JSON.")
def apply_command(
    model: Path, placement: Path, output: Path | None, engine: str | None, calibration_data: str | None,
    calibration_samples: int | None, input_shapes: Mapping[str, tuple[int, ...]], seed: int, calibration_method: Any,
    percentile: float, as_machine: bool,
) -> None:  # fmt: skip
    """Put the Q/DQ pairs of an earlier search into MODEL, with scales calibrated anew: no search, no timing.

    For a network that was trained again: its placement holds, its scales do not.
    """
    recorded = read_placement_file(placement)
    target = output or model.with_suffix(".qdq.onnx")
    with (
        tempfile.TemporaryDirectory(prefix="qdqtune-") as folder,
        Runner(EngineSpec(engine or recorded.engine), time_limit_s=600, log_dir=Path(folder)) as runner,
    ):
        numbers = runner.numeric_format("fp8" if recorded.quant_type == "fp8" else "int8")
    done = apply(model, placement, target, numbers, calibration_data=calibration_data,
                 calibration=Calibration(calibration_method, percentile), input_shapes=input_shapes,
                 samples=calibration_samples, seed=seed)  # fmt: skip
    console = Console(stderr=True)
    if done.random_data:
        console.print("note: no --calibration-data: the scales come from random inputs", highlight=False)
    if done.lost:
        console.print(f"note: {len(done.lost)} edges are not in this model, the first: {done.lost[0]}", markup=False)
    if as_machine:
        print(
            json.dumps(
                {"output": str(target), "edges": len(done.placement), "lost": [str(e) for e in done.lost]}, indent=2
            )
        )
    else:
        print(f"{target}: {len(done.placement)} edges carry a pair")


@app.command("inspect")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--regions", "method", type=click.Choice(["auto", "names", "topology"]), default="auto", show_default=True
)
@click.option(
    "--max-sequence-size", type=click.IntRange(1), default=10, show_default=True, help="Largest leaf, in nodes."
)
@click.option("--include-all-regions", is_flag=True, help="Show regions without quantizable operators as well.")
@click.option("--fix-input", "fix_inputs", multiple=True, metavar="NAME=VALUE", callback=_fixed)
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
    found = regions.find(graph, method, max_sequence_size=max_sequence_size)
    grouped = patterns.group(graph, found)
    if as_machine:
        print(json.dumps(as_json(graph, found, grouped, include_all_regions=include_all_regions), indent=2))
    else:
        print(render(graph, found, grouped, include_all_regions=include_all_regions, verbose=verbose))
