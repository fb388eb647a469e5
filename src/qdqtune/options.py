"""Options as fields of a dataclass for each command. A field gives the name, the type, the default and the help.

The command line, the keywords of Python, jobs files and the reference in docs/ are derived from these fields. Values
are converted and checked in one place, `Option.read`, when the dataclass is made, from text or from Python objects;
converted values may be given again. Errors and notes name an option by its field, in backquotes; the command line
spells it as a flag (see `errors.with_flags`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from inspect import getattr_static
from numbers import Real
from pathlib import Path, PurePath
from typing import Any, ClassVar, Generic, Literal, TypeVar, dataclass_transform, get_args

from qdqtune.errors import BadOption, OutputError, check_file, parsed_json

Out = TypeVar("Out", covariant=True)

Group = Literal["Output", "Search", "Model", "Data", "Accuracy", "Engine"]
"""The headings under which `--help` lists options."""

LONGEST_SECONDS = 366 * 24 * 3600
"""The longest duration that is accepted: a year."""

LARGEST = sys.float_info.max

REQUIRED: Any = ...
"""The default of an option that must be given."""


# Values: each function converts one, and raises ValueError with the reason


def text_of(value: Any) -> str:
    if not isinstance(value, str | Real | PurePath):
        raise ValueError(f"{value!r:.60} is no text")
    return str(value)


def one_of(names: Iterable[str], value: Any) -> str:
    for word in (str(value), str(value).replace("_", "-")):
        if word in names:
            return word
    raise ValueError(f"{value!r:.60} is not one of {', '.join(map(repr, names))}")


def number_in(least: float, most: float, make: type, words: Sequence[str], value: Any) -> Any:
    """The value as a number of type `make`, from `least` to `most`, or one of `words`, of which `none` becomes None."""
    if isinstance(value, str) and value in words:
        return None if value == "none" else str(value)
    if value is None and "none" in words:
        return None
    with suppress(ValueError, TypeError, OverflowError):
        number = float(value)
        if least <= number <= most and make(number) == number:
            return make(number)
    bounds = "" if least == -LARGEST else f" from {least:g}"
    bounds += "" if most == LARGEST else f" up to {most:g}"
    bounds += "".join(f" or {word}" for word in words)
    raise ValueError(f"{value!r:.60} is no {'whole ' if make is int else ''}number{bounds}{_without_unit(value, most)}")


def _without_unit(value: Any, most: float) -> str:
    """A hint in errors for a number with a unit or a percentage: what to type instead; empty for other values."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z%]*)", str(value).strip())
    if match is None:
        return ""
    number, unit = match.groups()
    is_percent = unit == "%" or (most == 1 and not unit)
    if is_percent and 0 < float(number) <= 100:
        return f": {float(number) / 100:g} is {number} %"
    return f": give {number} alone" if unit else ""


