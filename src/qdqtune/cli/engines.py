"""`qdqtune build`, `check` and `doctor`: a model on its engine, outside of any search."""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from qdqtune.cli.command import AS_JSON, HTML, command, command_line
from qdqtune.cli.output import print_json, print_lines, say_notes, show
from qdqtune.cli.report import table_of
from qdqtune.commands.build import BuildOptions, build
from qdqtune.commands.check import CheckOptions, check_file
from qdqtune.commands.cluster import ClusterState, DoctorOptions, examine_cluster
from qdqtune.commands.doctor import Diagnosis, examine
from qdqtune.engines import EngineSpec
from qdqtune.engines.options import with_timing_cache
from qdqtune.errors import ConstraintUnmet, EngineUnavailable
from qdqtune.explanation.findings import Finding
from qdqtune.explanation.reasons import is_low
from qdqtune.explanation.words import counted, placed, title
from qdqtune.graph.model import Model
from qdqtune.placement.reading import is_quantized, placement_in, strip_pairs
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Layer

ORDER = ("float compute", "standalone pair", "reformat", "boundary")
"""Of the findings with one cause: what the cause itself does, then what follows from it."""

OF_WEIGHTS = re.compile(r"[wW][48]")
"""The precision of a layer that reads weights in fewer bits."""


@command("build", BuildOptions, AS_JSON)
def build_command(options: BuildOptions, as_machine: bool) -> None:
    """Build MODEL, and save it in the engine's own format: a TensorRT plan, an OpenVINO IR, an optimized ONNX file.

    What a Q/DQ model leaves in float runs in float, everything between pairs in 8 bits: a mixed-precision engine.

    \b
    qdqtune build optimized_final.onnx -o model.plan --engine tensorrt
    """
    spec = with_timing_cache(options.spec(), options.output.parent)
    made = build(Path(str(options.model)), options.output, spec, time_limit_s=options.time_limit)
    if as_machine:
        print_json(made.to_dict())
    else:
        print(made.in_words())


@command("check", CheckOptions, HTML, AS_JSON)
def check_command(options: CheckOptions, html: Path | None, as_machine: bool) -> int:
    """Check that the engine fuses the Q/DQ pairs of MODEL, and say what it does not fuse and why.

    Found are pairs that run as kernels of their own, operators that stay in float although their inputs carry pairs,
    and reformats beside quantized layers. Exit code 4 if there is any; the conversions at the model's own float inputs
    and outputs have to be there, and do not count. The result of `qdqtune tune` in its output folder does not fail on
    the engine that it was tuned on: what the engine does not fuse there was measured, and is faster than without.

    \b
    qdqtune check optimized_final.onnx
    qdqtune check model.qdq.onnx --graph-json layers.json --profile-json profile.json
    """
    model = Path(str(options.model))
    done = check_file(options)
    say_notes(done.notes)
    if html is not None:
        from qdqtune.commands.result_pages import of_check
        from qdqtune.explanation.page import write_report

        write_report(
            of_check(title(model), done.graph, done.engine, done.layers, done.findings, done.measured, command_line()),
            html,
        )
    if as_machine:
        print_json(done.to_dict())
    else:
        lines = _lines(model, done.engine, done.graph, done.layers, done.findings)
        print_lines((*lines, *_advice(done.findings, done.measured)))
    return 0 if done.passes else ConstraintUnmet.exit_code


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


@command("doctor", DoctorOptions, AS_JSON)
def doctor_command(options: DoctorOptions, as_machine: bool) -> int:
    """Show which engines work on this machine, on what hardware, and what to install for the others.

    Exit code 5 only if none does. With --ray: on which devices of a cluster an engine works, and whether they are
    alike, so that a run may use them together; exit code 5 if they are not.

    \b
    qdqtune doctor --ray auto --engine onnxruntime --cores-per-worker 2
    """
    if options.ray is not None:
        with temporary_folder() as folder:
            found = examine_cluster(EngineSpec(options.engine), options.ray, options.cores_per_worker, folder)
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
