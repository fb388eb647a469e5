"""The functions that scripts call: the shared benchmark, and a whole tuning run."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import onnx

from qdqtune.autotune.autotuner import QDQAutotuner
from qdqtune.autotune.benchmark import Benchmark, benchmark_onnx_model, init_benchmark_instance, instance
from qdqtune.autotune.pattern_cache import PatternCache
from qdqtune.autotune.schemes import Config
from qdqtune.cli import progress
from qdqtune.engines.shapes import usual_shapes
from qdqtune.graph.loading import load
from qdqtune.placement.reading import is_quantized, strip_pairs
from qdqtune.search import region as search
from qdqtune.search.regions import discovery, patterns
from qdqtune.search.regions.patterns import Pattern
from qdqtune.tuning.folder import REGION_MODELS
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import EFFORTS, Settings
from qdqtune.tuning.store import read_records
from qdqtune.types import QuantType

__all__ = ["Benchmark", "benchmark_onnx_model", "init_benchmark_instance", "region_pattern_autotuning_workflow"]


def region_pattern_autotuning_workflow(
    model_path: str | Path,
    output_dir: str | Path = "autotuner_output",
    num_schemes_per_region: int | None = None,
    pattern_cache_file: str | Path | None = None,
    state_file: str | Path | None = None,
    quant_type: QuantType = "int8",
    default_dq_dtype: Literal["float16", "float32", "bfloat16"] = "float32",
    qdq_baseline_model: str | Path | None = None,
    node_filter_list: Sequence[str] | None = None,
    verbose: bool = False,
    calibration_data: str | None = None,
) -> QDQAutotuner:
    """Tune a model on the engine of the benchmark, as `qdqtune.tuning.loop.tune` does, into `output_dir`.

    Every pattern gets `num_schemes_per_region` schemes; by default the whole search has the builds of
    `--effort default`. The same call goes on where an interrupted one was. Gives an autotuner that holds the result.

    Raises:
        QdqtuneError: see `qdqtune.tuning.loop.tune`; AutotunerError before `init_benchmark_instance`.
    """
    benchmark, path, usual = instance(), Path(model_path), EFFORTS["default"]
    tuned, schemes = patterns_of(path), num_schemes_per_region
    data = calibration_data or benchmark.calibration_data
    settings = Settings(
        model=path,
        output_dir=Path(output_dir),
        engine=benchmark.spec,
        mode="region",
        quant_type=quant_type,
        default_dq_dtype=default_dq_dtype,
        node_filter=tuple(node_filter_list or ()),
        calibration_data=data,
        rewrites="off",
        input_shapes=usual_shapes(benchmark.spec, data),
        plan=benchmark.search_plan,
        config=search.Config(schemes_per_region=schemes or usual.schemes_per_region),
        builds=builds_for(schemes, tuned) if schemes else usual.builds["region"],
        min_sqnr=None,
        min_agreement=None,
        pattern_cache=_path(pattern_cache_file),
        state_file=_path(state_file),
        qdq_baseline=_path(qdq_baseline_model),
    )
    with progress.shown(verbose=verbose) as observer:
        result = tune(settings, observer)
    name_logs(settings.output_dir, settings.state, tuned)
    cache = PatternCache.load(settings.state.with_name(f"{settings.state.stem}_pattern_cache.yaml"))
    autotuner = QDQAutotuner(onnx.load(path))
    config = Config(default_quant_type=quant_type, default_dq_dtype=default_dq_dtype, calibration_data=data)
    autotuner.initialize(config, cache)
    autotuner.adopt(result, settings.plan)
    return autotuner


def patterns_of(
    model: Path,
    method: Literal["auto", "names", "topology"] = "auto",
    fix_inputs: Mapping[str, Any] = MappingProxyType({}),
) -> Sequence[Pattern]:
    """The patterns that a run in region mode tunes.

    Raises:
        BadModel: the file cannot be used.
    """
    graph = load(model, fix_inputs=fix_inputs)
    graph = strip_pairs(graph) if is_quantized(graph) else graph
    return patterns.group(graph, discovery.find(graph, method))


def builds_for(schemes: int, tuned: Sequence[Pattern]) -> int:
    """Builds in which every pattern gets so many schemes, and a fifth more for wins, which are built again."""
    return 16 + ceil(1.2 * schemes * len(tuned))


def name_logs(folder: Path, state: Path, tuned: Sequence[Pattern]) -> None:
    """Give the logs of a run the names that users of regions look for, beside their own: of region and scheme."""
    if not state.exists():
        return
    (folder / REGION_MODELS).mkdir(exist_ok=True)
    region_of = {pattern.digest: pattern.instances[0].id for pattern in tuned}
    tried = {r["key"]: region_of.get(r["pattern"]) for r in read_records(state) if r["key"].startswith("trial:")}
    counts: Counter[int] = Counter()
    names = {"final.log": "final_0_optimized_final.log"}
    for number, region in enumerate(tried.values(), 1):
        if region is not None:
            names[f"region_{region}_scheme_{counts[region]}.log"] = f"trial_{number:03}.log"
            counts[region] += 1
    for name, own in names.items():
        if (folder / "logs" / own).exists():
            shutil.copyfile(folder / "logs" / own, folder / "logs" / name)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)
