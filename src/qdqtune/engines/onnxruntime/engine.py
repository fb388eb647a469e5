"""ONNX Runtime, on the CPU unless another execution provider is asked for."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime import InferenceSession as Session

from qdqtune.engines import CPU_PROVIDER, DENORMALS_SETTINGS, devices, formats, output_to, translated
from qdqtune.engines.coverage import read_model
from qdqtune.engines.onnxruntime import layers as onnxruntime_layers
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable
from qdqtune.graph.loading import data_files
from qdqtune.graph.saving import ONE_FILE_LIMIT, nbytes
from qdqtune.types import Array, Layer, NumericFormat, QType, QuantType, Tensors

LOG_WARNING, LOG_ERROR = 2, 3
"""Levels of ONNX Runtime's log."""

WARMUP = 1
"""Profiled inferences that do not count: the first one allocates."""

LOADED_ONCE = 2**29
"""Bytes from which a model is not loaded a second time to be profiled. Inferences of such a model are so long that what
the profiler adds to them is negligible. Chosen, not measured."""

NOWHERE = "constants"
"""Name of the discarded file for the weights of an optimized model, of which only the nodes are read."""

BLOCK = 4
"""How many inferences run in a row with the profiler, then without it, so that drift affects both alike. Chosen, not
measured."""

ORT_MESSAGES = "ONNX Runtime", re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+ : Load model from .*? failed:)?")
"""Arguments of `translated`: a name, and the beginning of messages, which is cut: it often names a temporary file."""

TOO_NEW = {
    r"Unsupported model IR version: (\d+), max supported IR version: (\d+)": "IR version",
    r"Opset (\d+) is under development .* is till opset (\d+)": "opset",
}
"""Messages of ONNX Runtime about a model of a later ONNX than it knows, and what is too new."""

INPUT_FOLDER = "session.model_external_initializers_file_folder_path"
KEEP_PAIRS = "session.disable_quant_qdq"
STOP_SPINNING = "session.force_spinning_stop"
"""Threads of a session spin for some 30 ms after an inference, longer than a turn takes. They would slow down another
session that is timed next."""

CONSTANTS_FILE = "session.optimized_model_external_initializers_file_name"
NO_PREPACKING = "session.disable_prepacking"


@dataclass(frozen=True)
class OnnxRuntimeOptions:
    """Options of ONNX Runtime.

    threads: CPU threads of each operator; operators run one after the other.
    provider: the execution provider.
    fuse: whether operators are fused. If not, each runs exactly as the file has it: that shows what pairs do to the
        values, not to the speed.
    fuse_pairs: whether Q/DQ pairs are fused with operators. If not, Q and DQ run as nodes of their own.
    denormals_as_zero: whether the CPU takes denormal numbers as zero. That is set for the threads that a session
        starts; for the thread that makes it, only the first session of a process counts.
    rewrite: without `fuse`, whether ONNX Runtime first rewrites the graph: it moves pairs, and rounds weights between
        them.
    """

    threads: int = 1
    provider: str = CPU_PROVIDER
    fuse: bool = True
    fuse_pairs: bool = True
    denormals_as_zero: bool = False
    rewrite: bool = False

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise BadOption(f"`threads` must be a whole number from 1 on, not {self.threads}")


def create(options: OnnxRuntimeOptions) -> OnnxRuntime:
    """Make the engine.

    Raises:
        EngineUnavailable: this build of ONNX Runtime lacks the provider.
    """
    available = ort.get_available_providers()
    if options.provider not in available:
        raise EngineUnavailable(
            f"ONNX Runtime here has no provider {options.provider!r}; it has {', '.join(available)}"
        )
    return OnnxRuntime(options)


