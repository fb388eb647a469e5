"""Results that show themselves: a short `repr`, a small table in notebooks, and plain values for machines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

MOST_ROWS = 30
"""Rows that a notebook shows."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Titles of columns, and rows."""


class Shown:
    """What every result can: see the module."""

    @abstractmethod
    def in_words(self) -> str:
        """The result in a sentence."""

    @abstractmethod
    def table(self) -> Table:
        """The result as a table."""

    @abstractmethod
    def to_dict(self) -> Mapping[str, Any]:
        """The result for machines: what JSON can hold."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.in_words()}>"

    def _repr_html_(self) -> str:
        """What notebooks show; names come from models, so everything is escaped."""
        titles, rows = self.table()
        head = "".join(f"<th>{escape(title)}</th>" for title in titles)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[:MOST_ROWS]
        )
        rest = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        return f"<div><p>{escape(self.in_words())}</p>{table}{rest}</div>"


def milliseconds(ms: float | None) -> str:
    """A time in ms; nothing where it is not known."""
    return "" if ms is None else f"{ms:.4g}"
