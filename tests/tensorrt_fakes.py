"""Stand-ins for the modules of TensorRT and cuda-python, strict about names: what a version lacks, they lack.

`Vendor` objects let through only names that the version's list has. Networks are computed by the reference evaluator,
in the bytes of a make-believe device.
"""

import ctypes
import enum
import gzip
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from loaded_modules import present

LISTS = Path(__file__).parent / "data" / "tensorrt_api"
VERSIONS = ("8.6.1", "10.16.1", "11.4.0")
FLAGS = {"8.6.1": 1 << 0, "10.16.1": 1 << 1, "11.4.0": 1 << 0}
"""What create_network must get: EXPLICIT_BATCH, then STRONGLY_TYPED."""
ONNX_TO_TRT = {"float32": "FLOAT", "float16": "HALF", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}


@cache
def names_of(file: str) -> dict[str, dict[str, str]]:
    """Class (or "" for the module) to its members, each with what the list says behind it."""
    members: dict[str, dict[str, str]] = {"": {}}
    for line in gzip.decompress((LISTS / f"{file}.txt.gz").read_bytes()).decode().splitlines():
        name, _, rest = line.partition(" :: ")
        if match := re.match(r"class (\w+)", line):
            members.setdefault(match[1], {})
            members[""][match[1]] = "class"
        elif match := re.match(r"(\w+)\.(\w+)(?: (property.*))?$", name):
            members.setdefault(match[1], {})[match[2]] = match[3] or rest
            members[""].setdefault(match[1], "class")
        elif rest:
            members[""][name] = rest
    return members


