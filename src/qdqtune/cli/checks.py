"""`qdqtune check`, `debug` and `doctor`: what is wrong with a quantized model, or with the engines of this machine."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qdqtune.cli import progress
from qdqtune.cli.command import Terminal, command
from qdqtune.cli.output import print_json, print_lines, say_notes, show, to_exclude
from qdqtune.commands.check import Checked, CheckOptions, Layers, check, layers, time_of
from qdqtune.commands.debug import DebugOptions, Diagnosis, debug, level
from qdqtune.commands.doctor import (
    DoctorOptions,
    EnginesState,
    doctor_elsewhere,
    examine,
)
from qdqtune.commands.inputs import MODEL
from qdqtune.commands.shown import Table
from qdqtune.errors import BadOption, ConstraintUnmet, EngineUnavailable
from qdqtune.explanation.formatting import counted, placed
from qdqtune.options import REQUIRED, SWITCH, Flag, option, several, shared_values
from qdqtune.system.writing import temporary_folder, write_json


@dataclass(kw_only=True)
class CheckArguments(Terminal, CheckOptions):
    """The options of `check` on the command line: one model or several."""

    model: Any = option(
        several(MODEL), REQUIRED, "ONNX files.", is_positional=True, is_repeated=True, metavar="MODEL..."
    )
    layers: Flag = option(
        SWITCH,
        False,
        "Show the layers that the engine makes of MODEL instead, the longest first, and the nodes that each covers. "
        "Times are of profiled inferences: they say where the time goes, and add up to more than the latency.",
        "Output",
        short="show the layers that the engine runs",
    )


@command(CheckArguments)
def check_command(options: CheckArguments) -> int:
    """Check that the engine fuses the Q/DQ pairs of MODEL, and say what it does not fuse and why.

    Found are pairs that run as kernels of their own, operators that stay in float although their inputs carry pairs,
    and reformats beside quantized layers. Exit code 4 if there is any; the conversions at the model's own float inputs
    and outputs have to be there, and do not count. The result of `qdqtune tune` in its output folder does not fail on
    the engine that it was tuned on: what the engine does not fuse there was measured, and is faster than without.

    \b
    qdqtune check optimized_final.onnx
    qdqtune check model.onnx --layers --engine openvino
    qdqtune check model.qdq.onnx --graph-json layers.json --profile-json profile.json
    """
    models: tuple[Path, ...] = options.model
    if len(models) > 1 and options.graph_json is not None:
        raise BadOption("`graph_json` is about one model: name that alone")
    results: list[Layers | Checked] = []
    for model in models:
        one = CheckOptions(**shared_values(options, CheckOptions) | {"model": model})
        done = layers(one) if options.layers else check(one)
        results.append(done)
        say_notes(getattr(done, "notes", ()))
        if options.as_machine:
            continue
        if isinstance(done, Layers):
            show(done.table())
            print_lines([done.in_words()])
        else:
            if done.findings:
                show(done.table())
            print_lines(_below(done))
    if options.as_machine:
        print_json(results[0].to_dict() if len(models) == 1 else [done.to_dict() for done in results])
    failed = any(isinstance(done, Checked) and not done.passes for done in results)
    return ConstraintUnmet.exit_code if failed else 0


def _below(done: Checked) -> Iterator[str]:
    """What stands below the findings: the result, what runs elsewhere, and what to do."""
    if unknown := [layer for layer in done.layers if layer.kind == "unknown"]:
        spent_there, first = time_of(unknown) or 0.0, f"{unknown[0].name:.60}"
        yield f"{len(unknown)} rows of the profile ({spent_there:.3f} ms) fit no layer, the first: {first}"
    yield done.in_words()
    if done.fallback is not None:
        yield done.fallback.in_words()
    failing = [finding for finding in done.findings if finding.fails]
    if done.measured and failing:
        yield "a search on this engine has found these pairs (placement.yaml beside the file): nothing to do"
    elif failing:
        names = (name for finding in failing for name in (finding.cause, *finding.nodes) if name)
        first = next((f" --allow-boundary {shlex.quote(glob.escape(name))}, all of it with" for name in names), "")
        accepted = f"what is meant to be so is accepted with{first} --allow-boundary '*'"
        yield f"{accepted}; `qdqtune tune MODEL --from-qdq` measures which pairs pay"


@command(DebugOptions)
def debug_command(options: DebugOptions, terminal: Terminal) -> int:
    """Find which tensor breaks the outputs of a quantized model.

    \b
    MODEL QUANTIZED   the pairs of QUANTIZED are examined, with their very scales, zero points and integers
    MODEL             with Q/DQ pairs: the same, against MODEL without them; its weights count as right

    The tensors are ranked by the error that the pairs of each alone make, as ONNX defines them. The worst are taken out
    until the outputs are healthy. A tensor is guilty if the error halves without it, or if it alone breaks the limit.
    If none stands out, the largest are named. If the engine computes something else than the pairs define, that is
    said.

    Exit code 0: the outputs are healthy; 4: they are not, whether or not a tensor is guilty; 5: ONNX Runtime does not
    run the float model, or the engine not the quantized one.

    \b
    qdqtune debug model.onnx quantized.onnx --calibration-data samples.npz
    qdqtune debug model.onnx model.qdq.onnx --engine tensorrt --json
    """
    done = progress.run(debug, options, terminal)
    if terminal.as_machine:
        print_json(done.to_dict() | {"flags": to_exclude(done.excluded)})
    else:
        print_lines(_lines(done))
        if done.suspects:
            show(done.table())
        if not done.is_healthy:
            print_lines(_advice(done))
    return 0 if done.is_healthy else ConstraintUnmet.exit_code


def _lines(done: Diagnosis) -> Iterator[str]:
    """What stands above the table of tensors."""
    if done.placement:
        yield f"{done.file}: {placed(done.placement)}"
    yield done.in_words()
    if done.is_healthy:
        return
    if done.examined < done.samples:
        where = counted(done.examined, "sample")
        yield f"examined on the {where} with most of the error: {level(done.noise_there)} there"
    if done.by_numbers is not None:
        yield f"as ONNX defines its arithmetic: {level(done.by_numbers)}"


def _advice(done: Diagnosis) -> Iterator[str]:
    """What stands below the table of tensors of a file that is not healthy."""
    if done.largest:
        yield (
            "the damage that is left is spread over many tensors, none is guilty; the largest alone are listed: "
            "calibrate otherwise, or exclude several (quantize --report)"
        )
    if done.guilty:
        state = "healthy" if done.rest is not None and done.rest <= done.limit else "still not healthy"
        yield f"without them on {done.engine}: {level(done.rest or 0.0)}, {state}"
        yield f"to keep them in float: qdqtune quantize MODEL {to_exclude(done.excluded)}"
    if not done.suspects and done.unexamined:
        yield f"no examined tensor is guilty, but {done.unexamined} not examined: see the notes"
    elif not done.suspects:
        yield "no single tensor is guilty"


SKILL = Path(__file__).parent.parent / "skill" / "SKILL.md"
"""How an agent uses qdqtune, in the form that agents read."""


@dataclass(kw_only=True)
class DoctorArguments(Terminal, DoctorOptions):
    """The options of `doctor` on the command line."""

    skill: Flag = option(
        SWITCH,
        False,
        "Print how an agent uses qdqtune, as a SKILL.md: which command when, how to read results, what never to do.",
        "Output",
        short="print how an agent uses qdqtune",
    )


@command(DoctorArguments)
def doctor_command(options: DoctorArguments) -> int:
    """Show which engines work on this machine, on what hardware, and what to install for the others.

    Exit code 5 only if none does. With --on: the same of another machine, or what is missing there. With --qualify:
    what holds of our claims about an engine, checked on small graphs in some minutes; exit code 4 if one does not.

    \b
    qdqtune doctor --qualify --engine tensorrt
    qdqtune doctor --skill > .agents/skills/qdqtune/SKILL.md     or .claude/skills/...
    """
    if options.skill:
        text = SKILL.read_text(encoding="utf-8")
        if options.as_machine:
            print_json({"text": text})
        else:
            print(text, end="")
        return 0
    if options.qualify:
        return _qualify(options)
    if options.output is not None:
        raise BadOption("there is a file to write with `qualify` only")
    if options.on is not None:
        return doctor_elsewhere(options.on, *(["--json"] if options.as_machine else []))
    with temporary_folder() as folder:
        found = examine(folder)
    if options.as_machine:
        print_json(asdict(found))
    else:
        for kind, states in (("engine", found.engines), ("provider", found.providers)):
            columns = (kind, "status", "version", "device", "takes")
            rows = [(e.name, e.status, e.version, e.device, e.takes) for e in states]
            show(Table(columns, rows, least_widths={"takes": 30}).filled)
        known = ((o.name, o.takes, o.default, ", ".join(o.engines), o.help) for o in found.options)
        columns = ("engine option", "takes", "default", "engines", "meaning")
        show(Table(columns, [*known], least_widths={"meaning": 30}))
        print_lines(_remarks(found))
    return 0 if found.is_usable else EngineUnavailable.exit_code


def _qualify(options: DoctorArguments) -> int:
    """Check the claims about an engine, and write what held to a file. Gives the exit code."""
    from qdqtune.commands.qualification import qualify  # imports most of the package

    if options.on is not None:
        raise BadOption("`qualify` checks an engine on this machine: leave `on` out")
    with progress.shown(quiet=options.quiet, verbose=options.verbose) as observer:
        done = qualify(options, observer)
    write_json(options.record, done.to_dict(), "record")
    if options.as_machine:
        print_json(done.to_dict())
    else:
        show(done.table())
        print_lines([*done.notable(), done.in_words(), f"to send with a report: {options.record}"])
    return 0 if done.holds else ConstraintUnmet.exit_code


def _remarks(found: EnginesState) -> Iterator[str]:
    cpu = found.processor
    cores = counted(cpu.cores, "core")
    yield f"CPU: {cpu.name}, {cores} ({' '.join(cpu.isa) or 'no known instruction sets'}); {cpu.consequence}"
    for gpu in found.gpus:
        yield f"GPU: {gpu.name}, {gpu.memory}, compute capability {gpu.compute_capability}, driver {gpu.driver}"
    if found.gpu_note:
        yield f"GPU: none ({found.gpu_note})"
    for engine in (*found.engines, *found.providers):
        if engine.reason:
            yield f"{engine.name}: " + ": ".join(filter(None, (engine.reason, engine.remedy)))
