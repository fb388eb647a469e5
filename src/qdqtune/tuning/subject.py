"""The model to tune, made ready: float graph, samples and ranges, patterns, and the edges that may get pairs; and the
run's fingerprint, with which its state file begins, so that other runs refuse that file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from math import inf
from pathlib import Path

import msgspec
import onnx

from qdqtune.calibration.caches import ranges_of
from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.inputs import fixed_inputs
from qdqtune.calibration.observe import onnxruntime_session, passes
from qdqtune.calibration.prepare import Data, Prepared, hidden_work, prepare, unsteady_work
from qdqtune.calibration.scales import Ranges
from qdqtune.calibration.user_code import TooSlow
from qdqtune.calibration.workloads import description
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.facts import facts_of
from qdqtune.engines.formats import portable
from qdqtune.engines.runner import Runner
from qdqtune.errors import BadModel, BadOption, EngineUnavailable, reading
from qdqtune.graph.float16 import OPSET, Precision, converted, load_for
from qdqtune.graph.inference import with_float_type
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.operators import RANDOM
from qdqtune.graph.rewrites import Rewrites, allowed
from qdqtune.numerics.fitting import BIAS_SAMPLES, LEAST_SAMPLES, fitted, with_wide
from qdqtune.numerics.half_precision import NAMES, in_half_precision
from qdqtune.numerics.simulation import check_stripped
from qdqtune.placement import engine_rules, start_placements
from qdqtune.placement.possible import NO_WIDE, possible_edges
from qdqtune.placement.reading import Reading, is_quantized, quantized_how, read_placement
from qdqtune.placement.stripping import strip_pairs
from qdqtune.search.regions import cache, discovery, patterns
from qdqtune.search.regions.patterns import Pattern
from qdqtune.tuning import subgraph_groups as groups
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.options import Division
from qdqtune.tuning.settings import SIMULATOR_SLOWNESS, Settings
from qdqtune.tuning.store import RangesRecord, Store
from qdqtune.types import Edge, Mix, NumericFormat, Placement, Sample

FOREMOST = ("imported", "rules", "static", "compute")
"""Suggested placements that modes cut and subgraph always build: the user's pairs; the engine's rules, as in
`quantize`; a usual static quantizer's; and the fewest pairs, so that every compute operator outputs floats."""

CALIBRATION_SHARE = 0.25
"""Share of the remaining time for calibration in a search. Chosen, not measured."""

FAIR_SAMPLES, LONGER = 16, 1.5
"""A pass over fewer samples than this may take that many times its part of the time. Chosen, not measured."""

FIRST_RANGES = "ranges before biases are corrected"
"""Their key in the state file."""

PAIRED = 2.0
"""Time of an inference with pairs that nothing fuses, relative to one without. Estimated, not measured."""

WITHOUT_GPU = (
    "without a GPU: `qdqtune quantize MODEL --engine tensorrt -o quantized.onnx` places pairs by rules, and "
    "`qdqtune check quantized.onnx --engine tensorrt-rtx --engine-option target=sm89` builds it for a "
    "GPU that is not here"
)

FLOAT_TYPES = {"float16": "FLOAT16", "float32": "FLOAT", "bfloat16": "BFLOAT16"}


@dataclass(frozen=True)
class Subject:
    """The model to tune. Outputs are compared on the samples of `accuracy`; the workloads of `mix` are timed.

    If the user gave a Q/DQ model, `imported` has its pairs; `quantized` is that model if the user gave no float model
    (`from_qdq`). `precision` is that of the float model. Only after `calibrated`: `ranges`, `possible` (the edges that
    may get pairs), `rules_placement` by the engine's rules, and `hurried`, notes on what a time budget left out.
    """

    prepared: Prepared
    numbers: NumericFormat
    accuracy: tuple[Sample, ...]
    mix: Mix
    patterns: tuple[Pattern, ...]
    imported: Reading | None = None
    quantized: Model | None = None
    notes: tuple[str, ...] = ()
    ranges: Ranges = field(default_factory=lambda: Ranges({}))
    hurried: tuple[str, ...] = ()
    possible: frozenset[Edge] = frozenset()
    rewrites: Rewrites = field(default_factory=Rewrites)
    rules_placement: Placement = field(default_factory=Placement)
    precision: Precision = "fp32"

    @property
    def changes(self) -> str:
        """How the user's float model was changed, as a phrase; "" if nothing that may change its latency."""
        in_half = f"in {NAMES[self.precision]}" if self.precision != "fp32" else ""
        return " ".join(filter(None, (in_half, "with its rewrites" if self.rewrites.names else "")))

    @property
    def model(self) -> Model:
        """The float model; input sizes that the user's file leaves open are open here too."""
        return self.prepared.model

    @property
    def shaped(self) -> Model:
        """The float model with the input shapes of the measurement."""
        return self.prepared.shaped

    @property
    def feed(self) -> Sample:
        """The inputs of the most frequent workload, for measurements on a single one."""
        return dict(max(self.mix, key=lambda workload: workload.share).inputs)

    @cached_property
    def tuned(self) -> tuple[Pattern, ...]:
        return patterns.tunable(self.shaped, self.patterns)

    def suggestions(self) -> dict[str, Placement]:
        """Placements to try first, by origin: the user's own, then those of rules."""
        given = {}
        if self.imported is not None:
            own = self.imported.placement
            given["imported"] = own.paired(own.edges & self.possible)
        if self.rules_placement and self.rules_placement not in given.values():
            given["rules"] = self.rules_placement
        simple = start_placements.placements(self.shaped, self.possible)
        return given | {name: p for name, p in simple.items() if p not in given.values()}

    def foremost(self) -> dict[str, Placement]:
        """Those of the `suggestions` that are in FOREMOST."""
        given = self.suggestions()
        return {name: given[name] for name in FOREMOST if name in given}


