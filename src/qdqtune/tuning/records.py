"""What a finished run leaves: summary.json, placement.yaml, the pattern cache, models of regions."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qdqtune.engines.runner import Runner
from qdqtune.errors import writing
from qdqtune.placement import files
from qdqtune.search.regions import cache
from qdqtune.tuning.bench import Bench
from qdqtune.tuning.proof import Proof
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.subject import Subject
from qdqtune.types import Placement, Trial
from qdqtune.version import __version__


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for machines.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing(path):
        path.write_text(json.dumps(dict(content), indent=2, allow_nan=False) + "\n")


RAW = "optimized_raw.onnx"


UNITS = "units.json"


REGION_MODELS = "region_models"


def write_region_models(history: Sequence[Trial], subject: Subject, bench: Bench, folder: Path) -> None:
    """Keep the best model of each region: the whole model with the placement as it was when that region last won.

    This comes after the search: their constants are links, and ONNX's checker refuses a file with several of them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    regions = {p.digest: p.instances[0] for p in subject.patterns}
    wins = {t.proposal.pattern: t.placement for t in history if t.accepted and t.proposal.pattern}
    for pattern, placement in wins.items():
        region = regions[pattern]
        bench.write_linked(placement, folder / f"region_{region.id}_level_{region.level}.onnx")


def write_records(
    settings: Settings, subject: Subject, final: Placement, proof: Proof, history: Sequence[Trial], folder: Path
) -> None:
    """Write placement.yaml and the pattern cache.

    Raises:
        OutputError: a file cannot be written.
    """
    recorded = files.Recorded(final, settings.quant_type, settings.engine.name, settings.fix_inputs)
    files.write_placement(folder / "placement.yaml", recorded, settings.model.name)
    shipped_ratio = proof.ratio.median if proof.ratio and final.edges else 1.0
    caches = cache.cache_of(
        subject.model, subject.patterns, (final, shipped_ratio), history, settings.plan,
        minimum_distance=settings.config.pattern_cache_minimum_distance,
        maximum_entries=settings.config.pattern_cache_max_entries_per_pattern,
    )  # fmt: skip
    target = settings.state.with_name(settings.state.stem + "_pattern_cache.yaml")
    cache.write_cache(target, caches, subject.patterns)


def summary_of(
    settings: Settings, subject: Subject, runner: Runner, bench: Bench, history: Sequence[Trial], proof: Proof,
    final: Placement,
) -> dict[str, Any]:  # fmt: skip
    """What summary.json holds, but for limits and groups."""
    tuned = proof.ratio if final.edges else None
    sqnr = next((t.sqnr_db for t in history if t.placement == final), None)
    predicted = next((t.proposal.predicted for t in history if t.placement == final), None)
    description = runner.describe()
    return {
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
        "engine_seconds": round(runner.engine_seconds, 3),
        "patterns": len(subject.patterns),
        "regions": subject.region_count,
        "pairs": len({e.tensor for e in final}),
        "edges": len(final),
        "output_sqnr_db": sqnr,
        "accuracy_samples": len(subject.accuracy),
        "accuracy_held_out": subject.held_out,
        "seed": settings.seed,
        "versions": {"qdqtune": __version__, "onnx": version("onnx"), "python": platform.python_version(),
                     settings.engine.name: description.get("version", "")},
    }  # fmt: skip
