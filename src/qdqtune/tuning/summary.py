"""Writes what a finished run leaves: summary.json, placement.yaml, the pattern cache."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qdqtune.placement import files
from qdqtune.placement.reading import count_pairs
from qdqtune.search import ratios_to_float
from qdqtune.search.front import MeasuredPoint, named, spread, undominated
from qdqtune.search.regions import cache
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.folder import PLACEMENT, pattern_cache_of
from qdqtune.tuning.proof import Proof, rows_by_workload, rows_of
from qdqtune.tuning.run import Run
from qdqtune.tuning.run_files import FORMAT
from qdqtune.types import Placement, Trial
from qdqtune.version import __version__

MET = 8
"""Candidates that the summary shows of those that nothing beat."""


def write_records(history: Sequence[Trial], proof: Proof, run: Run) -> None:
    """Write placement.yaml and the pattern cache.

    Raises:
        OutputError: a file cannot be written.
    """
    settings, subject, final = run.settings, run.subject, proof.placement
    write_placement_of(final, settings.output_dir / PLACEMENT, run)
    caches = cache.cache_of(
        subject.model,
        subject.patterns,
        (final, proof.ratio.median if proof.ratio else 1.0),
        history,
        settings.plan,
        minimum_distance=settings.config.pattern_cache_minimum_distance,
        maximum_entries=settings.config.pattern_cache_max_entries_per_pattern,
    )
    cache.write_cache(pattern_cache_of(settings.state), caches, subject.patterns)


def write_placement_of(placement: Placement, path: Path, run: Run) -> None:
    """Write a placement of a run's model.

    Raises:
        OutputError: the file cannot be written.
    """
    settings = run.settings
    engine, calibration = settings.engine.name, settings.calibration.chosen(run.subject.ranges)
    how = calibration, run.subject.rewrites, settings.weight_rounding
    recorded = files.Recorded(placement, settings.quant_type, engine, settings.fix_inputs, *how)
    files.write_placement(path, recorded, settings.model.name)


def summary_of(history: Sequence[Trial], proof: Proof, run: Run) -> dict[str, Any]:
    """What summary.json holds in every mode, but for the seconds of the whole run."""
    settings, subject, final, tuned = run.settings, run.subject, proof.placement, proof.ratio
    accuracy = next((t.accuracy for t in history if t.placement == final), None)
    predicted = next((t.proposal.predicted for t in history if t.placement == final), None)
    description = run.runner.describe()
    summary = {
        "format": FORMAT,
        "model": str(settings.model),
        "engine": description,
        "mode": settings.mode,
        "state_file": None if settings.state_file is None else str(settings.state.absolute()),
        "rewrites": _rewrites(run, proof),
        "shipped": proof.shipped,
        "baseline_ms": proof.float_seconds * 1e3,
        "final_ms": proof.final_seconds * 1e3,
        "ratio": tuned.median if tuned else 1.0,
        "ratio_low": tuned.low if tuned else None,
        "ratio_high": tuned.high if tuned else None,
        "ratio_to_given": proof.to_given.median if tuned and proof.to_given else None,
        "by_threads": rows_of(proof.standings),
        **({"workloads": rows_by_workload(proof.standings, subject.mix)} if len(subject.mix) > 1 else {}),
        "builds": 1 + run.found.builds + sum(t.builds for t in history),
        "proof_builds": proof.builds,
        "predicted_ratio": predicted,
        "predicted_ms": None if predicted is None else predicted * proof.float_seconds * 1e3,
        "trials": len(history),
        "engine_seconds": round(run.runner.engine_seconds, 3),
        "patterns": len(subject.patterns),
        "regions": subject.region_count,
        "pairs": count_pairs(final),
        **({"weights": dict(Counter(s.name for s in final.weight_formats.values()))} if final.compressed else {}),
        "edges": len(final),
        "output_sqnr_db": None if accuracy is None else accuracy.sqnr_db,
        "output_accuracy": None if accuracy is None else asdict(accuracy),
        "fastest_without_limits": _fastest(history, proof, run),
        "met": list(_met(history, proof, settings.plan)),
        "accuracy_samples": len(subject.accuracy) if subject.prepared.has_real_samples else 0,
        "accuracy_held_out": subject.held_out,
        "seed": settings.seed,
        "versions": {
            "qdqtune": __version__,
            "onnx": version("onnx"),
            "python": platform.python_version(),
            settings.engine.name: description.get("version", ""),
        },
    }
    after = run.bench.metric(final) if settings.evaluate and final else run.limits.before
    return summary | run.limits.summary(history, settings.plan, after)


def _rewrites(run: Run, proof: Proof) -> dict[str, Any]:
    """What the float model was rewritten by before pairs were placed; and where that was measured, which share of the
    ratio of what ships is its, and which that of the placement."""
    made, found = run.subject.rewrites, run.found
    told: dict[str, Any] = {"folded": made.folded, "names": list(made.names)}
    if found.tried:
        told |= {"tried": [one.row for one in found.tried], "builds": found.builds}
    if found.names and proof.ratio is not None:
        told |= {"gave": found.gave, "placement_gave": proof.ratio.median / found.gave}
    return told


def _met(history: Sequence[Trial], proof: Proof, plan: Plan) -> Iterator[dict[str, Any]]:
    """Candidates that nothing else beat in both latency and accuracy, as the search has measured them; and what ships,
    which of those that cannot be told apart need not be the one that looked best."""
    unbeaten = undominated(history, plan)
    ratios = ratios_to_float(history, plan)
    shipped = [MeasuredPoint(ratios[t.placement], t) for t in history if t.placement == proof.placement][-1:]
    points = (p for p in spread(unbeaten, MET) if p.trial.placement != proof.placement)
    for name, point in named(sorted([*points, *shipped], key=lambda p: p.ratio)).items():
        accuracy = point.trial.accuracy
        yield {
            "name": name,
            "number": point.trial.number,
            "origin": point.trial.proposal.origin,
            "ratio": point.ratio,
            "sqnr_db": point.trial.sqnr_db,
            "agreement": None if accuracy is None else accuracy.agreement,
            "pairs": count_pairs(point.trial.placement),
            **({"weights": len(point.trial.placement.compressed)} if point.trial.placement.compressed else {}),
            "holds_limits": point.trial.holds is not False,
            "shipped": point.trial.placement == proof.placement,
        }


def _fastest(history: Sequence[Trial], proof: Proof, run: Run) -> dict[str, float | None] | None:
    """What the limits cost: the fastest candidate that misses them, where it is faster than what ships."""
    ratios = ratios_to_float(history, run.settings.plan)
    missing = [(ratios[t.placement], t.sqnr_db) for t in history if t.holds is False and t.placement in ratios]
    fastest = min(missing, key=lambda pair: pair[0], default=None)
    if fastest is None or fastest[0] >= (proof.ratio.median if proof.ratio else 1.0):
        return None
    return {"ratio": fastest[0], "sqnr_db": fastest[1]}
