"""ONNX Runtime, on the CPU unless another execution provider is asked for."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime import InferenceSession as Session

from qdqtune.engines import CPU_PROVIDER, devices, formats, output_to, translated
from qdqtune.engines.coverage import read_model
from qdqtune.engines.library_settings import DENORMALS_AS_ZERO, OnnxRuntimeOptions, session_settings
from qdqtune.engines.machine import instruction_sets, is_simulated, processor_name, simulated_chip
from qdqtune.engines.onnxruntime import layers as onnxruntime_layers
from qdqtune.engines.providers import Provider, table_of
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable, one_line
from qdqtune.graph.loading import data_files
from qdqtune.graph.model import Model
from qdqtune.graph.saving import ONE_FILE_LIMIT, nbytes
from qdqtune.types import Array, Layer, NumericFormat, QuantType, Tensors

LOG_VERBOSE, LOG_WARNING, LOG_ERROR = 0, 2, 3
"""Levels of ONNX Runtime's log."""

WARMUP = 1
"""Profiled inferences that do not count: the first one allocates."""

LOADED_ONCE = 2**28
"""Bytes from which a model is not loaded a second time to be profiled. Inferences of such a model are so long that what
the profiler adds to them is negligible. Chosen, not measured."""

NOWHERE = "constants"
"""Name of the discarded file for the weights of an optimized model, of which only the nodes are read."""

BLOCK = 4
"""How many inferences run in a row with the profiler, then without it, so that drift affects both alike. Chosen, not
measured."""

refusals_in_words = partial(
    translated,
    "ONNX Runtime",
    re.compile(
        r"^\[ONNXRuntimeError\] : \d+ : (\w+ : Load model from .*? failed:)?((\w+ : )?/\S+:\d+ .*?\) (?=[A-Z]))?"
    ),
)
"""`translated`, without the beginning of messages: it often names a temporary file and a place in ONNX Runtime's
sources."""

INPUT_FOLDER = "session.model_external_initializers_file_folder_path"
KEEP_PAIRS = "session.disable_quant_qdq"
STOP_SPINNING = "session.force_spinning_stop"
"""Threads of a session spin for some 30 ms after an inference, longer than a turn takes. They would slow down another
session that is timed next."""

CONSTANTS_FILE = "session.optimized_model_external_initializers_file_name"
NO_PREPACKING = "session.disable_prepacking"
CUDA_GRAPHS = "enable_cuda_graph"
RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"


def create(options: OnnxRuntimeOptions) -> OnnxRuntime:
    table, library = table_of(options.provider), options.library
    if CUDA_GRAPHS in (options.provider_options or {}):  # they read inputs where the first inference had them
        raise BadOption(f"`provider_options` {CUDA_GRAPHS} wants inputs in fixed places: leave it out")
    if not library and not table.plugin:
        available = ort.get_available_providers()
        if options.provider not in available:
            how = f": {table.install}" if table.install else ""
            raise EngineUnavailable(
                f"ONNX Runtime here has no provider {options.provider!r}; it has {', '.join(available)}{how}"
            )
        return OnnxRuntime(options)
    if not library:
        if importlib.util.find_spec(table.plugin) is None:
            raise EngineUnavailable(f"provider {table.ep} is not installed: {table.install}")
        library = import_module(table.plugin).get_library_path()
    try:
        _register(options.provider, library)
    except Exception as error:  # what ONNX Runtime raises has no common class
        raise EngineUnavailable(f"provider {options.provider} does not load: {one_line(error)}") from error
    found = [device for device in ort.get_ep_devices() if device.ep_name == options.provider]
    if not found:
        raise EngineUnavailable(f"provider {options.provider} loads, and finds no device on this machine")
    return OnnxRuntime(options, found[:1])


@cache
def _register(provider: str, library: str) -> None:
    ort.register_execution_provider_library(provider, library)


class OnnxRuntime:
    """Builds models as sessions, all with the same options. `plugged_in` are devices of a plug-in's provider."""

    def __init__(self, options: OnnxRuntimeOptions, plugged_in: Sequence[ort.OrtEpDevice] = ()) -> None:
        self._options, self._plugged_in = options, plugged_in
        self.table = table_of(options.provider)
        self._own = simulated_chip(self.table) | dict(options.provider_options or {})

    def describe(self) -> dict[str, str]:
        """Version, CPU, and the instruction sets that decide which integer kernels run."""
        options, table, own = self._options, self.table, self._own
        device, driver = processor_name(), ""
        gpus = devices.gpus_here() if table.is_gpu else ()
        if gpus:
            device, driver = devices.gpu(gpus[0])
        elif table.simulated_on and is_simulated(table.name):
            device = f"simulator on {device}"
        unfused = "after rewrites" if options.rewrite else "no"
        told = {
            "engine": table.name,
            "version": ort.__version__,
            "provider": options.provider,
            "plugin": metadata.version(table.plugin) if table.plugin else "",
            "provider_options": " ".join(f"{name}={own[name]}" for name in sorted(own)),
            "threads": str(options.threads),
            "device": device,
            "driver": driver,
            "isa": " ".join(instruction_sets()),
            "fuse": "" if options.fuse else unfused,
            "fuse_pairs": "" if options.fuse_pairs else "no",
            "denormals_as_zero": "" if options.denormals_as_zero else "no",
        }
        return {name: text for name, text in told.items() if text}

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        """Those of `formats`; on a provider without a table symmetric int8, which all of them run."""
        numbers = formats.numeric_format(self.table.name, quant_type)
        return numbers if self._options.provider == CPU_PROVIDER else self.table.numbers

    def build(self, model: Path, log: Path) -> OnnxRuntimeModel:
        with output_to(log), refusals_in_words():
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
        usual = session_settings(chosen.threads)
        attributes = usual | {
            "execution_mode": getattr(ort.ExecutionMode, usual["execution_mode"]),
            "graph_optimization_level": getattr(levels, usual["graph_optimization_level"]) if chosen.fuse else unfused,
            "log_severity_level": LOG_WARNING,
            "enable_mem_pattern": chosen.fuse,  # planning memory takes a time quadratic in the nodes of the graph
        }
        own = ({} if chosen.fuse_pairs else {KEEP_PAIRS: "1"}) | ({STOP_SPINNING: "1"} if chosen.threads > 1 else {})
        own |= {DENORMALS_AS_ZERO: "1"} if chosen.denormals_as_zero else {}
        options = ort.SessionOptions()
        for name, value in (attributes | more).items():
            setattr(options, name, value)
        for name, value in {**own, **entries}.items():
            options.add_session_config_entry(name, value)
        content = model if isinstance(model, bytes) else str(model)
        given = {**self.table.options, **self._own}
        if self._plugged_in:
            options.add_provider_for_devices(self._plugged_in, given)
            return Session(content, options)
        return Session(content, options, providers=[(chosen.provider, given)])


