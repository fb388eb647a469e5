"""How a command runs models and code of the user: time limits, cancelling, and one file for all constants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
"""How often a thread that waits calls its `Check`. Chosen, not measured."""

Check = Callable[[], None]
"""Called every `CHECK_SECONDS` during a wait. To cancel the work it raises, which ends the wait and the worker."""


class Deadline:
    """The end of a wait, `limit` seconds from now on. A `check` is called every `CHECK_SECONDS`."""

    def __init__(self, limit: float, check: Check | None = None) -> None:
        self.limit, self._check = limit, check
        self._ends = time.monotonic() + limit

    @property
    def pause(self) -> float:
        """How many seconds to wait before `after_pause`; more than 0."""
        left = max(0.001, self._ends - time.monotonic())
        return left if self._check is None else min(CHECK_SECONDS, left)

    def extend(self, seconds: float) -> None:
        """Let the wait last at least so many seconds from now on."""
        self._ends = max(self._ends, time.monotonic() + seconds)

    def after_pause(self) -> None:
        """Raise what ends the wait, if it is to end.

        Raises:
            TimeoutError: the time is over.
        """
        if time.monotonic() >= self._ends:
            raise TimeoutError
        if self._check is not None:
            self._check()


class Checked:
    """Something that waits, and calls `check` meanwhile."""

    def __init__(self, check: Check | None = None) -> None:
        self.check = check

    @contextmanager
    def checking(self, check: Check) -> Iterator[None]:
        """Call `check` in place of the own one in waits of the block."""
        before, self.check = self.check, check
        try:
            yield
        finally:
            self.check = before


@dataclass(frozen=True)
class Execution:
    """How a command runs models and code of the user.

    A request to an engine may take `seconds`, as may a pass over samples. The time budget is over at the time `ends` of
    `time.monotonic`: it ends passes over samples, and requests after `OVERTIME`. `check` can cancel all waits. The
    stages of the command write constants of their models to `constants`, so that weights are written once. `start`, a
    `process.StartWorker`, starts the workers in which models are looked at and not timed (see `reused_workers`);
    without it they start as those of any `Runner`. `device` starts those that run and time models on the user's
    engine, if that is on another machine.
    """

    seconds: float = TIME_LIMIT
    ends: float | None = None
    check: Check | None = None
    constants: ConstantFile | None = None
    start: Callable[..., Any] | None = None
    device: Callable[..., Any] | None = None

    def within_budget(self, seconds: float) -> float:
        """How many of these seconds a request that begins now may take."""
        return seconds if self.ends is None else min(seconds, max(self.ends - time.monotonic(), OVERTIME))

    @contextmanager
    def constant_file(self) -> Iterator[ConstantFile]:
        """`constants`, or a new file in a temporary folder.

        Raises:
            OutputError: the file cannot be made.
        """
        if self.constants is not None:
            yield self.constants
            return
        with temporary_folder() as folder, ConstantFile(folder / CONSTANTS) as constants:
            yield constants


EXECUTION = Execution()
"""The usual time limit; nothing cancels, and constants are shared with nothing else."""
