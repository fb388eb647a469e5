"""`qdqtune inspect`, `compare`, `apply` and `build`: commands about model files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qdqtune.cli import progress
from qdqtune.cli.command import Terminal, command
from qdqtune.cli.output import print_json, print_lines, say_error, show, with_flags
from qdqtune.commands import gate
from qdqtune.commands.apply import ApplyOptions, apply
from qdqtune.commands.build import BuildOptions, build
from qdqtune.commands.compare import CompareOptions, compare
from qdqtune.commands.gate import RUNS, Gated
from qdqtune.commands.inputs import MODEL
from qdqtune.commands.inspect import InspectOptions, inspect
from qdqtune.commands.shown import Table
from qdqtune.errors import ConstraintUnmet, EngineFailure
from qdqtune.options import REQUIRED, MaybeFile, Option, PathLike, option, several, writes
from qdqtune.system.checks import record
from qdqtune.system.writing import atomic_write


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


@dataclass(kw_only=True)
class CompareArguments(Terminal, CompareOptions):
    """The options of `compare` on the command line."""

    files: Option[Sequence[PathLike], tuple[Path, ...]] = option(
        several(MODEL), REQUIRED, "Model files.", is_positional=True, is_repeated=True, metavar="FILES..."
    )
    junit: MaybeFile = option(
        writes(record),
        None,
        "Write what became of each limit as JUnit XML as well.",
        "Output",
        short="limits as JUnit XML",
    )
    markdown: MaybeFile = option(
        writes(record),
        None,
        "Write the table and the limits as Markdown as well.",
        "Output",
        short="the same as a comment",
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
    except EngineFailure as error:  # the engine does not run the first file
        _write_gate(options, "nothing could be compared", None, [Gated(str(files[0]), RUNS, "failed", str(error))])
        raise
    _write_gate(options, done.in_words(), done.table(), done.gated, done.notes)
    if options.as_machine:
        print_json(done.to_dict())
    else:
        show(done.table())
        print_lines(one.in_words for one in done.gated if one.limit != RUNS)
    for refusal in done.refusals:
        say_error(refusal)
    return EngineFailure.exit_code if done.refusals else 0 if done.passes else ConstraintUnmet.exit_code


def _write_gate(
    options: CompareArguments, words: str, table: Table | None, gated: Sequence[Gated], notes: Sequence[str] = ()
) -> None:
    texts = {options.junit: gate.junit(gated), options.markdown: gate.markdown(words, table, gated, notes)}
    for path, text in texts.items():
        if path is not None:
            with atomic_write(path, "record") as fresh:
                fresh.write_text(with_flags(text), encoding="utf-8")


@command(ApplyOptions)
def apply_command(options: ApplyOptions, terminal: Terminal) -> None:
    """Put the Q/DQ pairs of an earlier search into MODEL, with scales calibrated anew: no search, no timing.

    For a network that was trained again: its placement holds, its scales do not. They are found as that search found
    its own, unless an option about ranges says otherwise.
    """
    done = progress.run(apply, options, terminal)
    if terminal.as_machine:
        print_json(done.to_dict())
    else:
        print_lines([done.in_words(), *([] if done.scores is None else [done.scores.told])])


@command(BuildOptions)
def build_command(options: BuildOptions, terminal: Terminal) -> None:
    """Build MODEL, and save it in the engine's own format: a TensorRT plan, an OpenVINO IR, an optimized ONNX file.

    What a Q/DQ model leaves in float runs in float, everything between pairs in 8 bits: a mixed-precision engine.

    \b
    qdqtune build optimized_final.onnx -o model.plan --engine tensorrt
    """
    artifact = build(options)
    if terminal.as_machine:
        print_json(artifact.to_dict())
    else:
        print(artifact.in_words())
