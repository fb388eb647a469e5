"""The front: points that trade latency for accuracy, each a file that was proven against the user's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from qdqtune.engines.acceptance import check_loads
from qdqtune.engines.runner import Handle
from qdqtune.errors import BadOption, BaselineFailed, parsed_json, writing
from qdqtune.graph.files import data_of
from qdqtune.graph.loading import files_of
from qdqtune.graph.outputs import appearing
from qdqtune.graph.stamps import content
from qdqtune.measurement.pairing import rounds_of
from qdqtune.measurement.timing import Ratio, compare
from qdqtune.search.front import Point, named, spread, undominated
from qdqtune.tuning.folder import BASELINE, FINAL, FRONT, PLACEMENT, SUMMARY, alone
from qdqtune.tuning.forms import POINT, ListOf, fits
from qdqtune.tuning.proof import Confirmed, Proof, copy_model, insist, known, prove
from qdqtune.tuning.records import write_json, write_placement_of
from qdqtune.tuning.run import Run
from qdqtune.tuning.store import Record, pack_result, unpack_result
from qdqtune.types import Failure, Measurement, Placement, Trial


@dataclass(frozen=True)
class Proven:
    """A point of the front as it lies on disk: its time against the user's file, on two fresh builds of both.

    `metric` is the user's own, `holds` whether the point holds the limits on accuracy, `content` what the file held.
    """

    name: str
    trial: Trial
    ratio: Ratio
    float_seconds: float
    seconds: float
    metric: float | None
    holds: bool
    content: str

    def row(self, shipped: Placement) -> dict[str, Any]:
        """The row of summary.json."""
        accuracy = self.trial.accuracy
        assert accuracy is not None  # a point was measured
        return {
            "name": self.name,
            "file": f"{FRONT}/{self.name}.onnx",
            "content": self.content,
            "ratio": self.ratio.median,
            "low": self.ratio.low,
            "high": self.ratio.high,
            "sqnr_db": accuracy.sqnr_db,
            "agreement": accuracy.top1 if accuracy.agreement is None else accuracy.agreement,
            "metric": self.metric,
            "pairs": len({e.tensor for e in self.trial.placement}),
            "ms": self.seconds * 1e3,
            "holds_limits": self.holds,
            "shipped": self.trial.placement == shipped,
        }


@dataclass(frozen=True)
class Front:
    """What ships, and the points that nothing else beats, the fastest first."""

    proof: Proof
    points: tuple[Proven, ...]

    def rows(self) -> list[dict[str, Any]]:
        """What summary.json holds of the points."""
        return [point.row(self.proof.placement) for point in self.points]


def prove_front(history: Sequence[Trial], run: Run) -> Front:
    """Write a file for each point of the front and pair it with the user's own. The fastest that holds the limits
    ships; where none does, the usual proof decides. Points that do not prove faster, or that others beat, go.

    Raises:
        BaselineFailed: the engine fails on a finished file.
        OutputError: a file cannot be written.
    """
    folder = run.output.clear(FRONT)
    points = named(spread(undominated(history, run.settings.plan), run.budget.points))
    with writing(folder):
        folder.mkdir(exist_ok=True)
    run.candidates.write_whole(Placement(), run.settings.output_dir / BASELINE)
    for name, point in points.items():
        file = run.output.claim(folder / f"{name}.onnx")
        run.output.claim(data_of(file))
        run.candidates.write_whole(point.trial.placement, file)
    held = _pair(points, run)
    proven = [p for name, point in points.items() if (p := _proven(name, point, held[name], run)) is not None]
    kept = [p for p in proven if p.ratio.verdict == "faster" and not any(_beats(o, p) for o in proven)]
    for name in points.keys() - {p.name for p in kept}:
        for file in (folder / f"{name}.onnx", data_of(folder / f"{name}.onnx")):
            file.unlink(missing_ok=True)
    kept.sort(key=lambda p: p.ratio.median)
    for winner in kept:
        write_placement_of(winner.trial.placement, run.output.claim(folder / f"{winner.name}.yaml"), run)
    builds = 2 * len(points) + 2 if points else 0
    if not (holding := [p for p in kept if p.holds]):
        usual = prove(history, run)
        return Front(replace(usual, builds=usual.builds + builds), tuple(kept))
    best = holding[0]
    run.given.check()
    copy_model(folder / f"{best.name}.onnx", run.settings.output_dir / FINAL)
    proof = Proof("tuned", best.trial.placement, best.ratio, None, best.float_seconds, best.seconds, (), builds)
    return Front(proof, tuple(kept))


def pick(folder: Path, name: str) -> Mapping[str, Any]:
    """Ship another point of a finished run: its file becomes optimized_final.onnx, its placement placement.yaml.

    Nothing is measured again. Gives the new summary.

    Raises:
        BadOption: the folder holds no finished run with a front, or no such point, or its file is not what was proven.
        BadState: a run is at work there.
        EngineFailure: the engine does not load the point's file any more.
        OutputError: a file cannot be written.
    """
    with alone(folder):
        return _picked(folder, name)


def _picked(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / SUMMARY
    try:
        summary: dict[str, Any] = parsed_json(path.read_text(encoding="utf-8"))
        rows: list[dict[str, Any]] = summary["front"]
        engine = summary["engine"]["engine"]
        if not fits(rows, ListOf(POINT)) or not isinstance(engine, str):
            raise ValueError
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise BadOption(f"{folder} holds no finished run with a front: run tune with --front first") from error
    files = {row["name"]: file for row in rows if (file := folder / FRONT / f"{Path(row['name']).name}.onnx").is_file()}
    row = next((row for row in rows if row["name"] == name), None)
    if row is None or name not in files:
        raise BadOption(f"{folder} has no point {name!r}: its points are {', '.join(files) or 'none'}")
    file, changed = files[name], _as_shipped(row, rows)
    if row.get("content", held := content(files_of(file))) != held:  # earlier versions did not say what they held
        raise BadOption(f"{file} is not the file that was proven: run tune with --front again, which writes it anew")
    check_loads(file, engine)
    copy_model(file, folder / FINAL)
    with appearing(folder / PLACEMENT) as fresh:
        shutil.copyfile(folder / FRONT / f"{name}.yaml", fresh)
    summary |= changed
    write_json(path, summary)
    return summary


def _as_shipped(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What summary.json says where this point ships."""
    return {
        "shipped": "tuned",
        "final_ms": row["ms"],
        "ratio": row["ratio"],
        "ratio_low": row["low"],
        "ratio_high": row["high"],
        "pairs": row["pairs"],
        "output_sqnr_db": row["sqnr_db"],
        "metric_after": row["metric"],
        "constraint_met": row["holds_limits"],
        "front": [{**other, "shipped": other["name"] == row["name"]} for other in rows],
    }


