"""`qdqtune build`, `check` and `doctor`: a model on its engine, outside of any search."""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import onnx
from rich.table import Table

from qdqtune.cli import options
from qdqtune.cli.grouped import command
from qdqtune.cli.layers import profiled
from qdqtune.cli.options import FILE, option, repeated
from qdqtune.cli.output import counted, print_json, print_lines, say_notes, show
from qdqtune.cli.report import table_of
from qdqtune.commands.build import FORMATS, build
from qdqtune.commands.check import Finding, allow, check, excuse, is_measured, lost_by_pairs
from qdqtune.commands.cluster import ClusterState, examine_cluster
from qdqtune.commands.doctor import Diagnosis, examine
from qdqtune.commands.reasons import is_low
from qdqtune.engines import TENSORRT_FAMILY, EngineSpec
from qdqtune.engines.runner import time_limit, unlogged
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.errors import BadOption, ConstraintUnmet, EngineUnavailable
from qdqtune.graph.loading import load, read
from qdqtune.graph.model import Model
from qdqtune.graph.outputs import temporary_folder
from qdqtune.measurement.accuracy import concern
from qdqtune.placement.reading import is_quantized, placement_in, strip_pairs
from qdqtune.report.words import placed
from qdqtune.types import Layer, NumericFormat, QType, QuantType

ORDER = ("float compute", "standalone pair", "reformat", "boundary")
"""Of the findings with one cause: what the cause itself does, then what follows from it."""

OF_WEIGHTS = re.compile(r"[wW][48]")
"""The precision of a layer that reads weights in fewer bits."""

TENSORRT = {
    "int8": NumericFormat(QType.INT8, QType.INT8, symmetric=True),
    "fp8": NumericFormat(QType.FP8, QType.FP8, symmetric=True, per_channel=False),
}


BUILD = (
    options.MODEL,
    option("-o --output", "File to write.", FILE, required=True),
    *options.ENGINE,
    options.AS_JSON,
)


@command("build", BUILD)
def build_command(model: Path, output: Path, as_machine: bool, **given: Any) -> None:
    """Build MODEL, and save it in the engine's own format: a TensorRT plan, an OpenVINO IR, an optimized ONNX file.

    What a Q/DQ model leaves in float runs in float, everything between pairs in 8 bits: a mixed-precision engine.

    \b
    qdqtune build optimized_final.onnx -o model.plan --engine tensorrt
    """
    spec = options.with_timing_cache(options.engine(given), output.parent)
    made = build(model, output, spec, time_limit_s=given["time_limit"])
    if as_machine:
        files = [str(path) for path in made.files]
        print_json({"engine": spec.name, "files": files, "bytes": made.nbytes, "seconds": made.seconds})
    else:
        written = " and ".join(map(str, made.files))
        print(f"{written}: {FORMATS[spec.name]}, {made.nbytes / 1e6:.1f} MB, built in {made.seconds:.1f} s")


CHECK = (
    options.MODEL,
    *options.ENGINE,
    *options.DATA,
    options.RUNS,
    repeated(
        "--allow-boundary allowed",
        "WILDCARD",
        "Nodes that are meant to stay in float, or conversions that are meant to run: what stands at them does not "
        "fail. Repeatable.",
    ),
    option(
        "--graph-json",
        "Check what trtexec --exportLayerInfo wrote for MODEL, and run nothing.",
        FILE,
        metavar="FILE",
    ),
    options.PROFILE_JSON,
    options.HTML,
    options.AS_JSON,
)


@dataclass(frozen=True)
class Ran:
    """What an engine made of a model: its layers, the numbers that it wants, and which engine it was if it ran here."""

    layers: tuple[Layer, ...]
    numbers: NumericFormat
    described: Mapping[str, str] | None = None


