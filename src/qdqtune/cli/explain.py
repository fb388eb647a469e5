"""`qdqtune explain`: a finished run by reason, or node by node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from qdqtune.cli import options
from qdqtune.cli.grouped import command
from qdqtune.cli.options import FILE, option
from qdqtune.cli.output import print_json, print_lines, print_prose
from qdqtune.commands.explain import Explained, explain_run
from qdqtune.commands.explanation import IN_WORDS, Explanation, Tally


@command(
    "explain",
    params=[
        click.Argument(["folder"], type=FILE, metavar="DIR"),
        click.Argument(["pattern"], metavar="[NODE|PATTERN]", required=False),
        option("--state-file", "State file of the run, where that does not lie in DIR.", FILE),
        options.AS_JSON,
    ],
)
def explain_command(folder: Path, pattern: str | None, state_file: Path | None, as_machine: bool) -> None:
    """Explain a finished run: why each node runs in 8 bits or in float, and what the other way would cost.

    DIR is the output folder of `qdqtune tune`. Without a node: the nodes by reason, what takes the most time first.
    Times are in ms: what rounds have measured of the whole model, shared out over its layers as the engine told of the
    builds; conversions around a node count with it. Nothing is run.

    \b
    qdqtune explain qdqtune_output
    qdqtune explain qdqtune_output '/layer1/*'
    """
    explained = explain_run(folder, state_file)
    if pattern is not None:
        explained = replace(explained, rows=explained.matching(pattern))
    if as_machine:
        print_json(explained.to_dict())
    else:
        print_lines(by_reason(explained)) if pattern is None else print_prose(by_node(explained.rows))


def by_reason(explained: Explained) -> Iterator[str]:
    """A row for each decision and reason."""
    yield f"{explained.folder}: {explained.headline}"
    yield ""
    words = max(len(IN_WORDS[tally.why]) for tally in explained.tallies)
    yield f"{'nodes':>6}  {'runs in':13}  {'ms':>9}  {'otherwise':>9}  {'why':{words}}  such as"
    for row in explained.tallies:
        yield _row(row, words)
    if unknown := next((row.unknown for row in explained.rows if row.ms is None and row.unknown), ""):
        yield ""
        yield f"no ms: {unknown}"


def _row(row: Tally, words: int) -> str:
    times = f"{_number(row.ms):>9}  {_number(row.other_ms):>9}"
    return f"{row.nodes:6}  {row.runs_in:13}  {times}  {IN_WORDS[row.why]:{words}}  {row.example}"


def _number(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.4g}" if ms >= 0.001 or ms == 0 else f"{ms:.1e}"


def by_node(rows: Sequence[Explanation]) -> Iterator[str]:
    """Two or three lines for each node."""
    for row in rows:
        others = [name for name in row.unit if name != row.node]
        together = f", decided together with {', '.join(others)}" if others else ""
        stored = f", its weights stored as {row.storage}" if row.storage else ""
        yield f"{row.node} ({row.op}): runs in {row.precision}{stored}{together}"
        yield f"    {IN_WORDS[row.why]}: {row.reason}"
        if row.margin_ms is None:
            yield f"    no price of the other way: {row.unknown}"
        else:
            more = "cost" if row.margin_ms >= 0 else "save"
            guess = "" if row.measured else ", as far as one can guess"
            other = "without pairs it" if (row.why, row.otherwise) == ("no kernel", "float") else row.otherwise
            yield f"    {other} would {more} {abs(row.margin_ms):.3g} ms{guess}"
