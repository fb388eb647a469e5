"""A pool of workers that do tasks side by side, the most urgent first.

Each worker has a thread of its own and does one task at a time. A worker that is lost (`EngineUnavailable`) leaves the
pool, and another one does its task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from math import ceil, inf
from time import monotonic
from typing import Any, Generic, Self, TypeVar

from qdqtune.engines.process import LOOK_SECONDS, look, looking
from qdqtune.errors import EngineUnavailable

W = TypeVar("W")
T = TypeVar("T")
U = TypeVar("U")

SLOW_FACTOR, SLOW_SECONDS = 3.0, 10.0
"""How much longer than all others a task has to take, and how many seconds at the least, to be given to a second
worker: one on a machine that hangs does not hold up a batch, one with a candidate that takes long is left alone."""


class _Cancelled(BaseException):
    """The task of this thread is cancelled. Not an `Exception`, so that no code on the way catches it."""


@dataclass(eq=False)
class Task(Generic[W, T]):
    """One call of `do` with a worker. Of several that wait, one with the lowest `priority` is next, the oldest first.

    A part of another task is not repeated when its worker is lost or slow: it is cancelled, or waited for.
    """

    do: Callable[[W], T]
    priority: int = 0
    is_part: bool = False
    result: Future[T] = field(default_factory=Future)
    context: Context = field(default_factory=copy_context)
    """That of the thread that submits it: what cancels it there, and the time limit of runners that it opens."""
    started: float = inf
    running: int = 0
    """How many workers are doing it now."""


class WorkerPool(Generic[W]):
    """Workers, none of which is used by two threads at once. Threads start with the first task, and end with `close`.

    `notify` is told when a worker is lost, in the thread that asks for `results`. A task that takes longer than
    `repeat_after` seconds, and `SLOW_FACTOR` times as long as any other took, is given to an idle worker as well; with
    None no task is done by two workers.
    """

    def __init__(
        self,
        workers: Iterable[W],
        notify: Callable[[str], None] = lambda _: None,
        *,
        repeat_after: float | None = SLOW_SECONDS,
    ) -> None:
        self._workers, self._notify, self._repeat_after = list(workers), notify, repeat_after
        self._changed = threading.Condition()
        self._waiting: list[Task[W, Any]] = []
        self._running: list[Task[W, Any]] = []
        self._threads: list[threading.Thread] = []
        self._lost: list[BaseException | None] = []
        self._longest: float | None = None  # seconds of the longest finished task of the batch
        self._idle, self._is_closed = 0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[W]:
        return iter(tuple(self._workers))

    @property
    def first(self) -> W:
        """The worker to use alone, while no task runs."""
        return self._workers[0]

    def submit(self, do: Callable[[W], T], priority: int = 0, *, is_part: bool = False) -> Task[W, T]:
        """Have `do` called by the next worker that is free."""
        task = Task(do, priority, is_part)
        with self._changed:
            self._waiting.append(task)
            if not self._threads:
                self._is_closed = False
                self._threads = [threading.Thread(target=self._serve, args=(w,), daemon=True) for w in self._workers]
                for thread in self._threads:
                    thread.start()
            self._changed.notify_all()
        return task

    def withdraw(self, task: Task[W, Any]) -> bool:
        """Cancel a task if it still waits, and say whether it did."""
        with self._changed:
            if task not in self._waiting:
                return False
            self._waiting.remove(task)
            return task.result.cancel()

    def cancel(self, tasks: Iterable[Task[W, Any]]) -> None:
        """Cancel tasks; returns when no worker does any of them. One that waits for an engine ends that."""
        tasks = list(tasks)
        with self._changed:
            self._waiting = [task for task in self._waiting if task not in tasks]
            for task in tasks:
                task.result.cancel()
            self._changed.wait_for(lambda: not any(task.running for task in tasks))

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until something is so that changes with the tasks of this pool; see `process.looking`."""
        looks = look()
        while True:
            with self._changed:
                if self._changed.wait_for(is_over, LOOK_SECONDS):
                    return
            if looks is not None:
                looks()

    def do_one(self, worker: W, priority: int) -> bool:
        """Do a waiting task that is at least that urgent in this thread, with a worker of the caller's; whether there
        was one."""
        with self._changed:
            task = self._next(priority)
        if task is None:
            return False
        self._do(task, worker)
        error = task.result.exception()
        if error is not None and not isinstance(error, Exception):  # an interrupt is for the caller, not for the task
            raise error
        return True

    def results(self, jobs: Sequence[Callable[[W], T]]) -> Generator[tuple[int, T]]:
        """The number of each job with its result, in the order in which they end. Closing it cancels the others.

        A single worker does each job when its result is asked for, in the caller's thread.

        Raises:
            EngineUnavailable: the last worker is lost.
            whatever else a job raises.
        """
        if len(self) == 1:
            for number, job in enumerate(jobs):
                yield number, job(self.first)
            return
        self._longest = None
        waited_for = {number: self.submit(job) for number, job in enumerate(jobs)}
        tasks = list(waited_for.values())
        try:
            while waited_for:
                self.wait(lambda: bool(self._lost) or any(task.result.done() for task in waited_for.values()))
                self._tell_lost()
                for number in [number for number, task in waited_for.items() if task.result.done()]:
                    yield number, waited_for.pop(number).result.result()
        finally:
            self.cancel(tasks)
            self._tell_lost()

    def idle_per_task(self) -> int:
        """How many idle workers there are for each task that runs, rounded up."""
        with self._changed:
            busy = sum(not task.is_part and not task.result.done() for task in self._running)
            return max(0, ceil((self._idle - len(self._waiting)) / max(1, busy)))

    def shared(self, own: Callable[[], T], parts: Sequence[Callable[[W], U]]) -> tuple[T, list[U | None]]:
        """Do one part of a task in this thread while idle workers do others: None for those that none of them did."""
        tasks = [self.submit(part, is_part=True) for part in parts]
        try:
            mine = own()
            for task in tasks:
                self.withdraw(task)
            self.wait(lambda: all(task.result.done() for task in tasks))
        except BaseException:
            self.cancel(tasks)
            raise
        return mine, [None if task.result.cancelled() else task.result.result() for task in tasks]

    def close(self) -> None:
        """Cancel all tasks, and end the threads."""
        with self._changed:
            tasks, threads = [*self._waiting, *self._running], self._threads
            self._is_closed, self._threads = True, []
            self._changed.notify_all()
        self.cancel(tasks)
        for thread in threads:
            thread.join()

    def _serve(self, worker: W) -> None:
        """Do tasks with a worker until the pool is closed or the worker lost."""
        while (task := self._take()) is not None:
            if self._do(task, worker):
                return

    def _take(self) -> Task[W, Any] | None:
        """The next task, as soon as there is one; None when the pool is closed."""
        with self._changed:
            while not self._is_closed:
                if (task := self._next() or self._slow()) is not None:
                    return task
                self._idle += 1
                self._changed.wait(LOOK_SECONDS if self._running and self._repeat_after is not None else None)
                self._idle -= 1
        return None

    def _next(self, priority: float = inf) -> Task[W, Any] | None:
        """The most urgent task that waits, if it is at least that urgent, as begun."""
        task = min(self._waiting, key=lambda task: task.priority, default=None)
        if task is None or task.priority > priority:
            return None
        self._waiting.remove(task)
        return self._begun(task)

    def _slow(self) -> Task[W, Any] | None:
        """A task that takes a single worker much longer than others took, as begun once more."""
        if self._repeat_after is None or self._longest is None:
            return None
        latest = monotonic() - max(self._repeat_after, SLOW_FACTOR * self._longest)
        alone = (t for t in self._running if t.running == 1 and not t.is_part and not t.result.done())
        slow = next((task for task in alone if task.started < latest), None)
        return None if slow is None else self._begun(slow)

    def _begun(self, task: Task[W, Any]) -> Task[W, Any]:
        task.started = min(task.started, monotonic())
        task.running += 1
        if task not in self._running:
            self._running.append(task)
        return task

    def _do(self, task: Task[W, Any], worker: W) -> bool:
        """Do a task, and keep its first result; or give it back, and say that the worker is lost: the last one never
        is, and its task fails."""
        result, error = None, None
        try:
            result = task.context.copy().run(self._called, task, worker)
        except BaseException as raised:  # noqa: BLE001  (raised again where the result is asked for)
            error = raised
        with self._changed:
            task.running -= 1
            if not task.running:
                self._running.remove(task)
            is_lost = isinstance(error, EngineUnavailable) and worker in self._workers and len(self) > 1
            if is_lost:
                self._give_back(task, worker, error)
            elif not task.result.done():
                if not task.is_part:
                    self._longest = max(self._longest or 0.0, monotonic() - task.started)
                task.result.set_exception(error) if error is not None else task.result.set_result(result)
            self._changed.notify_all()
        return is_lost

    def _called(self, task: Task[W, T], worker: W) -> T:
        outer = look()

        def check() -> None:
            if task.result.done():
                raise _Cancelled
            if outer is not None:
                outer()

        with looking(check):
            return task.do(worker)

    def _give_back(self, task: Task[W, Any], worker: W, error: BaseException | None) -> None:
        """Go on without a worker: its task waits again, a part of another is left to its owner."""
        self._workers.remove(worker)
        self._lost.append(error)
        if task.is_part:
            task.result.cancel()
        elif not task.running and not task.result.done():
            self._waiting.insert(0, task)

    def _tell_lost(self) -> None:
        while self._lost:
            self._notify(f"a worker is lost, and the others go on with its job: {self._lost.pop(0)}")
