"""`tune` of several models, each in a process of its own, one on each device at a time; one that fails does not end the
others."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from statistics import geometric_mean
from threading import Lock
from typing import Any

from qdqtune.cli.children import DRIVER, LOST, started
from qdqtune.cli.command import Terminal, command_line
from qdqtune.cli.output import EVENTS, parsed_answer, print_json, print_lines, say, show
from qdqtune.cli.streams import INTERRUPTED
from qdqtune.commands.shown import Table
from qdqtune.commands.tune import TuneOptions
from qdqtune.engines import EngineSpec
from qdqtune.engines.allocation import allocate_workers
from qdqtune.engines.devices import ANYWHERE, Device, cores_for, leased, needs_gpu, pinned
from qdqtune.engines.options import WorkerOptions
from qdqtune.engines.ray import NODE_LOST
from qdqtune.engines.remote.connection import facts_of
from qdqtune.errors import BadOption, EngineUnavailable
from qdqtune.explanation.formatting import builds, counted, duration
from qdqtune.system.interpreter import end_group
from qdqtune.timing.ratios import speed

CODES = (0, 3, 4)
"""Exit codes of runs that came to their end, the best first; every other one is worse than these."""

FACTS = ("shipped", "baseline_ms", "final_ms", "ratio", "ratio_low", "ratio_high", "output_sqnr_db", "accuracy")

CLEANUP_SECONDS = 20.0
"""How long interrupted children may take to clean up before they are killed. Chosen, not measured."""

FLEET = tuple(WorkerOptions.__annotations__)
"""Options of the fleet, which each of its jobs gets otherwise."""


@dataclass
class Job:
    """One model to tune: the options of `tune`, and how it ended."""

    options: TuneOptions
    name: str = ""
    code: int = 0
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        """The file of the model."""
        return Path(str(self.options.model))

    def row(self) -> dict[str, Any]:
        """What became of the model, as `--json` prints it; of a dry run, the estimate."""
        is_estimate = "patterns" in self.result and self.code == 0
        facts = self.result if is_estimate else {name: self.result.get(name) for name in FACTS}
        return {"model": str(self.model), "exit_code": self.code, **facts}


def run_jobs(jobs: Sequence[Job], options: WorkerOptions, terminal: Terminal) -> int:
    """Tune models and print what became of each. Gives the worst exit code.

    Raises:
        EngineUnavailable: the machine that `on` names cannot be reached.
        KeyboardInterrupt: this process was interrupted, or a job.
    """
    begun = time.monotonic()
    devices, more = _devices([job.options.spec() for job in jobs], options)
    shown = {"as_machine": True, "quiet": terminal.quiet, "verbose": terminal.verbose}
    alike = Counter(job.model.name for job in jobs)
    for job in jobs:
        job.name = job.model.name if alike[job.model.name] == 1 else f"{job.model.parent.name}/{job.model.name}"
    Children(devices).run(jobs, shown | more)
    rows = [job.row() for job in jobs]
    if terminal.as_machine:
        print_json(rows)
    elif all("patterns" in row for row in rows):
        show(_estimates(rows))
    else:
        show(_table(rows))
        print_lines([_summary(rows, time.monotonic() - begun)])
    return max((job.code for job in jobs), key=lambda code: CODES.index(code) if code in CODES else len(CODES) + code)


def _devices(engines: Sequence[EngineSpec], options: WorkerOptions) -> tuple[Sequence[Device], dict[str, Any]]:
    """The devices for jobs, and the options of workers that each job gets. Devices are allocated for the engine that
    needs a GPU, or else the most cores."""
    widest = max(engines, key=lambda spec: (needs_gpu(spec), cores_for(spec, None)))
    each = options.cores_per_worker
    if options.on is not None:
        facts_of(options.on)  # one line if it cannot be reached, not one for each model
        count = options.workers or 1
        each = cores_for(widest, each) if count > 1 else each
        return (ANYWHERE,) * count, {"on": options.on, "workers": 1, "cores_per_worker": each}
    with allocate_workers(widest, options.workers, each, options.ray) as allocation:
        devices = allocation.devices
    if options.ray is None:
        return devices, {}
    return (ANYWHERE,) * len(devices), {"ray": options.ray, "workers": 1, "cores_per_worker": each}


class Children:
    """The processes of a fleet, one at a time on each device."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices, self._lock = devices, Lock()
        self._running = list[subprocess.Popen[str]]()
        self._is_ending, self._command = False, command_line()

    def run(self, jobs: Sequence[Job], more: dict[str, Any]) -> None:
        """Run all jobs, with `more` options; when one is interrupted, all are. Lines begin with the model's name."""
        free = SimpleQueue[Device]()
        for device in self._devices:
            free.put(device)

        def run(job: Job) -> None:
            device = free.get()
            values = {name: value for name, value in job.options.raw.items() if name not in FLEET} | more

            def take(text: str) -> None:
                if not more["quiet"]:
                    say(f"{job.name}: {text.strip()}")

            job.code, job.result = self.ask(values, device, take)
            free.put(device)
            if job.code == INTERRUPTED:
                raise KeyboardInterrupt

        with ThreadPoolExecutor(len(self._devices)) as pool:
            try:
                running = [pool.submit(run, job) for job in jobs]
                for done in wait(running, return_when=FIRST_EXCEPTION).done:
                    done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self._end()

    def ask(self, values: dict[str, Any], device: Device, take: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
        """Have a child tune with these options on a device. `take` gets its lines. Gives exit code and result."""
        result: dict[str, Any] = {}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        variables = device.environment | {EVENTS: "1", DRIVER: "1"}
        with (
            leased(device) as held,
            pinned(device.cores),
            started(("-m", "qdqtune.cli.child"), variables, held, text=True, errors="replace", **pipes) as child,
        ):
            with self._lock:
                self._running.append(child)
                if self._is_ending:
                    child.send_signal(signal.SIGINT)
            assert child.stdin is not None
            assert child.stdout is not None
            with suppress(BrokenPipeError), child.stdin:  # it was ended
                json.dump({"options": values, "command": self._command}, child.stdin, default=str)
            for line in filter(str.strip, child.stdout):
                answer = parsed_answer(line.rstrip("\n"))
                if isinstance(answer, str):
                    take(answer)
                else:
                    result = answer
            code = child.wait()
        if code != LOST or "ray" not in values:
            return code, result
        take(f"error: {NODE_LOST}")
        return EngineUnavailable.exit_code, {}

    def _end(self) -> None:
        """Interrupt children that still run, and kill those that do not end."""
        with self._lock:
            self._is_ending = True
            running = [child for child in self._running if child.poll() is None]
        for child in running:
            child.send_signal(signal.SIGINT)
        until = time.monotonic() + CLEANUP_SECONDS
        for child in running:
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                end_group(child.pid)


def _estimates(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Estimates of `--dry-run`, a row for each model."""
    cells = []
    for row in rows:
        spent = builds(row["builds"] - row["rewrite_builds"], row["rewrite_builds"])
        cells.append((row["model"], spent, f"{row['latency'] * 1e3:.3f}", duration(row["seconds"])))
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


def jobs_of(models: Iterable[Path], options: TuneOptions) -> Iterator[Job]:
    """A job for each model, which goes to a folder of its own, with the options that were typed.

    Raises:
        BadOption: a model does not exist.
    """
    for model, folder in named(list(dict.fromkeys(models))).items():
        if not model.exists():
            commas = "; several values of one option are parted by commas, like 8,1" if not model.suffix else ""
            raise BadOption(f"{model}: cannot read the model: No such file or directory{commas}")
        own = {"model": model, "output_dir": options.output_dir / folder}
        yield Job(type(options)(**(options.raw | own)))


def named(models: Sequence[Path]) -> dict[Path, str]:
    """A folder name for each model: the name of its file; if several files have that name, preceded by the name of the
    parent folder, and numbered if these are equal, too."""
    stems = Counter(model.stem for model in models)
    names: dict[Path, str] = {}
    for model in models:
        stem = name = model.stem if stems[model.stem] == 1 else f"{model.absolute().parent.name}_{model.stem}"
        number = 1
        while name in names.values():
            number += 1
            name = f"{stem}-{number}"
        names[model] = name
    return names
