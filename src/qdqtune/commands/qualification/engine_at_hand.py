"""What the checks of an engine share: graphs as files, quantized by its rules, with their builds and layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from qdqtune.commands.doctor import find_gpus
from qdqtune.commands.inputs import sample_source
from qdqtune.commands.qualification import graphs
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.engines import TENSORRT_FAMILY, EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.options import with_timing_cache
from qdqtune.engines.runner import Handle, Runner
from qdqtune.engines.tensorrt.options import Span, with_spans
from qdqtune.errors import BadOption, rewording
from qdqtune.numerics.simulation import Session, onnxruntime_session
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.observer import Observer
from qdqtune.types import Layer, Sample

QUICKLY: Mapping[str, Any] = {"calibration_method": "minmax", "bias_correction": False}
"""How ranges are found: their accuracy is not what is checked."""

FP8_SINCE = 8.9
"""The first compute capability of NVIDIA's with FP8."""

RUNS = 5
"""Profiled inferences of a file. Chosen, not measured."""


class BrokenError(Exception):
    """A claim did not hold; the message says why."""


class NotApplicableError(Exception):
    """The engine cannot do what a claim is about; the message says why."""


@dataclass(frozen=True)
class GraphFiles:
    """The float file of a graph, and its samples, which also lie in the folder `data`."""

    plain: Path
    data: str
    samples: list[Sample]


@dataclass
class EngineAtHand:
    """An engine with the files and layers of graphs, which are made when they are first asked for. `simulation` is ONNX
    Runtime without fusion."""

    spec: EngineSpec
    folder: Path
    runner: Runner
    simulation: Session
    observer: Observer
    execution: Execution
    described: Mapping[str, str]
    _files: dict[str, GraphFiles] = field(default_factory=dict)
    _layers: dict[Path, tuple[Layer, ...]] = field(default_factory=dict)

    def files(self, name: str) -> GraphFiles:
        """The files of a graph."""
        if name not in self._files:
            model, place = graphs.GRAPHS[name].make(), self.folder / name.replace(" ", "_")
            place.mkdir()
            onnx.save(model, plain := place / "float.onnx")
            samples = graphs.samples_of(model)
            self._files[name] = GraphFiles(plain, str(sample_source(samples, place, self.execution)), samples)
        return self._files[name]

    def quantized(self, name: str) -> Path:
        """The file of a graph with pairs by the engine's rules, or with weight formats.

        Raises:
            NotApplicableError: the engine has no such numbers.
            QdqtuneError: the file cannot be made.
        """
        capability = self.described.get("compute_capability", "")
        if name == "fp8" and re.fullmatch(r"\d+\.\d+", capability) and float(capability) < FP8_SINCE:
            raise NotApplicableError(f"GPUs of compute capability {capability} have no FP8")
        files, how = self.files(name), graphs.GRAPHS[name].how
        made = files.plain.with_name("quantized.onnx")
        if not made.exists():
            given: dict[str, Any] = {"engine": self.spec.name, "calibration_data": files.data, **QUICKLY}
            given["time_limit"] = self.execution.seconds
            try:
                if "quant_type" in how:
                    self.runner.numeric_format(how["quant_type"])
                quantize(QuantizeOptions(files.plain, made, **given, **how))
            except BadOption as error:
                if not how:  # pairs in 8 bits are for every engine
                    raise
                raise NotApplicableError(str(error)) from error
        return made

    def loaded(self, file: Path) -> Handle:
        """The build of a file.

        Raises:
            EngineFailure: the engine refuses it.
        """
        with rewording(f"{file.name} is not built"):
            return self.runner.load(file)

    def layers(self, file: Path, sample: Sample) -> tuple[Layer, ...]:
        """The layers of a file.

        Raises:
            EngineFailure: there are none.
        """
        if file not in self._layers:
            self.runner.feed(sample)
            handle = self.loaded(file)
            with rewording(f"{file.name} has no layers"):
                self._layers[file] = self.runner.layers(handle, RUNS)
        return self._layers[file]

    def insist_on_device(self) -> None:
        """Go on only where models can run.

        Raises:
            NotApplicableError: the engine only builds here.
        """
        if self.described["device"] == "none":
            raise NotApplicableError("the engine only builds here: its device is not present")


@contextmanager
def opened(spec: EngineSpec, observer: Observer, execution: Execution) -> Iterator[EngineAtHand]:
    """A engine in a temporary folder.

    Raises:
        EngineUnavailable, BadOption: the engine cannot be opened.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        spec = with_timing_cache(spec, folder)
        sized = with_spans(spec, {graphs.OPEN: Span(*graphs.SIZES)}) if spec.name in TENSORRT_FAMILY else spec
        runner = stack.enter_context(Runner(sized, execution=execution, log_dir=folder / "logs"))
        described = runner.describe()
        if spec.name == "trtexec" and (gpus := find_gpus()[0]):  # it does not say this of its GPU
            described["compute_capability"] = gpus[0].compute_capability
        exact = onnxruntime_session(execution, fuse=False, rewrite=spec.name == "onnxruntime")
        yield EngineAtHand(spec, folder, runner, stack.enter_context(exact), observer, execution, described)
