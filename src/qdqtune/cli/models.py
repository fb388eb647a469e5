"""`qdqtune inspect`, `compare`, `apply` and `build`: commands about model files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qdqtune.cli import progress
from qdqtune.cli.command import AS_JSON, JSON_FOR_TABLE, command, is_verbose
from qdqtune.cli.gate import JUNIT, MARKDOWN, failing_gate, write_gate
from qdqtune.cli.output import (
    print_json,
    print_lines,
    say_error,
    say_notes,
    show,
    with_flags_in_notes,
)
from qdqtune.commands.apply import ApplyOptions, apply
from qdqtune.commands.build import BuildOptions, build
from qdqtune.commands.compare import CompareOptions, compare
from qdqtune.commands.gate import RUNS
from qdqtune.commands.inputs import MODEL, execution_of
from qdqtune.commands.inspect import InspectOptions, inspect
from qdqtune.engines.devices import usual_threads
from qdqtune.engines.options import with_timing_cache
from qdqtune.errors import ConstraintUnmet, EngineFailure
from qdqtune.explanation.formatting import placed
from qdqtune.numerics.accuracy import closeness_of, concern
from qdqtune.options import REQUIRED, Files, Option, PathLike, option
from qdqtune.tuning import contexts


@command("inspect", InspectOptions, AS_JSON)
def inspect_command(options: InspectOptions, as_machine: bool) -> None:
    """Show how MODEL divides into regions, and which of them share a pattern.

    They are those of the graph that tune works on: without pairs, and with BatchNormalizations folded into layers.
    More patterns mean a longer search: every pattern is tuned once, wherever it occurs. With --tree every region
    is shown, with -v every node and tensor as well.
    """
    found = inspect(options)
    if as_machine:
        print_json(found.to_dict())
    else:
        print_lines(found.lines(tree=options.tree, verbose=is_verbose()))
        if not (options.tree or is_verbose()):
            print("Every region: --tree, with the names of nodes and tensors: -v")


@dataclass(kw_only=True)
class CompareArguments(CompareOptions):
    """The options of `compare`, and its files."""

    files: Option[Sequence[PathLike], tuple[Path, ...]] = option(
        Files(MODEL), REQUIRED, "Model files.", is_positional=True, is_repeated=True, metavar="FILES..."
    )


@command("compare", CompareArguments, JUNIT, MARKDOWN, JSON_FOR_TABLE)
def compare_command(options: CompareArguments, junit: Path | None, markdown: Path | None, as_machine: bool) -> int:
    """Time every other of FILES against the first, in interleaved rounds on two fresh builds of both.

    A speedup of 2x means half of the time that the first file takes. The true one lies outside its interval at most
    twice in a thousand comparisons. Exit code 5: the engine refuses one of the files; 4: a limit is missed.

    \b
    qdqtune compare model.onnx qdqtune_output/optimized_final.onnx
    qdqtune compare model.onnx model.qdq.onnx --fail-below 1.2 --junit gate.xml --markdown gate.md
    """
    files = options.files
    spec = options.spec(options.input_shapes, threads=usual_threads())
    if options.on is None and (busy := contexts.busy(spec)) is not None:
        say_notes([busy])
    with progress.shown() as observer, failing_gate(str(files[0]), junit, markdown):
        done = with_flags_in_notes(compare(files, options, observer))
    write_gate(junit, markdown, done.in_words(), done.table(), done.gated, done.notes)
    if as_machine:
        print_json(done.to_dict())
    else:
        show(done.table())
        print_lines(one.in_words for one in done.gated if one.limit != RUNS)
    say_notes(done.notes)
    for refusal in done.refusals:
        say_error(refusal)
    return EngineFailure.exit_code if done.refusals else 0 if done.passes else ConstraintUnmet.exit_code


@command("apply", ApplyOptions, AS_JSON)
def apply_command(options: ApplyOptions, as_machine: bool) -> None:
    """Put the Q/DQ pairs of an earlier search into MODEL, with scales calibrated anew: no search, no timing.

    For a network that was trained again: its placement holds, its scales do not. They are found as that search found
    its own, unless an option about ranges says otherwise.
    """
    with progress.shown() as observer:
        done = with_flags_in_notes(apply(options, observer))
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
        what = "outputs" if done.accuracy is None or done.accuracy.sqnr_db is None else "output SQNR"
        known = "" if done.accuracy is None else f", {what} against float: {closeness_of(done.accuracy)}"
        print(f"{done.output}: {placed(done.placement)}{known}")
        if done.scores is not None:
            print(done.scores.told)


@command("build", BuildOptions, AS_JSON)
def build_command(options: BuildOptions, as_machine: bool) -> None:
    """Build MODEL, and save it in the engine's own format: a TensorRT plan, an OpenVINO IR, an optimized ONNX file.

    What a Q/DQ model leaves in float runs in float, everything between pairs in 8 bits: a mixed-precision engine.

    \b
    qdqtune build optimized_final.onnx -o model.plan --engine tensorrt
    """
    spec = with_timing_cache(options.spec(), options.output.parent)
    made = build(Path(str(options.model)), options.output, spec, execution_of(options))
    if as_machine:
        print_json(made.to_dict())
    else:
        print(made.in_words())