class OnnxRuntime:
    """Builds models as sessions, all with the same options."""

    def __init__(self, options: OnnxRuntimeOptions) -> None:
        self._options = options

    def describe(self) -> dict[str, str]:
        """Version, CPU, and the instruction sets that decide which integer kernels run."""
        options = self._options
        return {
            "engine": "onnxruntime",
            "version": ort.__version__,
            "provider": options.provider,
            "threads": str(options.threads),
            "device": devices.processor_name(),
            "isa": " ".join(devices.instruction_sets()),
            **({} if options.fuse else {"fuse": "after rewrites" if options.rewrite else "no"}),
            **({} if options.fuse_pairs else {"fuse_pairs": "no"}),
            **({"denormals_as_zero": "yes"} if options.denormals_as_zero else {}),
        }

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        """On the CPU uint8 activations (see `formats`); on other providers symmetric int8, which all of them run.

        Raises:
            BadOption: for FP8.
        """
        numbers = formats.onnxruntime(quant_type)
        is_cpu = self._options.provider == CPU_PROVIDER
        return numbers if is_cpu else NumericFormat(QType.INT8, QType.INT8, symmetric=True)

    def build(self, model: Path, log: Path) -> OnnxRuntimeModel:
        """Build a model: load it into a session.

        Raises:
            EngineFailure: ONNX Runtime refuses the model.
            EngineUnavailable: the provider does not start on this machine.
        """
        with output_to(log), translated(*ORT_MESSAGES), _too_new():
            session = self.session(model)
        provider = self._options.provider
        if provider not in session.get_providers():  # its driver is missing: ONNX Runtime warns and uses the CPU
            raise EngineUnavailable(f"ONNX Runtime cannot start provider {provider!r} on this machine; see {log}")
        return OnnxRuntimeModel(self, model, session)

    def session(self, model: Path | bytes, entries: Mapping[str, str] = MappingProxyType({}), **more: Any) -> Session:
        """A session for a model: a file, or its bytes. `more` are attributes of `SessionOptions` in addition to those
        that this engine sets, `entries` are its config entries."""
        chosen, levels = self._options, ort.GraphOptimizationLevel
        unfused = levels.ORT_ENABLE_BASIC if chosen.rewrite else levels.ORT_DISABLE_ALL
        attributes = {
            "intra_op_num_threads": chosen.threads,
            "inter_op_num_threads": 1,
            "execution_mode": ort.ExecutionMode.ORT_SEQUENTIAL,
            "graph_optimization_level": levels.ORT_ENABLE_ALL if chosen.fuse else unfused,
            "log_severity_level": LOG_WARNING,
            "enable_mem_pattern": chosen.fuse,  # planning memory takes a time quadratic in the nodes of the graph
        }
        own = ({} if chosen.fuse_pairs else {KEEP_PAIRS: "1"}) | ({STOP_SPINNING: "1"} if chosen.threads > 1 else {})
        own |= {DENORMALS_SETTINGS["onnxruntime"]: "1"} if chosen.denormals_as_zero else {}
        options = ort.SessionOptions()
        for name, value in (attributes | more).items():
            setattr(options, name, value)
        for name, value in {**own, **entries}.items():
            options.add_session_config_entry(name, value)
        return Session(model if isinstance(model, bytes) else str(model), options, providers=[chosen.provider])


