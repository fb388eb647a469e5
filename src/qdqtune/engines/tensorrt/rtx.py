"""TensorRT-RTX: TensorRT for GeForce and RTX GPUs, installed from PyPI, with the same API.

It can build for a GPU that this machine does not have (`target`), and lists the layers: so a model can be checked for
TensorRT without a GPU, though neither run nor timed. Of the data-centre GPUs it has kernels for the A100 only. It times
nothing while it builds, so there is no timing cache.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from qdqtune.engines import Built, output_to
from qdqtune.engines.tensorrt.api import TensorRt, numeric_format, save_plan, translated, vendor_module
from qdqtune.engines.tensorrt.build import build_plan, load_plugins, logger_of
from qdqtune.engines.tensorrt.execution import Cuda
from qdqtune.engines.tensorrt.options import TensorRtOptions
from qdqtune.engines.tensorrt.report import layers_of
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable
from qdqtune.types import Array, Layer, NumericFormat, QuantType, Tensors

LAYER_FIELD = re.compile(r"(?:^|, )(LayerType|Inputs|Constants|Outputs|TacticName|StreamId|Metadata): ")
TENSOR = re.compile(r"\{ Name: (.*?), Dimensions: \[(.*?)\].*?, Datatype: (\w+)")


@dataclass(frozen=True)
class RtxOptions(TensorRtOptions):
    """Options of TensorRT-RTX."""

    target: Annotated[str | None, "GPU to build for, if it is not here: sm75, sm80, sm86, sm89, sm120 or sm121"] = None


def create(options: RtxOptions) -> TensorRt | AheadOfTime:
    """The engine on the current GPU; for a `target` other than that GPU an engine that builds and cannot run.

    Raises:
        BadOption: no such target or plug-in library.
        EngineUnavailable: TensorRT-RTX is missing, or there is no GPU and no `target`.
    """
    trt = vendor_module("tensorrt_rtx_bindings", "TensorRT-RTX", "pip install 'qdqtune[tensorrt-rtx]'")
    target = options.target
    known = [name.lower() for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    if target and target not in known:
        raise BadOption(f"TensorRT-RTX {trt.__version__} does not build for {target!r}; it does for {', '.join(known)}")
    load_plugins(trt, options.plugin_libraries)
    try:
        cuda = Cuda()
    except EngineUnavailable as error:
        if not target:
            again = "to check builds without a GPU give `engine_options` target=sm89"
            raise EngineUnavailable(f"{error}; {again}") from error
        return AheadOfTime(trt, options)
    here = cuda.device
    if target and target != here.target:
        return AheadOfTime(trt, options)
    if here.target not in known:
        raise EngineUnavailable(
            f"TensorRT-RTX has no kernels for {here.name} ({here.target}); to check builds for "
            "another GPU give `engine_options` target=sm89"
        )
    return TensorRt("tensorrt-rtx", trt, cuda, options, None)


class AheadOfTime:
    """Builds for a GPU that this machine does not have."""

    def __init__(self, trt: Any, options: RtxOptions) -> None:
        self._trt, self._options = trt, options

    def describe(self) -> dict[str, str]:
        """Version and target; there is no device."""
        return {
            "engine": "tensorrt-rtx",
            "version": str(self._trt.__version__),
            "device": "none",
            "threads": "1",
            **self._options.described(),
        }

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return numeric_format(self._trt, quant_type)

    def build(self, model: Path, log: Path) -> Built:
        """A plan for the target. Raises what `TensorRt.build` raises."""
        with output_to(log), translated(None):
            plan = build_plan(self._trt, model, self._options, None)
            return AheadOfTimeModel(plan, model, logger_of(self._trt).layers, self._options.target)


class AheadOfTimeModel:
    """A plan for another machine, and the layers that the builder listed. It can be saved, not run."""

    def __init__(self, plan: Any, model: Path, layers: str, target: str | None) -> None:
        self._plan, self._model, self._layers, self._target = plan, model, layers, target

    def run(self, inputs: Tensors) -> dict[str, Array]:
        self._refuse("run")

    def time(self, inputs: Tensors, runs: int) -> float:
        self._refuse("time")

    def layers(self, inputs: Tensors, runs: int, *, saves_memory: bool = False) -> tuple[Layer, ...]:
        """The layers that the builder listed, without times."""
        if not self._layers:
            raise EngineFailure("TensorRT-RTX listed no layers in this build")
        return layers_of(self._model, layers_from_log(self._layers), vendor="TensorRT-RTX")

    def save(self, path: Path) -> None:
        save_plan(self._plan, path)

    def close(self) -> None:
        del self._plan

    def _refuse(self, verb: str) -> NoReturn:
        raise EngineUnavailable(
            f"tensorrt-rtx cannot {verb} a model for {self._target} here: there is no such GPU; "
            "building, saving and listing layers work"
        )


def layers_from_log(message: str) -> str:
    """The builder's message `Layers:` (one line of text a layer) as the JSON that the engine inspector writes."""
    lines = message.split("\n\nI/O Tensors:")[0].split("\n")[1:]
    return json.dumps({"Layers": [_layer(line) for line in lines if line.startswith("Name: ")]})


def _layer(line: str) -> dict[str, Any]:
    name, *rest = LAYER_FIELD.split(line.removeprefix("Name: "))
    fields: dict[str, Any] = {"Name": name, **dict(zip(rest[::2], rest[1::2], strict=True))}
    for part in ("Inputs", "Constants", "Outputs"):
        fields[part] = [
            {"Name": tensor, "Dimensions": [int(d) for d in sizes.split(",") if d], "Datatype": datatype}
            for tensor, sizes, datatype in TENSOR.findall(fields.get(part, ""))
        ]
    return fields
