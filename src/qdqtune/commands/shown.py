"""The base class of results: a sentence as `repr`, lines and tables for terminals and notebooks, and values as JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qdqtune.errors import escaped

MOST_ROWS = 30
"""Most rows of a table that a notebook shows."""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    @property
    def filled(self) -> Table:
        """The table without empty columns that have a title."""
        told = [n for n, name in enumerate(self.columns) if not name or any(row[n] for row in self.rows)]
        return replace(self, columns=[self.columns[n] for n in told], rows=[[r[n] for n in told] for r in self.rows])

    def __str__(self) -> str:
        """The table for `print`: columns of equal width, and the caption."""
        filled = self.filled
        lines = [[escaped(cell) for cell in row] for row in (filled.columns, *filled.rows)] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*rows, self.caption]).rstrip()

    def markdown(self, most: int | None = None) -> list[str]:
        """The lines of the table in Markdown, with at most `most` rows, and the caption."""
        filled = self.filled
        rows = [filled.columns, ["---"] * len(filled.columns), *filled.rows[:most]] if self.rows else []
        rest = len(self.rows[:most]) - len(self.rows)
        below = [f"and {-rest} more"] * bool(rest) + self.caption.splitlines()
        lines = [f"| {' | '.join(map(plain, row))} |" for row in rows]
        return [*lines, "", *(line for text in below for line in (plain(text), ""))]


class Shown:
    """A result of a command, which shows itself in Python, in notebooks and on a terminal."""

    notes: tuple[str, ...] = ()
    """Notes for the user."""

    @property
    def exit_code(self) -> int:
        return 0

    @abstractmethod
    def in_words(self) -> str:
        """The result in a sentence."""

    def table(self) -> Table:
        """The result as a table; empty if the sentence says it all."""
        return Table((), ())

    def parts(self) -> Iterator[str | Table]:
        """What the command line prints, from top to bottom: lines and tables. Empty tables are left out."""
        yield self.table()
        yield self.in_words()

    @abstractmethod
    def to_dict(self) -> Mapping[str, Any]:
        """The result as JSON values."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.in_words()}>"

    def _repr_markdown_(self) -> str:
        return "\n".join([plain(self.in_words()), "", *self.table().markdown(MOST_ROWS)])


def plain(text: str) -> str:
    """Text (a name from a model, say) on one line, escaped so that Markdown and HTML show it literally."""
    return "".join(f"\\{c}" if c in r"\`*_|<>[]" else c for c in escaped(text)).replace("@", "@\u200b")


def milliseconds(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.4g}"
