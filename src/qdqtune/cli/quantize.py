"""`qdqtune quantize` and `rules`: pairs by placement rules, without a search."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import click
from rich import box
from rich.table import Table
from rich.text import Text

from qdqtune.cli import options, progress, tune
from qdqtune.cli.grouped import command
from qdqtune.cli.options import FILE, flag, option, repeated
from qdqtune.cli.output import print_json, print_lines, say_notes, show
from qdqtune.cli.report import table_of
from qdqtune.cli.streams import escaped
from qdqtune.commands.quantize import Quantized, Request, Selection, quantize
from qdqtune.commands.worst_tensors import to_exclude
from qdqtune.engines.formats import FORMATS
from qdqtune.engines.runner import time_limit
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.loading import load
from qdqtune.placement import engine_rules
from qdqtune.placement.reading import strip_pairs
from qdqtune.report.words import decibels, placed, samples
from qdqtune.types import QuantType

ENGINES = click.Choice(sorted(FORMATS))

OPTIONS = (
    options.MODEL,
    option("-o --output", "[default: MODEL with .qdq.onnx]", FILE),
    option("--quant-type", None, options.QUANT_TYPES, default="int8"),
    option(
        "--engine", "Whose numbers and rules to use. It need not be installed here.", ENGINES, default="onnxruntime"
    ),
    options.PRECISION,
    option(
        "--per-channel/--no-per-channel",
        "A scale for each output channel of an int8 weight.  [default: as the engine wants it]",
        default=None,
    ),
    repeated("--nodes-to-quantize nodes", "WILDCARD", "Only nodes named so. Repeatable."),
    repeated("--op-types-to-quantize op_types", "OP", "Only these operators. Repeatable."),
    repeated("--nodes-to-exclude excluded_nodes", "WILDCARD", "Nodes to keep in float, such as '/head/*'. Repeatable."),
    repeated("--op-types-to-exclude excluded_op_types", "OP", "Operators to keep in float. Repeatable."),
    *options.DATA,
    *options.RANGES,
    options.CACHE,
    option(
        "--placement-like",
        "rules: pairs where --engine gains from them as a rule; implicit: on all that a quantizable layer reads, as "
        "TensorRT's implicit quantization had its scales.",
        click.Choice(["rules", "implicit"]),
        default="rules",
    ),
    option(
        "--weight-only",
        "Quantize weights of products and tables alone, activations stay in float: w4 or w8, or exactly w4b32, w4b128a "
        "(blocks of 128, asymmetric) and the like. Language models gain where they read more weights than they "
        "multiply.",
        metavar="STORAGE",
    ),
    option(
        "--weight-rounding",
        "With --weight-only: nearest, or gptq, which makes up for the error of each weight in those behind it, as your "
        "calibration data meet them; some thousand rows (tokens) tell enough.",
        click.Choice(["nearest", "gptq"]),
        default="nearest",
    ),
    options.REWRITES,
    options.FIX_INPUT,
    options.TIME_LIMIT,
    option(
        "--evaluate",
        "Your metric, called with a function that runs the model: before and after.",
        metavar="MODULE:CALLABLE",
    ),
    flag(
        "--report",
        "What each rule did, and the ten tensors whose rounding alone does most to the outputs. Runs the float model "
        "once or more for each tensor with a pair, up to 400 times in all.",
    ),
    flag("--tune is_seed", "Go on with a search that starts from this placement."),
    option(
        "--tune-args",
        'More arguments of tune, as one string: "--builds 24 --threads 4 -o out".',
        metavar="ARGUMENTS",
        default="",
    ),
    options.HTML,
    flag("--json as_machine", "Print JSON instead of text."),
)

MEANT_ALIKE = (*options.DATA, *options.RANGES, options.CACHE, options.REWRITES, options.FIX_INPUT, options.TIME_LIMIT)
SHARED = {"model", "quant_type", "engine", "precision", *(option.human_readable_name for option in MEANT_ALIKE)}
"""Parameters that mean to `tune` what they mean here."""


@command("quantize", OPTIONS)
def quantize_command(**given: Any) -> int:
    """Quantize MODEL by placement rules: calibrated Q/DQ pairs in one pass, with no search and no timing.

    The rules say where an engine gains from 8 bits as a rule (qdqtune rules lists them); tune measures it. Of forty
    samples or more every fifth is held out of calibration, and the result is compared with MODEL on the first 32 of
    those; of fewer, on all. compare, debug and apply compare outputs on the same ones.

    \b
    qdqtune quantize model.onnx --calibration-data samples.npz -o model.qdq.onnx
    qdqtune quantize model.onnx --calibration-data data.npz --engine tensorrt --quant-type fp8 --precision fp16
    qdqtune quantize model.onnx --calibration-data samples.npz --report --nodes-to-exclude '/head/*'
    qdqtune quantize model.onnx --calibration-cache calib.cache --engine tensorrt --precision fp16
    """
    model, as_machine, more = given["model"], given["as_machine"], given["tune_args"]
    if more and not given["is_seed"]:
        raise BadOption("--tune-args goes with --tune")
    if model.is_dir():
        raise BadModel(f"{model} is a folder: name an ONNX file")
    options.check_cache(given)
    request = request_of(given)
    options.check_page(given["html"], [model], [request.output, request.calibration_cache])
    search = _search(request, given, more) if given["is_seed"] else None
    with time_limit(given["time_limit"]), progress.shown() as observer:
        done = quantize(request, observer)
    say_notes(done.notes)
    if given["html"] is not None:
        from qdqtune.report.of_commands import of_quantize
        from qdqtune.report.page import write_report

        plain = strip_pairs(load(done.output))
        write_report(of_quantize(request, done, plain, options.command_line()), given["html"])
    if not as_machine:
        if request.report:
            for table in (rule_counts(done), worst_tensors(done)):
                show(table)
        print_lines(_lines(request, done))
    elif search is None:
        stored = {"weight_only": dict(done.placed.counts)} if request.weight_only else {}
        print_json({"engine": request.engine, "quant_type": request.quant_type, **stored, **done.as_json()})
    return 0 if search is None else tune.run(search)


def request_of(given: options.Given) -> Request:
    """What quantize is told."""
    return Request(
        **options.named(Request, given, but=("output",)),
        output=given["output"] or given["model"].with_suffix(".qdq.onnx"),
        calibration=options.calibration(given),
        selection=Selection(**options.named(Selection, given)),
    )


def _search(request: Request, given: options.Given, more: str) -> options.Given:
    """Options of the search that starts from what will be written.

    Raises:
        BadOption: `more` cannot be split into arguments.
        click.ClickException: they are not those of `tune`.
    """
    try:
        arguments = shlex.split(more)
    except ValueError as error:
        raise BadOption(f"--tune-args {more}: {error}") from error
    known = {name: given[name] for name in SHARED} | {"qdq_baseline": request.output}
    search = tune.typed(arguments, known)
    return search | {"as_machine": search["as_machine"] or given["as_machine"]}


def _lines(request: Request, done: Quantized) -> Iterator[str]:
    if request.weight_only is None:
        numbers = f"{request.quant_type.upper()} as {request.engine} wants it"
        yield f"{done.output}: {placed(done.placed.placement)} ({numbers})"
    else:
        kinds = ", ".join(f"{count} as {name}" for name, count in done.placed.counts)
        size = done.output.stat().st_size / request.model.stat().st_size
        yield f"{done.output}: weights stored in fewer bits: {kinds}; {size:.0%} of the file's size"
    if not done.judged:
        yield "not compared with the float model: give --calibration-data for that"
        return
    angle = "" if done.cosine is None else f", cosine {done.cosine:.6f}"
    ratio = decibels(done.sqnr_db) if done.is_finite else "unknown"
    yield f"output SQNR {ratio}{angle}, on {samples(done.judged, done.is_held_out)}"
    if loud := to_exclude(done.damages, done.sqnr_db):
        yield f"to keep in float what makes a tenth of the error or more: {options.to_exclude(loud)}"
    elif done.damages and done.sqnr_db is not None:
        yield "the error is spread: no tensor makes a tenth of it, so there is none to exclude"
    if done.metric is not None:
        yield f"{request.evaluate}: {done.metric[0]:g} before, {done.metric[1]:g} after"


def rule_counts(done: Quantized) -> Table:
    """What each rule did."""
    effects = {rule.name: engine_rules.effect(rule) for rule in engine_rules.RULES}
    rows = [(name, str(count), effects[name]) for name, count in done.placed.counts]
    return table_of(("rule", "edges", ""), rows, [""])


def worst_tensors(done: Quantized) -> Table:
    """The tensors whose rounding alone does most to the outputs, and the nodes that read them in 8 bits."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rounded alone", overflow="fold")
    table.add_column("read by", overflow="fold")
    table.add_column("output SQNR", justify="right", no_wrap=True)
    table.add_column("own SQNR", justify="right", no_wrap=True)
    for damage in done.damages:
        nodes = "\n".join(map(escaped, damage.nodes))
        table.add_row(Text(escaped(damage.tensor)), Text(nodes), decibels(damage.output_db), decibels(damage.own_db))
    return table


@command(
    "rules",
    params=[
        option("--engine", "Only the rules of this engine.", ENGINES),
        option("--quant-type", "Only the rules of this type.", options.QUANT_TYPES),
        options.AS_JSON,
    ],
)
def rules_command(engine: str | None, quant_type: QuantType | None, as_machine: bool) -> None:
    """List the placement rules of quantize: what each does, why, for which engines, and who says so."""
    chosen = engine_rules.rules_of(engine, quant_type)
    if as_machine:
        print_json([engine_rules.as_json(rule) for rule in chosen])
        return
    for rule in chosen:
        print(f"{rule.name} ({engine_rules.effect(rule)})")
        print(f"    {rule.reason}")
        print(f"    {', '.join(sorted(rule.engines))}; {', '.join(sorted(rule.quant_types))}; {rule.source}")
