"""The front: points that trade latency for accuracy, each a file that was proven against the user's own."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qdqtune.engines import threads_of
from qdqtune.engines.acceptance import check_loads
from qdqtune.errors import BadOption, writing
from qdqtune.graph.loading import files_of
from qdqtune.graph.saving import data_of
from qdqtune.placement.reading import count_pairs
from qdqtune.search import best_of
from qdqtune.search.front import ENOUGH, FrontSearch, MeasuredPoint, Tradeoff, named
from qdqtune.system.checks import content_digest
from qdqtune.system.writing import atomic_write, write_json
from qdqtune.timing.ratios import PAIRS, Ratio
from qdqtune.tuning.accepting import is_alike
from qdqtune.tuning.candidacy import Candidacy, Entry, move_model
from qdqtune.tuning.folder import BASELINE, FINAL, FRONT, PLACEMENT, REPORT, SUMMARY, alone, check_names
from qdqtune.tuning.meeting import Opponents, confirmed
from qdqtune.tuning.proof import Proof, Standing, copy_model, foremost, is_held, prove, rows_by_workload, rows_of
from qdqtune.tuning.records import plain
from qdqtune.tuning.run import Run
from qdqtune.tuning.run_files import FrontPoint, Summary, read_summary
from qdqtune.tuning.summary import write_placement_of
from qdqtune.tuning.threads import places
from qdqtune.types import Failure, Measurement, Mix, Placement, Trial


@dataclass(frozen=True)
class Proven:
    """A point of the front as it lies on disk: its time against the user's file, on so many fresh pairs of `builds`.

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
    builds: int
    standings: tuple[Standing, ...] = ()
    """The same at each number of threads."""

    def row(self, shipped: Placement, mix: Mix) -> dict[str, Any]:
        """The row of summary.json."""
        accuracy, placement = self.trial.accuracy, self.trial.placement
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
            "pairs": count_pairs(placement),
            "edges": len(placement),
            "weights": dict(Counter(weight_format.name for weight_format in placement.weight_formats.values())),
            "ms": self.seconds * 1e3,
            "holds_limits": self.holds,
            "shipped": placement == shipped,
            "by_threads": rows_of(self.standings),
            **({"workloads": rows_by_workload(self.standings, mix)} if len(mix) > 1 else {}),
        }


@dataclass(frozen=True)
class Front:
    """What ships, and the points that nothing else beats, the fastest first; and the trials of what no search had
    built."""

    proof: Proof
    points: tuple[Proven, ...]
    trials: tuple[Trial, ...] = ()

    def rows(self, mix: Mix) -> list[dict[str, Any]]:
        """What summary.json holds of the points."""
        return [point.row(self.proof.placement, mix) for point in self.points]


def prove_front(history: Sequence[Trial], run: Run, search: FrontSearch | None) -> Front:
    """Write a file for each point of the front and pair it with the user's own. The fastest that holds the limits
    ships, of those that cannot be told apart the most exact; where none does, the usual proof decides. Points that do
    not prove faster, or that others beat, go.

    Raises:
        BaselineFailed: the engine fails on a finished file.
        OutputError: a file cannot be written.
    """
    folder = run.output.clear(FRONT)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    run.candidates.write_whole(Placement(), run.settings.output_dir / BASELINE)
    candidacy = Candidacy(history, run, search)
    proven = _proven(candidacy.met(), run)
    held, more = _everywhere(proven, candidacy.written, run)
    tradeoffs = [Tradeoff(p.ratio.median, p.trial.exactness) for p in held]
    kept = [
        p for p, tradeoff in zip(held, tradeoffs, strict=True) if not any(other.beats(tradeoff) for other in tradeoffs)
    ]
    kept.sort(key=lambda p: p.ratio.median)
    kept = _settled(kept, candidacy.written, run)
    if not kept:
        run.output.clear(FRONT)
    trials, builds = candidacy.trials, candidacy.builds - len(candidacy.trials) + more
    elsewhere = sum(p.ratio.verdict == "faster" for p in proven) - len(held)
    notes = () if len(kept) >= ENOUGH else (candidacy.excuse(len(kept), max(0, elsewhere)),)
    if not (holding := [p for p in kept if p.holds and p.builds >= PAIRS]):
        again = best_of(history)  # as without a front, where its builds have not told that it is slower
        tried = {e.trial.placement for e in candidacy.entries if e.trial.placement != again or e.is_slower(run)}
        usual = prove([t for t in history if t.placement not in tried], run)
        proof = replace(usual, builds=usual.builds + builds, notes=(*usual.notes, *notes))
        return Front(proof, tuple(kept), trials)
    even = [p for p in holding if is_alike(p.ratio, holding[0].ratio)]
    best = max(even, key=lambda p: (round(p.trial.exactness), -p.ratio.median))
    run.given.check()
    copy_model(folder / f"{best.name}.onnx", run.settings.output_dir / FINAL)
    seconds = best.float_seconds, best.seconds
    proof = Proof("tuned", best.trial.placement, best.ratio, None, *seconds, notes, builds, best.standings)
    return Front(proof, tuple(kept), trials)


def _settled(kept: Sequence[Proven], written: Mapping[Placement, Path], run: Run) -> list[Proven]:
    """The points under their names, each with its placement beside it; the files of all others are deleted."""
    names = named([MeasuredPoint(p.ratio.median, p.trial) for p in kept])
    settled = []
    for (name, point), proven in zip(names.items(), kept, strict=True):
        file = run.output.claim(written[point.trial.placement].with_name(f"{name}.onnx"))
        move_model(written[point.trial.placement], file, run, point.trial.placement)
        write_placement_of(point.trial.placement, run.output.claim(file.with_suffix(".yaml")), run)
        settled.append(replace(proven, name=name, content=content_digest(files_of(file))))
    for file in written.values():
        for part in (file, data_of(file)):
            part.unlink(missing_ok=True)
    return settled


