"""Builds ahead of time: made in other processes while this one times, by engines that say that it disturbs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from pathlib import Path
from queue import SimpleQueue

from qdqtune.engines.process import LOOK_SECONDS, look, looking
from qdqtune.errors import EngineUnavailable
from qdqtune.types import Failure


class _Ended(BaseException):
    """Nobody waits any more for a build. No `Exception`: nothing on the way may catch it."""


Builder = Callable[[Path, Path, Path], float | Failure]  # `Runner.compile`
Plan = tuple[Path, float]  # what a build has written, and the seconds that it took


class Ahead:
    """Builds by their logs, as many at once as there are builders, in the order in which they were begun. What they
    write lies in `folder`; `told` hears of those that nobody has taken."""

    def __init__(
        self, folder: Path = Path(), builders: Sequence[Builder] = (), told: Callable[[str], None] = lambda _: None
    ) -> None:
        self._folder, self._told, self.count = folder, told, len(builders)
        self._idle = SimpleQueue[Builder]()
        for builder in builders:
            self._idle.put(builder)
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[Path, Future[Plan | Failure | None]] = {}
        self._is_over = False

    def begin(self, path: Path, log: Path) -> None:
        """Build a file, which has to stay until that is taken; once, however often it is asked for, and not without
        builders."""
        if self.count and log not in self._begun:
            self._pool = self._pool or ThreadPoolExecutor(self.count)
            self._begun[log] = self._pool.submit(copy_context().run, self._made, path, log)

    def take(self, log: Path) -> Plan | Failure | None:
        """What was built, when it is there, or why nothing was; None where nothing was begun, or where a build may
        succeed that has the machine for itself."""
        if (build := self._begun.pop(log, None)) is None:
            return None
        while not wait([build], LOOK_SECONDS).done:
            if (looks := look()) is not None:
                looks()
        return build.result()

    def close(self) -> None:
        """Give up what nobody has taken."""
        if self._pool is None:
            return
        self._is_over, vain = True, sum(not build.cancel() for build in self._begun.values())
        self._pool.shutdown()
        self._pool, self._begun, self._is_over = None, {}, False
        if vain:
            self._told(f"{vain} build{'s' * (vain > 1)} made ahead of time for nothing")

    def _made(self, path: Path, log: Path) -> Plan | Failure | None:
        plan, builder = self._folder / f"{log.stem}.plan", self._idle.get()
        try:
            with looking(self._check):
                made = builder(path, log, plan)
        except EngineUnavailable:
            return None
        finally:
            self._idle.put(builder)
        if isinstance(made, Failure):
            return None if made.is_transient else made
        return plan, made

    def _check(self) -> None:
        if self._is_over:
            raise _Ended
