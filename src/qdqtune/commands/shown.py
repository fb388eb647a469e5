"""The base class of results: a sentence as `repr`, a table for notebooks and terminals, and plain values as JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

MOST_ROWS = 30
"""Most rows of a table that a notebook shows."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Titles of columns, and rows."""


class Shown:
    """A result of a command, which shows itself in Python and in notebooks."""

    @abstractmethod
    def in_words(self) -> str:
        """The result in a sentence."""

    @abstractmethod
    def table(self) -> Table:
        """The result as a table."""

    @abstractmethod
    def to_dict(self) -> Mapping[str, Any]:
        """The result as JSON values."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.in_words()}>"

    def _repr_html_(self) -> str:
        """HTML for notebooks. Everything is escaped, since names come from models."""
        titles, rows = self.table()
        head = "".join(f"<th>{escape(title)}</th>" for title in titles)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[:MOST_ROWS]
        )
        rest = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        return f"<div><p>{escape(self.in_words())}</p>{table}{rest}</div>"


def milliseconds(ms: float | None) -> str:
    """A time in ms as text; empty if unknown."""
    return "" if ms is None else f"{ms:.4g}"
