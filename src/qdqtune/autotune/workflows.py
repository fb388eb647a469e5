"""The functions that scripts call: the shared benchmark, and a whole tuning run."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import onnx

from qdqtune.autotune.autotuner import QDQAutotuner
from qdqtune.autotune.autotuner_base import cache_beside
from qdqtune.autotune.benchmark import Benchmark, benchmark_onnx_model, init_benchmark_instance, instance
from qdqtune.autotune.common import Config, PatternCache
from qdqtune.autotune.graphs import AutotunerError
from qdqtune.autotune.options import AutotuneOptions
from qdqtune.cli import progress
from qdqtune.commands.inputs import on_disk
from qdqtune.commands.tune import tune
from qdqtune.search.regions.patterns import Pattern
from qdqtune.tuning.folder import LOGS, REGION_MODELS
from qdqtune.tuning.observer import Observers, Silent, State
from qdqtune.types import QuantType, Trial

log = logging.getLogger("qdqtune.autotune")

__all__ = ["Benchmark", "benchmark_onnx_model", "init_benchmark_instance", "region_pattern_autotuning_workflow"]


def region_pattern_autotuning_workflow(
    model_or_path: str | Path | onnx.ModelProto | None = None,
    output_dir: str | Path | None = None,
    num_schemes_per_region: int | None = None,
    pattern_cache_file: str | Path | None = None,
    state_file: str | Path | None = None,
    quant_type: QuantType = "int8",
    default_dq_dtype: Literal["float16", "float32", "bfloat16"] = "float32",
    qdq_baseline_model: str | Path | None = None,
    node_filter_list: Sequence[str] | None = None,
    verbose: bool = False,
    calibration_data: str | None = None,
    *,
    model_path: str | Path | None = None,
) -> QDQAutotuner:
    """Tune a model on the engine of the benchmark, as `qdqtune.tuning.loop.tune` does, into `output_dir`.

    The model is a file, by either of two names, or an ONNX model.

    Every pattern gets `num_schemes_per_region` schemes; by default the whole search has the builds of
    `--effort default`. The same call goes on where an interrupted one was. Gives an autotuner that holds the result.

    Raises:
        QdqtuneError: see `qdqtune.tuning.loop.tune`; AutotunerError before `init_benchmark_instance`.
    """
    benchmark, model = instance(), model_or_path if model_path is None else model_path
    if model is None:
        raise AutotunerError("give the model: a path, or an onnx.ModelProto")
    data = calibration_data or benchmark.calibration_data
    options = AutotuneOptions(
        model,
        output_dir=output_dir or "autotuner_output",
        engine=benchmark.spec,
        mode="region",
        precision="fp32",
        quant_type=quant_type,
        default_dq_dtype=default_dq_dtype,
        node_filter=node_filter_list or (),
        calibration_data=data,
        rewrites="off",
        schemes_per_region=num_schemes_per_region or None,
        min_sqnr=None,
        min_agreement=None,
        pattern_cache=pattern_cache_file,
        state_file=state_file,
        qdq_baseline=qdq_baseline_model,
    )
    with on_disk(options) as here, progress.shown(verbose=verbose) as observer:
        path = Path(str(here.model))
        settings, logs = here.settings(plan=benchmark.search_plan), RegionLogs(here.output_dir)
        result = tune(settings, Observers((observer, logs)))
        logs.finish()
        autotuner = QDQAutotuner(onnx.load(path))
    config = Config(default_quant_type=quant_type, default_dq_dtype=default_dq_dtype, calibration_data=data)
    autotuner.initialize(config, PatternCache.load(cache_beside(settings.state)))
    autotuner.adopt(result, settings.plan)
    return autotuner


class RegionLogs(Silent):
    """Gives the logs of a run the names that users of regions look for, beside their own: of region and scheme.

    Each has its name as soon as its candidate was measured.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._region_of: dict[str, int] = {}
        self._counts: Counter[int] = Counter()

    def patterns(self, tuned: Sequence[Pattern]) -> None:
        self._region_of = {pattern.digest: pattern.instances[0].id for pattern in tuned}

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        region = self._region_of.get(trial.proposal.pattern)
        where = "in all regions" if region is None else f"of region {region}"
        log.debug("candidate %d %s: %s, %s", trial.number, where, trial.proposal.origin, outcome)
        if region is not None:
            self._name(f"trial_{trial.number:03}.log", f"region_{region}_scheme_{self._counts[region]}.log")
            self._counts[region] += 1

    def finish(self) -> None:
        """The run has ended: the log of what ships, and the folder of region models, which may be empty."""
        # one for each pair of builds of the proof and each number of threads; without a proof the baseline ships
        proven = sorted(path.name for path in (self._folder / LOGS).glob("final_*_optimized_final.log"))
        self._name((*proven, "baseline.log")[0], "final.log")
        if (self._folder / LOGS).is_dir():
            (self._folder / REGION_MODELS).mkdir(exist_ok=True)

    def _name(self, own: str, name: str) -> None:
        if (self._folder / LOGS / own).exists():
            shutil.copyfile(self._folder / LOGS / own, self._folder / LOGS / name)
