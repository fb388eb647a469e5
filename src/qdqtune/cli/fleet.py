"""Child processes: one for a run on Ray, or one for each of several models, one at a time on each device. A model that
fails does not stop the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from queue import SimpleQueue
from statistics import geometric_mean
from tempfile import TemporaryFile
from typing import Any, TextIO

from qdqtune.cli.command import Terminal, command_line
from qdqtune.cli.output import print_json, print_lines, say, show
from qdqtune.cli.streams import INTERRUPTED, PARENT
from qdqtune.commands.shown import Table
from qdqtune.commands.tune import TuneOptions
from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import ANYWHERE, Device, cores_for, leased, needs_gpu
from qdqtune.engines.options import WorkerOptions
from qdqtune.engines.pool import allocate_workers
from qdqtune.engines.process import NODE_LOST
from qdqtune.engines.remote import Destination
from qdqtune.errors import BadOption, EngineUnavailable, first_of
from qdqtune.explanation.formatting import counted, duration
from qdqtune.options import options_of
from qdqtune.system.interpreter import end_group, python
from qdqtune.timing.ratios import speed

CODES = (0, 3, 4)
"""Exit codes of completed runs, the best first; all others are worse."""

FACTS = ("shipped", "baseline_ms", "final_ms", "ratio", "ratio_low", "ratio_high", "output_sqnr_db", "accuracy")

DRIVER = "QDQTUNE_RAY_DRIVER"
"""The environment variable that marks the child which may use Ray."""

LOST = 1
"""The exit code of a program that Ray ends because its node is lost; commands of qdqtune use other codes."""

PLAIN = {"TERM": "dumb", "TTY_COMPATIBLE": "0"}
"""Environment variables with which a child prints lines without colours, also where the user forces these."""


@contextmanager
def lifeline() -> Iterator[tuple[int, TextIO]]:
    """The two ends of a pipe. Child processes watch the first, and end when this process closes the second or dies."""
    reads, holds = os.pipe()
    with os.fdopen(reads), os.fdopen(holds, "w") as holder:
        yield reads, holder


def start(
    arguments: Sequence[str], variables: Mapping[str, str], pipe: int, fds: Sequence[int] = (), **how: Any
) -> subprocess.Popen[str]:
    """Start this Python with these arguments and additional environment variables, in its own process group. It watches
    `pipe` (see `lifeline`), keeps `fds` open, and `how` are arguments of `subprocess.Popen`."""
    words = python(*arguments, **variables, **{PARENT: str(pipe)})
    return subprocess.Popen(**words, process_group=0, pass_fds=(pipe, *fds), **how)


def run_on_ray() -> int:
    """Run the same command in a child, as Ray ends a program silently when its node is lost. Returns the exit code."""
    with lifeline() as (pipe, _):
        run = start(("-m", "qdqtune", *command_line()[1:]), {DRIVER: "1"}, pipe, stdout=sys.stdout.fileno())
        while run.returncode is None:
            try:
                run.wait()
            except KeyboardInterrupt:  # a terminal interrupts this process only
                run.send_signal(signal.SIGINT)
    if run.returncode != LOST and run.returncode >= 0:
        return run.returncode
    end_group(run.pid)
    if run.returncode == LOST:
        raise EngineUnavailable(NODE_LOST)
    name = signal.Signals(-run.returncode).name
    raise EngineUnavailable(f"{name} has ended the run: the same command goes on from what was measured")


def run_jobs(jobs: Sequence[TuneOptions], options: WorkerOptions, terminal: Terminal) -> int:
    """Tune models and print the outcome of each. Returns the worst exit code."""
    begun = time.monotonic()
    devices, more = _devices([job.spec() for job in jobs], options)
    if not terminal.quiet:
        say(f"{counted(len(jobs), 'model')}: {first_of([str(job.model) for job in jobs])}")
    more |= {"as_machine": True, "quiet": terminal.quiet, "verbose": terminal.verbose}
    rows = _tune_all(jobs, devices, more)
    if terminal.as_machine:
        print_json(rows)
    elif all("latency" in row for row in rows):
        cells = []
        for row in rows:
            cells.append((row["model"], str(row["builds"]), f"{row['latency'] * 1e3:.3f}", duration(row["seconds"])))
        show(Table(("model", "builds", "latency, ms", "about"), cells))
    else:
        show(_table(rows))
        print_lines([_summary(rows, time.monotonic() - begun)])
    codes: list[int] = [row["exit_code"] for row in rows]
    return max(codes, key=lambda code: CODES.index(code) if code in CODES else len(CODES) + code)


def _devices(engines: Sequence[EngineSpec], options: WorkerOptions) -> tuple[Sequence[Device], dict[str, Any]]:
    """The devices for jobs (for the engine with the highest needs), and the options of workers that each job gets."""
    widest = max(engines, key=lambda spec: (needs_gpu(spec), cores_for(spec, None)))
    each = options.cores_per_worker
    if options.on is not None:
        Destination.parsed(options.on).facts()  # one line if it cannot be reached, not one for each model
        count = options.workers or 1
        each = cores_for(widest, each) if count > 1 else each
        return (ANYWHERE,) * count, {"on": options.on, "workers": 1, "cores_per_worker": each}
    with allocate_workers(widest, options.workers, each, options.ray) as (devices, _):
        if options.ray is None:
            return devices, {}
        return (ANYWHERE,) * len(devices), {"ray": options.ray, "workers": 1, "cores_per_worker": each}


def _tune_all(jobs: Sequence[TuneOptions], devices: Sequence[Device], more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tune all models with `more` options, one at a time on each device; an interrupt stops all. Returns the outcome of
    each as `--json` prints it; for a dry run, the estimate."""
    free = SimpleQueue[Device]()
    for device in devices:
        free.put(device)
    command, of_fleet = command_line(), WorkerOptions.__annotations__
    with lifeline() as (pipe, holder), ThreadPoolExecutor(len(devices)) as pool:

        def run(job: TuneOptions) -> dict[str, Any]:
            values = {name: getattr(job, name) for name in options_of(type(job)) if name not in of_fleet}
            device = free.get()
            try:
                code, result = ask({"options": {**values, **more}, "command": command}, device, pipe)
            finally:
                free.put(device)
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            facts = result if "latency" in result else {name: result.get(name) for name in FACTS}
            return {"model": str(job.model), "exit_code": code, **facts}

        try:
            running = [pool.submit(run, job) for job in jobs]
            for done in wait(running, return_when=FIRST_EXCEPTION).done:
                done.result()
            return [done.result() for done in running]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            holder.close()  # which ends the children that still run


