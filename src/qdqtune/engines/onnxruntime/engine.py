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

from qdqtune.engines import cpu, formats, output_to, translated
from qdqtune.engines.coverage import read_model
from qdqtune.engines.memory import is_scarce
from qdqtune.engines.onnxruntime import layers as onnxruntime_layers
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable
from qdqtune.graph.loading import data_files
from qdqtune.graph.saving import ONE_FILE_LIMIT, nbytes
from qdqtune.types import Array, Layer, NumericFormat, QType, QuantType, Tensors

CPU = "CPUExecutionProvider"
WARNING, ERROR = 2, 3
WARMUP = 1
"""Inferences that are profiled in vain: the first one allocates."""

LARGE = 2**29
"""Bytes from which a model is never in memory twice. Such a one is slow, and what the profiler adds does not count."""

NOWHERE = "constants"
"""The file for the weights of an optimized model that is read for its nodes alone."""

BLOCK = 4
"""Inferences in a row, with the profile and without it in turn: drift meets both alike."""

VENDOR = "ONNX Runtime", re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+ : Load model from .*? failed:)?")
"""Its name, and what precedes its messages: files that it names are often temporary."""

TOO_NEW = {
    r"Unsupported model IR version: (\d+), max supported IR version: (\d+)": "IR version",
    r"Opset (\d+) is under development .* is till opset (\d+)": "opset",
}
"""How it refuses a model from a later ONNX than it knows, and what it is that is too new."""

INPUT_FOLDER = "session.model_external_initializers_file_folder_path"
KEEP_PAIRS = "session.disable_quant_qdq"
STOP_SPINNING = "session.force_spinning_stop"
"""Threads of a session wait busily for some 30 ms after an inference, longer than a slot takes: beside another session
they would be timed with that one."""

EXTERNAL = "session.optimized_model_external_initializers_file_name"
UNPACKED = "session.disable_prepacking"


def create(
    threads: int = 1, provider: str = CPU, fuse: bool = True, fuse_pairs: bool = True, rewrite: bool = False
) -> OnnxRuntime:
    """The engine with `threads` threads per operator on one execution provider.

    Without `fuse` every operator runs by itself, exactly as the file has it: the arithmetic of pairs, not its speed.
    With `rewrite` it runs as the graph stands after ONNX Runtime's own rewrites, which move pairs and round weights
    between them, before anything is fused. Without `fuse_pairs` only pairs run by themselves.

    Raises:
        BadOption: `threads` is not positive.
        EngineUnavailable: this build of ONNX Runtime lacks the provider.
    """
    if threads < 1:
        raise BadOption(f"--threads must be a whole number from 1 on, not {threads}")
    available = ort.get_available_providers()
    if provider not in available:
        raise EngineUnavailable(f"ONNX Runtime here has no provider {provider!r}; it has {', '.join(available)}")
    return OnnxRuntime(threads, provider, fuse, fuse_pairs, rewrite)


