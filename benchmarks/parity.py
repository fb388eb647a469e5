"""Whether the inserter is as good as ONNX Runtime's: quantize_static's placement, read back and inserted by qdqtune.

Both files have the same pairs, calibrated on the same samples. They are paired on the engine (ratio ours/theirs with
its interval, two fresh builds of each), and both outputs are compared with the float model's. Parity is a ratio of at
most 1.02 ('unclear': above, but within the interval) and at most 0.5 dB lost. Random weights amplify rounding: scales
that differ by 1e-6 can move the output by half a dB, so use some samples.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import zoo
from quantizers import write_static

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.samples import open_samples
from qdqtune.commands.compare import compare_files
from qdqtune.engines.runner import Runner
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import insert
from qdqtune.placement.reading import read_placement
from qdqtune.timing.ratios import Plan, Ratio

NAMES = ("resnet50", "mobilenet_v2", "efficientnet_b0", "deit_small", "convnext_tiny")
COLUMNS = ("model", "edges", "unmatched", "float ms", "theirs ms", "ours ms", "ours/theirs", "theirs dB", "ours dB",
           "as fast", "as accurate")  # fmt: skip
SLOWER, LESS_ACCURATE = 1.02, 0.5
"""Ratio of latencies and dB of output SQNR that count as parity."""


def row(entry: zoo.Entry, runner: Runner, folder: Path, samples: int, rounds: int) -> list[str]:
    """The numbers of one model, in the order of `COLUMNS`."""
    numbers = runner.numeric_format("int8")
    model = load(entry.path, fix_inputs=entry.fixed)
    data = open_samples(entry.data, model, limit=samples, fixed=entry.fixed)
    plain, theirs, ours = (folder / f"{name}.onnx" for name in ("float", "theirs", "ours"))
    save(model, plain)
    write_static(model, data, numbers, theirs)
    reading = read_placement(model, load(theirs))
    save(insert(model, reading.placement, calibrate(model, data), numbers), ours)
    seen = list(data)
    by_theirs, by_ours = compare_files([plain, theirs, ours], runner, seen, Plan((12,), 0.01), builds=1)
    parity = compare_files([theirs, ours], runner, seen[:1], Plan((rounds,), 0.01))[0]
    if parity.ratio is None or by_theirs.ms is None or by_ours.ms is None or by_ours.first_ms is None:
        reason = by_theirs.reason or by_ours.reason or parity.reason
        return [entry.name, str(len(reading.placement)), str(len(reading.unmatched)), reason, *[""] * 7]
    lost = (by_theirs.sqnr_db or 0.0) - (by_ours.sqnr_db or 0.0)
    return [
        entry.name, str(len(reading.placement)), str(len(reading.unmatched)), f"{by_ours.first_ms:.2f}",
        f"{by_theirs.ms:.2f}", f"{by_ours.ms:.2f}", str(parity.ratio), f"{by_theirs.sqnr_db:.2f}",
        f"{by_ours.sqnr_db:.2f}", as_fast(parity.ratio),
        "yes" if lost <= LESS_ACCURATE else "NO",
    ]  # fmt: skip


def as_fast(found: Ratio) -> str:
    if found.median <= SLOWER:
        return "yes"
    return "NO" if found.low is not None and found.low > SLOWER else "unclear"


def main() -> None:
    arguments = zoo.parser(__doc__, NAMES)
    arguments.add_argument("--samples", type=int, default=8, help="calibration samples (%(default)s)")
    arguments.add_argument("--rounds", type=int, default=24, help="rounds of each pair of builds (%(default)s)")
    given = arguments.parse_args()
    logging.getLogger().setLevel(logging.ERROR)  # quantize_static's advice
    zoo.print_rows(given, COLUMNS, partial(row, samples=given.samples, rounds=given.rounds))


if __name__ == "__main__":
    main()
