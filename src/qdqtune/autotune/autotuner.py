"""ModelOpt's search loop: `generate` and `export_onnx` say what to measure, the script measures and calls `submit`.

A scheme is a set of pairs for a pattern: regions with the same structure. Each scheme of the current region's pattern
is tried on top of the best placement so far, and kept only if it is faster by `Config.performance_threshold`. Scripts
measure with one benchmark for all functions, which `init_benchmark_instance` makes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import chain
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqtune.autotune.insertion_points import Config, InsertionScheme, PatternCache, PatternSchemes, RegionPattern
from qdqtune.autotune.region_search import (
    AutotunerNotInitializedError,
    CombinedRegionSearch,
    GraphLike,
    InvalidSchemeError,
    Region,
    as_proto,
    leaves_first,
    patterns_of,
)
from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.prepare import Data, Prepared, prepare
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.commands.doctor import engine_state
from qdqtune.engines import EngineSpec
from qdqtune.engines.facts import facts_of
from qdqtune.engines.machine import simulated
from qdqtune.engines.runner import Handle, Runner
from qdqtune.engines.tensorrt.options import usual_shapes
from qdqtune.errors import BadModel, BadState, BaselineFailed, EngineRefused, EngineUnavailable
from qdqtune.graph.float16 import HALF, OPSET
from qdqtune.graph.inference import with_float_type
from qdqtune.graph.loading import load, load_proto, read, with_opset
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import consistent, possible_edges
from qdqtune.search.region import RegionSearch
from qdqtune.search.regions import patterns
from qdqtune.search.regions.patterns import Pattern, tunable
from qdqtune.system.checks import check_outputs, record
from qdqtune.system.writing import atomic_write, temporary_folder
from qdqtune.timing.race import compare_builds
from qdqtune.timing.ratios import Plan, ratio
from qdqtune.tuning.folder import pattern_cache_of
from qdqtune.tuning.result import Result
from qdqtune.tuning.store import ConversationRecord, Store
from qdqtune.tuning.subject import FLOAT_TYPES
from qdqtune.types import Placement

log = logging.getLogger("qdqtune.autotune")


# The benchmark


def default_engine() -> tuple[str, str]:
    """The engine if none is named, and why: TensorRT if available, else ONNX Runtime."""
    state = engine_state("tensorrt")
    if state.status == "usable":
        return "tensorrt", f"TensorRT {state.version} on {state.device}"
    return "onnxruntime", f"TensorRT cannot be used here: {': '.join(filter(None, (state.reason, state.remedy)))}"


def spec_of(
    engine: str, timing_cache: str | None, plugin_libraries: Sequence[str] | None, trtexec_args: str | None
) -> EngineSpec:
    options: dict[str, object] = {}
    if facts_of(engine).has_timing_cache:
        options = {"timing_cache": timing_cache, "plugin_libraries": list(plugin_libraries or ())}
    if engine == "trtexec":
        options["trtexec_args"] = trtexec_args
    return EngineSpec(engine, {key: value for key, value in options.items() if value})


def rounds_for(timing_runs: int) -> int:
    """Half of `timing_runs`, at least 12: each model has two turns in a round (see `types.Turn`)."""
    return max(12, ceil(timing_runs / 2))


class Benchmark:
    """Times models on an engine: `engine`, or `default_engine` if that is None.

    All models are timed in interleaved rounds with the first one, so that latencies of two calls can be compared even
    if minutes lie between them. The timing cache, plug-in libraries and trtexec's arguments are passed to engines that
    support them. Models run on `calibration_data` (as in `Settings`), or random inputs without it.
    """

    engine: str | None = None
    calibration_data: str | None = None

    def __init__(
        self,
        timing_cache_file: str | None = None,
        warmup_runs: int = 5,
        timing_runs: int = 20,
        plugin_libraries: Sequence[str] | None = None,
        trtexec_args: str | Sequence[str] | None = None,
        *,
        engine: str | EngineSpec | None = None,
    ) -> None:
        if not isinstance(engine, EngineSpec):
            name = engine or self.engine or default_engine()[0]
            arguments = trtexec_args if isinstance(trtexec_args, str) else shlex.join(trtexec_args or ())
            engine = spec_of(name, timing_cache_file, plugin_libraries, arguments)
        self.spec, self.timing_runs = engine, timing_runs
        self.plan = Plan((rounds_for(timing_runs),), warmup=warmup_runs)
        self._folder = temporary_folder()
        self.runner = Runner(self.spec, log_dir=self._folder.path)
        self._first: tuple[Handle, float] | None = None  # and its latency in ms
        self._inputs: list[bytes] = []
        self._number = 0

    def prepared(self, model: Model, data: str | None = None) -> Prepared:
        data = data or self.calibration_data
        return prepare(model, Data(data, input_shapes=usual_shapes(self.spec, data)), most=0)

    def run(
        self,
        model: str | Path | bytes,
        log_file: str | Path | None = None,
        flush_timing_cache: bool = False,
        export_profile_path: str | Path | None = None,
    ) -> float:
        """Milliseconds per inference on the first sample; infinite, with a warning, if the model or the engine cannot
        be used. `log_file` gets the engine's output. `export_profile_path` gets the times of layers as trtexec's
        --exportProfile writes them. The timing cache is saved after each build, whatever `flush_timing_cache` says."""
        self._number += 1
        path, log_path = (self._folder.path / f"model_{self._number}.{kind}" for kind in ("onnx", "log"))
        if isinstance(model, bytes):
            path.write_bytes(model)
        else:
            path = Path(model)
        try:
            latency_ms = self._timed(path, log_path.stem)
            if export_profile_path is not None:
                layers = self.runner.report(path, self.prepared(load(path)).samples.first(1)[0], 5, "profile")
                times = [{"name": layer.name, "averageMs": layer.time_ms or 0.0} for layer in layers]
                with atomic_write(Path(export_profile_path)) as fresh:
                    fresh.write_text(json.dumps([{"count": 5}, *times], indent=2), encoding="utf-8")
        except (BadModel, EngineUnavailable, EngineRefused) as error:
            latency_ms = inf
            log.warning("the model cannot be timed: %s", error)
        for old in self._folder.path.glob("*.onnx"):  # a long run would fill the disk
            if self._first is None or self._first[0].path != old:
                old.unlink()
        if log_file is not None and log_path.exists():
            shutil.copyfile(log_path, log_file)
        return latency_ms

    __call__ = run

    def _timed(self, path: Path, log_name: str) -> float:
        why = simulated(self.spec.name)
        if why:
            raise EngineUnavailable(why)
        inputs = [v.SerializeToString() for v in read(path).graph.input]
        if self._first is not None and inputs != self._inputs:  # of another network
            self.runner.unload(self._first[0])
            self._first = None
        if self._first is None:
            self.runner.feed(self.prepared(load(path)).samples.first(1)[0])
        handle = self.runner.load(path, log_name, fresh=True)
        if self._first is None:
            rounds = compare_builds(self.runner, handle, handle, self.plan, 0, lambda _: False)
            self._inputs, self._first = inputs, (handle, float(np.median(rounds.a)) * 1e3)
            return self._first[1]
        first, first_ms = self._first
        try:
            rounds = compare_builds(self.runner, first, handle, self.plan, 0, lambda _: False)
            return ratio(rounds, self.plan).median * first_ms
        finally:
            self.runner.unload(handle)


class TensorRTPyBenchmark(Benchmark):
    engine = "tensorrt"


class TrtExecBenchmark(Benchmark):
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
    """Make the benchmark that `benchmark_onnx_model`, the workflows and autotuners use from now on. Its engine is
    `engine`; if that is None, trtexec with `use_trtexec`, else `default_engine`."""
    global _instance
    engine = engine or ("trtexec" if use_trtexec else None)
    _instance = Benchmark(timing_cache_file, warmup_runs, timing_runs, plugin_libraries, trtexec_args, engine=engine)
    _instance.calibration_data = calibration_data
    return _instance


def instance(default: Callable[[], Benchmark] | None = None) -> Benchmark:
    if _instance is not None:
        return _instance
    if default is None:
        raise AutotunerNotInitializedError("Benchmark instance not initialized: call init_benchmark_instance() first")
    return default()


def benchmark_onnx_model(
    model_path: str | Path | bytes,
    log_file: str | Path | None = None,
    flush_timing_cache: bool = False,
    export_profile_path: str | Path | None = None,
) -> float:
    """Milliseconds per inference (see `Benchmark.run`). Call `init_benchmark_instance` first."""
    return instance().run(model_path, log_file, flush_timing_cache, export_profile_path)


# The conversation


class QDQAutotunerBase:
    """The search over `regions`, which a subclass or the script sets. Call `initialize` first."""

    def __init__(self, model: GraphLike) -> None:
        self.onnx_model = as_proto(model)
        self.graph: Model = load_proto(self.onnx_model)
        self.regions: list[Region] = []
        self.initialized = False

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        config = config or Config()
        config.check()
        is_half = any(info.dtype in HALF for info in self.graph.tensors.values())
        if is_half or config.default_quant_type == "fp8":
            self.graph = with_opset(self.graph, OPSET)
        self.graph = with_float_type(self.graph, onnx.TensorProto.DataType.Value(FLOAT_TYPES[config.default_dq_dtype]))
        self.initialized = True
        self.config = config
        self.baseline_latency_ms: float | None = None
        self.profiled_patterns: list[PatternSchemes] = []
        self.current_profile_region: Region | None = None
        self.current_profile_pattern_schemes: PatternSchemes | None = None
        self.current_insertion_scheme_index: int | None = None
        sizes = config.pattern_cache_minimum_distance, config.pattern_cache_max_entries_per_pattern
        self.pattern_cache = pattern_cache or PatternCache([], *sizes)
        self._best = Placement(), inf  # of all patterns that are done, and its latency in ms
        self._measured: dict[str, float] = {}  # latency in ms by digest of the placement
        vars(self).pop("_tools", None)
        self._divided: tuple[list[Region], dict[Region, Pattern]] = [], {}

    def _check_initialized(self) -> None:
        if not self.initialized:
            raise AutotunerNotInitializedError("call initialize() first")

    @cached_property
    def _tools(self) -> tuple[Inserter, RegionSearch]:
        self._check_initialized()
        config, graph, benchmark = self.config, self.graph, instance(init_benchmark_instance)
        numbers = benchmark.runner.numeric_format(config.default_quant_type)
        try:
            ranges = benchmark.prepared(graph, config.calibration_data).ranges(None, numbers)
        except BadModel as error:
            log.warning("all scales are default_q_scale: %s", error)
            ends = ((end - config.default_q_zero_point) * config.default_q_scale for end in (-127, 127))
            ranges = Ranges(dict.fromkeys(candidate_tensors(graph), Range(*ends)))
        possible = possible_edges(graph, ranges)
        seeds = start_placements.placements(graph, possible)
        search = RegionSearch(graph, (), possible, seeds, config=config.check())
        return Inserter(graph, ranges, numbers), search

    @property
    def _pattern_of(self) -> Mapping[Any, Pattern]:
        if self._divided[0] != self.regions:
            self._divided = [*self.regions], patterns_of(self.graph, self.regions)
        return self._divided[1]

    def set_profile_region(self, region: Region | None, commit: bool = True) -> None:
        """Make `region` the current one, or none if it is None. With `commit`, the pattern of the previous region is
        done if a scheme of it was measured; the best one is kept if faster. If the pattern of `region` is done, or no
        pair can stand in it, there is no current region, and `current_profile_pattern_schemes` is None."""
        self._check_initialized()
        if commit:
            self._best = self._best_so_far()
            self.profiled_patterns += self._tried()
        self.current_profile_region = self.current_profile_pattern_schemes = self.current_insertion_scheme_index = None
        if region is None:
            return
        if region not in self._pattern_of:
            raise InvalidSchemeError(f"region {region.id} is none of the autotuner's regions")
        pattern = self._pattern_of[region]
        key = RegionPattern.of(pattern)
        if pattern.points and all(done.pattern != key for done in self.profiled_patterns):
            cached = self.pattern_cache.get_pattern_schemes(key) or PatternSchemes(key)
            schemes = dict.fromkeys(scheme.core & pattern.everything for scheme in cached.schemes)
            self.current_profile_region = region
            self.current_profile_pattern_schemes = PatternSchemes(key, [*map(InsertionScheme.of, schemes)])

    def generate(self) -> int:
        """The index, in the current pattern's schemes, of the next one to measure: first from the pattern cache, then
        new ones. -1 if none is left. A scheme whose placement was measured before gets that latency and is skipped."""
        self._check_initialized()
        current = self.current_profile_pattern_schemes
        if current is None:
            raise InvalidSchemeError("no region with a pattern is set: call set_profile_region() first")
        waiting = [scheme for scheme in current.schemes if not scheme.is_profiled]
        for scheme in chain(waiting, self._ideas(current)):
            latency = self._measured.get(self._on_top(scheme).digest)
            if latency is None:
                if scheme not in current.schemes:
                    current.schemes.append(scheme)
                self.current_insertion_scheme_index = current.schemes.index(scheme)
                return self.current_insertion_scheme_index
            self._record(scheme, latency)
        self.current_insertion_scheme_index = None
        return -1

    def submit(self, latency_ms: float, success: bool = True) -> None:
        """Report a latency: first that of the model without pairs, then that of each scheme. `success` False, or a
        latency that is not finite and above zero, means failure: the first then raises BaselineFailed. Schemes are then
        sorted, fastest first."""
        self._check_initialized()
        latency = latency_ms if success and isfinite(latency_ms) and latency_ms > 0 else inf
        current, index = self.current_profile_pattern_schemes, self.current_insertion_scheme_index
        if self.baseline_latency_ms is None:
            if latency == inf:
                raise BaselineFailed("the model without pairs cannot be timed, so there is nothing to compare with")
            self.baseline_latency_ms = self._measured[Placement().digest] = latency
            self._best = Placement(), latency
            return
        if current is None or index is None or current.schemes[index].is_profiled:
            raise InvalidSchemeError("no scheme waits for its latency: call generate() first")
        scheme = current.schemes[index]
        self._measured[self._on_top(scheme).digest] = latency
        self._record(scheme, latency)
        current.schemes.sort(key=lambda s: s.latency_ms)
        self.current_insertion_scheme_index = next(n for n, s in enumerate(current.schemes) if s is scheme)
        self.pattern_cache.add_pattern_schemes(PatternSchemes(current.pattern, [scheme]))
        if self.config.verbose:
            print(f"{current.pattern.get_short_signature()}: {latency:.3f} ms", file=sys.stderr)

    def export_onnx(self, output_path: str | Path | None = None, insert_qdq: bool = True, best: bool = False) -> bytes:
        """The bytes of the model with the best placement and, unless `best`, the current scheme; they are also written
        to `output_path`, if any. Without `insert_qdq`, the model has no pairs."""
        inserter, placement = self._tools[0], Placement()
        current, index = self.current_profile_pattern_schemes, self.current_insertion_scheme_index
        if insert_qdq and current is not None and index is not None and not best:
            placement = self._on_top(current.schemes[index])
        elif insert_qdq:
            placement = self._best_so_far()[0]
        model = inserter.insert(placement)
        if output_path is None:
            return model.to_proto().SerializeToString()
        save(model, Path(output_path))
        return Path(output_path).read_bytes()

    def import_insertion_points(self, quantized_tensors: Collection[str]) -> None:
        self._check_initialized()
        for region in self._pattern_of:
            self.pattern_cache.add_pattern_from_region(region, self.graph, quantized_tensors)

    def save_state(self, output_path: str | Path) -> None:
        """Write a state file atomically, and the pattern cache beside it; refuses to overwrite other files."""
        fingerprint, path = self._fingerprint(), Path(output_path)
        check_outputs(record(pattern_cache_of(path), "output_path"), {})
        best, best_ms = self._best_so_far()
        patterns = [
            PatternSchemes(done.pattern, [scheme for scheme in done.schemes if not scheme.error])
            for done in (*self.profiled_patterns, *self._tried())
        ]
        conversation = ConversationRecord(
            baseline_ms=self.baseline_latency_ms,
            best=best,
            best_ms=None if best_ms == inf else best_ms,
            measured={digest: None if ms == inf else ms for digest, ms in self._measured.items()},
            patterns=tuple(done.to_dict() for done in patterns),
        )
        with Store(path, fingerprint) as store:
            store.put("conversation", conversation, order="deterministic")
        self.pattern_cache.save(pattern_cache_of(path))

    def load_state(self, input_path: str | Path) -> None:
        """Continue from a state file; patterns that were begun there count as done.

        Raises:
            BadState: there is no such file, or it is of another model, engine or configuration.
        """
        fingerprint, path = self._fingerprint(), Path(input_path)
        if not path.exists():
            raise BadState(f"there is no state file {path}: leave load_state out to begin")
        with Store(path, fingerprint) as store:
            state = store.get("conversation", ConversationRecord)
        if state is None:
            raise BadState(f"{path} is not what save_state has written: leave load_state out to begin")
        self.baseline_latency_ms, self._best = state.baseline_ms, (state.best, state.best_ms or inf)
        self._measured = {digest: ms or inf for digest, ms in state.measured.items()}
        self.profiled_patterns = [*map(PatternSchemes.from_dict, state.patterns)]
        if pattern_cache_of(path).exists():
            self.pattern_cache.merge(PatternCache.load(pattern_cache_of(path)), prefer_existing=False)

    def adopt(self, result: Result) -> None:
        """Take over the result of a tuning run of this model: latencies, and what ships as a scheme of each pattern."""
        before, after = result.summary["baseline_ms"], result.summary["final_ms"]
        self.baseline_latency_ms, self._best = before, (result.placement, after)
        self._measured = {Placement().digest: before, result.placement.digest: after}
        for pattern in dict.fromkeys(self._pattern_of.values()):
            scheme = self._scheme(pattern, result.placement)
            self._record(scheme, after)
            self.profiled_patterns.append(PatternSchemes(RegionPattern.of(pattern), [scheme]))

    def _record(self, scheme: InsertionScheme, latency: float) -> None:
        scheme.latency_ms, scheme.error = latency, latency == inf
        if self.baseline_latency_ms is not None and latency != inf:
            scheme.ratio = latency / self.baseline_latency_ms

    def _scheme(self, pattern: Pattern, placement: Placement) -> InsertionScheme:
        return InsertionScheme.of(patterns.scheme_of(pattern, pattern.instances[0], placement.edges))

    def _tried(self) -> list[PatternSchemes]:
        current = self.current_profile_pattern_schemes or PatternSchemes()
        done = [scheme for scheme in current.schemes if scheme.is_profiled]
        return [PatternSchemes(current.pattern, done)] if done else []

    def _ideas(self, current: PatternSchemes) -> Iterator[InsertionScheme]:
        """New schemes: first those of the placement rules, then mutations of the fastest."""
        pattern, base = self._pattern_of[self.current_profile_region], self._best[0]
        measured = sorted((s for s in current.schemes if s.latency_ms != inf), key=lambda s: s.latency_ms)
        top = max(self.config.minimum_schemes_to_mutate, int(self.config.top_percent_to_mutate * len(measured)))
        parents = [self._on_top(scheme) for scheme in measured[:top]] or [base]
        for idea in self._tools[1].variations(pattern, base, parents, len(self._measured)):
            yield self._scheme(pattern, idea.placement)

    def _best_so_far(self) -> tuple[Placement, float]:
        """The best placement, with the best scheme of the current pattern if that is faster; and its latency in ms."""
        scheme = (self.current_profile_pattern_schemes or PatternSchemes()).best_scheme
        if scheme is None or scheme.latency_ms * self.config.performance_threshold >= self._best[1]:
            return self._best
        return self._on_top(scheme), scheme.latency_ms

    def _on_top(self, scheme: InsertionScheme) -> Placement:
        pattern = self._pattern_of[self.current_profile_region]
        domain = InsertionScheme.of(pattern.everything).edges(pattern)
        edges = scheme.edges(pattern) & self._tools[1].possible
        return consistent(self.graph, Placement((self._best[0].edges - domain) | edges))

    def _fingerprint(self) -> dict[str, Any]:
        self._check_initialized()
        own = {name: value for name, value in asdict(self.config).items() if name != "verbose"}
        digests = sorted({pattern.digest for pattern in self._pattern_of.values()})
        divided = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]
        engine = instance(init_benchmark_instance).spec.name
        return {"interface": "autotuner", **own, "engine": engine, "model": self.graph.fingerprint, "regions": divided}


class QDQAutotuner(QDQAutotunerBase):
    """Searches the regions of region mode, innermost first, without those that no pair can make faster."""

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        super().initialize(config, pattern_cache)
        sizes = self.config.maximum_sequence_region_size, self.config.minimum_topdown_search_size
        regions = leaves_first(CombinedRegionSearch(self.graph, *sizes).search_regions())
        pattern_of = patterns_of(self.graph, regions)
        self.regions = [r for r in regions if pattern_of[r].points and tunable(self.graph, [pattern_of[r]])]
