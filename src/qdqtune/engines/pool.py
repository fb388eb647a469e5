"""Workers of a run: their devices, on this host, on another machine or on a Ray cluster, and jobs in parallel."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from typing import Generic, TypeVar

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import ANYWHERE, Device, allot, cores_for
from qdqtune.engines.execution import CHECK_SECONDS, cancelled_by, raise_if_cancelled
from qdqtune.engines.process import StartWorker
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
        waiting, idle = list(range(len(jobs))), list(self)
        running: dict[Future[T], tuple[int, W]] = {}
        is_closed = False

        def raise_if_closed() -> None:
            if is_closed:
                raise _Cancelled

        def do(number: int, worker: W) -> T:
            with cancelled_by(raise_if_closed):
                raise_if_closed()
                return jobs[number](worker)

        with ThreadPoolExecutor(len(self)) as threads:
            try:
                while waiting or running:
                    while waiting and idle:
                        number, worker = waiting.pop(0), idle.pop(0)
                        running[threads.submit(copy_context().run, do, number, worker)] = number, worker
                    done, _ = wait(set(running), CHECK_SECONDS, FIRST_COMPLETED)
                    raise_if_cancelled()
                    for ended in sorted(done, key=lambda future: running[future][0]):
                        number, worker = running.pop(ended)
                        try:
                            result = ended.result()
                        except EngineUnavailable as error:
                            if len(self) == 1:
                                raise
                            self._workers.remove(worker)
                            self._notify(f"a worker is lost, and the others go on with its job: {error}")
                            waiting.insert(0, number)
                        else:
                            idle.append(worker)
                            yield number, result
            finally:
                is_closed = True
                threads.shutdown(cancel_futures=True)


@contextmanager
def allocate_workers(
    spec: EngineSpec,
    workers: int | None,
    cores_each: int | None,
    ray: str | None,
    most: int = 0,
    elsewhere: StartWorker | None = None,
) -> Iterator[tuple[tuple[Device, ...], StartWorker | None]]:
    """Yield a device for each worker of an engine, and the function that starts a worker on one (None:
    `runner.start_worker`). Workers run on this host; on another machine if `elsewhere` (`Destination.start`) is given;
    or on the Ray cluster at the address `ray`.

    Without `workers` there is one on a host, and on a cluster as many as fit. Each gets `cores_each` cores; at least
    one node of the cluster must have `most` cores.
    """
    if ray is None:
        is_shared = (workers or 1) == 1 and cores_each is None  # a single worker needs no cores of its own
        if elsewhere is not None:
            each = cores_for(spec, cores_each)
            own = tuple(Device(f"worker-{n + 1}", wants=each) for n in range(workers or 1))
            yield (ANYWHERE,) if is_shared else own, elsewhere
            return
        yield (ANYWHERE,) if is_shared else allot(spec, workers or 1, cores_each), None
        return
    try:
        from qdqtune.engines import cluster
    except ImportError as error:
        raise EngineUnavailable("`ray` needs Ray, which is not installed: pip install 'qdqtune[ray]'") from error
    with cluster.connected(ray):
        nodes = cluster.Cluster(spec, cores_for(spec, cores_each))
        yield nodes.devices(workers, most), nodes.start
