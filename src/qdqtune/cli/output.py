"""What goes where: results to standard output, words about them to standard error."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from qdqtune.cli.streams import escaped, escaped_lines, styled

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table


def say(text: str, style: str = "") -> None:
    """One line for people, broken between words on a terminal alone. Standard output is for results."""
    here = console(is_error=True)
    here.print(escaped(" ".join(text.splitlines())), style=style, soft_wrap=not here.is_terminal)


def say_error(text: str) -> None:
    """One line about what went wrong."""
    say(f"error: {text}", "red")


def say_notes(notes: Iterable[str]) -> None:
    """What the user should know, a line each."""
    for note in notes:
        say(f"note: {note}")


def say_exception() -> None:
    """The exception at hand, whole."""
    console(is_error=True).print_exception()


def console(*, is_error: bool = False, **how: Any) -> Console:
    """A console on standard output or standard error. Text is text there: nothing in it is markup, and names from
    models, which anybody may have made, cannot command a terminal."""
    from rich.console import Console  # half of what it takes to start, and most commands have nothing to say
    from rich.segment import Segment

    class Escaping(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else escaped_lines(text), style, control)

    stream = styled(sys.stderr if is_error else sys.stdout)
    return Escaping(file=stream, markup=False, emoji=False, highlight=False, **how)


WIDE = 10_000
"""Columns of what is no terminal: no table is cut there."""


def width() -> int:
    """Columns that a table may take on standard output."""
    here = console()
    return here.width if here.is_terminal else WIDE


def show(table: Table) -> None:
    """A table on standard output. Where that is no terminal, every cell is whole and on one line."""
    here, caption = console(width=width()), table.caption
    table.caption = None  # it would be broken to the width of the table
    here.print(table)
    if caption:
        here.print(caption)


def print_lines(lines: Iterable[str]) -> None:
    """A result for people, of lines whose names may hold line breaks: those are spelled out."""
    print("\n".join(map(escaped, lines)))


def print_prose(lines: Iterable[str]) -> None:
    """The same, of lines that nobody copies to a shell: on a terminal they are broken between words."""
    columns = width()
    for line in map(escaped, lines):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        print(textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def print_json(value: object) -> None:
    """A result for machines."""
    print(json.dumps(value, indent=2))
