"""Worker processes as their parent sees them."""

import errno
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from qdqtune.engines import EngineSpec, devices, process
from qdqtune.engines.devices import Device, leased
from qdqtune.engines.execution import OVERTIME, Execution
from qdqtune.engines.process import start_worker
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineUnavailable
from workers import InProcess, Workers

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="cores are pinned on Linux only")


@LINUX
def test_a_worker_runs_on_its_cores_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (core, *_), *_ = devices.physical_cores()
    before = os.sched_getaffinity(0)
    with monkeypatch.context() as patch:
        patch.setattr(devices, "reserved", lambda _: nullcontext([]))  # another test may have reserved the core
        with leased(Device("one", (core,))):
            asked = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
            done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(core)]
    assert os.sched_getaffinity(0) == before
    device = Device("one", gpu=f"pinned-{os.getpid()}")
    with Runner(EngineSpec("fake"), log_dir=tmp_path, device=device) as runner:
        runner.describe()
        assert not devices.is_free(device)
    assert devices.is_free(device)


def test_a_process_that_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(process.subprocess, "Popen", refused)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineUnavailable, match="no process for the engine can be started"):
        start_worker(tmp_path / "worker.log")
    assert [path.name for path in tmp_path.iterdir()] == ["worker.log"]
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.parametrize(("left", "limit"), [(None, 600.0), (300.0, 300.0), (0.0, OVERTIME), (-5.0, OVERTIME)])
def test_a_time_budget_ends_requests_to_an_engine_that_hangs(tmp_path: Path, left: float | None, limit: float) -> None:
    """While a measurement in hand may be finished."""
    limits = list[float]()

    class Recorded(InProcess):
        def ask(self, name: str, arguments: tuple[Any, ...], limit: float) -> Any:
            limits.append(limit)
            return super().ask(name, arguments, limit)

    execution = Execution(600.0, None if left is None else time.monotonic() + left)
    start = lambda *_: Recorded(Workers())  # noqa: E731
    with Runner(EngineSpec("fake"), log_dir=tmp_path, execution=execution, start=start) as runner:
        runner.describe()
    assert limits[-1] == pytest.approx(limit, abs=60.0 if left == 300.0 else 0.0)
