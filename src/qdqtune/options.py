"""Options as fields of a dataclass for each command. A field gives the name, the type, the default and the help.

The options of the command line, the keywords of Python, the keys of a jobs file and the reference in docs/ come from
these fields. Values are converted and checked when the dataclass is made, from text or from Python objects, so that
limits and errors are the same everywhere. Errors and notes name an option by its field, in backquotes; the command line
spells it as a flag (see `errors.with_flags`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import click

from qdqtune.errors import BadOption, OutputError, check_file, parsed_json

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)

Group = Literal["Output", "Search", "Model", "Data", "Accuracy", "Engine", "Other"]
"""The headings under which `--help` lists options."""

Given = Mapping[str, Any]
"""Values of options by name."""

READ = "qdqtune.read"
"""Beginning of the key in the `meta` of a click context under which `Reads` records the files that a command reads."""

LONGEST_SECONDS = 366 * 24 * 3600
"""The longest duration that is accepted: a year."""


class Option(Generic[In, Out]):
    """One option: a descriptor that converts the value of its field. `In` are the types that it takes, `Out` is the
    type that it gives.

    `kind` converts one value, or with `is_repeated` all values together. A `default` of `REQUIRED` means that there is
    none. `help` explains the option, `default_in_words` a default of None. `short` explains in a few words those that
    most users need: `--help` lists the others by name only. `flags` are the spellings on the command line, by default
    two dashes and the `name`, which is that of the field.
    """

    def __init__(
        self,
        kind: click.ParamType[Any],
        default: Any,
        help: str,
        group: Group = "Other",
        *,
        short: str = "",
        default_in_words: str = "",
        is_repeated: bool = False,
        is_positional: bool = False,
        flags: str = "",
        metavar: str | None = None,
        name: str = "",
    ) -> None:
        self.kind, self.default, self.help, self.group, self.short = kind, default, help, group, short
        self.default_in_words, self.is_repeated = default_in_words, is_repeated
        self.is_positional, self.metavar, self._flags = is_positional, metavar, tuple(flags.split())
        self.name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object | None, owner: type) -> Out:
        if instance is not None:
            value: Out = instance.__dict__[self.name]
            return value
        if self.default is REQUIRED:
            raise AttributeError(self.name)
        default: Out = self.default
        return default

    def __set__(self, instance: object, value: In) -> None:
        instance.__dict__[self.name] = self.read(value)

    @property
    def flags(self) -> tuple[str, ...]:
        """The spellings on the command line."""
        return self._flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def flag(self) -> str:
        """The longest spelling on the command line."""
        return max(self.flags, key=len)

    def read(self, value: Any) -> Any:
        """Convert a value.

        Raises:
            BadOption: the option does not take it.
        """
        if value is None or value is self.default:
            return self.kind.convert(None, None, None) if self.is_repeated else value
        if isinstance(self.kind, Switch) is not isinstance(value, bool) and not isinstance(self.kind, Anything):
            told = "is True or False, not" if isinstance(self.kind, Switch) else "takes a value, not"
            raise BadOption(f"{self.name} {told} {value!r}")
        if isinstance(value, Mapping | list | tuple) and not isinstance(self.kind, Several):
            raise BadOption(f"{self.name} is one value, not {value!r}")
        try:
            return self.kind.convert(value, None, None)
        except click.BadParameter as error:
            raise BadOption(f"{self.name}: {error.message.rstrip('.')}") from error


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()
"""The default of an option that must be given."""


def option(kind: click.ParamType[Any], default: Any, help: str, group: Group = "Other", **how: Any) -> Any:
    """Make an `Option` for a field of an `Options` dataclass; the field's annotation gives its types."""
    return Option(kind, default, help, group, **how)