class OnnxRuntimeModel:
    def __init__(self, engine: OnnxRuntime, path: Path, session: Session) -> None:
        self._engine = engine
        self._path = path
        self._session = session
        self._inputs = frozenset(given.name for given in session.get_inputs())
        self._outputs = [output.name for output in session.get_outputs()]
        self._reuses_outputs = True

    def run(self, inputs: Tensors) -> dict[str, Array]:
        with refusals_in_words():
            given = self._known_inputs(inputs)
            return dict(zip(self._outputs, self._session.run(self._outputs, given), strict=True))

    def time(self, inputs: Tensors, runs: int) -> float:
        """`Built.time`, with inputs and outputs on the device."""
        with refusals_in_words():
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
                    binding.bind_output(name, self._engine.table.memory)
            self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return (time.perf_counter() - start) / runs

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """`Built.layers`: those of a second session of the model, which is profiled.

        In that session every node has a name, and a fused node is named after the nodes that it was made of.
        """
        model, feed = read_model(self._path), self._known_inputs(inputs)
        if self._engine.table.compiles:
            return self._partitions(model, self._engine.table)
        is_large = nbytes(self._path) >= LOADED_ONCE
        with TemporaryDirectory(prefix="profile-") as name:
            folder = Path(name)
            (folder / NOWHERE).symlink_to(os.devnull)
            written = {"optimized_model_filepath": str(folder / "optimized.onnx"), "log_severity_level": LOG_ERROR}
            profiled = {"enable_profiling": True, "profile_file_prefix": str(folder / "profile")}
            make = partial(self._engine.session, model.proto.SerializeToString())
            beside = {INPUT_FOLDER: str(self._path.parent)}
            with refusals_in_words():
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
            files = folder / "optimized.onnx", profile
            return onnxruntime_layers.report(model, *files, WARMUP, plain, self._engine.table)

    def _partitions(self, model: Model, table: Provider) -> tuple[Layer, ...]:
        """The layers of a provider that runs many nodes as one, without times: a second session tells which they are,
        and its log why others run elsewhere."""
        if not hasattr(Session, "get_provider_graph_assignment_info"):
            raise EngineFailure(f"ONNX Runtime {ort.__version__} does not say where nodes run: install 1.24 or later")
        with TemporaryDirectory(prefix="profile-") as name:
            log, entries = Path(name) / "log", {INPUT_FOLDER: str(self._path.parent), RECORD_ASSIGNMENT: "1"}
            with output_to(log), refusals_in_words():
                session = self._engine.session(model.proto.SerializeToString(), entries, log_severity_level=LOG_VERBOSE)
                found = session.get_provider_graph_assignment_info()
            parts = [(part.ep_name, [(node.name, node.op_type) for node in part.get_nodes()]) for part in found]
            return onnxruntime_layers.assigned_layers(
                model, parts, table, log.read_text(encoding="utf-8", errors="replace")
            )

    def save(self, path: Path) -> None:
        """Write the optimized model as an ONNX file, and load it. If the model has external data or more than 2 GB, its
        constants go to `<name>.data` beside it.

        The file holds the fusions that any machine can use. The last level of optimization, which chooses layouts for
        the CPU at hand, is left to the session that opens the file."""
        is_split = bool(data_files(self._path)) or nbytes(self._path) >= ONE_FILE_LIMIT
        entries = {CONSTANTS_FILE: f"{path.name}.data"} if is_split else {}
        level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        with refusals_in_words():
            self._engine.session(
                self._path, entries, optimized_model_filepath=str(path), graph_optimization_level=level
            )
            self._engine.session(path)

    def _known_inputs(self, inputs: Tensors) -> dict[str, Array]:
        """The arrays that the model has inputs for: in some versions of a model, inputs have become constants."""
        return {name: array for name, array in inputs.items() if name in self._inputs}

    def close(self) -> None:
        del self._session
