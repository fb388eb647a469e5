"""The search as a conversation: it says what to measure (`generate`, `export_onnx`), the script measures (`submit`).

A scheme of the region at hand stands on top of the best placement so far, and it stays only where it is faster. Two
schemes that mean one placement are measured once.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain, combinations
from math import inf, isfinite
from pathlib import Path
from typing import Any

import onnx

from qdqtune.autotune.benchmark import instance_or_default
from qdqtune.autotune.common import (
    AutotunerNotInitializedError,
    Config,
    InsertionScheme,
    InvalidSchemeError,
    PatternCache,
    PatternSchemes,
    Region,
    RegionPattern,
    ResolvedInsertionPoint,
)
from qdqtune.autotune.graphs import GraphLike, as_proto, patterns_of
from qdqtune.autotune.insertion_points import uses_at, with_weights
from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadModel, BadState, BaselineFailed
from qdqtune.graph.float16 import HALF, OPSET
from qdqtune.graph.inference import with_float_type
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import consistent, possible_edges
from qdqtune.placement.reading import read_placement
from qdqtune.qdq_utils import QuantizedTensors
from qdqtune.search import ratios_to_float
from qdqtune.search.region import RegionSearch
from qdqtune.search.regions import patterns
from qdqtune.search.regions.discovery import Scheme
from qdqtune.search.regions.patterns import Pattern
from qdqtune.system.checks import Output, check_outputs, written_as
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.records import ConversationRecord, StoredPlacement
from qdqtune.tuning.result import Result
from qdqtune.tuning.store import Store
from qdqtune.tuning.subject import FLOAT_TYPES
from qdqtune.types import Edge, Placement

log = logging.getLogger("qdqtune.autotune")


class QDQAutotunerBase:
    """The conversation about `regions`, which a subclass or the script sets. `initialize` is the first call."""

    def __init__(self, model: GraphLike) -> None:
        self.onnx_model = as_proto(model)
        self.graph: Model = load_proto(self.onnx_model)
        self.regions: list[Region] = []
        self.config = Config()
        self.initialized = False
        self._reset(None)

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        """Begin anew. Schemes of `pattern_cache` are tried first.

        Raises:
            BadOption: a field of the configuration has no meaning.
        """
        self.config = config or Config()
        self.config.check()
        is_half = any(info.dtype in HALF for info in self.graph.tensors.values())
        if self.graph.opset < OPSET and (is_half or self.config.default_quant_type == "fp8"):
            self.graph = load_proto(self.onnx_model, min_opset=OPSET)
        dtype = onnx.TensorProto.DataType.Value(FLOAT_TYPES[self.config.default_dq_dtype])
        self.graph = with_float_type(self.graph, dtype)
        self.initialized = True
        self._reset(pattern_cache)

    def _reset(self, pattern_cache: PatternCache | None) -> None:
        self.baseline_latency_ms: float | None = None
        self.profiled_patterns: list[PatternSchemes] = []
        self.current_profile_region: Region | None = None
        self.current_profile_pattern_schemes: PatternSchemes | None = None
        self.current_insertion_scheme_index: int | None = None
        self._is_waiting = False
        self.pattern_cache = pattern_cache or PatternCache(
            minimum_distance=self.config.pattern_cache_minimum_distance,
            max_entries_per_pattern=self.config.pattern_cache_max_entries_per_pattern,
        )
        self._best = Placement(), inf
        """What all done patterns leave behind, and its latency in ms."""
        self._measured: dict[str, float] = {}
        """Latency in ms by digest of the placement."""
        self._made: tuple[Inserter, RegionSearch] | None = None
        self._divided: tuple[list[Region], dict[Region, Pattern]] = [], {}

    def _check_initialized(self) -> None:
        if not self.initialized:
            raise AutotunerNotInitializedError("call initialize() first")

    @property
    def _tools(self) -> tuple[Inserter, RegionSearch]:
        """What needs an engine and calibration, made when it is needed first."""
        self._check_initialized()
        if self._made is None:
            config, graph, benchmark = self.config, self.graph, instance_or_default()
            numbers = benchmark.numeric_format(config.default_quant_type)
            try:
                ranges = benchmark.prepared(graph, config.calibration_data).ranges(None, numbers)
            except BadModel as error:
                log.warning("all scales are default_q_scale: %s", error)
                ends = ((end - config.default_q_zero_point) * config.default_q_scale for end in (-127, 127))
                ranges = Ranges(dict.fromkeys(candidate_tensors(graph), Range(*ends)))
            possible = possible_edges(graph, ranges)
            seeds = start_placements.placements(graph, possible)
            self._made = (
                Inserter(graph, ranges, numbers),
                RegionSearch(graph, (), possible, seeds, config=config.check()),
            )
        return self._made

    @property
    def _pattern_of(self) -> dict[Region, Pattern]:
        """The patterns of `regions` as they are now, and of all regions below."""
        if self._divided[0] != self.regions:
            self._divided = [*self.regions], patterns_of(self.graph, self.regions)
        return self._divided[1]

    @property
    def _patterns(self) -> dict[str, Pattern]:
        """The patterns in which a pair can stand, by digest."""
        return {pattern.digest: pattern for pattern in self._pattern_of.values() if pattern.points}

    def set_profile_region(self, region: Region | None, commit: bool = True) -> None:
        """Turn to a region, or to none; `commit` ends the one before it, the best of its schemes stays if it is faster.

        `current_profile_pattern_schemes` is None afterwards if the pattern is done, or has no place for a pair.

        Raises:
            InvalidSchemeError: the region is none of `regions`.
        """
        self._check_initialized()
        if commit:
            self._best = self._standing()
            self.profiled_patterns += self._tried()
        self.current_profile_region = self.current_profile_pattern_schemes = self.current_insertion_scheme_index = None
        self._is_waiting = False
        if region is None:
            return
        if region not in self._pattern_of:
            raise InvalidSchemeError(f"{region} is none of the autotuner's regions")
        points = frozenset(self._pattern_of[region].points)
        pattern = RegionPattern.of(self._pattern_of[region])
        if points and all(done.pattern != pattern for done in self.profiled_patterns):
            cached = self.pattern_cache.get_pattern_schemes(pattern) or PatternSchemes(pattern)
            # a cache, or a scheme that the script put there, may name other points
            schemes = dict.fromkeys(Scheme(scheme.core.points & points) for scheme in cached.schemes)
            self.current_profile_region = region
            self.current_profile_pattern_schemes = PatternSchemes(pattern, [*map(InsertionScheme.of, schemes)])

    def generate(self) -> int:
        """The index, in the current pattern's schemes, of one with a placement yet to be measured; -1 if there is none.

        First come schemes that wait there (from the cache, imported, or put there by the script), then new ones.

        Raises:
            InvalidSchemeError: there is no current pattern.
        """
        self._check_initialized()
        current = self.current_profile_pattern_schemes
        if current is None:
            raise InvalidSchemeError("no region with a pattern is set: call set_profile_region() first")
        waiting = [scheme for scheme in current.schemes if not scheme.is_profiled]
        for scheme in chain(waiting, self._ideas(current)):
            latency = self._measured.get(self._on_top(current, scheme).digest)
            if latency is None:
                if scheme not in current.schemes:
                    current.schemes.append(scheme)
                self.current_insertion_scheme_index = current.schemes.index(scheme)
                self._is_waiting = True
                return self.current_insertion_scheme_index
            self._record(scheme, latency)
        self.current_insertion_scheme_index, self._is_waiting = None, False
        return -1

    def submit(self, latency_ms: float, success: bool = True) -> None:
        """Tell what was measured: first of the model without pairs, then of each scheme. Infinity is a failure.

        The scheme stays current until the next one is made. The schemes of the pattern are sorted, the fastest first,
        and the pattern cache takes them over.

        Raises:
            BaselineFailed: the model without pairs has no latency.
            InvalidSchemeError: no scheme waits for a latency.
        """
        self._check_initialized()
        latency = latency_ms if success and isfinite(latency_ms) and latency_ms > 0 else inf
        current, index = self.current_profile_pattern_schemes, self.current_insertion_scheme_index
        if self.baseline_latency_ms is None:
            if latency == inf:
                raise BaselineFailed("the model without pairs cannot be timed, so there is nothing to compare with")
            self.baseline_latency_ms = self._measured[Placement().digest] = latency
            self._best = Placement(), latency
            return
        if current is None or index is None or not self._is_waiting:
            raise InvalidSchemeError("no scheme waits for its latency: call generate() first")
        scheme, self._is_waiting = current.schemes[index], False
        self._measured[self._on_top(current, scheme).digest] = latency
        self._record(scheme, latency)
        current.schemes.sort(key=lambda s: s.latency_ms)
        self.current_insertion_scheme_index = next(n for n, s in enumerate(current.schemes) if s is scheme)
        for tried in self._tried():
            self.pattern_cache.add_pattern_schemes(tried)
        if self.config.verbose:
            print(f"{self.current_profile_region}: {latency:.3f} ms", file=sys.stderr)

    def export_onnx(self, output_path: str | Path | None = None, insert_qdq: bool = True, best: bool = False) -> bytes:
        """The model with the current scheme on top of the best placement; without pairs if so asked.

        With `best`, and where no scheme is current, it is the best placement alone.
        """
        model = self._tools[0].insert(self._placement(best) if insert_qdq else Placement())
        if output_path is None:
            return model.to_proto().SerializeToString()
        save(model, Path(output_path))
        return Path(output_path).read_bytes()

    def get_resolved_insertion_points(self, best: bool = True, verbose: bool = False) -> set[ResolvedInsertionPoint]:
        """The uses of tensors that carry a pair in what `export_onnx` would write, by indices in `graph.nodes`."""
        self._check_initialized()
        points = uses_at(self.graph, self._placement(best).edges)
        if verbose:
            log.debug("%d pairs", len(points))
        return points

    def import_insertion_points(self, quantized_tensors: Collection[str]) -> None:
        """Have the pairs of a quantized model tried first.

        What `get_quantized_tensors` gives tells every use that carries a pair. Of plain names all uses are taken, and
        the weights of compute operators along with their activations.
        """
        possible = self._tools[1].possible
        if isinstance(quantized_tensors, QuantizedTensors):
            edges = read_placement(self.graph, quantized_tensors.model).placement.edges & possible
        else:
            names = set(quantized_tensors)
            edges = with_weights(self.graph, (e for e in possible if e.tensor in names)) & possible
        for pattern in self._patterns.values():
            schemes = (patterns.scheme_of(self.graph, pattern, region, edges) for region in pattern.instances)
            scheme = next((s for s in schemes if s.points), None)
            if scheme is not None:
                self.pattern_cache.put_first(RegionPattern.of(pattern), InsertionScheme.of(scheme))

    def save_state(self, output_path: str | Path) -> None:
        """Write a state file, in one step, and the pattern cache beside it.

        Raises:
            BadOption, BadState: there is a file of another model, engine or configuration, or no such file at all.
        """
        path = Path(output_path)
        cache = Output(cache_beside(path), "output_path", written_as("record"))
        check_outputs([cache], {})
        best, best_ms = self._standing()
        record = ConversationRecord(
            baseline_ms=self.baseline_latency_ms,
            best=StoredPlacement.of(best),
            best_ms=None if best_ms == inf else best_ms,
            measured={digest: None if ms == inf else ms for digest, ms in self._measured.items()},
            patterns=tuple(done.to_dict() for done in (*self.profiled_patterns, *self._tried())),
        )
        with Store(path, self._fingerprint()) as store:
            store.put(record)
        self.pattern_cache.save(cache.path)

    def load_state(self, input_path: str | Path) -> None:
        """Go on from a state file: patterns that were begun there are done, and will be skipped.

        Raises:
            BadState: there is no such file, or it is of another model, engine or configuration.
        """
        self._check_initialized()
        path = Path(input_path)
        if not path.exists():
            raise BadState(f"there is no state file {path}: leave load_state out to begin")
        with Store(path, self._fingerprint()) as store:
            record = store.get(ConversationRecord)
        if record is None:
            raise BadState(f"{path} is not what save_state has written: leave load_state out to begin")
        self.baseline_latency_ms, self._best = record.baseline_ms, (record.best.placement, record.best_ms or inf)
        self._measured = {digest: ms or inf for digest, ms in record.measured.items()}
        self.profiled_patterns = [*map(PatternSchemes.from_dict, record.patterns)]
        if cache_beside(path).exists():
            self.pattern_cache.merge(PatternCache.load(cache_beside(path)))

    def adopt(self, result: Result, plan: Plan) -> None:
        """Take over a whole tuning run of this model: its latencies, its schemes, and the placement that it ships."""
        before, after = result.summary["baseline_ms"], result.summary["final_ms"]
        self.baseline_latency_ms, self._best = before, (result.placement, after)
        self._measured = {Placement().digest: before, result.placement.digest: after}
        ratios = ratios_to_float(result.history, plan)
        for pattern in self._patterns.values():
            done = PatternSchemes(RegionPattern.of(pattern))
            own = (t.placement for t in result.history if t.proposal.pattern == pattern.digest)
            for placement, ms in [(result.placement, after), *((p, before * ratios.get(p, inf)) for p in own)]:
                scheme = self._scheme(pattern, placement)
                self._record(scheme, ms)
                done.schemes.append(scheme)
            self.profiled_patterns.append(done)

    def _record(self, scheme: InsertionScheme, latency: float) -> None:
        scheme.latency_ms, scheme.error = latency, latency == inf
        scheme.profile_timestamp = datetime.now(UTC).isoformat()
        if self.baseline_latency_ms is not None and latency != inf:
            scheme.ratio = latency / self.baseline_latency_ms

    def _scheme(self, pattern: Pattern, placement: Placement) -> InsertionScheme:
        """What a placement is in the first instance of a pattern."""
        return InsertionScheme.of(patterns.scheme_of(self.graph, pattern, pattern.instances[0], placement.edges))

    def _tried(self) -> list[PatternSchemes]:
        """The pattern at hand with the schemes that were measured, if there are any."""
        current = self.current_profile_pattern_schemes
        done = [s for s in current.schemes if s.is_profiled] if current else []
        return [PatternSchemes(current.pattern, done)] if current and done else []

    def _ideas(self, current: PatternSchemes) -> Iterator[InsertionScheme]:
        """New schemes: those of the rules, then random mutations of the fastest, and all small ones of the best."""
        pattern, base = self._patterns[current.pattern.digest], self._best[0]
        measured = sorted((s for s in current.schemes if s.latency_ms != inf), key=lambda s: s.latency_ms)
        top = max(self.config.minimum_schemes_to_mutate, int(self.config.top_percent_to_mutate * len(measured)))
        parents = [self._on_top(current, scheme) for scheme in measured[:top]] or [base]
        for idea in self._tools[1].variations(pattern, base, parents, len(self._measured)):
            yield self._scheme(pattern, idea.placement)
        best = measured[0].core.points if measured else frozenset()
        for count in range(1, self.config.maximum_mutations + 1):
            for flipped in combinations(pattern.points, count):
                yield InsertionScheme.of(Scheme(best.symmetric_difference(flipped)))

    def _standing(self) -> tuple[Placement, float]:
        """The best placement, with the best scheme of the pattern at hand on top if that is faster; its latency in
        ms."""
        current = self.current_profile_pattern_schemes
        scheme = current.best_scheme if current else None
        if current is None or scheme is None or scheme.latency_ms * self.config.performance_threshold >= self._best[1]:
            return self._best
        return self._on_top(current, scheme), scheme.latency_ms

    def _placement(self, best: bool) -> Placement:
        current, index = self.current_profile_pattern_schemes, self.current_insertion_scheme_index
        if best or current is None or index is None:
            return self._standing()[0]
        return self._on_top(current, current.schemes[index])

    def _on_top(self, schemes: PatternSchemes, scheme: InsertionScheme) -> Placement:
        """The best placement with all instances of a pattern as one of its schemes has them."""
        pattern = self._patterns[schemes.pattern.digest]
        edges = (self._best[0].edges - self._edges(pattern, pattern.everything)) | self._edges(pattern, scheme.core)
        return consistent(self.graph, Placement(edges))

    def _edges(self, pattern: Pattern, scheme: Scheme) -> frozenset[Edge]:
        try:
            placed = patterns.place(self.graph, [pattern], {pattern.digest: scheme}).edges
        except ValueError as error:
            raise InvalidSchemeError(str(error)) from error
        return with_weights(self.graph, placed) & self._tools[1].possible

    def _fingerprint(self) -> dict[str, Any]:
        self._check_initialized()
        own = {name: value for name, value in asdict(self.config).items() if name != "verbose"}
        divided = hashlib.sha256(" ".join(sorted(self._patterns)).encode()).hexdigest()[:16]
        engine = instance_or_default().spec.name
        return {"interface": "autotuner", **own, "engine": engine, "model": self.graph.fingerprint, "regions": divided}


def cache_beside(state: Path) -> Path:
    """The pattern cache that belongs to a state file."""
    return state.with_name(f"{state.stem}_pattern_cache{state.suffix}")
