"""What several workers are worth: builds per hour and the final latency by their number, several models at a time, and
what a request to a worker costs beside what its engine does."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import zoo
from zoo import Entry

from qdqtune.calibration.inputs import input_specs, random_samples
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.options import on_device
from qdqtune.engines.pool import allocate_workers
from qdqtune.engines.runner import Runner, temporary_runner
from qdqtune.errors import EngineUnavailable
from qdqtune.graph.loading import load

REQUESTS = 300
SAMPLES, ROUNDS, REPEATS = 12, 20, 5
"""Outputs and rounds of a candidate on another machine, and how often it is measured."""
SPEC = EngineSpec("onnxruntime", {"threads": 1})
QUICK = ("--calibration-method", "minmax", "--no-bias-correction", "--no-report", "--min-sqnr", "none")


def qdqtune(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command of the tool; exit code 3 is an answer as well."""
    words = [sys.executable, "-m", "qdqtune", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        sys.exit(f"{' '.join(words)}: {done.stderr}")
    return done


def data(entry: Entry) -> tuple[str, ...]:
    return () if entry.data is None else ("--calibration-data", entry.data)


def searched(folder: Path) -> tuple[int, float]:
    """The candidates behind the first batch of a search, and the seconds that they took."""
    trials = json.loads((folder / "run.json").read_text())["trials"]
    ends = [trial["seconds"] for trial in trials if trial["seconds"] is not None]
    return sum(end > ends[0] for end in ends), ends[-1] - ends[0]


def by_workers(entry: Entry, counts: list[int], kept: Path, given: argparse.Namespace) -> None:
    """One search a number of workers; then all finals against that of the first, in interleaved rounds."""
    how = ("--threads", given.cores, "--cores-per-worker", given.cores)
    paces: list[float] = []
    rows: list[list[str]] = []
    for count in counts:
        out = kept / f"{entry.name}_{count}"
        asked = ("--mode", given.mode, "--builds", given.builds, "--workers", count, *how, *QUICK, *given.tune)
        if not (out / "summary.json").exists():  # else an earlier call with the same --keep has measured it
            qdqtune("tune", entry.path, "-o", out, "-q", *data(entry), *asked)
        builds, seconds = searched(out)
        paces.append(builds / seconds)
        rows.append(
            [str(count), str(builds), f"{seconds:.1f}", f"{3600 * paces[-1]:.0f}", f"{paces[-1] / paces[0]:.2f}x"]
        )
        print(f"{entry.name}, {count} workers: {builds} builds in {seconds:.1f} s", file=sys.stderr, flush=True)
    finals = [kept / f"{entry.name}_{count}" / "optimized_final.onnx" for count in counts]
    ratios = [""]
    if len(finals) > 1:
        engine = ("--threads", given.cores, "--effort", "quick")
        met = json.loads(qdqtune("compare", *finals, "--json", "-q", *data(entry), *engine).stdout)["others"]
        ratios += [f"{m['ratio']['median']:.3f} [{m['ratio']['low']:.3f}, {m['ratio']['high']:.3f}]" for m in met]
    print(f"\n{entry.name}, {given.mode} mode, workers of {given.cores} cores\n")
    header = ["workers", "builds", "seconds of search", "builds an hour", "pace", "final latency to that of the first"]
    zoo.print_table(header, [[*row, ratio] for row, ratio in zip(rows, ratios, strict=False)])


def fleet(entries: list[Entry], counts: list[int], kept: Path, given: argparse.Namespace) -> None:
    """All models, so many at a time, each on cores of its own."""
    rows = []
    folder = kept / "models"
    folder.mkdir()
    for entry in entries:
        shutil.copy(entry.path, folder / f"{entry.name}.onnx")
    for count in counts:
        begun = time.monotonic()
        asked = ("--mode", given.mode, "--builds", given.builds, "--workers", count, "--cores-per-worker", given.cores)
        told = ("--threads", given.cores, *QUICK, *given.tune)
        out = qdqtune("tune", folder, "-o", kept / f"fleet_{count}", "-q", "--json", *asked, *told).stdout
        seconds = time.monotonic() - begun
        gains = [row["ratio"] for row in json.loads(out)]
        rows.append([str(count), f"{seconds:.0f}", ", ".join("-" if g is None else f"{g:.2f}" for g in gains)])
    print(f"\n{len(entries)} models: {', '.join(entry.name for entry in entries)}\n")
    zoo.print_table(["at a time", "seconds", "final latency to float"], rows)


def overhead(ray: str | None, on: str | None) -> None:
    """Round trips to a worker that has nothing to do."""
    rows = []
    places: list[tuple[str, str | None, str | None]] = [("a process here", None, None)]
    places += [("an actor of Ray", ray, None)] * (ray is not None)
    places += [(f"a process on {on}", None, on)] * (on is not None)
    for name, address, machine in places:
        try:
            execution = on_device(machine, Execution())
            with ExitStack() as stack:
                fake = EngineSpec("fake")
                (device, *_), starter = stack.enter_context(
                    allocate_workers(fake, 1, None, address, elsewhere=execution.device)
                )
                logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                with Runner(fake, log_dir=logs, start=starter, device=device) as runner:
                    begun = time.perf_counter()
                    runner.describe()
                    start = time.perf_counter() - begun
                    took = []
                    for _ in range(REQUESTS):
                        begun = time.perf_counter()
                        runner.describe()
                        took.append(time.perf_counter() - begun)
            rows.append([name, f"{start:.2f}", f"{1e3 * statistics.median(took):.2f}", f"{1e3 * sorted(took)[-3]:.2f}"])
        except EngineUnavailable as error:
            print(error, file=sys.stderr)
    print("\nwhat a request costs beside what the engine does; a candidate takes six to ten\n")
    zoo.print_table(["worker", "start, s", "median, ms", "the slowest but two, ms"], rows)


def candidates(entry: Entry, on: str) -> None:
    """What a candidate costs on another machine beside what it costs here: its file, its outputs, and rounds."""
    rows = []
    for name, machine in (("here", None), (on, on)):
        execution = on_device(machine, Execution())
        with temporary_runner(SPEC, execution) as runner:
            model = load(entry.path)
            samples = list(random_samples(model, input_specs(model), 0, SAMPLES)())
            runner.feed(samples[0])
            took: list[list[float]] = []
            for _ in range(1 + REPEATS):
                begun = time.perf_counter()
                handle = runner.load(entry.path, fresh=True)
                built = time.perf_counter()
                runner.outputs(handle, samples)
                ran = time.perf_counter()
                handles = [handle, handle]
                turns = runner.turns(handles, 0.0)
                runner.rounds(handles, range(ROUNDS), seed=0, turns=turns, warmup=0)
                took.append([built - begun, ran - built, time.perf_counter() - ran])
                runner.unload(handle)
        first, *others = took
        middle = [statistics.median(column) for column in zip(*others, strict=True)]
        rows.append([name, *(f"{1e3 * seconds:.1f}" for seconds in (first[0], *middle, sum(middle)))])
    print(f"\n{entry.name}: one candidate, outputs on {SAMPLES} samples, {ROUNDS} rounds; milliseconds\n")
    zoo.print_table(["where", "first build", "build", "outputs", "rounds", "all"], rows)


def main() -> None:
    parser = zoo.parser(__doc__, ())
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--mode", default="region")
    parser.add_argument("--builds", type=int, default=52)
    parser.add_argument("--fleet", type=int, nargs="*", default=[], help="several models at a time, by number")
    parser.add_argument("--ray", help="address of a cluster, for what a request costs there")
    parser.add_argument("--on", help="machine to reach by SSH, for what a request costs there, and a candidate")
    parser.add_argument("--keep", type=Path, help="folder for the runs; those that lie there are not repeated")
    parser.add_argument("--tune", nargs="*", default=[], help="more options of tune, each as one word: --seed=1")
    given = parser.parse_args()
    entries = zoo.find(given.models, given.names)
    zoo.print_machine()
    with tempfile.TemporaryDirectory() as temporary:
        kept = given.keep or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        overhead(given.ray, given.on)
        for entry in entries if given.on else ():
            candidates(entry, given.on)
        for entry in entries if given.workers != [0] else ():
            by_workers(entry, given.workers, kept, given)
        if given.fleet:
            fleet(entries, given.fleet, kept, given)


if __name__ == "__main__":
    main()