@dataclass(kw_only=True)
class Options:
    """Options of a command. Fields cannot be changed once they are set."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)


def options_of(kind: type[Options]) -> dict[str, Option[Any, Any]]:
    """The options of a command by field name."""
    found = {}
    for field in fields(kind):
        own = next(vars(base)[field.name] for base in kind.__mro__ if field.name in vars(base))
        if isinstance(own, Option):
            found[field.name] = own
    return found


def flags_of(kind: type[Options]) -> dict[str, str]:
    """The flags of the options of a command by field name; what has a place on the command line has none."""
    return {name: own.flag for name, own in options_of(kind).items() if not own.is_positional}


def given_in(options: Options, kind: type[Options]) -> dict[str, Any]:
    """The values of `options`, by field name, of the options that the command of `kind` takes as well."""
    return {name: getattr(options, name) for name in options_of(kind) if name in options_of(type(options))}


# Types of options


def _check_name(value: Any) -> None:
    """Refuse a file name that is empty, which would be the current folder, or holds a NUL, or is not UTF-8, since
    engines take no others."""
    if not str(value):
        raise click.BadParameter("the name is empty: give the name of a file or folder")
    try:
        is_one = b"\0" not in str(value).encode()
    except UnicodeEncodeError:
        is_one = False
    if not is_one:
        raise click.BadParameter(f"{str(value)!r} holds characters that are not UTF-8, or a NUL: give another name")


class FileName(click.Path):
    """Text that names a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse names that engines do not take (see `_check_name`)."""
        _check_name(value)
        return super().convert(value, param, ctx)


class Reads(FileName):
    """Text that names something to read. `files` gives its files, `what` is their name in messages (by default that of
    the option), and `path_type` converts the text."""

    def __init__(
        self,
        files: Callable[[str], Iterable[Path]] = lambda text: [Path(text)],
        what: str = "",
        path_type: type[str | Path] = Path,
    ) -> None:
        super().__init__(path_type=path_type)
        self.files, self.what = files, what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a pipe or a device, and record in the context what is read (see `READ`)."""
        if ctx is not None and param is not None:  # a type may convert the path, say to lines of the file
            ctx.meta.setdefault(f"{READ} {ctx.info_name}", []).append((self.what or str(param.name), self, str(value)))
        _check_name(value)
        try:
            check_file(Path(value))
        except OSError as error:
            self.fail(f"cannot read {value}: {error.strerror}", param, ctx)
        return super().convert(value, param, ctx)


class Writes(FileName):
    """Text that names a file to write. `outputs` gives the files that are written, from the path, the option's name and
    the values of all options; `usual` gives the path if the user names none."""

    def __init__(
        self,
        outputs: Callable[[Path, str, Given], Iterable[Any]],
        usual: Callable[[Given], Path | None] = lambda given: None,
    ) -> None:
        super().__init__(path_type=Path)
        self.outputs, self.usual = outputs, usual

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a name that means a folder.

        Raises:
            OutputError: the name ends with a slash.
        """
        if str(value).endswith("/"):
            raise OutputError(f"cannot write {value}: it is a folder")
        return super().convert(value, param, ctx)


class OfRun(FileName):
    """Text that names a run's folder, or a file that a run writes elsewhere; `tuning.folder.check_run` checks it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)


class Several(click.ParamType[Any]):
    """Several values at once, in a list or a dictionary, or an object of Python. `typed` is the type of one text on the
    command line."""

    typed: click.ParamType[Any] = click.STRING


class Anything(Several):
    """Any value: text, or an object of Python."""

    name = "text"

    def __init__(self, typed: click.ParamType[Any] = click.STRING) -> None:
        self.typed = typed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Keep the value, but refuse text that is no name for engines (see `_check_name`)."""
        if isinstance(value, str | Path):
            _check_name(value)
        return value


class Switch(click.ParamType[bool]):
    """Yes or no."""

    name = "boolean"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        """Convert to bool."""
        return bool(value)


class Number(click.FloatRange):
    """A finite float in a range: comparisons with nan or infinity would let everything pass."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert to float, and refuse nan and infinity."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()


class Limit(Number):
    """A number, `none` for no limit, or `auto` for the usual limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert to a float, or None for `none`; `auto` is kept."""
        if isinstance(value, str) and value in ("none", "auto"):
            return None if value == "none" else value
        return super().convert(value, param, ctx)


