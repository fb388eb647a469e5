"""Runs code of the user: imports functions by name, turns their exceptions into one line, and limits their time. The
code runs in a thread, so that the caller can give up and Ctrl-C works.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import copy_context
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from traceback import format_exception_only
from types import ModuleType
from typing import Any, TypeVar

from qdqtune.engines.execution import CHECK_SECONDS, Execution, raise_if_cancelled
from qdqtune.errors import BadData, BadOption, InputError, QdqtuneError, one_line
from qdqtune.system.interpreter import USER_CODE

T = TypeVar("T")


def import_callable(source: str, what: str, execution: Execution) -> tuple[Callable[..., Any], str]:
    """The callable that `module:callable` or `path/to/file.py:callable` names, and 16 hex digits of a hash of its name
    and its module's text; `what` says in errors what it is for.

    While it is imported, modules are searched in the current folder first; afterwards last: the function may import
    modules from there when it is called, but a numpy.py there must not hide the real one.
    """
    place, _, attribute = source.rpartition(":")
    if not place:
        raise BadOption(f"cannot import {what} '{source}': give module:callable or path/to/file.py:callable")
    if place.endswith(".py") and not Path(place).is_file():
        raise BadOption(f"cannot import {what} '{source}': there is no file {place}")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with user_errors(f"cannot import {what} '{source}'", BadOption), redirect_stdout(sys.stderr):
            load = partial(_module_of, Path(place)) if place.endswith(".py") else partial(import_module, place)
            function = getattr(call_in_thread(load, f"the import of {source}", execution), attribute)
    finally:
        with suppress(ValueError):  # the module has changed the path itself
            sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)
    if not callable(function):
        raise BadOption(f"'{source}' is not callable")
    try:
        code = inspect.getsource(sys.modules.get(function.__module__, function))
    except (OSError, TypeError, AttributeError):
        code = ""
    return function, hashlib.sha256((source + code).encode(errors="replace")).hexdigest()[:16]


@contextmanager
def user_errors(what: str, raises: type[InputError]) -> Iterator[None]:
    """Turn any exception of the user's code but KeyboardInterrupt and QdqtuneError into one line about `what`."""
    try:
        yield
    except (KeyboardInterrupt, QdqtuneError):
        raise
    except BaseException as error:
        raise raises(f"{what}: {one_line(''.join(format_exception_only(error)))}") from error


def _module_of(path: Path) -> ModuleType:
    name = f"{path.stem} ({path.absolute()})"
    spec = spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MOST_GENERATED = 10_000
"""Samples that a generator may give without a limit from the user: one that gives more is probably endless. Chosen, not
measured."""


LEAST_SECONDS = 1.0
"""Seconds that code of the user, or reading a file, may take even after the end of the time budget, so that a short
budget on a busy machine still gets its first sample. Chosen, not measured."""


class TooSlow(BadData):
    """Code of the user took too long."""


class BudgetEnded(TooSlow):
    """The time budget has ended while code of the user ran."""


def call_in_thread(
    function: Callable[[], T], what: str, execution: Execution, tasks: SimpleQueue[Any] | None = None
) -> T:
    """The result of a function, which is called in a thread, within the time limits of `execution`; `what` names it in
    errors. Functions that the thread puts into `tasks` are called in the calling thread, and their time does not count.

    Raises what the function or the tasks raise, TooSlow, or Cancelled. A thread that exceeds the limit is abandoned.
    """
    (result,) = _from_thread(lambda: iter([function()]), what, execution, tasks)
    return result


def read_in_thread(make: Callable[[], Iterator[T]], origin: str, execution: Execution) -> Iterator[T]:
    """The items of an iterator that is created and run in a thread, with the limits of `call_in_thread`."""
    return _from_thread(make, f"reading {origin}", execution, hint=", `calibration_samples` takes fewer")


def _from_thread(
    make: Callable[[], Iterator[T]],
    what: str,
    execution: Execution,
    tasks: SimpleQueue[Any] | None = None,
    hint: str = "",
) -> Iterator[T]:
    """The items of an iterator that is created and run in a thread. Errors say `what` it does, and with `hint` what the
    user can do besides allowing more time."""
    answers = SimpleQueue[Any]() if tasks is None else tasks
    wanted = SimpleQueue[bool]()

    def give() -> None:
        """For each request, put the next item in a tuple into the queue; at the end None, or the exception."""
        try:
            items = None
            while wanted.get():
                items = make() if items is None else items
                answers.put(next(((item,) for item in items), None))
        except BaseException as error:  # noqa: BLE001  (raised again by the caller)
            answers.put(error)

    def awaited(begun: float) -> Any:
        """The next answer; the time limit also holds for the sum of many fast answers."""
        while True:
            waited = monotonic() - begun
            if waited >= CHECK_SECONDS:
                raise_if_cancelled()
            if waited > execution.seconds:
                raise TooSlow(f"{what} took longer than {execution.seconds:.4g} s: `time_limit` gives it longer{hint}")
            if waited >= LEAST_SECONDS and execution.ends is not None and monotonic() > execution.ends:
                raise BudgetEnded(f"`time_budget` has ended during {what}: give more time{hint}")
            with suppress(Empty):
                return answers.get(timeout=CHECK_SECONDS)

    context = copy_context()
    thread = threading.Thread(target=lambda: context.run(give), name=USER_CODE + what, daemon=True)
    thread.start()
    spent = 0.0
    wanted.put(True)
    try:
        while True:
            begun = monotonic() - spent
            answer = awaited(begun)
            spent = monotonic() - begun
            if answer is None:
                return
            if isinstance(answer, BaseException):
                raise answer
            if isinstance(answer, tuple):
                yield answer[0]
                wanted.put(True)
            else:
                answer()
    finally:
        wanted.put(False)
        thread.join(CHECK_SECONDS)  # let a generator clean up before the next one starts


def checked_count(items: Iterable[T], origin: str) -> Iterator[T]:
    """`items`, one after the other; refuses an implausible number of them."""
    for number, item in enumerate(items, 1):
        if number > MOST_GENERATED:
            raise BadData(
                f"{origin} gives more than {MOST_GENERATED:,} samples: `calibration_samples` says how many to take"
            )
        yield item
