"""Several models, of a YAML file (`qdqtune run`) or of a command line, one after the other or one on each of several
devices; one that fails does not end the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from rich.table import Table

from qdqtune.cli import options
from qdqtune.cli.fleet import run_all
from qdqtune.cli.grouped import command, is_quiet, is_verbose
from qdqtune.cli.options import FILE
from qdqtune.cli.output import print_json, say, show
from qdqtune.cli.report import table_of
from qdqtune.cli.streams import INTERRUPTED
from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import ANYWHERE, Device, cores_for, needs_gpu
from qdqtune.engines.places import places_for
from qdqtune.errors import BadOption, reading
from qdqtune.measurement.timing import speed
from qdqtune.report.words import duration

WORST = (0, 3, 4)
"""Exit codes from the best on; all others are worse than these."""

FACTS = ("shipped", "baseline_ms", "final_ms", "ratio", "ratio_low", "ratio_high", "output_sqnr_db")


@dataclass(frozen=True)
class Job:
    """One `qdqtune tune`: a model, and its options as the command line has them."""

    model: str
    arguments: tuple[str, ...]


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a file: `defaults` for all, and `jobs`, a list of options by name with a `model` each.

    Raises:
        BadOption: it cannot be read, or is no such file.
    """
    with reading(path):
        text = path.read_text(errors="replace")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadOption(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    jobs = content.get("jobs") if isinstance(content, dict) else None
    defaults = content.get("defaults", {}) if isinstance(content, dict) else None
    if not isinstance(jobs, list) or not jobs or not isinstance(defaults, dict):
        raise BadOption(f"{path} names no jobs: give `jobs:`, a list of options with a `model` each, and `defaults:`")
    if wrong := next((job for job in jobs if not isinstance(job, dict) or "model" not in job), None):
        raise BadOption(f"{path}: a job is options by name, `model` among them, not {wrong!r}")
    made = [_job({"output-dir": f"{Path(str(job['model'])).stem}_tuned", **defaults, **job}) for job in jobs]
    return made


def _job(given: Mapping[str, Any]) -> Job:
    arguments: list[str] = []
    for name, value in given.items():
        if name == "model":
            continue
        flag = "--" + str(name).replace("_", "-")
        for one in value if isinstance(value, list) else [value]:
            arguments += [flag] if one is True else [] if one is False else [flag, str(one)]
    return Job(str(given["model"]), tuple(arguments))


@command("run", [click.Argument(["file"], type=FILE), *options.WORKERS, options.JSON_FOR_TABLE])
def run_command(
    file: Path, workers: int | None, cores_per_worker: int | None, ray: str | None, as_machine: bool
) -> int:
    """Tune the models that a YAML file names, and say at the end what became of each.

    `jobs` is a list of options of tune by name, with a `model` each; `defaults` are options for all of them. A job that
    fails does not end the others, and the same command goes on where it was stopped. The exit code is that of the worst
    job. With --workers, so many models are tuned at a time, each on a GPU or cores of its own.

    \b
    qdqtune run jobs.yaml --json
    qdqtune run jobs.yaml --workers 4 --cores-per-worker 2
    """
    return run_jobs(read_jobs(file), Wanted(workers, cores_per_worker, ray), as_machine=as_machine)


@dataclass(frozen=True)
class Wanted:
    """How many models to tune at a time, on which devices (see `places_for`)."""

    workers: int | None = None
    cores_each: int | None = None
    ray: str | None = None


def run_jobs(jobs: Sequence[Job], wanted: Wanted, *, as_machine: bool) -> int:
    """Tune models, each in a process of its own, one on each device at a time, and print a table. Gives the worst exit
    code.

    Raises:
        KeyboardInterrupt: this process was interrupted, or a job.
    """
    with places_for(_widest(jobs), wanted.workers, wanted.cores_each, wanted.ray) as places:
        devices = places.devices
    if wanted.ray is not None:  # each job takes one device of the cluster, wherever that is
        own = ("--ray", wanted.ray, "--workers", "1")
        cores = () if wanted.cores_each is None else ("--cores-per-worker", str(wanted.cores_each))
        jobs = [Job(job.model, (*job.arguments, *own, *cores)) for job in jobs]
        devices = (ANYWHERE,) * len(devices)
    done = [_ran(job) for job in jobs] if len(devices) == 1 else _side_by_side(jobs, devices)
    if as_machine:
        print_json(done)
    else:
        show(_estimates(done) if all("patterns" in row for row in done) else _table(done))
    codes: list[int] = [row["exit_code"] for row in done]
    return max(codes, key=lambda code: WORST.index(code) if code in WORST else len(WORST) + code)


def _asked(job: Job) -> list[str]:
    how = ["-q"] if is_quiet() else ["-v"] if is_verbose() else []
    return ["tune", job.model, *job.arguments, "--json", *how]


def _ran(job: Job) -> dict[str, Any]:
    say(f"{job.model}:")
    asked = [sys.executable, "-m", "qdqtune", *_asked(job)]
    done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    return _row(job, done.returncode, done.stdout)


def _side_by_side(jobs: Sequence[Job], devices: Sequence[Device]) -> list[dict[str, Any]]:
    files = [Path(job.model) for job in jobs]
    alike = Counter(file.name for file in files)
    names = [file.name if alike[file.name] == 1 else f"{file.parent.name}/{file.name}" for file in files]
    ended = run_all(list(zip(names, map(_asked, jobs), strict=True)), devices[: len(jobs)])
    return [_row(job, one.code, one.output) for job, one in zip(jobs, ended, strict=True)]


def _row(job: Job, code: int, output: str) -> dict[str, Any]:
    summary = json.loads(output) if output.startswith("{") else {}
    is_estimate = "--dry-run" in job.arguments and code == 0
    facts = summary if is_estimate else {name: summary.get(name) for name in FACTS}
    return {"model": job.model, "exit_code": code, **facts}


def _widest(jobs: Sequence[Job]) -> EngineSpec:
    """The engine of the job that wants a GPU, or the most cores: devices are as it needs them."""
    specs = [EngineSpec(_value(job, "--engine") or "onnxruntime", dict(_told(job))) for job in jobs]
    return max(specs, key=lambda spec: (needs_gpu(spec), cores_for(spec, None)))


def _told(job: Job) -> Iterator[tuple[str, Any]]:
    """What says whether a job runs on a GPU, and on how many cores."""
    if (threads := _value(job, "--threads")) is not None and threads.isdigit():
        yield "threads", int(threads)
    for name in ("provider", "target"):
        if (value := _value(job, f"--{name}")) is not None:
            yield name, value


def _value(job: Job, flag: str) -> str | None:
    """What an option of a job was given last."""
    pairs = zip(job.arguments, job.arguments[1:], strict=False)
    return next((value for name, value in reversed(list(pairs)) if name == flag), None)


def _estimates(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What runs would do."""
    cells = [(r["model"], str(r["builds"]), f"{r['latency'] * 1e3:.3f}", duration(r["seconds"])) for r in rows]
    return table_of(("model", "builds", "latency, ms", "about"), cells)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = []
    for row in rows:
        row = {**dict.fromkeys(FACTS), **row}
        times = ["" if row[name] is None else f"{row[name]:.3f}" for name in ("baseline_ms", "final_ms")]
        gain = "" if row["ratio"] is None else speed(row["ratio"])
        noise = "" if row["output_sqnr_db"] is None else f"{row['output_sqnr_db']:.1f}"
        cells.append((row["model"], row["shipped"] or "failed", *times, gain, noise, str(row["exit_code"])))
    return table_of(("model", "ships", "baseline, ms", "final, ms", "speedup", "SQNR, dB", "exit code"), cells)