def _key(point: Point, number: int) -> str:
    return f"front:{point.trial.placement.digest}:{number}"


def _pair(points: Mapping[str, Point], run: Run) -> dict[str, str]:
    """Measure each point twice: both builds of the user's file meet a fresh build of each point's. Gives what the files
    of the points hold, which is recorded."""
    given, folder = content(files_of(run.settings.model)), run.settings.output_dir / FRONT
    held = {name: content(files_of(folder / f"{name}.onnx")) for name in points}
    files: dict[str, Record] = {name: {"files": [given, text]} for name, text in held.items()}
    for number in range(2):
        missing = [(n, p) for n, p in points.items() if known(run.store, _key(p, number), files[n]) is None]
        if missing:
            with _opponent(run, number) as opponent:
                for name, point in missing:
                    result = insist(partial(_meet, opponent, name, number, run))
                    run.store.put(_key(point, number), pack_result(result) | files[name])
    return held


@contextmanager
def _opponent(run: Run, number: int) -> Iterator[Handle]:
    """A fresh build of the user's file; of the float model as we write it where the engine does not run that."""
    handle = run.runner.load(run.settings.model, f"front_{number}_given", fresh=True)
    if isinstance(handle, Failure) and not handle.is_transient:
        handle = run.runner.load(run.settings.output_dir / BASELINE, f"front_{number}_baseline", fresh=True)
    if isinstance(handle, Failure):
        raise BaselineFailed(f"the engine does not build the float model again: {handle.reason}")
    yield handle
    run.runner.unload(handle)


def _meet(opponent: Handle, name: str, number: int, run: Run) -> Measurement | Failure:
    file, plan = run.settings.output_dir / FRONT / f"{name}.onnx", run.settings.proof_plan
    handle = run.runner.load(file, f"front_{number}_{name}", fresh=True)
    if isinstance(handle, Failure):
        return handle
    rounds = rounds_of(run.runner, opponent, handle, plan, run.settings.seed + number)
    result = compare(rounds, plan)
    run.runner.unload(handle)
    return result


def _proven(name: str, point: Point, held: str, run: Run) -> Proven | None:
    """A point with its measurements; None if the engine failed on its file."""
    records = [run.store.get(_key(point, number)) for number in range(2)]
    parts = [r for record in records if record and isinstance(r := unpack_result(record), Measurement)]
    if len(parts) < 2:
        return None
    metric = run.bench.metric(point.trial.placement) if run.settings.evaluate else None
    holds = run.limits.is_exact_enough(point.trial.accuracy)
    if metric is not None:
        holds = holds and not isinstance(metric, Failure) and run.limits.is_good_enough(metric)
    met = Confirmed.of(parts, run.settings.proof_plan)
    value = None if isinstance(metric, Failure) else metric
    return Proven(name, point.trial, met.ratio, met.a_seconds, met.b_seconds, value, holds, held)


def _beats(a: Proven, b: Proven) -> bool:
    return Point(a.ratio.median, a.trial).beats(Point(b.ratio.median, b.trial))
