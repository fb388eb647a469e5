"""How long a proof takes: pair after pair of builds from 24 rounds on, and in turns from the least rounds that decide.

Each model is quantized by rules; the result meets the float model both ways, and so does the float model itself, as it
does where a search has found nothing. A cell is the seconds, builds included, with the rounds of each pair of builds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zoo

from qdqtune import quantize
from qdqtune.calibration.samples import open_samples
from qdqtune.engines.runner import Runner
from qdqtune.errors import QdqtuneError
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.timing.pairing import compare_builds, fresh_builds, fresh_pairs
from qdqtune.timing.ratios import PAIRS, Plan, across_builds, as_many_pairs_as_needed, envelope, ratio
from qdqtune.tuning.settings import EFFORTS
from qdqtune.types import Failure, Measurement

BEFORE = Plan((24, 48, 96))
"""When the proof looked, at a third of the error each time."""

AFTER = Plan(EFFORTS["default"].proof)


def before(runner: Runner, a: Path, b: Path) -> tuple[list[Measurement], str]:
    """Each pair of builds until it is decided."""
    measured = []
    for number in range(PAIRS):
        with fresh_builds(runner, a, b, f"before_{number}") as pair:
            found = pair if isinstance(pair, Failure) else compare_builds(runner, *pair, BEFORE, number)
        measured += [] if isinstance(found, Failure) else [found]
    return measured, envelope([ratio(m, BEFORE) for m in measured]).verdict


def after(runner: Runner, a: Path, b: Path) -> tuple[list[Measurement], str]:
    """In turns, and more builds where two agree on too little."""

    def measure(numbers: Sequence[int]) -> list[Measurement] | Failure:
        return fresh_pairs(runner, a, b, AFTER, list(numbers), [f"after_{n}" for n in numbers])

    measured = as_many_pairs_as_needed(measure, AFTER)
    if isinstance(measured, Failure):
        raise SystemExit(f"{a} does not run: {measured.reason}")
    return measured, across_builds([ratio(m, AFTER) for m in measured], AFTER).verdict


def row(entry: zoo.Entry, runner: Runner, folder: Path) -> list[str]:
    """Both ways, on what rules make of the model and on the model itself."""
    model = load(entry.path, fix_inputs=entry.fixed)
    plain, quantized = folder / "float.onnx", folder / "quantized.onnx"
    save(model, plain)
    runner.feed(open_samples(entry.data, model, limit=1, fixed=entry.fixed).first(1)[0])
    try:
        quantize(
            entry.path, output=quantized, calibration_data=entry.data, engine="onnxruntime", calibration_samples=8,
            calibration_method="minmax", bias_correction=False, fix_inputs=entry.fixed,
        )  # fmt: skip
    except QdqtuneError as error:
        return [entry.name, str(error)[:40], "", "", ""]
    cells = [told(way, runner, plain, file) for file in (quantized, plain) for way in (before, after)]
    return [entry.name, *cells]


def told(way: Callable[[Runner, Path, Path], tuple[list[Measurement], str]], runner: Runner, a: Path, b: Path) -> str:
    """The seconds of a proof, its rounds, and what it says."""
    begun = time.monotonic()
    measured, verdict = way(runner, a, b)
    return f"{time.monotonic() - begun:.1f} ({'+'.join(str(len(m.a)) for m in measured)}), {verdict}"


def main() -> None:
    given = zoo.parser(__doc__, ()).parse_args()
    columns = ["quantized, before", "quantized, now", "equal, before", "equal, now"]
    zoo.print_rows(given, ["model", *columns], row)


if __name__ == "__main__":
    main()
