"""Options as fields of a dataclass for each command. A field gives the name, the type, the default and the help.

The command line, the keywords of Python, jobs files and the reference in docs/ come from these fields. One function
converts and checks a value, from text or from a Python object: `Option.read`, when the dataclass is made. Errors and
notes name an option by its field, in backquotes; the command line spells it as a flag (see `errors.with_flags`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from qdqtune.errors import BadOption, OutputError, check_file, parsed_json

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)

Group = Literal["Output", "Search", "Model", "Data", "Accuracy", "Engine", "Other"]
"""The headings under which `--help` lists options."""

Values = Mapping[str, Any]
"""Values of options by name."""

LONGEST_SECONDS = 366 * 24 * 3600
"""The longest duration that is accepted: a year."""


@dataclass(frozen=True)
class Kind:
    """A type of options. `convert` makes the value of text or of an object, and raises ValueError with the reason.

    A kind takes "one" value, a "list" or a text, "several" in a list, a mapping or repeated options (None for none), or
    "anything". `reads` gives the files that a text names to be read, `what` is their name in messages (by default that
    of the option). `writes` gives the files that are written, from the path, the option's name and the values of all
    options; `usual` the path if the user names none.
    """

    convert: Callable[[Any], Any]
    metavar: str = "TEXT"
    takes: Literal["one", "list", "several", "anything"] = "one"
    choices: tuple[str, ...] = ()
    is_path: bool = False
    reads: Callable[[str], Iterable[Path]] | None = None
    what: str = ""
    writes: Callable[[Path, str, Values], Iterable[Any]] | None = None
    usual: Callable[[Values], Path | None] = lambda values: None


REQUIRED: Any = ...
"""The default of an option that must be given."""


@dataclass(eq=False)
class Option(Generic[In, Out]):
    """One option: a descriptor that converts the value of its field. `In` are the types that it takes, `Out` is the
    type that it gives.

    `help` explains the option, `default_in_words` a default of None. `short` explains in a few words those that most
    users need: `--help` lists the others by name only. `flags` are the spellings on the command line, by default two
    dashes and the name of the field.
    """

    kind: Kind
    default: Any
    help: str
    group: Group = "Other"
    short: str = ""
    default_in_words: str = ""
    is_positional: bool = False
    flags: tuple[str, ...] = ()
    metavar: str = ""
    name: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.flags = self.flags or (f"--{name.replace('_', '-')}",)

    def __get__(self, instance: object | None, owner: type) -> Out:
        if instance is not None:
            value: Out = instance.__dict__[self.name]
            return value
        if self.default is REQUIRED:
            raise AttributeError(self.name)
        default: Out = self.default
        return default

    def __set__(self, instance: Options, value: In) -> None:
        if self.name in instance.__dict__:
            raise FrozenInstanceError(f"cannot assign to field {self.name!r}")
        instance.__dict__[self.name] = self.read(value)
        if value is not self.default:
            instance.raw[self.name] = value

    @property
    def flag(self) -> str:
        """The longest spelling on the command line."""
        return max(self.flags, key=len)

    @property
    def is_repeated(self) -> bool:
        """Whether the command line takes it more than once."""
        return self.kind.takes == "several"

    @property
    def usual(self) -> str:
        """The default in words; empty if there is none to tell."""
        if self.default_in_words or self.default is REQUIRED or self.default in (None, (), "", False):
            return self.default_in_words
        return "on" if self.default is True else str(self.default).removesuffix(".0")

    def read(self, value: Any) -> Any:
        """Convert a value.

        Raises:
            BadOption: the option does not take it.
        """
        if value is None or value is self.default:
            return self.kind.convert(None) if self.is_repeated else value
        is_switch = self.kind is SWITCH
        if isinstance(value, bool) is not is_switch and self.kind.takes != "anything":
            raise BadOption(f"`{self.name}` {'is true or false' if is_switch else 'takes a value'}, not {value!r:.60}")
        if isinstance(value, Mapping | list | tuple) and self.kind.takes == "one":
            raise BadOption(f"`{self.name}` is one value, not {value!r:.60}")
        try:
            return self.kind.convert(value)
        except ValueError as error:
            raise BadOption(f"`{self.name}`: {error}") from error


def option(
    kind: Kind, default: Any, help: str, group: Group = "Other", *, flags: str = "", metavar: str = "", **more: Any
) -> Any:
    """Make an `Option` for a field of an `Options` dataclass; the field's annotation gives its types."""
    metavar = metavar or "|".join(kind.choices) or kind.metavar
    return Option(kind, default, help, group, flags=tuple(flags.split()), metavar=metavar, **more)


