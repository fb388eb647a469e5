"""Stations side by side: jobs are shared out, and done elsewhere where a station is lost or slow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import until
from qdqtune.engines import EngineSpec, crew, devices
from qdqtune.engines.crew import Crew, check_alike, shared, to_spare
from qdqtune.engines.devices import Device, allot, cores_for, leased, pinned
from qdqtune.engines.process import WorkerProcess
from qdqtune.engines.runner import Runner
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable
from workers import Workers

FAKE = EngineSpec("fake")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="cores are pinned on Linux only")


def job(number: int) -> Callable[[str], tuple[int, str]]:
    return lambda station: (number, station)


class TestJobs:
    def test_every_job_is_answered_once_and_all_stations_work(self) -> None:
        meeting = threading.Barrier(3)

        def met(_: str) -> int:
            return meeting.wait(timeout=60)

        assert sorted(Crew(["a", "b", "c"]).answers([met] * 3)) != []
        answers = dict(Crew(["a", "b"]).answers([job(n) for n in range(7)]))
        assert sorted(answers) == list(range(7))
        assert all(answers[n][0] == n for n in answers)

    def test_one_station_does_them_when_they_are_asked_for(self) -> None:
        done: list[int] = []
        answers = Crew(["a"]).answers([lambda _, n=n: done.append(n) for n in range(3)])  # type: ignore[misc]
        next(answers)
        assert done == [0]

    def test_a_job_of_a_lost_station_is_done_by_another(self) -> None:
        told: list[str] = []
        lost = threading.Event()

        def ask(station: str) -> str:
            if station == "bad":
                lost.set()
                raise EngineUnavailable("its node is gone")
            assert lost.wait(timeout=60)
            return station

        stations = Crew(["bad", "good"], told.append)
        assert [answer for _, answer in stations.answers([ask] * 4)] == ["good"] * 4
        assert list(stations) == ["good"]
        assert "its node is gone" in told[0]
        assert len(told) == 1

    def test_parts_of_a_job_are_done_by_who_has_none(self) -> None:
        meeting = threading.Barrier(3)

        def met(station: str) -> str:
            meeting.wait(timeout=60)
            return station

        def ask(station: str) -> tuple[str, list[str | None]]:
            until(lambda: to_spare() == 2)
            return shared(lambda: met(station), [met] * 2)

        ((_, (own, others)),) = Crew(["a", "b", "c"]).answers([ask])
        assert {own, *others} == {"a", "b", "c"}

    def test_what_nobody_does_of_a_job_is_left_to_who_is_at_it(self) -> None:
        gone = threading.Event()

        def part(_: str) -> str:
            gone.set()
            raise EngineUnavailable("its node is gone")

        def ask(station: str) -> list[str | None]:
            until(lambda: to_spare() == 1)
            return shared(lambda: gone.wait(timeout=60), [part, lambda _: "never begun"])[1]

        told: list[str] = []
        assert list(Crew(["a", "b"], told.append).answers([ask])) == [(0, [None, None])]
        assert len(told) == 1
        assert (to_spare(), shared(lambda: 1, [part])) == (None, (1, [None]))

    def test_without_stations_left_it_ends(self) -> None:
        def ask(_: str) -> None:
            raise EngineUnavailable("no device")

        with pytest.raises(EngineUnavailable, match="no device"):
            list(Crew(["a", "b"]).answers([ask] * 3))

    def test_what_a_job_raises_reaches_the_caller_and_ends_the_others(self) -> None:
        def ask(station: str) -> str:
            raise EngineFailure(f"refused by {station}")

        before = threading.active_count()
        with pytest.raises(EngineFailure, match="refused by"):
            list(Crew(["a", "b"]).answers([ask] * 5))
        assert threading.active_count() == before

    def test_a_slow_station_is_not_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: Workers
    ) -> None:
        monkeypatch.setattr(crew, "LEAST_PATIENCE", 0.05)
        monkeypatch.setattr(crew, "PATIENCE", 0.0)
        release = threading.Event()
        taken = threading.Event()

        def ask(station: str) -> str:
            if station == "slow":
                taken.set()
                release.wait()
            else:
                assert taken.wait(timeout=60)
            return station

        answers = Crew(["slow", "quick"]).answers([ask] * 3)
        assert [next(answers)[1] for _ in range(3)] == ["quick"] * 3
        release.set()
        answers.close()


@pytest.mark.usefixtures("workers")
class TestDevices:
    def test_devices_that_differ_are_refused_by_name(self, tmp_path: Path, workers: Workers) -> None:
        specs = [FAKE, FAKE, EngineSpec("fake", {"asymmetric": True})]
        runners = [Runner(spec, log_dir=tmp_path, device=Device(f"worker-{n}")) for n, spec in enumerate(specs, 1)]
        check_alike(runners[:2])
        with pytest.raises(EngineUnavailable, match=r"worker-3 has .*, worker-1 has "):
            check_alike(runners)
        assert [d.name for d in workers.devices[:2]] in (["worker-1", "worker-2"], ["worker-2", "worker-1"])

    def test_cores_are_shared_out_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "physical_cores", lambda: [[0, 4], [1, 5], [2, 6], [3, 7]])
        monkeypatch.setattr(devices, "is_free", lambda part: part != "core-2")
        assert [d.cores for d in allot(FAKE, 3)] == [(0,), (1,), (6,)]
        assert [d.cores for d in allot(FAKE, 3, 2)] == [(0, 4), (1, 5), (6, 3)]
        with pytest.raises(BadOption, match="4 of 2 cores each want 8 cores, and there are 7, the others being in use"):
            allot(FAKE, 4, 2)

    def test_a_worker_has_a_core_for_each_thread(self) -> None:
        assert cores_for(EngineSpec("onnxruntime", {"threads": 4}), None) == 4
        with pytest.raises(BadOption, match="--cores-per-worker 2 is too few for --threads 4"):
            cores_for(EngineSpec("onnxruntime", {"threads": 4}), 2)

    def test_each_worker_on_gpus_gets_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "physical_cores", lambda: [[n] for n in range(8)])
        monkeypatch.setattr(devices, "is_free", lambda _: True)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
        asked = allot(EngineSpec("tensorrt"), 2)
        assert [d.environment for d in asked] == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
        with pytest.raises(BadOption, match="--workers 3 wants a GPU each, and this host has 2"):
            allot(EngineSpec("trtexec"), 3)
        assert devices.needs_gpu(EngineSpec("onnxruntime", {"provider": "CUDAExecutionProvider"}))
        assert not devices.needs_gpu(EngineSpec("tensorrt-rtx", {"target": "sm89"}))


@LINUX
def test_a_device_is_held_until_the_process_that_has_it_is_gone(tmp_path: Path) -> None:
    device = Device("mine", gpu=f"test-{os.getpid()}")
    assert devices.is_free(device.parts[0])
    with leased(device) as held:
        sleeper = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                                   stdin=subprocess.PIPE, pass_fds=held)  # fmt: skip
    assert not devices.is_free(device.parts[0])
    with pytest.raises(EngineUnavailable, match="in use by another run"), leased(device, 0.0):
        pass
    sleeper.communicate()
    with leased(device, 0.0):
        assert not devices.is_free(device.parts[0])


@LINUX
def test_a_worker_runs_on_its_cores_only(tmp_path: Path) -> None:
    (core, *_), *_ = devices.physical_cores()
    before = os.sched_getaffinity(0)
    with pinned([core]):
        asked = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(core)]
    assert os.sched_getaffinity(0) == before
    worker = WorkerProcess(tmp_path / "worker.log", Device("one", gpu=f"pinned-{os.getpid()}"))
    assert not devices.is_free(f"gpu-pinned-{os.getpid()}")
    worker.kill()
    assert devices.is_free(f"gpu-pinned-{os.getpid()}")
