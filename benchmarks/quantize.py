"""`quantize` beside ONNX Runtime's quantize_static: the same samples, accuracy of the outputs, and latency.

Both calibrate on four fifths of the samples, by minimum and maximum; the output SQNR is that on all of them, against
the float model. It is the mean over several choices of the four fifths: where one rounding decides between two classes,
scales that differ by 1e-7 move a single SQNR by two dB. The latencies of the two files are paired on two fresh builds
of each. 'as accurate' means that at most 0.5 dB is lost on the mean, 'as fast' that the ratio ours/theirs is at most
1.02 ('unclear': above, but within the interval).
Where labels.json (class numbers, in the order of the samples) lies beside a classifier, 'top 1' tells how many samples
the float model, theirs and ours get right.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import zoo
from quantizers import outputs, write_static

from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.samples import open_samples
from qdqtune.commands.compare import compare_files
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.engines.runner import Runner
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.numerics.accuracy import sqnr_db
from qdqtune.timing.ratios import Plan, Ratio
from qdqtune.types import Array, Sample

COLUMNS = ("model", "float ms", "theirs ms", "ours ms", "ours/theirs", "theirs dB", "ours dB", "as fast", "as accurate",
           "top 1: float, theirs, ours")  # fmt: skip
SLOWER, LESS_ACCURATE = 1.02, 0.5
"""Ratio of latencies and dB of output SQNR that count as parity."""


def row(entry: zoo.Entry, runner: Runner, folder: Path, given: argparse.Namespace) -> list[str]:
    """The numbers of one model, in the order of `COLUMNS`."""
    files = plain, theirs, ours = [folder / f"{name}.onnx" for name in ("float", "theirs", "ours")]
    model = load(entry.path, fix_inputs=entry.fixed)
    save(model, plain)
    samples = list(open_samples(entry.data, model, limit=given.samples, fixed=entry.fixed))
    ratios = []
    for fold in range(given.folds):
        data = rotated(samples, fold, folder / "data.npz")
        prepared = prepare(model, Data(str(data)), fixed=entry.fixed)
        write_static(model, prepared.calibration, runner.numeric_format("int8"), theirs)
        quantize(QuantizeOptions(entry.path, output=ours, calibration_data=str(data), fix_inputs=entry.fixed))
        exact, *found = (outputs(file, runner, samples) for file in files)
        ratios.append([sqnr_db(exact, rounded) or np.nan for rounded in found])
    by_theirs, by_ours = compare_files(files, runner, samples[:1], Plan((12,), 0.01))
    parity = compare_files([theirs, ours], runner, samples[:1], Plan((given.rounds,), 0.01))[0]
    if parity.ratio is None or by_theirs.ms is None or by_ours.ms is None or by_ours.first_ms is None:
        return [entry.name, by_theirs.reason or by_ours.reason or parity.reason, *[""] * 8]
    means, spread = np.mean(ratios, axis=0), np.std(ratios, axis=0)
    return [
        entry.name, f"{by_ours.first_ms:.2f}", f"{by_theirs.ms:.2f}", f"{by_ours.ms:.2f}", str(parity.ratio),
        *(f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in zip(means, spread, strict=True)),
        as_fast(parity.ratio), "yes" if means[0] - means[1] <= LESS_ACCURATE else "NO",
        top_one(entry.path.with_name("labels.json"), [outputs(file, runner, samples) for file in files]),
    ]  # fmt: skip


def as_fast(found: Ratio) -> str:
    if found.median <= SLOWER:
        return "yes"
    return "NO" if found.low is not None and found.low > SLOWER else "unclear"


def rotated(samples: Sequence[Sample], by: int, path: Path) -> Path:
    """The samples in a file, beginning with number `by`."""
    order = [*samples[by:], *samples[:by]]
    stacked: dict[str, Array] = {name: np.stack([s[name] for s in order]) for name in order[0]}
    np.savez(path, allow_pickle=False, **stacked)
    return path


def top_one(labels: Path, by_file: Sequence[Sequence[Mapping[str, Array]]]) -> str:
    """How many samples each file classifies rightly; empty where there are no labels."""
    if not labels.exists():
        return ""
    (classes,) = json.loads(labels.read_text()).values()
    found = [[int(np.argmax(next(iter(output.values())))) for output in outputs] for outputs in by_file]
    hits = [sum(a == b for a, b in zip(answers, classes, strict=False)) for answers in found]
    return ", ".join(map(str, hits)) + f" of {min(len(found[0]), len(classes))}"


def main() -> None:
    arguments = zoo.parser(__doc__, ())
    arguments.add_argument("--samples", type=int, default=16, help="samples (%(default)s)")
    arguments.add_argument("--folds", type=int, default=5, help="choices of the calibration samples (%(default)s)")
    arguments.add_argument("--rounds", type=int, default=24, help="rounds of each pair of builds (%(default)s)")
    given = arguments.parse_args()
    logging.getLogger().setLevel(logging.ERROR)  # quantize_static's advice
    zoo.print_rows(given, COLUMNS, partial(row, given=given))


if __name__ == "__main__":
    main()
