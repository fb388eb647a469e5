"""A pool of workers that do tasks in parallel.

Each worker has a thread of its own and does one task at a time. A worker that raises `EngineUnavailable` is lost: it
leaves the pool, and its task is queued again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, Self, TypeVar

from qdqtune.engines.execution import CHECK_SECONDS, Check
from qdqtune.errors import EngineUnavailable

W = TypeVar("W")
T = TypeVar("T")

SLOW_FACTOR, SLOW_SECONDS = 3.0, 10.0
"""A task that runs `SLOW_FACTOR` times as long as any finished one, and at least `SLOW_SECONDS`, is given to a second
worker as well: so a machine that hangs does not hold up a batch. Chosen, not measured."""


class _Cancelled(BaseException):
    """The task of this thread is cancelled. Not an `Exception`, so that nothing in between catches it."""


@dataclass(eq=False)
class Task(Generic[W, T]):
    """One call of `do` with a worker."""

    do: Callable[[W], T]
    result: Future[T] = field(default_factory=Future)
    started: float = inf
    running: int = 0
    """How many workers do it now."""


class WorkerPool(Generic[W]):
    """Workers, none of which is used by two threads at once. Threads start with the first task and end with `close`.

    `notify` gets a message when a worker is lost, in the thread that asks for `results`. A task that runs longer than
    `repeat_after` seconds and `SLOW_FACTOR` times as long as any other is given to an idle worker as well; with None
    each task is done once.

    `check` is called while a thread waits for tasks, and can cancel them all. `checking` makes a worker call another
    function while it waits, in a block that does one task: the function raises once the task is cancelled. Without it,
    tasks are not interrupted.
    """

    def __init__(
        self,
        workers: Iterable[W],
        notify: Callable[[str], None] = lambda _: None,
        *,
        repeat_after: float | None = SLOW_SECONDS,
        check: Check | None = None,
        checking: Callable[[W, Check], AbstractContextManager[None]] = lambda *_: nullcontext(),
    ) -> None:
        self._workers, self._notify, self._repeat_after = list(workers), notify, repeat_after
        self._check, self._checking = check, checking
        self._changed = threading.Condition()
        self._waiting: list[Task[W, Any]] = []
        self._running: list[Task[W, Any]] = []
        self._threads: list[threading.Thread] = []
        self._lost: list[BaseException | None] = []
        self._longest: float | None = None  # seconds of the longest finished task of the batch
        self._is_closed = False

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
        """The worker for callers that need a single one. Use it only while no task runs."""
        return self._workers[0]

    def submit(self, do: Callable[[W], T]) -> Task[W, T]:
        """Queue a call of `do` with the next worker that is free."""
        task = Task(do)
        with self._changed:
            self._waiting.append(task)
            if not self._threads:
                self._is_closed = False
                self._threads = [threading.Thread(target=self._serve, args=(w,), daemon=True) for w in self._workers]
                for thread in self._threads:
                    thread.start()
            self._changed.notify_all()
        return task

    def cancel(self, tasks: Iterable[Task[W, Any]]) -> None:
        """Cancel tasks, and return when no worker does any of them. A worker that waits for an engine ends that
        engine."""
        tasks = list(tasks)
        with self._changed:
            self._waiting = [task for task in self._waiting if task not in tasks]
            for task in tasks:
                task.result.cancel()
            self._changed.wait_for(lambda: not any(task.running for task in tasks))

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until `is_over` is true, which tasks of this pool bring about, or until the pool's `check` raises."""
        while True:
            with self._changed:
                if self._changed.wait_for(is_over, CHECK_SECONDS):
                    return
            if self._check is not None:
                self._check()

    def results(self, jobs: Sequence[Callable[[W], T]]) -> Generator[tuple[int, T]]:
        """The number of each job with its result, as they end. Closing the iterator cancels the other jobs.

        A single worker does each job in the caller's thread, when its result is asked for.

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
                self.wait(lambda: bool(self._lost) or any(t.result.done() for t in waited_for.values()))
                self._notify_lost()
                for number in [number for number, task in waited_for.items() if task.result.done()]:
                    yield number, waited_for.pop(number).result.result()
        finally:
            self.cancel(tasks)
            self._notify_lost()

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
        """The thread of a worker: do tasks until the pool is closed or the worker is lost."""
        while (task := self._take()) is not None and not self._do(task, worker):
            pass

    def _take(self) -> Task[W, Any] | None:
        """Wait for the next task; None when the pool is closed."""
        with self._changed:
            while not self._is_closed:
                task = self._waiting.pop(0) if self._waiting else self._slow_task()
                if task is not None:
                    return self._mark_begun(task)
                self._changed.wait(CHECK_SECONDS if self._running and self._repeat_after is not None else None)
        return None

    def _slow_task(self) -> Task[W, Any] | None:
        """A task that has kept one worker much longer than others took, so that another one does it, too."""
        if self._repeat_after is None or self._longest is None:
            return None
        latest = time.monotonic() - max(self._repeat_after, SLOW_FACTOR * self._longest)
        alone = (t for t in self._running if t.running == 1 and not t.result.done())
        return next((task for task in alone if task.started < latest), None)

    def _mark_begun(self, task: Task[W, Any]) -> Task[W, Any]:
        task.started = min(task.started, time.monotonic())
        task.running += 1
        if task not in self._running:
            self._running.append(task)
        return task

    def _do(self, task: Task[W, Any], worker: W) -> bool:
        """Do a task and store its result, unless it has one already. Returns whether the worker is lost; the last
        worker is never lost: its task fails instead."""
        result, error = None, None
        try:
            result = self._call_cancellable(task, worker)
        except BaseException as raised:  # noqa: BLE001  (raised where the result is read)
            error = raised
        with self._changed:
            task.running -= 1
            if not task.running:
                self._running.remove(task)
            is_lost = isinstance(error, EngineUnavailable) and worker in self._workers and len(self) > 1
            if is_lost:
                self._remove(worker, task, error)
            elif not task.result.done():
                self._longest = max(self._longest or 0.0, time.monotonic() - task.started)
                task.result.set_exception(error) if error is not None else task.result.set_result(result)
            self._changed.notify_all()
        return is_lost

    def _call_cancellable(self, task: Task[W, T], worker: W) -> T:
        """Call a task so that it ends when it is cancelled."""

        def check() -> None:
            if task.result.done():
                raise _Cancelled
            if self._check is not None:
                self._check()

        with self._checking(worker, check):
            return task.do(worker)

    def _remove(self, worker: W, task: Task[W, Any], error: BaseException | None) -> None:
        """Remove a lost worker, and queue its task again."""
        self._workers.remove(worker)
        self._lost.append(error)
        if not task.running and not task.result.done():
            self._waiting.insert(0, task)

    def _notify_lost(self) -> None:
        while self._lost:
            self._notify(f"a worker is lost, and the others go on with its job: {self._lost.pop(0)}")
