"""A TensorRT engine on a GPU: the calls of the CUDA runtime, and an execution context with its stream and buffers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from qdqtune.errors import EngineFailure, EngineUnavailable, one_line
from qdqtune.types import Array, Tensors

CUDA_MODULES = ("cuda.bindings.runtime", "cuda.cudart")
"""The module of the runtime API, in newer and in older releases of cuda-python."""

NUMPY_TYPES: Mapping[str, Any] = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16, "FP8": ml_dtypes.float8_e4m3fn,
    "INT8": np.int8, "UINT8": np.uint8, "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_,
}  # fmt: skip
"""TensorRT's name of an element type to numpy's type."""


@dataclass(frozen=True)
class CudaDevice:
    """The GPU that this process uses. `driver` is the newest CUDA version that its driver runs."""

    name: str
    compute_capability: str
    driver: str

    @property
    def target(self) -> str:
        """The architecture, as in `sm89`."""
        return "sm" + self.compute_capability.replace(".", "")


class CudaError(Exception):
    """A call of CUDA failed. After most such errors the process cannot use the device any more, so this is not caught:
    the worker ends, and another one starts.
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
        self.device = CudaDevice(
            properties.name.rstrip(b"\0").decode(),
            f"{properties.major}.{properties.minor}",
            f"CUDA {version // 1000}.{version % 1000 // 10}",
        )

    def stream(self) -> Any:
        """A new stream, to be freed by `free_stream`. `int(stream)` is its handle."""
        return self._call("cudaStreamCreate")

    def free_stream(self, stream: Any) -> None:
        self._call("cudaStreamDestroy", stream)

    def synchronize(self, stream: Any) -> None:
        self._call("cudaStreamSynchronize", stream)

    def check(self) -> None:
        self._api.cudaGetLastError()  # clears an error that was reported before
        self._call("cudaDeviceSynchronize")

    def allocate(self, nbytes: int) -> int:
        """Address of new device memory, of at least one byte: an address must not be null."""
        return int(self._call("cudaMalloc", max(1, nbytes)))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def upload(self, address: int, array: Array, stream: Any) -> None:
        """Copy an array to the device, and wait for the copy."""
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
        """Seconds that the device is busy with what `work` puts on the stream."""
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
        """A graph of what `work` puts on the stream, ready to launch; None where CUDA cannot capture it, or `work`
        fails with EngineFailure."""
        api = self._api
        self._call("cudaStreamBeginCapture", stream, api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        captured = True
        try:
            work()
        except EngineFailure:
            captured = False
        error, graph = api.cudaStreamEndCapture(stream)  # needed after a failed capture as well
        api.cudaGetLastError()  # an error in the capture is not one of later calls
        if int(error):
            return None
        error, executable = api.cudaGraphInstantiateWithFlags(graph, 0) if captured else (1, None)
        self._call("cudaGraphDestroy", graph)
        return None if int(error) else executable

    def launch(self, graph: Any, stream: Any) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def free_graph(self, graph: Any) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a runtime function."""
        error, *results = getattr(self._api, name)(*arguments)
        if int(error) == int(self._api.cudaError_t.cudaErrorMemoryAllocation):
            raise EngineFailure("the GPU has too little free memory for this model")
        if int(error):
            raise CudaError(f"{name}: {error.name}")
        return results[0] if results else None


def _runtime() -> Any:
    for name in CUDA_MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise EngineUnavailable("cuda-python is missing: pip install cuda-python")


class Execution:
    """Runs one engine. Buffers are allocated when a shape first needs them, and grow when a larger one does.

    Call `bind` before the other methods. All raise EngineFailure where TensorRT refuses.
    """

    def __init__(self, trt: Any, cuda: Cuda, engine: Any) -> None:
        self._trt, self._cuda, self._engine = trt, cuda, engine
        self._context = engine.create_execution_context()
        if self._context is None:
            raise EngineFailure("TensorRT: no execution context; the GPU may have too little free memory")
        self._stream = cuda.stream()
        self._buffers: dict[str, tuple[int, int]] = {}  # address and size
        self._host: dict[str, Array] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._graph: Any | None = None
        self._can_capture = True
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self._outputs = [n for n in names if n not in self._inputs]
        self._allocator = _allocator(trt, self._reserve)

    def bind(self, inputs: Tensors) -> None:
        """Copy the inputs to the device, and allocate the outputs."""
        shapes = {name: np.shape(array) for name, array in inputs.items()}
        if shapes != self._shapes:
            self._drop_graph()
        for name in self._inputs:
            if name not in inputs:
                raise EngineFailure(f"TensorRT: there is no array for input {name!r}")
            self._bind_input(name, np.asarray(inputs[name], self._dtype(name), order="C"))
        if unknown := self._context.infer_shapes():
            raise EngineFailure(f"TensorRT: the shapes of {', '.join(unknown)} remain unknown")
        for name in self._outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            if -1 in shape:  # depends on values: known during the inference only
                self._context.set_output_allocator(name, self._allocator)
                self._can_capture = False
            else:
                size = math.prod(shape) * np.dtype(self._dtype(name)).itemsize
                self._set_address(name, self._reserve(name, size))
        self._shapes = shapes

    def enqueue(self) -> None:
        if not self._context.execute_async_v3(int(self._stream)):
            raise EngineFailure("TensorRT: the inference was refused")

    def outputs(self) -> dict[str, Array]:
        """Wait for all work on the stream, and return the graph outputs by name."""
        self._cuda.synchronize(self._stream)
        return {
            name: self._cuda.download(self._buffers[name][0], self._shape(name), self._dtype(name), self._stream)
            for name in self._outputs
        }

    def seconds(self, runs: int) -> float:
        """GPU seconds per inference over `runs` of them, launched as a CUDA graph where that can be captured."""
        if self._graph is None and self._can_capture:
            self.enqueue()  # the first inference of new shapes does more work, which cannot be captured
            self._cuda.synchronize(self._stream)
            self._graph = self._cuda.capture(self._stream, self.enqueue)
            self._can_capture = self._graph is not None

        def work() -> None:
            for _ in range(runs):
                if self._graph is None:
                    self.enqueue()
                else:
                    self._cuda.launch(self._graph, self._stream)

        return self._cuda.seconds(self._stream, work) / runs

    def report(self, runs: int) -> tuple[str, Sequence[tuple[str, float]]]:
        """The engine inspector's JSON; and each layer's name and median milliseconds over `runs` inferences."""
        profiler = _profiler(self._trt)
        self._context.profiler = profiler
        samples = []
        for _ in range(1 + runs):
            profiler.calls.clear()
            self.enqueue()  # returns after the profiler has reported
            self._cuda.synchronize(self._stream)
            samples.append(list(profiler.calls))
        inspector = self._engine.create_engine_inspector()
        inspector.execution_context = self._context
        text = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        columns = zip(*samples[1:], strict=True)  # without the first, which warms up
        return text, [(calls[0][0], median(ms for _, ms in calls)) for calls in columns]

    def close(self) -> None:
        self._drop_graph()
        # The allocator refers to this object: both, and the weights, would stay until the next garbage collection.
        del self._context, self._allocator, self._engine
        for address, _ in self._buffers.values():
            self._cuda.free(address)
        self._buffers.clear()
        self._cuda.free_stream(self._stream)

    def _bind_input(self, name: str, array: Array) -> None:
        if not self._context.set_input_shape(name, array.shape):
            raise EngineFailure(f"TensorRT: input {name!r} cannot have sizes {array.shape} in this engine")
        if self._engine.get_tensor_location(name) == self._trt.TensorLocation.HOST:  # a shape, which the CPU reads
            self._host[name] = array
            self._drop_graph()  # its values are part of the graph
            self._set_address(name, array.ctypes.data)
        else:
            address = self._reserve(name, array.nbytes)
            self._set_address(name, address)
            self._cuda.upload(address, array, self._stream)

    def _set_address(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            raise EngineFailure(f"TensorRT: no memory can be bound to {name!r}")

    def _reserve(self, name: str, size: int) -> int:
        """Address of at least `size` bytes on the device for a tensor."""
        address, capacity = self._buffers.get(name, (0, -1))
        if size > capacity:
            self._drop_graph()  # it holds the old address
            if address:
                del self._buffers[name]
                self._cuda.free(address)
            address = self._cuda.allocate(size)
            self._buffers[name] = address, size
        return address

    def _shape(self, name: str) -> tuple[int, ...]:
        known = self._allocator.shapes
        return known[name] if name in known else tuple(self._context.get_tensor_shape(name))

    def _dtype(self, name: str) -> Any:
        return NUMPY_TYPES[self._engine.get_tensor_dtype(name).name]

    def _drop_graph(self) -> None:
        if self._graph is not None:
            self._cuda.free_graph(self._graph)
            self._graph = None


def _profiler(trt: Any) -> Any:
    """A profiler that keeps the name and the milliseconds of each layer that TensorRT reports."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.calls: list[tuple[str, float]] = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.calls.append((layer_name, ms))

    return Profiler()


def _allocator(trt: Any, reserve: Callable[[str, int], int]) -> Any:
    """An allocator of outputs whose size is known during the inference only; it keeps their shapes."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shapes: dict[str, tuple[int, ...]] = {}

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
            return reserve(tensor_name, size)  # CUDA aligns to 256 bytes and more

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.shapes[tensor_name] = tuple(shape)

    return Allocator()
