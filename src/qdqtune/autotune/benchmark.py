"""The one benchmark that all functions share, because scripts expect it so: `init_benchmark_instance` makes it."""

from __future__ import annotations

import importlib.util
import json
import logging
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, inf
from pathlib import Path

import numpy as np

from qdqtune.autotune.graphs import AutotunerError
from qdqtune.calibration.prepare import Data, Prepared, prepare
from qdqtune.commands.doctor import NEEDS, engine_state
from qdqtune.engines import EngineSpec
from qdqtune.engines.machine import is_simulated, simulated
from qdqtune.engines.runner import Handle, Runner
from qdqtune.engines.tensorrt.options import usual_shapes
from qdqtune.errors import BadModel, EngineRefused, EngineUnavailable
from qdqtune.graph.loading import load, read
from qdqtune.graph.model import Model
from qdqtune.system.writing import atomic_write, temporary_folder
from qdqtune.timing.pairing import rounds_of
from qdqtune.timing.ratios import Plan, compare, ratio
from qdqtune.tuning.settings import EFFORTS, looks_until
from qdqtune.types import NumericFormat, QuantType

log = logging.getLogger("qdqtune.autotune")


def default_engine() -> tuple[str, str]:
    """The engine where none is named, and why: TensorRT where it can be used, else ONNX Runtime."""
    if not all(importlib.util.find_spec(package) for package in NEEDS["tensorrt"][0]):
        return "onnxruntime", f"TensorRT is not installed: {NEEDS['tensorrt'][1]}"
    with temporary_folder() as folder:
        state = engine_state("tensorrt", folder)
    if state.status == "usable":
        return "tensorrt", f"TensorRT {state.version} on {state.device}"
    return "onnxruntime", f"TensorRT cannot be used here: {state.reason}"


def rounds_for(timing_runs: int) -> int:
    """Rounds in which each model runs at least `timing_runs` times: a round has two slots for each."""
    return max(12, ceil(timing_runs / 2))


