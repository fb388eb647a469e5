"""The front: points that trade latency for accuracy, each a file that was proven against the user's own."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qdqtune.engines.acceptance import check_loads
from qdqtune.errors import BadOption, EngineRefused, writing
from qdqtune.graph.loading import files_of
from qdqtune.graph.saving import data_of
from qdqtune.numerics.scores import equal_share
from qdqtune.placement.reading import count_pairs
from qdqtune.search import best_of
from qdqtune.search.front import (
    TARGET_POINTS,
    Tradeoff,
    is_too_noisy,
    spread,
    unbeaten,
    undominated,
)
from qdqtune.system.checks import content_digest
from qdqtune.system.writing import atomic_write, write_json
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning.deploy import renew_kit
from qdqtune.tuning.folder import (
    DEPLOY_SETTINGS,
    FINAL,
    FRONT,
    PLACEMENT,
    REPORT,
    SUMMARY,
    alone,
    check_names,
)
from qdqtune.tuning.proof import Field, Proof, copy_model, keep_rounds, proof_of, prove, race_finished, trial_of
from qdqtune.tuning.result import write_placement_of
from qdqtune.tuning.run import Run
from qdqtune.tuning.shipping import (
    Attempt,
    Compared,
    Finalists,
    first_faster,
    is_alike,
    is_proven,
    rows_by_threads,
    rows_by_workload,
)
from qdqtune.tuning.store import plain
from qdqtune.tuning.summary import FrontPoint, Summary, read_summary
from qdqtune.types import Placement, Trial, noise_of

PROVEN_APART = "what ships is no point of the front: it was proven as without `front`, on more pairs of builds"


@dataclass(frozen=True)
class ProvenPoint:
    """A point of the front: a file that was raced against the user's in each of `contexts`. `metric` is the user's own,
    `holds` whether it holds the limits on accuracy, `content` a digest of the file."""

    trial: Trial
    contexts: tuple[Compared, ...]
    holds: bool
    metric: float | None = None
    name: str = ""
    content: str = ""

    @property
    def shown(self) -> Compared:
        """The context whose figures users see."""
        return first_faster(self.contexts)

    @property
    def ratio(self) -> Ratio:
        """The ratio to the user's file in the context that is shown."""
        return self.shown.ratio


def _row(point: ProvenPoint, proof: Proof, run: Run) -> dict[str, Any]:
    accuracy, placement, mix = point.trial.accuracy, point.trial.placement, run.subject.mix
    assert accuracy is not None  # a point was measured
    return {
        "name": point.name,
        "file": f"{FRONT}/{point.name}.onnx",
        "content": point.content,
        "ratio": point.ratio.median,
        "low": point.ratio.low,
        "high": point.ratio.high,
        "sqnr_db": accuracy.sqnr_db,
        "agreement": equal_share(accuracy),
        "accuracy": asdict(accuracy),
        "metric": point.metric,
        "pairs": count_pairs(placement),
        "edges": len(placement),
        "weights": dict(Counter(weight_format.name for weight_format in placement.weight_formats.values())),
        "baseline_ms": point.shown.a_seconds * 1e3,
        "ms": point.shown.b_seconds * 1e3,
        "holds_limits": point.holds,
        "by_threads": rows_by_threads(point.contexts),
        **({"workloads": rows_by_workload(point.contexts, mix)} if len(mix) > 1 else {}),
        "float_nodes": run.subject.float_nodes(placement, run.given_names),
        "shipped": placement == proof.placement,
    }


def prove_front(history: Sequence[Trial], run: Run) -> tuple[Proof, list[dict[str, Any]]]:
    """Write a file for each point of the front and race all of them against the user's own. Those that do not prove
    faster, or that others beat, are deleted. If no point may ship, `proof.prove` decides what ships. Gives that, and a
    row of summary.json for each point that is left, the fastest first."""
    folder = run.settings.output_dir / FRONT
    with writing(folder):
        folder.mkdir(exist_ok=True)
    placements = tuple(_promising(history, run))
    files = {placement: _written(placement, run) for placement in placements}
    queue = Finalists(placements, len(placements), are_points=True)
    raced = race_finished(queue, Field(run.settings.model), history, run, files)
    proven = {a.placement: _point(a, history, run) for a in raced.attempts if is_proven(a.to_float)}
    tradeoffs = {p: Tradeoff(point.ratio.median, point.trial.exactness) for p, point in proven.items()}
    points = _named([proven[placement] for placement in unbeaten(tradeoffs)], files, run)
    if not points:
        run.output.clear(FRONT)
    notes = raced.notes
    if len(points) < TARGET_POINTS:
        count = f"{len(points)} point{'s' * (len(points) != 1)}"
        tried = f"{len(placements)} candidate{'s' * (len(placements) != 1)}"
        short = "`time_budget`" if run.budget.is_late else f"`builds` {run.settings.builds}"
        notes = (*notes, f"the front has {count} of {tried}: {short} has no room for others: give more")
    holding = [point for point in points if point.holds]
    alike = [point for point in holding if is_alike(point.ratio, holding[0].ratio)]
    best = max(alike, key=lambda point: (round(point.trial.exactness), -point.ratio.median), default=None)
    if best is not None:  # the fastest that holds the limits, or the most exact of those that are equal to it
        run.given.check()
        copy_model(folder / f"{best.name}.onnx", run.settings.output_dir / FINAL)
        won = Attempt(best.trial.placement, best.contexts)
        proof = proof_of(won, best.trial, notes, raced.builds, run.store)
    else:
        proof = prove(history, run)
        apart = (PROVEN_APART,) if proof.shipped == "tuned" else ()
        told = tuple(dict.fromkeys([*proof.notes, *notes, *apart]))
        proof = replace(proof, builds=proof.builds + raced.builds, notes=told)
    return proof, [_row(point, proof, run) for point in points]