class Seconds(click.ParamType[float]):
    """Seconds of a duration such as 90s, 10m or 1.5h; a bare number is seconds."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert to seconds, more than 0 and at most a year."""
        if isinstance(value, int | float):
            duration = float(value)
        else:
            match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|)", str(value).strip())
            duration = float(match[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
        if not duration > 0:
            self.fail(f"{value!r} is no duration: give 90s, 10m or 1.5h", param, ctx)
        if duration > LONGEST_SECONDS:
            self.fail(f"{value!r} is longer than a year", param, ctx)
        return duration


class Texts(Several):
    """Texts; with `comma` each may hold several, separated by commas."""

    name = "text"

    def __init__(self, comma: bool = False) -> None:
        self._comma = comma

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Convert one text or several to a tuple."""
        given = [value] if isinstance(value, str | Path) else list(value or ())
        if not self._comma:
            return tuple(map(str, given))
        return tuple(word for part in given for one in str(part).split(",") if (word := one.strip()))


class Shapes(Several):
    """Shapes by input name, from texts such as NAME:1x3x224x224 (NAME: is a scalar) or from a mapping of sizes."""

    name = "text"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, tuple[int, ...]]:
        """Convert to sizes by input name."""
        if isinstance(value, Mapping):
            return {str(name): self._sizes(name, sizes) for name, sizes in value.items()}
        shape_of = {}
        for text in _listed(value):
            name, _colon, sizes = str(text).rpartition(":")
            if not name or not re.fullmatch(r"\d+(x\d+)*|", sizes):
                self.fail(f"{text!r} is no shape: give NAME:1x3x224x224", param, ctx)
            shape_of[name] = tuple(int(size) for size in sizes.split("x") if size)
        return shape_of

    def _sizes(self, name: object, sizes: object) -> tuple[int, ...]:
        if isinstance(sizes, str) and re.fullmatch(r"\d+(x\d+)*|", sizes):
            return tuple(int(size) for size in sizes.split("x") if size)
        try:
            found = tuple(int(size) for size in sizes)  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            found = (-1,)
        if any(size < 0 for size in found):
            self.fail(f"{sizes!r} is no shape of {name!r}: give whole numbers, as in (1, 3, 224, 224)")
        return found


class Assignments(Several):
    """Values by name, from texts NAME=VALUE or a mapping. VALUE is JSON or text; with `numbers_only`, a number or
    text."""

    name = "text"

    def __init__(self, what: str, numbers_only: bool = False) -> None:
        self._what, self._numbers_only = what, numbers_only

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Convert to values by name."""
        if isinstance(value, Mapping):
            return {str(name): item for name, item in value.items()}
        value_of: dict[str, Any] = {}
        for text in _listed(value):
            name, equals, written = str(text).partition("=")
            if not equals or not name:
                self.fail(f"{text!r} {self._what}: give NAME=VALUE", param, ctx)
            try:
                meant = parsed_json(written)
            except ValueError:
                meant = written
            value_of[name] = written if self._numbers_only and not isinstance(meant, int | float) else meant
        return value_of


def _listed(value: Any) -> Iterator[Any]:
    """Yield a single text, or each of several."""
    yield from [value] if isinstance(value, str) else (value or ())


class Files(Several):
    """Paths, one or several."""

    name = "path"

    def __init__(self, typed: click.ParamType[Any]) -> None:
        self.typed = typed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Path, ...]:
        """Convert one path or several to a tuple."""
        return tuple(map(Path, [value] if isinstance(value, str | Path) else value or ()))


ANYTHING, SWITCH, FILE, TEXT = Anything(), Switch(), Reads(), click.STRING
COUNT, SECONDS, NAMES, WORDS, SHAPES = click.IntRange(1), Seconds(), Texts(comma=True), Texts(), Shapes()


def choice(*names: str) -> click.Choice[str]:
    """The type of an option that takes one of `names`."""
    return click.Choice(names)


# Annotations of options: the types that are taken, and the type of the value

PathLike = str | Path
File = Option[PathLike, Path]
MaybeFile = Option[PathLike | None, Path | None]
Text = Option[str, str]
MaybeText = Option[str | None, str | None]
MaybeInt = Option[int | None, int | None]
Flag = Option[bool, bool]
Duration = Option[float | str, float]
MaybeDuration = Option[float | str | None, float | None]
Names = Option[str | Sequence[str], tuple[str, ...]]
ShapesByInput = Option[Mapping[str, Sequence[int]] | Sequence[str] | None, Mapping[str, tuple[int, ...]]]
ValuesByInput = Option[Mapping[str, float | int | str] | Sequence[str] | None, Mapping[str, float | int | str]]
