"""What decibels and agreement say about the loss of a metric, on models with labels.

python benchmarks/labelled_models.py DIR        # trains fourteen small networks; any others may lie beside them
python benchmarks/labels.py --models DIR --keep rows.json

DIR holds NAME/model.onnx, NAME/calib.npz, and NAME/labelled.npz: samples that calibration does not see, with `labels`.
Each model is quantized in some twenty ways, good and bad ones: by every method, with few samples, with samples that are
scaled by mistake, by quantize_static, with 4-bit weights, in half of its nodes. Each file is judged on all labelled
samples: output SQNR, share of first choices as in float, and the loss of the metric with an interval whose ends are
one-sided 95 % each.

`--keep` holds a row for each file; rows that are there are not measured again. The floor is the default one of `tune`.
It is judged on all samples, and on 100 draws of the 32 that `tune` looks at. Intervals of means over files come from
drawing models, each with all its files, since files of one model err alike.
"""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import zoo
from quantizers import write_static

from qdqtune.calibration.prepare import Data, prepare
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineRefused, InputError
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.numerics.accuracy import APART_DB, FLOOR_DB, MOST_EQUAL, accuracy
from qdqtune.numerics.metrics import answer, chosen, row_scores
from qdqtune.numerics.scores import Score, loss_high
from qdqtune.timing.limits import Limits
from qdqtune.types import Array

PLAIN: Mapping[str, Any] = {"bias_correction": False}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    **{method: {"calibration_method": method, **PLAIN} for method in ("minmax", "percentile", "mse")},
    "minmax, 4 samples": {"calibration_method": "minmax", "calibration_samples": 4, **PLAIN},
    "mse, 4 samples, biases": {"calibration_method": "mse", "calibration_samples": 4},
    "minmax, per tensor": {"calibration_method": "minmax", "per_channel": False, **PLAIN},
    "percentile 99, biases": {"calibration_method": "percentile:99"},
    "percentile 99.9, per tensor": {
        "calibration_method": "percentile:99.9", "per_channel": False, **PLAIN,
    },
    "percentile 99.5": {"calibration_method": "percentile:99.5", **PLAIN},
    "percentile 98": {"calibration_method": "percentile:98", **PLAIN},
    **{f"inputs x {times}": {"calibration_method": "minmax", **PLAIN} for times in (0.5, 4, 8, 16)},
    "first half": {"calibration_method": "mse"},
    "last half": {"calibration_method": "minmax", **PLAIN},
    "w4": {"weight_only": "w4"},
    "static": {},
    "static, percentile": {},
    "static, entropy": {},
}  # fmt: skip
METHODS = {"static": "MinMax", "static, percentile": "Percentile", "static, entropy": "Entropy"}

FLOOR = Limits(FLOOR_DB, min_agreement=MOST_EQUAL, min_sqnr_worst=FLOOR_DB - APART_DB)
ALLOWED = 0.3
"""Points that a labelled model may lose."""

DECIBELS, SHARES = (-99.0, 10, 15, 20, 25, 30, 99), (0.0, 0.9, 0.95, 0.98, 0.99, 0.995, 1.01)
PART, DRAWS, SEEN = 250, 100, 32

Outputs = list[dict[str, Array]]


@dataclass(frozen=True)
class Row:
    """One file: shares in 0 to 1, losses in points of the metric."""

    model: str
    kind: str
    way: str
    metric: str
    samples: int
    choices: int
    before: float
    sqnr: float
    worst: float
    agreement: float
    loss: float
    low: float
    high: float
    is_seen: bool
    """Whether the outputs were taken for scores of classes."""
    of_draws: float
    """In how many draws of `SEEN` samples the floor lets it pass."""

    @property
    def holds(self) -> bool:
        """Whether it holds the floor on all samples together."""
        return self.sqnr >= FLOOR_DB and self.agreement >= MOST_EQUAL


def kind_of(model: Model) -> str:
    """The kind of a network, by its operators."""
    ops = {node.op for node in model.nodes}
    if any(node.op == "Conv" and node.attributes.get("group", 1) > 1 for node in model.nodes):
        return "depthwise"
    if "LayerNormalization" in ops:
        return "transformer"
    return "recurrent" if ops & {"LSTM", "GRU"} or {"Sigmoid", "Tanh"} <= ops else "plain"


def write(entry: zoo.Entry, model: Model, way: str, runner: Runner, target: Path) -> None:
    """Write the file of one way to quantize a model.

    Raises:
        InputError: the model cannot be quantized so.
    """
    if way in METHODS:
        samples = prepare(model, Data(entry.data)).calibration
        write_static(model, samples, runner.numeric_format("int8"), target, METHODS[way])
        return
    how, data = dict(WAYS[way]), entry.data
    if way.endswith("half"):
        names = [node.name for node in model.nodes]
        middle = len(names) // 2
        how |= {"nodes_to_quantize": names[:middle] if way == "first half" else names[middle:], "rewrites": "off"}
    if way.startswith("inputs x"):
        data = str(target.with_name("calib.npz"))
        with np.load(str(entry.data)) as arrays:
            np.savez(
                data, allow_pickle=False, **{name: scaled(array, float(way[8:])) for name, array in arrays.items()}
            )
    quantize(QuantizeOptions(entry.path, output=target, calibration_data=data, **how))


