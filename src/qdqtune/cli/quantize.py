"""`qdqtune quantize` and `rules`: pairs by placement rules, without a search."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qdqtune.calibration.calibrate import Calibration
from qdqtune.cli import options, report
from qdqtune.commands.quantize import Quantized, Request, Selection, quantize
from qdqtune.engines.formats import FORMATS
from qdqtune.errors import BadModel, BadOption
from qdqtune.placement import engine_rules

engines = click.Choice(sorted(FORMATS))
quant_types = click.Choice(["int8", "fp8"])


@click.command("quantize")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="[default: MODEL with .qdq.onnx]")
@click.option("--quant-type", type=quant_types, default="int8", show_default=True)
@click.option("--engine", type=engines, default="onnxruntime", show_default=True,
              help="Whose numbers and rules to use. It need not be installed here.")  # fmt: skip
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True,
              help="fp16: make what stays in float float16, as TensorRT takes precision from the graph. Not for "
                   "onnxruntime.")  # fmt: skip
@click.option("--per-channel/--no-per-channel", default=None,
              help="A scale for each output channel of an int8 weight.  [default: as the engine wants it]")  # fmt: skip
@click.option("--nodes-to-quantize", multiple=True, metavar="WILDCARD", help="Only nodes named so. Repeatable.")
@click.option("--op-types-to-quantize", multiple=True, metavar="OP", help="Only these operators. Repeatable.")
@click.option("--nodes-to-exclude", multiple=True, metavar="WILDCARD",
              help="Nodes to keep in float, such as '/head/*'. Repeatable.")  # fmt: skip
@click.option("--op-types-to-exclude", multiple=True, metavar="OP", help="Operators to keep in float. Repeatable.")
@options.data_options
@options.range_options
@click.option("--fix-input", "fix_inputs", multiple=True, metavar="NAME=VALUE", callback=options.fixed,
              help="Make an input constant; an If that it decides is folded. Repeatable.")  # fmt: skip
@click.option("--evaluate", metavar="MODULE:CALLABLE",
              help="Your metric, called with a function that runs the model: before and after.")  # fmt: skip
@click.option("--report", "with_report", is_flag=True,
              help="What each rule did, and the ten tensors whose rounding alone does most to the outputs. Runs the "
                   "float model once or more for each tensor with a pair, up to 400 times in all.")  # fmt: skip
@click.option("--tune", "is_seed", is_flag=True, help="Go on with a search that starts from this placement.")
@click.option("--tune-args", metavar="ARGUMENTS", default="",
              help="More arguments of tune, as one string: \"--builds 24 --threads 4 -o out\".")  # fmt: skip
@click.option("--json", "as_machine", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def quantize_command(
    context: click.Context, /, model: Path, output: Path | None, as_machine: bool, is_seed: bool, tune_args: str,
    **given: Any,
) -> Any:  # fmt: skip
    """Quantize MODEL by placement rules: calibrated Q/DQ pairs in one pass, with no search and no timing.

    The rules say where an engine gains from 8 bits as a rule (qdqtune rules lists them); tune measures it. Every fifth
    sample is held out of calibration, and the result is compared with MODEL on those.

    \b
    qdqtune quantize model.onnx --calibration-data samples.npz -o model.qdq.onnx
    qdqtune quantize model.onnx --calibration-data data.npz --engine tensorrt --quant-type fp8 --precision fp16
    qdqtune quantize model.onnx --calibration-data samples.npz --report --nodes-to-exclude '/head/*'
    """
    if tune_args and not is_seed:
        raise BadOption("--tune-args goes with --tune")
    if model.is_dir():
        raise BadModel(f"{model} is a folder: name an ONNX file")
    request = _request(model, output or model.with_suffix(".qdq.onnx"), given)
    search = _search(context, request, tune_args, as_machine) if is_seed else None
    with report.progress(Console(stderr=True)) as observer:
        done = quantize(request, observer)
    for note in done.notes:
        Console(stderr=True).print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
    if as_machine and not is_seed:
        print(json.dumps(as_json(request, done), indent=2))
    elif not as_machine:
        if request.report:
            for table in (rule_counts(done), worst_tensors(done)):
                Console().print(table)
        print("\n".join(_lines(request, done)))
    if search is None:
        return 0
    with search:
        return search.command.invoke(search)


def _request(model: Path, output: Path, given: Mapping[str, Any]) -> Request:
    return Request(
        model=model,
        output=output,
        quant_type=given["quant_type"],
        engine=given["engine"],
        precision=given["precision"],
        calibration_data=given["calibration_data"],
        calibration_samples=given["calibration_samples"],
        calibration=Calibration(given["calibration_method"], given["percentile"]),
        per_channel=given["per_channel"],
        selection=Selection(given["nodes_to_quantize"], given["op_types_to_quantize"],
                            given["nodes_to_exclude"], given["op_types_to_exclude"]),
        fix_inputs=given["fix_inputs"],
        input_shapes=given["input_shapes"],
        evaluate=given["evaluate"],
        report=given["with_report"],
        seed=given["seed"],
    )  # fmt: skip


def _search(context: click.Context, request: Request, more: str, as_machine: bool) -> click.Context:
    """`tune` as the user would type it, with what will be written as its start, ready to be invoked.

    Raises:
        BadOption: `more` cannot be split into arguments.
        click.ClickException: they are not those of `tune`.
    """
    try:
        added = [*shlex.split(more), *["--json"] * as_machine]
    except ValueError as error:
        raise BadOption(f"--tune-args {more}: {error}") from error
    how = request.calibration
    arguments = [
        str(request.model), "--qdq-baseline", str(request.output), "--quant-type", request.quant_type,
        "--engine", request.engine, "--precision", request.precision, "--seed", str(request.seed),
        "--calibration-method", how.method, "--percentile", str(how.percentile),
    ]  # fmt: skip
    if request.calibration_data is not None:
        arguments += ["--calibration-data", request.calibration_data]
    if request.calibration_samples is not None:
        arguments += ["--calibration-samples", str(request.calibration_samples)]
    for name, value in request.fix_inputs.items():
        arguments += ["--fix-input", f"{name}={value}"]
    for name, shape in request.input_shapes.items():
        arguments += ["--input-shape", f"{name}:{'x'.join(map(str, shape))}"]
    program = context.find_root()
    assert isinstance(program.command, click.Group)
    tune = program.command.commands["tune"]
    return tune.make_context("tune", [*arguments, *added], parent=program)


def as_json(request: Request, done: Quantized) -> dict[str, Any]:
    """The result for machines."""
    return {
        "output": str(done.output),
        "engine": request.engine,
        "quant_type": request.quant_type,
        "edges": len(done.placed.placement),
        "rules": dict(done.placed.counts),
        "output_sqnr_db": done.sqnr_db,
        "output_cosine": done.cosine,
        "finite": done.is_finite,
        "samples": done.judged,
        "held_out": done.is_held_out,
        "metric": None if done.metric is None else dict(zip(("before", "after"), done.metric, strict=True)),
        "pairs": [asdict(damage) for damage in done.damages],
    }


def _lines(request: Request, done: Quantized) -> Iterator[str]:
    kind = request.quant_type.upper()
    yield f"{done.output}: {len(done.placed.placement)} edges carry a pair ({kind} as {request.engine} wants it)"
    where = "held-out samples" if done.is_held_out else "samples"
    angle = "" if done.cosine is None else f", cosine {done.cosine:.6f}"
    ratio = _db(done.sqnr_db) if done.is_finite else "unknown"
    yield f"output SQNR {ratio}{angle}, on {done.judged} {where}"
    if done.metric is not None:
        yield f"{request.evaluate}: {done.metric[0]:g} before, {done.metric[1]:g} after"


def _db(ratio: float | None) -> str:
    return "exact" if ratio is None else f"{ratio:.1f} dB"


def rule_counts(done: Quantized) -> Table:
    """What each rule did."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rule")
    table.add_column("edges", justify="right")
    table.add_column("")
    effects = {rule.name: engine_rules.effect(rule) for rule in engine_rules.RULES}
    for name, count in done.placed.counts:
        table.add_row(name, str(count), effects[name])
    return table