class OnnxRuntimeModel:
    """A session and the names of its inputs and outputs."""

    def __init__(self, engine: OnnxRuntime, path: Path, session: Session) -> None:
        self._engine = engine
        self._path = path
        self._session = session
        self._inputs = frozenset(given.name for given in session.get_inputs())
        self._outputs = [output.name for output in session.get_outputs()]
        self._reuses_outputs = True

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """Implements `Built.run`."""
        with translated(*ORT_MESSAGES):
            return dict(zip(self._outputs, self._session.run(self._outputs, self._known_inputs(inputs)), strict=True))

    def time(self, inputs: Tensors, runs: int) -> float:
        """`Built.time`, with inputs and outputs on the device."""
        with translated(*ORT_MESSAGES):
            given = self._known_inputs(inputs)
            if any(array.dtype.kind in "OSU" for array in given.values()):  # strings, which cannot be bound
                start = time.perf_counter()
                for _ in range(runs):
                    self._session.run(self._outputs, given)
                return (time.perf_counter() - start) / runs
            binding = self._session.io_binding()
            for name, array in given.items():
                binding.bind_cpu_input(name, np.asarray(array, order="C"))  # copies to the provider's device, if any
            binding.synchronize_inputs()
            try:
                return self._seconds(binding, runs)
            except RuntimeError:
                if not self._reuses_outputs:
                    raise
                self._reuses_outputs = False
                return self._seconds(binding, runs)

    def _seconds(self, binding: ort.IOBinding, runs: int) -> float:
        """Seconds per inference. The first inference allocates the outputs, and the others write into them.

        ONNX Runtime refuses to write again into an output whose shape differs from that in the model. For such a model
        each inference allocates its outputs.
        """
        start = time.perf_counter()
        for run in range(runs):
            if run == 0 or not self._reuses_outputs:
                binding.clear_binding_outputs()
                for name in self._outputs:
                    binding.bind_output(name)
            self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return (time.perf_counter() - start) / runs

    def layers(self, inputs: Tensors, runs: int, *, saves_memory: bool = False) -> tuple[Layer, ...]:
        """`Built.layers`: those of a second session of the model, which is profiled.

        In that session every node has a name, and a fused node is named after the nodes that it was made of.
        """
        model, feed = read_model(self._path), self._known_inputs(inputs)
        is_large = saves_memory or nbytes(self._path) >= LOADED_ONCE
        with TemporaryDirectory(prefix="qdqtune-") as name:
            folder = Path(name)
            (folder / NOWHERE).symlink_to("/dev/null")
            written = {"optimized_model_filepath": str(folder / "optimized.onnx"), "log_severity_level": LOG_ERROR}
            profiled = {"enable_profiling": True, "profile_file_prefix": str(folder / "profile")}
            make = partial(self._engine.session, model.SerializeToString())
            beside = {INPUT_FOLDER: str(self._path.parent)}
            with translated(*ORT_MESSAGES):
                plain = [self.time(inputs, 1) for _ in range(runs)] if is_large else []
                if is_large:  # a session that writes its graph keeps all weights as they were before packing
                    del self._session
                    make({**beside, CONSTANTS_FILE: NOWHERE, NO_PREPACKING: "1"}, **written)
                    session = self._session = make(beside, **profiled)
                else:
                    session = make({**beside, CONSTANTS_FILE: NOWHERE}, **written, **profiled)
                for _ in range(WARMUP):
                    session.run(self._outputs, feed)
                for first in range(0, runs, BLOCK):
                    block = min(BLOCK, runs - first)
                    if not is_large:
                        plain += [self.time(inputs, 1) for _ in range(block)]
                    for _ in range(block):
                        session.run(self._outputs, feed)
                profile = Path(session.end_profiling())
            return onnxruntime_layers.report(model.graph, folder / "optimized.onnx", profile, WARMUP, plain)

    def save(self, path: Path) -> None:
        """Write the optimized model as an ONNX file, and load it. If the model has external data or more than 2 GB, its
        constants go to `<name>.data` beside it.

        The file holds the fusions that any machine can use. The last level of optimization, which chooses layouts for
        the CPU at hand, is left to the session that opens the file.

        Raises:
            EngineFailure: the file cannot be written, or ONNX Runtime does not load it.
        """
        is_split = bool(data_files(self._path)) or nbytes(self._path) >= ONE_FILE_LIMIT
        entries = {CONSTANTS_FILE: f"{path.name}.data"} if is_split else {}
        level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        with translated(*ORT_MESSAGES):
            self._engine.session(
                self._path, entries, optimized_model_filepath=str(path), graph_optimization_level=level
            )
            self._engine.session(path)

    def _known_inputs(self, inputs: Tensors) -> dict[str, Array]:
        """The arrays that the model has inputs for: in some versions of a model, inputs have become constants."""
        return {name: array for name, array in inputs.items() if name in self._inputs}

    def close(self) -> None:
        """Drop the session."""
        del self._session


@contextmanager
def _too_new() -> Iterator[None]:
    """Raise an EngineFailure in one sentence where ONNX Runtime refuses a model because its ONNX is too new."""
    try:
        yield
    except Exception as error:  # as in `translated`
        for form, what in TOO_NEW.items():
            if found := re.search(form, str(error), re.DOTALL):
                raise EngineFailure(
                    f"the model has {what} {found[1]}, and ONNX Runtime {ort.__version__} reads up to {found[2]}: "
                    "export it for that one, or install a later onnxruntime"
                ) from error
        raise
