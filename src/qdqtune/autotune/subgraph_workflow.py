"""Subgraph mode from a script."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from qdqtune.autotune.benchmark import TrtExecBenchmark, instance_or_default
from qdqtune.autotune.graphs import nodes_of
from qdqtune.autotune.options import AutotuneOptions
from qdqtune.commands.inputs import SamplesLike, on_disk
from qdqtune.commands.tune import tune
from qdqtune.graph.loading import load
from qdqtune.types import QuantType


def subgraph_autotuning_workflow(
    model_path: str | Path,
    output_dir: str | Path,
    graph_json_path: str | Path | None = None,
    quant_type: QuantType = "int8",
    plugin_libraries: Sequence[str] | None = None,
    schemes_per_group: int = 5,
    strongly_typed: bool = True,
    extra_trtexec_args: Sequence[str] | None = None,
    incremental_validation: bool = True,
    quantizable_ops: Collection[str] | None = None,
    calibration_data: SamplesLike | None = None,
    calibration_method: Literal["max", "entropy", "minmax", "percentile", "mse"] = "mse",
    high_precision_dtype: Literal["fp32", "fp16"] | None = None,
) -> str:
    """Tune a model by its fusion groups, as `qdqtune tune --mode subgraph` does. Gives the path of the final model.

    It runs on the engine of `init_benchmark_instance`, or on trtexec where there is none. Each group has four schemes,
    whatever `schemes_per_group` says; engines of TensorRT 10 and later are strongly typed in any case.

    Raises:
        QdqtuneError: see `qdqtune.tune`.
    """
    trtexec = partial(TrtExecBenchmark, None, 5, 20, plugin_libraries, extra_trtexec_args)
    benchmark = instance_or_default(trtexec)
    path = Path(model_path)
    options = AutotuneOptions(
        path,
        mode="subgraph",
        engine=benchmark.spec,
        output_dir=Path(output_dir),
        graph_json=graph_json_path,
        quant_type=quant_type,
        incremental_validation=incremental_validation,
        node_filter=nodes_of(load(path), quantizable_ops) if quantizable_ops else (),
        calibration_data=calibration_data,
        calibration_method="minmax" if calibration_method == "max" else calibration_method,
        precision=high_precision_dtype,
        min_sqnr="auto" if calibration_data is not None else None,  # users expect a file without samples
    )
    with on_disk(options) as here:
        result = tune(here.settings(plan=benchmark.search_plan))
    return str(result.file)