def _seconds(value: Any) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-\d+)?)\s*([smh]?)", str(value).strip())
    duration = float(match[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not 0 < duration <= LONGEST_SECONDS:
        raise ValueError(f"{value!r:.60} is no duration up to a year: give 90s, 10m or 1.5h")
    return duration


def texts_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        raise ValueError(f"{value!r:.60} is no list")
    if value is None:
        return []
    with suppress(TypeError):  # a value, or an array that is one
        return [value] if isinstance(value, str | bytes) else list(value)
    return [value]


def each(convert: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Applies `convert` to a single value or to each of several; the result is a tuple."""
    return lambda value: tuple(map(convert, texts_of(value)))


def names_of(value: Any) -> tuple[str, ...]:
    """Names from one text or several, each of which may hold several with commas."""
    words = ",".join(map(text_of, texts_of(value))).split(",")
    return tuple(filter(None, map(str.strip, words)))


def shapes_of(value: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by input name, from texts (NAME:1x3x224x224, or NAME: for a scalar; several with commas) or a mapping."""
    if isinstance(value, Mapping):
        named = [*value.items()]
    else:
        texts = [one.strip() for text in texts_of(value) for one in text_of(text).split(",")]
        named = [one.rpartition(":")[::2] for one in texts]
    shape_of = {}
    for name, sizes in named:
        try:
            shape = tuple(map(int, sizes.split("x") if isinstance(sizes, str) and sizes else sizes))
        except (TypeError, ValueError, OverflowError):
            shape = (-1,)
        if not name or min(shape, default=0) < 0:
            form = "give NAME:1x3x224x224, in Python {NAME: (1, 3, 224, 224)}"
            raise ValueError(f"{f'{name}:{sizes}'.strip(':')!r:.60} is no shape of an input: {form}")
        shape_of[str(name)] = shape
    return shape_of


def _assigned(value: Any) -> dict[str, Any]:
    """Values by name, from texts NAME=VALUE or a mapping. VALUE is JSON or text."""
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    value_of = {}
    for one in texts_of(value):
        name, equals, written = str(one).partition("=")
        if not equals or not name:
            raise ValueError(f"{one!r:.60} gives nothing a value: give NAME=VALUE")
        value_of[name] = written
        with suppress(ValueError):
            value_of[name] = parsed_json(written)
    return value_of


def check_name(value: Any) -> str:
    """A valid file name: not empty (which would be the current folder), UTF-8 without NUL, as engines require."""
    text = text_of(value)
    if not text:
        raise ValueError("the name is empty: give the name of a file or folder")
    with suppress(UnicodeEncodeError):
        if b"\0" not in text.encode():
            return text
    raise ValueError(f"{text!r} holds characters that are not UTF-8, or a NUL: give another name")


def to_read(value: Any) -> Path:
    """The path of something to read, which must not be a pipe or a device."""
    path = Path(check_name(value))
    check_file(path)
    return path


def source(value: Any) -> Any:
    """The name of something to read; Python objects are returned as they are."""
    if not isinstance(value, str | Path):
        return value
    to_read(value)
    return str(value)


def _to_write(value: Any) -> Path:
    text = check_name(value)
    if text.endswith("/"):
        raise OutputError(f"cannot write {text}: it is a folder; name a file in it")
    return Path(text)


@dataclass(eq=False)
class Option(Generic[Out]):
    """One option: a descriptor that converts the value of its field. If the field accepts other types than it returns
    (text for a path, say), it is annotated as an `Option` of the returned type; else with the type.

    `convert` makes the value from text or an object, and raises ValueError or OSError with the reason; for a repeated
    option it gets None, one value, a list or a mapping. An option without a `group` is a positional argument. `short`
    is the help of options that most users need; `--help` lists the others by name only. `flags` are the spellings on
    the command line, by default two dashes and the name of the field. `reads` returns the files that a value names to
    be read, `writes` the files to be written, from the value, the option's name and all options.
    """

    help: str
    group: Group | None = None
    short: str = ""
    default: Any = None
    convert: Callable[[Any], Any] = text_of
    default_in_words: str = ""
    metavar: str = "TEXT"
    flags: str = ""
    choices: tuple[str, ...] = ()
    is_repeated: bool = False
    reads: Callable[[Any], Iterable[Path]] | None = None
    writes: Callable[[Any, str, Any], Iterable[Any]] | None = None
    name: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object | None, owner: type) -> Out:
        if instance is None and self.default is REQUIRED:
            raise AttributeError(self.name)
        value: Out = self.default if instance is None else instance.__dict__[self.name]
        return value

    def __set__(self, instance: object, value: Any) -> None:
        instance.__dict__[self.name] = self.read(value)

    @property
    def spellings(self) -> list[str]:
        return sorted((self.flags or f"--{self.name.replace('_', '-')}").split(), key=len)

    @property
    def flag(self) -> str:
        return self.spellings[-1]

    @property
    def negative(self) -> str:
        """The flag that turns off a switch that is on by default; empty for other options."""
        return f"--no-{self.flag[2:]}" if self.is_switch and self.default is not False else ""

    @property
    def is_switch(self) -> bool:
        return self.convert is bool

    @property
    def usual(self) -> str:
        """The default as help shows it; empty if there is none to show."""
        if self.default_in_words or self.default is REQUIRED or self.default in (None, (), "", False):
            return self.default_in_words
        return "on" if self.default is True else str(self.default).removesuffix(".0")

    def read(self, value: Any) -> Any:
        """The value of the field: converted, unless it is the default. Raises BadOption."""
        if value is self.default or (value is None and (self.default is None or self.is_switch)):
            return self.convert(None) if self.is_repeated else value
        if isinstance(value, bool) is not self.is_switch or (value is None and self.default is REQUIRED):
            what = "is true or false" if self.is_switch else "takes a value"
            raise BadOption(f"`{self.name}` {what}, not {value!r:.60}")
        try:
            return self.convert(value)
        except OSError as error:
            raise BadOption(f"`{self.name}`: cannot read {error.filename or value}: {error.strerror}") from error
        except ValueError as error:
            raise BadOption(f"`{self.name}`: {error}") from error


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Options:
    """Base class of the options of a command. Each subclass becomes a frozen dataclass, keyword-only by default."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, kw_only: bool = True) -> None:
        dataclass(frozen=True, kw_only=kw_only)(cls)


def options_of(kind: type[Options]) -> dict[str, Option[Any]]:
    found = {one.name: getattr_static(kind, one.name, None) for one in fields(kind)}
    return {name: own for name, own in found.items() if isinstance(own, Option)}


def flags_of(kind: type[Options]) -> dict[str, str]:
    """Flags by field name, without positional arguments."""
    return {name: own.flag for name, own in options_of(kind).items() if own.group}


# Options by what they take: each gets the help, the group, the short help and more attributes of `Option`

TEXT: Any = Option
SWITCH = partial(TEXT, default=False, convert=bool, metavar="")
SECONDS = partial(TEXT, convert=_seconds)
WORDS = partial(TEXT, default=(), convert=each(text_of), is_repeated=True)
NAMES = partial(WORDS, convert=names_of)
SHAPES = partial(WORDS, default=None, convert=shapes_of, metavar="NAME:1x3x224x224")
VALUES = partial(WORDS, default=None, convert=_assigned, metavar="NAME=VALUE")
FILE = partial(TEXT, convert=to_read, metavar="FILE", reads=lambda path: [path])
SOURCE = partial(FILE, convert=source, reads=lambda text: [Path(text)])
OUTPUT = partial(TEXT, convert=_to_write, metavar="FILE")
OF_RUN = partial(TEXT, convert=lambda value: Path(check_name(value)), metavar="FILE")
"""A run's folder, or a file that a run writes elsewhere; `tuning.folder.check_run` checks it."""


def choice(names: Any, *given: Any, **more: Any) -> Any:
    """An option that takes one of `names`, which are a Literal or several texts."""
    names = get_args(names) or tuple(names)
    usual = {"convert": partial(one_of, names), "choices": names, "metavar": "|".join(names)}
    return TEXT(*given, **usual | more)


def number(
    *given: Any,
    least: float = -LARGEST,
    most: float = LARGEST,
    make: type = float,
    words: Sequence[str] = (),
    **more: Any,
) -> Any:
    """An option that takes a finite number, or one of some `words`, of which `none` becomes None."""
    return TEXT(*given, convert=partial(number_in, least, most, make, words), **{"metavar": "X"} | more)


COUNT = partial(number, least=1, make=int, metavar="N")
LIMIT = partial(number, words=("auto", "none"))
"""An option that takes a number, `none` for no limit, or `auto` for the default limit."""


def meant(typed: str, names: Iterable[str]) -> list[str]:
    """The names that a mistyped one may mean, three at most: those that hold it, first those that begin with it and
    the shortest; else those that are spelt alike."""
    text, by_text = typed.strip("*/?-").lower(), {name.strip("/-").lower(): name for name in names}
    holding = [one for one in by_text if text and text in one]
    holding.sort(key=lambda one: (not one.startswith(text), len(one)))
    return [by_text[one] for one in holding[:3] or get_close_matches(text, by_text)]


# Annotations of options that take other types than they give

File = Option[Path]
MaybeFile = Option[Path | None]
Duration = Option[float]
MaybeDuration = Option[float | None]
Names = Option[tuple[str, ...]]
ShapesByInput = Option[Mapping[str, tuple[int, ...]]]
ValuesByInput = Option[Mapping[str, float | int | str]]
