"""`tune` of several models, one after the other or one on each device; one that fails does not end the others."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click

from qdqtune.cli.children import run_all
from qdqtune.cli.command import command_line, is_quiet, is_verbose
from qdqtune.cli.output import print_json, print_lines, say, show
from qdqtune.cli.streams import INTERRUPTED
from qdqtune.commands.shown import Table
from qdqtune.commands.tune import TuneOptions
from qdqtune.engines import EngineSpec
from qdqtune.engines.allocation import allocate_workers
from qdqtune.engines.devices import ANYWHERE, Device, cores_for, needs_gpu
from qdqtune.engines.options import WorkerOptions
from qdqtune.engines.remote.connection import facts_of
from qdqtune.errors import BadOption
from qdqtune.explanation.formatting import builds, counted, duration
from qdqtune.graph.model_folder import graphs_in, without_graph
from qdqtune.options import Several
from qdqtune.system.interpreter import python
from qdqtune.timing.ratios import speed
from qdqtune.tuning.options import MODELS

CODES = (0, 3, 4)
"""Exit codes of runs that came to their end, the best first; every other one is worse than these."""

FACTS = ("shipped", "baseline_ms", "final_ms", "ratio", "ratio_low", "ratio_high", "output_sqnr_db", "accuracy")

OWN = ("output_dir", "as_machine", "workers", "cores_per_worker", "ray", "on")
"""Options that are not passed to jobs as they were typed."""


class Models(Several):
    """Model files and folders of them: one file, or a folder of one, is a path, everything else a tuple of paths."""

    name = "path"
    typed = MODELS

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | tuple[Path, ...]:
        """Make one path or several of what was given."""
        given = [value] if isinstance(value, str | Path) else [*(value or ())]
        paths = tuple(map(Path, given))
        if len(paths) != 1 or not paths[0].is_dir():
            return paths[0] if len(paths) == 1 else paths
        graphs = graphs_in(paths[0])
        return graphs[0] if len(graphs) == 1 else paths


@dataclass(frozen=True)
class Job:
    """One `qdqtune tune`: a model, its options as the command line has them, and the engine that these name."""

    model: str
    arguments: tuple[str, ...]
    engine: EngineSpec


def run_jobs(jobs: Sequence[Job], options: WorkerOptions, *, as_machine: bool) -> list[int]:
    """Tune models, each in a process of its own, one on each device at a time, and print a table. Gives the exit codes.

    Raises:
        EngineUnavailable: the machine that `on` names cannot be reached.
        KeyboardInterrupt: this process was interrupted, or a job.
    """
    each, begun = options.cores_per_worker, time.monotonic()
    if options.on is not None:
        facts_of(options.on)  # one line if it cannot be reached, not one for each model
        devices = (ANYWHERE,) * (options.workers or 1)
        each = cores_for(_widest(jobs), each) if len(devices) > 1 else each
    else:
        with allocate_workers(_widest(jobs), options.workers, each, options.ray) as allocation:
            devices = allocation.devices
    where = options.ray or options.on
    if where is not None:  # each job takes one device there, whichever that is
        own = ("--on" if options.ray is None else "--ray", where, "--workers", "1")
        cores = () if each is None else ("--cores-per-worker", str(each))
        jobs = [replace(job, arguments=(*job.arguments, *own, *cores)) for job in jobs]
        devices = (ANYWHERE,) * len(devices)
    done = [_ran(job) for job in jobs] if len(devices) == 1 else _side_by_side(jobs, devices)
    if as_machine:
        print_json(done)
    elif all("patterns" in row for row in done):
        show(_estimates(done))
    else:
        show(_table(done))
        print_lines([_summary(done, time.monotonic() - begun)])
    return [row["exit_code"] for row in done]


def worst(codes: Sequence[int]) -> int:
    """The worst exit code of several models."""
    return max(codes, key=lambda code: CODES.index(code) if code in CODES else len(CODES) + code)


def _command(job: Job) -> list[str]:
    how = ["-q"] if is_quiet() else ["-v"] if is_verbose() else []
    return ["tune", *job.arguments, "--json", *how, "--", job.model]


def _ran(job: Job) -> dict[str, Any]:
    say(f"{job.model}:")
    done = subprocess.run(**python("-m", "qdqtune", *_command(job)), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    return _row(job, done.returncode, done.stdout)


def _side_by_side(jobs: Sequence[Job], devices: Sequence[Device]) -> list[dict[str, Any]]:
    files = [Path(job.model) for job in jobs]
    alike = Counter(file.name for file in files)
    names = [file.name if alike[file.name] == 1 else f"{file.parent.name}/{file.name}" for file in files]
    ended = run_all(list(zip(names, map(_command, jobs), strict=True)), devices[: len(jobs)])
    return [_row(job, one.code, one.output) for job, one in zip(jobs, ended, strict=True)]


def _row(job: Job, code: int, output: str) -> dict[str, Any]:
    summary = json.loads(output) if output.startswith("{") else {}
    is_estimate = "--dry-run" in job.arguments and code == 0
    facts = summary if is_estimate else {name: summary.get(name) for name in FACTS}
    return {"model": job.model, "exit_code": code, **facts}


def _widest(jobs: Sequence[Job]) -> EngineSpec:
    """The engine for which devices are allocated: that of the job that needs a GPU, or else the most cores."""
    return max((job.engine for job in jobs), key=lambda spec: (needs_gpu(spec), cores_for(spec, None)))


def _estimates(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Estimates of `--dry-run`, a row for each model."""
    spent = [builds(r["builds"] - r["rewrite_builds"], r["rewrite_builds"]) for r in rows]
    cells = [
        (r["model"], count, f"{r['latency'] * 1e3:.3f}", duration(r["seconds"]))
        for r, count in zip(rows, spent, strict=True)
    ]
    return Table(("model", "builds", "latency, ms", "about"), cells)