class FakeCuda(ModuleType):
    """`cuda.bindings.runtime` with a device of bytes. `alive` counts what nobody has freed."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.devices = 1
        self.capturable = True
        self.fail: dict[str, int] = {}  # function name to the error that it gives
        self.memory: dict[int, bytearray] = {}
        self.alive = {"stream": 0, "event": 0, "graph": 0}
        self.captured: list[Callable[[], None]] | None = None
        self.clock, self.launches, self._next = 0.0, 0, 0x1000
        errors = {"cudaSuccess": 0, "cudaErrorMemoryAllocation": 2, "cudaErrorInsufficientDriver": 35,
                  "cudaErrorIllegalAddress": 700, "cudaErrorStreamCaptureInvalidated": 901}  # fmt: skip
        self.cudaError_t: Any = enum.IntEnum("cudaError_t", errors)
        self.cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
        self.cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
        gpu = SimpleNamespace(name=b"Stand-in GPU\0\0", major=8, minor=9)
        answers = {"cudaGetDevice": (0,), "cudaDriverGetVersion": (12080,), "cudaDeviceSynchronize": (),
                   "cudaGetLastError": (), "cudaStreamSynchronize": (), "cudaEventSynchronize": (),
                   "cudaGetDeviceProperties": (gpu,)}  # fmt: skip
        for name, values in answers.items():
            setattr(self, name, lambda *_, values=values: self._ok(*values))
        self.cudaGetDeviceCount = lambda: self._ok(self.devices)
        self.cudaGraphInstantiateWithFlags = lambda graph, flags: self._made("graph", graph)
        self.cudaEventElapsedTime = lambda start, stop: self._ok(stop.at - start.at)
        self.cudaStreamCreate = lambda: self._made("stream", self._handle())
        self.cudaEventCreate = lambda: self._made("event", SimpleNamespace(at=0.0))
        for name, kind in (("Stream", "stream"), ("Event", "event"), ("Graph", "graph"), ("GraphExec", "graph")):
            setattr(self, f"cuda{name}Destroy", lambda _, kind=kind: self._gone(kind))

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("cuda") and callable(value) and name in super().__getattribute__("fail"):
            return lambda *_: (self.cudaError_t(self.fail[name]), None)
        return value

    def _ok(self, *values: Any) -> tuple[Any, ...]:
        return (self.cudaError_t.cudaSuccess, *values)

    def _made(self, kind: str, value: Any) -> tuple[Any, ...]:
        self.alive[kind] += 1
        return self._ok(value)

    def _gone(self, kind: str) -> tuple[Any, ...]:
        self.alive[kind] -= 1
        return self._ok()

    def _handle(self) -> int:
        self._next += 0x1000
        return self._next

    def work(self, action: Callable[[], None]) -> None:
        """What a stream gets: done at once, or kept while a graph is captured."""
        if self.captured is None:
            action()
        else:
            self.captured.append(action)

    def cudaMalloc(self, size: int) -> Any:  # noqa: N802
        address = self._handle()
        self.memory[address] = bytearray(size)
        return self._ok(address)

    def cudaFree(self, address: int) -> Any:  # noqa: N802
        del self.memory[address]
        return self._ok()

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: Any) -> Any:  # noqa: N802
        if kind == 1:
            self.memory[target][:size] = ctypes.string_at(source, size)
        else:
            ctypes.memmove(target, bytes(self.memory[source][:size]), size)
        return self._ok()

    def cudaStreamBeginCapture(self, stream: Any, mode: Any) -> Any:  # noqa: N802
        self.captured = []
        return self._ok()

    def cudaStreamEndCapture(self, stream: Any) -> Any:  # noqa: N802
        actions, self.captured = self.captured, None
        if not self.capturable:
            return self.cudaError_t.cudaErrorStreamCaptureInvalidated, None
        return self._made("graph", actions)

    def cudaGraphLaunch(self, graph: Any, stream: Any) -> Any:  # noqa: N802
        self.launches += 1
        for action in graph:
            action()
        return self._ok()

    def cudaEventRecord(self, event: Any, stream: Any) -> Any:  # noqa: N802
        event.at = self.clock
        return self._ok()


class Module(ModuleType):
    """A vendor's module: only what its list has. `seen` is what the tests look at."""

    def __init__(self, version: str, cuda: FakeCuda) -> None:
        super().__init__("tensorrt")
        self.__dict__.update(_api=names_of(f"tensorrt-{version}"), _cuda=cuda, _version=version)
        self.__dict__["seen"] = SimpleNamespace(flags=None, config=None, profile=None, plugin=object(), cache=b"fresh")
        self.__dict__["__version__"] = version
        for name in ("Builder", "OnnxParser", "Runtime", "ILogger", "IProfiler", "IOutputAllocator",
                     "IExecutionContext"):  # fmt: skip
            self.__dict__[name] = type(name, (CLASSES[name],), {"_module": self, "_kind": name})
        self.__dict__["Logger"] = type("Logger", (SimpleLogger,), {"_module": self, "_kind": "ILogger"})
        for name in ("NetworkDefinitionCreationFlag", "BuilderFlag", "ProfilingVerbosity", "MemoryPoolType", "DataType",
                     "TensorIOMode", "TensorLocation", "LayerInformationFormat", "LayerType"):  # fmt: skip
            members = [m for m in self._api.get(name, {}) if m.isupper() or re.fullmatch(r"[A-Z][A-Z0-9_]*", m)]
            self.__dict__[name] = enum.IntEnum(name, {m: i for i, m in enumerate(members)})

    def __getattr__(self, name: str) -> Any:
        if name not in self._api[""]:
            raise AttributeError(f"TensorRT {self._version} has no {name}")
        raise NotImplementedError(f"the stand-in lacks {name}")

    def init_libnvinfer_plugins(self, logger: Any, namespace: str) -> bool:
        return True

    def get_plugin_registry(self) -> Any:
        return self._make(Registry, "IPluginRegistry")

    def _make(self, kind: type, name: str, /, *arguments: Any, **members: Any) -> Any:
        return type(name, (kind,), {"_module": self, "_kind": name})(*arguments, **members)


def install(patch: pytest.MonkeyPatch, version: str) -> tuple[Module, FakeCuda]:
    """Put the stand-ins of a version where programs look for the modules."""
    cuda = FakeCuda()
    trt, bindings = Module(version, cuda), ModuleType("cuda.bindings")
    bindings.runtime = cuda
    present(patch, {"tensorrt": trt, "cuda.bindings": bindings, "cuda.bindings.runtime": cuda})
    return trt, cuda


class Vendor:
    """An object of the vendor's: public names must be in the list."""

    _module: Module
    _kind: str

    def __getattribute__(self, name: str) -> Any:
        is_public = not name.startswith("_") and type(self).__name__ == self._kind
        if is_public and name not in self._module._api[self._kind]:
            raise AttributeError(f"TensorRT {self._module._version}: {self._kind} has no {name}")
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            kind = self._module._api[self._kind].get(name)
            if type(self).__name__ == self._kind:
                assert kind == "property", f"{self._kind}.{name} cannot be set in {self._module._version}: {kind}"
        object.__setattr__(self, name, value)


class Logger(Vendor):
    ERROR, INTERNAL_ERROR, WARNING, INFO, VERBOSE = 1, 0, 2, 3, 4


class SimpleLogger(Logger):
    """The logger that programs make, who have no class of their own."""

    def __init__(self, min_severity: int) -> None:
        assert min_severity == self.WARNING

    def log(self, severity: int, msg: str) -> None:
        pass


