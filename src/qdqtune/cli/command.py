"""Commands made of dataclasses of options, with a help that fits on a page.

`--help` gives a line to each usual option and names the rare ones; `--help-all` explains every one.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from qdqtune.cli.output import say_notes
from qdqtune.commands.inputs import limited
from qdqtune.commands.paths import Named, check_paths, typed
from qdqtune.options import READ, REQUIRED, SWITCH, Given, Group, Option, Options, Several, Writes, options_of
from qdqtune.system.checks import PAGE_KIND, Output, replaceable

NAMES = 32
"""Columns of an option's name."""

EVERYTHING, QUIET, VERBOSE = "qdqtune.help_all", "qdqtune.quiet", "qdqtune.verbose"
"""What a command was asked for, in the `meta` of its context."""

T = TypeVar("T", bound=Options)


class Parameter(click.Option):
    """An option of the command line, made of what its dataclass says of it."""

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


def _reading(own: Option[Any, Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """What makes the value of an option of what was typed for it, once or several times."""

    def reading(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if value in (None, ()):
            return own.kind.convert(None, parameter, context) if own.is_repeated else own.default
        return own.kind.convert(value, parameter, context)

    return reading


class Positional(click.Argument):
    """An argument that is called by its own name also where it takes several values."""

    def make_metavar(self, ctx: click.Context) -> str:
        """See click."""
        return self.metavar or super().make_metavar(ctx)


def parameters(kind: type[Options]) -> list[click.Parameter]:
    """The parameters of a command, in the order in which its dataclass has them."""
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


# Options of the command line alone, about what it prints


def switch(name: str, flags: str, help: str, group: Group = "Output", **how: Any) -> Parameter:
    """A switch that only the command line has, which gives the function a value of that name."""
    return Parameter(Option(SWITCH, False, help, group, flags=flags, name=name, **how))


AS_JSON = switch("as_machine", "--json", "Print JSON.", short="print JSON")


def _page(path: Path, name: str, _: Given) -> list[Output]:
    return [Output(path, name, replaceable(PAGE_KIND))]


HTML = Parameter(
    Option(
        Writes(_page),
        None,
        "Write what is found as one HTML file as well, for a browser; it works offline.",
        "Output",
        short="a page to look at, offline",
        name="html",
    )
)
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
    Option(SWITCH, False, "No progress.", "Output", short="no progress", flags="-q --quiet", name="quiet"),
    expose_value=False,
    callback=_remember(QUIET),
)
CHATTER = Parameter(
    Option(
        SWITCH,
        False,
        "Progress line by line, also on a terminal: a line for every candidate.",
        "Output",
        short="progress line by line",
        flags="-v --verbose",
        name="verbose",
    ),
    expose_value=False,
    callback=_remember(VERBOSE),
)


def is_quiet() -> bool:
    """Whether the command at hand shall tell no progress."""
    return _asked(QUIET)


def is_verbose() -> bool:
    """Whether the command at hand shall tell all there is, line by line."""
    return _asked(VERBOSE)


def _asked(what: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(what))


def command_line() -> tuple[str, ...]:
    """What was typed, program and all; nothing where no command line is at work."""
    context = click.get_current_context(silent=True)
    typed: tuple[str, ...] = (context.find_root().obj or ()) if context is not None else ()
    return typed


class Guarded(click.Command):
    """A command that is asked whether it may write what its options name, before it begins."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click; raises BadOption or OutputError besides, where it may not."""
        left = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            named = [Named(str(p.name), max(p.opts, key=len), p.type) for p in self.params]
            ctx.params |= check_paths(named, ctx.params, ctx.meta.get(f"{READ} {ctx.info_name}", ()))
        return left


class Command(Guarded):
    """A command with options in groups, which all have -q, -v and --help-all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """See click."""
        own = super().get_params(ctx)
        return [*own[:-1], SILENCE, CHATTER, HELP_ALL, own[-1]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click, where the last of several values counts; that is said."""
        if not ctx.resilient_parsing:
            given = Counter(p for p in self.make_parser(ctx).parse_args([*args])[2] if isinstance(p, click.Option))
            twice = [p for p, times in given.items() if times > 1 and not (p.multiple or p.is_flag or p.count)]
            say_notes(f"{max(p.opts, key=len)} is given more than once: the last one counts" for p in twice)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        everything = bool(ctx.meta.get(EVERYTHING))
        for group in get_args(Group):
            own = [option for option in options if _group(option) == group]
            usual = [option for option in own if not (isinstance(option, Parameter) and option.own.is_rare)]
            rare = [option for option in own if option not in usual]
            if everything and (shown := [r for o in (*usual, *rare) if (r := o.get_help_record(ctx))]):
                with formatter.section(group):
                    formatter.write_dl(shown)
            elif own:
                formatter.write(f"\n{group}:\n" + "".join(_lines(usual, rare, formatter.width)))


def _group(option: click.Option) -> Group:
    """The heading of an option; `--help` itself is about output."""
    return option.own.group if isinstance(option, Parameter) else "Output"


def _lines(usual: Sequence[click.Option], rare: Sequence[click.Option], width: int) -> Iterator[str]:
    """A line for each usual option, and the names of the others."""
    for option in usual:
        short = textwrap.shorten(_words(option), max(20, width - NAMES - 2), placeholder="...")
        yield f"  {_names(option):<{NAMES - 2}}  {short}\n"
    if rare:
        named = ", ".join(name for option in rare for name in option.opts)
        yield textwrap.fill(f"  also {named}", width, subsequent_indent="    ", break_on_hyphens=False) + "\n"


def _names(option: click.Option) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    if option.is_flag:
        return names
    value = option.metavar or _kind(option)
    is_long = len(f"{names} {value}") > NAMES - 2
    return f"{names} {option.opts[-1].rpartition('-')[2].upper()}" if is_long else f"{names} {value}"


def _kind(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    return {"integer range": "N", "integer": "N", "number": "X", "path": "FILE"}.get(option.type.name, "TEXT")


def _words(option: click.Option) -> str:
    """What an option does, in a few words, and its default."""
    if not isinstance(option, Parameter):
        return "this page"
    words = option.own.short or option.own.help.partition(". ")[0].rstrip(".")
    is_plain = not option.is_flag and option.show_default and option.default not in (None, "", ())
    return f"{words} [{option.default}]" if is_plain else words


Body = Callable[..., int | None]


def command(name: str, kind: type[Options], *more: click.Parameter) -> Callable[[Body], Command]:
    """Make a function a command. The function gets its options, and the values of `more`, which the command line alone
    has, by name; it gives the exit code, None for 0."""

    def made(function: Body) -> Command:
        def call(**given: Any) -> int | None:
            own = {field.name: given.pop(field.name) for field in fields(kind) if field.name in given}
            options = kind(**own)
            with limited(options):
                return function(options, **given)

        return Command(name, callback=call, params=[*parameters(kind), *more], help=function.__doc__)

    return made
