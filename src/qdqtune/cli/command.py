"""Click commands made of dataclasses of options: click parses words, the dataclass converts and checks values.

`--help` has a line for each usual option and the names of the rare ones; `--help-all` explains all.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from qdqtune.cli.output import with_flags
from qdqtune.cli.streams import BEGUN
from qdqtune.commands.inputs import check_options
from qdqtune.errors import QdqtuneError
from qdqtune.options import REQUIRED, SWITCH, Flag, Group, Kind, Option, Options, option, options_of

NAME_COLUMNS = 32
"""Columns of an option's name."""


@dataclass(kw_only=True)
class Terminal(Options):
    """What every command has on the command line only. `help_all` ends the command before there are options."""

    as_machine: Flag = option(SWITCH, False, "Print the result as JSON.", "Output", short="print JSON", flags="--json")
    quiet: Flag = option(SWITCH, False, "No progress.", "Output", flags="-q --quiet")
    verbose: Flag = option(
        SWITCH,
        False,
        "Progress line by line, also on a terminal: a line for every candidate.",
        "Output",
        flags="-v --verbose",
    )
    help_all: Flag = option(SWITCH, False, "Explain every option.", "Output", short="explain every option")


def _completion(kind: Kind) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    def complete(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
        if kind.is_path:
            return [CompletionItem(word, type="file")]
        return [CompletionItem(choice) for choice in kind.choices if choice.startswith(word)]

    return complete


class Parameter(click.Option):
    """A click option made of an `Option`. Its value is a text, of a repeated one a tuple; None if it is not given."""

    def __init__(self, own: Option[Any, Any]) -> None:
        self.own, flags, is_switch = own, list(own.flags), own.kind is SWITCH
        if is_switch and own.default is not False:
            flags = [f"{own.flag}/--no-{own.flag[2:]}"]
        more: dict[str, Any] = {"is_flag": True} if is_switch else {"type": str}
        more |= {"required": True} if own.default is REQUIRED else {"default": None}  # to click, None is a default
        more |= {"multiple": own.is_repeated}
        super().__init__([*flags, own.name], shell_complete=_completion(own.kind), **more)

    @property
    def label(self) -> str:
        return " ".join([", ".join(sorted(self.opts, key=len)), self.own.metavar]).strip()


def _parameters(kind: type[Options]) -> Iterator[click.Parameter]:
    for own in options_of(kind).values():
        if own.is_positional:
            count, is_required = -1 if own.is_repeated else 1, own.default is REQUIRED
            complete = _completion(own.kind)
            yield click.Argument(
                [own.name], is_required, type=str, nargs=count, metavar=own.metavar, shell_complete=complete
            )
        else:
            parameter = Parameter(own)
            if own.name == "help_all":
                parameter.is_eager, parameter.expose_value, parameter.callback = True, False, _explain_all
            yield parameter


def _explain_all(context: click.Context, _: click.Parameter, value: bool | None) -> None:
    if value:
        assert isinstance(context.command, Command)
        formatter = context.make_formatter()
        context.command.explain(context, formatter)
        click.echo(formatter.getvalue().rstrip())
        context.exit()


def command_line() -> tuple[str, ...]:
    """The command line as it was typed, with the program; empty if none is running."""
    context = click.get_current_context(silent=True)
    words: tuple[str, ...] = (context.find_root().obj or ()) if context is not None else ()
    return words


def begun() -> float | None:
    """When the command line was entered, by `time.monotonic`; None if none is running."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(BEGUN)


class Command(click.Command):
    """A command that makes options of a dataclass and runs `body` with them, which returns the exit code (None is 0).

    It may write only what does not overwrite its inputs, and its errors spell options as they are typed.
    """

    def __init__(self, name: str, kind: type[Options], body: Callable[[Any], int | None], **more: Any) -> None:
        super().__init__(name, params=[*_parameters(kind)], help=body.__doc__, **more)
        self.kind, self.body = kind, body

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, and check the files that the command may write.

        Raises:
            BadOption, OutputError: an option does not take its value, or names a file that must not be written.
        """
        with _flags_in_errors():
            rest = super().parse_args(ctx, args)
            if not ctx.resilient_parsing:
                options = self.kind(**{name: word for name, word in ctx.params.items() if word not in (None, ())})
                check_options(options)
                ctx.params = {"options": options}
        return rest

    def invoke(self, ctx: click.Context) -> int | None:
        with _flags_in_errors():
            return self.body(ctx.params["options"])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups: a line for each usual one, and the names of the rare ones."""
        for group, options in self.groups():
            formatter.write(f"\n{group}:\n")
            for one in options:
                own, label = one.own, one.label
                if not own.short:
                    continue
                if len(label) > NAME_COLUMNS - 2:  # a long name of its value
                    label = f"{', '.join(sorted(own.flags, key=len))} {own.flag.rpartition('-')[2].upper()}"
                words = with_flags(own.short)
                if own.usual and not own.default_in_words and own.kind is not SWITCH:
                    words = f"{words} [{own.usual}]"
                words = textwrap.shorten(words, max(20, formatter.width - NAME_COLUMNS - 2), placeholder="...")
                formatter.write(f"  {label:<{NAME_COLUMNS - 2}}  {words}\n")
            if group == "Output":
                formatter.write(f"  {'-h, --help':<{NAME_COLUMNS}}this page\n")
            rare = ", ".join(name for one in options if not one.own.short for name in one.opts)
            if rare:
                formatter.write(textwrap.fill(f"  also {rare}", formatter.width, subsequent_indent="    ",
                                              break_on_hyphens=False) + "\n")  # fmt: skip

    def explain(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        for group, options in self.groups():
            with formatter.section(group):
                rows = []
                for one in options:
                    usual = f"  [default: {one.own.usual}]" if one.own.usual else ""
                    rows.append((" / ".join([one.label, *one.secondary_opts]), with_flags(one.own.help + usual)))
                formatter.write_dl(rows)

    def groups(self) -> Iterator[tuple[Group, list[Parameter]]]:
        """The options under each heading of help."""
        for group in get_args(Group):
            options = [one for one in self.params if isinstance(one, Parameter) and one.own.group == group]
            if options:
                yield group, options


@contextmanager
def _flags_in_errors() -> Iterator[None]:
    try:
        yield
    except QdqtuneError as error:
        error.args = (with_flags(str(error)),)
        raise


def command(kind: type[Options]) -> Callable[[Callable[..., int | None]], Command]:
    """Make a click command of a function of options, which is named after it: `tune` of `tune_command`. Where these
    know nothing of the terminal, its options are added, and the function takes them as a second argument."""

    def made(body: Callable[..., int | None]) -> Command:
        name = body.__name__.removesuffix("_command")
        if issubclass(kind, Terminal):
            return Command(name, kind, body)
        both: type[Options] = dataclass(kw_only=True)(type(kind.__name__, (Terminal, kind), {}))
        return Command(name, both, wraps(body)(lambda options: body(options, options)))

    return made
