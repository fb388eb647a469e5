"""Builds a serialized TensorRT engine, also called a plan, of an ONNX file: TensorRT 8.6, 10, 11 and TensorRT-RTX.

`trt` is the vendor's module. Code that depends on the version tests whether a name exists in this module.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from qdqtune.engines.tensorrt.options import TensorRtOptions
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable, one_line, writing
from qdqtune.system.writing import atomic_write


class TimingCache:
    """Kernel times that TensorRT's builds share, in memory and, if a path is given, in a file.

    A file of another version of TensorRT, or one that is no timing cache, is neither used nor changed.
    """

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._data = b""

    def apply(self, config: Any) -> None:
        """Give the known kernel times to a build's configuration."""
        stored = self._read()
        if stored and not self._try_set(config, stored):
            os.write(2, f"{self._path} is no timing cache of this TensorRT and GPU: not used\n".encode())
            self._path = None
        if self._path is None or not stored:
            self._try_set(config, self._data)

    def update(self, config: Any) -> None:
        """Take over the kernel times that a build measured, and write them to the file."""
        cache = config.get_timing_cache()
        if cache is None:
            return
        stored = self._read()
        other = config.create_timing_cache(stored) if stored else None
        if other is not None:
            cache.combine(other, False)  # another process may have written in the meantime
        self._data = bytes(memoryview(cache.serialize()))
        if self._path is not None:
            with writing(f"timing cache {self._path}"):
                self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path) as fresh:
                fresh.write_bytes(self._data)

    def _read(self) -> bytes:
        return self._path.read_bytes() if self._path is not None and self._path.is_file() else b""

    @staticmethod
    def _try_set(config: Any, data: bytes) -> bool:
        cache = config.create_timing_cache(data)
        return cache is not None and bool(config.set_timing_cache(cache, False))


@cache
def logger_of(trt: Any) -> Any:
    """TensorRT's logger. A process has only one: TensorRT keeps the first that it gets.

    It prints to standard error, and so to the log of the current build (`output_to`). It keeps the errors and the list
    of layers printed since `clear`.
    """

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.layers = ""

        def clear(self) -> None:
            self.errors, self.layers = [], ""

        def reason(self, otherwise: str) -> str:
            """The first error, which causes most others; `otherwise` if there was none."""
            return one_line(self.errors[0] if self.errors else otherwise)

        def log(self, severity: Any, message: str) -> None:
            is_layers = message.startswith("Layers:\n")
            if is_layers:
                self.layers = message
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)
            if is_layers or severity != trt.ILogger.VERBOSE:
                os.write(2, f"{message}\n".encode())

    return Logger()


def load_plugins(trt: Any, libraries: Sequence[str]) -> None:
    trt.init_libnvinfer_plugins(logger_of(trt), "")
    registry = trt.get_plugin_registry()
    for library in libraries:
        try:
            handle = registry.load_library(str(library))
        except (RuntimeError, TypeError, ValueError) as error:
            raise EngineUnavailable(f"plug-in library {library} cannot be loaded: {one_line(error)}") from error
        if handle is None:
            raise EngineUnavailable(f"plug-in library {library} cannot be loaded by TensorRT {trt.__version__}")


def build_plan(trt: Any, model: Path, options: TensorRtOptions, times: TimingCache | None) -> Any:
    """Build a model file; returns the engine as a buffer. `times` is None if this builder times no kernels."""
    logger = logger_of(trt)
    logger.clear()
    builder = trt.Builder(logger)
    typing = "STRONGLY_TYPED" if is_strongly_typed(trt) else "EXPLICIT_BATCH"
    network = builder.create_network(1 << int(getattr(trt.NetworkDefinitionCreationFlag, typing)))
    parser = trt.OnnxParser(network, logger)  # must stay until the end of the build: it holds the weights
    if not parser.parse_from_file(str(model)):
        raise EngineFailure(f"TensorRT: {_refusal(parser)}")
    config = _config(trt, builder, network, options)
    if times is not None:
        times.apply(config)
    logger.clear()
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineFailure(f"TensorRT: {logger.reason('the build gave no engine')}")
    if times is not None:
        times.update(config)
    return plan


def is_strongly_typed(trt: Any) -> bool:
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def _config(trt: Any, builder: Any, network: Any, options: TensorRtOptions) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mb << 20)
    if options.builder_level is not None:
        config.builder_optimization_level = options.builder_level
    if not is_strongly_typed(trt):
        # The builder chooses among the precisions that are allowed. With INT8 it asks for a calibrator, if a model is
        # without pairs.
        config.set_flag(trt.BuilderFlag.FP16)
        layers = (network.get_layer(i) for i in range(network.num_layers))
        if any(layer.type == trt.LayerType.QUANTIZE for layer in layers):
            config.set_flag(trt.BuilderFlag.INT8)
    if options.target:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, options.target.upper()), 0)
    profile = _profile(builder, network, options)
    if profile is not None and config.add_optimization_profile(profile) < 0:
        raise BadOption("the min, opt and max shapes are no valid optimization profile: min <= opt <= max must hold")
    return config


def _profile(builder: Any, network: Any, options: TensorRtOptions) -> Any | None:
    """The optimization profile of the model's dynamic inputs, None if all are fixed. Shapes for inputs that the model
    lacks are ignored, since it may be a part of the user's model."""
    profile = None
    for tensor in (network.get_input(i) for i in range(network.num_inputs)):
        sizes = tuple(tensor.shape)
        if -1 not in sizes and not tensor.is_shape_tensor:
            continue
        shapes = options.shapes(tensor.name)
        if shapes is None:
            raise BadOption(
                f"input {tensor.name!r} has dynamic sizes {sizes}: give `engine_options` opt_shapes=, and "
                "min_shapes= and max_shapes= where it varies"
            )
        profile = profile or builder.create_optimization_profile()
        set_shape = profile.set_shape_input if tensor.is_shape_tensor else profile.set_shape
        try:
            set_shape(tensor.name, *map(list, shapes))
        except (RuntimeError, TypeError, ValueError) as error:
            raise BadOption(f"input {tensor.name!r} of sizes {sizes} cannot be {shapes}: {one_line(error)}") from error
    return profile


def _refusal(parser: Any) -> str:
    if not parser.num_errors:
        return "the parser cannot read the model"
    refusal = parser.get_error(0)
    name = refusal.node_name() if hasattr(refusal, "node_name") else ""  # 8.6 has none
    return one_line(f"node {name!r}: {refusal.desc()}" if name else refusal.desc())
