"""What a finished run leaves: summary.json, placement.yaml, the pattern cache."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qdqtune.errors import writing
from qdqtune.placement import files
from qdqtune.search.regions import cache
from qdqtune.tuning.proof import Proof
from qdqtune.tuning.run import Run
from qdqtune.types import Trial
from qdqtune.version import __version__


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for machines.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing(path):
        path.write_text(json.dumps(dict(content), indent=2, allow_nan=False) + "\n")


def write_records(history: Sequence[Trial], proof: Proof, run: Run) -> None:
    """Write placement.yaml and the pattern cache.

    Raises:
        OutputError: a file cannot be written.
    """
    settings, subject, final = run.settings, run.subject, proof.placement
    recorded = files.Recorded(final, settings.quant_type, settings.engine.name, settings.fix_inputs)
    files.write_placement(settings.output_dir / "placement.yaml", recorded, settings.model.name)
    caches = cache.cache_of(
        subject.model,
        subject.patterns,
        (final, proof.ratio.median if proof.ratio else 1.0),
        history,
        settings.plan,
        minimum_distance=settings.config.pattern_cache_minimum_distance,
        maximum_entries=settings.config.pattern_cache_max_entries_per_pattern,
    )
    target = settings.state.with_name(settings.state.stem + "_pattern_cache.yaml")
    cache.write_cache(target, caches, subject.patterns)


def summary_of(history: Sequence[Trial], proof: Proof, run: Run) -> dict[str, Any]:
    """What summary.json holds in every mode, but for the seconds of the whole run."""
    settings, subject, final, tuned = run.settings, run.subject, proof.placement, proof.ratio
    sqnr = next((t.sqnr_db for t in history if t.placement == final), None)
    predicted = next((t.proposal.predicted for t in history if t.placement == final), None)
    description = run.runner.describe()
    summary = {
        "model": str(settings.model),
        "engine": description,
        "mode": settings.mode,
        "shipped": proof.shipped,
        "baseline_ms": proof.float_seconds * 1e3,
        "final_ms": proof.final_seconds * 1e3,
        "ratio": tuned.median if tuned else 1.0,
        "ratio_low": tuned.low if tuned else None,
        "ratio_high": tuned.high if tuned else None,
        "ratio_to_given": proof.to_given.median if tuned and proof.to_given else None,
        "builds": 1 + sum(t.builds for t in history),
        "proof_builds": proof.builds,
        "predicted_ratio": predicted,
        "predicted_ms": None if predicted is None else predicted * proof.float_seconds * 1e3,
        "trials": len(history),
        "engine_seconds": round(run.runner.engine_seconds, 3),
        "patterns": len(subject.patterns),
        "regions": subject.region_count,
        "pairs": len({e.tensor for e in final}),
        "edges": len(final),
        "output_sqnr_db": sqnr,
        "accuracy_samples": len(subject.accuracy),
        "accuracy_held_out": subject.held_out,
        "seed": settings.seed,
        "versions": {
            "qdqtune": __version__,
            "onnx": version("onnx"),
            "python": platform.python_version(),
            settings.engine.name: description.get("version", ""),
        },
    }
    after = run.bench.metric(final) if settings.evaluate and final.edges else run.limits.before
    return summary | run.limits.summary(history, settings.plan, after)
