"""Before a command begins it is asked whether it may write what its options name, given what they name to be read: see
`graph.may_write`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.engines.options import tensorrt_cache
from qdqtune.options import Given, Options, Reads, Several, Writes, options_of
from qdqtune.system.checks import Output, check_outputs


class Named(NamedTuple):
    """What an option is called, its flag, and what a text means that is given for it."""

    name: str
    flag: str
    kind: click.ParamType[Any]


Read = tuple[str, Reads, str]
"""What is read: what it is called, the type of the option that names it, and the text."""


def check_paths(options: Iterable[Named], given: Given, read: Iterable[Read]) -> dict[str, Path]:
    """Ask whether a command may write what its options name. Gives the paths of those that name none, but write.

    Raises:
        BadOption, OutputError: it may not.
    """
    outputs, usual, inputs = list[Output](), dict[str, Path](), dict[str, list[Path]]()
    for option in options:
        if not isinstance(option.kind, Writes):
            continue
        named = given.get(option.name)
        path = named or option.kind.usual(given)
        if path is None:
            continue
        if not named:
            usual[option.name] = path
        if named or path.parent.is_dir():  # else the input is not there either
            outputs += option.kind.outputs(Path(path), option.flag, given)
    of_engine = given.get("engine_options") or {}
    if isinstance(cache := of_engine.get("timing_cache"), str):
        outputs += tensorrt_cache(Path(cache), "--engine-option", given)
    if outputs:
        for what, kind, text in read:
            inputs.setdefault(what.replace("_", " "), []).extend(kind.files(text))
        check_outputs(outputs, inputs)
    return usual


def check_options(options: Options) -> None:
    """The same for options that a program has given.

    Raises:
        BadOption, OutputError: see `check_paths`.
    """
    known = options_of(type(options))
    kinds = [Named(name, own.flag, typed(own.kind)) for name, own in known.items()]
    given = {name: getattr(options, name) for name in known}
    check_paths(kinds, given, _read(kinds, given))


def typed(kind: click.ParamType[Any]) -> click.ParamType[Any]:
    """What one text means that is typed for an option of some kind."""
    return kind.typed if isinstance(kind, Several) else kind


def _read(kinds: Iterable[Named], given: Given) -> Iterator[Read]:
    for option in kinds:
        value = given[option.name]
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(option.kind, Reads) and isinstance(one, str | Path | WorkloadFile):
                yield option.kind.what or option.name, option.kind, str(one)
