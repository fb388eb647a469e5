"""`qdqtune explain`: why each node of a finished run runs as it does, read from the folder of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from qdqtune.commands.shown import Shown, Table
from qdqtune.errors import BadOption
from qdqtune.explanation.facts import facts_of
from qdqtune.explanation.formatting import shortened
from qdqtune.explanation.reasons_by_measurement import IN_WORDS, Explanation, Tally, headline, tallied, total
from qdqtune.options import FILE, REQUIRED, TEXT, File, MaybeText, Options, option
from qdqtune.tuning.finished import read_run

LONGEST = 40
"""The most characters of a node's name in the table of reasons."""


@dataclass(kw_only=True)
class ExplainOptions(Options):
    """The options of `explain`."""

    folder: File = option(FILE, REQUIRED, "Output folder of a finished run.", is_positional=True, metavar="DIR")
    pattern: MaybeText = option(
        TEXT, None, "Only this node, or those that match.", is_positional=True, metavar="[NODE|PATTERN]"
    )


@dataclass(frozen=True, repr=False)
class Explained(Shown):
    """A finished run, explained: what shipped in a sentence, a row for every node, and sums by reason, the most time
    first. `is_part`: `rows` are only the nodes that were asked for."""

    folder: Path
    headline: str
    rows: tuple[Explanation, ...]
    tallies: tuple[Tally, ...]
    is_part: bool = False

    def in_words(self) -> str:
        """What shipped; or, for a single node, why it runs as it does."""
        if self.is_part and len(self.rows) == 1:
            row = self.rows[0]
            return f"{row.node} ({row.op}) runs in {row.precision}: {row.reason}"
        return self.headline

    def table(self) -> Table:
        """The nodes by reason, or one by one if only some were asked for."""
        if self.is_part:
            titles = ("node", "operator", "runs in", "reason", "ms", "float, ms")
            return Table(titles, [(r.node, r.op, r.precision, r.reason, _ms(r.ms), _ms(r.float_ms)) for r in self.rows])
        rows = list[tuple[str, ...]]()
        for tally in self.tallies:
            more = "" if tally.margin_ms is None else f"{tally.margin_ms:+.4g}" + " ?" * (not tally.measured)
            times, example = (_ms(tally.ms), _ms(tally.float_ms), more), shortened(tally.example, LONGEST)
            rows.append((str(tally.nodes), tally.runs_in, *times, IN_WORDS[tally.why], example))
        sums = (_ms(total([t.ms for t in self.tallies])), _ms(total([t.float_ms for t in self.tallies])))
        rows.append((str(len(self.rows)), "", *sums, "", "all nodes", ""))
        columns = ("nodes", "runs in", "ms", "float, ms", "otherwise", "why", "such as")
        caption = "otherwise: what the model would take more if all of them were decided the other way"
        caption += "; ?: a guess in part, as no build ran all of them so" * any(" ?" in row[4] for row in rows)
        if any(row.ms is None for row in self.rows):
            caption = "no ms: the builds of this run have no layer times, so that single nodes have no price"
        return Table(columns, rows, caption, left=("runs in", "why", "such as"))

    def matching(self, pattern: str) -> tuple[Explanation, ...]:
        """The rows of the node with that name, or else of those whose names match the wildcard, in graph order.

        Raises:
            BadOption: no row matches.
        """
        named = tuple(row for row in self.rows if row.node == pattern)
        rows = named or tuple(row for row in self.rows if fnmatchcase(row.node, pattern))
        if not rows:
            near = [row.node for row in self.rows if pattern.strip("*/?") in row.node][:3]
            hint = f"; near are {', '.join(near)}" if near and pattern.strip("*/?") else ""
            raise BadOption(f"no node of the model is named {pattern!r}{hint} (wildcards: '/layer1/*')")
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "folder": str(self.folder),
            "headline": self.headline,
            "reasons": [row.to_dict() for row in self.tallies],
            "nodes": [row.to_dict() for row in self.rows],
        }


def explain_run(folder: Path, pattern: str | None = None) -> Explained:
    """Explain a finished run; with a `pattern`, only the node of that name, or nodes that match it.

    Raises:
        BadOption: the folder holds no finished run, or no such node.
        BadState: its state file is damaged, or missing.
    """
    run = read_run(folder)
    facts, left = facts_of(run), run.summary.get("fallback")
    told = "" if left is None else f"; {left.in_words()}"
    whole = Explained(folder, headline(facts) + told, *tallied(facts))
    return whole if pattern is None else replace(whole, rows=whole.matching(pattern), is_part=True)


def _ms(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.4g}" if ms >= 0.001 or ms == 0 else f"{ms:.1e}"
