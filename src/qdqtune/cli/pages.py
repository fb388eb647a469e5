"""`qdqtune report`, and what other commands leave for a browser: one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from qdqtune.cli.grouped import command
from qdqtune.cli.options import FILE, command_line, flag, option
from qdqtune.cli.output import print_json
from qdqtune.commands.check import Finding
from qdqtune.commands.compare import Row
from qdqtune.commands.quantize import Quantized, Request
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.outputs import check_output
from qdqtune.measurement.timing import Plan
from qdqtune.placement.reading import strip_pairs
from qdqtune.report.gather import report_of_run
from qdqtune.report.of_commands import of_check, of_compare, of_layers, of_quantize
from qdqtune.report.page import as_json, write_report
from qdqtune.tuning.folder import REPORT, SUMMARY
from qdqtune.types import Layer

OPTIONS = (
    click.Argument(["directory"], type=FILE),
    option("-o --output", f"[default: {REPORT} in DIRECTORY]", FILE),
    flag("--json as_machine", "Print what the report says as JSON, and write nothing."),
)


@command("report", OPTIONS)
def report_command(directory: Path, output: Path | None, as_machine: bool) -> None:
    """Write the report of a finished run: one HTML file that works offline and makes no request.

    The run is the one in DIRECTORY. `tune` writes its report by itself; this is for runs of earlier versions, and for
    another place.

    \b
    qdqtune report qdqtune_output
    """
    report = report_of_run(directory)
    if as_machine:
        print_json(as_json(report))
        return
    target = output or directory / REPORT
    check_output(target, {"record of the run": [directory / SUMMARY]})
    write_report(report, target)
    print(target)


def leave_layers(page: Path, model: Path | None, engine: str, layers: Sequence[Layer]) -> None:
    """Write what `layers` found as a page.

    Raises:
        OutputError: it cannot be written.
    """
    graph, name = (None, f"an engine of {engine}") if model is None else (load(model), model.name)
    write_report(of_layers(name, graph, engine, layers, command_line()), page)


def leave_check(
    page: Path,
    model: Path,
    graph: Model,
    engine: str,
    layers: Sequence[Layer],
    findings: Sequence[Finding],
    measured: bool,
) -> None:
    """Write what `check` found as a page.

    Raises:
        OutputError: it cannot be written.
    """
    write_report(of_check(model.name, graph, engine, layers, findings, measured, command_line()), page)


def leave_comparison(page: Path, first: Path, rows: Sequence[Row], plan: Plan, notes: Sequence[str]) -> None:
    """Write what `compare` found as a page.

    Raises:
        OutputError: it cannot be written.
    """
    write_report(of_compare(str(first), rows, plan, notes, command_line()), page)


def leave_quantized(page: Path, request: Request, done: Quantized) -> None:
    """Write what `quantize` did as a page.

    Raises:
        OutputError: it cannot be written.
    """
    write_report(of_quantize(request, done, strip_pairs(load(done.output)), command_line()), page)


def leave_report(folder: Path) -> Path:
    """Write the report of the run that has just ended in `folder`, and say where it is.

    Raises:
        OutputError: it cannot be written.
    """
    write_report(report_of_run(folder), folder / REPORT)
    return folder / REPORT
