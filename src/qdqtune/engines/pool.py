"""A pool of workers that do jobs in parallel."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextvars import copy_context
from queue import SimpleQueue
from threading import Lock
from typing import Generic, TypeVar

from qdqtune.engines.execution import CHECK_SECONDS, cancelled_by, raise_if_cancelled
from qdqtune.errors import EngineUnavailable

W = TypeVar("W")
T = TypeVar("T")


class _Cancelled(BaseException):
    """Ends the job of a thread that is not needed any more. No `Exception`, so that nothing in between catches it."""


class WorkerPool(Generic[W]):
    """Workers that do one job each at a time. A worker whose job raises `EngineUnavailable` leaves the pool, and
    another one repeats the job; `notify` is then called with a message, in the thread that iterates over `results`."""

    def __init__(self, workers: Iterable[W], notify: Callable[[str], None] = lambda _: None) -> None:
        self._workers, self._notify = list(workers), notify
        self._lock, self._losses = Lock(), list[EngineUnavailable]()

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[W]:
        return iter(tuple(self._workers))

    @property
    def first(self) -> W:
        """The worker to use for work outside of `results`, while no job runs."""
        return self._workers[0]

    def results(self, jobs: Sequence[Callable[[W], T]]) -> Generator[tuple[int, T]]:
        """Yield the number and the result of each job as it ends. Closing the iterator cancels the others, and ends
        engines that they wait for.

        A single worker does each job in the caller's thread, when its result is asked for.

        Raises:
            EngineUnavailable: no worker is left.
            Exception: whatever else a job raises.
        """
        if len(self) == 1:
            for number, job in enumerate(jobs):
                yield number, job(self.first)
            return
        free: SimpleQueue[W] = SimpleQueue()
        for worker in self:
            free.put(worker)
        is_closed = False

        def raise_if_closed() -> None:
            if is_closed:
                raise _Cancelled

        def do(job: Callable[[W], T]) -> T:
            while True:
                worker, is_lost = free.get(), False
                try:
                    with cancelled_by(raise_if_closed):
                        raise_if_closed()
                        return job(worker)
                except EngineUnavailable as error:
                    with self._lock:
                        is_lost = len(self._workers) > 1  # the last one is not: its job fails instead
                        if is_lost:
                            self._workers.remove(worker)
                            self._losses.append(error)
                    if not is_lost:
                        raise
                finally:
                    if not is_lost:
                        free.put(worker)

        with ThreadPoolExecutor(len(self)) as threads:
            try:
                numbers = {threads.submit(copy_context().run, do, job): number for number, job in enumerate(jobs)}
                waiting = set(numbers)
                while waiting:
                    done, waiting = wait(waiting, CHECK_SECONDS, FIRST_COMPLETED)
                    self._notify_lost()
                    raise_if_cancelled()
                    for ended in sorted(done, key=numbers.__getitem__):
                        yield numbers[ended], ended.result()
            finally:
                is_closed = True
                threads.shutdown(cancel_futures=True)
                self._notify_lost()

    def _notify_lost(self) -> None:
        while self._losses:
            self._notify(f"a worker is lost, and the others go on with its job: {self._losses.pop(0)}")
