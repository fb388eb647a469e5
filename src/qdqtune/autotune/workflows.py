"""ModelOpt's functions for whole runs, and the groups of nodes that TensorRT fuses."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import onnx
from onnx.utils import Extractor

from qdqtune.autotune.autotuner import QDQAutotuner, TrtExecBenchmark, instance, rounds_for
from qdqtune.autotune.autotuner import benchmark_onnx_model as benchmark_onnx_model
from qdqtune.autotune.autotuner import init_benchmark_instance as init_benchmark_instance
from qdqtune.autotune.insertion_points import Config, PatternCache
from qdqtune.autotune.region_search import AutotunerError, GraphLike, as_model, as_proto
from qdqtune.calibration.options import SamplesLike
from qdqtune.cli import progress
from qdqtune.cli.tune import TuneArguments
from qdqtune.commands.inputs import on_disk
from qdqtune.commands.tune import tune
from qdqtune.engines.runner import Runner
from qdqtune.engines.tensorrt.options import timing_cache
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.graph.loading import load
from qdqtune.options import (
    COUNT,
    FILE,
    OF_RUN,
    OUTPUT,
    REQUIRED,
    SOURCE,
    SWITCH,
    TEXT,
    MaybeFile,
    Names,
    choice,
    each,
    options_of,
    source,
)
from qdqtune.search import region
from qdqtune.search.costs.units import Group
from qdqtune.search.regions import discovery, patterns
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.finished import read_run
from qdqtune.tuning.folder import LOGS, REGION_MODELS, pattern_cache_of
from qdqtune.tuning.options import MODEL, WARMUP, Division, FloatType
from qdqtune.tuning.settings import EFFORTS, Settings, builds_for
from qdqtune.tuning.subgraph_groups import from_layers
from qdqtune.tuning.subject import FLOAT_TYPES, tuned_graph
from qdqtune.types import Layer, QuantType

TIMING_CACHE = str(Path(tempfile.gettempdir()) / "trtexec_timing.cache")
"""Where TensorRT keeps kernel times if no file is named. Other engines ignore it."""


OF_TUNE = options_of(TuneArguments)


class AutotuneOptions(TuneArguments):
    model: Any = MODEL("ONNX file.", "Model", "ONNX file", default=REQUIRED, flags="-m --onnx-path --model")
    output_dir: Any = replace(OF_TUNE["output_dir"], default=Path("autotuner_output"), flags="-o --output-dir --output")
    mode: Any = choice(
        ("region", "subgraph"),
        "How to search. With quick, default or extensive the same as --effort. Repeatable.",
        "Search",
        "how to search; also an effort",
        default="region",
    )
    engine: Any = replace(OF_TUNE["engine"], default=None, default_in_words="tensorrt if it works here, or onnxruntime")
    use_trtexec: bool = SWITCH("The same as --engine trtexec.", "Engine")
    trtexec_args: str | None = TEXT(
        "trtexec: more arguments, as one string.", "Engine", flags="--trtexec-benchmark-args --trtexec-args"
    )
    timing_cache: MaybeFile = OUTPUT(
        "TensorRT: file of kernel times.", "Engine", default_in_words=TIMING_CACHE, writes=timing_cache
    )
    plugin_libraries: Names = SOURCE(
        "TensorRT: plug-in libraries.",
        "Engine",
        default=(),
        convert=each(source),
        is_repeated=True,
        flags="--plugin-libraries --plugins",
    )
    min_sqnr: Any = replace(OF_TUNE["min_sqnr"], default=None, default_in_words="none")
    min_agreement: Any = replace(OF_TUNE["min_agreement"], default=None, default_in_words="none")
    cut_seed: bool = SWITCH("region: begin with what the cut finds, or with rules alone.", "Search", default=True)
    incremental_validation: bool = SWITCH(
        "subgraph: look on the whole model for groups that do not pay.", "Search", default=True
    )
    graph_json: MaybeFile = FILE(
        "subgraph: take the fusion groups from this file of trtexec --exportLayerInfo.", "Engine"
    )
    regions: Division = choice(
        Division, "Divide by node names, by topology, or by what fits.", "Search", default="auto"
    )
    default_dq_dtype: FloatType = choice(
        FLOAT_TYPES, "Type of tensors behind custom operators.", "Model", default="float32"
    )
    qdq_baseline: MaybeFile = MODEL("A quantized version of the model to start from.", "Model")
    pattern_cache: MaybeFile = FILE("region: try the schemes in the pattern cache of an earlier run.", "Search")
    state_file: MaybeFile = OF_RUN(
        "State file of the run.", "Search", default_in_words="OUTPUT_DIR/autotuner_state.yaml"
    )
    node_filter: Any = replace(OF_TUNE["node_filter"], flags="--node-filter-list")
    schemes_per_region: int | None = COUNT(
        "region: candidates per pattern; without `builds`, as many builds as they take, not as the preset limits them "
        "(24, 52 or 400).",
        "Search",
        flags="-s --schemes-per-region",
    )
    timing_runs: int | None = COUNT(
        "Inferences of each model, unless decided earlier.", "Search", default_in_words="40 | 96 | 192"
    )
    warmup_runs: int = WARMUP

    def plan(self, *, has_few: bool, last: int | None = None) -> Plan:
        last = None if self.timing_runs is None else rounds_for(self.timing_runs)
        return replace(super().plan(has_few=has_few, last=last), warmup=self.warmup_runs)

    def settings(self, command: tuple[str, ...] = (), **more: Any) -> Settings:
        schemes = self.schemes_per_region
        if schemes is not None:
            more["config"] = region.Config(schemes_per_region=schemes)
        if schemes is not None and self.builds is None and self.mode == "region":
            model = load(self.model, fix_inputs=self.fix_inputs)
            graph = tuned_graph(model, self.rewrites, self.engine_name)
            tuned = patterns.tunable(graph, patterns.group(graph, discovery.find(graph, self.regions)))
            more["builds"] = max(EFFORTS[self.effort].builds["region"], builds_for(schemes, len(tuned)))
        return super().settings(command, **more)


def copy_logs(folder: Path) -> None:
    """Copy the logs of a run of mode region to the names that ModelOpt gives them, by region and scheme, and that of
    the file that ships; and make the folder of region models, which may be empty."""
    run, logs, counts = read_run(folder), folder / LOGS, Counter[int]()
    found = patterns.group(run.model, discovery.find(run.model, run.fingerprint.regions))
    region_of = {pattern.digest: pattern.instances[0].id for pattern in found}
    log_of = {"final.log": "baseline.log" if run.trial is None else f"trial_{run.trial.number:03}.log"}
    for trial in run.history:
        if (number := region_of.get(trial.proposal.pattern)) is not None:
            log_of[f"region_{number}_scheme_{counts[number]}.log"] = f"trial_{trial.number:03}.log"
            counts[number] += 1
    for name, log in log_of.items():
        if (logs / log).exists():
            shutil.copyfile(logs / log, logs / name)
    (folder / REGION_MODELS).mkdir(exist_ok=True)


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
    """Tune a model (a path, under either keyword, or an ONNX model) in region mode on the engine of
    `init_benchmark_instance`, which must be called first. Returns an autotuner that holds the result.

    The same call continues an interrupted one. Every pattern gets `num_schemes_per_region` schemes; by default the
    search has the builds of `--effort default`.
    """
    benchmark, model = instance(), model_or_path if model_path is None else model_path
    if model is None:
        raise AutotunerError("give the model: a path, or an onnx.ModelProto")
    data = calibration_data or benchmark.calibration_data
    options = AutotuneOptions(
        model=model,
        output_dir=output_dir or Path("autotuner_output"),
        engine=benchmark.spec,
        timing_runs=benchmark.timing_runs,
        warmup_runs=benchmark.plan.warmup,
        precision="fp32",
        quant_type=quant_type,
        default_dq_dtype=default_dq_dtype,
        node_filter=node_filter_list or (),
        calibration_data=data,
        rewrites="off",
        schemes_per_region=num_schemes_per_region or None,
        pattern_cache=pattern_cache_file,
        state_file=state_file,
        qdq_baseline=qdq_baseline_model,
    )
    with on_disk(options) as here, progress.shown(verbose=verbose) as observer:
        settings = here.settings()
        result = tune(settings, observer)
        copy_logs(here.output_dir)
        autotuner = QDQAutotuner(onnx.load(here.model))
    config = Config(default_quant_type=quant_type, default_dq_dtype=default_dq_dtype, calibration_data=data)
    autotuner.initialize(config, PatternCache.load(pattern_cache_of(settings.state)))
    autotuner.adopt(result)
    return autotuner


def subgraph_autotuning_workflow(
    model_path: str | Path,
    output_dir: str | Path,
    graph_json_path: str | Path | None = None,
    quant_type: QuantType = "int8",
    plugin_libraries: Sequence[str] | None = None,
    extra_trtexec_args: Sequence[str] | None = None,
    incremental_validation: bool = True,
    calibration_data: SamplesLike | None = None,
) -> str:
    """Tune a model by fusion groups, as `qdqtune tune --mode subgraph` does, on the engine of `init_benchmark_instance`
    or else trtexec; without `calibration_data` with no limit on accuracy. Returns the path of the final model."""
    benchmark = instance(lambda: TrtExecBenchmark(None, 5, 20, plugin_libraries, extra_trtexec_args))
    options = AutotuneOptions(
        model=Path(model_path),
        mode="subgraph",
        engine=benchmark.spec,
        timing_runs=benchmark.timing_runs,
        warmup_runs=benchmark.plan.warmup,
        output_dir=Path(output_dir),
        graph_json=graph_json_path,
        quant_type=quant_type,
        incremental_validation=incremental_validation,
        calibration_data=calibration_data,
        min_sqnr="auto" if calibration_data is not None else None,  # users expect a file without samples
    )
    with on_disk(options) as here:
        return str(tune(here.settings()).file)


# Groups of nodes that TensorRT runs together


def parse_graph_json(path: str | Path) -> list[Layer]:
    return list(read_report(Path(path)))


def create_fusion_groups(trt_layers: Sequence[Layer], graph: GraphLike) -> list[Group]:
    """For each layer the names of its nodes, in graph order; a node without a layer is a group of its own."""
    return list(from_layers(as_model(graph), trt_layers).groups)


def generate_graph_json(
    onnx_path: str | Path,
    output_dir: str | Path,
    plugin_libraries: Sequence[str] | None = None,
    extra_trtexec_args: Sequence[str] | None = None,
) -> str:
    """Build a model with trtexec, and write its layers to `<model>.fp16.graph.json`. Returns that path."""
    path, folder = Path(onnx_path), Path(output_dir)
    benchmark = TrtExecBenchmark(None, 1, 1, plugin_libraries, extra_trtexec_args)
    sample = benchmark.prepared(load(path)).samples.first(1)[0]
    with Runner(benchmark.spec, log_dir=folder) as runner:
        runner.report(path, sample, 1, f"{path.stem}.fp16.build")
    built = folder / f"{path.stem}.fp16.build.graph.json"
    return str(built.replace(folder / f"{path.stem}.fp16.graph.json"))


def extract_subgraph(graph: GraphLike, input_tensor_names: Sequence[str], output_tensor_names: Sequence[str]) -> bytes:
    try:
        inferred = onnx.shape_inference.infer_shapes(as_proto(graph))
        return Extractor(inferred).extract_model([*input_tensor_names], [*output_tensor_names]).SerializeToString()
    except (KeyError, ValueError) as error:
        raise AutotunerError(f"a tensor is not found in the graph: {error}") from error
