"""`qdqtune tune` and `run`: run searches and print their results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from qdqtune.cli import fleet, progress
from qdqtune.cli.command import Terminal, begun, command, command_line
from qdqtune.cli.fleet import run_jobs
from qdqtune.cli.output import flags, print_json, print_lines, print_parts, say, say_notes
from qdqtune.cli.streams import INTERRUPTED
from qdqtune.commands.inputs import check_options
from qdqtune.commands.tune import TuneOptions, tune
from qdqtune.engines.options import WorkerOptions
from qdqtune.errors import BadOption, InputError, QdqtuneError, one_line
from qdqtune.explanation.formatting import duration
from qdqtune.graph.model_folder import graphs_in, without_graph
from qdqtune.options import FILE, REQUIRED, SWITCH, File, flags_of, options_of, text_of, texts_of
from qdqtune.placement.files import parsed_yaml
from qdqtune.timing.limits import failure
from qdqtune.tuning.estimate import Estimate, estimate
from qdqtune.tuning.folder import LOGS
from qdqtune.tuning.options import MODEL, folder_or_model


def _models(value: Any) -> Path | tuple[Path, ...]:
    """A path, or several: model files, and for folders their graphs (see `model_folder`), sorted by name."""
    paths = list[Path]()
    for path in map(folder_or_model, texts_of(value)):
        graphs = graphs_in(path) if path.is_dir() else [path]
        if not graphs:
            raise ValueError(without_graph(path))
        paths += graphs
    return paths[0] if len(paths) == 1 else tuple(paths)


class TuneArguments(Terminal, TuneOptions):
    model: Any = MODEL(
        "ONNX files, or folders of them.", default=REQUIRED, convert=_models, is_repeated=True, metavar="MODEL"
    )
    dry_run: bool = SWITCH(
        "Say what would be done, and how long it would take.", "Output", "say what would be done, and how long"
    )


@command(TuneArguments)
def tune_command(options: TuneArguments) -> int:
    """Find the fastest Q/DQ placement for MODEL.

    Builds candidates on the engine, times them against the float model in interleaved rounds, and writes
    optimized_final.onnx: proven faster on fresh builds, or else equal to baseline.onnx. Ctrl-C stops it, the same
    command continues it. Exit code 3: nothing faster was found; 4: only what misses a limit.

    \b
    qdqtune tune model.onnx --calibration-data samples.npz -o out
    qdqtune tune a.onnx b.onnx models/ -o out --time-budget 10m
    """
    if isinstance(options.model, tuple):
        code = fleet.run_jobs([*fleet.jobs_of(options.model, options)], options, options)
        if code in fleet.CODES and not (options.dry_run or options.quiet):
            say(f"what ships lies in {options.output_dir}/MODEL/optimized_final.onnx, with a report.html beside it")
        return code
    if options.ray is not None and os.environ.pop(fleet.DRIVER, None) is None:
        return fleet.run_on_ray()
    return run(options)


def run(options: TuneArguments) -> int:
    """Tune one model and print the result. Returns the exit code."""
    settings = options.settings(command_line())
    try:
        with progress.shown(quiet=options.quiet, verbose=options.verbose) as observer:
            result = estimate(settings, observer) if options.dry_run else tune(settings, observer, begun())
    except KeyboardInterrupt:
        without = " without --restart" if settings.restart else ""
        kept = f"the same command{without} goes on from what was measured; an unfinished calibration begins anew"
        say("interrupted" if options.dry_run else f"interrupted: {kept}")
        return INTERRUPTED
    if isinstance(result, Estimate):
        say_notes(result.notes)
        if options.as_machine:
            print_json(vars(result))
        else:
            spent = str(result.builds)
            if settings.time_budget is not None:
                spent += f" within the {duration(settings.time_budget)}"
            print_lines([
                f"regions: {result.regions}",
                f"patterns: {result.patterns}",
                f"builds: up to {spent}, without the proof",
                f"time: about {duration(result.seconds)} (float model: {result.latency * 1e3:.3f} ms)",
            ])  # fmt: skip
        return 0
    notes, failures = list(result.notes), [failure(trial) for trial in result.history]
    if failures and failures[0] is not None and None not in failures:
        log = result.folder / LOGS / f"trial_{result.history[0].number:03}.log"
        notes.append(f"every candidate failed; the first: {failures[0].reason.rstrip('.')} (see {log})")
    say_notes(notes)
    if options.as_machine:
        print_json({**result.summary, "notes": notes})
    else:
        print_parts(result.parts())
    if options.report:
        from qdqtune.explanation.page import write_report  # slow to import: --help does without it

        try:
            path = write_report(result.folder, flags())
        except QdqtuneError as error:  # which cannot hide the result
            say_notes([f"no report.html: {error}"])
        else:
            if not options.quiet:
                say(f"{path} shows how it went")
    return result.exit_code


# Jobs of a YAML file, all checked before the first one begins


MOST_CHARACTERS = 300
"""Most characters of an error about a wrong value: a file may hold any text."""

KEYS = {"model": "model"} | {
    flag.lstrip("-"): name for name, flag in flags_of(TuneArguments).items() if name not in options_of(Terminal)
}
"""The options of `tune`, by flag without dashes."""


TEXTS = ("calibration_data", "evaluate", "labels")
"""Options that may be objects in Python, but only texts in a file."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    jobs: Annotated[list[Any], msgspec.Meta(min_length=1)]
    defaults: Any = msgspec.field(default_factory=dict)


