"""Checks, before a command begins, that it may write the files that its options name (see `system.checks`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.engines.options import tensorrt_cache
from qdqtune.engines.tensorrt.options import libraries_in
from qdqtune.options import Given, Options, Reads, Several, Writes, options_of
from qdqtune.system.checks import Output, check_outputs

Kinds = Mapping[str, click.ParamType[Any]]
"""Options by name, with the type of a single value."""

Read = tuple[str, Reads, str]
"""Something to read: its name in messages, the type of the option that names it, and the option's text."""


def check_paths(kinds: Kinds, given: Given, read: Iterable[Read]) -> dict[str, Path]:
    """Check that a command may write the files that its options name. The default paths of options that were not given,
    by option name.

    Raises:
        BadOption, OutputError: the command may not write a file.
    """
    outputs, usual, inputs = list[Output](), dict[str, Path](), dict[str, list[Path]]()
    for name, kind in kinds.items():
        if not isinstance(kind, Writes):
            continue
        named = given.get(name)
        path = named or kind.usual(given)
        if path is None:
            continue
        if not named:
            usual[name] = path
        if named or path.parent.is_dir():  # otherwise the input in that folder is missing too
            outputs += kind.outputs(Path(path), f"`{name}`", given)
    of_engine = given.get("engine_options") or {}
    if isinstance(cache := of_engine.get("timing_cache"), str | Path):
        outputs += tensorrt_cache(Path(cache), "`engine_options` timing_cache", given)
    inputs["plugin libraries"] = [Path(library) for library in libraries_in(of_engine)]
    if outputs:
        for what, kind, text in read:
            inputs.setdefault(what.replace("_", " "), []).extend(kind.files(text))
        check_outputs(outputs, inputs)
    return usual


def check_options(options: Options) -> None:
    """`check_paths` for options of a Python call.

    Raises:
        BadOption, OutputError: see `check_paths`.
    """
    known = options_of(type(options))
    kinds, given = {name: typed(own.kind) for name, own in known.items()}, {n: getattr(options, n) for n in known}
    check_paths(kinds, given, _read(kinds, given))


def typed(kind: click.ParamType[Any]) -> click.ParamType[Any]:
    """The type of one value on the command line, for an option of type `kind`."""
    return kind.typed if isinstance(kind, Several) else kind


def _read(kinds: Kinds, given: Given) -> Iterator[Read]:
    for name, kind in kinds.items():
        value = given[name]
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(kind, Reads) and isinstance(one, str | Path | WorkloadFile):
                yield kind.what or name, kind, str(one)
