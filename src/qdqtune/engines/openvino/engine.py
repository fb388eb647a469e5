"""OpenVINO on the CPU."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qdqtune.engines import formats, machine, output_to, translated
from qdqtune.engines.coverage import read_model
from qdqtune.engines.library_settings import OpenVinoOptions, openvino_configuration
from qdqtune.engines.openvino import layers as openvino_layers
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable
from qdqtune.types import Array, Layer, NumericFormat, QuantType, Tensors

try:
    import openvino as ov
except ImportError as error:
    raise EngineUnavailable(f"OpenVINO cannot be imported ({error}): pip install 'qdqtune[openvino]'") from error

DEVICE = "CPU"
WARMUP = 1
"""Profiled inferences that do not count: the first one allocates."""

refusals_in_words = partial(
    translated,
    "OpenVINO",
    re.compile(r"Exception from \S+:\d+:\s*|Check '.*?' failed at \S+:\d+:\s*|FrontEnd API failed with \w+:\s*"),
)
"""`translated`, without places in OpenVINO's sources."""


def create(options: OpenVinoOptions) -> OpenVino:
    core = ov.Core()
    if DEVICE not in core.available_devices:
        raise EngineUnavailable("OpenVINO here has no CPU plug-in: pip install --force-reinstall openvino")
    return OpenVino(core, options)


class OpenVino:
    """Compiles models for one stream of inferences, one after the other."""

    def __init__(self, core: ov.Core, options: OpenVinoOptions) -> None:
        self.core, self._options = core, options

    def describe(self) -> dict[str, str]:
        """Version, CPU, the instruction sets that decide which integer kernels run, and the float precision."""
        return {
            "engine": "openvino",
            "version": ov.get_version(),
            "threads": str(self._options.threads),
            "precision": self._options.precision,
            "device": machine.processor_name(),
            "isa": " ".join(machine.instruction_sets()),
            **({} if self._options.denormals_as_zero else {"denormals_as_zero": "no"}),
        }

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return formats.numeric_format("openvino", quant_type)

    def build(self, model: Path, log: Path) -> OpenVinoModel:
        with output_to(log), refusals_in_words():
            compiled = self.core.compile_model(str(model), DEVICE, self.configuration())
            outputs = read_model(model).outputs
        return OpenVinoModel(self, model, compiled, outputs)

    def configuration(self, **more: Any) -> dict[str, Any]:
        """The properties that models are compiled with; `more` are added, or replace some."""
        return openvino_configuration(self._options) | more


class OpenVinoModel:
    def __init__(self, engine: OpenVino, path: Path, compiled: ov.CompiledModel, outputs: tuple[str, ...]) -> None:
        self._engine = engine
        self._path = path
        self._request = compiled.create_infer_request()
        self._outputs = outputs

    def run(self, inputs: Tensors) -> dict[str, Array]:
        with refusals_in_words():
            _feed(self._request, inputs)
            self._request.infer(share_outputs=True)
            return {name: np.array(self._request.get_output_tensor(i).data) for i, name in enumerate(self._outputs)}

    def time(self, inputs: Tensors, runs: int) -> float:
        """`Built.time`, without setting inputs and copying outputs."""
        with refusals_in_words():
            _feed(self._request, inputs)
            start = time.perf_counter()
            for _ in range(runs):
                self._request.infer(share_outputs=True)
            return (time.perf_counter() - start) / runs

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """`Built.layers`: those of a second build of the file, which is profiled."""
        source = read_model(self._path)
        with refusals_in_words():
            model = self._engine.core.read_model(str(self._path))
            tags = openvino_layers.tag(model, source)
            compiled = self._engine.core.compile_model(model, DEVICE, self._engine.configuration(PERF_COUNT=True))
            request = compiled.create_infer_request()
            _feed(request, inputs)
            profiles = []
            for _ in range(WARMUP + runs):
                request.infer(share_outputs=True)
                profiles.append(request.get_profiling_info())
            executed = compiled.get_runtime_model().get_ordered_ops()
        return openvino_layers.report(source, tags, executed, profiles[WARMUP:])

    def save(self, path: Path) -> None:
        """Write an OpenVINO IR, and compile it: NAME.xml holds the graph, NAME.bin beside it the constants."""
        if path.suffix != ".xml":
            raise BadOption(f"OpenVINO: an IR is NAME.xml and NAME.bin: give {path.with_suffix('.xml').name}")
        with refusals_in_words():
            ov.save_model(self._engine.core.read_model(str(self._path)), str(path), compress_to_fp16=False)
            self._engine.core.compile_model(str(path), DEVICE, self._engine.configuration())

    def close(self) -> None:
        del self._request


def _feed(request: ov.InferRequest, inputs: Tensors) -> None:
    """Set every input of the model. Further arrays are ignored."""
    for port in request.model_inputs:
        name = next((name for name in port.get_names() if name in inputs), None)
        if name is None:
            raise EngineFailure(f"OpenVINO: no array for input {port.get_any_name()!r}")
        request.set_tensor(port, ov.Tensor(np.asarray(inputs[name], order="C")))