@command("check", CHECK)
def check_command(
    model: Path,
    allowed: Sequence[str],
    graph_json: Path | None,
    profile_json: Path | None,
    html: Path | None,
    as_machine: bool,
    **given: Any,
) -> int:
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
    options.check_page(html, [model], [graph_json, profile_json])
    graph = load(model)
    layers: Sequence[Layer] = ()
    findings: tuple[Finding, ...] = ()
    measured = False
    if is_quantized(graph):
        if graph_json:
            ran = Ran(read_report(graph_json, profile_json, read(model)), TENSORRT[_quant_type(graph)])
        else:
            ran = run_here(model, graph, options.engine(given), given)
        fuses_attention = bool(graph_json) or given["engine"] in TENSORRT_FAMILY
        found = check(graph, ran.layers, ran.numbers, fuses_attention=fuses_attention)
        layers, findings = ran.layers, allow(found, allowed)
        measured = ran.described is not None and is_measured(model, graph, ran.described)
        if not graph_json:
            prepared = options.Data.of(given).prepared(graph, options.engine(given))
            with time_limit(given["time_limit"]):
                lost = lost_by_pairs(graph, prepared.judging)
            if lost is not None and (warning := concern(lost)):
                inputs = (
                    "" if given["calibration_data"] else " on random inputs, which tell little (--calibration-data)"
                )
                say_notes([f"as ONNX defines its pairs{inputs}: {warning}"])
    fails = not measured and any(finding.fails for finding in findings)
    engine = "tensorrt" if graph_json else given["engine"]
    if html is not None:
        from qdqtune.report.of_commands import of_check
        from qdqtune.report.page import write_report

        typed = options.command_line()
        write_report(of_check(model.name, graph, engine, layers, findings, measured, typed), html)
    if as_machine:
        judged = excuse(findings) if measured else findings
        print_json(_as_json(model, engine, graph, layers, judged) | {"measured": measured})
    else:
        print_lines((*_lines(model, engine, graph, layers, findings), *_advice(findings, measured)))
    return ConstraintUnmet.exit_code if fails else 0


def _quant_type(model: Model) -> QuantType:
    carriers = (node.inputs[0] for node in model.nodes if node.op == "DequantizeLinear")
    types = {model.tensors[tensor].dtype for tensor in carriers if tensor in model.tensors}
    return "fp8" if onnx.TensorProto.FLOAT8E4M3FN in types else "int8"


def run_here(model: Path, graph: Model, spec: EngineSpec, given: options.Given) -> Ran:
    """What an engine makes of a model, fed and timed as the options say."""
    (sample,) = options.Data.of(given).prepared(graph, spec, 0).samples.first(1)
    with unlogged(spec, time_limit_s=given["time_limit"]) as runner:
        numbers, described = runner.numeric_format(_quant_type(graph)), runner.describe()
        layers = profiled(runner, model, sample, given["runs"], refusal=f"{model} cannot be checked")
    return Ran(layers, numbers, described)


def _pairs(model: Model) -> int:
    return sum(node.op == "DequantizeLinear" for node in model.nodes)