@dataclass(kw_only=True)
class Options:
    """Options of a command. Fields cannot be changed once they are set."""

    @property
    def raw(self) -> dict[str, Any]:
        """The values that are no defaults, by field name, as the user gave them."""
        values: dict[str, Any] = self.__dict__.setdefault("raw values", {})
        return values


def options_of(kind: type[Options]) -> dict[str, Option[Any, Any]]:
    """The options of a command by field name."""
    by_name = {}
    for field in fields(kind):
        own = next(vars(base)[field.name] for base in kind.__mro__ if field.name in vars(base))
        if isinstance(own, Option):
            by_name[field.name] = own
    return by_name


def flags_of(kind: type[Options]) -> dict[str, str]:
    """The flags of the options of a command by field name; what has a place on the command line has none."""
    return {name: own.flag for name, own in options_of(kind).items() if not own.is_positional}


# Kinds of single values


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float | Path):
        raise ValueError(f"{value!r:.60} is no text")
    return str(value)


def choice(*names: str) -> Kind:
    """One of `names`."""

    def convert(value: Any) -> str:
        for word in (str(value), str(value).replace("_", "-")):
            if word in names:
                return word
        raise ValueError(f"{value!r:.60} is not one of {', '.join(map(repr, names))}")

    return Kind(convert, "TEXT", choices=names)


def in_range(least: float = -math.inf, most: float = math.inf, *, is_open: bool = False, make: type = float) -> Kind:
    """A finite number, with `make` int a whole one: comparisons with nan or infinity would let everything pass. With
    `is_open` more than `least`."""
    bounds = "" if least == -math.inf else f" {'above' if is_open else 'from'} {least:g}"
    bounds += "" if most == math.inf else f" up to {most:g}"

    def convert(value: Any) -> Any:
        try:
            given = float(value)
        except (ValueError, TypeError, OverflowError):
            given = math.nan
        is_number = math.isfinite(given) and make(given) == given
        if not is_number or not least <= given <= most or (is_open and given == least):
            raise ValueError(f"{value!r:.60} is no {'whole' if make is int else 'finite'} number{bounds}")
        return make(given)

    return Kind(convert, "N" if make is int else "X")


def limit(least: float = -math.inf, most: float = math.inf) -> Kind:
    """A number; `none`, which becomes None, for no limit; or `auto` for the usual limit."""
    plain = in_range(least, most)
    words = {"none": None, "auto": "auto"}
    return Kind(lambda value: words[value] if value in words else plain.convert(value), "X")


