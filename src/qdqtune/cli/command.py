"""Click commands made of dataclasses of options.

`--help` has a line for each usual option and the names of the rare ones; `--help-all` explains all.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar, get_args

import click

from qdqtune.cli.output import say_notes, with_flags
from qdqtune.commands.paths import check_paths, typed
from qdqtune.errors import QdqtuneError
from qdqtune.options import READ, REQUIRED, SWITCH, Group, Option, Options, Several, options_of

NAME_COLUMNS = 32
"""Columns of an option's name."""

EVERYTHING, QUIET, VERBOSE = "qdqtune.help_all", "qdqtune.quiet", "qdqtune.verbose"
"""Keys in the `meta` of a click context: the switches --help-all, -q and -v."""

T = TypeVar("T", bound=Options)


class Parameter(click.Option):
    """A click option made of an `Option`."""

    def __init__(self, own: Option[Any, Any], **how: Any) -> None:
        self.own = own
        is_switch, default = own.kind is SWITCH, None if own.default == () else own.default
        flags = [f"{own.flag}/--no-{own.flag[2:]}"] if is_switch and own.default is not False else [*own.flags]
        if not is_switch:
            how["type"] = typed(own.kind)
        if is_switch and own.default is False:
            how["is_flag"] = True
        super().__init__(
            [*flags, own.name],
            help=own.help + (f"  [default: {own.default_in_words}]" if own.default_in_words else ""),
            default=None if default is REQUIRED else default,
            required=default is REQUIRED,
            multiple=own.is_repeated,
            metavar=own.metavar,
            show_default=default not in (None, "", ()) and not own.default_in_words,
            callback=_reading(own) if isinstance(own.kind, Several) else how.pop("callback", None),
            **how,
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Click's help for the option, with other options in it spelled as flags."""
        record = super().get_help_record(ctx)
        return record and (record[0], with_flags(record[1]))


def _reading(own: Option[Any, Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that converts all texts that were typed for an option."""

    def reading(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if value in (None, ()):
            return own.kind.convert(None, parameter, context) if own.is_repeated else own.default
        return own.kind.convert(value, parameter, context)

    return reading


class Positional(click.Argument):
    """A click argument that shows its own name in the usage, also if it takes several values."""

    def make_metavar(self, ctx: click.Context) -> str:
        """The argument's own name, without click's dots."""
        return self.metavar or super().make_metavar(ctx)


def parameters(kind: type[Options]) -> list[click.Parameter]:
    """The click parameters of a command, in the order of its dataclass."""
    made: list[click.Parameter] = []
    for name, own in options_of(kind).items():
        if not own.is_positional:
            made.append(Parameter(own))
            continue
        reading = _reading(own) if isinstance(own.kind, Several) else None
        count, required, metavar = -1 if own.is_repeated else 1, own.default is REQUIRED, own.metavar
        made.append(
            Positional([name], type=typed(own.kind), nargs=count, required=required, metavar=metavar, callback=reading)
        )
    return made


# Options that only the command line has


def switch(name: str, flags: str, help: str, group: Group = "Output", **how: Any) -> Parameter:
    """A switch that only the command line has: an argument `name` of the command's function."""
    return Parameter(Option(SWITCH, False, help, group, flags=flags, name=name, **how))


AS_JSON = switch("as_machine", "--json", "Print JSON.", short="print JSON")


JSON_FOR_TABLE = switch("as_machine", "--json", "Print JSON instead of the table.", short="print JSON")


def _remember(what: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def remember(context: click.Context, _: click.Parameter, value: bool) -> bool:
        context.meta[what] = value
        return value

    return remember


def _explain_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[EVERYTHING] = True
        click.echo(context.get_help())
        context.exit()


HELP_ALL = Parameter(
    Option(
        SWITCH,
        False,
        "Explain every option.",
        "Output",
        short="explain every option",
        flags="--help-all",
        name="help_all",
    ),
    is_eager=True,
    expose_value=False,
    callback=_explain_all,
)
SILENCE = Parameter(
    Option(SWITCH, False, "No progress.", "Output", flags="-q --quiet", name="quiet"),
    expose_value=False,
    callback=_remember(QUIET),
)
CHATTER = Parameter(
    Option(
        SWITCH,
        False,
        "Progress line by line, also on a terminal: a line for every candidate.",
        "Output",
        flags="-v --verbose",
        name="verbose",
    ),
    expose_value=False,
    callback=_remember(VERBOSE),
)


def is_quiet() -> bool:
    """Whether the user asked for no progress (-q)."""
    return _asked(QUIET)


def is_verbose() -> bool:
    """Whether the user asked for all progress, line by line (-v)."""
    return _asked(VERBOSE)


def _asked(what: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(what))


def command_line() -> tuple[str, ...]:
    """The command line as it was typed, with the program; empty if none is running."""
    context = click.get_current_context(silent=True)
    typed: tuple[str, ...] = (context.find_root().obj or ()) if context is not None else ()
    return typed


class Guarded(click.Command):
    """A command that may write only what does not overwrite its inputs, and whose errors spell options as typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and check the files that the command may write.

        Raises:
            BadOption, OutputError: an option names a file that the command may not write.
        """
        with _flags_in_errors():
            left = super().parse_args(ctx, args)
            if not ctx.resilient_parsing:
                kinds = {str(parameter.name): parameter.type for parameter in self.params}
                ctx.params |= check_paths(kinds, ctx.params, ctx.meta.get(f"{READ} {ctx.info_name}", ()))
        return left

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with flags in its errors."""
        with _flags_in_errors():
            return super().invoke(ctx)


@contextmanager
def _flags_in_errors() -> Iterator[None]:
    """Spell the options that errors name as they are typed."""
    try:
        yield
    except QdqtuneError as error:
        error.args = (with_flags(str(error)),)
        raise


class Command(Guarded):
    """A command with -q, -v and --help-all, whose help lists options in groups."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Add -q, -v and --help-all to the parameters."""
        own = super().get_params(ctx)
        return [*own[:-1], SILENCE, CHATTER, HELP_ALL, own[-1]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. If an option is given twice, the last value counts, and a note says so."""
        if not ctx.resilient_parsing:
            given = Counter(p for p in self.make_parser(ctx).parse_args([*args])[2] if isinstance(p, click.Option))
            twice = [p for p, times in given.items() if times > 1 and not (p.multiple or p.is_flag or p.count)]
            say_notes(f"{max(p.opts, key=len)} is given more than once: the last one counts" for p in twice)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups, each with its usual options before its rare ones."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        everything = bool(ctx.meta.get(EVERYTHING))
        for group in get_args(Group):
            own = [option for option in options if _group(option) == group]
            usual = [option for option in own if not isinstance(option, Parameter) or option.own.short]
            rare = [option for option in own if option not in usual]
            if everything and (shown := [r for o in (*usual, *rare) if (r := o.get_help_record(ctx))]):
                with formatter.section(group):
                    formatter.write_dl(shown)
            elif own:
                formatter.write(f"\n{group}:\n" + "".join(_lines(usual, rare, formatter.width)))


def _group(option: click.Option) -> Group:
    """The group under which help lists an option; click's own `--help` belongs to Output."""
    return option.own.group if isinstance(option, Parameter) else "Output"


def _lines(usual: Sequence[click.Option], rare: Sequence[click.Option], width: int) -> Iterator[str]:
    """A help line for each usual option, and the names of the rare ones."""
    for option in usual:
        short = textwrap.shorten(_words(option), max(20, width - NAME_COLUMNS - 2), placeholder="...")
        yield f"  {_names(option):<{NAME_COLUMNS - 2}}  {short}\n"
    if rare:
        named = ", ".join(name for option in rare for name in option.opts)
        yield textwrap.fill(f"  also {named}", width, subsequent_indent="    ", break_on_hyphens=False) + "\n"


def _names(option: click.Option) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    if option.is_flag:
        return names
    value = option.metavar or _kind(option)
    is_long = len(f"{names} {value}") > NAME_COLUMNS - 2
    return f"{names} {option.opts[-1].rpartition('-')[2].upper()}" if is_long else f"{names} {value}"


def _kind(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    return {"integer range": "N", "integer": "N", "number": "X", "path": "FILE"}.get(option.type.name, "TEXT")


def _words(option: click.Option) -> str:
    """What an option does in a few words, with its default."""
    if not isinstance(option, Parameter):
        return "this page"
    words = with_flags(option.own.short)
    is_plain = not option.is_flag and option.show_default and option.default not in (None, "", ())
    return f"{words} [{option.default}]" if is_plain else words


Body = Callable[..., int | None]


def command(name: str, kind: type[Options], *more: click.Parameter) -> Callable[[Body], Command]:
    """Make a click command of a function. The function gets the options, and by name the values of `more`, parameters
    that only the command line has. It returns the exit code; None is 0."""

    def made(function: Body) -> Command:
        def call(**given: Any) -> int | None:
            own = {field.name: given.pop(field.name) for field in fields(kind) if field.name in given}
            options = kind(**own)
            return function(options, **given)

        return Command(name, callback=call, params=[*parameters(kind), *more], help=function.__doc__)

    return made
