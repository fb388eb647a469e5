"""A crew: stations that do jobs side by side, each in a thread of its own, and go on without those that are lost. A job
may have parts of itself done by stations that have no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from math import ceil
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar, cast

from qdqtune.engines.process import look, looking
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineUnavailable

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")

PATIENCE = 3.0
"""A job is given to another station as well that takes so many times as long as the longest of the others did."""

LEAST_PATIENCE = 10.0
"""Seconds that a job may take in any case before it is."""

LOOK_SECONDS = 0.1


class _Ended(BaseException):
    """Nobody waits any more for what this thread asks an engine. No `Exception`: nothing on the way may catch it."""


@dataclass(eq=False)
class _Job(Generic[S, T]):
    """What is known of one job, or of a part of one, while it is worked on."""

    number: int
    do: Callable[[S], T]
    is_part: bool = False
    answer: T | BaseException | None = None
    begun: float | None = None
    at_work: int = 0
    is_done: bool = False


@dataclass
class _Work(Generic[S, T]):
    """The jobs at hand; threads share it under its lock."""

    waiting: list[_Job[S, T]]
    is_patient: bool
    changed: threading.Condition = field(default_factory=threading.Condition)
    answers: SimpleQueue[_Job[S, T]] = field(default_factory=SimpleQueue)
    lost: list[tuple[S, EngineUnavailable]] = field(default_factory=list)
    is_over: bool = False
    longest: float | None = None
    idle: int = 0

    def __post_init__(self) -> None:
        self.jobs = tuple(self.waiting)

    def take(self) -> _Job[S, T] | None:
        """The next job to do, or one that somebody else is slow at; None when there is nothing left to come."""
        with self.changed:
            while not self.is_over and not all(job.is_done for job in self.jobs):
                job = self.waiting.pop(0) if self.waiting else self._overdue()
                if job is not None:
                    job.begun = job.begun or monotonic()
                    job.at_work += 1
                    return job
                self.idle += 1
                self.changed.wait(LOOK_SECONDS)
                self.idle -= 1
        return None

    def to_spare(self) -> int:
        """How many stations without a job one of those at work may have."""
        with self.changed:
            busy = sum(job.at_work > 0 and not job.is_done for job in self.jobs)
            return max(0, ceil((self.idle - len(self.waiting)) / max(1, busy)))

    def offer(self, parts: Sequence[_Job[S, T]]) -> None:
        """Whoever has no job may do these."""
        with self.changed:
            self.waiting += parts
            self.changed.notify_all()

    def are_done(self, parts: Sequence[_Job[S, T]]) -> bool:
        """Take back what nobody has begun; whether the others are done now, or in a moment."""
        with self.changed:
            for part in [part for part in parts if part in self.waiting]:
                self.waiting.remove(part)
                part.is_done = True
            return self.changed.wait_for(lambda: all(part.is_done for part in parts), LOOK_SECONDS)

    def _overdue(self) -> _Job[S, T] | None:
        if self.longest is None or self.is_patient:
            return None
        limit = max(LEAST_PATIENCE, PATIENCE * self.longest)
        slow = (job for job in self.jobs if job.at_work == 1 and not job.is_done and job.begun is not None)
        return next((job for job in slow if monotonic() - (job.begun or 0.0) > limit), None)

    def finish(self, job: _Job[S, T], answer: T | BaseException) -> None:
        """Keep the first answer to a job."""
        with self.changed:
            job.at_work -= 1
            if not job.is_done:
                job.is_done, job.answer = True, answer
                if not job.is_part:
                    self.longest = max(self.longest or 0.0, monotonic() - (job.begun or 0.0))
                    self.answers.put(job)
            self.changed.notify_all()

    def give_back(self, job: _Job[S, T]) -> None:
        """Whoever took the job cannot do it; who is at the whole does such a part."""
        with self.changed:
            job.at_work -= 1
            if job.is_part:
                job.is_done = True
            elif not job.is_done and job.at_work == 0:
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
        work: _Work[S, T] = _Work([_Job(n, do) for n, do in enumerate(ask)], self._is_patient)
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
                job = work.answers.get(timeout=LOOK_SECONDS if at_work else 0.0)
            except Empty:
                self._go_on_without(work)
                if not at_work:
                    raise work.lost[-1][1] from None
            else:
                return job.number, _answer(job)
            if looks is not None:
                looks()

    def _go_on_without(self, work: _Work[S, T]) -> None:
        """Tell which stations are lost, and ask them no more; the last one may have another chance later."""
        for station, error in work.lost:
            if station in self._stations and len(self._stations) > 1:
                self._stations.remove(station)
                self._told(f"a worker is lost, and the others go on with its job: {error}")


_work: ContextVar[_Work[Any, Any] | None] = ContextVar("work", default=None)
"""Of which this thread does a job."""


def to_spare() -> int | None:
    """How many stations without a job may help with the one that this thread is at; None where there are no others."""
    work = _work.get()
    return None if work is None else work.to_spare()


def shared(own: Callable[[], T], others: Sequence[Callable[[Any], U]]) -> tuple[T, list[U | None]]:
    """Do a part of a job while stations that have none are given the others; None for what none of them has done."""
    work = _work.get()
    if work is None:
        return own(), [None] * len(others)
    parts: list[_Job[Any, U]] = [_Job(number, do, is_part=True) for number, do in enumerate(others)]
    work.offer(parts)
    try:
        mine = own()
    except BaseException:
        work.are_done(parts)
        raise
    looks = look()
    while not work.are_done(parts):
        if looks is not None:
            looks()
    return mine, [_answer(part) for part in parts]


def _answer(job: _Job[S, T]) -> T:
    if isinstance(job.answer, BaseException):
        raise job.answer
    return cast(T, job.answer)  # that of a part which nobody has done is None


def _serve(station: S, work: _Work[S, T], looks: Callable[[], None] | None) -> None:
    """Do jobs until there are none."""
    _work.set(work)
    while (job := work.take()) is not None:

        def check(job: _Job[S, T] = job) -> None:
            if work.is_over or job.is_done:
                raise _Ended
            if looks is not None:
                looks()

        try:
            with looking(check):
                answer: T | BaseException = job.do(station)
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
