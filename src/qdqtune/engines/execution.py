"""How a command runs models and code of the user: time limits, cancelling, and one file for all constants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.system.writing import temporary_folder

TIME_LIMIT = 600.0
"""Seconds that a build or an inference may take unless the user gives a limit."""

OVERTIME = 60.0
"""Seconds that a request to an engine may take whatever is left of a time budget: the measurement in hand is finished,
and only one that hangs is ended. Chosen, not measured."""

CHECK_SECONDS = 0.1
"""How often a thread that waits looks whether its work is cancelled. Chosen, not measured."""

Check = Callable[[], None]
"""Raises to cancel work."""

_checks: ContextVar[tuple[Check, ...]] = ContextVar("checks", default=())


@contextmanager
def cancelled_by(check: Check) -> Iterator[None]:
    """Let `check` cancel the work of this thread in the block, beside those of outer blocks. It is called every
    `CHECK_SECONDS` during a wait; what it raises ends the wait, and the worker that is waited for."""
    token = _checks.set((check, *_checks.get()))
    try:
        yield
    finally:
        _checks.reset(token)


def raise_if_cancelled() -> None:
    for check in _checks.get():
        check()


class Deadline:
    """The end of a wait, `limit` seconds from now on or when its thread is cancelled."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.renew()

    def renew(self) -> None:
        self._ends = time.monotonic() + self._limit

    @property
    def pause(self) -> float:
        """How many seconds to wait before `after_pause`; more than 0."""
        left = max(0.001, self._ends - time.monotonic())
        return min(CHECK_SECONDS, left) if _checks.get() else left

    def after_pause(self) -> None:
        """Raise what ends the wait, if it is to end.

        Raises:
            TimeoutError: the time is over.
        """
        if time.monotonic() >= self._ends:
            raise TimeoutError
        raise_if_cancelled()


@dataclass(frozen=True)
class Execution:
    """How a command runs models and code of the user.

    A request to an engine may take `seconds`, as may a pass over samples. The time budget is over at the time `ends` of
    `time.monotonic`: it ends passes over samples, and requests after `OVERTIME`. All models of the command keep their
    constants in `constants`. `device` starts the workers that run and time models on the user's engine, if that is on
    another machine.
    """

    seconds: float = TIME_LIMIT
    ends: float | None = None
    constants: ConstantFile | None = None
    device: Callable[..., Any] | None = None

    def within_budget(self, seconds: float) -> float:
        """How many of these seconds a request that begins now may take."""
        return seconds if self.ends is None else min(seconds, max(self.ends - time.monotonic(), OVERTIME))

    @contextmanager
    def constant_file(self) -> Iterator[ConstantFile]:
        """`constants`, or a new file in a temporary folder."""
        if self.constants is not None:
            yield self.constants
            return
        with temporary_folder() as folder, ConstantFile(folder / CONSTANTS) as constants:
            yield constants


EXECUTION = Execution()
"""The usual time limit; nothing cancels, and constants are shared with nothing else."""