def open_subject(settings: Settings, runner: Runner, execution: Execution) -> Subject:
    """Read the model and the first calibration sample, and find regions and patterns. Runs the model only if it may be
    converted to half precision."""
    check_device(settings.engine, runner)
    if settings.front and not settings.has_samples:
        raise BadOption("`front` weighs speed against accuracy, which takes samples: give `calibration_data`")
    # Only what the user names where other files of the user name nodes.
    names_nodes = settings.qdq_baseline or settings.graph_json or settings.calibration_cache
    facts = settings.engine.facts
    by_default = () if names_nodes else facts.usual_rewrites
    rewrites = Rewrites() if settings.from_qdq else allowed(settings.rewrites, by_default)
    numbers = runner.numeric_format(settings.quant_type)
    if settings.portable:
        numbers = portable(settings.engine.name, numbers)
    notes: list[str] = []
    usual: Precision = "fp32"
    if not settings.from_qdq and settings.precision is None:
        usual = settings.engine.facts.usual_precision(runner.describe().get("version", ""))
    wanted: Precision = settings.precision or usual
    model, made = load_for(settings.model, wanted, settings.fix_inputs, numbers.opset, rewrites)
    quantized = None
    if settings.from_qdq:
        quantized = _typed(settings, converted(model, wanted))
        if not is_quantized(quantized):
            raise BadOption(f"{settings.model} has no Q/DQ pairs: leave `from_qdq` out")
        model = Rewrites().of(strip_pairs(quantized))
    else:
        model = _typed(settings, model)
        if how := quantized_how(model):
            advice = "give `from_qdq` to make it float and search from there, or tune the float model"
            raise BadModel(f"{settings.model} {how}: {advice}")
    faster = tuple(name for name in made.merged if name in facts.rewrites)
    made = replace(made, names=(*faster, *made.names), merged=tuple(n for n in made.merged if n not in faster))
    imported = None if quantized is None else read_placement(model, quantized, settings.quant_type)
    source = settings.calibration_data, settings.calibration_samples, settings.input_shapes, settings.seed
    data = Data(*source, settings.workloads, (settings.model.parent,))
    slower = 1.0 if settings.is_timed else SIMULATOR_SLOWNESS
    most = settings.accuracy_samples
    prepared = prepare(model, data, execution, fixed=settings.fix_inputs, most=most, slower=slower)
    kept: Collection[str] = ()
    if not settings.from_qdq:
        floor = settings.limits.min_sqnr
        prepared, half, half_notes = in_half_precision(prepared, settings.precision, usual, floor)
        kept, wanted = (half.kept.keys(), half.precision) if half is not None else ((), "fp32")
        notes += half_notes
    prepared, sized = prepared.sized_for(settings.engine.name)
    notes += sized
    imported = imported or _baseline(settings, prepared.model, wanted, kept)
    if imported is not None and imported.placement.wide and numbers.wide is None:
        imported = replace(imported, placement=replace(imported.placement, wide=frozenset()))
        notes.append(NO_WIDE.format(settings.engine.name))
    if imported is not None and imported.unmatched:
        notes.append(
            f"{len(imported.unmatched)} pairs of the Q/DQ model have no counterpart and were left out "
            f"(the first: {imported.unmatched[0]})"
        )
    if prepared.samples.is_random:
        come = "scales come" if settings.calibration_cache is None else "the SQNR comes"
        notes.append(f"no `calibration_data`: {come} from random inputs, so latency is real but accuracy is not")
    notes += prepared.hints
    if not (settings.has_pairs or settings.formats):
        engine = settings.engine.name
        notes.append(
            f"{engine} has no 8-bit kernels for pairs, so none are tried: `formats` int8 tries them nonetheless"
        )
    if settings.is_timed and not settings.workloads and (unsteady := unsteady_work(prepared.shaped)) is not None:
        notes.append(unsteady)
    if drawn := [node.name for node in prepared.shaped.nodes if node.op in RANDOM - {"Dropout"}]:
        notes.append(f"node {drawn[0]} draws random numbers: where outputs depend on them, no candidate holds a limit")
    fixed = fixed_inputs(settings.model, settings.fix_inputs)
    mix = tuple(replace(workload, inputs={**workload.inputs, **fixed}) for workload in prepared.mix)
    shaped = prepared.shaped
    regions = discovery.find(
        shaped,
        settings.regions,
        max_sequence_size=settings.config.maximum_sequence_region_size,
        min_topdown_size=settings.config.minimum_topdown_search_size,
    )
    grouped = patterns.group(shaped, regions)
    chosen = filtered(shaped, grouped, settings.node_filter)
    # The user's other files are read once here, so that errors in them show before the run begins.
    if settings.pattern_cache is not None:
        cache.read_cache(settings.pattern_cache)
    if settings.graph_json is not None:
        groups.from_file(shaped, settings.graph_json)
    if settings.calibration_cache is not None:
        ranges_of(settings.calibration_cache, shaped)
    return Subject(
        prepared=prepared,
        numbers=numbers,
        accuracy=prepared.judging,
        mix=mix,
        patterns=chosen,
        imported=imported,
        quantized=quantized,
        notes=tuple(notes),
        rewrites=made,
        precision="fp32" if settings.from_qdq else wanted,
    )


