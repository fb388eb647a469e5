"""Devices: cores and GPUs that workers get, hold and give back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qdqtune.engines import EngineSpec, devices
from qdqtune.engines.devices import Device, allot, cores_for, divide_cores, leased
from qdqtune.errors import BadOption, EngineUnavailable

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="cores are pinned on Linux only")


class TestDevices:
    def test_physical_cores_are_not_divided_while_there_are_enough(self) -> None:
        free = [[0, 4], [1, 5], [6], [3, 7]]
        assert divide_cores(free, 3, 1) == [(0,), (1,), (6,)]
        assert divide_cores(free, 3, 2) == [(0, 4), (1, 5), (6, 3)]
        with pytest.raises(BadOption, match="4 of 2 cores each want 8 cores, and there are 7, the others being in use"):
            divide_cores(free, 4, 2, are_others_in_use=True)

    def test_a_worker_has_a_core_for_each_thread(self) -> None:
        assert cores_for(EngineSpec("onnxruntime", {"threads": 4}), None) == 4
        with pytest.raises(BadOption, match="`cores_per_worker` 2 is too few for `threads` 4"):
            cores_for(EngineSpec("onnxruntime", {"threads": 4}), 2)

    @pytest.mark.usefixtures("eight_cores")
    def test_each_worker_on_gpus_gets_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
        asked = allot(EngineSpec("tensorrt"), 2)
        assert [d.environment for d in asked] == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
        with pytest.raises(BadOption, match="`workers` 3 wants a GPU each, and this host has 2"):
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