def scaled(array: Array, times: float) -> Array:
    """Inputs as after a mistake in pre-processing.

    Raises:
        ValueError: they are no floats.
    """
    if array.dtype.kind != "f":
        raise ValueError("only floats can be scaled")
    return array * np.float32(times)


def outputs(file: Path, runner: Runner, samples: Sequence[dict[str, Array]]) -> Outputs:
    """The outputs of a file for each sample. Ends the program where it does not run."""
    outputs = Outputs()
    try:
        handle = runner.load(file, fresh=True)
        for start in range(0, len(samples), PART):
            outputs += runner.outputs(handle, samples[start : start + PART])
    except EngineRefused as refused:
        raise SystemExit(f"{file} does not run: {refused}") from refused
    runner.unload(handle)
    return outputs


def told(found: Outputs, labels: Array) -> tuple[Score, Array]:
    """The metric that fits the labels, and the answers of all samples."""
    metric, of = chosen("auto", found[0], labels[:1])
    by_row, answers = list[float](), []
    for one, right in zip(found, labels, strict=True):
        said = answer(metric, one[of])
        scores = row_scores(metric, said, right[None])
        assert said is not None  # `chosen` has found that the output fits
        assert scores is not None
        by_row += scores
        answers.append(said)
    return Score.of_rows(metric, by_row), np.concatenate(answers)


def judged(reference: Outputs, found: Outputs, labels: Array) -> dict[str, Any]:
    """The columns of a row that tell how good a file is."""
    (before, first), (after, second) = told(reference, labels), told(found, labels)
    of_all = accuracy(reference, found)
    random, passed = np.random.default_rng(0), 0
    for _ in range(DRAWS):
        drawn = random.choice(len(found), SEEN, replace=False)
        passed += FLOOR.is_exact_enough(accuracy([reference[i] for i in drawn], [found[i] for i in drawn]))
    high, low = loss_high(before, after), loss_high(after, before)
    return {
        "metric": before.name, "samples": len(found), "choices": first.size, "before": before.value,
        "sqnr": 99.0 if of_all.sqnr_db is None else of_all.sqnr_db,
        "worst": 99.0 if of_all.lowest_db is None else of_all.lowest_db,
        "agreement": float((first == second).mean()), "loss": 100 * (before.value - after.value),
        "low": 0.0 if low is None else -100 * low, "high": 0.0 if high is None else 100 * high,
        "is_seen": of_all.top1 is not None, "of_draws": passed / DRAWS,
    }  # fmt: skip


def measure(entry: zoo.Entry, ways: Iterable[str], keep: Callable[[Row], None]) -> None:
    """Quantize and judge one model in several ways."""
    with np.load(entry.path.parent / "labelled.npz") as arrays:
        data = dict(arrays)
    labels, model = data.pop("labels"), load(entry.path)
    samples = [{name: array[i : i + 1] for name, array in data.items()} for i in range(len(labels))]
    with (
        TemporaryDirectory() as folder,
        Runner(EngineSpec("onnxruntime", {"threads": 1}), execution=Execution(300), log_dir=Path(folder)) as runner,
    ):
        reference = outputs(entry.path, runner, samples)
        for way in ways:
            target = Path(folder) / "quantized.onnx"
            try:
                write(entry, model, way, runner, target)
            except (InputError, RuntimeError, ValueError) as error:
                print(f"{entry.name}, {way}: {str(error).splitlines()[0][:150]}", flush=True)
                continue
            row = Row(entry.name, kind_of(model), way, **judged(reference, outputs(target, runner, samples), labels))
            print(f"{row.model}, {way}: {row.sqnr:.1f} dB, {row.agreement:.2%}, {row.loss:.2f} points", flush=True)
            keep(row)


def mean_of(rows: Sequence[Row], value: Callable[[Row], float], over: Callable[[Row], float]) -> str:
    """sum(value) / sum(over) with its 95 % interval, by 2,000 draws of models."""
    groups = [[r for r in rows if r.model == name] for name in sorted({r.model for r in rows})]
    sums = np.array([[sum(map(value, group)), sum(map(over, group))] for group in groups])
    drawn = np.random.default_rng(0).integers(len(groups), size=(2000, len(groups)))
    top, bottom = np.moveaxis(sums[drawn].sum(1), 1, 0)
    ends = np.percentile(top / np.maximum(bottom, 1e-9), [2.5, 97.5])
    return f"{sums[:, 0].sum() / max(sums[:, 1].sum(), 1e-9):.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"


