"""The files that `compare` writes for continuous integration, also where they fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qdqtune.cli.command import Parameter
from qdqtune.cli.output import with_flags
from qdqtune.commands import gate
from qdqtune.commands.gate import RUNS, Gated
from qdqtune.commands.shown import Table
from qdqtune.errors import EngineFailure
from qdqtune.options import Given, Option, Writes
from qdqtune.system.checks import Output, written_as
from qdqtune.system.writing import atomic_write


def _record(path: Path, name: str, _: Given) -> list[Output]:
    return [Output(path, name, written_as("record"))]


def _file(name: str, help: str, short: str) -> Parameter:
    return Parameter(Option(Writes(_record), None, help, "Output", short=short, name=name))


JUNIT = _file("junit", "Write what became of each limit as JUnit XML as well.", "limits as JUnit XML")
MARKDOWN = _file("markdown", "Write the table and the limits as Markdown as well.", "the same as a comment")


def write_gate(
    junit: Path | None,
    markdown: Path | None,
    told: str,
    table: Table | None,
    gated: Sequence[Gated],
    notes: Sequence[str] = (),
) -> None:
    """Write the files that were asked for.

    Raises:
        OutputError: one cannot be written.
    """
    if junit is not None:
        with atomic_write(junit, "record") as fresh:
            fresh.write_text(with_flags(gate.junit(gated)), encoding="utf-8")
    if markdown is not None:
        with atomic_write(markdown, "record") as fresh:
            fresh.write_text(with_flags(gate.markdown(told, table, gated, notes)), encoding="utf-8")


@contextmanager
def failing_gate(file: str, junit: Path | None, markdown: Path | None) -> Iterator[None]:
    """Write these files, too, if the engine does not run `file`, the first of a comparison."""
    try:
        yield
    except EngineFailure as error:
        gated = [Gated(file, RUNS, "failed", str(error))]
        write_gate(junit, markdown, "nothing could be compared", None, gated)
        raise
