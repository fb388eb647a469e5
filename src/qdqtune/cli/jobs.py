"""Several models, of a YAML file (`qdqtune run`) or of a command line, one after the other; one that fails does not end
the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from rich import box
from rich.table import Table
from rich.text import Text

from qdqtune.cli import options
from qdqtune.cli.grouped import command, is_quiet, is_verbose
from qdqtune.cli.options import FILE
from qdqtune.cli.output import print_json, say, show
from qdqtune.cli.words import duration, speed
from qdqtune.errors import BadOption, reading

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


@command("run", [click.Argument(["file"], type=FILE), options.JSON_FOR_TABLE])
def run_command(file: Path, as_machine: bool) -> int:
    """Tune the models that a YAML file names, and say at the end what became of each.

    `jobs` is a list of options of tune by name, with a `model` each; `defaults` are options for all of them. A job that
    fails does not end the others, and the same command goes on where it was stopped. The exit code is that of the worst
    job.

    \b
    qdqtune run jobs.yaml --json
    """
    return run_jobs(read_jobs(file), as_machine=as_machine)


def run_jobs(jobs: Sequence[Job], *, as_machine: bool) -> int:
    """Tune one model after the other, each in a process of its own, and print a table. Gives the worst exit code."""
    done = [_ran(job) for job in jobs]
    if as_machine:
        print_json(done)
    else:
        show(_estimates(done) if all("patterns" in row for row in done) else _table(done))
    codes: list[int] = [row["exit_code"] for row in done]
    return max(codes, key=lambda code: WORST.index(code) if code in WORST else len(WORST) + code)


def _ran(job: Job) -> dict[str, Any]:
    say(f"{job.model}:")
    how = ["-q"] if is_quiet() else ["-v"] if is_verbose() else []
    asked = [sys.executable, "-m", "qdqtune", "tune", job.model, *job.arguments, "--json", *how]
    done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    summary = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    is_estimate = "--dry-run" in job.arguments and done.returncode == 0
    facts = summary if is_estimate else {name: summary.get(name) for name in FACTS}
    return {"model": job.model, "exit_code": done.returncode, **facts}


def _estimates(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What runs would do."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", overflow="fold")
    for column in ("builds", "latency, ms", "about"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = (row["model"], str(row["builds"]), f"{row['latency'] * 1e3:.3f}", duration(row["seconds"]))
        table.add_row(*map(Text, cells))
    return table


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", overflow="fold")
    for column in ("ships", "baseline, ms", "final, ms", "speedup", "SQNR, dB", "exit code"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        row = {**dict.fromkeys(FACTS), **row}
        times = ["" if row[name] is None else f"{row[name]:.3f}" for name in ("baseline_ms", "final_ms")]
        gain = "" if row["ratio"] is None else speed(row["ratio"])
        noise = "" if row["output_sqnr_db"] is None else f"{row['output_sqnr_db']:.1f}"
        cells = (row["model"], row["shipped"] or "failed", *times, gain, noise, str(row["exit_code"]))
        table.add_row(*map(Text, cells))
    return table