def _summary(rows: Sequence[Mapping[str, Any]], seconds: float) -> str:
    """What became of all models together: the geometric mean of the speedups of those that ship faster."""
    gains = [row["ratio"] for row in rows if row.get("shipped") == "tuned" and row.get("ratio")]
    failed = sum(row["exit_code"] not in CODES for row in rows)
    faster = f"{len(gains)} faster" + (f" ({speed(geometric_mean(gains))} in the mean)" if gains else "")
    same = len(rows) - len(gains) - failed
    return f"{counted(len(rows), 'model')} in {duration(seconds)}: {faster}, {same} as before, {failed} failed"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = []
    for row in rows:
        row = {**dict.fromkeys(FACTS), **row}
        times = ["" if row[name] is None else f"{row[name]:.3f}" for name in ("baseline_ms", "final_ms")]
        gain = "" if row["ratio"] is None else speed(row["ratio"])
        noise = "" if row["output_sqnr_db"] is None else f"{row['output_sqnr_db']:.1f}"
        noise = "not measured" if row["accuracy"] == "not measured" else noise
        cells.append((row["model"], row["shipped"] or "failed", *times, gain, noise, str(row["exit_code"])))
    return Table(("model", "ships", "baseline, ms", "final, ms", "speedup", "SQNR, dB", "exit code"), cells)


# Models that the command line names


def tune_all(given: Sequence[Path], options: TuneOptions, *, dry_run: bool, as_machine: bool) -> int:
    """Tune each model into a folder of its own, with the options that were typed. Gives the worst exit code.

    Raises:
        BadOption: a model does not exist, or a folder holds none.
    """
    models = tuple(dict.fromkeys(_models(given)))
    arguments = _typed()
    folders = named(models)
    engine = options.spec()
    jobs = [Job(str(m), ("--output-dir", str(options.output_dir / folders[m]), *arguments), engine) for m in models]
    codes = run_jobs(jobs, options, as_machine=as_machine)
    if any(code in CODES for code in codes) and not (dry_run or is_quiet()):
        say(f"what ships lies in {options.output_dir}/MODEL/optimized_final.onnx, with a report.html beside it")
    return worst(codes)


def _models(given: Sequence[Path]) -> Iterator[Path]:
    """The given files, and the graphs of given folders (see `model_folder`), sorted by name in each."""
    for path in given:
        if not path.exists():
            commas = "; several values of one option are parted by commas, like 8,1" if not path.suffix else ""
            raise BadOption(f"{path}: cannot read the model: No such file or directory{commas}")
        if not path.is_dir():
            yield path
            continue
        found = graphs_in(path)
        if not found:
            raise BadOption(without_graph(path))
        yield from found


def named(models: Sequence[Path]) -> dict[Path, str]:
    """A folder name for each model: the name of its file; if several files have that name, preceded by the name of the
    parent folder, and numbered if these are equal, too."""
    stems = Counter(model.stem for model in models)
    found: dict[Path, str] = {}
    for model in models:
        stem = name = model.stem if stems[model.stem] == 1 else f"{model.absolute().parent.name}_{model.stem}"
        number = 1
        while name in found.values():
            number += 1
            name = f"{stem}-{number}"
        found[model] = name
    return found


def _typed() -> tuple[str, ...]:
    """The options of this command line as they were typed, without those of `OWN`."""
    context = click.get_current_context()
    typed = list(command_line())
    parser = context.command.make_parser(context)
    values, _, order = parser.parse_args(typed[typed.index(str(context.command.name)) + 1 :])
    arguments: list[str] = []
    for option in dict.fromkeys(order):
        if not isinstance(option, click.Option) or option.name is None or option.name in OWN:
            continue
        value = values[option.name]
        if option.is_flag:
            arguments.append(option.opts[0] if value else option.secondary_opts[0])
            continue
        for one in value if option.multiple else [value]:
            arguments += [option.opts[0], str(one)]
    return tuple(arguments)
