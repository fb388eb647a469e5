"""A pool of workers: each job is done once, and again where a worker is lost."""

import itertools
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import Device
from qdqtune.engines.execution import CHECK_SECONDS, cancelled_by, raise_if_cancelled
from qdqtune.engines.pool import WorkerPool
from qdqtune.engines.runner import Runner, check_same_kind
from qdqtune.errors import EngineFailure, EngineUnavailable
from workers import Workers


def wait(event: threading.Event) -> None:
    """Wait as if for an engine."""
    while not event.wait(CHECK_SECONDS / 10):
        raise_if_cancelled()


class TestResults:
    def test_all_workers_work(self) -> None:
        barrier = threading.Barrier(3)

        def waits_for_others(_: str) -> int:
            return barrier.wait(timeout=60)

        results = WorkerPool(["a", "b", "c"]).results([waits_for_others] * 3)
        assert sorted(arrived for _, arrived in results) == [0, 1, 2]

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

        pool = WorkerPool(["bad", "good"], notes.append)
        assert [result for _, result in pool.results([ask] * 4)] == ["good"] * 4
        assert list(pool) == ["good"]
        assert notes == ["a worker is lost, and the others go on with its job: its node is gone"]

    def test_an_error_of_a_job_is_raised_and_cancels_the_others(self) -> None:
        never = threading.Event()

        def ask(_: str, number: int) -> None:
            if number == 1:
                raise EngineFailure("refused")
            wait(never)

        before = threading.active_count()
        with pytest.raises(EngineFailure, match="refused"):
            list(WorkerPool(["a", "b"]).results([partial(ask, number=n) for n in range(5)]))
        assert threading.active_count() == before

    def test_closing_the_iterator_cancels_what_runs_and_the_pool_goes_on(self) -> None:
        never, begun = threading.Event(), threading.Barrier(3)

        def ask(_: str) -> None:
            begun.wait(timeout=60)
            wait(never)

        caller, raised = threading.Thread(target=begun.wait, args=(60,)), threading.Event()
        main = threading.current_thread()

        def check() -> None:
            if threading.current_thread() is main and not caller.is_alive() and not raised.is_set():
                raised.set()
                raise KeyboardInterrupt

        pool, before = WorkerPool(["a", "b"]), threading.active_count()
        results = pool.results([ask] * 4)
        caller.start()
        with cancelled_by(check), pytest.raises(KeyboardInterrupt):
            next(results)
        assert threading.active_count() == before
        assert dict(pool.results([lambda _: "done"])) == {0: "done"}


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

    pool, results = WorkerPool(range(count)), list[tuple[int, int]]()
    try:
        results.extend(pool.results([partial(ask, number=n) for n in range(jobs)]))
    except EngineUnavailable:
        assert len(pool) == 1  # only the last worker fails at a job
    else:
        assert sorted(results) == [(n, n) for n in range(jobs)]
        assert calls == Counter({n: 1 + (n in gone) for n in range(jobs)})
        assert len(pool) == count - len(gone)
    assert threading.active_count() == before


# Devices for the workers of a run: one kind only
KINDS = (EngineSpec("fake"), EngineSpec("fake", {"asymmetric": True}), EngineSpec("fake", {"threads": 2}))


@pytest.mark.parametrize("kinds", [kinds for n in (1, 2, 3) for kinds in itertools.product(range(3), repeat=n)])
def test_devices_of_several_kinds_are_refused_by_name(kinds: tuple[int, ...], tmp_path: Path, workers: Workers) -> None:
    runners = [Runner(KINDS[kind], log_dir=tmp_path, device=Device(f"worker-{n}")) for n, kind in enumerate(kinds, 1)]
    other = next((n for n, kind in enumerate(kinds, 1) if kind != kinds[0]), None)
    if other is None:
        check_same_kind(runners)
    else:
        with pytest.raises(EngineUnavailable, match=rf"worker-{other} has .*, worker-1 has "):
            check_same_kind(runners)
    assert {device.name for device in workers.devices} == {runner.device.name for runner in runners}
