"""Runs a TensorRT engine on a GPU: calls of the CUDA runtime, and an execution context with its stream and buffers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from qdqtune.errors import EngineFailure, EngineUnavailable, one_line
from qdqtune.types import Array, Tensors

NUMPY_TYPES: Mapping[str, Any] = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16, "FP8": ml_dtypes.float8_e4m3fn,
    "INT8": np.int8, "UINT8": np.uint8, "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_,
}  # fmt: skip
"""NumPy's types by TensorRT's names."""


class CudaError(Exception):
    """A call of CUDA failed. Mostly the device is lost to the process, so this is not caught and ends the worker."""


class Cuda:
    """The CUDA runtime on the current device (CUDA_VISIBLE_DEVICES chooses another). `driver` is the newest version of
    CUDA that the driver runs, `target` the architecture, as in `sm89`."""

    def __init__(self) -> None:
        try:
            self._api: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as failure:
            raise EngineUnavailable("cuda-python is missing, or too old: pip install cuda-python") from failure
        try:
            error, count = self._api.cudaGetDeviceCount()
        except RuntimeError as failure:  # before version 13 cuda-python looks for the driver at the first call
            raise EngineUnavailable(f"this machine has no NVIDIA driver: {one_line(failure)}") from failure
        if int(error) or not count:
            raise EngineUnavailable(f"CUDA can use no NVIDIA GPU of this machine ({error.name}); check nvidia-smi")
        properties = self.call("cudaGetDeviceProperties", self.call("cudaGetDevice"))
        version = self.call("cudaDriverGetVersion")
        self.name = properties.name.rstrip(b"\0").decode()
        self.compute_capability = f"{properties.major}.{properties.minor}"
        self.target = f"sm{properties.major}{properties.minor}"
        self.driver = f"CUDA {version // 1000}.{version % 1000 // 10}"

    def call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._api, name)(*arguments)
        if int(error) == int(self._api.cudaError_t.cudaErrorMemoryAllocation):
            raise EngineFailure("the GPU has too little free memory for this model")
        if int(error):
            raise CudaError(f"{name}: {error.name}")
        return results[0] if results else None

    def check(self) -> None:
        self._api.cudaGetLastError()  # clears an error that was reported before
        self.call("cudaDeviceSynchronize")

    def copy(self, target: int, source: int, nbytes: int, direction: str, stream: Any) -> None:
        """Copy memory after all earlier work on the stream, and wait; `direction` is as in `HostToDevice`."""
        kind = getattr(self._api.cudaMemcpyKind, f"cudaMemcpy{direction}")
        self.call("cudaMemcpyAsync", target, source, nbytes, kind, stream)
        self.call("cudaStreamSynchronize", stream)

    def seconds(self, stream: Any, work: Callable[[], None]) -> float:
        """Seconds that the GPU takes for what `work` puts on the stream."""
        start, stop = self.call("cudaEventCreate"), self.call("cudaEventCreate")
        try:
            self.call("cudaEventRecord", start, stream)
            work()
            self.call("cudaEventRecord", stop, stream)
            self.call("cudaEventSynchronize", stop)
            return 1e-3 * float(self.call("cudaEventElapsedTime", start, stop))
        finally:
            self.call("cudaEventDestroy", start)
            self.call("cudaEventDestroy", stop)

    def capture(self, stream: Any, work: Callable[[], None]) -> Any | None:
        """Record what `work` puts on the stream as a CUDA graph, ready to launch; None where that is impossible, or
        `work` raises EngineFailure."""
        api = self._api
        self.call("cudaStreamBeginCapture", stream, api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
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
        self.call("cudaGraphDestroy", graph)
        return None if int(error) else executable


class Execution:
    """Runs one engine; all methods raise EngineFailure where TensorRT refuses. Buffers grow with the shapes."""

    def __init__(self, trt: Any, cuda: Cuda, engine: Any) -> None:
        self._trt, self._cuda, self._engine = trt, cuda, engine
        self._context = engine.create_execution_context()
        if self._context is None:
            raise EngineFailure("TensorRT: no execution context; the GPU may have too little free memory")
        self._stream = cuda.call("cudaStreamCreate")
        self._buffers: dict[str, tuple[int, int]] = {}  # address and size
        self._host: dict[str, Array] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._graph: Any | None = None
        self._can_capture = True
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self._outputs = [n for n in names if n not in self._inputs]
        self._allocator = _allocator(trt, self._reserve)

    def _bind(self, inputs: Tensors) -> None:
        shapes = {name: np.shape(array) for name, array in inputs.items()}
        if shapes != self._shapes:
            self._drop_graph()
        for name in self._inputs:
            if name not in inputs:
                raise EngineFailure(f"TensorRT: there is no array for input {name!r}")
            array = np.asarray(inputs[name], self._dtype(name), order="C")
            if not self._context.set_input_shape(name, array.shape):
                raise EngineFailure(f"TensorRT: input {name!r} cannot have sizes {array.shape} in this engine")
            if self._engine.get_tensor_location(name) == self._trt.TensorLocation.HOST:  # a shape, which the CPU reads
                self._host[name] = array
                self._drop_graph()  # its values are part of the graph
                self._set_address(name, array.ctypes.data)
            else:
                address = self._reserve(name, array.nbytes)
                self._set_address(name, address)
                self._cuda.copy(address, array.ctypes.data, array.nbytes, "HostToDevice", self._stream)
        unknown = self._context.infer_shapes()
        if unknown:
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

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(int(self._stream)):
            raise EngineFailure("TensorRT: the inference was refused")

    def run(self, inputs: Tensors) -> dict[str, Array]:
        self._bind(inputs)
        self._enqueue()
        self._cuda.call("cudaStreamSynchronize", self._stream)
        arrays = {}
        for name in self._outputs:
            shape = self._allocator.shapes.get(name, tuple(self._context.get_tensor_shape(name)))
            arrays[name] = np.empty(shape, self._dtype(name))
            target, source, nbytes = arrays[name].ctypes.data, self._buffers[name][0], arrays[name].nbytes
            self._cuda.copy(target, source, nbytes, "DeviceToHost", self._stream)
        return arrays

    def time(self, inputs: Tensors, runs: int) -> float:
        """GPU seconds per inference, the mean of `runs`, launched as a CUDA graph where possible."""
        self._bind(inputs)
        if self._graph is None and self._can_capture:
            self._enqueue()  # the first inference of new shapes does more work, which cannot be captured
            self._cuda.call("cudaStreamSynchronize", self._stream)
            self._graph = self._cuda.capture(self._stream, self._enqueue)
            self._can_capture = self._graph is not None

        def work() -> None:
            for _ in range(runs):
                if self._graph is None:
                    self._enqueue()
                else:
                    self._cuda.call("cudaGraphLaunch", self._graph, self._stream)

        return self._cuda.seconds(self._stream, work) / runs

    def report(self, inputs: Tensors, runs: int) -> tuple[str, Sequence[tuple[str, float]]]:
        """The engine inspector's JSON; and each layer's name and median milliseconds over `runs` inferences."""
        self._bind(inputs)
        profiler = _profiler(self._trt)
        self._context.profiler = profiler
        samples = []
        for _ in range(1 + runs):
            profiler.calls.clear()
            self._enqueue()  # returns after the profiler has reported
            self._cuda.call("cudaStreamSynchronize", self._stream)
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
            self._cuda.call("cudaFree", address)
        self._buffers.clear()
        self._cuda.call("cudaStreamDestroy", self._stream)

    def _set_address(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            raise EngineFailure(f"TensorRT: no memory can be bound to {name!r}")

    def _reserve(self, name: str, size: int) -> int:
        """The address of a buffer on the GPU for a tensor, at least `size` bytes long."""
        address, capacity = self._buffers.get(name, (0, -1))
        if size > capacity:
            self._drop_graph()  # it holds the old address
            if address:
                del self._buffers[name]
                self._cuda.call("cudaFree", address)
            address = int(self._cuda.call("cudaMalloc", max(1, size)))  # an address must not be null
            self._buffers[name] = address, size
        return address

    def _dtype(self, name: str) -> Any:
        return NUMPY_TYPES[self._engine.get_tensor_dtype(name).name]

    def _drop_graph(self) -> None:
        if self._graph is not None:
            self._cuda.call("cudaGraphExecDestroy", self._graph)
            self._graph = None


def _profiler(trt: Any) -> Any:
    """A profiler that records the name and the milliseconds of each layer."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.calls: list[tuple[str, float]] = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.calls.append((layer_name, ms))

    return Profiler()


def _allocator(trt: Any, reserve: Callable[[str, int], int]) -> Any:
    """An allocator for outputs whose size depends on the data; it records their shapes."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shapes: dict[str, tuple[int, ...]] = {}

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
            return reserve(tensor_name, size)  # CUDA aligns to 256 bytes and more

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.shapes[tensor_name] = tuple(shape)

    return Allocator()