@dataclass(frozen=True)
class OnnxRuntime:
    """Sessions with all graph optimizations (without `fuse` with none, or those that `rewrite`), one operator after the
    other."""

    threads: int
    provider: str
    fuse: bool = True
    fuse_pairs: bool = True
    rewrite: bool = False

    def describe(self) -> dict[str, str]:
        """Version, CPU, and the instruction sets that decide which integer kernels run."""
        return {
            "engine": "onnxruntime",
            "version": ort.__version__,
            "provider": self.provider,
            "threads": str(self.threads),
            "device": cpu.model_name(),
            "isa": cpu.instruction_sets(),
            **({} if self.fuse else {"fuse": "after rewrites" if self.rewrite else "no"}),
            **({} if self.fuse_pairs else {"fuse_pairs": "no"}),
        }

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        """On the CPU uint8 activations (see `formats`); on other providers symmetric int8, which all of them take.

        Raises:
            BadOption: for FP8.
        """
        numbers = formats.onnxruntime(quant_type)
        return numbers if self.provider == CPU else NumericFormat(QType.INT8, QType.INT8, symmetric=True)

    def build(self, model: Path, log: Path) -> OnnxRuntimeModel:
        """A session for the model.

        Raises:
            EngineFailure: ONNX Runtime refuses the model.
            EngineUnavailable: the provider does not start on this machine.
        """
        with output_to(log), translated(*VENDOR), _too_new():
            session = self.session(model)
        # A provider whose driver is missing makes ONNX Runtime warn and use the CPU.
        if self.provider not in session.get_providers():
            raise EngineUnavailable(f"ONNX Runtime cannot start provider {self.provider!r} on this machine; see {log}")
        return OnnxRuntimeModel(self, model, session)

    def session(self, model: Path | bytes, entries: Mapping[str, str] = MappingProxyType({}), **more: Any) -> Session:
        """A session as this engine runs them; `more` are attributes of its options, `entries` their config entries."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        levels = ort.GraphOptimizationLevel
        least = levels.ORT_ENABLE_BASIC if self.rewrite else levels.ORT_DISABLE_ALL
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if self.fuse else least
        options.log_severity_level = WARNING
        options.enable_mem_pattern = self.fuse  # a plan of memory takes a time that grows with the square of the graph
        if not self.fuse_pairs:
            options.add_session_config_entry(KEEP_PAIRS, "1")
        if self.threads > 1:
            options.add_session_config_entry(STOP_SPINNING, "1")
        for name, value in more.items():
            setattr(options, name, value)
        for name, value in entries.items():
            options.add_session_config_entry(name, value)
        return Session(model if isinstance(model, bytes) else str(model), options, providers=[self.provider])


class OnnxRuntimeModel:
    """A session and the names of its inputs and outputs."""

    def __init__(self, engine: OnnxRuntime, path: Path, session: Session) -> None:
        self._engine = engine
        self._path = path
        self._session = session
        self._inputs = frozenset(given.name for given in session.get_inputs())
        self._outputs = [output.name for output in session.get_outputs()]
        self._writes_twice = True

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """One inference.

        Raises:
            EngineFailure: ONNX Runtime cannot run the model on these inputs.
        """
        with translated(*VENDOR):
            return dict(zip(self._outputs, self._session.run(self._outputs, self._taken(inputs)), strict=True))

    def time(self, inputs: Tensors, runs: int) -> float:
        """Seconds per inference; inputs are on the device and outputs stay there.

        Raises:
            EngineFailure: ONNX Runtime cannot run the model on these inputs.
        """
        with translated(*VENDOR):
            given = self._taken(inputs)
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
                if not self._writes_twice:
                    raise
                self._writes_twice = False
                return self._seconds(binding, runs)

    def _seconds(self, binding: ort.IOBinding, runs: int) -> float:
        """Seconds per inference. Outputs are made by the first one and written again by the others.

        Where a model declares an output with another shape than it has, ONNX Runtime makes it and then refuses to write
        it again: so each inference makes its own.
        """
        start = time.perf_counter()
        for run in range(runs):
            if run == 0 or not self._writes_twice:
                binding.clear_binding_outputs()
                for name in self._outputs:
                    binding.bind_output(name)
            self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return (time.perf_counter() - start) / runs

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """What a second session of the same model reports when it is profiled; see `Built.layers`.

        There every node has a name: fused nodes are called after those that they were made of.

        Raises:
            EngineFailure: ONNX Runtime cannot run the model on these inputs, or cannot write its optimized graph.
        """
        model, feed = read_model(self._path), self._taken(inputs)
        is_large = is_scarce() or nbytes(self._path) >= LARGE
        with TemporaryDirectory(prefix="qdqtune-") as name:
            folder = Path(name)
            (folder / NOWHERE).symlink_to("/dev/null")
            written = {"optimized_model_filepath": str(folder / "optimized.onnx"), "log_severity_level": ERROR}
            profiled = {"enable_profiling": True, "profile_file_prefix": str(folder / "profile")}
            make = partial(self._engine.session, model.SerializeToString())
            beside = {INPUT_FOLDER: str(self._path.parent)}
            with translated(*VENDOR):
                plain = [self.time(inputs, 1) for _ in range(runs)] if is_large else []
                if is_large:  # a session that writes its graph keeps all weights as they were before they were packed
                    del self._session
                    make({**beside, EXTERNAL: NOWHERE, UNPACKED: "1"}, **written)
                    session = self._session = make(beside, **profiled)
                else:
                    session = make({**beside, EXTERNAL: NOWHERE}, **written, **profiled)
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
        """Write the optimized model as an ONNX file, and load it. If the model has external data or more than 2 GB, the
        constants go to `<name>.data` beside it.

        It holds the fusions that any machine can use. The last level of optimization chooses layouts for the CPU at
        hand: a session makes that choice again when it opens the file.

        Raises:
            EngineFailure: the file cannot be written, or ONNX Runtime does not load what was.
        """
        is_split = bool(data_files(self._path)) or nbytes(self._path) >= ONE_FILE_LIMIT
        entries = {EXTERNAL: f"{path.name}.data"} if is_split else {}
        level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        with translated(*VENDOR):
            self._engine.session(
                self._path, entries, optimized_model_filepath=str(path), graph_optimization_level=level
            )
            self._engine.session(path)

    def _taken(self, inputs: Tensors) -> dict[str, Array]:
        """What the model has inputs for: a sample may also serve a file where fewer inputs are constants."""
        return {name: array for name, array in inputs.items() if name in self._inputs}

    def close(self) -> None:
        """Drop the session."""
        del self._session


@contextmanager
def _too_new() -> Iterator[None]:
    """The refusal of a model from a later ONNX than the library knows, in a sentence.

    Raises:
        EngineFailure: it is one.
    """
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
