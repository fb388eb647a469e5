"""`qdqtune quantize`: pairs by placement rules, without a search."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from qdqtune.cli import progress
from qdqtune.cli.command import Terminal, command
from qdqtune.cli.output import print_json, print_lines, show, to_exclude
from qdqtune.commands.quantize import Quantized, QuantizeOptions, quantize
from qdqtune.explanation.formatting import placed, samples
from qdqtune.graph.saving import nbytes
from qdqtune.numerics.accuracy import closeness, integers_differ
from qdqtune.numerics.scores import loss_high


@command(QuantizeOptions)
def quantize_command(options: QuantizeOptions, terminal: Terminal) -> None:
    """Quantize MODEL by placement rules: calibrated Q/DQ pairs in one pass, with no search and no timing.

    The rules say where an engine gains from 8 bits as a rule; tune measures it. Of forty
    samples or more every fifth is held out of calibration, and the result is compared with MODEL on the first 32 of
    those; of fewer, on all. compare, debug and apply compare outputs on the same ones.

    \b
    qdqtune quantize model.onnx --calibration-data samples.npz -o model.qdq.onnx
    qdqtune quantize model.onnx --calibration-data data.npz --engine tensorrt --quant-type fp8 --precision fp16
    qdqtune quantize model.onnx --calibration-data samples.npz --report --nodes-to-exclude '/head/*'
    qdqtune quantize model.onnx --calibration-cache calib.cache --engine tensorrt --precision fp16
    """
    done = progress.run(quantize, options, terminal)
    if not terminal.as_machine:
        if options.report:
            show(done.table())
            show(done.damage_table())
        print_lines(_lines(options, done))
    else:
        stored = {"weight_only": dict(done.placed.counts)} if options.weight_only else {}
        print_json({"engine": options.engine, "quant_type": options.quant_type, **stored, **done.to_dict()})


def _lines(options: QuantizeOptions, done: Quantized) -> Iterator[str]:
    if options.weight_only is None:
        numbers = f"{options.quant_type.upper()} as {options.engine} wants it"
        yield f"{done.output}: {placed(done.placed.placement)} ({numbers})"
    else:
        kinds = ", ".join(f"{count} as {name}" for name, count in done.placed.counts)
        size = nbytes(done.output) / nbytes(Path(str(options.model)))
        yield f"{done.output}: weights stored in fewer bits: {kinds}; {size:.0%} of the file's size"
    if not done.judged:
        yield "not compared with the float model: give --calibration-data for that"
    else:
        agreement = "" if done.agreement is None else f", agreement {done.agreement:.1%}"
        near = closeness(done.sqnr_db, done.agreement) if done.is_finite else "unknown"
        told = f"outputs: {near}" if integers_differ(done.sqnr_db, done.agreement) else f"output SQNR {near}{agreement}"
        yield f"{told}, on {samples(done.judged, done.is_held_out)}"
        if done.worst_slice:
            yield f"worst slice of the outputs: {done.worst_slice}"
        if done.is_finite:
            yield done.scores.told
    if done.loudest:
        yield f"to keep in float what makes a tenth of the error or more: {to_exclude(done.loudest)}"
    elif done.damages and done.sqnr_db is not None:
        yield "no node to keep in float: no tensor makes a tenth of the error, or nothing else is quantized"
    if done.measured is not None:
        before, after = done.measured
        name = f"{before.name} on {len(before.by_sample)} samples" if before.name else str(options.evaluate)
        high = loss_high(before, after)
        most = "" if high is None else f"; loss at most {max(high, 0):.2g} (95 %)"
        yield f"{name}: {before.value:g} before, {after.value:g} after{most}"
