"""Several models, one after the other or one on each of several devices; one that fails does not end the others."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from qdqtune.cli.command import is_quiet, is_verbose
from qdqtune.cli.fleet import run_all
from qdqtune.cli.output import print_json, say, show
from qdqtune.cli.report import table_of
from qdqtune.cli.streams import INTERRUPTED
from qdqtune.engines import EngineSpec
from qdqtune.engines.allocation import allocate_workers
from qdqtune.engines.devices import ANYWHERE, Device, cores_for, needs_gpu
from qdqtune.explanation.words import builds, duration
from qdqtune.system.interpreter import python
from qdqtune.timing.ratios import speed

WORST = (0, 3, 4)
"""Exit codes from the best on; all others are worse than these."""

FACTS = ("shipped", "baseline_ms", "final_ms", "ratio", "ratio_low", "ratio_high", "output_sqnr_db")


@dataclass(frozen=True)
class Job:
    """One `qdqtune tune`: a model, its options as the command line has them, and the engine that these name."""

    model: str
    arguments: tuple[str, ...]
    engine: EngineSpec


@dataclass(frozen=True)
class Wanted:
    """How many models to tune at a time, on which devices (see `allocate_workers`)."""

    workers: int | None = None
    cores_each: int | None = None
    ray: str | None = None


def run_jobs(jobs: Sequence[Job], wanted: Wanted, *, as_machine: bool) -> int:
    """Tune models, each in a process of its own, one on each device at a time, and print a table. Gives the worst exit
    code.

    Raises:
        KeyboardInterrupt: this process was interrupted, or a job.
    """
    with allocate_workers(_widest(jobs), wanted.workers, wanted.cores_each, wanted.ray) as allocation:
        devices = allocation.devices
    if wanted.ray is not None:  # each job takes one device of the cluster, wherever that is
        own = ("--ray", wanted.ray, "--workers", "1")
        cores = () if wanted.cores_each is None else ("--cores-per-worker", str(wanted.cores_each))
        jobs = [replace(job, arguments=(*job.arguments, *own, *cores)) for job in jobs]
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
    done = subprocess.run(**python("-m", "qdqtune", *_asked(job)), stdout=subprocess.PIPE, text=True, check=False)
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
    return max((job.engine for job in jobs), key=lambda spec: (needs_gpu(spec), cores_for(spec, None)))


def _estimates(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What runs would do."""
    spent = [builds(r["builds"] - r["rewrite_builds"], r["rewrite_builds"]) for r in rows]
    cells = [
        (r["model"], count, f"{r['latency'] * 1e3:.3f}", duration(r["seconds"]))
        for r, count in zip(rows, spent, strict=True)
    ]
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
