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
from qdqtune.engines.tensorrt.report import layers_from_log, layers_of
from qdqtune.errors import EngineFailure, EngineUnavailable, one_line
from qdqtune.types import Array, Layer, NumericFormat, QuantType, Tensors


def create(options: CachedOptions) -> TensorRt:
    trt: Any = importlib.import_module("tensorrt")
    if not hasattr(trt.IExecutionContext, "execute_async_v3"):
        raise EngineUnavailable(f"TensorRT {trt.__version__} is too old: install 8.6 or later")
    cuda = Cuda()
    load_plugins(trt, options.plugin_libraries)
    return TensorRt("tensorrt", trt, cuda, options, TimingCache(options.timing_cache))


class TensorRt:
    """Builds engines with the vendor's module `trt`, and runs them on the GPU through `cuda`. Without `cuda` it only
    builds, for a GPU that this machine lacks."""

    def __init__(
        self, name: str, trt: Any, cuda: Cuda | None, options: TensorRtOptions, times: TimingCache | None
    ) -> None:
        self._name, self._trt, self._cuda, self._options, self._times = name, trt, cuda, options, times

    def describe(self) -> dict[str, str]:
        own = {"engine": self._name, "version": str(self._trt.__version__), "threads": "1"}
        if self._cuda is None:
            return own | {"device": "none"} | self._options.described()
        return {
            **own,
            "device": self._cuda.name,
            "compute_capability": self._cuda.compute_capability,
            "driver": self._cuda.driver,
            "typing": "strong" if is_strongly_typed(self._trt) else "weak, FP16 allowed",
            **self._options.described(),
        }

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return formats.tensorrt_of(quant_type, str(self._trt.__version__), is_strongly_typed(self._trt))

    def build(self, model: Path, log: Path) -> Built:
        with output_to(log), translated(self._cuda):
            plan = build_plan(self._trt, model, self._options, self._times)
            return TensorRtModel(self._trt, self._cuda, plan, model, self._options.target)


class TensorRtModel:
    """A plan on the GPU. Without a GPU it cannot run, and its layers are those that the builder printed."""

    def __init__(self, trt: Any, cuda: Cuda | None, plan: Any, model: Path, target: str | None) -> None:
        self._trt, self._cuda, self._plan, self._model, self._target = trt, cuda, plan, model, target
        logger = logger_of(trt)
        self._listed = logger.layers
        self._execution: Execution | None = None
        if cuda is not None:
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

    @contextmanager
    def _running(self) -> Iterator[Execution]:
        if self._execution is None:
            raise EngineUnavailable(
                f"no model for {self._target} can run here: there is no such GPU; building, saving and listing "
                "layers work"
            )
        with translated(self._cuda):
            yield self._execution

    def run(self, inputs: Tensors) -> dict[str, Array]:
        with self._running() as execution:
            return execution.run(inputs)

    def time(self, inputs: Tensors, runs: int) -> float:
        """`Built.time`: GPU time by CUDA events, of a CUDA graph where the model can be captured."""
        with self._running() as execution:
            return execution.time(inputs, runs)

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """`Built.layers`; without times if the GPU is not here."""
        if self._cuda is None:
            if not self._listed:
                raise EngineFailure("TensorRT-RTX listed no layers in this build")
            return layers_of(self._model, layers_from_log(self._listed), vendor="TensorRT-RTX")
        with translated(self._cuda):  # a profiler cannot be removed from a context, so this one is used once
            with contextlib.closing(Execution(self._trt, self._cuda, self._engine)) as execution:
                graph, times = execution.report(inputs, runs)
            return layers_of(self._model, graph, times)

    def save(self, path: Path) -> None:
        path.write_bytes(memoryview(self._plan))
        if self._execution is not None:
            with translated(self._cuda):
                self._loaded(path.read_bytes())

    def close(self) -> None:
        if self._execution is not None:
            self._execution.close()
            del self._execution, self._engine, self._runtime  # in this order: a context needs its engine
        del self._plan


@contextmanager
def translated(cuda: Cuda | None) -> Iterator[None]:
    """Turn exceptions of the bindings into EngineFailure. The whole message goes to standard error.

    Afterwards the device is checked: an inference that reads invalid addresses makes it unusable for this process.

    Raises:
        CudaError: the device is not usable any more.
    """
    try:
        yield
    except (EngineFailure, RuntimeError, TypeError, ValueError, KeyError) as error:
        if not isinstance(error, EngineFailure):
            os.write(2, f"{error}\n".encode())
        if cuda is not None:
            cuda.check()
        if isinstance(error, EngineFailure):
            raise
        raise EngineFailure(f"TensorRT: {one_line(error)}") from error