class Benchmark:
    """An engine, and the first model that it has timed, with which all later ones are compared in interleaved rounds.

    So what two calls give can be compared, though minutes lie between them. The timing cache, plug-in libraries and
    trtexec's arguments go to engines that know them; models are fed `calibration_data` (as in `Settings`), random
    inputs without it.
    """

    engine: str | None = None
    """That of a subclass; else `default_engine` chooses where none is given."""

    def __init__(
        self,
        timing_cache_file: str | None = None,
        warmup_runs: int = 5,
        timing_runs: int = 20,
        plugin_libraries: Sequence[str] | None = None,
        trtexec_args: str | Sequence[str] | None = None,
        *,
        engine: str | EngineSpec | None = None,
        calibration_data: str | None = None,
    ) -> None:
        if not isinstance(engine, EngineSpec):
            name, known = engine or self.engine or default_engine()[0], dict[str, object]()
            if name in ("tensorrt", "trtexec"):
                known |= {"timing_cache": timing_cache_file, "plugin_libraries": list(plugin_libraries or ())}
            if name == "trtexec":
                words = [trtexec_args] if isinstance(trtexec_args, str) else map(shlex.quote, trtexec_args or ())
                known["trtexec_args"] = " ".join(words)
            engine = EngineSpec(name, {key: value for key, value in known.items() if value})
        rounds, usual = rounds_for(timing_runs), EFFORTS["default"].looks
        self.spec, self.calibration_data = engine, calibration_data
        self.plan = Plan((rounds,), warmup=warmup_runs)
        self.search_plan = replace(self.plan, looks=looks_until(rounds, usual))
        """The same rounds for a search, which may decide earlier."""
        self._folder = temporary_folder()
        self._runner = Runner(self.spec, log_dir=self._folder.path)
        self._inputs: list[bytes] = []
        self._first: Handle | None = None
        self._first_ms = 0.0
        self._number = 0

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        """How the engine wants its numbers."""
        return self._runner.numeric_format(quant_type)

    def prepared(self, model: Model, data: str | None = None) -> Prepared:
        """A model at the shapes that the engine tunes for, and samples for it."""
        data = data or self.calibration_data
        return prepare(model, Data(data, input_shapes=usual_shapes(self.spec, data)), most=0)

    def run(
        self,
        model: str | Path | bytes,
        log_file: str | Path | None = None,
        flush_timing_cache: bool = False,
        export_profile_path: str | Path | None = None,
    ) -> float:
        """Milliseconds per inference on the first sample, or on a random one. `export_profile_path` gets the times of
        layers in the form of trtexec's --exportProfile. The timing cache is up to date after each build in any case.

        Infinite, with a warning that tells why, where there is none: the engine refuses the model or cannot be used at
        all, or there is no such model.
        """
        self._number += 1
        path, log_path = (self._folder.path / f"model_{self._number}.{kind}" for kind in ("onnx", "log"))
        if isinstance(model, bytes):
            path.write_bytes(model)
        else:
            path = Path(model)
        latency_ms = inf
        try:
            latency_ms = self._timed(path, log_path.stem)
            if export_profile_path is not None:
                self._profile(path, Path(export_profile_path))
        except (BadModel, EngineUnavailable, EngineRefused) as error:
            latency_ms = inf
            log.warning("the model cannot be timed: %s", error)
        for old in self._folder.path.glob("*.onnx"):  # a long run would fill the disk
            if self._first is None or self._first.path != old:
                old.unlink()
        if log_file is not None and log_path.exists():
            shutil.copyfile(log_path, log_file)
        return latency_ms

    __call__ = run

    def _profile(self, model: Path, target: Path) -> None:
        layers = self._runner.report(model, self.prepared(load(model)).samples.first(1)[0], 5, "profile")
        times = [{"name": layer.name, "averageMs": layer.time_ms or 0.0} for layer in layers]
        with atomic_write(target) as fresh:
            fresh.write_text(json.dumps([{"count": 5}, *times], indent=2), encoding="utf-8")

    def _timed(self, path: Path, log_name: str) -> float:
        if is_simulated(self.spec.name):
            raise EngineUnavailable(simulated(self.spec.name))
        inputs = [v.SerializeToString() for v in read(path).graph.input]
        if self._first is not None and inputs != self._inputs:  # of another network
            self._runner.unload(self._first)
            self._first = None
        if self._first is None:
            self._runner.feed(self.prepared(load(path)).samples.first(1)[0])
        handle = self._runner.load(path, log_name, fresh=True)
        first, rounds = self._first or handle, None
        try:
            taken = rounds_of(self._runner, first, handle, self.plan, seed=0)
            rounds = compare(taken, self.plan, decided=lambda _: False)
        finally:
            if rounds is None or self._first is not None:
                self._runner.unload(handle)
        if self._first is not None:
            return ratio(rounds, self.plan).median * self._first_ms
        self._first, self._inputs, self._first_ms = handle, inputs, float(np.median(rounds.a)) * 1e3
        return self._first_ms


class TensorRTPyBenchmark(Benchmark):
    """TensorRT by its Python package."""

    engine = "tensorrt"


class TrtExecBenchmark(Benchmark):
    """TensorRT by its program trtexec."""

    engine = "trtexec"


_instance: Benchmark | None = None


def init_benchmark_instance(
    use_trtexec: bool = False,
    plugin_libraries: Sequence[str] | None = None,
    timing_cache_file: str | None = None,
    warmup_runs: int = 5,
    timing_runs: int = 20,
    trtexec_args: str | Sequence[str] | None = None,
    engine: str | EngineSpec | None = None,
    calibration_data: str | None = None,
) -> Benchmark:
    """Make the benchmark that `benchmark_onnx_model` and the workflow use; `engine` names another than the default."""
    global _instance
    _instance = Benchmark(
        timing_cache_file,
        warmup_runs,
        timing_runs,
        plugin_libraries,
        trtexec_args,
        engine=engine or ("trtexec" if use_trtexec else None),
        calibration_data=calibration_data,
    )
    return _instance


def instance() -> Benchmark:
    if _instance is None:
        raise AutotunerError("Benchmark instance not initialized: call init_benchmark_instance() first")
    return _instance


def instance_or_default(default: Callable[[], Benchmark] = init_benchmark_instance) -> Benchmark:
    """The benchmark; where there is none yet that of `default`, which by default is there for all that follows."""
    return _instance or default()


def benchmark_onnx_model(
    model_path: str | Path | bytes,
    log_file: str | Path | None = None,
    flush_timing_cache: bool = False,
    export_profile_path: str | Path | None = None,
) -> float:
    """Milliseconds per inference, as the benchmark tells them when it is called (see `Benchmark.run`).

    Raises:
        AutotunerError: `init_benchmark_instance` comes first.
    """
    return instance().run(model_path, log_file, flush_timing_cache, export_profile_path)
