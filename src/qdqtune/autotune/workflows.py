"""The functions that scripts call: the shared benchmark, and a whole tuning run."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Literal

import onnx
from rich.console import Console

from qdqtune import patterns, regions, report
from qdqtune.autotune.autotuner import QDQAutotuner
from qdqtune.autotune.benchmark import Benchmark, benchmark_onnx_model, init_benchmark_instance, instance
from qdqtune.autotune.schemes import Config, PatternCache
from qdqtune.engines import QuantType
from qdqtune.loading import load
from qdqtune.settings import EFFORTS, Settings
from qdqtune.strategies import region as search
from qdqtune.tune import REGION_MODELS, tune

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
    """Tune a model on the engine of the benchmark, as `qdqtune.tune.tune` does, into `output_dir`.

    Every pattern gets `num_schemes_per_region` schemes; by default the whole search has the builds of
    `--effort default`. The same call goes on where an interrupted one was. Gives an autotuner that holds the result.

    Raises:
        QdqtuneError: see `qdqtune.tune.tune`; AutotunerError before `init_benchmark_instance`.
    """
    benchmark, folder = instance(), Path(output_dir)
    config = Config(quant_type, default_dq_dtype, verbose=verbose, calibration_data=calibration_data)
    settings = Settings(
        model=Path(model_path), output_dir=folder, engine=benchmark.spec, mode="region", quant_type=quant_type,
        default_dq_dtype=default_dq_dtype, node_filter=tuple(node_filter_list or ()), calibration_data=calibration_data,
        config=search.Config(schemes_per_region=num_schemes_per_region or EFFORTS["default"].schemes_per_region),
        builds=builds_for(num_schemes_per_region, Path(model_path)),
        plan=benchmark.search_plan, pattern_cache=_path(pattern_cache_file), state_file=_path(state_file),
        qdq_baseline=_path(qdq_baseline_model),
    )  # fmt: skip
    with report.progress(Console(stderr=True), verbose=verbose) as observer:
        result = tune(settings, observer)
    complete(settings.model, folder, settings.state)
    cache = PatternCache.load(settings.state.with_name(f"{settings.state.stem}_pattern_cache.yaml"))
    autotuner = QDQAutotuner(onnx.load(settings.model))
    autotuner.initialize(config, cache)
    autotuner.adopt(result)
    return autotuner


def builds_for(schemes: int | None, model: Path) -> int:
    """Builds in which every pattern gets so many schemes, and a fifth more for wins, which are built again.

    Raises:
        BadModel: the file cannot be used.
    """
    if schemes is None:
        return EFFORTS["default"].builds["region"]
    return 16 + ceil(1.2 * schemes * len(_patterns(model)))


def _patterns(model: Path) -> Sequence[patterns.Pattern]:
    graph = load(model)
    return patterns.group(graph, regions.find(graph))


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def complete(model: Path, folder: Path, state: Path) -> None:
    """Give the logs of a run the names that users of regions look for, beside their own: of region and scheme."""
    (folder / REGION_MODELS).mkdir(exist_ok=True)
    region_of = {p.digest: p.instances[0].id for p in _patterns(model)}
    records = (json.loads(line.removeprefix("- ")) for line in state.read_text().splitlines())
    trials = [record["pattern"] for record in records if record["key"].startswith("trial:")]
    counts: Counter[str] = Counter()
    names = {"final.log": "final_0_optimized_final.log"}
    for number, pattern in enumerate(trials, 1):
        if pattern in region_of:
            names[f"region_{region_of[pattern]}_scheme_{counts[pattern]}.log"] = f"trial_{number:03}.log"
            counts[pattern] += 1
    for name, own in names.items():
        if (folder / "logs" / own).exists():
            shutil.copyfile(folder / "logs" / own, folder / "logs" / name)
