"""How far a run of `tune` ends from the best that many runs find, run to run, and why.

Each model is tuned several times: with the default and other seeds, with more builds, by other modes. All finished
files meet that of the first run in interleaved rounds on two fresh builds of each. 'behind' is the time of the first
run's file over that of the best, 'spread' the slowest over the fastest of the runs that differ in their seed alone;
'found at' is the candidate that shipped, of all that the first run built. Where the first run is behind by more than
`--least`, the last column says why:

  proof       its search took the best one's placement, or one that it held for faster than what shipped
  acceptance  it built the best one's placement and did not take it
  budget      its prices foretell the best one to be faster than what shipped, and it never built it
  prices      they foretell it to be slower; behind that the units that this hangs on, the largest difference first
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cores
import numpy as np
import zoo

from qdqtune import Settings
from qdqtune.calibration.samples import open_samples
from qdqtune.commands.compare import compare_files
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Runner
from qdqtune.graph.loading import load
from qdqtune.search import best_of
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.unit_decisions import decision_of
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from qdqtune.tuning.modes import cut_search
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.result import Result
from qdqtune.tuning.rounding_noise import binding_noise_of
from qdqtune.tuning.run import open_run, prepared, written_once
from qdqtune.tuning.settings import EFFORTS
from qdqtune.types import Placement

RUNS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "seed 1": {"seed": 1},
    "seed 2": {"seed": 2},
    "long": {"builds": 30},
    "region": {"mode": "region", "builds": EFFORTS["default"].builds["region"]},
    "subgraph": {"mode": "subgraph", "builds": EFFORTS["default"].builds["subgraph"]},
}
"""What is changed in each run. Those whose names begin with 'seed' are the default's equals."""

COLUMNS = ("model", "float ms", "to float", "dB", "found at", "behind", "of run", "spread", "why")
TERMS = 3


def row(entry: zoo.Entry, folder: Path, names: Sequence[str], rounds: int, least: float) -> list[str]:
    """The numbers of one model, in the order of `COLUMNS`."""
    usual = Settings(
        entry.path, output_dir=folder, engine=EngineSpec("onnxruntime", {"threads": 1}), calibration_data=entry.data,
        fix_inputs=entry.fixed,
    )  # fmt: skip
    settings = {name: replace(usual, output_dir=folder / name.replace(" ", "_"), **RUNS[name]) for name in names}
    results = {name: tune(each) for name, each in settings.items()}
    files = {name: each.output_dir / "optimized_final.onnx" for name, each in settings.items()}
    model = load(entry.path, fix_inputs=entry.fixed)
    samples = open_samples(entry.data, model, limit=1, fixed=entry.fixed).first(1)
    with Runner(usual.engine, execution=Execution(300), log_dir=folder / "logs") as runner:
        rows = compare_files(list(files.values()), runner, samples, Plan((rounds,), 0.001))
    found = [row.ratio.median for row in rows if row.ratio is not None]
    if len(found) < len(names) - 1:
        return [entry.name, *[""] * (len(COLUMNS) - 2), next(row.reason for row in rows if row.ratio is None)]
    ratios = dict(zip(names, [1.0, *found], strict=True))
    best = min(ratios, key=ratios.__getitem__)
    equals = [ratio for name, ratio in ratios.items() if name == names[0] or name.startswith("seed")]
    first = results[names[0]]
    is_behind = 1 / ratios[best] > 1 + least
    reason = why(settings[names[0]], first, results[best].placement) if is_behind else ""
    number = next((t.number for t in first.history if t.placement == first.placement), 0)
    db = first.summary["output_sqnr_db"]
    return [
        entry.name, f"{first.summary['baseline_ms']:.2f}", f"{first.summary['ratio']:.3f}",
        "" if db is None else f"{db:.1f}", f"{number} of {len(first.history)}", f"{1 / ratios[best]:.3f}", best,
        f"{max(equals) / min(equals):.3f}", reason,
    ]  # fmt: skip


def why(settings: Settings, result: Result, best: Placement) -> str:
    """Why a run did not end at the best placement."""
    if best in {t.placement for t in result.history if t.accepted}:
        return "proof"
    if best in {t.placement for t in result.history}:
        return "acceptance"
    if best_of(result.history) != result.placement:
        return "proof"
    with (
        prepared(settings, Silent()) as ready,
        written_once(ready) as constants,
        open_run(ready, constants) as run,
    ):
        search = cut_search(run, binding_noise_of(run))
        if search is None:
            return "budget"
        costs = search.costs(result.history)
    ours, theirs = decision_of(costs, result.placement), decision_of(costs, best)
    gain = (costs.total(theirs) - costs.total(ours)) / costs.float_ms
    if gain < 0:
        return f"budget ({gain:+.1%})"
    return f"prices ({gain:+.1%}): " + ", ".join(terms(costs, result.placement, best))


def terms(costs: Costs, ours: Placement, theirs: Placement) -> Iterator[str]:
    """The units that two placements decide otherwise, with what the second costs more there by the prices."""
    a, b = decision_of(costs, ours), decision_of(costs, theirs)
    parts = costs.partition
    changed = [u for u in parts.units if (u.number in a.quantized) != (u.number in b.quantized)]
    more = {u: costs.of_unit(u, b) - costs.of_unit(u, a) for u in changed}
    for unit in sorted(changed, key=lambda u: -abs(more[u]))[:TERMS]:
        yield f"{parts.model.nodes[unit.nodes[0]].op} {more[unit] / costs.float_ms:+.1%}"


def main() -> None:
    parser = zoo.parser(__doc__, ())
    parser.add_argument("--keep", type=Path, required=True, help="folder for the runs; a run that is there goes on")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS, help="the first is the one in question")
    parser.add_argument("--rounds", type=int, default=48, help="rounds of each pair of builds (%(default)s)")
    parser.add_argument("--least", type=float, default=0.02, help="what is behind by less is as good (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="models side by side, each on its share of the cores")
    given = parser.parse_args(namespace=argparse.Namespace())
    zoo.print_machine()
    rows = []
    with cores.pinned(cores.shares(given.jobs)) as pool:
        waiting = [
            pool.submit(row, entry, given.keep / entry.name, given.runs, given.rounds, given.least)
            for entry in zoo.find(given.models, given.names)
        ]
        for done in waiting:
            rows.append(done.result())
            print("  ".join(rows[-1]), flush=True)
    zoo.print_table(COLUMNS, rows)
    for column, name in ((5, "behind the best"), (7, "spread over seeds")):
        found = [float(row[column]) for row in rows if row[column]]
        if found:
            print(f"{name}: geometric mean {np.exp(np.mean(np.log(found))):.3f}, largest {max(found):.3f}")


if __name__ == "__main__":
    main()
