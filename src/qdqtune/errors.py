"""Every error that qdqtune raises on purpose.

    QdqtuneError                    exit code
    ├── InputError                  2   the user's input cannot be used
    │   ├── BadModel                    the ONNX file
    │   ├── BadData                     calibration arrays
    │   ├── BadOption                   an option or an argument, or two that exclude each other
    │   └── BadState                    the state file of an earlier run
    ├── OutputError                 2   the output folder cannot be written
    ├── ConstraintUnmet             4   no placement holds a limit that the user set
    ├── EngineUnavailable           5   library, driver or device is missing
    ├── EngineFailure               5   an engine cannot build or run a model
    │   └── EngineRefused               a request to a worker has no answer; with its `Failure`
    ├── BaselineFailed              5   the engine cannot run the float model
    └── Cancelled                 130   another thread cancelled the call; measurements are kept

Messages have one line and say what to do. They name an option by its field, in backquotes.
"""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec


class QdqtuneError(Exception):
    """Base of all errors below. `exit_code` is what the command line returns; `is_transient`: trying again may help."""

    exit_code = 2
    is_transient = False


class InputError(QdqtuneError):
    """The user's input cannot be used."""


class BadModel(InputError):
    """The ONNX file is missing, damaged, invalid or not supported."""


class BadData(InputError):
    """Calibration arrays do not fit the model."""


class BadOption(InputError):
    """An option has a value that cannot be used here."""


class BadState(InputError):
    """The state file is damaged, or belongs to another model, engine, calibration or option set."""


class OutputError(QdqtuneError):
    """The output folder cannot be written."""


class ConstraintUnmet(QdqtuneError):
    """No placement holds a limit that the user set."""

    exit_code = 4


class EngineUnavailable(QdqtuneError):
    """The engine's library, driver or device is missing."""

    exit_code = 5


class EngineFailure(QdqtuneError):
    """An engine refused a model, crashed or ran out of time."""

    exit_code = 5


TRANSIENT = frozenset({"timeout", "crash", "resources"})
"""Stages of failures after which another attempt may succeed."""


Stage = Literal["build", "run", "timeout", "crash", "output", "resources"]


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why a build or a run failed. `log` is the output of the engine.

    Stages: "build", "run": the engine refused; "output": unusable values; "timeout"; "crash"; "resources": memory or
    disk.
    """

    stage: Stage
    reason: str
    log: str = ""

    @property
    def is_transient(self) -> bool:
        return self.stage in TRANSIENT


class EngineRefused(EngineFailure):
    """A request to an engine's worker failed. `failure` says at which stage, and why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure
        self.is_transient = failure.is_transient

    def __str__(self) -> str:
        return self.failure.reason


class BaselineFailed(QdqtuneError):
    """The engine cannot run the float model."""

    exit_code = 5


class Cancelled(QdqtuneError):
    """Another thread has cancelled the call."""

    exit_code = 130


def one_line(error: object, limit: int = 400) -> str:
    """An error's message on one line, cut to `limit` characters. Backquotes, which mark options, become apostrophes."""
    text = " ".join(str(error).split()).replace("`", "'") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def escaped(text: str) -> str:
    """The text with control characters escaped, also line breaks and characters that reverse or hide text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def with_flags(text: str, flags: Mapping[str, str]) -> str:
    """The text with option names in backquotes spelled as flags: `time_budget` becomes --time-budget. `flags` maps
    field names to flags; other text in backquotes stays."""
    return re.sub(r"`(\w+)`", lambda found: flags.get(found[1], found[0]), text)


def first_of(texts: Sequence[str], separator: str = ", ") -> str:
    """The first six texts, and dots if there are more (a language model has two inputs for each layer)."""
    return separator.join([*texts[:6], "..."] if len(texts) > 6 else texts)


def parsed_json(text: str, **how: Any) -> Any:
    """The value of a JSON text; `how` are arguments of `json.loads`.

    Raises:
        ValueError: the text is no JSON, is nested too deeply, or has NaN, Infinity or numbers that no float can hold.
    """

    def refused(word: str) -> None:
        raise ValueError(f"{word} is no number of JSON's")

    def finite(digits: str) -> float:
        if math.isinf(number := float(digits)):
            raise ValueError(f"{digits[:20]} is beyond all numbers")
        return number

    try:
        return json.loads(text, parse_constant=refused, parse_float=finite, **how)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextmanager
def rewording(text: str, error: type[QdqtuneError] = EngineFailure) -> Iterator[None]:
    """Turn an EngineRefused into `error`, with `text` and the reason as its message."""
    try:
        yield
    except EngineRefused as refused:
        reworded = error(f"{text}: {refused}")
        reworded.is_transient = refused.is_transient
        raise reworded from refused


@contextmanager
def writing(what: Path | str, hint: str = "choose another place, or make room there") -> Iterator[None]:
    """Turn an OSError while writing `what` into an OutputError of one line; `hint` says what to do."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {what}: {error.strerror or error}; {hint}") from error


def check_file(path: Path) -> None:
    """Raise an OSError for an existing path that is neither file nor folder: reading a pipe might never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is no file", str(path))


@contextmanager
def reading(what: Path | str, raises: type[InputError] = BadOption) -> Iterator[None]:
    """Turn an OSError while reading `what` into an error `raises` of one line."""
    try:
        yield
    except OSError as error:
        raise raises(f"cannot read {what}: {error.strerror or error}; check the path") from error
