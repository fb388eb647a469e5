"""A pool of workers: each task is done once, and again where a worker is lost or slow."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtune.engines.execution import CHECK_SECONDS, Check, Checked
from qdqtune.engines.pool import SLOW_SECONDS, WorkerPool
from qdqtune.errors import EngineFailure, EngineUnavailable


def named(number: int) -> Callable[[object], tuple[int, object]]:
    return lambda worker: (number, worker)


class Waiter(Checked):
    """A worker with a name that waits as if for an engine."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def wait(self, event: threading.Event) -> None:
        """Return when the event is set."""
        while not event.wait(CHECK_SECONDS / 10):
            assert self.check is not None
            self.check()


def waiting(*names: str, repeat_after: float | None = SLOW_SECONDS, check: Check | None = None) -> WorkerPool[Waiter]:
    """A pool of workers that can be interrupted."""
    workers = [Waiter(name) for name in names]
    return WorkerPool(workers, repeat_after=repeat_after, check=check, checking=Waiter.checking)


class TestResults:
    def test_every_job_has_one_result_and_all_workers_work(self) -> None:
        barrier = threading.Barrier(3)

        def waits_for_others(_: str) -> int:
            return barrier.wait(timeout=60)

        with WorkerPool(["a", "b", "c"]) as pool:
            assert sorted(arrived for _, arrived in pool.results([waits_for_others] * 3)) == [0, 1, 2]
            results = dict(pool.results([named(n) for n in range(7)]))
        assert sorted(results) == list(range(7))
        assert all(results[n][0] == n for n in results)

    def test_a_single_worker_does_each_job_on_demand(self) -> None:
        done: list[int] = []
        results = WorkerPool(["a"]).results([lambda _, n=n: done.append(n) for n in range(3)])  # type: ignore[misc]
        next(results)
        assert done == [0]

    def test_a_job_of_a_lost_worker_is_done_by_another(self) -> None:
        notes: list[str] = []
        lost = threading.Event()

        def ask(worker: str) -> str:
            if worker == "bad":
                lost.set()
                raise EngineUnavailable("its node is gone")
            assert lost.wait(timeout=60)
            return worker

        with WorkerPool(["bad", "good"], notes.append) as pool:
            assert [result for _, result in pool.results([ask] * 4)] == ["good"] * 4
            assert list(pool) == ["good"]
        assert notes == ["a worker is lost, and the others go on with its job: its node is gone"]

    def test_without_workers_left_it_ends(self) -> None:
        def ask(_: str) -> None:
            raise EngineUnavailable("no device")

        with WorkerPool(["a", "b"]) as pool, pytest.raises(EngineUnavailable, match="no device"):
            list(pool.results([ask] * 3))
        assert len(pool) == 1

    def test_an_error_of_a_job_is_raised_and_cancels_the_others(self) -> None:
        never = threading.Event()

        def ask(worker: Waiter, number: int) -> None:
            if number == 1:
                raise EngineFailure("refused")
            worker.wait(never)

        before = threading.active_count()
        with waiting("a", "b") as pool, pytest.raises(EngineFailure, match="refused"):
            list(pool.results([partial(ask, number=n) for n in range(5)]))
        assert threading.active_count() == before

    def test_closing_the_iterator_cancels_what_runs_and_the_pool_goes_on(self) -> None:
        never, begun = threading.Event(), threading.Barrier(3)

        def ask(worker: Waiter) -> None:
            begun.wait(timeout=60)
            worker.wait(never)

        caller, raised = threading.Thread(target=begun.wait, args=(60,)), threading.Event()
        main = threading.current_thread()

        def check() -> None:
            if threading.current_thread() is main and not caller.is_alive() and not raised.is_set():
                raised.set()
                raise KeyboardInterrupt

        with waiting("a", "b", check=check) as pool:
            results = pool.results([ask] * 4)
            caller.start()
            with pytest.raises(KeyboardInterrupt):
                next(results)
            assert not pool._running
            assert dict(pool.results([named(0)]))[0][0] == 0

    @pytest.mark.parametrize("repeat_after", [0.01, None])
    def test_a_slow_worker_is_not_waited_for_unless_tasks_are_done_once(self, repeat_after: float | None) -> None:
        release, taken = threading.Event(), threading.Event()

        def ask(worker: Waiter) -> str:
            if worker.name == "slow":
                taken.set()
                worker.wait(release)
            else:
                assert taken.wait(timeout=60)
            return worker.name

        with (
            waiting("slow", "quick", repeat_after=repeat_after) as pool,
            closing(pool.results([ask] * 3)) as found,
        ):
            first = [next(found)[1] for _ in range(2)]
            if repeat_after is None:
                release.set()
            assert [*first, next(found)[1]] == ["quick"] * 2 + ["quick" if repeat_after else "slow"]


class TestTasks:
    def test_a_closed_pool_begins_again_with_the_next_task(self) -> None:
        pool = WorkerPool(["a", "b"])
        for _ in range(2):
            task = pool.submit(lambda worker: worker)
            assert task.result.result(timeout=60) in ("a", "b")
            pool.close()
        assert not pool._threads


@given(count=st.integers(1, 5), losses=st.lists(st.integers(0, 11), max_size=4, unique=True), jobs=st.integers(1, 12))
def test_with_lost_workers_each_task_ends_once_and_no_thread_stays(count: int, losses: list[int], jobs: int) -> None:
    before, lock, gone, calls = threading.active_count(), threading.Lock(), set[int](), Counter[int]()

    def ask(_: int, number: int) -> int:
        with lock:
            calls[number] += 1
            is_lost = number in losses and number not in gone and len(pool) > 1
            gone.add(number) if is_lost else None
        if is_lost:
            raise EngineUnavailable(str(number))
        return number

    with WorkerPool(range(count)) as pool:
        tasks = [pool.submit(partial(ask, number=n)) for n in range(jobs)]
        pool.wait(lambda: all(task.result.done() for task in tasks))
        failed = [n for n, task in enumerate(tasks) if task.result.exception() is not None]
        assert not failed or len(pool) == 1  # only the last worker fails at a task
        for n, task in enumerate(tasks):
            if n not in failed:
                assert task.result.result() == n
            assert calls[n] == 1 + (n in gone and n not in failed)
        assert len(pool) == count - len(gone) + len(failed)
        assert not pool._running
    assert threading.active_count() == before