def calibrated(
    subject: Subject, settings: Settings, store: Store, observer: Observer, ends: float | None = None
) -> Subject:
    """The subject with ranges, from the state file or found on the samples; on fewer of them if `ends` is near, the
    time (by `time.monotonic`) at which the run must end."""
    record = store.get("ranges", RangesRecord)
    if settings.calibration_cache is not None:
        matched = ranges_of(settings.calibration_cache, subject.shaped)
        subject = replace(subject, notes=(*subject.notes, *matched.notes()))
        record = record or store.put("ranges", RangesRecord(ranges=matched.ranges))
    for note in record.hurried if record is not None else ():
        observer.note(f"{note}; so it was when this run began: `restart` with more time calibrates anew")
    if record is None and not settings.has_pairs:  # weights alone need no ranges
        record = store.put("ranges", RangesRecord(ranges=Ranges({})))
    if record is None and subject.quantized is not None:
        instead = "tune the float model"
        with onnxruntime_session(subject.prepared.execution, fuse=False) as session:
            sample = subject.prepared.samples.first(1)[0]
            check_stripped(subject.model, subject.quantized, session, sample, str(settings.model), instead)
    if record is None:
        in_time = SamplesInTime.of(subject.prepared, ends, observer)
        prepared = replace(subject.prepared, calibration=replace(subject.prepared.calibration, produce=in_time))

        def kept(find: Callable[[], Ranges]) -> Ranges:
            def measured() -> RangesRecord:
                return RangesRecord(ranges=find(), hurried=in_time.left_out())

            return store.memo(FIRST_RANGES, RangesRecord, measured).ranges

        placed, bias_samples = partial(placement_by_rules, subject, settings), in_time.bias_samples
        found = fitted(
            prepared, settings.calibration, subject.numbers, placed, observer, bias_samples=bias_samples, kept=kept
        )
        whole = with_wide(prepared, found, subject.numbers)
        first = store.get(FIRST_RANGES, RangesRecord)
        hurried = (*(first.hurried if first is not None else ()), *in_time.calibration_notes())
        record = store.put("ranges", RangesRecord(ranges=whole, hurried=tuple(dict.fromkeys(hurried))))
    ranges = record.ranges
    if subject.imported is not None and settings.from_qdq:
        own = subject.imported.ranges
        ranges = replace(ranges, activations={**ranges.activations, **own.activations}, weights=own.weights)
    possible = possible_edges(subject.shaped, ranges) if settings.has_pairs else frozenset[Edge]()
    if settings.node_filter:
        possible &= edges_within(subject.patterns)
    if settings.has_pairs and not possible:
        hidden = hidden_work(subject.shaped, subject.prepared.real)
        reason = f": {hidden}" if hidden else ""
        raise BadModel(f"{settings.model} has no tensor that could be quantized{reason}")
    by_rules = engine_rules.place(subject.shaped, possible, settings.engine.name, settings.quant_type).placement
    return replace(subject, ranges=ranges, hurried=record.hurried, possible=possible, rules_placement=by_rules)


