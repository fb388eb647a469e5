"""The little of CUDA that the TensorRT engines need, through cuda-python: memory, streams, events, graphs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qdqtune.errors import EngineFailure, EngineUnavailable, one_line
from qdqtune.types import Array

MODULES = ("cuda.bindings.runtime", "cuda.cudart")
"""Where the runtime API is, in newer and in older releases of cuda-python."""


@dataclass(frozen=True)
class Device:
    """The GPU that this process uses. `driver` is the newest CUDA version that its driver runs."""

    name: str
    compute_capability: str
    driver: str

    @property
    def target(self) -> str:
        """The architecture, as in `sm89`."""
        return "sm" + self.compute_capability.replace(".", "")


class CudaError(Exception):
    """The device does not answer as it should. After most such errors a process cannot use it any more.

    So nobody below the process catches it: the worker ends, and the next one starts afresh.
    """


class Cuda:
    """The CUDA runtime on the current device (CUDA_VISIBLE_DEVICES chooses another).

    Raises:
        EngineUnavailable: cuda-python is missing, or there is no GPU that it can use.
    """

    def __init__(self) -> None:
        self._api = _runtime()
        try:
            error, count = self._api.cudaGetDeviceCount()
        except RuntimeError as failure:  # cuda-python 12.2 looks for the driver at the first call
            raise EngineUnavailable(f"this machine has no NVIDIA driver: {one_line(failure)}") from failure
        if int(error) or not count:
            words = error.name if int(error) else "no device is visible"
            raise EngineUnavailable(f"this machine has no NVIDIA GPU that CUDA can use ({words}); check nvidia-smi")
        number = self._call("cudaGetDevice")
        properties = self._call("cudaGetDeviceProperties", number)
        version = self._call("cudaDriverGetVersion")
        self.device = Device(
            properties.name.rstrip(b"\0").decode(),
            f"{properties.major}.{properties.minor}",
            f"CUDA {version // 1000}.{version % 1000 // 10}",
        )

    def stream(self) -> Any:
        """A new stream, to be freed by `free_stream`. `int` of it is its handle."""
        return self._call("cudaStreamCreate")

    def free_stream(self, stream: Any) -> None:
        """Destroy a stream."""
        self._call("cudaStreamDestroy", stream)

    def synchronize(self, stream: Any) -> None:
        """Wait for all work on a stream."""
        self._call("cudaStreamSynchronize", stream)

    def check(self) -> None:
        """Make sure that the device still works.

        Raises:
            CudaError: it does not.
        """
        self._api.cudaGetLastError()  # an error that has been reported and passed
        self._call("cudaDeviceSynchronize")

    def allocate(self, nbytes: int) -> int:
        """Address of new device memory; at least one byte, as an address must differ from null."""
        return int(self._call("cudaMalloc", max(1, nbytes)))

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._call("cudaFree", address)

    def upload(self, address: int, array: Array, stream: Any) -> None:
        """Copy an array to the device, and wait until it is there."""
        kind = self._api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, stream)
        self.synchronize(stream)

    def download(self, address: int, shape: tuple[int, ...], dtype: Any, stream: Any) -> Array:
        """The array at an address, once all work on the stream is done."""
        array = np.empty(shape, dtype)
        kind = self._api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, stream)
        self.synchronize(stream)
        return array

    def seconds(self, stream: Any, work: Callable[[], None]) -> float:
        """How long the device is busy with what `work` puts on the stream."""
        start, stop = self._call("cudaEventCreate"), self._call("cudaEventCreate")
        try:
            self._call("cudaEventRecord", start, stream)
            work()
            self._call("cudaEventRecord", stop, stream)
            self._call("cudaEventSynchronize", stop)
            return 1e-3 * float(self._call("cudaEventElapsedTime", start, stop))
        finally:
            self._call("cudaEventDestroy", start)
            self._call("cudaEventDestroy", stop)

    def capture(self, stream: Any, work: Callable[[], None]) -> Any | None:
        """A graph of what `work` puts on the stream, ready to launch; None where CUDA cannot capture that.

        `work` may fail with EngineFailure under capture: that is a None as well.
        """
        api = self._api
        self._call("cudaStreamBeginCapture", stream, api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        captured = True
        try:
            work()
        except EngineFailure:
            captured = False
        error, graph = api.cudaStreamEndCapture(stream)  # also ends a capture that has failed
        api.cudaGetLastError()  # what went wrong in the capture is no error of the calls that follow
        if int(error):
            return None
        error, executable = api.cudaGraphInstantiateWithFlags(graph, 0) if captured else (1, None)
        self._call("cudaGraphDestroy", graph)
        return None if int(error) else executable

    def launch(self, graph: Any, stream: Any) -> None:
        """Put a captured graph on a stream."""
        self._call("cudaGraphLaunch", graph, stream)

    def free_graph(self, graph: Any) -> None:
        """Destroy a captured graph."""
        self._call("cudaGraphExecDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a runtime function.

        Raises:
            EngineFailure: the device has too little memory.
            CudaError: anything else.
        """
        error, *results = getattr(self._api, name)(*arguments)
        if int(error) == int(self._api.cudaError_t.cudaErrorMemoryAllocation):
            raise EngineFailure("the GPU has too little free memory for this model")
        if int(error):
            raise CudaError(f"{name}: {error.name}")
        return results[0] if results else None


def _runtime() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise EngineUnavailable("cuda-python is missing: pip install cuda-python")
