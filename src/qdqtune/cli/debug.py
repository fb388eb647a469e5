"""`qdqtune debug`: which tensor breaks the outputs of a quantized model, and what to exclude so that none does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from qdqtune.cli import progress
from qdqtune.cli.command import AS_JSON, command
from qdqtune.cli.options import to_exclude
from qdqtune.cli.output import print_json, print_lines, say_notes, show
from qdqtune.cli.streams import escaped
from qdqtune.commands.debug import DebugOptions, debug
from qdqtune.commands.diagnosis import Diagnosis, Suspect
from qdqtune.commands.probes import NOT_FINITE, WrongPart
from qdqtune.errors import ConstraintUnmet
from qdqtune.explanation.words import placed, samples
from qdqtune.types import sqnr_of


@command("debug", DebugOptions, AS_JSON)
def debug_command(options: DebugOptions, as_machine: bool) -> int:
    """Find which tensor breaks the outputs of a quantized model, or which nodes an engine computes wrongly.

    \b
    MODEL QUANTIZED   the pairs of QUANTIZED are examined, with their very scales, zero points and integers
    MODEL             with Q/DQ pairs: the same, against MODEL without them; its weights count as right
    MODEL             without pairs: its parts on the engine, against ONNX Runtime without optimization

    First it asks what the pairs do as ONNX defines them: one build with a switch at every pair, then halving, at most
    2 log2(pairs) + 5 runs for one guilty tensor. If the engine makes worse of them, it builds with some of the pairs,
    and halves. What is found is taken out, and the rest searched again, until it is healthy or nobody stands out: then
    the damage is spread, which it says, and names the largest. A tensor is guilty if the error without it is half of
    what it was, or if it alone breaks the limit.

    Exit code 0: the outputs are healthy; 4: they are not, whether or not somebody is guilty; 5: the engine does not run
    the float model.

    \b
    qdqtune debug model.onnx quantized.onnx --calibration-data samples.npz
    qdqtune debug model.onnx model.qdq.onnx --engine tensorrt --json
    qdqtune debug model.onnx --engine openvino
    """
    with progress.shown() as observer:
        done = debug(options, observer)
    say_notes(done.notes)
    if as_machine:
        print_json(done.to_dict() | {"flags": _flags(done)})
    else:
        _show(done)
    return 0 if done.is_healthy else ConstraintUnmet.exit_code


def _told(noise: float) -> str:
    if noise >= NOT_FINITE:
        return "NaN or no outputs"
    return "exact" if noise == 0 else f"{sqnr_of(noise):.1f} dB"


def _show(done: Diagnosis) -> None:
    engine = done.engine
    if done.placement:
        print(f"{done.file}: {placed(done.placement)}")
    on = samples(done.samples, done.is_held_out)
    print(f"output SQNR {_told(done.noise)} on {engine}, on {on}, {done.runs} runs")
    if done.is_healthy:
        print(f"healthy: at or above {_told(done.limit)}")
        return
    if done.examined < done.samples:
        print(f"the {done.examined} samples that lose most are looked into: {_told(done.noise_there)} on these")
    if done.by_numbers is not None:
        print(f"as ONNX defines its arithmetic: {_told(done.by_numbers)}")
    for suspects, title in ((done.guilty, "guilty"), (done.largest, "largest")):
        if suspects:
            show(_table(suspects, title))
    print_lines(_ending(engine, done))


def _ending(engine: str, done: Diagnosis) -> Iterator[str]:
    for suspect in done.guilty:
        yield f"{suspect.tensor}: {suspect.reason}"
    yield from (line for part in done.wrong_parts for line in _part(engine, part))
    if done.largest:
        yield (
            "the damage that is left is spread over many tensors, none is guilty; the largest alone are listed: "
            "calibrate otherwise, or exclude several (quantize --report)"
        )
    if done.unexplained and not done.largest:
        yield "no single tensor is guilty"
    if done.guilty:
        state = "healthy" if done.rest is not None and done.rest <= done.limit else "still not healthy"
        yield f"without them on {engine}: {_told(done.rest or 0.0)}, {state}"
        yield f"to keep them in float: qdqtune quantize MODEL {_flags(done)}"


def _flags(done: Diagnosis) -> str:
    """Options of quantize that leave out what is guilty, and make what the file has otherwise."""
    excluded = to_exclude(done.excluded)
    return excluded if done.weight_only is None or not excluded else f"--weight-only {done.weight_only} {excluded}"


def _part(engine: str, part: WrongPart) -> Iterator[str]:
    many = " together" if len(part.nodes) > 1 else ""
    why = f": {part.reason}" if part.reason else ""
    yield f"{engine} computes these nodes wrongly{many}, fed with right values ({_told(part.noise)}{why}):"
    yield from (f"    {node}" for node in part.nodes)


def _table(suspects: Sequence[Suspect], title: str) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column(f"{title}, and nodes to exclude", overflow="fold", ratio=1)
    grid.add_column("range", no_wrap=True)
    grid.add_column("output SQNR", no_wrap=True)
    for suspect in suspects:
        names = Text("\n  ".join(map(escaped, (suspect.tensor, *suspect.nodes))))
        ranges = f"float {_range(suspect.float_range)}\npair  {_range(suspect.quantized_range)}"
        company = f"among {suspect.company}" if suspect.company > 1 else "alone"
        levels = f"with    {_told(suspect.noise)}\nwithout {_told(suspect.without)}\n{company}"
        grid.add_row(names, ranges, levels)
    return grid


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.4g} .. {ends[1]:.4g}"
