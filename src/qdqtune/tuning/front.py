"""The front: points that trade latency for accuracy, each a file that was proven against the user's own."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from qdqtune.engines.acceptance import check_loads
from qdqtune.errors import BadOption, EngineRefused, Failure, writing
from qdqtune.graph.loading import files_of
from qdqtune.graph.saving import data_of
from qdqtune.numerics.scores import equal_share
from qdqtune.placement.reading import count_pairs
from qdqtune.search import best_of
from qdqtune.search.front import TARGET_POINTS, WORTHWHILE_RATIO, FrontSearch, Tradeoff, named, unbeaten
from qdqtune.system.checks import content_digest
from qdqtune.system.writing import atomic_write, write_json
from qdqtune.timing.ratios import PAIRS, Ratio
from qdqtune.tuning.contexts import measured_at
from qdqtune.tuning.deploy import renew_kit
from qdqtune.tuning.folder import (
    BASELINE,
    DEPLOY_SETTINGS,
    FINAL,
    FRONT,
    PLACEMENT,
    REPORT,
    SUMMARY,
    alone,
    check_names,
)
from qdqtune.tuning.front_candidates import FrontCandidate, FrontCandidates, compare_candidates
from qdqtune.tuning.proof import Proof, copy_model, prove
from qdqtune.tuning.result import write_placement_of
from qdqtune.tuning.run import Run
from qdqtune.tuning.shipping import (
    Compared,
    first_faster,
    is_alike,
    is_proven,
    judged_together,
    rows_by_threads,
    rows_by_workload,
)
from qdqtune.tuning.store import plain
from qdqtune.tuning.subject import node_names
from qdqtune.tuning.summary import FrontPoint, Summary, read_summary
from qdqtune.types import Mix, Placement, Trial

PROVEN_APART = "what ships is no point of the front: it was proven as without `front`, on more pairs of builds"


@dataclass(frozen=True)
class ProvenPoint:
    """A point of the front: a file that was compared with the user's in each of `contexts`, on so many `pairs` of
    builds. `metric` is the user's own, `holds` whether it holds the limits on accuracy, `content` a
    digest of the file."""

    trial: Trial
    contexts: tuple[Compared, ...]
    pairs: int
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

    @property
    def tradeoff(self) -> Tradeoff:
        """Its latency and accuracy."""
        return Tradeoff(self.ratio.median, self.trial.exactness)


def shipped_point(front: Sequence[ProvenPoint]) -> ProvenPoint | None:
    """The point that ships: the fastest that holds the limits, on two pairs of builds at least, or the most exact of
    those that are equal to it. None if no point may."""
    holding = [p for p in front if p.holds and p.pairs >= PAIRS]
    alike = [p for p in holding if is_alike(p.ratio, holding[0].ratio)]
    return max(alike, key=lambda p: (round(p.trial.exactness), -p.ratio.median), default=None)


@dataclass(frozen=True)
class Front:
    """What ships; the points that no other one beats, the fastest first; and the trials of candidates that the search
    had not built."""

    proof: Proof
    points: tuple[ProvenPoint, ...]
    trials: tuple[Trial, ...] = ()

    def rows(self, run: Run) -> list[dict[str, Any]]:
        """The rows `front` of summary.json."""
        names = node_names(run.settings.model)
        return [
            _row(point, run.subject.mix)
            | {
                "float_nodes": run.subject.float_nodes(point.trial.placement, names),
                "shipped": point.trial.placement == self.proof.placement,
            }
            for point in self.points
        ]


def _row(point: ProvenPoint, mix: Mix) -> dict[str, Any]:
    accuracy, placement = point.trial.accuracy, point.trial.placement
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
    }


def prove_front(history: Sequence[Trial], run: Run, search: FrontSearch | None) -> Front:
    """Write a file for each candidate of the front and compare it with the user's own. Candidates that do not prove
    faster, or that others beat, are deleted. If no point may ship, `proof.prove` decides what ships."""
    folder = run.output.clear(FRONT)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    run.candidates.write_whole(Placement(), run.settings.output_dir / BASELINE)
    compared = compare_candidates(history, run, search)
    proven = _proven(compared.promising, run)
    held = [point for point in proven if is_proven(point.contexts)]
    points = _named(unbeaten(held), compared.files, run)
    if not points:
        run.output.clear(FRONT)
    builds = compared.builds - len(compared.trials)
    notes = () if len(points) >= TARGET_POINTS else (_short_front(compared, len(points), run),)
    if (best := shipped_point(points)) is None:
        again = best_of(history)  # tried as without a front, unless it is known to be slower
        candidates = compared.by_placement.values()
        tried = {c.placement for c in candidates if c.placement != again or c.is_slower}
        usual = prove([t for t in history if t.placement not in tried], run)
        apart = (PROVEN_APART,) if usual.shipped == "tuned" else ()
        proof = replace(usual, builds=usual.builds + builds, notes=(*usual.notes, *notes, *apart))
        return Front(proof, tuple(points), compared.trials)
    run.given.check()
    copy_model(folder / f"{best.name}.onnx", run.settings.output_dir / FINAL)
    proof = Proof(
        shipped="tuned",
        placement=best.trial.placement,
        ratio=best.ratio,
        float_seconds=best.shown.a_seconds,
        final_seconds=best.shown.b_seconds,
        notes=notes,
        builds=builds,
        contexts=best.contexts,
        in_file=best.trial.placement,
        trial=best.trial,
    )
    return Front(proof, tuple(points), compared.trials)


def _short_front(compared: FrontCandidates, points: int, run: Run) -> str:
    """Whether more builds or time would give a front more points."""
    settings, is_late = run.settings, run.budget.is_late
    count = len(compared.by_placement)
    told = f"the front has {points} point{'s' * (points != 1)} of {count} candidate{'s' * (count != 1)}"
    if not is_late and not compared.has_more():
        return f"{told}: no others are predicted that differ and take at most {WORTHWHILE_RATIO:.1%} of float's time"
    is_timed = settings.time_budget is not None and (is_late or compared.has_builds)
    return f"{told}: {'`time_budget`' if is_timed else f'`builds` {settings.builds}'} has no room for others: give more"


def _named(points: Sequence[ProvenPoint], files: Mapping[Placement, Path], run: Run) -> list[ProvenPoint]:
    """Name the points and their files, and write the placement of each beside its file. Other files are deleted."""
    found = []
    for name, point in named(points).items():
        placement = point.trial.placement
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


def _proven(candidates: Sequence[FrontCandidate], run: Run) -> list[ProvenPoint]:
    """The candidates, each judged by all its pairs of builds and by the user's metric; without those on whose files the
    engine failed."""
    found, counts, plan = [], run.settings.thread_counts, run.settings.proof_plan
    at = partial(measured_at, mix=run.subject.mix, counts=counts)
    at_counts = [
        judged_together(
            [[m if isinstance(m, Failure) else at(m)[n] for m in c.measured] for c in candidates], plan, count
        )
        for n, count in enumerate(counts)
    ]
    for candidate, contexts in zip(candidates, zip(*at_counts, strict=True), strict=True):
        compared = tuple(one for one in contexts if one is not None)
        if len(compared) < len(contexts):
            continue
        trial = run.limits.with_metric(candidate.trial, run.bench.metric)
        holds, value = trial.holds is True, None
        if run.settings.has_metric:
            try:
                value = run.bench.metric(trial.placement).value
            except EngineRefused:
                holds = False
        found.append(ProvenPoint(trial, compared, len(candidate.measured), holds, value))
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
        return _picked(folder, name)


def _picked(folder: Path, name: str) -> Mapping[str, Any]:
    summary = read_summary(folder)
    if (rows := summary.get("front")) is None:
        raise BadOption(f"{folder} holds no finished run with a front: run tune with `front` first")
    files = {row["name"]: file for row in rows if (file := folder / FRONT / f"{Path(row['name']).name}.onnx").is_file()}
    row = next((row for row in rows if row["name"] == name), None)
    if row is None or name not in files:
        points = f"its points are {', '.join(files)}" if files else "no candidate of its run proved to be one"
        raise BadOption(f"{folder} has no point {name!r}: {points}")
    file = files[name]
    if row["content"] != content_digest(files_of(file)):
        raise BadOption(f"{file} is not the file that was proven: run tune with `front` again, which writes it anew")
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
    """The summary as it is if this point ships."""
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
        picked["metric_loss_high"] = picked["metric_loss_unknown"] = None
    if "gave" in summary["rewrites"]:
        picked["rewrites"] = {**summary["rewrites"], "placement_gave": row["ratio"] / summary["rewrites"]["gave"]}
    return picked
