"""The reader of YAML files that others may have written: plain values, in bounded time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from qdqtune.errors import BadOption, check_file, one_line, reading

MOST_BYTES = 32 * 2**20
"""Size of the largest file in bytes. A placement takes about 100 bytes for each pair."""

MOST_VALUES = 1_000_000
"""Most values of a file. A value counts as often as aliases repeat it, and once more for every hundred characters."""

DEEPEST = 50
"""Most levels of nested lists and mappings."""

LONGEST_NUMBER = 100
"""Most characters of a number: the time to read one grows with the square of its digits."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TAGS = "tag:yaml.org,2002:"
RESOLVER: Any = Resolver()
CONSTRUCTOR = SafeConstructor()


def parsed_yaml(path: Path, what: str) -> Any:
    """The content of a YAML file: None, bools, numbers, texts, and lists and dicts of these. `what` names its kind in
    errors.

    Raises:
        BadOption: the file cannot be read; is no YAML, or more than one document; holds tags, dates, a key twice or a
            list as key; or is too large or too deep, with all aliases expanded.
    """
    with reading(f"{what} {path}"):
        check_file(path)
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
        return _Document(yaml.parse(text.decode("utf-8"), Loader=LOADER)).content()
    except (ValueError, yaml.YAMLError) as error:
        raise BadOption(f"{path} is no {what} file, or damaged: {one_line(error)}") from error


def wrong_part(error: Exception) -> str:
    """What is wrong with values that a file holds, from what Python raised when it read them."""
    return f"it lacks {error}" if isinstance(error, KeyError) else f"a part has another form ({one_line(error)})"


class _Document:
    """Turns the events of a YAML parser into Python values. Raises ValueError for what `parsed_yaml` forbids."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._left = MOST_VALUES
        self._repeated: dict[str, tuple[Any, int]] = {}

    def content(self) -> Any:
        """The only document; None where there is none."""
        next(self._events)  # the beginning of the stream
        content = None
        if isinstance(next(self._events), yaml.DocumentStartEvent):
            content = self._value(next(self._events), 0)
            next(self._events)  # the end of the document
            if not isinstance(next(self._events), yaml.StreamEndEvent):
                raise ValueError("it holds more than one document")
        return content

    def _value(self, event: Any, depth: int) -> Any:
        before, anchor = self._left, event.anchor
        if isinstance(event, yaml.AliasEvent):
            if anchor not in self._repeated:
                raise ValueError(f"{_line(event)}: nothing is called &{anchor}")
            value, size = self._repeated[anchor]
            self._spend(size)
            return value
        if event.tag is not None:
            raise ValueError(f"{_line(event)}: tags such as {event.tag} are not read")
        if depth > DEEPEST:
            raise ValueError(f"{_line(event)}: more than {DEEPEST} lists and mappings within each other")
        if isinstance(event, yaml.ScalarEvent):
            self._spend(1 + len(event.value) // 100)
            value = _scalar(event)
        else:
            self._spend(1)
            value = self._list(depth) if isinstance(event, yaml.SequenceStartEvent) else self._dict(depth)
        if anchor is not None:
            self._repeated[anchor] = value, before - self._left
        return value

    def _list(self, depth: int) -> list[Any]:
        made = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            made.append(self._value(event, depth + 1))
        return made

    def _dict(self, depth: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            if isinstance(key, list | dict):
                raise ValueError(f"{_line(event)}: a key is a list or a mapping")
            if key in made:
                raise ValueError(f"{_line(event)}: the key {key!r} comes twice")
            made[key] = self._value(next(self._events), depth + 1)
        return made

    def _spend(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")


def _scalar(event: Any) -> Any:
    """The Python value of a YAML scalar: in quotes a string; without quotes a string, number, bool or None."""
    if not event.implicit[0]:
        return event.value
    tag = RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False))
    kind = tag.removeprefix(TAGS)
    if kind == "str":
        return event.value
    if kind not in ("null", "bool", "int", "float"):
        raise ValueError(f"{_line(event)}: {event.value:.40} is read as a {kind}: put text in quotes")
    if len(event.value) > LONGEST_NUMBER:
        raise ValueError(f"{_line(event)}: a number of {len(event.value)} characters")
    try:
        return getattr(CONSTRUCTOR, f"construct_yaml_{kind}")(yaml.ScalarNode(tag, event.value))
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{_line(event)}: {event.value!r} is no number") from error


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"
