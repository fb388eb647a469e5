"""Click commands made from dataclasses of options: click splits the words, the dataclass converts and checks values.

`--help` has a line for each common option and the names of the rare ones; `--help-all` explains all.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import takewhile, zip_longest
from typing import Any, get_args

import click

from qdqtune.cli.output import with_flags
from qdqtune.cli.streams import BEGUN
from qdqtune.commands.inputs import check_options
from qdqtune.errors import QdqtuneError
from qdqtune.options import REQUIRED, SWITCH, Group, Option, Options, meant, options_of

NAME_COLUMNS = 32
"""Width of the column with option names in `--help`."""


class Terminal(Options):
    """Options that every command has on the command line only. `help_all` prints help and exits first of all."""

    as_machine: bool = SWITCH("Print the result as JSON.", "Output", "print JSON", flags="--json")
    quiet: bool = SWITCH("No progress.", "Output", flags="-q --quiet")
    verbose: bool = SWITCH(
        "Progress line by line, also on a terminal: a line for every candidate.", "Output", flags="-v --verbose"
    )
    help_all: bool = SWITCH("Explain every option.", "Output", "explain every option")


def _parameter(own: Option[Any]) -> click.Parameter:
    """The click parameter of an option. Its value is text, a bool, or a tuple if repeated; None or () if not given."""
    shown = click.Choice(own.choices) if own.choices else click.Path()
    more: dict[str, Any] = {"type": None if own.is_switch else str, "shell_complete": shown.shell_complete}
    if own.group is None:
        count, is_required = -1 if own.is_repeated else 1, own.default is REQUIRED
        return click.Argument([own.name], is_required, nargs=count, metavar=own.metavar, **more)
    more |= {"required": True} if own.default is REQUIRED else {"default": None}  # to click, None is a default
    flags = [f"{own.flag}/{own.negative}"] if own.negative else own.spellings
    if own.name == "help_all":  # acts at once, as `--help` does
        more |= {"is_eager": True, "expose_value": False, "callback": _explain}
    return click.Option([*flags, own.name], is_flag=own.is_switch, multiple=own.is_repeated, **more)


def _explain(ctx: click.Context, _: click.Parameter, is_asked: bool | None) -> None:
    if is_asked and not ctx.resilient_parsing:
        assert isinstance(ctx.command, Command)
        click.echo(ctx.command.explanation(ctx))
        ctx.exit()


def command_line() -> tuple[str, ...]:
    """The command line as typed, with the program's name; empty outside of one."""
    context = click.get_current_context(silent=True)
    words: tuple[str, ...] = (context.find_root().obj or ()) if context is not None else ()
    return words


