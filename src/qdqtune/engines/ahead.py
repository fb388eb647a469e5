"""Builds ahead of time: made in other processes while this one times, by engines that say that it disturbs nothing.

They are made in the order of list scheduling: who has nothing to do takes the most urgent of the builds that can begin,
and the more of the run waits for a build, the more urgent it is (`Need`). For jobs that are all needed this takes less
than twice as long as the best order: R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17
(1969). What is timed keeps its own order, so that a run finds the same with builders and without.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from threading import Lock

from qdqtune.engines.process import LOOK_SECONDS, look, looking
from qdqtune.errors import EngineUnavailable
from qdqtune.types import Failure


class Need(IntEnum):
    """How much of a run waits for a build, the most first."""

    NOW = 0  # it is about to be timed
    NEXT = 1  # it is likely to be timed next, and all behind that learns from it
    PROOF = 2  # it is timed whatever happens, with nothing behind it
    BEST = 3  # the same, if nothing beats it


class _Ended(BaseException):
    """Nobody waits any more for a build. No `Exception`: nothing on the way may catch it."""


Builder = Callable[[Path, Path, Path], float | Failure]  # `Runner.compile`
Plan = tuple[Path, float]  # what a build has written, and the seconds that it took


@dataclass(eq=False)
class _Job:
    path: Path
    plan: Path
    need: Need
    is_begun: bool = False
    answer: Future[Plan | Failure | None] = field(default_factory=Future)

    def make(self, builder: Builder) -> None:
        try:
            made = builder(self.path, self.plan.with_suffix(".log"), self.plan)
            self.answer.set_result(made if isinstance(made, Failure) else (self.plan, made))
        except EngineUnavailable:
            self.answer.set_result(None)
        except BaseException as error:  # who awaits the answer is to know
            self.answer.set_exception(error)
            raise


class Ahead:
    """Builds by file and name, as many at once as there are builders, the most urgent first, and of these in the order
    in which they were begun. What they write lies in `folder`; `told` hears how many nobody has taken."""

    def __init__(
        self, folder: Path = Path(), builders: Sequence[Builder] = (), told: Callable[[str], None] = lambda _: None
    ) -> None:
        self._folder, self._told, self.count, self._idle = folder, told, len(builders), list(builders)
        self._lock, self._jobs, self._numbers = Lock(), dict[tuple[Path, str], _Job](), itertools.count(1)
        self._pool: ThreadPoolExecutor | None = None
        self._is_over = False

    def begin(self, path: Path, name: str = "", need: Need = Need.NOW) -> None:
        """Build a file, which has to stay until that is taken; once by each name of the log that it will have, if that
        is known, however often it is asked for, and not without builders."""
        path = path.absolute()
        with self._lock:
            if (job := self._jobs.get((path, name))) is not None:
                job.need = min(need, job.need)
            elif self.count:
                self._jobs[path, name] = _Job(path, self._folder / f"{next(self._numbers)}.plan", need)
                self._pool = self._pool or ThreadPoolExecutor(self.count)
                self._pool.submit(copy_context().run, self._serve)

    def withdraw(self, need: Need) -> None:
        """Nobody is to begin what is as urgent as that any more."""
        with self._lock:
            self._jobs = {key: job for key, job in self._jobs.items() if job.is_begun or job.need != need}

    def take(self, path: Path, log: Path, here: Builder) -> Plan | Failure | None:
        """What was built, when it is there, or why nothing was: the build named like the log, or one without a name;
        None where nobody has begun it, or where a build may succeed that has the machine for itself. Who waits builds
        `here` meanwhile what is about to be timed."""
        path = path.absolute()
        with self._lock:
            job = self._jobs.pop((path, log.stem), None) or self._jobs.pop((path, ""), None)
        if job is None or not job.is_begun:
            return None
        while not wait([job.answer], 0).done:
            if (other := self._next(Need.NOW)) is not None:
                other.make(here)
            elif not wait([job.answer], LOOK_SECONDS).done and (looks := look()) is not None:
                looks()
        with suppress(OSError):  # a builder that is lost has written none
            shutil.move(job.plan.with_suffix(".log"), log)
        made = job.answer.result()
        return None if isinstance(made, Failure) and made.is_transient else made

    def close(self) -> None:
        """Give up what nobody has taken."""
        if self._pool is None:
            return
        with self._lock:
            vain, self._jobs, self._is_over = sum(job.is_begun for job in self._jobs.values()), {}, True
        self._pool.shutdown()
        self._pool, self._is_over = None, False
        if vain:
            self._told(f"{vain} build{'s' * (vain > 1)} made ahead of time for nothing")

    def _next(self, least: Need = Need.BEST) -> _Job | None:
        """The most urgent build that nobody has begun, if it is urgent enough: whoever asks has begun it."""
        with self._lock:
            waiting = (job for job in self._jobs.values() if not job.is_begun and job.need <= least)
            if (job := min(waiting, key=lambda job: job.need, default=None)) is not None:
                job.is_begun = True
            return job

    def _serve(self) -> None:
        """Make one build, if there is one to begin."""
        if (job := self._next()) is not None:
            builder = self._idle.pop()
            try:
                with looking(self._check):
                    job.make(builder)
            finally:
                self._idle.append(builder)

    def _check(self) -> None:
        if self._is_over:
            raise _Ended
