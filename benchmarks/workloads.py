"""One file for calls of several shapes: tuned for their mix, and for each alone, all timed on the mix and on each.

    python benchmarks/workloads.py model.onnx decode.npz:0.8 prefill.npz:0.2 [folder] [seconds]

Cells are the median ratio of time to the float model with its interval, and the output SQNR in dB over all workloads.
`seconds` bound each of the searches. A file that is there already is not tuned again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.commands.compare import Row, compare_files
from qdqtune.engines import EngineSpec
from qdqtune.engines.runner import Runner
from qdqtune.graph.loading import load
from qdqtune.measurement.timing import Plan, Ratio
from qdqtune.tuning.folder import FINAL
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings

ENGINE = EngineSpec("onnxruntime", {"threads": 1})


def workload(text: str) -> WorkloadFile:
    """What FILE:WEIGHT names."""
    file, _, weight = text.rpartition(":")
    return WorkloadFile(Path(file), float(weight))


def tuned(model: Path, mix: list[WorkloadFile], folder: Path, seconds: float) -> Path:
    """The file that ships for a mix."""
    settings = Settings(
        model, folder, ENGINE, workloads=tuple(mix), precision=None, time_budget=seconds, deploy_threads=(1,)
    )
    if not (folder / FINAL).exists():
        tune(settings)
    return folder / FINAL


def cells(row: Row) -> list[str]:
    """Ratios on the mix and on each workload, and the SQNR."""
    if row.ratio is None:
        return [f"fails: {row.reason[:60]}"]
    exact = "exact" if row.sqnr_db is None else f"{row.sqnr_db:.1f} dB"
    return [*(cell(ratio) for ratio in (row.ratio, *(part.ratio for part in row.workloads))), exact]


def cell(ratio: Ratio) -> str:
    """Median and interval."""
    return str(ratio)


def main(model: Path, mix: list[WorkloadFile], folder: Path, seconds: float) -> None:
    """Tune for the mix and for each workload, and let all files meet the float model."""
    files = {"the mix": tuned(model, mix, folder / "mix", seconds)}
    files |= {f"{one.name} alone": tuned(model, [one], folder / one.name, seconds) for one in mix}
    prepared = prepare(load(model), Data(workloads=mix))
    shown = [["tuned for", "the mix", *(w.name for w in prepared.workloads), "SQNR"]]
    with Runner(ENGINE, log_dir=folder / "logs") as runner:
        samples = prepared.samples.first(len(mix))
        rows = compare_files(
            [model, *files.values()], runner, samples, Plan((12, 24)), mix=prepared.workloads, builds=2
        )
    shown += [[name, *cells(row)] for name, row in zip(files, rows, strict=True)]
    for line in shown:
        print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    named = [workload(text) for text in given[1:] if text.rpartition(":")[1]]
    rest = [text for text in given[1:] if not text.rpartition(":")[1]]
    main(Path(given[0]), named, Path(rest[0] if rest else "workloads"), float(rest[1]) if len(rest) > 1 else 600.0)