def begun() -> float | None:
    """When the command started, by `time.monotonic`; None outside of one."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(BEGUN)


class Command(click.Command):
    """A command that makes a dataclass from its options and runs `body` with it, which returns the exit code (None is
    0). It refuses to overwrite its inputs, and spells options in errors as flags."""

    allow_extra_args = True  # `parse_args` refuses them

    def __init__(self, name: str, kind: type[Options], body: Callable[[Any], int | None], **more: Any) -> None:
        super().__init__(name, params=[*map(_parameter, options_of(kind).values())], help=body.__doc__, **more)
        self.kind, self.body = kind, body

    def _values(self) -> dict[str, str | None]:
        """What an option takes, by flag."""
        found = dict[str, str | None]()
        for own in options_of(self.kind).values():
            if own.group:
                found |= dict.fromkeys(filter(None, (*own.spellings, own.negative)), own.metavar)
        return found

    def _check_switches(self, ctx: click.Context, args: list[str]) -> None:
        """Refuse `--switch off` and `--switch=off`: click takes such a word for an argument of the command."""
        switches = [own for own in options_of(self.kind).values() if own.is_switch]
        others = {flag: own.negative for own in switches for flag in own.spellings}
        others |= {own.negative: own.spellings[0] for own in switches if own.negative}
        words = list(takewhile(lambda word: word != "--", args))
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            flag, _, value = word.partition("=")
            flag = flag.replace("_", "-")
            if flag in others and (value or following.lower() in ("on", "off", "true", "false", "yes", "no")):
                ctx.fail(f"{flag} takes no value: give {flag} alone, or {others[flag] or 'leave it out'}")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self._check_switches(ctx, args)
        with _flags_in_errors():
            try:
                rest = super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                near = " or ".join(map(repr, meant(error.option_name, self._values())))
                is_hinted = near and error.option_name.startswith("--")
                message = f"{error.message}{f' Did you mean {near}?' * bool(is_hinted)}"
                raise click.NoSuchOption(error.option_name, message, ctx=ctx) from error
            except click.BadOptionUsage as error:  # an option without its value
                message = ": ".join(filter(None, [error.message.rstrip("."), self._values().get(error.option_name)]))
                raise click.BadOptionUsage(error.option_name, message, ctx) from error
            if not ctx.resilient_parsing:
                if rest:
                    takes_data = hasattr(self.kind, "calibration_data") and not rest[0].endswith(".onnx")
                    hint = "; samples are `calibration_data`" if takes_data else ""
                    ctx.fail(with_flags(f"Got unexpected extra argument ({' '.join(rest)}){hint}"))
                options = self.kind(**{name: word for name, word in ctx.params.items() if word not in (None, ())})
                check_options(options)
                ctx.params = {"options": options}
        return rest

    def invoke(self, ctx: click.Context) -> int | None:
        with _flags_in_errors():
            return self.body(ctx.params["options"])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write options by group: a line for each common one, and the names of the rare ones."""
        for group, options in self.groups():
            formatter.write(f"\n{group}:\n")
            for own in options:
                if not own.short:
                    continue
                label = _label(own)
                if len(label) > NAME_COLUMNS - 2:  # a long name of its value
                    label = f"{', '.join(own.spellings)} {own.flag.rpartition('-')[2].upper()}"
                words = with_flags(own.short)
                if own.usual and not own.default_in_words and not own.is_switch:
                    words = f"{words} [{own.usual}]"
                words = textwrap.shorten(words, max(20, formatter.width - NAME_COLUMNS - 2), placeholder="...")
                formatter.write(f"  {label:<{NAME_COLUMNS - 2}}  {words}\n")
            if group == "Output":
                formatter.write(f"  {'-h, --help':<{NAME_COLUMNS}}this page\n")
            rare = ", ".join(flag for own in options if not own.short for flag in own.spellings)
            if rare:
                formatter.write(textwrap.fill(f"  also {rare}", formatter.width, subsequent_indent="    ",
                                              break_on_hyphens=False) + "\n")  # fmt: skip

    def explanation(self, ctx: click.Context) -> str:
        """The text of `--help-all`."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        for group, options in self.groups():
            with formatter.section(group):
                rows = []
                for own in options:
                    usual = f"  [default: {own.usual}]" if own.usual else ""
                    label = " / ".join(filter(None, [_label(own), own.negative]))
                    rows.append((label, with_flags(own.help + usual)))
                formatter.write_dl(rows)
        return formatter.getvalue().rstrip()

    def groups(self) -> Iterator[tuple[Group, list[Option[Any]]]]:
        for group in get_args(Group):
            options = [own for own in options_of(self.kind).values() if own.group == group]
            if options:
                yield group, options


def _label(own: Option[Any]) -> str:
    return f"{', '.join(own.spellings)} {own.metavar}".strip()


@contextmanager
def _flags_in_errors() -> Iterator[None]:
    try:
        yield
    except QdqtuneError as error:
        error.args = (with_flags(str(error)),)
        raise


def command(kind: type[Options]) -> Callable[[Callable[..., int | None]], Command]:
    """Decorator: makes a click command of a function, which is named after it (`tune` of `tune_command`). If the
    dataclass of options has none of `Terminal`, these are added, and passed as a second argument."""

    def made(body: Callable[..., int | None]) -> Command:
        name = body.__name__.removesuffix("_command")
        if issubclass(kind, Terminal):
            return Command(name, kind, body)
        both: type[Options] = type(kind.__name__, (Terminal, kind), {})
        return Command(name, both, wraps(body)(lambda options: body(options, options)))

    return made