def worst_tensors(done: Quantized) -> Table:
    """The tensors whose rounding alone does most to the outputs, and the nodes that read them in 8 bits."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rounded alone", overflow="fold")
    table.add_column("read by", overflow="fold")
    table.add_column("output SQNR", justify="right", no_wrap=True)
    table.add_column("own SQNR", justify="right", no_wrap=True)
    for damage in done.damages:
        nodes = Text("\n").join(Text(node) for node in damage.nodes)
        table.add_row(Text(damage.tensor), nodes, _db(damage.output_db), _db(damage.own_db))
    return table


@click.command("rules")
@click.option("--engine", type=engines, help="Only the rules of this engine.")
@click.option("--quant-type", type=quant_types, help="Only the rules of this type.")
@click.option("--json", "as_machine", is_flag=True, help="Print JSON.")
def rules_command(engine: str | None, quant_type: Any, as_machine: bool) -> None:
    """List the placement rules of quantize: what each does, why, for which engines, and who says so."""
    chosen = engine_rules.rules_of(engine, quant_type)
    if as_machine:
        print(json.dumps([engine_rules.as_json(rule) for rule in chosen], indent=2))
        return
    for rule in chosen:
        print(f"{rule.name} ({engine_rules.effect(rule)})")
        print(f"    {rule.reason}")
        print(f"    {', '.join(sorted(rule.engines))}; {', '.join(sorted(rule.quant_types))}; {rule.source}")