def by_number(rows: Sequence[Row], value: Callable[[Row], float], edges: Sequence[float]) -> None:
    """A table of the losses of the files between two numbers of decibels, or shares of first choices."""
    table = []
    for low, high in pairwise(edges):
        if not (inside := [row for row in rows if low <= value(row) < high]):
            continue
        much, sure = sum(row.loss > ALLOWED for row in inside), sum(row.low > ALLOWED for row in inside)
        table.append([
            f"{low:g} to {high:g}", str(len(inside)), str(len({row.model for row in inside})),
            mean_of(inside, lambda r: r.loss, lambda _: 1), f"{much}, {sure}", largest(inside),
            mean_of(inside, lambda r: r.loss, lambda r: 100 * (1 - r.agreement)),
            f"{np.mean([row.of_draws for row in inside]):.0%}",
        ])  # fmt: skip
    over = f"over {ALLOWED}, surely"
    columns = "from", "files", "models", "mean loss", over, "largest loss", "loss / other choices", "pass with 32"
    zoo.print_table(columns, table)
    print()


def largest(rows: Sequence[Row]) -> str:
    """The largest loss, with its interval."""
    worst = max(rows, key=lambda row: row.loss, default=None)
    return "" if worst is None else f"{worst.loss:.2f} [{worst.low:.2f}, {worst.high:.2f}] {worst.model}"


def foretells(rows: Sequence[Row], value: Callable[[Row], float]) -> str:
    """Rank correlation of a number with the loss; and the chance that it is lower for a file that lost more than
    `ALLOWED` than for one that did not (1: always, 0.5: no better than tossing a coin)."""
    from scipy.stats import spearmanr

    correlation = spearmanr([value(row) for row in rows], [row.loss for row in rows]).statistic
    bad, good = [value(r) for r in rows if r.loss > ALLOWED], [value(r) for r in rows if r.loss <= ALLOWED]
    chance = np.mean([(b < g) + 0.5 * (b == g) for b in bad for g in good]) if bad and good else np.nan
    return f"rank correlation with the loss {correlation:.2f}, tells a loss over {ALLOWED} points: {chance:.3f}"


def tables(rows: Sequence[Row]) -> None:
    """Print what the rows show: by model, by decibels, by agreement, and by limits."""
    table = []
    for name in sorted({row.model for row in rows}):
        mine = [row for row in rows if row.model == name]
        held, losses, decibels = [r for r in mine if r.holds], [r.loss for r in mine], [r.sqnr for r in mine]
        table.append([
            name, mine[0].kind, f"{mine[0].metric} {100 * mine[0].before:.1f}", str(mine[0].samples), str(len(mine)),
            f"{min(decibels):.0f} to {max(decibels):.0f}", f"{min(losses):.1f} to {max(losses):.1f}",
            str(len(held)), largest(held).rpartition(" ")[0],
            str(sum(r.loss <= ALLOWED and not r.holds for r in mine)),
        ])  # fmt: skip
    columns = ("model", "kind", "float", "samples", "files", "dB", "points lost", "hold the floor", "lose at most",
               "refused needlessly")  # fmt: skip
    zoo.print_table(columns, table)
    print()
    rows = [row for row in rows if row.metric == "top1"]  # of pixels there are common and rare classes
    print("Of top1:\n")
    by_number(rows, lambda row: row.sqnr, DECIBELS)
    by_number(rows, lambda row: row.agreement, SHARES)
    for what, value in (("SQNR", lambda r: r.sqnr), ("worst", lambda r: r.worst), ("agreement", lambda r: r.agreement)):
        print(f"{what}: {foretells(rows, value)}")
    print()
    table = []
    for db in DECIBELS[:-1]:
        for equal in SHARES[:-1]:
            held = [row for row in rows if row.agreement >= equal and row.sqnr >= db]
            other = [row for row in rows if row not in held]
            much, fine = sum(row.loss > ALLOWED for row in held), sum(row.loss <= ALLOWED for row in other)
            table.append([f"{db:g} dB", f"{equal:g}", str(len(held)), str(much), largest(held), str(fine)])
    zoo.print_table(("floor", "agreement", "pass", f"over {ALLOWED}", "largest loss", "refused needlessly"), table)


def main() -> None:
    arguments = zoo.parser(__doc__, ())
    arguments.add_argument("--keep", type=Path, required=True, metavar="FILE", help="rows so far, one a file")
    arguments.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="default: all")
    given: Namespace = arguments.parse_args()
    logging.disable(logging.WARNING)  # advice of quantize_static
    rows = [Row(**row) for row in json.loads(given.keep.read_text())] if given.keep.exists() else []

    def keep(row: Row) -> None:
        rows.append(row)
        given.keep.write_text(json.dumps([asdict(each) for each in rows], indent=0))

    for entry in zoo.find(given.models, given.names):
        known = {row.way for row in rows if row.model == entry.name}
        if ways := [way for way in given.ways if way not in known]:
            measure(entry, ways, keep)
    tables(rows)


if __name__ == "__main__":
    main()
