"""TensorRT 8.6, 10 and 11 on an NVIDIA GPU."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qdqtune.engines import Built, formats, output_to
from qdqtune.engines.tensorrt.build import TimingCache, build_plan, is_strongly_typed, load_plugins, logger_of
from qdqtune.engines.tensorrt.execution import Cuda, Execution
from qdqtune.engines.tensorrt.options import CachedOptions, TensorRtOptions
from qdqtune.engines.tensorrt.report import layers_of
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable, one_line
from qdqtune.types import Array, Layer, NumericFormat, QuantType, Tensors


def create(options: CachedOptions) -> TensorRt:
    """The engine on the current GPU.

    Raises:
        BadOption: there is no such plug-in library.
        EngineUnavailable: TensorRT, cuda-python, a GPU or what a plug-in library needs is missing.
    """
    trt = vendor_module("tensorrt", "TensorRT", "pip install 'qdqtune[tensorrt]'")
    if not hasattr(trt.IExecutionContext, "execute_async_v3"):
        raise EngineUnavailable(f"TensorRT {trt.__version__} is too old: install 8.6 or later")
    cuda = Cuda()
    load_plugins(trt, options.plugin_libraries)
    return TensorRt("tensorrt", trt, cuda, options, TimingCache(options.timing_cache))


def vendor_module(name: str, product: str, remedy: str) -> Any:
    """The vendor's module.

    Raises:
        EngineUnavailable: the module, or a library that it needs, is missing; `remedy` says what to do.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise EngineUnavailable(f"{product} cannot be loaded ({one_line(error)}): {remedy}") from error


class TensorRt:
    """Builds engines through the vendor's module `trt`, and runs them on the GPU of `cuda`."""

    def __init__(self, name: str, trt: Any, cuda: Cuda, options: TensorRtOptions, times: TimingCache | None) -> None:
        self._name, self._trt, self._cuda, self._options, self._times = name, trt, cuda, options, times

    def describe(self) -> dict[str, str]:
        """Version, GPU, its driver and compute capability, and the options that change the latency."""
        device = self._cuda.device
        return {
            "engine": self._name,
            "version": str(self._trt.__version__),
            "device": device.name,
            "compute_capability": device.compute_capability,
            "driver": device.driver,
            "threads": "1",
            "typing": "strong" if is_strongly_typed(self._trt) else "weak, FP16 allowed",
            **self._options.described(),
        }

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return numeric_format(self._trt, quant_type)

    def build(self, model: Path, log: Path) -> Built:
        """Build a serialized engine, and load it onto the GPU."""
        with output_to(log), translated(self._cuda):
            plan = build_plan(self._trt, model, self._options, self._times)
            return TensorRtModel(self._trt, self._cuda, plan, model)


def numeric_format(trt: Any, quant_type: QuantType) -> NumericFormat:
    if quant_type == "fp8" and not is_strongly_typed(trt):
        raise BadOption(f"TensorRT {trt.__version__} has no FP8: use `quant_type` int8, or TensorRT 10 or later")
    return formats.tensorrt(quant_type, explicit_weights=is_strongly_typed(trt))


class TensorRtModel:
    """A model that is loaded onto the GPU, with the plan that it was loaded from."""

    def __init__(self, trt: Any, cuda: Cuda, plan: Any, model: Path) -> None:
        self._trt, self._cuda, self._plan, self._model = trt, cuda, plan, model
        logger = logger_of(trt)
        logger.clear()
        self._runtime = trt.Runtime(logger)
        self._engine = self._loaded(plan)
        self._execution = Execution(trt, cuda, self._engine)

    def _loaded(self, plan: Any) -> Any:
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            reason = logger_of(self._trt).reason("the engine was built, but cannot be loaded here")
            raise EngineFailure(f"TensorRT: {reason}")
        return engine

    def run(self, inputs: Tensors) -> dict[str, Array]:
        with translated(self._cuda):
            self._execution.bind(inputs)
            self._execution.enqueue()
            return self._execution.outputs()

    def time(self, inputs: Tensors, runs: int) -> float:
        """`Built.time`: GPU time by CUDA events, of a CUDA graph where the model can be captured."""
        with translated(self._cuda):
            self._execution.bind(inputs)
            return self._execution.seconds(runs)

    def layers(self, inputs: Tensors, runs: int, *, saves_memory: bool = False) -> tuple[Layer, ...]:
        with translated(self._cuda):  # a profiler cannot be removed from a context, so this one is used once
            with contextlib.closing(Execution(self._trt, self._cuda, self._engine)) as execution:
                execution.bind(inputs)
                graph, times = execution.report(runs)
            return layers_of(self._model, graph, times)

    def save(self, path: Path) -> None:
        """`Built.save`: the plan, which is for this version of TensorRT and this kind of GPU."""
        save_plan(self._plan, path)
        with translated(self._cuda):
            self._loaded(path.read_bytes())

    def close(self) -> None:
        self._execution.close()
        del self._execution, self._engine, self._runtime, self._plan  # in this order: a context needs its engine


@contextmanager
def translated(cuda: Cuda | None) -> Iterator[None]:
    """Turn exceptions of the bindings into EngineFailure. The whole message goes to standard error.

    After a failure the device is checked: an inference that reads invalid addresses makes it unusable for the process.

    Raises:
        CudaError: the device is not usable any more.
    """
    try:
        yield
    except EngineFailure:
        if cuda is not None:
            cuda.check()
        raise
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        os.write(2, f"{error}\n".encode())
        if cuda is not None:
            cuda.check()
        raise EngineFailure(f"TensorRT: {one_line(error)}") from error


def save_plan(plan: Any, path: Path) -> None:
    """Write a serialized engine.

    Raises:
        EngineFailure: the file cannot be written.
    """
    try:
        path.write_bytes(memoryview(plan))
    except OSError as error:
        raise EngineFailure(f"cannot write {path}: {error.strerror or error}") from error