def _as_json(
    model: Path, engine: str, graph: Model, layers: Sequence[Layer], findings: Sequence[Finding]
) -> dict[str, object]:
    running = [layer for layer in layers if layer.kind != "folded"]
    return {
        "model": str(model),
        "engine": engine,
        "pairs": _pairs(graph),
        "layers": len(running),
        "layers_in_8_bits": sum(is_low(layer.precision) for layer in running),
        "time_ms": _sum(running),
        "failing": sum(finding.fails for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def _lines(
    model: Path, engine: str, graph: Model, layers: Sequence[Layer], findings: Sequence[Finding]
) -> Iterator[str]:
    if not is_quantized(graph):
        yield f"{model}: no pairs, nothing to check"
        return
    for group in _groups(findings):
        yield group[0].reason
        for finding in group:
            time = "" if finding.time_ms is None else f"{finding.time_ms:.4f} ms"
            yield f"    {finding.kind:15}  {time:>10}  {', '.join(finding.nodes) or finding.layer}"
    if strangers := [layer for layer in layers if layer.kind == "unknown"]:
        spent_there = _sum(strangers) or 0.0
        first = f"{strangers[0].name:.60}"
        yield f"{len(strangers)} rows of the profile ({spent_there:.3f} ms) fit no layer, the first: {first}"
    failing = [finding for finding in findings if finding.fails]
    running = [layer for layer in layers if layer.kind != "folded"]
    total, spent = _sum(running), _sum(failing)
    share = f", {spent:.3f} of {total:.3f} ms" if total and spent is not None else ""
    low = sum(is_low(layer.precision) for layer in running)
    drawn_in = sum(bool(OF_WEIGHTS.fullmatch(layer.precision)) for layer in running)
    also = f", {drawn_in} on weights in fewer bits" if drawn_in else ""
    ran = f"{placed(placement_in(strip_pairs(graph), graph))}, {low} of {len(running)} layers in 8 bits{also}"
    notes = counted(len(findings) - len(failing), "note")
    yield f"{model} on {engine}: {ran}; {counted(len(failing), 'finding')}{share}, {notes}"


def _advice(findings: Sequence[Finding], measured: bool) -> Iterator[str]:
    """What to do about findings, or why nothing is to be done."""
    failing = [finding for finding in findings if finding.fails]
    if measured and failing:
        yield "these pairs were measured on this engine, and faster so (placement.yaml beside the file): nothing to do"
    elif failing:
        names = (n for group in _groups(failing) for f in group for n in (f.cause, *f.nodes) if n)
        first = next((f" --allow-boundary {shlex.quote(glob.escape(name))}, all of it with" for name in names), "")
        accepted = f"what is meant to be so is accepted with{first} --allow-boundary '*'"
        yield f"{accepted}; `qdqtune tune MODEL --from-qdq` measures which pairs pay"


def _groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """The findings by cause: those that fail first, what costs most in front; then the notes, as they came."""
    groups: dict[tuple[bool, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda f: ORDER.index(f.kind)):
        groups.setdefault((finding.fails, finding.cause or finding.reason), []).append(finding)
    return sorted(groups.values(), key=lambda group: -(_sum(group) or 0.0) if group[0].fails else 1.0)


def _sum(timed: Sequence[Layer] | Sequence[Finding]) -> float | None:
    times = [item.time_ms for item in timed if item.time_ms is not None]
    return sum(times) if times else None


DOCTOR = (
    option("--ray", "Look at the devices of the Ray cluster at this address instead.", metavar="ADDRESS"),
    option("--engine", "The engine to start on each of them.", metavar="NAME", default="onnxruntime"),
    option("--cores-per-worker", "Cores of each of them.  [default: 1]", click.IntRange(1)),
    options.AS_JSON,
)


@command("doctor", DOCTOR)
def doctor_command(ray: str | None, engine: str, cores_per_worker: int | None, as_machine: bool) -> int:
    """Show which engines work on this machine, on what hardware, and what to install for the others.

    Exit code 5 only if none does. With --ray: on which devices of a cluster an engine works, and whether they are
    alike, so that a run may use them together; exit code 5 if they are not.

    \b
    qdqtune doctor --ray auto --engine onnxruntime --cores-per-worker 2
    """
    if ray is not None:
        with temporary_folder() as folder:
            found = examine_cluster(EngineSpec(engine), ray, cores_per_worker, folder)
        if as_machine:
            print_json(asdict(found))
        else:
            show(_cluster(found))
            print_lines([_verdict(found)])
        return 0 if found.difference is None else EngineUnavailable.exit_code
    with temporary_folder() as folder:
        diagnosis = examine(folder)
    if as_machine:
        print_json(asdict(diagnosis))
    else:
        columns = ("engine", "status", "version", "device")
        show(table_of(columns, [(e.name, e.status, e.version, e.device) for e in diagnosis.engines], columns))
        print_lines(_remarks(diagnosis))
    return 0 if diagnosis.is_usable else EngineUnavailable.exit_code


def _cluster(found: ClusterState) -> Table:
    names = list(dict.fromkeys(name for told in found.devices.values() for name in told))
    rows = [(place, *(told.get(name, "") for name in names)) for place, told in found.devices.items()]
    return table_of(("worker", *names), rows, names)


def _verdict(found: ClusterState) -> str:
    count = len(found.devices)
    if found.difference is None:
        return f"{counted(count, 'device')}, all alike: a run may use them together"
    return f"not alike, so that no run may use them together: {found.difference}"


def _remarks(diagnosis: Diagnosis) -> Iterator[str]:
    cpu = diagnosis.processor
    cores = counted(cpu.cores, "core")
    yield f"CPU: {cpu.name}, {cores} ({' '.join(cpu.isa) or 'no known instruction sets'}); {cpu.consequence}"
    for gpu in diagnosis.gpus:
        yield f"GPU: {gpu.name}, {gpu.memory}, compute capability {gpu.compute_capability}, driver {gpu.driver}"
    if diagnosis.gpu_note:
        yield f"GPU: none ({diagnosis.gpu_note})"
    for engine in diagnosis.engines:
        if engine.reason:
            yield f"{engine.name}: " + ": ".join(filter(None, (engine.reason, engine.remedy)))
