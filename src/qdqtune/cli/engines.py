"""`qdqtune build`, `check` and `doctor`: a model on its engine, outside of any search."""

from __future__ import annotations

import glob
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import onnx
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qdqtune.calibration.samples import open_samples
from qdqtune.cli import options
from qdqtune.commands.build import FORMATS, build
from qdqtune.commands.check import Finding, allow, check, excuse, is_measured
from qdqtune.commands.doctor import Diagnosis, examine
from qdqtune.commands.reasons import is_low
from qdqtune.engines import EngineSpec
from qdqtune.engines.runner import unlogged
from qdqtune.engines.shapes import check_spans
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.errors import BadOption, ConstraintUnmet, EngineFailure, EngineUnavailable
from qdqtune.graph.loading import load, read, with_input_shapes
from qdqtune.graph.model import Model
from qdqtune.placement.reading import is_quantized
from qdqtune.types import Failure, Layer, NumericFormat, QType, QuantType, Tensors

ORDER = ("float compute", "standalone pair", "reformat", "boundary")
"""Of the findings with one cause: what the cause itself does, then what follows from it."""

TENSORRT = {
    "int8": NumericFormat(QType.INT8, QType.INT8, symmetric=True),
    "fp8": NumericFormat(QType.FP8, QType.FP8, symmetric=True, per_channel=False),
}


@click.command("build")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write.")
@options.engine_options
@click.option("--json", "as_machine", is_flag=True, help="Print JSON.")
def build_command(
    model: Path, output: Path, engine: str, spec: EngineSpec, time_limit: float, as_machine: bool
) -> None:
    """Build MODEL, and save it in the engine's own format: a TensorRT plan, an OpenVINO IR, an optimized ONNX file.

    What a Q/DQ model leaves in float runs in float, everything between pairs in 8 bits: a mixed-precision engine.

    \b
    qdqtune build optimized_final.onnx -o model.plan --engine tensorrt
    """
    made = build(model, output, options.with_timing_cache(spec, output.parent), time_limit_s=time_limit)
    if as_machine:
        files = [str(path) for path in made.files]
        print(json.dumps({"engine": engine, "files": files, "bytes": made.nbytes, "seconds": made.seconds}, indent=2))
    else:
        written = " and ".join(map(str, made.files))
        print(f"{written}: {FORMATS[engine]}, {made.nbytes / 1e6:.1f} MB, built in {made.seconds:.1f} s")


@click.command("check")
@click.argument("model", type=click.Path(path_type=Path))
@options.engine_options
@options.data_options
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Inferences to take the times of.")
@click.option("--allow-boundary", "allowed", multiple=True, metavar="WILDCARD",
              help="Nodes that are meant to stay in float, or conversions that are meant to run: "
                   "what stands at them does not fail. Repeatable.")  # fmt: skip
@click.option("--graph-json", type=click.Path(path_type=Path), metavar="FILE",
              help="Check what trtexec --exportLayerInfo wrote for MODEL, and run nothing.")  # fmt: skip
@click.option("--profile-json", type=click.Path(path_type=Path), metavar="FILE",
              help="The times to it: what trtexec --exportProfile wrote.")  # fmt: skip
@click.option("--json", "as_machine", is_flag=True, help="Print JSON.")
def check_command(
    model: Path, engine: str, spec: EngineSpec, time_limit: float, calibration_data: str | None,
    calibration_samples: int | None, input_shapes: Mapping[str, tuple[int, ...]], seed: int, runs: int,
    allowed: Sequence[str], graph_json: Path | None, profile_json: Path | None, as_machine: bool,
) -> int:  # fmt: skip
    """Check that the engine fuses the Q/DQ pairs of MODEL, and say what it does not fuse and why.

    Found are pairs that run as kernels of their own, operators that stay in float although their inputs carry pairs,
    and reformats beside quantized layers. Exit code 4 if there is any; the conversions at the model's own float inputs
    and outputs have to be there, and do not count. The result of `qdqtune tune` in its output folder does not fail on
    the engine that it was tuned on: what the engine does not fuse there was measured, and is faster than without.

    \b
    qdqtune check optimized_final.onnx
    qdqtune check model.qdq.onnx --graph-json layers.json --profile-json profile.json
    """
    if profile_json is not None and graph_json is None:
        raise BadOption("--profile-json goes with --graph-json")
    graph = load(model)
    quant_type = _quant_type(graph)
    layers: Sequence[Layer] = ()
    found: tuple[Finding, ...] = ()
    measured = False
    if graph_json is not None:
        engine = "tensorrt"
    if is_quantized(graph):
        if graph_json is not None:
            layers = read_report(graph_json, profile_json, read(model))
            numbers = TENSORRT[quant_type]
        else:
            check_spans(spec, graph)
            shaped = with_input_shapes(graph, input_shapes) if input_shapes else graph
            sample = open_samples(calibration_data, shaped, seed=seed, limit=calibration_samples).first(1)[0]
            layers, numbers, described = _profiled(model, spec, quant_type, sample, runs, time_limit)
            measured = is_measured(model, graph, described)
        found = allow(check(graph, layers, numbers), allowed)
    fails = not measured and any(finding.fails for finding in found)
    if as_machine:
        judged = excuse(found) if measured else found
        print(json.dumps(_as_json(model, engine, graph, layers, judged) | {"measured": measured}, indent=2))
    else:
        print("\n".join((*_lines(model, engine, graph, layers, found), *_advice(found, measured))))
    return ConstraintUnmet.exit_code if fails else 0


