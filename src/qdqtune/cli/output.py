"""What goes where: results to standard output, words about them to standard error."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def say(text: str, style: str = "") -> None:
    """One line for people. Standard output is for results."""
    line = escaped(" ".join(text.splitlines()))
    _console().print(line, style=style, highlight=False, soft_wrap=True, markup=False)


def escaped(text: str) -> str:
    """The text with what no terminal should obey spelled out: names come from models, which anybody may have made."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def say_error(text: str) -> None:
    """One line about what went wrong."""
    say(f"error: {text}", "red")


def say_notes(notes: Iterable[str]) -> None:
    """What the user should know, a line each."""
    for note in notes:
        say(f"note: {note}")


def say_exception() -> None:
    """The exception at hand, whole."""
    _console().print_exception()


def _console() -> Console:
    from rich.console import Console  # half of what it takes to start, and most commands have nothing to say

    return Console(stderr=True)


WIDE = 10_000
"""Columns of what is no terminal: no table is cut there."""


def width() -> int:
    """Columns that a table may take on standard output."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else WIDE


def show(table: Table) -> None:
    """A table on standard output. Where that is no terminal, every cell is whole and on one line."""
    from rich.console import Console

    console, caption = Console(width=width()), table.caption
    table.caption = None  # it would be broken to the width of the table
    console.print(table)
    if caption:
        console.print(caption, highlight=False, markup=False)


def print_json(value: object) -> None:
    """A result for machines."""
    print(json.dumps(value, indent=2))
