"""Tuning runs of several models, each in a process with cores of its own, and what they cost and gained."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zoo
from static_peer import write_static

from qdqtune.comparing import compare_files
from qdqtune.data import open_samples
from qdqtune.errors import QdqtuneError
from qdqtune.loading import load
from qdqtune.runner import Runner
from qdqtune.settings import Settings
from qdqtune.timing import Plan, Ratio
from qdqtune.tune import tune

Facts = dict[str, Any]
"""One run: the summary of `tune`, and 'static', 'static_failed' or 'failed' (see `run`)."""


@dataclass(frozen=True)
class Budget:
    """`seconds` is the limit of the search (None: none); calibration, the proof and quantize_static come on top."""

    builds: int
    seconds: float | None
    samples: int


def add_arguments(parser: argparse.ArgumentParser, builds: int) -> None:
    parser.add_argument("--builds", type=int, default=builds, help="builds per model (%(default)s)")
    parser.add_argument("--time-budget", type=float, help="seconds of search per model")
    parser.add_argument("--samples", type=int, default=8, help="calibration samples (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, each on cores of its own (%(default)s)")
    parser.add_argument("--json", type=Path, help="write every run's summary to this file")


def run_all(given: argparse.Namespace) -> Iterator[Facts]:
    """The facts of each model's run, as they finish."""
    entries = zoo.find(given.models, given.names)
    budget = Budget(given.builds, given.time_budget, given.samples)
    context = multiprocessing.get_context("spawn")
    places: Queue[list[int]] = context.Queue()
    for cores in shares(given.jobs):
        places.put(cores)
    with ProcessPoolExecutor(given.jobs, context, take_place, (places,)) as pool:
        for done in as_completed([pool.submit(run, entry, budget) for entry in entries]):
            yield done.result()


def shares(jobs: int) -> list[list[int]]:
    """Equal shares of the cores; of even size where possible, since neighbours are often two threads of one core."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // jobs
    if size == 0:
        raise SystemExit(f"--jobs {jobs} is more than the {len(cores)} cores here")
    size -= size % 2 if jobs > 1 and size > 1 else 0
    return [cores[i * size : (i + 1) * size] for i in range(jobs)]


def take_place(places: Queue[list[int]]) -> None:
    """Pin this process, and with it all that it starts, to a share of the cores."""
    os.sched_setaffinity(0, places.get())


def run(entry: zoo.Entry, budget: Budget) -> Facts:
    """Tune one model, then pair what ships with quantize_static's file.

    'static' holds quantize_static's and the final latency in ms, the ratio final/static, and the accuracy in dB;
    'static_failed' says why there is none; 'failed' says why the run itself gave nothing.
    """
    logging.getLogger().setLevel(logging.ERROR)  # quantize_static's advice
    with TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings(
            entry.path, folder / "out", builds=budget.builds, time_budget=budget.seconds, fix_inputs=entry.fixed,
            calibration_data=entry.data, calibration_samples=budget.samples,
        )  # fmt: skip
        try:
            result = tune(settings)
        except QdqtuneError as error:
            return {"name": entry.name, "failed": f"{type(error).__name__}: {error}"}
        facts = {"name": entry.name, **result.summary, "notes": list(result.notes)}
        return facts | against_static(settings, folder)


def against_static(settings: Settings, folder: Path) -> Facts:
    with Runner(settings.engine, time_limit_s=settings.time_limit, log_dir=folder / "logs") as runner:
        model = load(settings.model, fix_inputs=settings.fix_inputs)
        samples = open_samples(settings.calibration_data, model, limit=settings.calibration_samples,
                               fixed=settings.fix_inputs)  # fmt: skip
        static = folder / "static.onnx"
        try:
            write_static(model, samples, runner.numeric_format("int8"), static)
        except Exception as error:  # noqa: BLE001  what it refuses is part of the answer
            return {"static_failed": f"{type(error).__name__}: {error}"}
        out, seen = settings.output_dir, samples.first(settings.accuracy_samples)
        final = compare_files([static, out / "optimized_final.onnx"], runner, seen, Plan((24,), 0.001))[0]
        accuracy = compare_files([out / "baseline.onnx", static], runner, seen, Plan((1,)), builds=1)[0]
    if final.ratio is None:
        return {"static_failed": final.reason}
    found = {"ms": final.first_ms, "final_ms": final.ms, "sqnr_db": accuracy.sqnr_db}
    return {
        "static": found | {"ratio": final.ratio.median, "ratio_low": final.ratio.low, "ratio_high": final.ratio.high}
    }


def ratio_text(facts: Facts) -> str:
    """Ratio with interval of a summary, or of its 'static' part."""
    return str(Ratio(facts["ratio"], facts["ratio_low"], facts["ratio_high"]))


def outside_engine(facts: Facts) -> float:
    """Percent of the run's time that was not spent waiting for the engine."""
    return 100.0 * (1.0 - float(facts["engine_seconds"]) / float(facts["seconds"]))


def show(columns: Sequence[str], row: Callable[[Facts], list[str]], runs: Sequence[Facts]) -> None:
    """The table of all runs that gave something, then the reasons of the others."""
    zoo.print_table(columns, [row(facts) for facts in runs if "failed" not in facts])
    for facts in runs:
        for key in ("failed", "static_failed"):
            if key in facts:
                print(f"{facts['name']}: {key.replace('_', ' ')}: {facts[key]}")