def part_of(ends: float | None, share: float) -> float:
    """The time (by `time.monotonic`) after `share` of what is left until `ends`; inf without a time budget."""
    now = time.monotonic()
    return inf if ends is None else now + share * max(0.0, ends - now)


@dataclass
class SamplesInTime:
    """Iterates over samples in several passes that should end by the time `until` (of `time.monotonic`). A pass that
    exceeds its part of the time (see `FAIR_SAMPLES`), or cannot read further samples, ends early, but not before
    `LEAST_SAMPLES`; later passes take as few. The observer is told of each sample, `notes` say what was left out.
    Correcting biases may take `share` of the time left until `ends`, even after `until`."""

    samples: Iterable[Sample]
    until: float
    passes: int
    observer: Observer
    most: float = inf
    ends: float | None = None
    share: float = 0.0
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        prepared: Prepared, ends: float | None, observer: Observer, share: float = CALIBRATION_SHARE
    ) -> SamplesInTime:
        """The samples of a calibration in a run that must end at `ends`, if at all: its passes may take `share` of the
        remaining time; the correction of biases, `share` of what is left then."""
        until, source, model = part_of(ends, share), prepared.calibration, prepared.shaped
        count = 1 if ends is None else passes(model, candidate_tensors(model), source, prepared.execution)
        return SamplesInTime(source, until, count, observer, ends=ends, share=share)

    def __call__(self) -> Iterator[Sample]:
        started, read = time.monotonic(), 0
        seconds = (self.until - started) / max(1, self.passes)
        try:
            for number, sample in enumerate(self.samples):
                most = seconds if number >= FAIR_SAMPLES else LONGER * seconds
                if number >= LEAST_SAMPLES and time.monotonic() - started > most:
                    self.most = min(self.most, number)
                if number >= self.most:
                    break
                yield sample
                read = number + 1
                self.observer.progress(read, None)
        except TooSlow:
            if not read:
                raise
        self.passes -= 1  # not where a single sample was looked at

    def bias_samples(self, each: float) -> int:
        """How many samples can be used to correct biases, at `each` seconds; 0, with a note, if not even
        `LEAST_SAMPLES` can."""
        self.until = max(self.until, part_of(self.ends, self.share))  # the pass that reads them must not end before
        left = self.until - time.monotonic()
        if left >= LEAST_SAMPLES * each:
            return int(min(BIAS_SAMPLES, left / each))
        self.notes.append("`time_budget` has no room to correct biases: outputs come less close to the float model's")
        return 0

    def calibration_notes(self) -> tuple[str, ...]:
        """Notes on what the calibration left out; the observer gets them, and is told if time is over."""
        notes = (*self.left_out(), *dict.fromkeys(self.notes))
        for note in notes:
            self.observer.note(note)
        if self.ends is not None and time.monotonic() > self.ends:
            self.observer.note(
                f"`time_budget` ended during calibration, which takes {LEAST_SAMPLES} samples in any case: "
                "`calibration_samples` takes fewer"
            )
        return notes

    def left_out(self) -> tuple[str, ...]:
        """A note on samples that calibration left out, if it did."""
        return tuple(filter(None, [self.shortfall("calibrate on all samples")]))

    def shortfall(self, what: str) -> str | None:
        """A message that there is not enough time to do `what`; None if no sample was left out."""
        return None if self.most == inf else f"`time_budget` has no room to {what}: only {self.most:.0f} are used"


def placement_by_rules(subject: Subject, settings: Settings, ranges: Ranges) -> Placement:
    """The placement by the engine's rules, for which ranges are fitted; empty with `from_qdq`, which has scales."""
    if settings.from_qdq:
        return Placement()
    possible = possible_edges(subject.shaped, ranges)
    return engine_rules.place(subject.shaped, possible, settings.engine.name, settings.quant_type).placement


def _baseline(settings: Settings, model: Model, precision: Precision, kept: Collection[str]) -> Reading | None:
    if settings.qdq_baseline is None:
        return None
    if precision == "fp32":
        baseline = load(settings.qdq_baseline)
    else:
        baseline = converted(load(settings.qdq_baseline, min_opset=OPSET), precision, kept)
    reading = read_placement(model, Rewrites().of(baseline), settings.quant_type)
    if not reading.placement:
        raise BadModel(
            f"{settings.qdq_baseline} has no Q/DQ pair that fits {settings.model}: "
            "give a quantized version of it, or leave `qdq_baseline` out"
        )
    return reading


