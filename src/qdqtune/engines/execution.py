"""How a command runs models and the user's code: time limits, cancelling, and one file for all constants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from qdqtune.engines.memory import MemoryBudget
from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.system.writing import temporary_folder

TIME_LIMIT = 600.0
"""Seconds that a build or an inference may take unless the user gives a limit."""

OVERTIME = 60.0
"""Least seconds for a request to an engine even if the time budget ends before: the current measurement may finish, and
only one that hangs is killed. Chosen, not measured."""

CHECK_SECONDS = 0.1
"""How often a thread that waits looks whether its work is cancelled. Chosen, not measured."""

_checks: ContextVar[tuple[Callable[[], None], ...]] = ContextVar("checks", default=())


@contextmanager
def cancelled_by(check: Callable[[], None]) -> Iterator[None]:
    """Let `check` cancel the work of this thread in the block; checks of outer blocks stay active. It is called every
    `CHECK_SECONDS` during a wait; if it raises, the wait ends, and so does the worker that is waited for."""
    token = _checks.set((check, *_checks.get()))
    try:
        yield
    finally:
        _checks.reset(token)


def raise_if_cancelled() -> None:
    for check in _checks.get():
        check()


def wait_for(is_over: Callable[[float], object], limit: float) -> None:
    """Call `is_over`, which waits for at most so many seconds, until it returns a true value. Raises TimeoutError after
    `limit` seconds, or what a check raises to cancel the work of this thread."""
    ends = time.monotonic() + limit
    while True:
        left = max(0.001, ends - time.monotonic())
        if is_over(min(CHECK_SECONDS, left) if _checks.get() else left):
            return
        if time.monotonic() >= ends:
            raise TimeoutError
        raise_if_cancelled()


@dataclass(frozen=True)
class Execution:
    """How a command runs models and the user's code.

    Requests to an engine and passes over samples may take `seconds` each. The time budget ends at the time `ends` of
    `time.monotonic`; it stops passes over samples at once, and requests no earlier than after `OVERTIME`. All models of
    the command keep their constants in `constants`. `device` starts workers on the other machine that measures, if
    there is one. `memory` limits the builds of all runners of one thread together; without it, all stay loaded.
    """

    seconds: float = TIME_LIMIT
    ends: float | None = None
    constants: ConstantFile | None = None
    device: Callable[..., Any] | None = None
    memory: MemoryBudget | None = None

    def within_budget(self, seconds: float) -> float:
        """`seconds`, cut down to what is left of the time budget, but to no less than `OVERTIME`."""
        return seconds if self.ends is None else min(seconds, max(self.ends - time.monotonic(), OVERTIME))

    @contextmanager
    def constant_file(self) -> Iterator[ConstantFile]:
        if self.constants is not None:
            yield self.constants
            return
        with temporary_folder() as folder, ConstantFile(folder / CONSTANTS) as constants:
            yield constants


EXECUTION = Execution()
"""The default: the usual time limit, no time budget, and no file of constants."""
