"""TensorRT-RTX: TensorRT's sibling for GeForce and RTX GPUs, from the package index, with the same API.

It builds for a GPU that is not there (`target`), and says what it fused: so a model can be checked for TensorRT on a
machine without a GPU. It cannot run or time anything there, and has no kernels for data-centre GPUs but the A100's.
It measures nothing while it builds, so that there is no timing cache.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from qdqtune.engines import Built, output_to
from qdqtune.engines.tensorrt.api import TensorRt, numeric_format, save_plan, translated, vendor_module
from qdqtune.engines.tensorrt.build import build_plan, load_plugins, logger_of
from qdqtune.engines.tensorrt.cuda import Cuda
from qdqtune.engines.tensorrt.options import Options, taking
from qdqtune.engines.tensorrt.report import layers_of
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable
from qdqtune.types import Array, Layer, NumericFormat, QuantType, Tensors

FIELD = re.compile(r"(?:^|, )(LayerType|Inputs|Constants|Outputs|TacticName|StreamId|Metadata): ")
TENSOR = re.compile(r"\{ Name: (.*?), Dimensions: \[(.*?)\].*?, Datatype: (\w+)")


@dataclass(frozen=True)
class RtxOptions(Options):
    """Options with the architecture to build for: sm75, sm80, sm86, sm89, sm120, sm121; and how many builds the CPU may
    make at once while the GPU times others."""

    target: str | None = None
    builds_aside: int = 0


@taking(RtxOptions)
def create(options: RtxOptions) -> TensorRt | AheadOfTime:
    """The engine on the current GPU; with a `target` other than that GPU, one that builds and cannot run.

    Raises:
        BadOption: an option has a value that cannot be used.
        EngineUnavailable: TensorRT-RTX or a plug-in library is missing, or a GPU is, without a `target`.
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
            raise EngineUnavailable(f"{error}; to check builds without a GPU give --target sm89") from error
        return AheadOfTime(trt, options)
    here = cuda.device
    if target and target != here.target:
        return AheadOfTime(trt, options)
    if here.target not in known:
        raise EngineUnavailable(
            f"TensorRT-RTX has no kernels for {here.name} ({here.target}); to check builds for "
            "another GPU give --target sm89"
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
        """As TensorRT's."""
        return numeric_format(self._trt, quant_type)

    def build(self, model: Path, log: Path) -> Built:
        """A serialized engine.

        Raises:
            EngineFailure: TensorRT-RTX refuses the model.
            BadOption: the model has dynamic inputs, and shapes for them are missing or wrong.
        """
        with output_to(log), translated(None):
            plan = build_plan(self._trt, model, self._options, None)
            return AheadOfTimeModel(plan, model, logger_of(self._trt).layers, self._options.target)


class AheadOfTimeModel:
    """A plan for another machine, and the builder's list of its layers."""

    def __init__(self, plan: Any, model: Path, layers: str, target: str | None) -> None:
        self._plan, self._model, self._layers, self._target = plan, model, layers, target

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """Refuse.

        Raises:
            EngineUnavailable: always.
        """
        self._refuse("run")

    def time(self, inputs: Tensors, runs: int) -> float:
        """Refuse.

        Raises:
            EngineUnavailable: always.
        """
        self._refuse("time")

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """The layers that the builder listed. They have no times.

        Raises:
            EngineFailure: the builder listed none.
        """
        if not self._layers:
            raise EngineFailure("TensorRT-RTX listed no layers in this build")
        return layers_of(self._model, layers_from_log(self._layers), vendor="TensorRT-RTX")

    def save(self, path: Path) -> None:
        """Write the plan.

        Raises:
            EngineFailure: the file cannot be written.
        """
        save_plan(self._plan, path)

    def close(self) -> None:
        """Drop the plan."""
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
    name, *rest = FIELD.split(line.removeprefix("Name: "))
    fields: dict[str, Any] = {"Name": name, **dict(zip(rest[::2], rest[1::2], strict=True))}
    for part in ("Inputs", "Constants", "Outputs"):
        fields[part] = [
            {"Name": tensor, "Dimensions": [int(d) for d in sizes.split(",") if d], "Datatype": datatype}
            for tensor, sizes, datatype in TENSOR.findall(fields.get(part, ""))
        ]
    return fields
