"""Output of commands: results go to standard output; progress, notes and errors to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from qdqtune import errors
from qdqtune.cli.streams import escaped_lines, styled
from qdqtune.commands.shown import Shown, Table
from qdqtune.errors import escaped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
    from rich.segment import Segment


def flags() -> dict[str, str]:
    """How to show options in messages, by field name: flags, or the names of positional arguments. They are those of
    the running command; for other options those of `tune` or `quantize`, which messages may mention."""
    from qdqtune.commands.quantize import QuantizeOptions  # slow to import, and most lines name no option
    from qdqtune.commands.tune import TuneOptions
    from qdqtune.options import flags_of, options_of

    context = click.get_current_context(silent=True)
    own = getattr(context and context.command, "kind", TuneOptions)
    places = {name: one.metavar.rstrip(".") for name, one in options_of(own).items() if not one.group}
    return flags_of(QuantizeOptions) | flags_of(TuneOptions) | flags_of(own) | places


def with_flags(text: str) -> str:
    return errors.with_flags(text, flags()) if "`" in text else text


def say(text: str, style: str = "") -> None:
    """Write one line of text to standard error; on a terminal it wraps between words."""
    here = console(is_error=True)
    line = " ".join(with_flags(text).splitlines())
    here.print(escaped(line), style=style, soft_wrap=not here.is_terminal)


def say_error(text: str) -> None:
    say(f"error: {text}", "red")


def say_notes(notes: Iterable[str]) -> None:
    for note in notes:
        say(f"note: {note}")


def console(*, is_error: bool = False, **how: Any) -> Console:
    """A console without markup that escapes control characters, since names in models may hold anything."""
    from rich.console import Console  # slow to import, and many commands print without it
    from rich.segment import Segment

    class Escaping(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else escaped_lines(text), style, control)

    stream = styled(sys.stderr if is_error else sys.stdout)
    return Escaping(file=stream, markup=False, emoji=False, highlight=False, **how)


SHORT = 7
"""Words of up to so many characters are not broken in columns."""

WIDE = 10_000
"""Width in characters if output is no terminal, so that no table is cut."""

LONG_CELL = 60
"""Width in characters at which long cells wrap if output is no terminal."""


def present(done: Shown, *, as_machine: bool) -> int:
    """Print the result of a command as JSON or as text. Returns the exit code."""
    if as_machine:
        print_json(done.to_dict())
    else:
        print_parts(done.parts())
    return done.exit_code


def print_parts(parts: Iterable[str | Table]) -> None:
    for part in parts:
        if isinstance(part, str):
            print_lines([part])
        elif part.rows:
            show(part)


def show(table: Table) -> None:
    """Print a table without empty columns. If output is no terminal, long cells wrap between words; on a narrow
    terminal the widest columns wrap. Nothing is cut."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table, here = table.filled, console()
    if not here.is_terminal:
        here = console(width=WIDE)
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(table.columns):
        cells = [escaped(row[number]) for row in table.rows if row[number]]
        longest = max(map(len, " ".join([column, *cells]).split()), default=0)
        numbers = sum(cell[0] in "0123456789+-" for cell in cells)
        justify: JustifyMethod = "right" if 2 * numbers > len(cells) else "left"
        least = min(SHORT, longest) or None
        most = None if here.is_terminal else max(LONG_CELL, longest + LONG_CELL // 4)  # beside a path a short word
        drawn.add_column(Text(column), justify=justify, overflow="fold", min_width=least, max_width=most)
    for row in table.rows:
        drawn.add_row(*(Text(escaped(cell)) for cell in row))  # names may hold anything
    here.print(drawn)
    if table.caption:  # in the table it would be broken to the width of that
        here.print(with_flags(table.caption))


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(escaped(with_flags(line)))


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
