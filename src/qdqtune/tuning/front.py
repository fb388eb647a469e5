"""The front: points that trade latency for accuracy, each a file that was proven against the user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qdqtune.errors import EngineRefused, writing
from qdqtune.graph.saving import data_of
from qdqtune.numerics.scores import equal_share
from qdqtune.placement.reading import count_pairs
from qdqtune.search import best_of
from qdqtune.search.front import TARGET_POINTS, Tradeoff, is_too_noisy, spread, unbeaten, undominated
from qdqtune.tuning.folder import FINAL, FRONT
from qdqtune.tuning.proof import Field, Proof, copy_model, keep_rounds, proof_of, prove, race_finished, unproven_file
from qdqtune.tuning.result import write_placement_of
from qdqtune.tuning.run import Run
from qdqtune.tuning.shipping import (
    Attempt,
    Finalists,
    first_faster,
    is_proven,
    rows_by_threads,
    shipped,
)
from qdqtune.types import EQUAL_DB, Placement, Trial, noise_of

PROVEN_APART = "what ships is no point of the front: it was proven as without `front`, on more pairs of builds"


def prove_front(history: Sequence[Trial], run: Run) -> tuple[Proof, list[dict[str, Any]]]:
    """Race a file for each point of the front against the user's own. Those that prove faster, and that no other beats,
    get names. If no point may ship, `proof.prove` decides what ships. Gives that, and a row of summary.json for each
    point, the fastest first."""
    folder = run.settings.output_dir / FRONT
    placements = _promising(history, run)
    queue = Finalists(placements, len(placements), are_points=True)
    raced = race_finished(queue, Field(run.settings.model), history, run)
    proven: dict[Placement, Attempt] = {}
    for attempt in raced.attempts:
        if is_proven(attempt.to_float):
            proven[attempt.placement] = _with_metric(attempt, run) if run.settings.has_metric else attempt
            keep_rounds(attempt.placement, first_faster(attempt.to_float), run.store)
    tradeoffs = {p: Tradeoff(attempt.ratio.median, attempt.exactness) for p, attempt in proven.items()}
    points = [proven[placement] for placement in unbeaten(tradeoffs)]
    with writing(folder):
        folder.mkdir(exist_ok=True)
    rows, files, stems = [], dict[Placement, Path](), Counter[str]()
    for point in points:
        stem = "exact" if point.exactness == EQUAL_DB else f"{point.exactness:.0f}db"
        stems[stem] += 1
        name = stem if stems[stem] == 1 else f"{stem}-{stems[stem]}"
        files[point.placement] = _named(point.placement, name, run)
        rows.append(_row(name, point, files[point.placement], run))
    if not points:
        run.output.clear(FRONT)
    notes = raced.notes
    if len(points) < TARGET_POINTS:
        count = f"{len(points)} point{'s' * (len(points) != 1)}"
        tried = f"{len(placements)} candidate{'s' * (len(placements) != 1)}"
        short = "`time_budget`" if run.budget.is_late else f"`builds` {run.settings.builds}"
        notes = (*notes, f"the front has {count} of {tried}: {short} has no room for others: give more")
    if (won := shipped(points)) is not None:
        run.given.check()
        copy_model(files[won.placement], run.settings.output_dir / FINAL)
        proof = proof_of(won, notes, raced.builds, run.store)
    else:
        proof = prove(history, run)
        apart = (PROVEN_APART,) if proof.shipped == "tuned" else ()
        told = tuple(dict.fromkeys([*proof.notes, *notes, *apart]))
        proof = replace(proof, builds=proof.builds + raced.builds, notes=told)
    for row, point in zip(rows, points, strict=True):
        row["shipped"] = point.placement == proof.placement
    return proof, rows


def _with_metric(attempt: Attempt, run: Run) -> Attempt:
    assert attempt.trial is not None  # it may ship
    try:
        return replace(attempt, trial=replace(attempt.trial, metric=run.bench.metric(attempt.placement).value))
    except EngineRefused as refused:
        return replace(attempt, missed=attempt.missed or str(refused))


def _promising(history: Sequence[Trial], run: Run) -> tuple[Placement, ...]:
    """The placements of the search that may become points of the front, as many as there is room for, the best one
    among them."""
    most = run.limits.max_noise
    points = undominated(history, run.settings.plan)
    able = {p: point for p, point in points.items() if not is_too_noisy(noise_of(point.db), most)}
    best = [p for p in able if p == best_of(history)]
    others = {p: point for p, point in able.items() if p not in best}
    placements = (*best, *spread(others, run.budget.points - len(best)))
    return placements[: run.budget.provable(len(placements))]


def _named(placement: Placement, name: str, run: Run) -> Path:
    """Move the file of a placement that was raced to the folder of the front, with the placement beside it."""
    raced, file = unproven_file(placement, run), run.output.claim(run.settings.output_dir / FRONT / f"{name}.onnx")
    if data_of(raced).exists():  # its constants lie in a file named after it: both are written again
        run.output.claim(data_of(file))
        run.candidates.write_whole(placement, file)
    else:
        with writing(file):
            raced.replace(file)
    write_placement_of(placement, run.output.claim(file.with_suffix(".yaml")), run)
    return file


def _row(name: str, point: Attempt, file: Path, run: Run) -> dict[str, Any]:
    placement, trial, shown = point.placement, point.trial, first_faster(point.to_float)
    assert trial is not None  # a point was measured
    return {
        "name": name,
        "file": f"{FRONT}/{file.name}",
        "ratio": shown.ratio.median,
        "low": shown.ratio.low,
        "high": shown.ratio.high,
        "sqnr_db": trial.sqnr_db,
        "agreement": equal_share(trial.accuracy),
        "metric": trial.metric,
        "pairs": count_pairs(placement),
        "weights": dict(Counter(weight_format.name for weight_format in placement.weight_formats.values())),
        "baseline_ms": shown.a_seconds * 1e3,
        "ms": shown.b_seconds * 1e3,
        "holds_limits": point.missed is None,
        "by_threads": rows_by_threads(point.to_float),
    }
