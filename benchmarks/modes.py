"""Every mode of `tune` on every model: one table. `minute.py` compares `tune` with the usual quantizers.

Each model is tuned by each mode, each run with its own budget of builds; then all finished files meet in interleaved
rounds on two fresh builds of each: the float model against every other file, and the first mode against the others.
The last column, 'cut/best' where cut is the first mode, is its file's ratio to the fastest other one, float included.

Runs are kept in the folder `--keep` and not repeated: stop it at any time, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zoo
from cores import pinned, shares

from qdqtune.calibration.samples import open_samples
from qdqtune.commands.compare import Row, compare_files
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Runner
from qdqtune.errors import QdqtuneError
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.timing.ratios import Plan, Ratio
from qdqtune.tuning.loop import tune
from qdqtune.tuning.options import Mode
from qdqtune.tuning.settings import EFFORTS, Settings
from qdqtune.types import Sample

Facts = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What to do with each model. `limit` is the time budget of one search in seconds, `rounds` those of each pair."""

    keep: Path
    engine: EngineSpec
    modes: tuple[Mode, ...]
    limit: float | None
    samples: int
    rounds: int


def run(entry: zoo.Entry, task: Task) -> Facts:
    """Tune one model by every mode, then pair the files; 'failed' says why that gave nothing."""
    logging.getLogger().setLevel(logging.ERROR)  # quantize_static's advice
    folder = task.keep / f"{task.engine.name}_{entry.name}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        model = load(entry.path, fix_inputs=entry.fixed)
        samples = open_samples(entry.data, model, limit=task.samples, fixed=entry.fixed)
        plain = folder / "float.onnx"
        save(model, plain)
        columns: dict[str, Facts] = {mode: tuned(entry, task, mode, folder / mode) for mode in task.modes}
        with Runner(task.engine, execution=Execution(300), log_dir=folder / "logs") as runner:
            files = {name: Path(facts["file"]) for name, facts in columns.items()}
            seen = samples.first(4)
            for name, row in paired(plain, files, runner, seen, task.rounds):
                columns[name] |= _facts(row)
            first = task.modes[0]
            others = {name: file for name, file in files.items() if name != first}
            meetings = [paired(file, {first: files[first]}, runner, seen, task.rounds) for file in others.values()]
            ratios = {name: _facts(row) for name, ((_, row),) in zip(others, meetings, strict=True)}
    except QdqtuneError as error:
        return {"name": entry.name, "failed": f"{type(error).__name__}: {error}"}
    return {"name": entry.name, "columns": columns, "others": ratios}


def tuned(entry: zoo.Entry, task: Task, mode: Mode, folder: Path) -> Facts:
    """What one mode ships, and what it took."""
    settings = Settings(
        entry.path, output_dir=folder, engine=task.engine, mode=mode, builds=EFFORTS["default"].builds[mode],
        time_budget=task.limit, fix_inputs=entry.fixed, calibration_data=entry.data, calibration_samples=task.samples,
        cut_seed=False, threads=(int(task.engine.options["threads"]),),
    )  # fmt: skip
    summary = folder / "summary.json"
    facts = json.loads(summary.read_text()) if summary.exists() else tune(settings).summary
    names = ("builds", "proof_builds", "seconds", "ratio", "pairs", "shipped")
    return {name: facts[name] for name in names} | {"file": str(folder / "optimized_final.onnx")}


def paired(
    first: Path, others: Mapping[str, Path], runner: Runner, samples: Sequence[Sample], rounds: int
) -> list[tuple[str, Row]]:
    """Each of the other files against the first, by name."""
    rows = compare_files([first, *others.values()], runner, samples, Plan((rounds,), 0.001))
    return list(zip(others, rows, strict=True))


def _facts(row: Row) -> Facts:
    if row.ratio is None:
        return {"failed": row.reason}
    return {"ms": row.ms, "float_ms": row.first_ms, "sqnr_db": row.sqnr_db,
            "found": [row.ratio.median, row.ratio.low, row.ratio.high]}  # fmt: skip