def pick(folder: Path, name: str) -> Mapping[str, Any]:
    """Ship another point of a finished run: its file becomes optimized_final.onnx, its placement placement.yaml.

    Nothing is measured again. Gives the new summary.

    Raises:
        BadOption: the folder holds no finished run with a front, or no such point, or its file is not what was proven.
        BadState: a run is at work there.
        EngineFailure: the engine does not load the point's file any more.
        OutputError: a file cannot be written, or a link leads out of the folder.
    """
    with alone(folder):
        return _picked(folder, name)


def _picked(folder: Path, name: str) -> Mapping[str, Any]:
    summary = read_summary(folder)
    if (rows := summary.get("front")) is None:
        raise BadOption(f"{folder} holds no finished run with a front: run tune with --front first")
    files = {row["name"]: file for row in rows if (file := folder / FRONT / f"{Path(row['name']).name}.onnx").is_file()}
    row = next((row for row in rows if row["name"] == name), None)
    if row is None or name not in files:
        points = f"its points are {', '.join(files)}" if files else "no candidate of its run proved to be one"
        raise BadOption(f"{folder} has no point {name!r}: {points}")
    file = files[name]
    if row["content"] != content_digest(files_of(file)):
        raise BadOption(f"{file} is not the file that was proven: run tune with --front again, which writes it anew")
    check_names(folder, (FINAL, data_of(Path(FINAL)).name, PLACEMENT, SUMMARY, REPORT))
    check_loads(file, summary["engine"]["engine"])
    copy_model(file, folder / FINAL)
    with atomic_write(folder / PLACEMENT) as fresh:
        shutil.copyfile(folder / FRONT / f"{name}.yaml", fresh)
    picked: dict[str, Any] = plain(_as_shipped(summary, row, rows))
    write_json(folder / SUMMARY, picked)
    return picked


def _as_shipped(summary: Summary, row: FrontPoint, rows: Sequence[FrontPoint]) -> Summary:
    """The summary where this point ships."""
    picked: Summary = {
        **summary,
        "shipped": "tuned",
        "final_ms": row["ms"],
        "ratio": row["ratio"],
        "ratio_low": row["low"],
        "ratio_high": row["high"],
        "pairs": row["pairs"],
        "output_sqnr_db": row["sqnr_db"],
        "metric_after": row["metric"],
        "constraint_met": row["holds_limits"],
        "by_threads": row["by_threads"],
        "edges": row["edges"],
        "weights": row["weights"],
        "front": [{**other, "shipped": other["name"] == row["name"]} for other in rows],
    }
    if "workloads" in row:
        picked["workloads"] = row["workloads"]
    return picked


def _proven(entries: Sequence[Entry], run: Run) -> list[Proven]:
    """Points with their measurements, but for those on whose files the engine failed."""
    found = []
    plan = run.settings.proof_plan
    for entry, met in zip(entries, confirmed([entry.measured for entry in entries], plan), strict=True):
        if met is None:
            continue
        trial = entry.trial
        metric = run.bench.metric(trial.placement) if run.settings.evaluate else None
        holds = run.limits.is_exact_enough(trial.accuracy)
        if metric is not None:
            holds = holds and not isinstance(metric, Failure) and run.limits.is_good_enough(metric)
        value = None if isinstance(metric, Failure) else metric
        standing = Standing.of(threads_of(run.settings.engine), met)
        pairs = len(entry.measured)
        found.append(Proven("", trial, met.ratio, met.a_seconds, met.b_seconds, value, holds, "", pairs, (standing,)))
    return found


def _everywhere(proven: Sequence[Proven], written: Mapping[Placement, Path], run: Run) -> tuple[list[Proven], int]:
    """The points that hold at every number of threads, and the builds that it took to know: a second one of what the
    first does not tell faster."""
    settings, plan = run.settings, run.settings.proof_plan
    left = {p.trial.placement: p for p in proven}
    builds = 0
    with places(settings.engine, settings.thread_counts, run.runner, run.subject.mix) as found:
        if not any(place.is_home for place in found):
            left = {placement: replace(point, standings=()) for placement, point in left.items()}
        for place in (place for place in found if not place.is_home):
            measured: dict[Placement, list[Measurement | Failure]] = {placement: [] for placement in left}
            with Opponents(run, place) as opponents:
                for number in range(PAIRS):
                    known = dict(zip(measured, confirmed(list(measured.values()), plan), strict=True))
                    for placement, met in known.items():
                        if number == 0 or (met is not None and met.ratio.verdict == "undecided"):
                            measured[placement].append(opponents.meet(number, placement, written[placement]))
                builds += opponents.builds
            for placement, met in zip(measured, confirmed(list(measured.values()), plan), strict=True):
                point = left.pop(placement)
                if met is not None:
                    standing = Standing.of(place.threads, met)
                    if not standing.is_slower:
                        left[placement] = replace(point, standings=(*point.standings, standing))
    return [_told(point) for point in left.values() if is_held(point.standings)], builds


def _told(point: Proven) -> Proven:
    """A point with its ratio from where it is foremost."""
    best = foremost(point.standings)
    return replace(point, ratio=best.ratio, float_seconds=best.float_seconds, seconds=best.seconds)
