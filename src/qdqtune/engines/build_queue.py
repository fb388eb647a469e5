"""Builds made ahead of time in other processes while one process times, for engines whose `builds_aside` allows it.

A free builder takes the most urgent build (list scheduling). For builds that are all needed this takes less than twice
as long as the best order: R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17 (1969). The
order of timings does not depend on builds, so a run finds the same result with builders and without.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Protocol

from qdqtune.engines.execution import Check
from qdqtune.engines.pool import Task, WorkerPool
from qdqtune.errors import EngineUnavailable
from qdqtune.types import Failure


class Urgency(IntEnum):
    """When a build will be needed, the most urgent first."""

    NOW = 0  # about to be timed
    NEXT = 1  # likely to be timed next; proposals depend on it
    PROOF = 2  # timed by the proof in any case
    BEST = 3  # timed by the proof if nothing better is found


class Builder(Protocol):
    """What the queue needs of a `Runner`."""

    @property
    def check(self) -> Check | None:
        """See `Runner.check`."""

    def checking(self, check: Check) -> AbstractContextManager[None]:
        """See `Runner.checking`."""

    def compile(self, path: Path, log: Path, plan: Path) -> float | Failure:
        """See `Runner.compile`."""


@dataclass(frozen=True)
class _Build:
    plan: Path
    task: Task[Builder, float | Failure]

    @property
    def log(self) -> Path:
        return self.plan.with_suffix(".log")


class BuildQueue:
    """Builds model files ahead of time on `builders`, and writes plans to `folder`; without builders nothing is queued.
    At the end `notify` gets a message if builds were never used. `check` can cancel all builds."""

    def __init__(
        self,
        folder: Path = Path(),
        builders: Sequence[Builder] = (),
        notify: Callable[[str], None] = lambda _: None,
        check: Check | None = None,
    ) -> None:
        self._folder, self._notify = folder, notify
        self._pool = WorkerPool(builders, repeat_after=None, check=check, checking=_checking)
        self._builds, self._numbers = dict[tuple[Path, str], _Build](), itertools.count(1)

    @property
    def builders(self) -> int:
        """How many builds are made at once."""
        return len(self._pool)

    def add(self, path: Path, log_name: str = "", urgency: Urgency = Urgency.NOW) -> None:
        """Queue the build of a file, which must stay until the build is taken.

        A file is built once for each log name; "" serves any log name. Adding a build again can only raise its urgency.
        """
        path = path.absolute()
        if (build := self._builds.get((path, log_name))) is not None:
            build.task.priority = min(urgency, build.task.priority)
        elif self.builders:
            plan = self._folder / f"{next(self._numbers)}.plan"
            task = self._pool.submit(partial(_compile, path, plan), urgency)
            self._builds[path, log_name] = _Build(plan, task)

    def withdraw(self, urgency: Urgency) -> None:
        """Remove the builds of that urgency that have not begun."""
        for key, build in list(self._builds.items()):
            if build.task.priority == urgency and self._pool.withdraw(build.task):
                del self._builds[key]

    def take(self, path: Path, log: Path, here: Builder) -> tuple[Path, float] | Failure | None:
        """The plan of a file with the seconds that its build took, or why the engine refuses the file. While the plan
        is not ready, `here` makes other builds of urgency `NOW`.

        None if the build has not begun, or failed in a way that another try may not: a lost builder, too little memory.
        """
        path = path.absolute()
        build = self._builds.pop((path, log.stem), None) or self._builds.pop((path, ""), None)
        if build is None or self._pool.withdraw(build.task):
            return None
        while not build.task.result.done() and self._pool.do_one(here, Urgency.NOW):
            pass
        self._pool.wait(build.task.result.done, here.check)
        with suppress(OSError):  # a lost builder may have written no log
            shutil.move(build.log, log)
        try:
            made = build.task.result.result()
        except EngineUnavailable:
            return None
        if isinstance(made, Failure):
            return None if made.is_transient else made
        return build.plan, made

    def close(self) -> None:
        """Cancel all builds."""
        unused = sum(not self._pool.withdraw(build.task) for build in self._builds.values())
        self._builds.clear()
        self._pool.close()
        if unused:
            self._notify(f"{unused} build{'s' * (unused > 1)} made ahead of time for nothing")


def _compile(path: Path, plan: Path, builder: Builder) -> float | Failure:
    return builder.compile(path, plan.with_suffix(".log"), plan)


def _checking(builder: Builder, check: Check) -> AbstractContextManager[None]:
    return builder.checking(check)
