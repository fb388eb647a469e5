"""The functions of the package: what the commands do, told by keywords, with results that show themselves.

Models are paths or `onnx.ModelProto`s, samples whatever `inputs.SamplesLike` says, metrics functions. Keywords are the
options of the command line (`keywords`). Nothing is printed; see `telling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Unpack

import click
from onnx import ModelProto

from qdqtune.cli import engines, files, options
from qdqtune.cli import inspect as inspect_cli
from qdqtune.cli import layers as layers_cli
from qdqtune.cli import quantize as quantize_cli
from qdqtune.cli import tune as tune_cli
from qdqtune.cli.pages import leave_report
from qdqtune.commands import apply as apply_command
from qdqtune.commands import build as build_command
from qdqtune.commands import quantize as quantize_command
from qdqtune.commands.check import allow, excuse, is_measured
from qdqtune.commands.check import check as find
from qdqtune.commands.compare import comparable, compare_at
from qdqtune.engines import TENSORRT_FAMILY, EngineSpec
from qdqtune.engines.runner import time_limit, unlogged
from qdqtune.errors import BadOption
from qdqtune.graph.loading import load
from qdqtune.graph.outputs import temporary_folder
from qdqtune.library.inputs import (
    MetricLike,
    ModelLike,
    SamplesLike,
    metric_source,
    model_file,
    sample_source,
    workload_files,
)
from qdqtune.library.keywords import (
    ApplyOptions,
    BuildOptions,
    CheckOptions,
    CompareOptions,
    InspectOptions,
    LayersOptions,
    QuantizeOptions,
    TuneOptions,
    given_of,
    split_fields,
)
from qdqtune.library.results import (
    Applied,
    Artifact,
    Checked,
    Comparison,
    Explained,
    Inspection,
    Layers,
    Quantized,
    Result,
    explained,
)
from qdqtune.library.telling import cancellable, tell_notes, telling
from qdqtune.measurement.timing import Plan
from qdqtune.placement.reading import is_quantized
from qdqtune.search.regions import discovery
from qdqtune.search.regions.patterns import group
from qdqtune.tuning import loop
from qdqtune.tuning.observer import Cancel, Observer
from qdqtune.tuning.settings import Settings

Engine = str | EngineSpec
"""An engine by name, or with options of its own."""


def tune(
    model: ModelLike | Settings,
    observer: Observer | None = None,
    *,
    calibration_data: SamplesLike | None = None,
    engine: Engine = "onnxruntime",
    evaluate: MetricLike | None = None,
    node_filter: Sequence[str] = (),
    progress: bool = False,
    cancel: Cancel | None = None,
    **given: Unpack[TuneOptions],
) -> Result:
    """Find the fastest Q/DQ placement for a model, prove it, and write it to `output_dir`.

    The same call goes on where an earlier one was stopped. `given` are options of `qdqtune tune`; with `Settings`,
    which hold everything, there are none.

    Args:
        model: the float model, or all settings of the run.
        observer: hears of stages and candidates, in this thread.
        calibration_data: samples for scales and accuracy; random ones without them.
        engine: where to build and time.
        evaluate: the user's metric, higher is better: `callable(predict) -> number` (see `measurement.metric`).
        node_filter: wildcards of node names: other regions stay in float.
        progress: whether to show how far it is, in a notebook or on a terminal.
        cancel: ends the run from another thread when it is set.

    Raises:
        QdqtuneError: see `errors`; Cancelled if that was asked for.
    """
    _says_how(given)
    with temporary_folder() as folder, metric_source(evaluate) as metric, telling(observer, progress, cancel) as told:
        if isinstance(model, Settings):
            if given:
                raise BadOption(f"Settings hold everything: {', '.join(given)} cannot be given besides")
            settings = model
        else:
            source = sample_source(calibration_data, folder, given.get("calibration_samples"))
            workloads = workload_files(given.get("workload"), folder)
            more = {"calibration_data": source, "evaluate": metric, **workloads}
            own, fields = split_fields(Settings, tune_cli.tune_command, {**given, **more, **_engine(engine)})
            values = given_of(tune_cli.tune_command, [model_file(model, folder)], own)
            fields |= {"node_filter": tuple(node_filter) or values["node_filter"]}
            fields |= {} if isinstance(engine, str) else {"engine": engine}
            settings = replace(tune_cli.settings_of(values), **fields)
        done = loop.tune(settings, told)
        if not isinstance(model, Settings) and values["report"]:
            leave_report(settings.output_dir)
    tell_notes(done.notes)
    return Result(**vars(done), folder=settings.output_dir)


def quantize(
    model: ModelLike,
    output: str | Path,
    *,
    calibration_data: SamplesLike | None = None,
    engine: str = "onnxruntime",
    evaluate: MetricLike | None = None,
    observer: Observer | None = None,
    progress: bool = False,
    cancel: Cancel | None = None,
    **given: Unpack[QuantizeOptions],
) -> Quantized:
    """Write a Q/DQ version of a float model, its pairs placed by the rules of an engine, which need not be installed.

    Raises:
        QdqtuneError: see `commands.quantize.quantize`.
    """
    command = quantize_cli.quantize_command
    _says_how(given)
    with temporary_folder() as folder, metric_source(evaluate) as metric, telling(observer, progress, cancel) as told:
        source = sample_source(calibration_data, folder, given.get("calibration_samples"))
        more = {"calibration_data": source, "evaluate": metric, "engine": engine}
        own, fields = split_fields(quantize_command.Request, command, {**given, **more})
        values = given_of(command, [model_file(model, folder)], own) | {"output": Path(output)}
        with time_limit(values["time_limit"]):
            done = quantize_command.quantize(replace(quantize_cli.request_of(values), **fields), told)
    tell_notes(done.notes)
    return Quantized(**vars(done))


def compare(
    first: ModelLike,
    *others: ModelLike,
    calibration_data: SamplesLike | None = None,
    engine: Engine = "onnxruntime",
    observer: Observer | None = None,
    progress: bool = False,
    cancel: Cancel | None = None,
    **given: Unpack[CompareOptions],
) -> Comparison:
    """Time every other model against the first, in interleaved rounds on two fresh builds of both.

    Raises:
        QdqtuneError: see `commands.compare`.
    """
    command = files.compare_command
    with temporary_folder() as folder, telling(observer, progress, cancel) as told:
        paths = [model_file(m, folder, f"model_{n}") for n, m in enumerate((first, *others), 1)]
        workloads = workload_files(given.get("workload"), folder)
        source = sample_source(calibration_data, folder)
        values, spec = _given(command, paths, engine, {**given, **workloads}, source)
        plan = Plan((values["timing_runs"],), warmup=values["warmup_runs"])
        prepared = options.Data.of(values).prepared(comparable(paths)[0], spec)
        counts, seed, limit = values["deploy_threads"], values["seed"], values["time_limit"]
        rows = compare_at(paths, spec, counts, prepared, plan, seed=seed, time_limit_s=limit, observer=told)
    random = prepared.samples.is_random
    notes = ["no calibration_data: latency and SQNR are on random inputs"] if random else []
    tell_notes(notes)
    names = [f"model {n}" if isinstance(m, ModelProto) else str(m) for n, m in enumerate((first, *others), 1)]
    named = tuple(replace(row, file=name) for row, name in zip(rows, cycle(names[1:]), strict=False))
    return Comparison(names[0], named, tuple(notes))


def apply(
    model: ModelLike,
    placement: str | Path,
    output: str | Path,
    *,
    calibration_data: SamplesLike | None = None,
    engine: str | None = None,
    **given: Unpack[ApplyOptions],
) -> Applied:
    """Put the pairs of a placement file into a model, with scales calibrated anew: no search, no timing.

    Raises:
        QdqtuneError: see `commands.apply.apply`.
    """
    says_how = _says_how(given)
    with temporary_folder() as folder:
        source = sample_source(calibration_data, folder, given.get("calibration_samples"))
        own: dict[str, object] = {**given, "calibration_data": source, "placement": placement, "engine": engine}
        values = given_of(files.apply_command, [model_file(model, folder)], own) | {"output": Path(output)}
        with time_limit(values["time_limit"]):
            done = apply_command.apply(files.request_of(values, says_how=says_how))
    if done.random_data:
        tell_notes(["no calibration_data: the scales come from random inputs"])
    return Applied(**vars(done), output=Path(output))


def check(
    model: ModelLike,
    *,
    calibration_data: SamplesLike | None = None,
    engine: Engine = "onnxruntime",
    cancel: Cancel | None = None,
    **given: Unpack[CheckOptions],
) -> Checked:
    """What the engine does not fuse in a Q/DQ model, and why.

    Raises:
        QdqtuneError: the engine cannot run the model, say.
    """
    with temporary_folder() as folder, cancellable(cancel):
        path = model_file(model, folder)
        values, spec = _given(engines.check_command, [path], engine, given, sample_source(calibration_data, folder))
        graph = load(path)
        if not is_quantized(graph):
            return Checked(spec.name, (), ())
        ran = engines.run_here(path, graph, spec, values)
        found = find(graph, ran.layers, ran.numbers, fuses_attention=spec.name in TENSORRT_FAMILY)
        findings = allow(found, values["allowed"])
        measured = ran.described is not None and is_measured(path, graph, ran.described)
    return Checked(spec.name, ran.layers, excuse(findings) if measured else findings, measured)


def layers(
    model: ModelLike,
    *,
    calibration_data: SamplesLike | None = None,
    engine: Engine = "onnxruntime",
    cancel: Cancel | None = None,
    **given: Unpack[LayersOptions],
) -> Layers:
    """What the engine makes of a model: its layers in order, the nodes that each covers, and how long each takes.

    Raises:
        QdqtuneError: the engine cannot run the model, or has no layers of it.
    """
    with temporary_folder() as folder, cancellable(cancel):
        path = model_file(model, folder)
        values, spec = _given(layers_cli.layers_command, [path], engine, given, sample_source(calibration_data, folder))
        (sample,) = options.Data.of(values).prepared(load(path), spec, 0).samples.first(1)
        with unlogged(spec, time_limit_s=values["time_limit"]) as runner:
            refusal = f"{spec.name} has no layers of {path}"
            return Layers(spec.name, layers_cli.profiled(runner, path, sample, values["runs"], refusal=refusal))


def build(
    model: ModelLike,
    output: str | Path,
    *,
    engine: Engine = "onnxruntime",
    cancel: Cancel | None = None,
    **given: Unpack[BuildOptions],
) -> Artifact:
    """Build a model, and save it in the engine's own format.

    Raises:
        QdqtuneError: see `commands.build.build`.
    """
    with temporary_folder() as folder, cancellable(cancel):
        path, target = model_file(model, folder), Path(output)
        own: dict[str, object] = {**given, "output": target}
        values = given_of(engines.build_command, [path], {**own, **_engine(engine)})
        spec = options.with_timing_cache(_spec(engine, values), target.parent)
        done = build_command.build(path, target, spec, time_limit_s=values["time_limit"])
    return Artifact(**vars(done), engine=spec.name)


def inspect(model: ModelLike, **given: Unpack[InspectOptions]) -> Inspection:
    """How a model divides into regions, and which of them share a pattern.

    Raises:
        QdqtuneError: the model cannot be read.
    """
    with temporary_folder() as folder:
        path = model_file(model, folder)
        values = given_of(inspect_cli.inspect_command, [path], dict(given))
        graph = load(path, fix_inputs=values["fix_inputs"])
        division = discovery.find(graph, values["regions"], max_sequence_size=values["max_sequence_size"])
        patterns, whole = group(graph, division), values["include_all_regions"]
        told = inspect_cli.as_json(graph, division, patterns, include_all_regions=whole)
        return Inspection(told, inspect_cli.render(graph, division, patterns, include_all_regions=whole))


def explain(run: str | Path | Result, pattern: str | None = None, *, state_file: str | Path | None = None) -> Explained:
    """Why each node of a finished run runs in 8 bits or in float, and what the other way would cost.

    Args:
        run: its result, or its output folder.
        pattern: only the node of this name, or those that match a wildcard.
        state_file: where that does not lie in the folder.

    Raises:
        QdqtuneError: the folder holds no finished run, or no such node.
    """
    return explained(run.folder if isinstance(run, Result) else run, pattern, state_file)


def _given(
    command: click.Command, paths: Sequence[Path], engine: Engine, given: Mapping[str, Any], source: str | None
) -> tuple[dict[str, Any], EngineSpec]:
    """The values of a command that runs models on an engine, and the engine."""
    values = given_of(command, paths, {**given, "calibration_data": source, **_engine(engine)})
    return values, _spec(engine, values)


def _engine(engine: Engine) -> dict[str, object]:
    return {"engine": engine if isinstance(engine, str) else engine.name}


def _spec(engine: Engine, values: Mapping[str, Any]) -> EngineSpec:
    return options.engine(values) if isinstance(engine, str) else engine


def _says_how(given: Mapping[str, Any]) -> bool:
    """Whether the caller says how ranges are found.

    Raises:
        BadOption: scales come from a file as well.
    """
    names = [name for name in ("calibration_method", "bias_correction", "equalize", "percentile") if name in given]
    if names and given.get("calibration_cache") is not None:
        raise BadOption(f"calibration_cache brings the scales: leave {', '.join(names)} out")
    return bool(names)
