"""`qdqtune compare` and `apply`: model files against each other, and a recorded placement on another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qdqtune.cli import progress, report
from qdqtune.cli.command import AS_JSON, HTML, JSON_FOR_TABLE, command, command_line
from qdqtune.cli.output import print_json, say_error, say_notes, show
from qdqtune.commands.apply import ApplyOptions, apply
from qdqtune.commands.compare import CompareOptions, compare
from qdqtune.commands.inputs import MODEL
from qdqtune.errors import EngineFailure
from qdqtune.explanation.words import placed, samples
from qdqtune.numerics.accuracy import concern
from qdqtune.options import REQUIRED, Files, Option, PathLike, option
from qdqtune.tuning import advice


@dataclass(kw_only=True)
class CompareArguments(CompareOptions):
    """The options of `compare`, and its files."""

    files: Option[Sequence[PathLike], tuple[Path, ...]] = option(
        Files(MODEL), REQUIRED, "Model files.", is_positional=True, is_repeated=True, metavar="FILES..."
    )


@command("compare", CompareArguments, HTML, JSON_FOR_TABLE)
def compare_command(options: CompareArguments, html: Path | None, as_machine: bool) -> int:
    """Time every other of FILES against the first, in interleaved rounds on two fresh builds of both.

    A speedup of 2x means half of the time that the first file takes. The true one lies outside its interval at most
    twice in a thousand comparisons. Exit code 5: the engine refuses one of the files.

    \b
    qdqtune compare model.onnx qdqtune_output/optimized_final.onnx
    """
    files = options.files
    if (busy := advice.busy(options.spec(options.input_shapes))) is not None:
        say_notes([busy])
    with progress.shown() as observer:
        done = compare(files, options, observer)
    if as_machine:
        print_json(done.to_dict())
    else:
        judged = samples(done.judged, done.is_held_out) if done.judged else ""
        show(report.comparison_table(done.first, done.rows, judged))
    say_notes(done.notes)
    if html is not None:
        from qdqtune.commands.result_pages import of_compare
        from qdqtune.explanation.page import write_report

        write_report(of_compare(done.first, done.rows, options.plan, done.notes, command_line()), html)
    refused = [row for row in done.rows if row.ratio is None]
    for row in refused:
        say_error(f"{row.name} cannot be compared: {row.reason}")
    return EngineFailure.exit_code if refused else 0


@command("apply", ApplyOptions, AS_JSON)
def apply_command(options: ApplyOptions, as_machine: bool) -> None:
    """Put the Q/DQ pairs of an earlier search into MODEL, with scales calibrated anew: no search, no timing.

    For a network that was trained again: its placement holds, its scales do not. They are found as that search found
    its own, unless an option about ranges says otherwise.
    """
    with progress.shown() as observer:
        done = apply(options, observer)
    say_notes(done.notes)
    if done.random_data:
        say_notes(["no --calibration-data: the scales come from random inputs"])
    if not done.placement and not done.lost:
        say_notes(["this placement holds no pair: with none was the model fastest, or within the limits"])
    if done.lost:
        scaled = "" if done.matched is None else " or have no scale"
        say_notes([f"{len(done.lost)} edges are not in this model{scaled}, the first: {done.lost[0]}"])
    if done.accuracy is not None and (warning := concern(done.accuracy)):
        say_notes([warning])
    if as_machine:
        print_json(done.to_dict())
    else:
        known = "" if done.accuracy is None else f", output SQNR against float: {done.accuracy}"
        print(f"{done.output}: {placed(done.placement)}{known}")