class RunOptions(Terminal, WorkerOptions):
    file: File = FILE("The YAML file.", default=REQUIRED)


@command(RunOptions)
def run_command(options: RunOptions) -> int:
    """Tune the models that a YAML file names, and say at the end what became of each.

    `jobs` is a list of options of tune by name, with a `model` each; `defaults` are options for all of them. A job that
    fails does not stop the others, and the same command continues where it was stopped. The exit code is that of the
    worst job. With --workers N, N models are tuned at a time, each on its own GPU or cores. Like a command line, a jobs
    file may name code that is run (evaluate, calibration-data, trtexec).

    \b
    qdqtune run jobs.yaml --json
    qdqtune run jobs.yaml --workers 4 --cores-per-worker 2
    """
    return run_jobs(read_jobs(options.file), options, options)


def read_jobs(path: Path) -> list[TuneArguments]:
    """The jobs in a YAML file: `defaults` for all, and `jobs`, a list of options by name with a `model` each."""
    try:
        file = msgspec.convert(parsed_yaml(path, "jobs"), _File)
    except msgspec.ValidationError as error:
        raise BadOption(
            f"{path} names no jobs ({one_line(error)}): give `jobs:`, a list of jobs, which are "
            "options by name with a `model` each, and `defaults:`, options for all"
        ) from error
    defaults = _values(file.defaults, f"{path}, defaults")
    if "model" in defaults:
        raise BadOption(f"{path}, defaults: each job names its own model")
    jobs = []
    for number, given in enumerate(file.jobs, 1):
        where = f"{path}, job {number}"
        own = _values(given, where)
        model = own.get("model")
        if not isinstance(model, str):
            raise BadOption(f"{where} has no model: give the name of a file")
        usual = {"output_dir": f"{Path(model).stem}_tuned"}
        try:
            options = TuneArguments(**(usual | defaults | own))
            check_options(options)
            options.spec()
        except (InputError, OSError) as error:
            raise BadOption(f"{where} ({model:.100}): {error!s:.{MOST_CHARACTERS}}") from error
        if isinstance(options.model, tuple):
            raise BadOption(f"{where} ({model:.100}) holds {len(options.model)} models: give each a job of its own")
        jobs.append(options)
    return jobs


def _values(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise BadOption(f"{where} takes options by name, not {given!r:.60}")
    values: dict[str, Any] = {}
    for key, value in given.items():
        word = "on" if key is True else str(key).replace("_", "-")  # YAML reads the key `on` as true
        name = KEYS.get(word)
        if name is None:
            raise BadOption(f"{where}: there is no option {key!r:.60}: keys are those of qdqtune tune --help-all")
        if name in values:
            raise BadOption(f"{where}: {word} comes twice")
        if value is None:
            raise BadOption(f"{where}: {word} takes a value, not nothing")
        try:
            values[name] = text_of(value) if name in TEXTS else value
        except ValueError as error:
            raise BadOption(f"{where}: {word}: {error}") from error
    return values