def _seconds(value: Any) -> float:
    if isinstance(value, int | float):
        duration = float(value)
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|)", str(value).strip())
        duration = float(match[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not duration > 0:
        raise ValueError(f"{value!r:.60} is no duration: give 90s, 10m or 1.5h")
    if duration > LONGEST_SECONDS:
        raise ValueError(f"{value!r:.60} is longer than a year")
    return duration


# Kinds of several values


def texts_of(value: Any) -> list[Any]:
    """A single text, or each of several, as a list.

    Raises:
        ValueError: it is a mapping.
    """
    if isinstance(value, Mapping):
        raise ValueError(f"{value!r:.60} is no list")
    return [value] if isinstance(value, str | Path | int | float) else list(value or ())


def _words(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, texts_of(value)))


def _names(value: Any) -> tuple[str, ...]:
    words = ",".join(_words(value)).split(",")
    return tuple(word.strip() for word in words if word.strip())


def _shape(sizes: Any, name: str) -> tuple[int, ...]:
    parts = sizes.split("x") if isinstance(sizes, str) and sizes else sizes
    try:
        shape = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        shape = (-1,)
    if min(shape, default=0) < 0:
        raise ValueError(f"{sizes!r:.60} is no shape of {name!r}: give 1x3x224x224, in Python (1, 3, 224, 224)")
    return shape


def _shapes(value: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by input name, from texts such as NAME:1x3x224x224 (NAME: is a scalar) or from a mapping of sizes."""
    if isinstance(value, Mapping):
        return {str(name): _shape(sizes, str(name)) for name, sizes in value.items()}
    shape_of = {}
    for text in texts_of(value):
        name, _colon, sizes = str(text).rpartition(":")
        if not name:
            raise ValueError(f"{text!r:.60} is no shape: give NAME:1x3x224x224")
        shape_of[name] = _shape(sizes, name)
    return shape_of


def assignments(what: str, *, numbers_only: bool = False) -> Kind:
    """Values by name, from texts NAME=VALUE or a mapping. VALUE is JSON or text; with `numbers_only`, a number or
    text. `what` completes the error about a text without a name."""

    def convert(value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return {str(name): item for name, item in value.items()}
        value_of: dict[str, Any] = {}
        for text in texts_of(value):
            name, equals, written = str(text).partition("=")
            if not equals or not name:
                raise ValueError(f"{text!r:.60} {what}: give NAME=VALUE")
            try:
                parsed = parsed_json(written)
            except ValueError:
                parsed = written
            value_of[name] = written if numbers_only and not isinstance(parsed, int | float) else parsed
        return value_of

    return Kind(convert, "NAME=VALUE", takes="several")


# Kinds of files


def check_name(value: Any) -> str:
    """The text of a file name. Names that are empty, which would be the current folder, or hold a NUL, or are not
    UTF-8, are refused, since engines take no others.

    Raises:
        ValueError: the name is one of these.
    """
    text = str(value)
    if not text:
        raise ValueError("the name is empty: give the name of a file or folder")
    try:
        is_clean = b"\0" not in text.encode()
    except UnicodeEncodeError:
        is_clean = False
    if not is_clean:
        raise ValueError(f"{text!r} holds characters that are not UTF-8, or a NUL: give another name")
    return text


def reads(
    files: Callable[[str], Iterable[Path]] = lambda text: [Path(text)],
    what: str = "",
    make: Callable[[str], Any] = Path,
) -> Kind:
    """Text that names something to read, no pipe and no device (see `Kind`); `make` gives the value."""

    def convert(value: Any) -> Any:
        text = check_name(value)
        try:
            check_file(Path(text))
        except OSError as error:
            raise ValueError(f"cannot read {text}: {error.strerror}") from error
        return make(text)

    return Kind(convert, "FILE", is_path=True, reads=files, what=what)


def writes(
    outputs: Callable[[Path, str, Values], Iterable[Any]],
    usual: Callable[[Values], Path | None] = lambda values: None,
) -> Kind:
    """Text that names a file to write (see `Kind`)."""

    def convert(value: Any) -> Path:
        text = check_name(value)
        if text.endswith("/"):
            raise OutputError(f"cannot write {text}: it is a folder")
        return Path(text)

    return Kind(convert, "FILE", is_path=True, writes=outputs, usual=usual)


def several(kind: Kind) -> Kind:
    """One value of a kind or several of them, as a tuple."""
    return replace(kind, convert=lambda value: tuple(map(kind.convert, texts_of(value))), takes="several")


def anything(kind: Kind | None = None) -> Kind:
    """Text of a `kind` (by default any that may name a file), or an object of Python."""

    def convert(value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        check_name(value)
        return value if kind is None else kind.convert(value)

    return replace(kind or TEXT, convert=convert, takes="anything")


SWITCH, TEXT, COUNT, SECONDS = Kind(bool, ""), Kind(_text), in_range(1, make=int), Kind(_seconds)
NAMES, WORDS = Kind(_names, takes="several"), Kind(_words, takes="several")
SHAPES = Kind(_shapes, "NAME:1x3x224x224", "several")
FILE = reads()
OF_RUN = Kind(lambda value: Path(check_name(value)), "FILE", is_path=True)
"""A run's folder, or a file that a run writes elsewhere; `tuning.folder.check_run` checks it."""


# Annotations of options: the types that are taken, and the type of the value

PathLike = str | Path
File = Option[PathLike, Path]
MaybeFile = Option[PathLike | None, Path | None]
Text = Option[str, str]
MaybeText = Option[str | None, str | None]
Int = Option[int, int]
MaybeInt = Option[int | None, int | None]
MaybeNumber = Option[float | None, float | None]
Flag = Option[bool, bool]
Duration = Option[float | str, float]
MaybeDuration = Option[float | str | None, float | None]
Names = Option[str | Sequence[str], tuple[str, ...]]
ShapesByInput = Option[Mapping[str, Sequence[int]] | Sequence[str] | None, Mapping[str, tuple[int, ...]]]
ValuesByInput = Option[Mapping[str, float | int | str] | Sequence[str] | None, Mapping[str, float | int | str]]
