"""What `tune` ships at each limit on accuracy, judged on labelled samples that it has not seen.

For each model of labels.py (NAME/model.onnx, calib.npz, labelled.npz): `quantize`, and `tune` at each limit, at one
thread. 'time' is the file's to float's as the proof told it; 'told' the output SQNR and the share of equal first
choices on the samples of the run, 'found' the same on the labelled ones; then the metric, with the points that are lost
and their interval (each end one-sided 95 %).
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import numpy as np
import zoo
from cores import pinned, shares
from labels import judged, outputs

from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Runner
from qdqtune.tuning.folder import FINAL
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings

NONE: Mapping[str, Any] = {"min_sqnr": None, "min_agreement": None}
LIMITS: Mapping[str, Mapping[str, Any]] = {
    "tune": {},
    "tune, 30 dB": {"min_sqnr": 30.0},
    "tune, 99.5 % alike": {"min_agreement": 0.995},
    "tune, 12 dB, 90 % alike": {"min_sqnr": 12.0, "min_agreement": 0.9},
    "tune, no limit": NONE,
}
ENGINE = EngineSpec("onnxruntime", {"threads": 1})
COLUMNS = ("model", "file", "time", "pairs", "told", "found", "metric", "points lost")


def rows(entry: zoo.Entry, folder: Path, seconds: float | None) -> list[list[str]]:
    """The lines of a model."""
    with np.load(entry.path.parent / "labelled.npz") as arrays:
        data = dict(arrays)
    labels = data.pop("labels")
    samples = [{name: array[i : i + 1] for name, array in data.items()} for i in range(len(labels))]
    folder.mkdir(parents=True, exist_ok=True)
    quantized = folder / "quantized.onnx"
    quantize(QuantizeOptions(entry.path, output=quantized, calibration_data=entry.data))
    known: dict[str, tuple[Path, dict[str, Any]]] = {"quantize": (quantized, {})}
    for way, limits in LIMITS.items():
        out = folder / way.replace(" ", "_")
        if not (out / "summary.json").exists():
            tune(Settings(
                entry.path, output_dir=out, engine=ENGINE, calibration_data=entry.data, threads=(1,),
                time_budget=seconds, **limits,
            ))  # fmt: skip
        known[way] = out / FINAL, json.loads((out / "summary.json").read_text())
    found = []
    with Runner(ENGINE, execution=Execution(300), log_dir=folder) as runner:
        reference = outputs(entry.path, runner, samples)
        for way, (file, summary) in known.items():
            seen = judged(reference, outputs(file, runner, samples), labels)
            found.append([
                entry.name, way, interval(summary), str(summary.get("pairs", "")),
                accuracy(summary.get("output_sqnr_db"), (summary.get("output_accuracy") or {}).get("top1")),
                accuracy(seen["sqnr"], seen["agreement"]),
                f"{100 * (seen['before'] - seen['loss'] / 100):.2f} of {100 * seen['before']:.2f}",
                f"{seen['loss']:.2f} [{seen['low']:.2f}, {seen['high']:.2f}]",
            ])  # fmt: skip
    return found


def interval(summary: Mapping[str, Any]) -> str:
    """The ratio to float that a run tells."""
    if summary.get("ratio") is None:
        return ""
    low, high = summary["ratio_low"], summary["ratio_high"]
    return f"{summary['ratio']:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")


def accuracy(db: float | None, equal: float | None) -> str:
    """Decibels and a share."""
    return ", ".join([*([] if db is None else [f"{db:.1f} dB"]), *([] if equal is None else [f"{equal:.2%}"])])


def main() -> None:
    """Print a table; the lines of a model as soon as they are known."""
    arguments = zoo.parser(__doc__, ())
    arguments.add_argument("--keep", type=Path, required=True, help="folder for the runs; a run that is there stays")
    arguments.add_argument("--seconds", type=float, help="time budget of each run")
    arguments.add_argument("--jobs", type=int, default=1, help="models side by side, each on its share of the cores")
    given: Namespace = arguments.parse_args()
    zoo.print_machine()
    table = []
    with pinned(shares(given.jobs)) as pool:
        jobs = [pool.submit(rows, e, given.keep / e.name, given.seconds) for e in zoo.find(given.models, given.names)]
        for done in as_completed(jobs):
            table += done.result()
            print(*("  ".join(row) for row in done.result()), sep="\n", flush=True)
    zoo.print_table(COLUMNS, table)


if __name__ == "__main__":
    main()
