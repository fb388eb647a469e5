"""`qdqtune compare` and `apply`: model files against each other, and a recorded placement on another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from qdqtune.cli import options, progress, report
from qdqtune.cli.grouped import command
from qdqtune.cli.options import FILE, option
from qdqtune.cli.output import print_json, say_error, say_notes, show
from qdqtune.cli.threads import DEPLOY_THREADS
from qdqtune.cli.workloads import WORKLOADS, engine
from qdqtune.commands.apply import Request, apply
from qdqtune.commands.compare import comparable, compare_at
from qdqtune.engines.runner import time_limit
from qdqtune.errors import EngineFailure
from qdqtune.measurement.accuracy import concern
from qdqtune.measurement.timing import Plan
from qdqtune.report.words import placed, samples
from qdqtune.tuning import advice
from qdqtune.tuning.threads import counts_of

COMPARE = (
    click.Argument(["files"], type=FILE, nargs=-1, required=True),
    *options.ENGINE,
    DEPLOY_THREADS,
    *options.DATA,
    WORKLOADS,
    option("--timing-runs", "Rounds per pair of builds.", click.IntRange(12), default=24),
    options.WARMUP_RUNS,
    options.HTML,
    options.JSON_FOR_TABLE,
)


@command("compare", COMPARE)
def compare_command(
    files: Sequence[Path], timing_runs: int, warmup_runs: int, html: Path | None, as_machine: bool, **given: Any
) -> int:
    """Time every other of FILES against the first, in interleaved rounds on two fresh builds of both.

    A speedup of 2x means half of the time that the first file takes. The true one lies outside its interval at most
    twice in a thousand comparisons. Exit code 5: the engine refuses one of the files.

    \b
    qdqtune compare model.onnx qdqtune_output/optimized_final.onnx
    """
    spec, plan = engine(given), Plan((timing_runs,), warmup=warmup_runs)
    options.check_page(html, files)
    prepared = options.Data.of(given).prepared(comparable(files)[0], spec)
    if (counts := given["deploy_threads"]) is not None:
        counts_of(spec, counts)
    if (busy := advice.busy(spec)) is not None:
        say_notes([busy])
    seed, limit = given["seed"], given["time_limit"]
    with progress.shown() as observer:
        rows = compare_at(files, spec, counts, prepared, plan, seed=seed, time_limit_s=limit, observer=observer)
    if as_machine:
        print_json({"first": str(files[0]), "others": [row.as_json() for row in rows]})
    else:
        show(report.comparison_table(str(files[0]), rows, samples(len(prepared.judging), prepared.is_held_out)))
    random = prepared.samples.is_random
    notes = ["no --calibration-data: latency and SQNR are on random inputs"] if random else []
    warned = {row.file: warning for row in rows if row.accuracy and (warning := concern(row.accuracy))}
    notes += [f"{file} against {files[0]}: {warning}" for file, warning in warned.items()]
    notes += [f"{row.name}: {note}" for row in rows if row.ratio is not None and (note := advice.wide(row.ratio))]
    say_notes(notes)
    if html is not None:
        from qdqtune.report.of_commands import of_compare
        from qdqtune.report.page import write_report

        write_report(of_compare(str(files[0]), rows, plan, notes, options.command_line()), html)
    refused = [row for row in rows if row.ratio is None]
    for row in refused:
        say_error(f"{row.name} cannot be compared: {row.reason}")
    return EngineFailure.exit_code if refused else 0


APPLY = (
    options.MODEL,
    option("--placement", "placement.yaml of a tuning run.", FILE, required=True),
    option("-o --output", "[default: MODEL with .qdq.onnx]", FILE),
    option(
        "--engine",
        "Engine whose numeric format to use; it need not be installed here.  [default: that of the placement]",
        metavar="NAME",
    ),
    options.PRECISION,
    *options.DATA,
    *options.RANGES,
    options.CACHE,
    options.REWRITES,
    options.TIME_LIMIT,
    options.AS_JSON,
)


@command("apply", APPLY)
def apply_command(output: Path | None, as_machine: bool, **given: Any) -> None:
    """Put the Q/DQ pairs of an earlier search into MODEL, with scales calibrated anew: no search, no timing.

    For a network that was trained again: its placement holds, its scales do not. They are found as that search found
    its own, unless an option about ranges says otherwise.
    """
    options.check_cache(given)
    target = output or given["model"].with_suffix(".qdq.onnx")
    with time_limit(given["time_limit"]), progress.shown() as observer:
        done = apply(request_of(given | {"output": target}, says_how=options.says_how()), observer)
    say_notes(done.notes)
    if done.random_data:
        say_notes(["no --calibration-data: the scales come from random inputs"])
    if not done.placement and not done.lost:
        say_notes(["this placement holds no pair: with none was the model fastest, or within the limits"])
    if done.lost:
        scaled = "" if done.matched is None else " or have no scale"
        say_notes([f"{len(done.lost)} edges are not in this model{scaled}, the first: {done.lost[0]}"])
    if done.accuracy is not None and (warning := concern(done.accuracy)):
        say_notes([warning])
    if as_machine:
        print_json(done.as_json(target))
    else:
        known = "" if done.accuracy is None else f", output SQNR against float: {done.accuracy}"
        print(f"{target}: {placed(done.placement)}{known}")


def request_of(given: options.Given, *, says_how: bool) -> Request:
    """What apply is told; `says_how` if that is also how ranges are found."""
    how = options.calibration(given) if says_how else None
    return Request(**options.named(Request, given), calibration=how)
