"""Speed under the floor on accuracy, and the front of latency and accuracy.

For each model: `tune` with its defaults (an output SQNR of 20 dB), the same by another version (`--before SRC`, with
--min-sqnr 20), and `tune --front` on the same state file: its seconds are what it took more. Beside the front stands
the usual way to such points: the placement of the static quantizer without the tensors that are the most sensitive
alone, at six counts, each measured against float; a point of it is beaten if one of the front is at least as fast and
as exact (within 1 % and 0.3 dB). 'foretold' are the 90th percentile and the largest of |simulated - measured| output
SQNR in dB over all candidates and the usual points, none of which the simulation has seen the engine run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import cores
import numpy as np
import zoo

from qdqtune import Settings
from qdqtune.engines import EngineSpec
from qdqtune.placement import start_placements
from qdqtune.placement.possible import consistent
from qdqtune.search.costs.output_noise import Noise
from qdqtune.timing.ratios import judge
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.records import NoiseRecord, TrialRecord
from qdqtune.tuning.rounding_noise import predicted_accuracy
from qdqtune.tuning.run import Run, open_run, prepared, written_once
from qdqtune.tuning.settings import FRONT_BUILDS
from qdqtune.tuning.store import read_journal
from qdqtune.types import Placement, Proposal

SHARES = (0.0, 0.03, 0.07, 0.15, 0.3, 0.5)
"""Shares of the tensors that the usual way leaves in float."""

COLUMNS = (
    "model", "before", "at 20 dB", "dB", "builds", "s", "front", "points", "builds", "s", "usual beaten",
    "foretold, dB",
)  # fmt: skip


def tuned(entry: zoo.Entry, folder: Path, source: Path | None, *options: str) -> dict[str, Any]:
    """The summary of a run of the command line, of another version's if its source is given."""
    command = [sys.executable, "-m", "qdqtune", "tune", str(entry.path), "-o", str(folder), "-q", *options]
    command += ["--calibration-data", entry.data] if entry.data else []
    command += [word for name, value in entry.fixed.items() for word in ("--fix-input", f"{name}={value}")]
    env = os.environ | ({"PYTHONPATH": str(source)} if source else {})
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if not (folder / "summary.json").exists():
        return {"error": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def usual(run: Run) -> list[tuple[float, float]]:
    """(ratio to float, SQNR) of the static placement without its most sensitive tensors."""
    alone = next(record.alone for record in run.store.of(NoiseRecord))
    noise = Noise(run.subject.shaped, alone)
    whole = start_placements.placements(run.subject.shaped, run.subject.possible)["static"]
    loudest = sorted({e.tensor for e in whole}, key=lambda t: -alone.get(noise.value(t), 0.0))
    proposals = []
    for share in SHARES:
        left_out = set(loudest[: int(share * len(loudest))])
        edges = Placement.of(e for e in whole if e.tensor not in left_out)
        proposals.append(Proposal("usual", consistent(run.subject.shaped, edges)))
    points = []
    for trial, _ in run.bench.measured(1000, proposals, Placement()):
        ratio = judge(trial, run.settings.plan)
        if ratio is not None and trial.sqnr_db is not None:
            points.append((ratio.median, trial.sqnr_db))
    return points


def errors(run: Run, states: list[Path]) -> list[float]:
    """|simulated - measured| SQNR in dB of the candidates in some state files."""
    found = []
    journals = filter(None, map(read_journal, states))
    for record in (record for journal in journals for record in journal.of(TrialRecord)):
        if record.accuracy.sqnr_db is not None:
            known = predicted_accuracy(run, record.placement.placement)
            if known is not None and known.sqnr_db is not None:
                found.append(abs(known.sqnr_db - record.accuracy.sqnr_db))
    return found


def row(entry: zoo.Entry, folder: Path, before: Path | None, options: Sequence[str]) -> list[str]:
    """All of one model."""
    old = tuned(entry, folder / "before", before, "--min-sqnr", "20") if before else None
    floor = tuned(entry, folder / "tuned", None, *options)
    cells = [entry.name, _ratio(old), _ratio(floor)]
    print(*cells, floor.get("output_sqnr_db"), floor.get("error", ""), flush=True)
    front = tuned(entry, folder / "tuned", None, "--front", *options)
    if "error" in floor or "error" in front:
        return [*cells, *[""] * (len(COLUMNS) - 4), str(floor.get("error") or front.get("error"))]
    rows = front["front"]
    notes = json.loads((folder / "tuned" / "run.json").read_text())["notes"]
    print(entry.name, *(f"{r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}] {r['name']}" for r in rows),
          *(note for note in notes if note.startswith("the front has")), sep="; ", flush=True)  # fmt: skip
    settings = Settings(
        entry.path, output_dir=folder / "tuned",
        engine=EngineSpec("onnxruntime", {"threads": 1}), calibration_data=entry.data,
        fix_inputs=entry.fixed, front=True, builds=FRONT_BUILDS,
    )  # fmt: skip
    with (
        prepared(settings, Silent()) as ready,
        written_once(ready) as constants,
        open_run(ready, constants) as run,
    ):
        beside = usual(run)
        missed = errors(run, [settings.state])
    beaten = sum(
        any(r["ratio"] <= 1.01 * ratio and (r["sqnr_db"] is None or r["sqnr_db"] >= db - 0.3) for r in rows)
        for ratio, db in beside if ratio < 1
    )  # fmt: skip
    exact = "exact" if floor["output_sqnr_db"] is None else f"{floor['output_sqnr_db']:.1f}"
    return [
        *cells, exact, f"{floor['builds']}+{floor['proof_builds']}", f"{floor['seconds']:.0f}",
        ", ".join(f"{r['ratio']:.2f} at {r['name']}" for r in rows), str(len(rows)),
        f"{front['builds']}+{front['proof_builds']}", f"{front['seconds'] - floor['seconds']:.0f}",
        f"{beaten} of {sum(ratio < 1 for ratio, _ in beside)}",
        f"{np.quantile(missed, 0.9):.2f}, {max(missed):.2f} of {len(missed)}" if missed else "",
    ]  # fmt: skip


def _ratio(summary: dict[str, Any] | None) -> str:
    if summary is None or "error" in summary:
        return "" if summary is None else "failed"
    if summary["ratio_low"] is None:
        return "1 (float)"
    return f"{summary['ratio']:.3f} [{summary['ratio_low']:.3f}, {summary['ratio_high']:.3f}]"


def main() -> None:
    parser = zoo.parser(__doc__, ())
    parser.add_argument("--keep", type=Path, required=True, help="folder for the runs; a run that is there goes on")
    parser.add_argument("--before", type=Path, help="the src folder of another version")
    parser.add_argument("--jobs", type=int, default=1, help="models side by side, each on its share of the cores")
    parser.add_argument("--deploy-threads", help="see `tune`")
    given = parser.parse_args(namespace=argparse.Namespace())
    options = ["--deploy-threads", given.deploy_threads] if given.deploy_threads else []
    zoo.print_machine()
    entries, rows = zoo.find(given.models, given.names), []
    with cores.pinned(cores.shares(given.jobs)) as pool:
        waiting = [pool.submit(row, entry, given.keep / entry.name, given.before, options) for entry in entries]
        for done in as_completed(waiting):
            rows.append(done.result())
            print("  ".join(rows[-1]), flush=True)
    zoo.print_table(COLUMNS, rows)
    for column, name in ((1, "before"), (2, "at 20 dB")):
        ratios = [float(r[column].split()[0]) for r in rows if r[column] and r[column][0].isdigit()]
        if ratios:
            print(f"geometric mean {name}: {np.exp(np.mean(np.log(ratios))):.3f} over {len(ratios)}")


if __name__ == "__main__":
    main()
