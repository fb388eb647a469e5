"""The base class of results: a sentence as `repr`, a table for notebooks and terminals, and plain values as JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

MOST_ROWS = 30
"""Most rows of a table that a notebook shows."""


@dataclass(frozen=True)
class Table:
    """A table for people: titles of columns, rows of texts, a caption below and a title above. `least_widths` are those
    of columns of long texts, in characters, by title.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    title: str = ""
    least_widths: Mapping[str, int] = field(default_factory=dict)

    @property
    def filled(self) -> Table:
        """The table without empty columns; columns without a title stay."""
        told = [n for n, name in enumerate(self.columns) if not name or any(row[n] for row in self.rows)]
        return replace(self, columns=[self.columns[n] for n in told], rows=[[r[n] for n in told] for r in self.rows])


class Shown:
    """A result of a command, which shows itself in Python and in notebooks."""

    @abstractmethod
    def in_words(self) -> str:
        """The result in a sentence."""

    def table(self) -> Table:
        """The result as a table; empty where the sentence says it all."""
        return Table((), ())

    @abstractmethod
    def to_dict(self) -> Mapping[str, Any]:
        """The result as JSON values."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.in_words()}>"

    def _repr_html_(self) -> str:
        """HTML for notebooks. Everything is escaped, since names come from models."""
        table = self.table()
        head = "".join(f"<th>{escape(title)}</th>" for title in table.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows[:MOST_ROWS]
        )
        rest = f"<p>and {len(table.rows) - MOST_ROWS} more</p>" if len(table.rows) > MOST_ROWS else ""
        shown = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if table.rows else ""
        below = "".join(f"<p>{escape(line)}</p>" for line in table.caption.splitlines())
        return f"<div><p>{escape(self.in_words())}</p>{shown}{rest}{below}</div>"


def milliseconds(ms: float | None) -> str:
    """A time in ms as text; empty if unknown."""
    return "" if ms is None else f"{ms:.4g}"