def _typed(settings: Settings, model: Model) -> Model:
    if settings.default_dq_dtype is None:
        return model
    return with_float_type(model, onnx.TensorProto.DataType.Value(FLOAT_TYPES[settings.default_dq_dtype]))


def edges_within(found: tuple[Pattern, ...]) -> frozenset[Edge]:
    """The edges in all instances of patterns: with a node filter, the only ones that may get pairs."""
    return frozenset(e for p in found for parts in p.edges.values() for edges in parts.values() for e in edges)


def tuned_graph(model: Model, rewrites: str = "off", engine: str = "") -> Model:
    """The graph to tune: without pairs, or for a float model with rewrites, also those for `engine` if named."""
    if is_quantized(model):
        return Rewrites().of(strip_pairs(model))
    return allowed(rewrites, facts_of(engine).usual_rewrites if engine else ()).of(model)


def filtered(model: Model, found: tuple[Pattern, ...], wildcards: tuple[str, ...]) -> tuple[Pattern, ...]:
    """The patterns with an instance in which a node's name matches a wildcard; all without wildcards. Raises BadOption
    if none matches."""
    if not wildcards:
        return found
    names = {n.index for n in model.nodes if any(fnmatchcase(n.name, w) for w in wildcards)}
    chosen = tuple(p for p in found if any(names & set(r.all_nodes()) for r in p.instances))
    if not chosen:
        raise BadOption("`node_filter` matches no node of the model")
    return chosen


def check_device(spec: EngineSpec, runner: Runner) -> None:
    """Raise EngineUnavailable if the engine cannot build here, or builds but cannot time."""
    try:
        device = runner.describe().get("device")
    except EngineUnavailable as error:
        if spec.facts.is_tensorrt:
            raise EngineUnavailable(f"{str(error).rstrip('.')}; {WITHOUT_GPU}") from error
        raise
    if device == "none":
        raise EngineUnavailable(f"{spec.name} builds here but times nothing, and a search needs times; {WITHOUT_GPU}")


# ---------------------------------------------------------------- the fingerprint of a run


class CalibrationData(msgspec.Struct, frozen=True):
    """Identifies calibration data: a digest of the content, the samples asked for, and how many are held out."""

    digest: str
    samples: int | None
    held_out: int


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that measurements depend on, but not budgets and numbers of rounds: a search goes on with those of the
    first session, and blocks of the proof are stored by the content of files and by the looks (`Racer`).

    Options come before entries derived from them, so that the first difference is the user's.
    """

    mode: str
    graph_json: str | None
    quant_type: str
    rewrites: str
    formats: tuple[str, ...] | None
    seed: int
    regions: Division
    node_filter: tuple[str, ...]
    from_qdq: bool
    workloads: str | None
    input_shapes: dict[str, tuple[int | None, ...]]
    engine: dict[str, str]
    threads: tuple[int, ...]
    portable: bool | None = None
    numeric_format: NumericFormat
    model: str
    calibration_method: str
    calibration_data: CalibrationData
    calibration_cache: str | None
    scores: tuple[str, ...] | None = None


def fingerprint_of(settings: Settings, subject: Subject, engine: Mapping[str, str]) -> Fingerprint:
    formats, data = settings.formats, subject.prepared.samples.digest
    return Fingerprint(
        mode=settings.mode,
        graph_json=_digest("`graph_json`", settings.graph_json),
        quant_type=settings.quant_type,
        rewrites=settings.rewrites,
        formats=None if formats is None else tuple("pairs" if f == settings.quant_type else f for f in formats),
        seed=settings.seed,
        regions=settings.regions,
        node_filter=settings.node_filter,
        from_qdq=settings.from_qdq,
        workloads=description(subject.mix) if settings.workloads else None,
        threads=tuple(count for count in settings.thread_counts if count is not None),
        portable=settings.portable or None,
        input_shapes={name: tuple(sizes) for name, sizes in sorted(subject.prepared.sizes.items())},
        engine=dict(engine),
        numeric_format=subject.numbers,
        model=subject.model.fingerprint,
        calibration_method=str(settings.calibration),
        calibration_data=CalibrationData(
            data, settings.calibration_samples, len(subject.accuracy) if subject.prepared.is_held_out else 0
        ),
        calibration_cache=_digest("`calibration_cache`", settings.calibration_cache),
        scores=settings.scores or None,
    )


def _digest(option: str, path: Path | None) -> str | None:
    with reading(f"{option} {path}"):
        return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
