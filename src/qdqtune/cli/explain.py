"""`qdqtune explain`: a finished run by reason, or node by node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.table import Table

from qdqtune.cli import options
from qdqtune.cli.grouped import command
from qdqtune.cli.layers import shortened
from qdqtune.cli.options import FILE, option
from qdqtune.cli.output import print_json, print_prose, show
from qdqtune.cli.report import table_of
from qdqtune.commands.explain import Explained, explain_run
from qdqtune.commands.explanation import IN_WORDS, Explanation

LONGEST = 40
"""Characters of a node's name in the table of reasons."""


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
        if pattern is None:
            print_prose([f"{explained.folder}: {explained.headline}"])
            show(by_reason(explained))
        else:
            print_prose(by_node(explained.rows))


def by_reason(explained: Explained) -> Table:
    """A row for each decision and reason."""
    guessed = {(row.quantized, row.why) for row in explained.rows if row.other_ms is not None and not row.measured}
    rows = list[tuple[str, ...]]()
    for tally in explained.tallies:
        guess = " ?" if tally.other_ms is not None and (tally.quantized, tally.why) in guessed else ""
        times = _number(tally.ms), _number(tally.other_ms) + guess
        rows.append((str(tally.nodes), tally.runs_in, *times, IN_WORDS[tally.why], shortened(tally.example, LONGEST)))
    columns, words = ("nodes", "runs in", "ms", "otherwise", "why", "such as"), ("runs in", "why", "such as")
    table = table_of(columns, rows, words)
    table.columns[0].justify = "right"
    unknown = next((row.unknown for row in explained.rows if row.ms is None and row.unknown), "")
    told = f"no ms: {unknown}" if unknown else "?: a guess in part, as no build ran all of them so" if guessed else ""
    table.caption = told or None
    return table


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
            verb, more = ("cost", " more") if row.margin_ms >= 0 else ("save", "")
            guess = "" if row.measured else ", as far as one can guess"
            other = "without pairs it" if (row.why, row.otherwise) == ("no kernel", "float") else row.otherwise
            yield f"    {other} would {verb} {abs(row.margin_ms):.3g} ms{more}{guess}"
