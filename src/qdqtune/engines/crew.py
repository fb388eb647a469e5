"""A crew: stations that do jobs side by side, each in a thread of its own, and go on without those that are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

from qdqtune.engines.process import look, looking
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineUnavailable

S = TypeVar("S")
T = TypeVar("T")

PATIENCE = 3.0
"""A job is given to another station as well that takes so many times as long as the longest of the others did."""

LEAST_PATIENCE = 10.0
"""Seconds that a job may take in any case before it is."""

LOOK_SECONDS = 0.1


class _Ended(BaseException):
    """Nobody waits any more for what this thread asks an engine. No `Exception`: nothing on the way may catch it."""


@dataclass
class _Job:
    """What is known of one job while it is worked on."""

    number: int
    begun: float | None = None
    at_work: int = 0
    is_done: bool = False


@dataclass
class _Work(Generic[S, T]):
    """The jobs at hand; threads share it under its lock."""

    ask: Sequence[Callable[[S], T]]
    waiting: list[_Job]
    is_patient: bool
    changed: threading.Condition = field(default_factory=threading.Condition)
    answers: SimpleQueue[tuple[_Job, T | BaseException]] = field(default_factory=SimpleQueue)
    lost: list[tuple[S, EngineUnavailable]] = field(default_factory=list)
    is_over: bool = False
    longest: float | None = None

    def __post_init__(self) -> None:
        self.jobs = tuple(self.waiting)

    def take(self) -> _Job | None:
        """The next job to do, or one that somebody else is slow at; None when there is nothing left to come."""
        with self.changed:
            while not self.is_over and not all(job.is_done for job in self.jobs):
                job = self.waiting.pop(0) if self.waiting else self._overdue()
                if job is not None:
                    job.begun = job.begun or monotonic()
                    job.at_work += 1
                    return job
                self.changed.wait(LOOK_SECONDS)
        return None

    def _overdue(self) -> _Job | None:
        if self.longest is None or self.is_patient:
            return None
        limit = max(LEAST_PATIENCE, PATIENCE * self.longest)
        slow = (job for job in self.jobs if job.at_work == 1 and not job.is_done and job.begun is not None)
        return next((job for job in slow if monotonic() - (job.begun or 0.0) > limit), None)

    def finish(self, job: _Job, answer: T | BaseException) -> None:
        """Keep the first answer to a job."""
        with self.changed:
            job.at_work -= 1
            if not job.is_done:
                job.is_done = True
                self.longest = max(self.longest or 0.0, monotonic() - (job.begun or 0.0))
                self.answers.put((job, answer))
            self.changed.notify_all()

    def give_back(self, job: _Job) -> None:
        """Whoever took the job cannot do it."""
        with self.changed:
            job.at_work -= 1
            if not job.is_done and job.at_work == 0:
                self.waiting.insert(0, job)
            self.changed.notify_all()

    def end(self) -> None:
        """Nobody wants to know any more."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()


class Crew(Generic[S]):
    """Stations, none of which is used by two threads at once.

    `told` hears, in the caller's thread, of one that is lost. Who `is_patient` has no job done by two that takes long.
    """

    def __init__(
        self, stations: Sequence[S], told: Callable[[str], None] = lambda _: None, *, is_patient: bool = False
    ) -> None:
        self._stations = list(stations)
        self._told, self._is_patient = told, is_patient

    @property
    def first(self) -> S:
        """One to ask alone, while no jobs are done."""
        return self._stations[0]

    def __len__(self) -> int:
        return len(self._stations)

    def __iter__(self) -> Iterator[S]:
        return iter(self._stations)

    def answers(self, ask: Sequence[Callable[[S], T]]) -> Generator[tuple[int, T]]:
        """The number of each job with its answer, as they come. Closing the iterator ends what is under way.

        One station does them as they are asked for, in the caller's thread. Where there are several, a job is done by
        another one if the first is lost (`EngineUnavailable`), or much slower than the others are.

        Raises:
            EngineUnavailable: no station is left.
            whatever else a job raises.
        """
        if len(self._stations) == 1:
            for number, job in enumerate(ask):
                yield number, job(self.first)
            return
        work: _Work[S, T] = _Work(ask, [_Job(n) for n in range(len(ask))], self._is_patient)
        threads = [
            threading.Thread(target=copy_context().run, args=(_serve, station, work, look()), daemon=True)
            for station in self._stations
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in range(len(ask)):
                yield self._next(work, threads)
        finally:
            work.end()
            for thread in threads:
                thread.join()
            self._go_on_without(work)

    def _next(self, work: _Work[S, T], threads: Sequence[threading.Thread]) -> tuple[int, T]:
        looks = look()
        while True:
            at_work = any(thread.is_alive() for thread in threads)
            try:
                job, answer = work.answers.get(timeout=LOOK_SECONDS if at_work else 0.0)
            except Empty:
                self._go_on_without(work)
                if not at_work:
                    raise work.lost[-1][1] from None
            else:
                if isinstance(answer, BaseException):
                    raise answer
                return job.number, answer
            if looks is not None:
                looks()

    def _go_on_without(self, work: _Work[S, T]) -> None:
        """Tell which stations are lost, and ask them no more; the last one may have another chance later."""
        for station, error in work.lost:
            if station in self._stations and len(self._stations) > 1:
                self._stations.remove(station)
                self._told(f"a worker is lost, and the others go on with its job: {error}")


def _serve(station: S, work: _Work[S, T], looks: Callable[[], None] | None) -> None:
    """Do jobs until there are none."""
    while (job := work.take()) is not None:

        def check(job: _Job = job) -> None:
            if work.is_over or job.is_done:
                raise _Ended
            if looks is not None:
                looks()

        try:
            with looking(check):
                answer: T | BaseException = work.ask[job.number](station)
        except EngineUnavailable as error:
            work.lost.append((station, error))
            work.give_back(job)
            return
        except BaseException as error:  # noqa: BLE001  (it is raised where the answer is awaited)
            work.finish(job, error)
        else:
            work.finish(job, answer)


def check_alike(runners: Sequence[Runner]) -> None:
    """Start all engines at once, and refuse devices that differ: what one measures says nothing of another.

    Raises:
        EngineUnavailable: two differ, or one does not start.
    """
    if (difference := unlike(runners, described(runners))) is not None:
        raise EngineUnavailable(
            f"workers are not alike: {difference}; latencies compare on equal devices only, so give a run devices of "
            "one kind"
        )


def described(runners: Sequence[Runner]) -> list[Mapping[str, str]]:
    """What the engines of all runners say of themselves, all of them started at once.

    Raises:
        EngineUnavailable: one does not start.
    """
    with ThreadPoolExecutor(len(runners)) as pool:
        asked = [pool.submit(copy_context().run, runner.describe) for runner in runners]
    return [one.result() for one in asked]


def unlike(runners: Sequence[Runner], told: Sequence[Mapping[str, str]]) -> str | None:
    """The first difference between two devices, in words; None where all are alike."""
    for runner, other in zip(runners[1:], told[1:], strict=True):
        for name in {**told[0], **other}:
            if (mine := other.get(name)) != (theirs := told[0].get(name)):
                return f"{runner.place} has {name} {mine}, {runners[0].place} has {theirs}"
    return None