def ask(request: Mapping[str, Any], device: Device, pipe: int) -> tuple[int, dict[str, Any]]:
    """Tune a model on a device in a child process, and print its output, marked by model. Returns the exit code and the
    result, which is empty if the child printed none."""
    options = request["options"]

    def show(text: str) -> None:
        if not options["quiet"]:
            say(f"{options['model']}: {text.strip()}")

    variables = device.environment | {DRIVER: "1"} | PLAIN
    with leased(device) as (_, held), TemporaryFile("w+") as results:
        streams = {"stdin": subprocess.PIPE, "stdout": results, "stderr": subprocess.PIPE}
        child = start(("-m", "qdqtune.cli.child"), variables, pipe, held, text=True, errors="replace", **streams)
        assert child.stdin is not None
        assert child.stderr is not None
        with suppress(BrokenPipeError), child.stdin:  # it was ended
            json.dump(request, child.stdin, default=str)
        for line in filter(str.strip, child.stderr):
            show(line)
        code, result = child.wait(), dict[str, Any]()
        results.seek(0)
        with suppress(ValueError):  # it has printed none, or was ended while it did
            result = json.load(results)
    if code == LOST and "ray" in options:
        show(f"error: {NODE_LOST}")
        return EngineUnavailable.exit_code, {}
    return code, result


def _summary(rows: Sequence[Mapping[str, Any]], seconds: float) -> str:
    """The outcome of all models in a sentence, with the geometric mean of the speedups of those that became faster."""
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


def jobs_of(models: Iterable[Path], options: TuneOptions) -> Iterator[TuneOptions]:
    """The same options for each model, with an output folder of its own."""
    for model, folder in named(list(dict.fromkeys(models))).items():
        if not model.exists():
            hint = "check the path" if model.suffix else "several values of one option are parted by commas, like 8,1"
            raise BadOption(f"cannot read the model {model}: No such file or directory; {hint}")
        yield replace(options, model=model, output_dir=options.output_dir / folder)


def named(models: Sequence[Path]) -> dict[Path, str]:
    """A folder name for each model: its file name; if not unique, behind its folder's name; then with a number."""
    stems = Counter(model.stem for model in models)
    names: dict[Path, str] = {}
    for model in models:
        stem = model.stem if stems[model.stem] == 1 else f"{model.absolute().parent.name}_{model.stem}"
        numbered = (f"{stem}-{number}" for number in count(2))
        names[model] = next(name for name in chain([stem], numbered) if name not in names.values())
    return names
