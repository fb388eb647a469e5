"""What a user gains by `tune`: over float, over the usual quantizer and over `quantize`, by seconds and threads.

A job is a network at a number of threads, on cores of its own. In a job the quantizer, `quantize` and `tune` run one
after the other as a user would run them. Then `judge.py` times all their files in the same rounds, and compares outputs
on samples that none of them has seen. `--source NAME=PATH` runs the package of a source tree, and may be repeated: then
the files of all versions meet in the same rounds.

OUT/results.json is written after every job, and the same command goes on where it stopped: what ran is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
import zoo
from cores import pinned, shares

from qdqtune.calibration.samples import open_samples
from qdqtune.errors import QdqtuneError
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save

Facts = dict[str, Any]

HERE = Path(__file__).parent
SUMMARY = ("shipped", "ratio", "ratio_low", "ratio_high", "builds", "proof_builds", "trials", "pairs", "output_sqnr_db",
           "calibration_cut_short", "constraint_met", "seconds")  # fmt: skip
"""What is kept of summary.json."""

CALIBRATION, HELD_OUT = "calibration", "held_out"
"""Folders of samples: what the quantizers see, and what the judge alone sees, one of `EVERY` samples."""

EVERY = 4

RESULTS = "results.json"

SAMPLES = 64
"""The most samples of a network, both kinds together."""

PATIENCE = 600
"""Seconds after which a process is stopped; that of `tune` has its budget besides."""

JUDGING, OTHERS = 60, 30
"""Seconds of a job that its rounds may take, and about those of its quantizers."""

EXACT_ENOUGH = 20
"""The SQNR in dB that a rival has to hold where not all of them count: what `tune` itself has to hold by default."""

SLOWER = 1.02
"""A ratio to the best rival that is listed."""


@dataclass(frozen=True)
class Step:
    """A process that writes `file`; that of `tune` has a `budget` of seconds. `source` is its source tree, None for the
    package as it is found."""

    command: tuple[str, ...]
    file: Path
    source: str | None = None
    budget: int = 0


@dataclass(frozen=True)
class Task:
    """What to do in each job. `sources` are source trees by name. No job begins that would end after `end`, a time of
    the monotonic clock."""

    out: Path
    engine: str
    budgets: tuple[int, ...]
    sources: Mapping[str, str | None]
    rounds: int
    runs: bool
    judges: bool
    end: float | None

    @property
    def rival(self) -> str:
        return "nncf" if self.engine == "openvino" else "static"


def steps(task: Task, folder: Path, threads: int) -> dict[str, Step]:
    """The columns of the table but float, in the order in which they are made."""
    model, data, target = str(folder / "float.onnx"), str(folder / CALIBRATION), folder / f"{task.rival}.onnx"
    columns = {task.rival: Step((str(HERE / "quantizers.py"), task.rival, model, data, str(target)), target)}
    common = (model, "--engine", task.engine, "--calibration-data", data, "--verbose")
    for source, tree in task.sources.items():
        suffix = f"-{source}" if source else ""
        target = folder / f"quantize{suffix}.onnx"
        command = ("-m", "qdqtune", "quantize", *common, "--output", str(target))
        columns[target.stem] = Step(command, target, tree)
        for budget in task.budgets:
            run = folder / f"tune{budget}{suffix}"
            limits = ("--threads", str(threads), "--time-budget", f"{budget}s")
            tune = ("-m", "qdqtune", "tune", *common, *limits, "--output-dir", str(run))
            columns[run.name] = Step(tune, run / "optimized_final.onnx", tree, budget)
    return columns


def job(entry: zoo.Entry, threads: int, task: Task, record: Facts) -> Facts:
    """`record` with what this job adds: the runs that it lacks, and the judgement of all files; 'unjudged' says why
    there is none."""
    folder = task.out / f"{entry.name}_t{threads}"
    record = {"name": entry.name, "threads": threads, "columns": {}, **record}
    columns = record["columns"]
    missing = {name: step for name, step in steps(task, folder, threads).items() if name not in columns and task.runs}
    is_judged = bool(record.get("times")) and not missing
    expected = sum(step.budget for step in missing.values()) + OTHERS * bool(missing)
    expected += JUDGING if task.judges and not is_judged else 0
    if task.end is not None and time.monotonic() + expected > task.end:
        return record
    try:
        if missing:
            prepare(entry, folder)
            columns |= {name: run(step, folder / f"{name}.onnx") for name, step in missing.items()}
            record["times"] = {}  # of fewer files
        return record | judged(task, record, folder) if task.judges and not is_judged else record
    except (QdqtuneError, subprocess.TimeoutExpired) as error:
        return record | {"unjudged": f"{type(error).__name__}: {error}"}


def prepare(entry: zoo.Entry, folder: Path) -> None:
    """The float model, its samples for calibration, and those for the judge, each sample a file."""
    model = load(entry.path, fix_inputs=entry.fixed)
    samples = list(open_samples(entry.data, model, limit=SAMPLES, fixed=entry.fixed))
    parts = {
        CALIBRATION: [sample for i, sample in enumerate(samples, 1) if i % EVERY],
        HELD_OUT: samples[EVERY - 1 :: EVERY] or samples,
    }
    for name, part in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, sample in enumerate(part):
            np.savez(folder / name / f"{i:03}.npz", allow_pickle=False, **sample)
    if entry.fixed:
        save(model, folder / "float.onnx")
    else:
        shutil.copy(entry.path, folder / "float.onnx")


def run(step: Step, kept: Path) -> Facts:
    """Run a step: its wall seconds and exit code, and what the run of `tune` says of itself. Its file becomes `kept`,
    what it prints is beside it."""
    paths = [step.source, os.environ.get("PYTHONPATH")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    log, begun, code = kept.with_suffix(".log"), time.monotonic(), None
    with log.open("w") as output:
        try:
            code = subprocess.run([sys.executable, *step.command], env=variables, stdout=output,
                                  stderr=subprocess.STDOUT, timeout=PATIENCE + step.budget).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            output.write(f"stopped after {PATIENCE + step.budget} s")
    facts: Facts = {"wall": time.monotonic() - begun, "exit": code}
    summary, story = step.file.parent / "summary.json", step.file.parent / "run.json"
    if step.budget and summary.exists() and story.exists():
        told = json.loads(summary.read_text())
        facts |= {key: value for key, value in told.items() if key in SUMMARY or "seconds" in key}
        facts["ended"] = json.loads(story.read_text()).get("ended", "")
    if step.file.exists():
        step.file.replace(kept)
    else:
        facts["failed"] = log.read_text().strip().split("\n")[-1][:200] or f"exit code {code}"
    return facts


def judged(task: Task, record: Facts, folder: Path) -> Facts:
    """The judge's answer."""
    names = ["float", *(name for name, facts in record["columns"].items() if "failed" not in facts)]
    files = [f"{name}={folder / name}.onnx" for name in names]
    command = [sys.executable, str(HERE / "judge.py"), str(folder / HELD_OUT), *files]
    command += ["--engine", task.engine, "--threads", str(record["threads"])]
    command += ["--rounds", str(task.rounds), "--seconds", str(JUDGING)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    (folder / "judge.log").write_text(done.stderr)
    if done.returncode:
        return {"unjudged": done.stderr.strip().split("\n")[-1] or f"exit code {done.returncode}"}
    answer: Facts = json.loads(done.stdout.strip().split("\n")[-1])
    return answer


@dataclass(frozen=True)
class Ratio:
    """The median ratio of two files over the rounds, with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(record: Facts, first: str, second: str, draws: int = 1000) -> Ratio:
    """The first file's time by the second's."""
    times = record["times"]
    paired = [ours / theirs for ours, theirs in zip(times[first], times[second], strict=True)]
    rng = random.Random(0)
    medians = sorted(median(rng.choices(paired, k=len(paired))) for _ in range(draws))
    return Ratio(median(paired), medians[draws // 40], medians[-1 - draws // 40])


def against(record: Facts, column: str, rivals: Sequence[str], least_db: float | None = None) -> Ratio:
    """A column by the fastest of float and those rivals that hold `least_db`."""
    noise = record["sqnr_db"]
    there = [name for name in rivals if name in record["times"]]
    exact = [name for name in there if least_db is None or noise[name] is None or noise[name] >= least_db]
    best = min(["float", *exact], key=lambda name: ratio(record, name, "float", draws=40).median)
    return ratio(record, column, best)


def print_results(records: Sequence[Facts]) -> None:
    """The table of all networks that were judged, and below it how `tune` does against its rivals."""
    records = sorted(records, key=lambda record: (record["threads"], record["name"]))
    good = [record for record in records if "float" in record.get("times", {})]
    columns = list(dict.fromkeys(name for record in records for name in record["columns"]))
    zoo.print_table(["model", "threads", "float ms", *columns], [cells(record, columns) for record in good])
    for record in records:
        if record not in good:
            print(f"{record['name']} at {record['threads']} threads is not judged: {record.get('unjudged', 'not yet')}")
    for threads in sorted({record["threads"] for record in good}):
        for column in (name for name in columns if name.startswith("tune")):
            there = [r for r in good if r["threads"] == threads and column in r["times"]]
            if there:
                print_means(there, column)


def cells(record: Facts, columns: Sequence[str]) -> list[str]:
    row = [record["name"], str(record["threads"]), f"{1e3 * median(record['times']['float']):.3f}"]
    for name in columns:
        facts = record["columns"].get(name, {})
        if name not in record["times"]:
            row.append((facts.get("failed") or record["failed"].get(name, ""))[:40])
            continue
        noise = record["sqnr_db"][name]
        decibels = "" if noise is None else f"; {noise:.0f} dB"
        row.append(f"{ratio(record, name, 'float')}{decibels}; {facts['wall']:.0f} s")
    return row


def print_means(records: Sequence[Facts], column: str) -> None:
    """Geometric means of `tune` against its rivals, the networks where it is slower than the best, and its walls."""
    threads, (_, dash, source) = records[0]["threads"], column.partition("-")
    known = dict.fromkeys(name for record in records for name in record["columns"])
    rivals = [name for name in known if name in ("static", "nncf", f"quantize{dash}{source}")]
    walls = [record["columns"][column]["wall"] for record in records]
    print(
        f"\n{column} at {threads} threads; seconds: median {median(walls):.0f}, most {max(walls):.0f}; geometric means:"
    )
    for chosen in ([], *([name] for name in rivals), rivals):
        for least, words in ((None, ""), (EXACT_ENOUGH, f" that hold {EXACT_ENOUGH} dB"))[: 1 + bool(chosen)]:
            ratios = {record["name"]: against(record, column, chosen, least) for record in records}
            slower = ", ".join(f"{name} {found}" for name, found in ratios.items() if found.median > SLOWER)
            mean = geometric_mean(found.median for found in ratios.values())
            print(f"- {mean:.3f} of the best of {', '.join(['float', *chosen])}{words}; slower: {slower or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models to run on (default: all)")
    parser.add_argument("--models", type=Path, help="folder with NAME.onnx or NAME/model.onnx")
    parser.add_argument("--out", type=Path, help="folder for files and results.json")
    parser.add_argument("--table", type=Path, metavar="OUT", help="only print the table of that folder once more")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4], help="threads (default: 1 4)")
    parser.add_argument("--budgets", type=int, nargs="*", default=[60], help="seconds of `tune` (default: 60)")
    parser.add_argument("--cores", type=int, default=4, help="cores of a job (%(default)s)")
    parser.add_argument("--half", action="store_true", help="half as many for a job of one thread")
    parser.add_argument("--engine", default="onnxruntime", choices=["onnxruntime", "openvino"])
    parser.add_argument("--source", action="append", default=[], metavar="NAME=PATH", help="source tree of the package")
    parser.add_argument("--rounds", type=int, default=40, help="most rounds of the judge (%(default)s)")
    parser.add_argument("--until", type=float, help="begin no job that would end after so many seconds")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--no-judge", action="store_true", help="only make the files")
    either.add_argument("--only-judge", action="store_true", help="only judge the files that are there, once more")
    given = parser.parse_args()
    if given.table:
        print_results(json.loads((given.table / RESULTS).read_text()))
        return
    if not given.models or not given.out:
        parser.error("give --models and --out, or --table")
    trees: dict[str, str | None] = {"": None}
    if given.source:
        trees = {name: str(Path(path).absolute()) for name, _, path in (each.partition("=") for each in given.source)}
    task = Task(given.out.absolute(), given.engine, tuple(given.budgets), trees, given.rounds,
                runs=not given.only_judge, judges=not given.no_judge,
                end=None if given.until is None else time.monotonic() + given.until)  # fmt: skip
    zoo.print_machine()
    run_all(task, given)
    print_results(json.loads((task.out / RESULTS).read_text()))


def run_all(task: Task, given: argparse.Namespace) -> None:
    """Run the jobs, and write results.json after each."""
    task.out.mkdir(parents=True, exist_ok=True)
    results = task.out / RESULTS
    records = {(r["name"], r["threads"]): r for r in json.loads(results.read_text())} if results.exists() else {}
    half = {1: given.cores // 2} if given.half else {}
    sizes = {threads: half.get(threads, given.cores) for threads in given.threads}
    for size in sorted(set(sizes.values()), reverse=True):  # so that all jobs that run side by side have as many
        jobs = [(e, t) for e in zoo.find(given.models, given.names) for t in given.threads if sizes[t] == size]
        if given.only_judge:
            jobs = [(entry, threads) for entry, threads in jobs if (entry.name, threads) in records]
        with pinned(shares(max(1, len(os.sched_getaffinity(0)) // size))) as pool:
            waiting = []
            for entry, threads in jobs:
                known = records.get((entry.name, threads), {}) | ({"times": {}} if given.only_judge else {})
                waiting.append(pool.submit(job, entry, threads, task, known))
            for done in as_completed(waiting):
                record = done.result()
                records[record["name"], record["threads"]] = record
                results.write_text(json.dumps(list(records.values()), indent=1))
                walls = ", ".join(f"{name} {facts['wall']:.0f} s" for name, facts in record["columns"].items())
                print(
                    f"{record['name']} at {record['threads']} threads: {walls} {record.get('unjudged', '')}", flush=True
                )


if __name__ == "__main__":
    main()
