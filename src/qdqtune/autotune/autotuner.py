"""The search as a conversation: it says what to measure (`generate`, `export_onnx`), the script measures (`submit`).

A scheme of the region at hand stands on top of the best placement so far, and it stays only where it is faster. Two
schemes that mean one placement are measured once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqtune import patterns, regions, rules
from qdqtune.autotune.benchmark import instance_or_default
from qdqtune.autotune.regions import AutotunerError, Grouping, InvalidSchemeError, Region
from qdqtune.autotune.schemes import Config, InsertionScheme, PatternCache, PatternSchemes, RegionPattern
from qdqtune.calibration import calibrate, candidate_tensors
from qdqtune.data import open_samples
from qdqtune.errors import BadModel, BadState, BaselineFailed
from qdqtune.graph import Model, save, with_float_type
from qdqtune.loading import load_proto
from qdqtune.patterns import Pattern
from qdqtune.precision import HALF, OPSET
from qdqtune.qdq import Inserter
from qdqtune.qdq_utils import QuantizedTensors
from qdqtune.reading import read_placement
from qdqtune.scales import Range, Ranges
from qdqtune.store import Store, pack_placement, unpack_placement
from qdqtune.strategies.region import RegionSearch
from qdqtune.subject import DTYPES
from qdqtune.tune import Result
from qdqtune.types import Edge, Measurement, NumericFormat, Placement

log = logging.getLogger("qdqtune.autotune")


class AutotunerNotInitializedError(AutotunerError):
    """`initialize` comes first."""


@dataclass(frozen=True)
class _Tools:
    """What follows from model, configuration and regions."""

    numbers: NumericFormat
    engine: str
    inserter: Inserter
    possible: frozenset[Edge]
    grouping: Grouping
    search: RegionSearch

    def edges(self, pattern: Pattern, scheme: InsertionScheme | None = None) -> frozenset[Edge]:
        """What a scheme means in all instances of a pattern; without a scheme, all that any scheme could mean."""
        chosen = {pattern.digest: pattern.everything if scheme is None else scheme.core}
        try:
            return patterns.place(self.search.model, [pattern], chosen).edges & self.possible
        except ValueError as error:
            raise InvalidSchemeError(str(error)) from error

    def on_top(self, base: Placement, pattern: Pattern, scheme: InsertionScheme) -> Placement:
        """`base` with the pattern as a scheme has it."""
        edges = (base.edges - self.edges(pattern)) | self.edges(pattern, scheme)
        return rules.consistent(self.search.model, Placement(edges))


class QDQAutotunerBase:
    """The conversation about regions that are given: a subclass sets `regions`, before `initialize` or after it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.onnx_model = model
        self.graph: Model = load_proto(model)
        self.regions: list[Region] = []
        self.config = Config()
        self.initialized = False
        self._reset(None)

    def _reset(self, pattern_cache: PatternCache | None) -> None:
        self.baseline_latency_ms: float | None = None
        self.profiled_patterns: list[PatternSchemes] = []
        self.current_profile_region: Region | None = None
        self.current_profile_pattern_schemes: PatternSchemes | None = None
        self.current_insertion_scheme_index: int | None = None
        self.pattern_cache = pattern_cache or PatternCache(
            minimum_distance=self.config.pattern_cache_minimum_distance,
            max_entries_per_pattern=self.config.pattern_cache_max_entries_per_pattern,
        )
        self._start = Placement(), inf
        self._measured: dict[str, float] = {}
        self._journal: list[dict[str, Any]] = []
        self._made: _Tools | None = None

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        """Begin anew. Schemes of `pattern_cache` are tried first.

        Raises:
            QdqtuneError: the engine cannot be opened, or has no kernels for the quantization type.
        """
        self.config = config or Config()
        self._reset(pattern_cache)
        is_half = any(info.dtype in HALF for info in self.graph.tensors.values())
        opset = OPSET if is_half or self.config.default_quant_type == "fp8" else 13
        if self.graph.opset < opset:
            self.graph = load_proto(self.onnx_model, min_opset=opset)
        dtype = onnx.TensorProto.DataType.Value(DTYPES[self.config.default_dq_dtype])
        self.graph = with_float_type(self.graph, dtype)
        self.initialized = True

    @property
    def _tools(self) -> _Tools:
        if not self.initialized:
            raise AutotunerNotInitializedError("call initialize() first")
        if self._made is None:
            benchmark = instance_or_default()
            numbers = benchmark.numeric_format(self.config.default_quant_type)
            ranges = self._ranges(numbers)
            possible = rules.possible_edges(self.graph, ranges)
            grouping = Grouping.of(self.graph, self.regions)
            seeds = rules.placements(self.graph, possible)
            search = RegionSearch(self.graph, grouping.patterns, possible, seeds, config=self.config.search)
            inserter = Inserter(self.graph, ranges, numbers)
            self._made = _Tools(numbers, benchmark.spec.name, inserter, possible, grouping, search)
        return self._made

    def _ranges(self, numbers: NumericFormat) -> Ranges:
        try:
            samples = open_samples(self.config.calibration_data, self.graph)
            return calibrate(self.graph, samples, numbers=numbers)
        except BadModel as error:
            log.warning("all scales are default_q_scale: %s", error)
            low, high = (end - self.config.default_q_zero_point for end in (-127, 127))
            own = Range(low * self.config.default_q_scale, high * self.config.default_q_scale)
            return Ranges(dict.fromkeys(candidate_tensors(self.graph), own))

    def set_profile_region(self, region: Region | None, commit: bool = True) -> None:
        """Turn to a region, or to none; `commit` ends the one before it, the best of its schemes stays if it is faster.

        `current_profile_pattern_schemes` is None afterwards if the pattern is done, or has no place for a pair.

        Raises:
            InvalidSchemeError: the region is none of `regions`.
        """
        tools = self._tools
        current = self._tried()
        if commit and current is not None:
            self.profiled_patterns.append(current)
            self.pattern_cache.add_pattern_schemes(current)
        self.current_profile_region = self.current_profile_pattern_schemes = self.current_insertion_scheme_index = None
        if region is None:
            return
        if region not in tools.grouping.cores:
            raise InvalidSchemeError(f"{region} is none of the autotuner's regions")
        found = tools.grouping.pattern_of(region)
        pattern = None if found is None else RegionPattern.of(found)
        if pattern is None or any(done.pattern == pattern for done in self.profiled_patterns):
            return
        known = self.pattern_cache.get_pattern_schemes(pattern)
        seeds = [InsertionScheme.of(scheme.core) for scheme in known.schemes] if known else []
        self.current_profile_region, self.current_profile_pattern_schemes = region, PatternSchemes(pattern, seeds)

    def _tried(self) -> PatternSchemes | None:
        """The pattern at hand with the schemes that were measured, if there are any."""
        current = self.current_profile_pattern_schemes
        done = [s for s in current.schemes if s.is_profiled] if current else []
        return PatternSchemes(current.pattern, done) if current and done else None

    def generate(self) -> int:
        """The index, in the current pattern's schemes, of one with a placement yet to be measured; -1 if there is none.

        First come schemes that wait there (from the cache, imported, or put there by the script), then new ones.

        Raises:
            InvalidSchemeError: there is no current pattern.
        """
        tools, current = self._tools, self._current()
        pattern, base = self._core(current.pattern.digest), self._best(self.profiled_patterns)[0]
        for index, scheme in enumerate(current.schemes):
            placement = tools.on_top(base, pattern, scheme)
            if not scheme.is_profiled and placement.digest not in self._measured:
                self.current_insertion_scheme_index = index
                return index
            if not scheme.is_profiled:
                self._record(scheme, self._measured[placement.digest])
        parents = [tools.on_top(base, pattern, scheme) for scheme in self._parents(current)] or [base]
        first = pattern.instances[0]
        for idea in tools.search.variations(pattern, base, parents, len(self._measured)):
            scheme = InsertionScheme.of(patterns.scheme_of(self.graph, pattern, first, idea.placement.edges))
            if tools.on_top(base, pattern, scheme).digest not in self._measured:
                current.schemes.append(scheme)
                self.current_insertion_scheme_index = len(current.schemes) - 1
                return self.current_insertion_scheme_index
        return -1

    def submit(self, latency_ms: float, success: bool = True) -> None:
        """Tell what was measured: first of the model without pairs, then of each scheme. Infinity is a failure.

        Raises:
            BaselineFailed: the model without pairs has no latency.
            InvalidSchemeError: no scheme waits for a latency.
        """
        latency = latency_ms if success and isfinite(latency_ms) and latency_ms > 0 else inf
        if self.baseline_latency_ms is None:
            if latency == inf:
                raise BaselineFailed("the model without pairs cannot be timed, so there is nothing to compare with")
            self._note("", Placement(), Placement().digest, latency)
            return
        if self.current_insertion_scheme_index is None:
            raise InvalidSchemeError("no scheme waits for its latency: call generate() first")
        current = self._current()
        scheme, pattern = current.schemes[self.current_insertion_scheme_index], self._core(current.pattern.digest)
        meant = Placement(patterns.resolve(self.graph, pattern, pattern.instances[0], scheme.core))
        self._note(pattern.digest, meant, self._placement(best=False).digest, latency)
        self._record(scheme, latency)
        self.current_insertion_scheme_index = None
        if self.config.verbose:
            print(f"{self.current_profile_region}: {latency:.3f} ms", file=sys.stderr)

    def export_onnx(self, output_path: str | Path | None = None, insert_qdq: bool = True, best: bool = False) -> bytes:
        """The model with the scheme that waits for its latency on top of the best placement; without pairs if so asked.

        With `best`, and where no scheme waits, it is the best placement alone.
        """
        inserter = self._tools.inserter
        model = inserter.insert(self._placement(best) if insert_qdq else Placement())
        if output_path is not None:
            save(model, Path(output_path))
            return Path(output_path).read_bytes()
        return model.to_proto().SerializeToString()

    def import_insertion_points(self, quantized_tensors: Collection[str]) -> None:
        """Have the pairs of a quantized model tried first.

        What `get_quantized_tensors` gives tells every use that carries a pair. Of plain names all uses are taken, and
        the weights of compute operators along with their activations.
        """
        tools = self._tools
        if isinstance(quantized_tensors, QuantizedTensors):
            edges = set(read_placement(self.graph, quantized_tensors.model).placement.edges & tools.possible)
        else:
            edges = {e for e in tools.possible if e.tensor in set(quantized_tensors)}
            compute = (n for n in self.graph.nodes if n.op in rules.COMPUTE and Edge(n.inputs[0], n.name, 0) in edges)
            edges |= {Edge(n.inputs[1], n.name, 1) for n in compute} & tools.possible
        for pattern in tools.grouping.patterns:
            schemes = (patterns.scheme_of(self.graph, pattern, region, edges) for region in pattern.instances)
            if scheme := next((s for s in schemes if s.points), None):
                self.pattern_cache.put_first(RegionPattern.of(pattern), InsertionScheme.of(scheme))

    def save_state(self, output_path: str | Path) -> None:
        """Add what is new to a state file, and write the pattern cache beside it.

        Raises:
            BadState: the file is of another model, engine or configuration.
        """
        path, current = Path(output_path), self._tried()
        with Store(path, self._fingerprint()) as store:
            known = [{name: value for name, value in r.items() if name != "key"} for r in store.records()]
        with Store(path, self._fingerprint(), restart=known != self._journal[: len(known)]) as store:
            for number, entry in enumerate(self._journal):
                if store.get(str(number)) is None:
                    store.put(str(number), entry)
        if current is not None:
            self.pattern_cache.add_pattern_schemes(current)
        self.pattern_cache.save(_cache_file(path))

    def load_state(self, input_path: str | Path) -> None:
        """Go on from a state file: patterns that were begun there are done, and will be skipped.

        Raises:
            BadState: there is no such file, or it is of another model, engine or configuration.
        """
        path = Path(input_path)
        if not path.exists():
            raise BadState(f"there is no state file {path}: leave load_state out to begin")
        with Store(path, self._fingerprint()) as store:
            entries = list(store.records())
        for entry in entries:
            edges, ms = unpack_placement(entry["edges"]), entry["ms"] or inf
            self._note(entry["pattern"], edges, entry["measured"], ms)
            if entry["pattern"]:
                self._remember(self._core(entry["pattern"]), edges, ms)
        if _cache_file(path).exists():
            self.pattern_cache.merge(PatternCache.load(_cache_file(path)))

    def adopt(self, result: Result) -> None:
        """Take over a whole tuning run of this model: its latencies, its schemes, and the placement that it ships."""
        final = result.summary["final_ms"]
        self._note("", Placement(), Placement().digest, result.summary["baseline_ms"])
        self._note("", result.placement, result.placement.digest, final)
        for pattern in self._tools.grouping.patterns:
            self._remember(pattern, result.placement, final)
            for trial in result.history:
                if trial.proposal.pattern == pattern.digest:
                    timed = trial.result
                    ms = 1e3 * float(np.median(timed.b)) if isinstance(timed, Measurement) else inf
                    self._remember(pattern, trial.placement, ms)

    def _note(self, pattern: str, edges: Placement, measured: str, ms: float) -> None:
        """One line of the journal: the edges of a scheme in its pattern's first region, or the best of another run."""
        self._measured[measured] = ms
        self._journal.append({"pattern": pattern, "edges": pack_placement(edges), "measured": measured,
                              "ms": None if ms == inf else ms})  # fmt: skip
        if self.baseline_latency_ms is None:
            self.baseline_latency_ms = ms
        elif not pattern:
            self._start = edges, ms

    def _remember(self, pattern: Pattern, placement: Placement, ms: float) -> None:
        scheme = InsertionScheme.of(patterns.scheme_of(self.graph, pattern, pattern.instances[0], placement.edges))
        self._record(scheme, ms)
        own = RegionPattern.of(pattern)
        if not any(done.pattern == own for done in self.profiled_patterns):
            self.profiled_patterns.append(PatternSchemes(own))
        next(done for done in self.profiled_patterns if done.pattern == own).schemes.append(scheme)

    def _current(self) -> PatternSchemes:
        if self.current_profile_pattern_schemes is None:
            raise InvalidSchemeError("no region with a pattern is set: call set_profile_region() first")
        return self.current_profile_pattern_schemes

    def _core(self, digest: str) -> Pattern:
        return next(p for p in self._tools.grouping.patterns if p.digest == digest)

    def _record(self, scheme: InsertionScheme, latency: float) -> None:
        scheme.latency_ms, scheme.error = latency, latency == inf
        if self.baseline_latency_ms is not None and latency != inf:
            scheme.ratio = latency / self.baseline_latency_ms

    def _parents(self, current: PatternSchemes) -> Iterable[InsertionScheme]:
        """The fastest schemes of a pattern, from which new ones are mutated."""
        measured = sorted((s for s in current.schemes if s.latency_ms != inf), key=lambda s: s.latency_ms)
        top = int(self.config.top_percent_to_mutate * len(measured))
        return measured[: max(self.config.minimum_schemes_to_mutate, top)]

    def _best(self, done: Iterable[PatternSchemes]) -> tuple[Placement, float]:
        """The placement that patterns leave behind, each on top of those before it, and its latency in ms."""
        placement, latency = self._start
        latency = min(latency, self.baseline_latency_ms or inf)
        for schemes in done:
            best = schemes.best_scheme
            if best is not None and best.latency_ms * self.config.performance_threshold < latency:
                placement = self._tools.on_top(placement, self._core(schemes.pattern.digest), best)
                latency = best.latency_ms
        return placement, latency

    def _placement(self, best: bool) -> Placement:
        current = self._tried()
        if best or self.current_insertion_scheme_index is None:
            return self._best([*self.profiled_patterns, *([current] if current else [])])[0]
        schemes = self._current()
        scheme, base = schemes.schemes[self.current_insertion_scheme_index], self._best(self.profiled_patterns)[0]
        return self._tools.on_top(base, self._core(schemes.pattern.digest), scheme)

    def _fingerprint(self) -> dict[str, Any]:
        own = {k: v for k, v in asdict(self.config).items() if k != "verbose"}
        return {"interface": "autotuner", **own, "engine": self._tools.engine, "model": self.graph.fingerprint}


class QDQAutotuner(QDQAutotunerBase):
    """The conversation about the regions that are found by themselves: leaves first, then what holds them."""

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        """See `QDQAutotunerBase`."""
        super().initialize(config, pattern_cache)
        found = regions.find(self.graph, max_sequence_size=self.config.maximum_sequence_region_size,
                             min_topdown_size=self.config.minimum_topdown_search_size)  # fmt: skip
        every = [region for top in found.root.children for region in Region.of(top).walk()]
        self.regions = [r for r in every if not r.children] + [r for r in every if r.children]


def _cache_file(state: Path) -> Path:
    return state.with_name(f"{state.stem}_pattern_cache{state.suffix}")