def _promising(history: Sequence[Trial], run: Run) -> list[Placement]:
    """The placements of the search that may become points of the front, as many as there is room for, the best one
    among them."""
    most = run.limits.max_noise
    points = undominated(history, run.settings.plan)
    able = {p: point for p, point in points.items() if not is_too_noisy(noise_of(point.db), most)}
    best = [p for p in able if p == best_of(history)]
    others = {p: point for p, point in able.items() if p not in best}
    placements = [*best, *spread(others, run.budget.points - len(best))]
    return placements[: run.budget.provable(len(placements))]


def _written(placement: Placement, run: Run) -> Path:
    """The file of a placement, named by its digest until the points get names."""
    file = run.output.claim(run.settings.output_dir / FRONT / f"{placement.digest}.onnx")
    run.output.claim(data_of(file))
    run.candidates.write_whole(placement, file)
    return file


def _point(attempt: Attempt, history: Sequence[Trial], run: Run) -> ProvenPoint:
    """The point of a file that proved faster than the user's, with the user's metric."""
    trial = trial_of(attempt.placement, history)
    assert trial is not None  # the search compared its outputs
    metric, holds = None, attempt.missed is None
    if run.settings.has_metric:
        try:
            metric = run.bench.metric(attempt.placement).value
        except EngineRefused:
            holds = False
    keep_rounds(attempt.placement, first_faster(attempt.to_float), run.store)
    return ProvenPoint(trial, attempt.to_float, holds, metric)


def _named(points: Sequence[ProvenPoint], files: Mapping[Placement, Path], run: Run) -> list[ProvenPoint]:
    """Name the points and their files after their SQNR (24db, or 24db-2 where that is taken), and write the placement
    of each beside its file. Other files are deleted."""
    found, stems = [], Counter[str]()
    for point in points:
        decibels, placement = point.trial.sqnr_db, point.trial.placement
        stem = "exact" if decibels is None else f"{decibels:.0f}db"
        stems[stem] += 1
        name = stem if stems[stem] == 1 else f"{stem}-{stems[stem]}"
        file = run.output.claim(files[placement].with_name(f"{name}.onnx"))
        if data_of(files[placement]).exists():  # its constants lie in a file named after it: both are written again
            run.output.claim(data_of(file))
            run.candidates.write_whole(placement, file)
        else:
            with writing(file):
                files[placement].replace(file)
        write_placement_of(placement, run.output.claim(file.with_suffix(".yaml")), run)
        found.append(replace(point, name=name, content=content_digest(files_of(file))))
    for file in files.values():
        for part in (file, data_of(file)):
            part.unlink(missing_ok=True)
    return found


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
        summary = read_summary(folder)
        if (rows := summary.get("front")) is None:
            raise BadOption(f"{folder} holds no finished run with a front: run tune with `front` first")
        files = {
            row["name"]: file for row in rows if (file := folder / FRONT / f"{Path(row['name']).name}.onnx").is_file()
        }
        row = next((row for row in rows if row["name"] == name), None)
        if row is None or name not in files:
            points = f"its points are {', '.join(files)}" if files else "no candidate of its run proved to be one"
            raise BadOption(f"{folder} has no point {name!r}: {points}")
        file = files[name]
        if row["content"] != content_digest(files_of(file)):
            raise BadOption(
                f"{file} is not the file that was proven: run tune with `front` again, which writes it anew"
            )
        check_names(folder, (FINAL, data_of(Path(FINAL)).name, PLACEMENT, SUMMARY, REPORT, DEPLOY_SETTINGS))
        check_loads(file, summary["engine"]["engine"])
        copy_model(file, folder / FINAL)
        with atomic_write(folder / PLACEMENT) as fresh:
            shutil.copyfile(folder / FRONT / f"{name}.yaml", fresh)
        picked: dict[str, Any] = plain(_as_shipped(summary, row, rows))
        write_json(folder / SUMMARY, picked)
        renew_kit(folder, picked)
        return picked


def _as_shipped(summary: Summary, row: FrontPoint, rows: Sequence[FrontPoint]) -> Summary:
    picked: Summary = {
        **summary,
        "shipped": "tuned",
        "baseline_ms": row["baseline_ms"],
        "final_ms": row["ms"],
        "ratio": row["ratio"],
        "ratio_low": row["low"],
        "ratio_high": row["high"],
        "ratio_to_given": None,
        "predicted_ratio": None,
        "pairs": row["pairs"],
        "float_nodes": row["float_nodes"],
        "output_sqnr_db": row["sqnr_db"],
        "output_accuracy": row["accuracy"],
        "metric_after": row["metric"],
        "constraint_met": row["holds_limits"],
        "by_threads": row["by_threads"],
        "edges": row["edges"],
        "weights": row["weights"],
        "front": [{**other, "shipped": other["name"] == row["name"]} for other in rows],
    }
    if "workloads" in row:
        picked["workloads"] = row["workloads"]
    if "metric_loss_high" in summary:  # it was that of what shipped before
        picked["metric_loss_high"] = None
    if "gave" in summary["rewrites"]:
        picked["rewrites"] = {**summary["rewrites"], "placement_gave": row["ratio"] / summary["rewrites"]["gave"]}
    return picked
