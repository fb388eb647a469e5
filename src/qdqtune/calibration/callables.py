"""Functions of the user's own by name: samples and metrics."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import format_exception_only
from types import ModuleType
from typing import Any

from qdqtune.errors import BadOption, InputError, QdqtuneError, one_line


def imported(source: str, what: str) -> Callable[..., Any]:
    """The callable that `module:callable` or `path/to/file.py:callable` names; `what` it is for goes into errors.

    The module, and what that imports, is looked for in the current folder first.

    Raises:
        BadOption: it cannot be imported, or is not callable.
    """
    place, _, attribute = source.rpartition(":")
    if not place:
        raise BadOption(f"cannot import {what} '{source}': give module:callable or path/to/file.py:callable")
    if place.endswith(".py") and not Path(place).is_file():
        raise BadOption(f"cannot import {what} '{source}': there is no file {place}")
    with (
        users_code(f"cannot import {what} '{source}'", BadOption),
        _current_folder_first(),
        redirect_stdout(sys.stderr),
    ):
        module = _module_of(Path(place)) if place.endswith(".py") else import_module(place)
        function = getattr(module, attribute)
    if not callable(function):
        raise BadOption(f"'{source}' is not callable")
    named: Callable[..., Any] = function
    return named


@contextmanager
def users_code(what: str, raises: type[InputError]) -> Iterator[None]:
    """Turn whatever the user's own code raises into one line about `what`.

    Raises:
        KeyboardInterrupt, QdqtuneError: as they are.
        raises: anything else that the code has raised, `SystemExit` and `GeneratorExit` among it.
    """
    try:
        yield
    except (KeyboardInterrupt, QdqtuneError):
        raise
    except BaseException as error:
        raise raises(f"{what}: {one_line(''.join(format_exception_only(error)))}") from error


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Search the current folder for modules before all others, and from then on after all others: the user's function
    may import a module that lies beside its own when it is called, and for anybody else a numpy.py there hides nothing.
    """
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the module has changed the path itself
            sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def _module_of(path: Path) -> ModuleType:
    """A Python file as a module, under a name that hides no other."""
    name = f"{path.stem} ({path.absolute()})"
    spec = spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
