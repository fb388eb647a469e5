"""`qdqtune explain`, `report` and `verify`: what a finished run has found, and whether it holds here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from qdqtune.cli import progress
from qdqtune.cli.command import Terminal, command
from qdqtune.cli.output import flags, print_json, print_lines, print_prose, show
from qdqtune.commands.explain import ExplainOptions, explain_run
from qdqtune.commands.verify import VerifyOptions, verify
from qdqtune.errors import ConstraintUnmet
from qdqtune.explanation.page import write_report
from qdqtune.explanation.report import report_of_run
from qdqtune.explanation.units import Explanation
from qdqtune.options import OF_RUN, REQUIRED, File, option
from qdqtune.system.checks import Output, check_outputs, in_list, written_as
from qdqtune.tuning.folder import REPORT


@command(ExplainOptions)
def explain_command(options: ExplainOptions, terminal: Terminal) -> None:
    """Explain a finished run: why each node runs in 8 bits or in float, and what it takes.

    DIR is the output folder of `qdqtune tune`. Without a node: the nodes by reason, what takes the most time first.
    Times are in ms: the measured latency of the whole model, divided among its layers as the engine reports them; each
    conversion counts with one node. What a node would take the other way is shown where a build ran it so, with all
    nodes around it as in what ships: `measured` if nothing else differed, else `estimated` from the layers of that
    build. A node in float has one of five reasons: no kernel for this operator; conversions cost more than it saves; no
    gain beyond noise; accuracy limit; not tried. Nothing is run.

    \b
    qdqtune explain qdqtune_output
    qdqtune explain qdqtune_output '/layer1/*'
    """
    explained = explain_run(options.folder, options.pattern)
    if terminal.as_machine:
        print_json(explained.to_dict())
    elif explained.is_part:
        print_prose(_by_unit(explained.rows))
    else:
        print_prose([f"{explained.folder}: {explained.headline}"])
        show(explained.table())


def _by_unit(rows: Sequence[Explanation]) -> Iterator[str]:
    for row in rows:
        names = (f"{name} ({operator})" for name, operator in zip(row.nodes, row.operators, strict=True))
        yield f"{', '.join(names)}: {row.state}{row.precision and f', {row.precision}'}"
        yield f"    {row.why}"


CANNOT_TELL = 3
"""The exit code of `verify` where a measurement decides nothing."""


@command(VerifyOptions)
def verify_command(options: VerifyOptions, terminal: Terminal) -> int:
    """Say whether what a run has proven holds on this machine.

    FOLDER holds optimized_final.onnx, baseline.onnx and deploy/settings.json, as tune leaves them. The files have to be
    the same; what engine and machine say of themselves is compared, and both models are timed as `compare` does. It
    holds if the tuned model is faster here at one number of threads of the proof and slower at none, and with samples
    within the limits of the run. Exit code 4: it does not hold; 3: the measurement cannot tell.

    \b
    qdqtune verify qdqtune_output --calibration-data samples.npz
    """
    done = progress.run(verify, options, terminal)
    if terminal.as_machine:
        print_json(done.to_dict())
    else:
        if done.comparison is not None:
            show(done.table())
        print_lines([done.in_words()])
    return {"holds": 0, "cannot tell": CANNOT_TELL}.get(done.finding, ConstraintUnmet.exit_code)


@dataclass(kw_only=True)
class ReportOptions(Terminal):
    """The options of `report`."""

    directory: File = option(OF_RUN, REQUIRED, "The output folder of a finished run.", is_positional=True)


@command(ReportOptions)
def report_command(options: ReportOptions) -> None:
    """Write the report of a finished run: one HTML file that works offline and makes no request.

    The run is the one in DIRECTORY. `tune` writes its report by itself; this is for runs with --no-report. With --json
    nothing is written.

    \b
    qdqtune report qdqtune_output
    """
    if options.as_machine:
        print_json(asdict(report_of_run(options.directory)))
    else:
        folder = options.directory
        is_page, is_listed = written_as("page"), in_list(folder)
        check_outputs([Output(folder / REPORT, "the report", lambda file: is_page(file) or is_listed(file))], {})
        print(leave_report(folder))


def leave_report(folder: Path) -> Path:
    """Write the report of the run in `folder`. Gives its path.

    Raises:
        OutputError: it cannot be written.
    """
    write_report(report_of_run(folder), folder / REPORT, flags())
    return folder / REPORT