def cells(facts: Facts, columns: Sequence[str]) -> list[str]:
    """One line of the table."""
    known = facts["columns"]
    milliseconds = next((c["float_ms"] for c in known.values() if "float_ms" in c), None)
    row = [facts["name"], f"{milliseconds:.2f}" if milliseconds else ""]
    for name in columns:
        column = known.get(name, {"failed": ""})
        if "found" not in column:
            row.append(column.get("failed", "")[:40])
            continue
        cost = f"; {column['builds']}+{column['proof_builds']} b" if "builds" in column else ""
        noise = "" if column["sqnr_db"] is None else f"; {column['sqnr_db']:.0f} dB"
        row.append(f"{Ratio(*column['found'])}{cost}; {column['seconds']:.0f} s{noise}")
    best = against_best(facts)
    return [*row, str(best) if best else ""]


def against_best(facts: Facts) -> Ratio | None:
    """The first mode's ratio to the fastest other column."""
    own = next(iter(facts["columns"].values()))["found"]
    ratios = [Ratio(*own), *(Ratio(*f["found"]) for f in facts["others"].values() if "found" in f)]
    return max(ratios, key=lambda r: r.median, default=None)


def main() -> None:
    arguments = zoo.parser(__doc__, ())
    arguments.add_argument("--keep", type=Path, required=True, help="folder of the runs")
    arguments.add_argument("--modes", nargs="+", default=["cut", "region"], help="modes of tune, the first in question")
    arguments.add_argument("--engine", default="onnxruntime", help="engine (%(default)s)")
    arguments.add_argument("--threads", type=int, default=1, help="its threads (%(default)s)")
    arguments.add_argument("--time-budget", type=float, help="seconds of search per model and mode")
    arguments.add_argument("--samples", type=int, default=8, help="calibration samples (%(default)s)")
    arguments.add_argument("--rounds", type=int, default=24, help="rounds of each pair of builds (%(default)s)")
    arguments.add_argument("--jobs", type=int, default=1, help="models at a time, on cores of their own (%(default)s)")
    arguments.add_argument("--json", type=Path, help="write all figures to this file")
    given = arguments.parse_args()
    task = Task(given.keep.absolute(), EngineSpec(given.engine, {"threads": given.threads}), tuple(given.modes),
                given.time_budget, given.samples, given.rounds)  # fmt: skip
    zoo.print_machine()
    results = sorted(finished(given, task), key=lambda facts: str(facts["name"]))
    columns = list(task.modes)
    good = [facts for facts in results if "failed" not in facts]
    zoo.print_table(["model", "float ms", *columns, f"{task.modes[0]}/best"], [cells(f, columns) for f in good])
    if good:
        print_means(good, columns)


def finished(given: argparse.Namespace, task: Task) -> Iterable[Facts]:
    """The facts of each model, as they come."""
    results: list[Facts] = []
    with pinned(shares(given.jobs)) as pool:
        for done in as_completed([pool.submit(run, e, task) for e in zoo.find(given.models, given.names)]):
            facts = done.result()
            print(facts.get("failed") or "  ".join(cells(facts, task.modes)), flush=True)
            results.append(facts)
            if given.json:
                given.json.write_text(json.dumps(results, indent=1))
            yield facts


def print_means(good: Sequence[Facts], columns: Sequence[str]) -> None:
    def mean(values: Sequence[float]) -> float:
        return float(np.exp(np.mean(np.log(values))))

    for name in columns:
        if found := [f["columns"][name]["found"][0] for f in good if "found" in f["columns"].get(name, {})]:
            print(f"{name}/float, geometric mean of {len(found)}: {mean(found):.3f}")
    for name in (c for c in columns if c != "region" and "region" in columns and "builds" in good[0]["columns"][c]):
        pairs = [(f["columns"][name], f["columns"]["region"]) for f in good]
        latency = mean([ours["found"][0] / theirs["found"][0] for ours, theirs in pairs])
        share, built = (mean([ours[k] / theirs[k] for ours, theirs in pairs]) for k in ("seconds", "builds"))
        print(f"{name}/region, geometric means: latency {latency:.3f}, wall time {share:.3f}, builds {built:.3f}")


if __name__ == "__main__":
    main()
