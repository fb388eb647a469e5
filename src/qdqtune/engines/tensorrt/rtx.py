"""TensorRT-RTX: TensorRT for GeForce and RTX GPUs, installed from PyPI, with the same API.

It can build for a GPU that this machine does not have (`target`), and list the layers, so that a model can be checked
for TensorRT without a GPU, but not run or timed. Of the data-centre GPUs it supports the A100 only. It times no kernels
while it builds, so it needs no timing cache.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated, Any

from qdqtune.engines.tensorrt.api import TensorRt
from qdqtune.engines.tensorrt.build import load_plugins
from qdqtune.engines.tensorrt.execution import Cuda
from qdqtune.engines.tensorrt.options import TensorRtOptions
from qdqtune.errors import BadOption, EngineUnavailable


@dataclass(frozen=True)
class RtxOptions(TensorRtOptions):
    target: Annotated[str | None, "GPU to build for, if it is not here: sm75, sm80, sm86, sm89, sm120 or sm121"] = None


def create(options: RtxOptions) -> TensorRt:
    """The engine on the current GPU; if the option `target` names another GPU, an engine that only builds."""
    trt: Any = importlib.import_module("tensorrt_rtx_bindings")
    target = options.target
    known = [name.lower() for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    if target and target not in known:
        raise BadOption(f"TensorRT-RTX {trt.__version__} does not build for {target!r}; it does for {', '.join(known)}")
    load_plugins(trt, options.plugin_libraries)
    again = "to check builds for another GPU give `engine_options` target=sm89"
    cuda = None
    try:
        found = Cuda()
        cuda = found if target in (None, "", found.target) else None
    except EngineUnavailable as error:
        if not target:
            raise EngineUnavailable(f"{error}; {again}") from error
    if cuda is not None and cuda.target not in known:
        raise EngineUnavailable(f"TensorRT-RTX has no kernels for {cuda.name} ({cuda.target}); {again}")
    return TensorRt("tensorrt-rtx", trt, cuda, options, None)
