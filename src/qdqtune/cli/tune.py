"""`qdqtune tune`: the search, from its options to what is told of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from qdqtune.cli import driver, many, options, progress, report
from qdqtune.cli.grouped import command
from qdqtune.cli.options import FILE, flag, option
from qdqtune.cli.output import print_json, say, say_notes, show
from qdqtune.cli.streams import INTERRUPTED
from qdqtune.cli.threads import DEPLOY_THREADS
from qdqtune.cli.workloads import WORKLOADS, engine
from qdqtune.engines.shapes import usual_shapes
from qdqtune.errors import ConstraintUnmet, QdqtuneError
from qdqtune.measurement.timing import Plan
from qdqtune.search.region import Config
from qdqtune.tuning.estimate import estimate
from qdqtune.tuning.folder import FINAL, REPORT
from qdqtune.tuning.front import pick
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Observer, Several
from qdqtune.tuning.price_cache import usual_place
from qdqtune.tuning.result import Result
from qdqtune.tuning.settings import EFFORTS, FRONT_BUILDS, Settings, looks_until

NO_IMPROVEMENT = 3
"""The exit code where nothing faster was found."""

OPTIONS = (
    many.MODELS,
    option(
        "-o --output-dir", "Where everything goes. The same folder again resumes.", FILE, default=Path("qdqtune_output")
    ),
    option(
        "--mode",
        "How to search. cut: price every fusion group from layer times and take the optimum of the prices. region: "
        "vary the result of the cut pattern by pattern; takes about five times as long. subgraph: time every distinct "
        "fusion group alone, then put together what gains and check it on the whole model.",
        click.Choice(["cut", "region", "subgraph"]),
        default="cut",
    ),
    option(
        "--cut-seed/--no-cut-seed",
        "region: begin with what the cut finds in the first dozen builds; or with rules alone.",
        default=True,
    ),
    option(
        "--graph-json",
        "subgraph: take the fusion groups from this file of trtexec --exportLayerInfo (with "
        "--profilingVerbosity=detailed), not from the engine at hand.",
        FILE,
        metavar="FILE",
    ),
    option(
        "--incremental-validation/--no-incremental-validation",
        "subgraph: look on the whole model for groups that do not pay, in batches that are halved where they are "
        "rejected; or take all groups that gain alone, or none.",
        default=True,
    ),
    option(
        "--quant-type",
        "Numbers of the pairs; fp8 is E4M3, where the engine has it, and needs opset 19.",
        options.QUANT_TYPES,
        default="int8",
    ),
    option(
        "--formats",
        "What may be used, by commas: int8 (or fp8) for pairs, w8 and w4 for weights alone, or exactly w4b32, w8b128.  "
        "[default: all that the engine has]",
        callback=options.names,
        metavar="NAMES",
    ),
    option(
        "--weight-rounding",
        "Of weights that alone are stored in fewer bits: nearest, or gptq, which makes up for the error of each weight "
        "in those behind it, as your calibration data meet them.",
        click.Choice(["nearest", "gptq"]),
        default="nearest",
    ),
    options.PRECISION,
    *options.ENGINE,
    DEPLOY_THREADS,
    *options.WORKERS,
    *options.DATA,
    WORKLOADS,
    *options.RANGES,
    options.CACHE,
    options.REWRITES,
    *options.LIMITS,
    options.FIX_INPUT,
    option(
        "--effort",
        "Preset of --builds, --schemes-per-region and --timing-runs; explicit flags win.",
        click.Choice(list(EFFORTS)),
        default="default",
    ),
    option(
        "--builds",
        "Engine builds that the search may spend.  [by --effort: cut 7, 8, 30; region 24, 52, 400; subgraph 4, 7, 24]",
        click.INT,
    ),
    option("-s --schemes-per-region", "region: candidates per pattern.  [4 | 50 | 200]", click.IntRange(0)),
    flag(
        "--front",
        "cut: besides the fastest, give points from the fastest to the most exact: front/NAME.onnx, each proven.",
    ),
    option("--pick", "Ship point NAME of a finished run with --front; measures nothing.", metavar="NAME"),
    option("--time-budget", "How long the whole run may take, proof included: 90s, 10m, 1h.", callback=options.seconds),
    option("--timing-runs", "Most rounds of one comparison.  [20 | 48 | 96]", click.IntRange(12)),
    options.WARMUP_RUNS,
    options.REGIONS,
    option(
        "--node-filter-list node_filter",
        "File of node-name wildcards, one a line: other regions stay in float.",
        FILE,
        callback=options.wildcards,
    ),
    option(
        "--default-dq-dtype",
        "Type of tensors whose type cannot be inferred (behind custom operators).",
        click.Choice(["float16", "float32", "bfloat16"]),
    ),
    option("--qdq-baseline", "A quantized version of the model to start from.", FILE),
    flag("--from-qdq", "MODEL has Q/DQ pairs: strip them, keep their scales, start from them."),
    option(
        "--price-cache",
        "File in which runs on one engine and chip leave their prices of units for the next model; none uses none.  "
        "[default: beside --timing-cache, or qdqtune/prices.json in the user's cache folder]",
        FILE,
        metavar="FILE",
    ),
    option("--pattern-cache", "region: try the schemes in the pattern cache of an earlier run.", FILE),
    option("--state-file", "[default: OUTPUT_DIR/autotuner_state.yaml]", FILE),
    flag("--restart", "Forget what the state file knows."),
    option("--report/--no-report", "Write report.html, which shows the result in a browser.", default=True),
    flag("--dry-run", "Say what would be done, and how long it would take."),
    flag("--json as_machine", "Print summary.json instead of the table."),
    flag("-q --quiet", "No progress."),
    flag("-v --verbose", "A line for every candidate, also on a terminal."),
)


@command("tune", OPTIONS)
def tune_command(**given: Any) -> int:
    """Find the fastest Q/DQ placement for MODEL.

    Builds candidates on the engine, times them against the float model in interleaved rounds, and writes
    optimized_final.onnx: proven faster on fresh builds, or else equal to baseline.onnx. Ctrl-C stops it, the same
    command goes on. Exit code 3: nothing faster was found; 4: only what misses a limit.

    \b
    qdqtune tune model.onnx --calibration-data samples.npz -o out
    qdqtune tune a.onnx b.onnx models/ -o out --time-budget 10m
    """
    options.check_cache(given)
    if isinstance(given["model"], tuple):
        return many.tune_all(given["model"], given)
    if given["ray"] is not None and not driver.is_driver():
        return driver.driven()
    return run(given)


def run(given: options.Given, listener: Observer | None = None) -> int:
    """Do what `qdqtune tune` does, told the values of its options by parameter. Gives the exit code.

    `listener` hears of the run besides who sits in front of it.

    Raises:
        QdqtuneError: see `qdqtune.tuning.loop.tune`.
    """
    if given["pick"] is not None:
        return _pick(given)
    settings = settings_of(given)
    try:
        with progress.shown(quiet=given["quiet"], verbose=given["verbose"]) as observer:
            if given["dry_run"]:
                expected = estimate(settings, observer)
                say_notes(expected.notes)
                if given["as_machine"]:
                    print_json(vars(expected))
                else:
                    print(report.estimate_lines(expected))
                return 0
            result = tune(settings, observer if listener is None else Several((observer, listener)))
    except KeyboardInterrupt:
        without = " without --restart" if settings.restart else ""
        kept = f"what was measured is kept; the same command{without} goes on from there"
        say("interrupted" if given["dry_run"] else f"interrupted: {kept}")
        return INTERRUPTED
    why = report.failure_note(result, settings.output_dir / "logs")
    say_notes((*result.notes, *filter(None, [why])))
    if given["as_machine"]:
        print_json(dict(result.summary))
    else:
        _print(result, settings.output_dir / FINAL, verbose=given["verbose"])
    if given["report"]:
        _leave_report(settings.output_dir, quiet=given["quiet"])
    return 0 if result.improved else ConstraintUnmet.exit_code if result.unmet else NO_IMPROVEMENT


def _leave_report(folder: Path, *, quiet: bool = False) -> None:
    """Write the report last: whatever becomes of it, the result stands and has been told."""
    from qdqtune.cli.pages import leave_report  # takes time to import that --help should not

    try:
        path = leave_report(folder)
        if not quiet:
            say(f"{path} shows how it went")
    except QdqtuneError as error:
        say_notes([f"no report.html: {error}"])


def _pick(given: options.Given) -> int:
    summary = pick(given["output_dir"], given["pick"])
    if given["as_machine"]:
        print_json(dict(summary))
    else:
        show(report.front_table(summary["front"]))
        print(f"{given['output_dir'] / FINAL} is point {given['pick']}")
    if (given["output_dir"] / REPORT).exists():
        _leave_report(given["output_dir"])
    return 0


def _print(result: Result, final: Path, *, verbose: bool) -> None:
    """The result for people."""
    if (table := report.mode_table(result, verbose=verbose)) is not None:
        show(table)
    if result.summary.get("front"):
        show(report.front_table(result.summary["front"]))
    elif len(result.summary["met"]) > 1:
        show(report.met_table(result.summary["met"], is_front="front" in result.summary))
    show(report.result_table(result))
    print(report.result_line(result, final))


def settings_of(given: options.Given) -> Settings:
    """What a run is told. What `--effort` presets holds where its own option is not given.

    Raises:
        BadOption: options exclude each other, or leave nothing to do.
    """
    effort = EFFORTS[given["effort"]]
    preset = {
        "builds": FRONT_BUILDS if given["front"] else effort.builds[given["mode"]],
        "schemes_per_region": effort.schemes_per_region,
        "timing_runs": effort.looks[-1],
        "threads": max(given["deploy_threads"] or [1]),  # what is faster there holds with fewer: docs/measured.md
    }
    given = {name: preset.get(name) if value is None else value for name, value in given.items()}
    spec = engine(given)
    return Settings(
        **options.named(Settings, given, but=("engine", "input_shapes", "price_cache")),
        price_cache=_price_cache(given),
        engine=spec if given["ray"] else options.with_timing_cache(spec, given["output_dir"]),
        input_shapes=given["input_shapes"]
        or ({} if given["workloads"] else usual_shapes(spec, given["calibration_data"])),
        calibration=options.calibration(given),
        config=Config(schemes_per_region=given["schemes_per_region"]),
        plan=Plan(looks_until(given["timing_runs"], effort.looks), warmup=given["warmup_runs"]),
        proof=effort.proof,
        command=options.command_line(),
    )


def _price_cache(given: options.Given) -> Path | None:
    """The file of prices: what the user has named, or one beside the timing cache that he has, or the usual one."""
    named, beside = given["price_cache"], given["timing_cache"]
    if named is not None:
        return None if str(named) == "none" else Path(named)
    return usual_place() if beside is None else Path(beside).with_suffix(".prices.json")


def typed(arguments: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `tune` for `run`: as typed in `arguments`, else as `known`, else their defaults.

    `known` holds the model, and an option that maps names to values adds to what is known of them.

    Raises:
        click.ClickException: `arguments` are not those of `tune`.
    """
    program = click.get_current_context().find_root()
    context = tune_command.make_context("tune", [str(known["model"]), *arguments], parent=program)
    given = {**context.params, **known}
    for name, value in context.params.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and name != "model":
            given[name] = known.get(name, {}) | value if isinstance(value, dict) else value
    return given
