"""A TensorRT engine at work: one execution context with its stream and its buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from qdqtune.engines.tensorrt.cuda import Cuda
from qdqtune.errors import EngineFailure
from qdqtune.types import Array, Tensors

DTYPES: Mapping[str, Any] = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16, "FP8": ml_dtypes.float8_e4m3fn,
    "INT8": np.int8, "UINT8": np.uint8, "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_,
}  # fmt: skip
"""TensorRT's name of an element type to numpy's."""


class Execution:
    """Runs one engine. Buffers are allocated when a shape first needs them, and grow where they must.

    `bind` comes before everything else. Methods raise EngineFailure where TensorRT refuses.
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
        """Put the inputs where the engine reads them, and make room for the outputs."""
        shapes = {name: np.shape(array) for name, array in inputs.items()}
        if shapes != self._shapes:
            self._drop_graph()
        for name in self._inputs:
            if name not in inputs:
                raise EngineFailure(f"TensorRT: there is no array for input {name!r}")
            self._put(name, np.asarray(inputs[name], self._dtype(name), order="C"))
        if unknown := self._context.infer_shapes():
            raise EngineFailure(f"TensorRT: the shapes of {', '.join(unknown)} remain unknown")
        for name in self._outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            if -1 in shape:  # depends on values: the allocator learns it during the inference
                self._context.set_output_allocator(name, self._allocator)
                self._can_capture = False
            else:
                size = math.prod(shape) * np.dtype(self._dtype(name)).itemsize
                self._point(name, self._reserve(name, size))
        self._shapes = shapes

    def enqueue(self) -> None:
        """Put one inference on the stream."""
        if not self._context.execute_async_v3(int(self._stream)):
            raise EngineFailure("TensorRT: the inference was refused")

    def outputs(self) -> dict[str, Array]:
        """The outputs, once what is on the stream is done."""
        self._cuda.synchronize(self._stream)
        return {
            name: self._cuda.download(self._buffers[name][0], self._shape(name), self._dtype(name), self._stream)
            for name in self._outputs
        }

    def seconds(self, runs: int) -> float:
        """GPU seconds per inference over `runs` of them, launched as a CUDA graph where that can be captured."""
        if self._graph is None and self._can_capture:
            self.enqueue()  # TensorRT puts off work that follows new shapes, and that cannot be captured
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
            self.enqueue()  # with a profiler attached, it reports before it returns
            self._cuda.synchronize(self._stream)
            samples.append(list(profiler.calls))
        inspector = self._engine.create_engine_inspector()
        inspector.execution_context = self._context
        text = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        columns = zip(*samples[1:], strict=True)  # without the first, which warms up
        return text, [(calls[0][0], median(ms for _, ms in calls)) for calls in columns]

    def close(self) -> None:
        """Free everything."""
        self._drop_graph()
        # The allocator refers back to here: with it, engine and weights would stay until the garbage collector comes.
        del self._context, self._allocator, self._engine
        for address, _ in self._buffers.values():
            self._cuda.free(address)
        self._buffers.clear()
        self._cuda.free_stream(self._stream)

    def _put(self, name: str, array: Array) -> None:
        if not self._context.set_input_shape(name, array.shape):
            raise EngineFailure(f"TensorRT: input {name!r} cannot have sizes {array.shape} in this engine")
        if self._engine.get_tensor_location(name) == self._trt.TensorLocation.HOST:  # a shape: the CPU reads it
            self._host[name] = array
            self._drop_graph()  # its values are part of the graph
            self._point(name, array.ctypes.data)
        else:
            address = self._reserve(name, array.nbytes)
            self._point(name, address)
            self._cuda.upload(address, array, self._stream)

    def _point(self, name: str, address: int) -> None:
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
        return DTYPES[self._engine.get_tensor_dtype(name).name]

    def _drop_graph(self) -> None:
        if self._graph is not None:
            self._cuda.free_graph(self._graph)
            self._graph = None


def _profiler(trt: Any) -> Any:
    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.calls: list[tuple[str, float]] = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.calls.append((layer_name, ms))

    return Profiler()


def _allocator(trt: Any, reserve: Callable[[str, int], int]) -> Any:
    """Makes room for outputs whose size only the inference tells, and remembers their shapes."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shapes: dict[str, tuple[int, ...]] = {}

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
            return reserve(tensor_name, size)  # CUDA aligns to 256 bytes and more

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.shapes[tensor_name] = tuple(shape)

    return Allocator()
