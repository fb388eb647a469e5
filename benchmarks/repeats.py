"""The same search several times: how far what it ships differs from run to run, and what prices of the first save.

Each model is tuned in runs that differ in their seed alone, at one thread and for latency alone, and once more with the
prices that the first run has left, not with what it shipped. All files that differ, and that of quantize_static, then
meet the float model on fresh builds in interleaved rounds. 'spread' is the slowest over the fastest of the runs' files,
'best' the fastest of all files of the model, 'error' the standard error of one ratio over builds.

    python benchmarks/repeats.py --models DIR --keep DIR --jobs 8
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import cores
import numpy as np
import zoo
from quantizers import write_static

from qdqtune import Settings
from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.scales import Calibration
from qdqtune.commands.compare import Row, compare_files
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.runner import Runner
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.timing.ratios import Plan, ratio
from qdqtune.tuning.folder import FINAL, PLACEMENT
from qdqtune.tuning.loop import tune

COLUMNS = (
    "model", "float, ms", "median", "spread", "builds", "s", "with prices", "builds", "s", "static", "best",
    "median to best", "error",
)  # fmt: skip

ENGINE = EngineSpec("onnxruntime", {"threads": 1})
SAMPLES = 8
"""That quantize_static calibrates on."""


@dataclass(frozen=True)
class Run:
    """One search; `seconds` of time budget, None for as long as it takes."""

    entry: zoo.Entry
    folder: Path
    seed: int
    seconds: float | None
    prices: Path

    def search(self) -> None:
        """Search, unless it was done before; one line of what came of it."""
        if not (self.folder / FINAL).exists():
            tune(Settings(
                self.entry.path, output_dir=self.folder, engine=ENGINE, calibration_data=self.entry.data,
                fix_inputs=self.entry.fixed,
                calibration=Calibration("minmax", bias_correction=False), min_sqnr=None, deploy_threads=(1,),
                seed=self.seed, time_budget=self.seconds, price_cache=self.prices,
            ))  # fmt: skip
        told = self.summary
        print(f"{self.entry.name} {self.folder.name}: {told['ratio']:.3f}, {self.builds:.0f} builds, "
              f"{told['seconds']:.0f} s", flush=True)  # fmt: skip

    @cached_property
    def summary(self) -> Mapping[str, float]:
        """What it told."""
        found: Mapping[str, float] = json.loads((self.folder / "summary.json").read_text())
        return found

    @property
    def builds(self) -> float:
        """Of the search and its proof."""
        return self.summary["builds"] + self.summary["proof_builds"]

    @property
    def placement(self) -> str:
        """What ships, in text."""
        return (self.folder / PLACEMENT).read_text()


def without_placements(prices: Path) -> Path:
    """A copy of prices that does not know which model ended with which placement."""
    content = json.loads(prices.read_text())
    for section in content["sections"]:
        section["models"] = {}
    copy = prices.with_suffix(".alone.json")
    copy.write_text(json.dumps(content))
    return copy


def met(entry: zoo.Entry, runs: Sequence[Run], rounds: int, builds: int) -> list[str]:
    """The files of all runs of a model against float, as a row of the table."""
    folder, plain = runs[0].folder.parent, load(entry.path, fix_inputs=entry.fixed)
    floats, static = folder / "float.onnx", folder / "static.onnx"
    save(plain, floats)
    samples = prepare(plain, Data(entry.data, SAMPLES), fixed=entry.fixed).samples.first(SAMPLES)
    write_static(plain, samples, numeric_format("onnxruntime", "int8"), static)
    files = {run.placement: run.folder / FINAL for run in runs} | {"static": static}
    plan = Plan((rounds,), 0.01)
    with Runner(ENGINE, execution=Execution(300), log_dir=folder / "logs") as runner:
        found = compare_files([floats, *files.values()], runner, samples[:1], plan, builds=builds)
    rows: dict[str, Row] = dict(zip(files, found, strict=True))
    if failed := next((row for row in found if row.ratio is None), None):
        return [entry.name, *[""] * (len(COLUMNS) - 2), failed.reason[:60]]
    medians = {key: row.ratio.median for key, row in rows.items() if row.ratio is not None}
    (last,) = (run for run in runs if run.folder.name == "prices")
    others = [run for run in runs if run is not last]
    alike = [medians[run.placement] for run in others]
    best, median = min([1.0, *medians.values()]), float(np.median(alike))
    errors = [np.std(np.log([ratio(m, plan).median for m in row.rounds]), ddof=1) / builds**0.5 for row in found]
    return [
        entry.name, f"{found[0].first_ms:.2f}", f"{median:.3f}", f"{max(alike) / min(alike):.3f}",
        f"{np.median([run.builds for run in others]):.0f}",
        f"{np.median([run.summary['seconds'] for run in others]):.0f}", f"{medians[last.placement]:.3f}",
        f"{last.builds:.0f}", f"{last.summary['seconds']:.0f}", f"{medians['static']:.3f}", f"{best:.3f}",
        f"{median / best:.3f}", f"{100 * np.mean(errors):.1f} %",
    ]  # fmt: skip


def runs_of(entry: zoo.Entry, given: argparse.Namespace, seed: int) -> list[Run]:
    """The run with a seed; after the first, that which begins with its prices."""
    folder = given.keep / entry.name
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(entry, folder / f"run{seed}", seed, given.seconds, folder / f"prices{seed}.json")
    run.search()
    if seed:
        return [run]
    after = Run(entry, folder / "prices", given.runs, given.seconds, without_placements(run.prices))
    after.search()
    return [run, after]


def main() -> None:
    parser = zoo.parser(__doc__, ())
    parser.add_argument("--keep", type=Path, required=True, help="folder for the runs; a run that is there stays")
    parser.add_argument("--runs", type=int, default=5, help="of each model (%(default)s)")
    parser.add_argument("--seconds", type=float, help="time budget of each run")
    parser.add_argument("--builds", type=int, default=5, help="of each file in the end (%(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="of each pair of builds (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each on its share of the cores")
    given = parser.parse_args(namespace=argparse.Namespace())
    zoo.print_machine()
    entries = {entry.name: entry for entry in zoo.find(given.models, given.names)}
    with cores.pinned(cores.shares(given.jobs)) as pool:
        searches = {
            pool.submit(runs_of, entry, given, seed): name
            for name, entry in entries.items() for seed in range(given.runs)
        }  # fmt: skip
        done: dict[str, list[Run]] = {name: [] for name in entries}
        meetings = []
        for search in as_completed(searches):
            name = searches[search]
            done[name] += search.result()
            if len(done[name]) == given.runs + 1:
                meetings.append(pool.submit(met, entries[name], done[name], given.rounds, given.builds))
        rows = []
        for meeting in as_completed(meetings):
            rows.append(meeting.result())
            print("  ".join(rows[-1]), flush=True)
    zoo.print_table(COLUMNS, sorted(rows, key=lambda row: list(entries).index(row[0])))
    for column in (2, 3, 9, 11):
        found = [float(row[column]) for row in rows if row[column]]
        print(f"geometric mean of {COLUMNS[column]}: {np.exp(np.mean(np.log(found))):.3f} over {len(found)}")


if __name__ == "__main__":
    main()
