"""The commands other than `tune` and `run`: their help, and calls of the functions in `qdqtune.commands`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from qdqtune.cli import progress
from qdqtune.cli.command import Terminal, begun, command
from qdqtune.cli.output import flags, present, print_json, print_lines, print_parts, say_error, say_notes, with_flags
from qdqtune.commands.build import BuildOptions, build
from qdqtune.commands.check import Checked, CheckOptions, Layers, check, layers
from qdqtune.commands.compare import RUNS, CompareOptions, Gated, compare, junit, markdown
from qdqtune.commands.debug import DebugOptions, debug
from qdqtune.commands.doctor import DoctorOptions, doctor_elsewhere, examine, qualify
from qdqtune.commands.explain import ExplainOptions, explain_run
from qdqtune.commands.inputs import MODEL
from qdqtune.commands.inspect import InspectOptions, inspect
from qdqtune.commands.quantize import ApplyOptions, QuantizeOptions, apply, quantize
from qdqtune.commands.shown import Shown, Table
from qdqtune.commands.verify import VerifyOptions, verify
from qdqtune.errors import BadOption, EngineFailure, InputError
from qdqtune.explanation.report import report_of_run
from qdqtune.options import OF_RUN, OUTPUT, REQUIRED, SWITCH, File, MaybeFile, Option, each, options_of
from qdqtune.system.checks import Output, check_outputs, in_list, record, written_as
from qdqtune.system.writing import atomic_write
from qdqtune.tuning.folder import REPORT
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.options import single_model
from qdqtune.tuning.summary import read_summary

SKILL = Path(__file__).parent.parent / "skill" / "SKILL.md"
"""How an agent uses qdqtune, in the form that agents read."""

O = TypeVar("O")  # noqa: E741


def _run(run: Callable[[O, Observer], Shown], options: O, terminal: Terminal) -> int:
    return present(progress.run(run, options, terminal), as_machine=terminal.as_machine)


@command(QuantizeOptions)
def quantize_command(options: QuantizeOptions, terminal: Terminal) -> int:
    """Quantize MODEL by placement rules: calibrated Q/DQ pairs in one pass, with no search and no timing.

    The rules say where an engine gains from 8 bits as a rule; tune measures it. Of forty samples or more every fifth is
    held out of calibration, and the result is compared with MODEL on the first 32 of those; of fewer, on all. compare,
    debug and apply compare outputs on the same ones.

    \b
    qdqtune quantize model.onnx --calibration-data samples.npz -o model.qdq.onnx
    qdqtune quantize model.onnx --calibration-data data.npz --engine tensorrt --quant-type fp8 --precision fp16
    qdqtune quantize model.onnx --calibration-data samples.npz --report --nodes-to-exclude '/head/*'
    qdqtune quantize model.onnx --calibration-cache calib.cache --engine tensorrt --precision fp16
    """
    return _run(partial(quantize, begun=begun()), options, terminal)


@command(InspectOptions)
def inspect_command(options: InspectOptions, terminal: Terminal) -> None:
    """Show what MODEL holds: inputs and outputs, operators, and what keeps it from running in 8 bits.

    With --regions auto also how the graph that tune works on divides into regions (it has no pairs, and layers have
    absorbed BatchNormalizations), and which of them share a pattern. In region mode more patterns mean a longer
    search: every pattern is tuned once, wherever it occurs. With --tree every region is shown, with -v every node
    and tensor as well.
    """
    inspection = inspect(options)
    if terminal.as_machine:
        print_json(inspection.to_dict())
    else:
        print_lines(inspection.overview())
        if options.regions or options.tree or terminal.verbose:
            print()
            print_lines(inspection.lines(tree=options.tree, verbose=terminal.verbose))
        else:
            print("Regions and patterns: --regions auto; every region: --tree, with the names of nodes and tensors: -v")


class CompareArguments(Terminal, CompareOptions):
    files: Option[tuple[Path, ...]] = MODEL(
        "Model files.", default=REQUIRED, convert=each(single_model), is_repeated=True, metavar="FILES..."
    )
    junit: MaybeFile = OUTPUT(
        "Write the outcome of each limit as JUnit XML as well.", "Output", "limits as JUnit XML", writes=record
    )
    markdown: MaybeFile = OUTPUT(
        "Write the table and the limits as Markdown as well.", "Output", "the same as a comment", writes=record
    )


@command(CompareArguments)
def compare_command(options: CompareArguments) -> int:
    """Time every other of FILES against the first, in the same rounds on fresh builds of all.

    A speedup of 2x means half of the time that the first file takes. The true one lies outside its interval at most
    twice in a thousand comparisons. Exit code 5: the engine refuses one of the files; 4: a limit is missed.

    \b
    qdqtune compare model.onnx qdqtune_output/optimized_final.onnx
    qdqtune compare model.onnx model.qdq.onnx --fail-below 1.2 --junit gate.xml --markdown gate.md
    """
    files = options.files
    try:
        done = progress.run(partial(compare, files), options, options)
    except (EngineFailure, InputError) as error:  # the engine does not run the first file, or a limit is about nothing
        _write_gate(options, "nothing could be compared", None, [Gated(str(files[0]), RUNS, "failed", str(error))])
        raise
    _write_gate(options, done.in_words(), done.table(), done.gated, done.notes)
    code = present(done, as_machine=options.as_machine)
    for refusal in done.refusals:
        say_error(refusal)
    return code


def _write_gate(
    options: CompareArguments, words: str, table: Table | None, gated: Sequence[Gated], notes: Sequence[str] = ()
) -> None:
    gated = [replace(one, told=with_flags(one.told)) for one in gated]
    texts = {options.junit: junit(gated), options.markdown: markdown(words, table, gated, notes)}
    for path, text in texts.items():
        if path is not None:
            with atomic_write(path, "record") as fresh:
                fresh.write_text(text, encoding="utf-8")


@command(ApplyOptions)
def apply_command(options: ApplyOptions, terminal: Terminal) -> int:
    """Put the Q/DQ pairs of an earlier search into MODEL, with scales calibrated anew: no search, no timing.

    For a network that was trained again: its placement holds, its scales do not. They are found as that search found
    its own, unless an option about ranges says otherwise.
    """
    return _run(apply, options, terminal)


@command(BuildOptions)
def build_command(options: BuildOptions, terminal: Terminal) -> int:
    """Build MODEL, and save it in the engine's own format: a TensorRT plan, an OpenVINO IR, an optimized ONNX file.

    What a Q/DQ model leaves in float runs in float, everything between pairs in 8 bits: a mixed-precision engine.

    \b
    qdqtune build optimized_final.onnx -o model.plan --engine tensorrt
    """
    return _run(build, options, terminal)


class CheckArguments(Terminal, CheckOptions):
    model: Any = MODEL(
        "ONNX files.", default=REQUIRED, convert=each(single_model), is_repeated=True, metavar="MODEL..."
    )
    layers: bool = SWITCH(
        "Show the layers that the engine makes of MODEL instead, the longest first, and the nodes that each covers. "
        "Times are of profiled inferences: they say where the time goes, and add up to more than the latency.",
        "Output",
        "show the layers that the engine runs",
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
        values = {name: getattr(options, name) for name in options_of(CheckOptions)}
        one = CheckOptions(**values | {"model": model})
        done = layers(one) if options.layers else check(one)
        results.append(done)
        say_notes(done.notes)
        if not options.as_machine:
            print_parts(done.parts(every=options.verbose) if isinstance(done, Checked) else done.parts())
    if options.as_machine:
        print_json(results[0].to_dict() if len(models) == 1 else [done.to_dict() for done in results])
    return max(done.exit_code for done in results)


@command(DebugOptions)
def debug_command(options: DebugOptions, terminal: Terminal) -> int:
    """Find which tensor breaks the outputs of a quantized model.

    \b
    MODEL QUANTIZED   the pairs of QUANTIZED are examined, with their very scales, zero points and integers
    MODEL             with Q/DQ pairs: the same, against MODEL without them; its weights count as right

    The tensors are ranked by the error that the pairs of each alone make, as ONNX defines them. The worst are taken out
    until the outputs are healthy. A tensor is guilty if it makes a tenth of the error, and less is left without it.
    If none is guilty, the worst are listed. It also reports an engine that computes something else than pairs define.

    Exit code 0: the outputs are healthy; 4: they are not, whether or not a tensor is guilty; 5: ONNX Runtime does not
    run the float model, or the engine not the quantized one.

    \b
    qdqtune debug model.onnx quantized.onnx --calibration-data samples.npz
    qdqtune debug model.onnx model.qdq.onnx --engine tensorrt --json
    """
    return _run(debug, options, terminal)


class DoctorArguments(Terminal, DoctorOptions):
    skill: bool = SWITCH(
        "Print how an agent uses qdqtune, as a SKILL.md: which command when, how to read results, what never to do.",
        "Output",
        "print how an agent uses qdqtune",
    )


@command(DoctorArguments)
def doctor_command(options: DoctorArguments) -> int:
    """Show which engines work on this machine, on what hardware, and what to install for the others.

    Exit code 5 only if none does. With --on: the same of another machine, or what is missing there. With --qualify:
    runs small models for some minutes to check what qdqtune requires of an engine; exit code 4 if something fails.

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
        if options.on is not None:
            raise BadOption("`qualify` checks an engine on this machine: leave `on` out")
        return _run(qualify, options, options)
    if options.on is not None:
        return doctor_elsewhere(options.on, *(["--json"] if options.as_machine else []))
    return present(examine(), as_machine=options.as_machine)


