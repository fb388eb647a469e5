"""`qdqtune report`: what a finished run found, as one HTML file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from qdqtune.cli.command import command, switch
from qdqtune.cli.output import print_json
from qdqtune.explanation.page import write_report
from qdqtune.explanation.report import report_of_run
from qdqtune.options import REQUIRED, File, Given, MaybeFile, Options, Reads, Writes, option
from qdqtune.system.checks import PAGE_KIND, Output, is_marked, is_of_a_run
from qdqtune.tuning.folder import REPORT


def _record(text: str) -> list[Path]:
    """What lies in the folder of a run, but for its report."""
    folder = Path(text)
    return [path for path in folder.rglob("*") if path != folder / REPORT]


def _report(path: Path, name: str, given: Given) -> list[Output]:
    own = given["directory"] / REPORT
    return [Output(path, name, lambda file: is_marked(file, PAGE_KIND) and (file == own or not is_of_a_run(file)))]


@dataclass(kw_only=True)
class ReportOptions(Options):
    """The options of `report`."""

    directory: File = option(
        Reads(_record, "record of the run"), REQUIRED, "The output folder of a finished run.", is_positional=True
    )
    output: MaybeFile = option(
        Writes(_report, lambda given: None if given["as_machine"] else given["directory"] / REPORT),
        None,
        "File to write.",
        "Output",
        flags="-o --output",
        default_in_words=f"{REPORT} in DIRECTORY",
    )


AS_JSON = switch("as_machine", "--json", "Print what the report says as JSON, and write nothing.", short="print JSON")


@command("report", ReportOptions, AS_JSON)
def report_command(options: ReportOptions, as_machine: bool) -> None:
    """Write the report of a finished run: one HTML file that works offline and makes no request.

    The run is the one in DIRECTORY. `tune` writes its report by itself; this is for runs with --no-report, and for
    another place.

    \b
    qdqtune report qdqtune_output
    """
    report = report_of_run(options.directory)
    if as_machine:
        print_json(asdict(report))
        return
    target = options.output or options.directory / REPORT
    write_report(report, target)
    print(target)


def leave_report(folder: Path) -> Path:
    """Write the report of the run that has just ended in `folder`, and say where it is.

    Raises:
        OutputError: it cannot be written.
    """
    write_report(report_of_run(folder), folder / REPORT)
    return folder / REPORT
