"""`qdqtune tune`: the search, and what is printed of its result."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qdqtune.calibration.options import check_cache
from qdqtune.cli import fleet, progress
from qdqtune.cli.command import Terminal, command, command_line, seconds_so_far
from qdqtune.cli.output import print_json, print_lines, say, say_notes, show
from qdqtune.cli.streams import INTERRUPTED
from qdqtune.commands.tune import Result, TuneOptions, tune
from qdqtune.commands.tune_tables import front_table, groups_table, rule_table
from qdqtune.errors import BadOption, ConstraintUnmet, QdqtuneError
from qdqtune.explanation.formatting import builds, duration
from qdqtune.graph.model_folder import graphs_in, without_graph
from qdqtune.options import REQUIRED, SWITCH, TEXT, Flag, Kind, MaybeText, option, texts_of
from qdqtune.timing.limits import failure
from qdqtune.tuning.estimate import Estimate, estimate
from qdqtune.tuning.folder import FINAL, LOGS, REPORT
from qdqtune.tuning.front import pick as pick_point
from qdqtune.tuning.observer import Observer, Observers
from qdqtune.tuning.options import MODELS
from qdqtune.tuning.records import GroupOutcome

CANDIDATE = re.compile(r"\b[0-9a-f]{16}\.onnx\b")
"""Matches names of candidate files, which differ in reasons that are otherwise equal."""

NO_IMPROVEMENT = 3
"""The exit code where nothing faster was found."""


def _models(value: Any) -> Path | tuple[Path, ...]:
    """Model files, and the graphs of folders (see `model_folder`), sorted by name in each: a path, or several."""
    paths = list[Path]()
    for path in map(MODELS.convert, texts_of(value)):
        graphs = graphs_in(path) if path.is_dir() else [path]
        if not graphs:
            raise ValueError(without_graph(path))
        paths += graphs
    return paths[0] if len(paths) == 1 else tuple(paths)


@dataclass(kw_only=True)
class TuneArguments(Terminal, TuneOptions):
    """The options of `tune` on the command line."""

    model: Any = option(
        Kind(_models, takes="several", is_path=True, reads=MODELS.reads, what=MODELS.what),
        REQUIRED,
        "ONNX files, or folders of them.",
        is_positional=True,
        is_repeated=True,
        metavar="MODEL",
    )
    pick: MaybeText = option(
        TEXT, None, "Ship point NAME of a finished run with --front; measures nothing.", "Search", metavar="NAME"
    )
    dry_run: Flag = option(
        SWITCH,
        False,
        "Say what would be done, and how long it would take.",
        "Output",
        short="say what would be done, and how long",
    )


@command(TuneArguments)
def tune_command(options: TuneArguments) -> int:
    """Find the fastest Q/DQ placement for MODEL.

    Builds candidates on the engine, times them against the float model in interleaved rounds, and writes
    optimized_final.onnx: proven faster on fresh builds, or else equal to baseline.onnx. Ctrl-C stops it, the same
    command goes on. Exit code 3: nothing faster was found; 4: only what misses a limit.

    \b
    qdqtune tune model.onnx --calibration-data samples.npz -o out
    qdqtune tune a.onnx b.onnx models/ -o out --time-budget 10m
    """
    check_cache(options, options)
    if isinstance(options.model, tuple):
        if options.pick is not None:
            raise BadOption("--pick is for one model: name that alone")
        code = fleet.run_jobs([*fleet.jobs_of(options.model, options)], options, options)
        if code in fleet.CODES and not (options.dry_run or options.quiet):
            say(f"what ships lies in {options.output_dir}/MODEL/optimized_final.onnx, with a report.html beside it")
        return code
    if options.ray is not None and not fleet.is_driver():
        return fleet.run_on_ray()
    return run(options)


def run(options: TuneArguments, listener: Observer | None = None) -> int:
    """Tune one model and print the result, or ship another point of its front. Gives the exit code.

    `listener` receives the events of the run as well.

    Raises:
        QdqtuneError: see `qdqtune.tuning.loop.tune`.
    """
    if options.pick is not None:
        return ship_point(options.output_dir, options.pick, as_machine=options.as_machine)
    settings = options.settings(command_line())
    if settings.time_budget is not None and not options.dry_run:  # imports have taken a second of it
        settings = replace(settings, time_budget=max(1e-3, settings.time_budget - seconds_so_far()))
    try:
        with progress.shown(quiet=options.quiet, verbose=options.verbose) as observer:
            heard = observer if listener is None else Observers((observer, listener))
            result = estimate(settings, heard) if options.dry_run else tune(settings, heard)
    except KeyboardInterrupt:
        without = " without --restart" if settings.restart else ""
        kept = f"the same command{without} goes on from what was measured"
        say("interrupted" if options.dry_run else f"interrupted: {kept}")
        return INTERRUPTED
    if isinstance(result, Estimate):
        say_notes(result.notes)
        if options.as_machine:
            print_json(vars(result))
        else:
            _print_estimate(result)
        return 0
    say_notes((*result.notes, *filter(None, [_failure_note(result)])))
    if options.as_machine:
        print_json(dict(result.summary))
    else:
        _print(result)
    if options.report:
        _write_report(result.folder, quiet=options.quiet)
    return 0 if result.improved else ConstraintUnmet.exit_code if result.unmet else NO_IMPROVEMENT


def _write_report(folder: Path, *, quiet: bool = False) -> None:
    """Write the report. It comes last, so that an error in it cannot hide the result."""
    from qdqtune.cli.runs import leave_report  # slow to import: --help does without it

    try:
        path = leave_report(folder)
        if not quiet:
            say(f"{path} shows how it went")
    except QdqtuneError as error:
        say_notes([f"no report.html: {error}"])


def ship_point(folder: Path, point: str, *, as_machine: bool) -> int:
    """Make another point of a front the file that ships. Gives the exit code."""
    summary = pick_point(folder, point)
    if as_machine:
        print_json(dict(summary))
    else:
        show(front_table(summary))
        print(f"{folder / FINAL} is point {point}")
    if (folder / REPORT).exists():
        _write_report(folder)
    return 0


def _print(result: Result) -> None:
    """Print the result as tables, and a line that names the file to use."""
    groups = [row for row in result.recorded.rows if isinstance(row, GroupOutcome)]
    if groups:
        show(groups_table(groups))
    if result.summary.get("front"):
        show(front_table(result.summary))
    elif "by_rule" in result.summary:
        show(rule_table(result.summary))
    show(result.table())
    if not result.improved:
        print_lines([result.in_words()])
        return
    what = "the tuned model" if result.placement else "the float model with the changes told above"
    if "by_rule" in result.summary:
        what = "the cheapest by rule that holds the limits on accuracy; it was not timed"
    unchecked = "; nobody has checked its accuracy" if result.summary["unchecked"] else ""
    print_lines([f"{result.file} is {what}{unchecked}"])


def _failure_note(result: Result) -> str | None:
    """If every candidate failed: the most frequent reason, its count, and the log of the first such candidate."""
    failures = [(trial.number, failed) for trial in result.history if (failed := failure(trial))]
    if not failures or len(failures) < len(result.history):
        return None
    reasons = [(number, CANDIDATE.sub("a candidate", failure.reason)) for number, failure in failures]
    counts = Counter(reason for _, reason in reasons)
    commonest, count = counts.most_common(1)[0]
    first = next(number for number, reason in reasons if reason == commonest)
    which = f"all {len(failures)} candidates" if len(failures) > 1 else "the only candidate"
    share = f", {count} of them" if count < len(failures) else ""
    return f"{which} failed{share}: {commonest.rstrip('.')} (see {result.folder / LOGS / f'trial_{first:03}.log'})"


def _print_estimate(estimate: Estimate) -> None:
    spent = builds(estimate.builds - estimate.rewrite_builds, estimate.rewrite_builds)
    print_lines([
        f"regions: {estimate.regions}",
        f"patterns: {estimate.patterns}",
        f"builds: at most {spent}, without the proof",
        f"time: about {duration(estimate.seconds)} (float model: {estimate.latency * 1e3:.3f} ms)",
    ])  # fmt: skip
