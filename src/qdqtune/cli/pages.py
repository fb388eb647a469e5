"""`qdqtune report`: what a finished run found, as one HTML file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from qdqtune.cli.grouped import command
from qdqtune.cli.options import FILE, flag, option
from qdqtune.cli.output import print_json
from qdqtune.graph.outputs import check_output
from qdqtune.report.gather import report_of_run
from qdqtune.report.page import write_report
from qdqtune.tuning.folder import REPORT, SUMMARY

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
        print_json(asdict(report))
        return
    target = output or directory / REPORT
    check_output(target, {"record of the run": [directory / SUMMARY]})
    write_report(report, target)
    print(target)


def leave_report(folder: Path) -> Path:
    """Write the report of the run that has just ended in `folder`, and say where it is.

    Raises:
        OutputError: it cannot be written.
    """
    write_report(report_of_run(folder), folder / REPORT)
    return folder / REPORT