def _quant_type(model: Model) -> QuantType:
    types = {model.tensors[n.inputs[0]].dtype for n in model.nodes
             if n.op == "DequantizeLinear" and n.inputs[0] in model.tensors}  # fmt: skip
    return "fp8" if onnx.TensorProto.FLOAT8E4M3FN in types else "int8"


def _profiled(
    model: Path, spec: EngineSpec, quant_type: QuantType, sample: Tensors, runs: int, time_limit: float
) -> tuple[Sequence[Layer], NumericFormat, Mapping[str, str]]:
    with unlogged(spec, time_limit_s=time_limit) as runner:
        numbers, described = runner.numeric_format(quant_type), runner.describe()
        result = runner.report(model, sample, runs, "check")
    if isinstance(result, Failure):
        raise EngineFailure(f"{model} cannot be checked: {result.reason}")
    return result, numbers, described


def _pairs(model: Model) -> int:
    return sum(node.op == "DequantizeLinear" for node in model.nodes)


def _as_json(
    model: Path, engine: str, graph: Model, layers: Sequence[Layer], found: Sequence[Finding]
) -> dict[str, Any]:
    running = [layer for layer in layers if layer.kind != "folded"]
    return {
        "model": str(model),
        "engine": engine,
        "pairs": _pairs(graph),
        "layers": len(running),
        "layers_in_8_bits": sum(is_low(layer.precision) for layer in running),
        "time_ms": _sum(running),
        "failing": sum(finding.fails for finding in found),
        "findings": [asdict(finding) for finding in found],
    }


def _lines(model: Path, engine: str, graph: Model, layers: Sequence[Layer], found: Sequence[Finding]) -> Iterator[str]:
    if not is_quantized(graph):
        yield f"{model}: no pairs, nothing to check"
        return
    for group in _groups(found):
        yield group[0].reason
        for finding in group:
            time = "" if finding.time_ms is None else f"{finding.time_ms:.4f} ms"
            yield f"    {finding.kind:15}  {time:>10}  {', '.join(finding.nodes) or finding.layer}"
    failing = [finding for finding in found if finding.fails]
    running = [layer for layer in layers if layer.kind != "folded"]
    total, spent = _sum(running), _sum(failing)
    share = f", {spent:.3f} of {total:.3f} ms" if total and spent is not None else ""
    low = sum(is_low(layer.precision) for layer in running)
    yield (f"{model} on {engine}: {_pairs(graph)} pairs, {low} of {len(running)} layers in 8 bits; "
           f"{len(failing)} findings{share}, {len(found) - len(failing)} notes")  # fmt: skip


def _advice(found: Sequence[Finding], measured: bool) -> Iterator[str]:
    """What to do about findings, or why nothing is to be done."""
    failing = [finding for finding in found if finding.fails]
    if measured and failing:
        yield "these pairs were measured on this engine, and faster so (placement.yaml beside the file): nothing to do"
    elif failing:
        names = (n for group in _groups(failing) for f in group for n in (f.cause, *f.nodes) if n)
        first = next((f" --allow-boundary {shlex.quote(glob.escape(name))}, all of it with" for name in names), "")
        yield (f"what is meant to be so is accepted with{first} --allow-boundary '*'; "
               "`qdqtune tune MODEL --from-qdq` measures which pairs pay")  # fmt: skip


def _groups(found: Sequence[Finding]) -> list[list[Finding]]:
    """The findings by cause: those that fail first, what costs most in front; then the notes, as they came."""
    groups: dict[tuple[bool, str], list[Finding]] = {}
    for finding in sorted(found, key=lambda f: ORDER.index(f.kind)):
        groups.setdefault((finding.fails, finding.cause or finding.reason), []).append(finding)
    return sorted(groups.values(), key=lambda group: -(_sum(group) or 0.0) if group[0].fails else 1.0)


def _sum(timed: Sequence[Layer] | Sequence[Finding]) -> float | None:
    times = [item.time_ms for item in timed if item.time_ms is not None]
    return sum(times) if times else None


@click.command("doctor")
@click.option("--json", "as_machine", is_flag=True, help="Print JSON.")
def doctor_command(as_machine: bool) -> int:
    """Show which engines work on this machine, on what hardware, and what to install for the others.

    Exit code 5 only if none does.
    """
    with tempfile.TemporaryDirectory(prefix="qdqtune-") as folder:
        diagnosis = examine(Path(folder))
    if as_machine:
        print(json.dumps(asdict(diagnosis), indent=2))
    else:
        Console().print(_engines(diagnosis))
        print("\n".join(_remarks(diagnosis)))
    return 0 if diagnosis.is_usable else EngineUnavailable.exit_code


def _engines(diagnosis: Diagnosis) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("engine", min_width=max(len(engine.name) for engine in diagnosis.engines))
    table.add_column("status", min_width=len("builds only"))
    table.add_column("version", overflow="fold")
    table.add_column("device")
    for engine in diagnosis.engines:
        table.add_row(*map(Text, (engine.name, engine.status, engine.version, engine.device)))
    return table


def _remarks(diagnosis: Diagnosis) -> Iterator[str]:
    cpu = diagnosis.processor
    cores = f"{cpu.cores} core" + "s" * (cpu.cores != 1)
    yield f"CPU: {cpu.name}, {cores} ({' '.join(cpu.isa) or 'no known instruction sets'}); {cpu.consequence}"
    for gpu in diagnosis.gpus:
        yield f"GPU: {gpu.name}, {gpu.memory}, compute capability {gpu.compute_capability}, driver {gpu.driver}"
    if diagnosis.gpu_note:
        yield f"GPU: none ({diagnosis.gpu_note})"
    for engine in diagnosis.engines:
        if engine.reason:
            yield f"{engine.name}: " + ": ".join(filter(None, (engine.reason, engine.remedy)))