@command(ExplainOptions)
def explain_command(options: ExplainOptions, terminal: Terminal) -> int:
    """Explain a finished run: why each node runs in 8 bits or in float, and what it takes.

    DIR is the output folder of `qdqtune tune`. Without a node: the nodes by reason, what takes the most time first.
    Times are in ms: the measured latency of the whole model, divided among its layers as the engine reports them; each
    conversion counts with one node; a node that runs in the same kernel in both files has one time. For a node in
    float: why it is not in 8 bits (the glossary lists the reasons). If its reason is time, and more than noise: how
    much longer the model would take with it and nodes like it in 8 bits. `measured` means that two builds differed in
    these nodes alone and ran in the same rounds; `estimated`, that layer times of builds predict it. Nothing is run.

    \b
    qdqtune explain qdqtune_output
    qdqtune explain qdqtune_output '/layer1/*'
    """
    return present(explain_run(options.folder, options.pattern), as_machine=terminal.as_machine)


@command(VerifyOptions)
def verify_command(options: VerifyOptions, terminal: Terminal) -> int:
    """Say whether what a run has proven holds on this machine.

    FOLDER holds optimized_final.onnx, baseline.onnx and deploy/settings.json, as tune leaves them. The files have to be
    the same; versions and hardware are compared, and both models are timed as `compare` does. It
    holds if the tuned model is faster here at one number of threads of the proof and slower at none, and with samples
    within the limits of the run; of samples that are not the run's own, all are compared. Exit code 4: it does not
    hold; 3: the measurement cannot tell.

    \b
    qdqtune verify qdqtune_output --calibration-data samples.npz
    """
    return _run(verify, options, terminal)


class ReportOptions(Terminal):
    directory: File = OF_RUN("The output folder of a finished run.", default=REQUIRED)


@command(ReportOptions)
def report_command(options: ReportOptions) -> None:
    """Write the report of a finished run: one HTML file that works offline and makes no request.

    The run is the one in DIRECTORY. `tune` writes its report by itself; this is for runs with --no-report. With --json
    nothing is written.

    \b
    qdqtune report qdqtune_output
    """
    if options.as_machine:
        print_json(asdict(report_of_run(options.directory)))
    else:
        from qdqtune.explanation.page import write_report  # slow to import: other commands do without it

        read_summary(options.directory)  # refuses what is no folder of a run in better words than the checks below
        is_page, is_listed = written_as("page"), in_list(options.directory)
        report = Output(options.directory / REPORT, "the report", lambda file: is_page(file) or is_listed(file))
        check_outputs([report], {})
        print(write_report(options.directory, flags()))