class Registry(Vendor):
    def load_library(self, plugin_path: str) -> Any:
        if "raise" in plugin_path:
            raise RuntimeError("undefined symbol")
        return self._module.seen.plugin


class Value(Vendor):
    """An object that only tells."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


class Network(Vendor):
    def __init__(self) -> None:
        self._model: onnx.ModelProto | None = None

    @property
    def num_inputs(self) -> int:
        return len(self._model.graph.input)

    @property
    def num_layers(self) -> int:
        return len(self._model.graph.node)

    def get_input(self, index: int) -> Any:
        value = self._model.graph.input[index]
        dims = value.type.tensor_type.shape.dim
        shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)
        is_shape = value.name.startswith("shape")
        return self._module._make(Value, "ITensor", name=value.name, is_shape_tensor=is_shape, shape=shape)

    def get_layer(self, index: int) -> Any:
        quantizes = self._model.graph.node[index].op_type == "QuantizeLinear"
        return self._module._make(Value, "ILayer", type=self._module.LayerType.QUANTIZE if quantizes else None)


class Parser(Vendor):
    def __init__(self, network: Any, logger: Any) -> None:
        self._network, self._errors = network, list[Any]()

    def parse_from_file(self, model: str) -> bool:
        assert isinstance(model, str)
        proto = onnx.load(model)  # external data and all
        desc = "Plugin not found,\nare the plugin name and version correct?"
        for i, node in enumerate(proto.graph.node):
            if node.op_type == "NoSuchOp":
                told = {"node": lambda i=i: i, "node_name": lambda node=node: node.name, "desc": lambda: desc}
                self._errors.append(self._module._make(Value, "ParserError", **told))
        self._network._model = proto
        return not self._errors

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._errors[index]


class Cache(Vendor):
    def __init__(self, data: bytes) -> None:
        self._data = data

    def combine(self, input_cache: Any, ignore_mismatch: bool) -> bool:
        self._data = b"+".join(sorted({*self._data.split(b"+"), *input_cache._data.split(b"+")} - {b""}))
        return True

    def serialize(self) -> bytes:
        return self._data


class Config(Vendor):
    profiling_verbosity = builder_optimization_level = None

    def __init__(self) -> None:
        self._flags, self._limits, self._profiles = list[str](), dict[str, int](), list[Any]()
        self._cache: Any = None
        self._module.seen.config = self

    def set_flag(self, flag: Any) -> None:
        self._flags.append(flag.name)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._limits[pool.name] = pool_size

    def add_optimization_profile(self, profile: Any) -> int:
        self._profiles.append(profile)
        return 0

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
        memoryview(serialized_timing_cache)
        other = serialized_timing_cache.startswith(b"other version")
        return None if other else self._module._make(Cache, "ITimingCache", serialized_timing_cache)

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        self._cache = cache
        return True

    def get_timing_cache(self) -> Any:
        return self._cache


class Profile(Vendor):
    def __init__(self) -> None:
        self._shapes: dict[str, Any] = {}
        self._module.seen.profile = self._shapes

    def set_shape(self, input: str, low: Any, usual: Any, high: Any) -> None:
        if any(a > b for a, b in zip(low, high, strict=True)):
            raise RuntimeError("Shape provided for max is inconsistent with other shapes.")
        self._shapes[input] = low, usual, high

    def set_shape_input(self, input: str, low: Any, usual: Any, high: Any) -> None:
        self._shapes[input] = "values", low, usual, high


class Builder(Vendor):
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def create_network(self, flags: int = 0) -> Any:
        self._module.seen.flags = flags
        return self._module._make(Network, "INetworkDefinition")

    def create_builder_config(self) -> Any:
        return self._module._make(Config, "IBuilderConfig")

    def create_optimization_profile(self) -> Any:
        return self._module._make(Profile, "IOptimizationProfile")

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
        self._logger.log(self._logger.INFO, "Detected 1 inputs")
        self._logger.log(self._logger.VERBOSE, "chatter")
        if any(node.op_type == "Refused" for node in network._model.graph.node):
            self._logger.log(self._logger.ERROR, "Error Code 4: no\nimplementation")
            self._logger.log(self._logger.ERROR, "Error Code 2: follows from the first")
            return None
        if config._cache is not None:
            config._cache._data = b"+".join(filter(None, [config._cache._data, self._module.seen.cache]))
        return bytes(network._model.SerializeToString())


class Runtime(Vendor):
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
        model = onnx.ModelProto.FromString(serialized_engine)
        if model.graph.name == "unloadable":
            self._logger.log(self._logger.ERROR, "Error Code 6: built for another GPU")
            return None
        return self._module._make(Engine, "ICudaEngine", model)


class Engine(Vendor):
    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._io = {v.name: v for v in (*model.graph.input, *model.graph.output)}

    @property
    def num_io_tensors(self) -> int:
        return len(self._io)

    def get_tensor_name(self, index: int) -> str:
        return list(self._io)[index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = self._module.TensorIOMode
        return modes.INPUT if any(v.name == name for v in self._model.graph.input) else modes.OUTPUT

    def get_tensor_location(self, name: str) -> Any:
        places = self._module.TensorLocation
        return places.HOST if name.startswith("shape") else places.DEVICE

    def get_tensor_dtype(self, name: str) -> Any:
        dtype = helper.tensor_dtype_to_np_dtype(self._io[name].type.tensor_type.elem_type)
        return self._module.DataType[ONNX_TO_TRT[dtype.name]]

    def create_execution_context(self) -> Any:
        return self._module.IExecutionContext(self)

    def create_engine_inspector(self) -> Any:
        return self._module._make(Inspector, "EngineInspector", self._model)


class Inspector(Vendor):
    execution_context = None

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model

    def get_engine_information(self, format: Any) -> str:
        assert format.name == "JSON"
        assert self.execution_context is not None
        data = [{"Name": "t", "Format/Datatype": "Row major linear FP32"}]
        names = [node.name for node in self._model.graph.node]
        layers = [{"Name": n, "LayerType": "Convolution", "Inputs": data, "Outputs": data} for n in names]
        return json.dumps({"Layers": layers, "Bindings": []})


class Context(Vendor):
    profiler = None

    def __init__(self, engine: Any) -> None:
        self._engine, self._shapes, self._addresses = engine, dict[str, Any](), dict[str, int]()
        self._allocators: dict[str, Any] = {}
        self._evaluator = ReferenceEvaluator(engine._model)
        self._outputs = [v.name for v in engine._model.graph.output]

    def set_input_shape(self, name: str, shape: Any) -> bool:
        dims = self._engine._io[name].type.tensor_type.shape.dim
        self._shapes[name] = tuple(shape)
        return len(dims) == len(shape) and all(
            not d.HasField("dim_value") or d.dim_value == s for d, s in zip(dims, shape, strict=True)
        )

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> Any:
        if name in self._shapes:
            return self._shapes[name]
        if any(n.op_type == "NonZero" for n in self._engine._model.graph.node):
            return (1, -1)
        feed = {n: np.ones(s, self._dtype(n)) if n == "x" else self._value(n, s) for n, s in self._shapes.items()}
        return dict(zip(self._outputs, self._evaluator.run(None, feed), strict=True))[name].shape

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        self._allocators[name] = output_allocator
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle
        if self._module._cuda.captured is not None and self._allocators:
            return False
        self._module._cuda.work(self._execute)
        return "refuse" not in self._engine._model.graph.name

    def _dtype(self, name: str) -> Any:
        return helper.tensor_dtype_to_np_dtype(self._engine._io[name].type.tensor_type.elem_type)

    def _value(self, name: str, shape: tuple[int, ...]) -> Any:
        """What stands at an input's address, on the device or, for a shape, on the host."""
        size = int(np.prod(shape)) * self._dtype(name).itemsize
        address, memory = self._addresses[name], self._module._cuda.memory
        data = bytes(memory[address][:size]) if address in memory else ctypes.string_at(address, size)
        return np.frombuffer(data, self._dtype(name)).reshape(shape)

    def _execute(self) -> None:
        cuda = self._module._cuda
        feed = {name: self._value(name, shape) for name, shape in self._shapes.items()}
        for name, array in zip(self._outputs, self._evaluator.run(None, feed), strict=True):
            if name in self._allocators:
                self._addresses[name] = self._allocators[name].reallocate_output(name, 0, array.nbytes, 256)
                self._allocators[name].notify_shape(name, array.shape)
            cuda.memory[self._addresses[name]][: array.nbytes] = array.tobytes()
        cuda.clock += 2.0
        if self.profiler is not None:
            for i, node in enumerate(self._engine._model.graph.node):
                self.profiler.report_layer_time(node.name, 0.25 * (i + 1))


CLASSES: dict[str, type] = {
    "Builder": Builder, "OnnxParser": Parser, "Runtime": Runtime, "ILogger": Logger, "IProfiler": Vendor,
    "IOutputAllocator": Vendor, "IExecutionContext": Context,
}  # fmt: skip
