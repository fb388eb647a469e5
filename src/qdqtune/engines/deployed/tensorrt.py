"""Builds the model of settings.json with TensorRT (8.6 or later, or RTX), runs it on inputs of ones, and prints the
median latency. It needs cuda-python."""

from importlib import import_module
from typing import Any

from qdqtune.engines.deployed.start import library, measure, model, settings

try:
    import numpy as np
    from cuda.bindings import runtime as cuda
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install cuda-python numpy") from None

try:
    trt = import_module(library["module"])
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install TensorRT's package") from None

logger = trt.Logger(trt.Logger.WARNING)  # one for the whole process: TensorRT ignores later ones
trt.init_libnvinfer_plugins(logger, "")
for plugins in library["plugin_libraries"]:
    trt.get_plugin_registry().load_library(plugins)
builder, flags = trt.Builder(logger), trt.NetworkDefinitionCreationFlag
is_strong = hasattr(flags, "STRONGLY_TYPED")  # not in 8.6, where the builder chooses among types that flags allow
network = builder.create_network(1 << int(flags.STRONGLY_TYPED if is_strong else flags.EXPLICIT_BATCH))
parser = trt.OnnxParser(network, logger)
if not parser.parse_from_file(str(model)):  # finds external data; parse() does not
    raise SystemExit("\n".join(parser.get_error(i).desc() for i in range(parser.num_errors)))
config, profile = builder.create_builder_config(), builder.create_optimization_profile()
for name in () if is_strong else ("FP16", "INT8"):
    config.set_flag(getattr(trt.BuilderFlag, name))
if "workspace_mb" in library:
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, library["workspace_mb"] << 20)
if "builder_level" in library:
    config.builder_optimization_level = library["builder_level"]
tensors = [network.get_input(i) for i in range(network.num_inputs)]
dynamic = [tensor for tensor in tensors if -1 in tuple(tensor.shape)]
for tensor in dynamic:
    shape = settings["inputs"][tensor.name][1]
    profile.set_shape(tensor.name, *(library[which].get(tensor.name, shape) for which in ("min", "opt", "max")))
if dynamic:
    config.add_optimization_profile(profile)
plan = builder.build_serialized_network(network, config)
if plan is None:
    raise SystemExit("TensorRT built no engine: see its messages above")


def checked(answer: Any) -> Any:
    """The value of a CUDA call that returned (error, value); ends the program on an error."""
    if int(answer[0]):
        raise SystemExit(f"CUDA error {answer[0]}")
    return answer[1] if len(answer) > 1 else None


engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
context, stream = engine.create_execution_context(), checked(cuda.cudaStreamCreate())
names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
for name, (dtype, shape) in settings["inputs"].items():
    is_short = engine.get_tensor_dtype(name) == trt.DataType.INT32  # 8.6 makes integers of 64 bits narrower
    array = np.ones(shape, np.int32 if is_short else dtype)
    context.set_input_shape(name, array.shape)
    address = checked(cuda.cudaMalloc(array.nbytes))
    context.set_tensor_address(name, address)
    to_device = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
    checked(cuda.cudaMemcpyAsync(address, array.ctypes.data, array.nbytes, to_device, stream))
    checked(cuda.cudaStreamSynchronize(stream))
for name in (name for name in names if name not in settings["inputs"]):
    most = 8 * int(np.prod(context.get_tensor_shape(name)))  # bytes of any type
    context.set_tensor_address(name, checked(cuda.cudaMalloc(most)))


def infer() -> None:
    if not context.execute_async_v3(stream):
        raise SystemExit("TensorRT did not run the engine")
    checked(cuda.cudaStreamSynchronize(stream))


measure(infer, f"TensorRT {trt.__version__}, inputs of ones")
