"""A pool of workers that do jobs in parallel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from qdqtune.engines.execution import CHECK_SECONDS, cancelled_by, raise_if_cancelled
from qdqtune.errors import EngineUnavailable

W = TypeVar("W")
T = TypeVar("T")


class _Cancelled(BaseException):
    """The caller needs the job of this thread no more. Not an `Exception`, so that nothing in between catches it."""


class WorkerPool(Generic[W]):
    """Workers, each of which does one job at a time. A worker whose job raises `EngineUnavailable` is lost: it leaves
    the pool, and another one does the job. `notify` gets a message then, in the thread that asks for `results`."""

    def __init__(self, workers: Iterable[W], notify: Callable[[str], None] = lambda _: None) -> None:
        self._workers, self._notify = list(workers), notify

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[W]:
        return iter(tuple(self._workers))

    @property
    def first(self) -> W:
        """The worker for callers that need a single one. Use it only while no job runs."""
        return self._workers[0]

    def results(self, jobs: Sequence[Callable[[W], T]]) -> Generator[tuple[int, T]]:
        """The number of each job with its result, as they end. Closing the iterator cancels the other jobs: a worker
        that waits for an engine ends that engine.

        A single worker does each job in the caller's thread, when its result is asked for.

        Raises:
            EngineUnavailable: the last worker is lost.
            whatever else a job raises.
        """
        if len(self) == 1:
            for number, job in enumerate(jobs):
                yield number, job(self.first)
            return
        batch = _Batch(self._workers, jobs)
        threads: list[threading.Thread] = []
        try:
            for worker in self:
                thread = threading.Thread(target=copy_context().run, args=(batch.serve, worker), daemon=True)
                thread.start()
                threads.append(thread)
            for _ in jobs:
                while (outcome := batch.next_outcome()) is None:
                    self._notify_lost(batch)
                    raise_if_cancelled()
                self._notify_lost(batch)
                number, result, error = outcome
                if error is not None:
                    raise error
                yield number, result
        finally:
            batch.close()
            for thread in threads:
                thread.join()
            self._notify_lost(batch)

    def _notify_lost(self, batch: _Batch[W]) -> None:
        while batch.losses:
            self._notify(f"a worker is lost, and the others go on with its job: {batch.losses.pop(0)}")


class _Batch(Generic[W]):
    """Jobs, and what came of them. `workers` is the list of the pool, from which those that are lost are removed."""

    def __init__(self, workers: list[W], jobs: Sequence[Callable[[W], Any]]) -> None:
        self._workers, self._waiting = workers, list(enumerate(jobs))
        self._outcomes: list[tuple[int, Any, BaseException | None]] = []
        self._running, self._is_closed = 0, False
        self._changed = threading.Condition()
        self.losses: list[EngineUnavailable] = []

    def next_outcome(self) -> tuple[int, Any, BaseException | None] | None:
        """The number, the result and the error of a job that has ended; None if none ends for a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcomes or self.losses, CHECK_SECONDS)
            return self._outcomes.pop(0) if self._outcomes else None

    def close(self) -> None:
        """Let no further job begin, and cancel those that run."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def serve(self, worker: W) -> None:
        """The thread of a worker: do jobs while there are any and the worker is not lost."""
        with cancelled_by(self._raise_if_closed):
            while (task := self._take()) is not None and self._do(*task, worker):
                pass

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise _Cancelled

    def _take(self) -> tuple[int, Callable[[W], Any]] | None:
        with self._changed:
            # A job that runs comes back if its worker is lost.
            self._changed.wait_for(lambda: self._waiting or not self._running)
            if not self._waiting:
                return None
            self._running += 1
            return self._waiting.pop(0)

    def _do(self, number: int, job: Callable[[W], Any], worker: W) -> bool:
        """Do a job; whether the worker can do more. The last worker is never lost: its job fails instead."""
        result, error = None, None
        try:
            result = job(worker)
        except BaseException as raised:  # noqa: BLE001  (raised where the result is read)
            error = raised
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
            if isinstance(error, EngineUnavailable) and len(self._workers) > 1:
                self._workers.remove(worker)
                self.losses.append(error)
                if not self._is_closed:
                    self._waiting.insert(0, (number, job))
                return False
            self._outcomes.append((number, result, error))
            return True
