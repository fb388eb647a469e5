"""`qdqtune quantize` and `apply`: put pairs into a float model, by placement rules or from a placement file.

Both load the model, calibrate, insert the pairs, save the file, and compare the outputs, on samples that calibration
has not used if there are enough. Nothing is timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from qdqtune.calibration.caches import CacheRanges, ranges_of
from qdqtune.calibration.observe import MOST_OPTIMIZED
from qdqtune.calibration.options import CacheOption, DataOptions, FixOption, RangeOptions, RewriteOption
from qdqtune.calibration.prepare import LEAST_JUDGED, Data, Prepared, hidden_work, prepare
from qdqtune.calibration.samples import HELD_OUT
from qdqtune.calibration.scales import Calibration, Ranges
from qdqtune.commands.debug import Damages, damages, exclusion, to_exclude
from qdqtune.commands.inputs import MetricOptions, ModelOption, execution_of
from qdqtune.commands.shown import Shown, Table
from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import usable_cores
from qdqtune.engines.execution import Execution
from qdqtune.engines.facts import ENGINES, facts_of
from qdqtune.engines.formats import numeric_format, portable, weight_formats_like
from qdqtune.engines.options import TIME_LIMIT_OPTION
from qdqtune.engines.runner import Handle, Runner, checked_output, temporary_runner
from qdqtune.errors import BadModel, BadOption, EngineFailure, EngineRefused, rewording
from qdqtune.explanation.formatting import counted, placed, samples, size
from qdqtune.graph.float16 import Precision, converted, load_for
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.loading import growth, load, nbytes
from qdqtune.graph.model import Model
from qdqtune.graph.operators import integer_operators
from qdqtune.graph.rewrites import Rewrites, allowed
from qdqtune.graph.saving import CONSTANTS, ConstantFile, model_outputs, save
from qdqtune.numerics.accuracy import (
    accuracy,
    closeness,
    closeness_of,
    concern,
    decibels,
    integers_differ,
    is_finite,
    slice_cell,
)
from qdqtune.numerics.fitting import fitted, some_ranges, with_wide
from qdqtune.numerics.half_precision import by_ranges, in_half_precision
from qdqtune.numerics.metrics import Labelled, Metric, ScoreOption, check_metric, measure, open_metric, option_of
from qdqtune.numerics.scores import (
    NO_SCORES,
    Score,
    Scores,
    check_asked,
    copies_in,
    doubt,
    equal_share,
    metric_in_words,
    metric_json,
    scores_of,
)
from qdqtune.numerics.simulation import Simulation
from qdqtune.options import (
    FILE,
    OUTPUT,
    REQUIRED,
    SECONDS,
    SWITCH,
    TEXT,
    WORDS,
    Duration,
    File,
    MaybeDuration,
    MaybeFile,
    Names,
    choice,
)
from qdqtune.placement import engine_rules, start_placements
from qdqtune.placement.engine_rules import PlacedByRules
from qdqtune.placement.files import existing, read_placement_file
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import NO_WIDE, every_edge, possible_edges, weight_only_edges
from qdqtune.placement.reading import quantized_how
from qdqtune.system.checks import Output
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.tuning.options import PORTABLE, PRECISION
from qdqtune.tuning.subject import SamplesInTime, part_of
from qdqtune.types import Accuracy, Edge, NumericFormat, Placement, QuantType

CALIBRATION_SHARE, COMPARING_SHARE = 0.5, 0.6
"""Shares of the remaining time for calibration, then comparing outputs. Chosen, not measured."""


@dataclass(frozen=True)
class PreparedModel:
    """A float model to put pairs into: `graph`, and `shaped`, the same model with fixed input shapes.

    `prepared` holds its samples; None if the model is not run. `matched` holds ranges of a calibration cache, if any.
    """

    graph: Model
    shaped: Model
    prepared: Prepared | None
    matched: CacheRanges | None
    notes: tuple[str, ...]

    def ranges(
        self, how: Calibration, numbers: NumericFormat, placed: Callable[[Ranges], Placement], observer: Observer
    ) -> tuple[Ranges, tuple[str, ...]]:
        """The ranges of the cache, or else calibrated ones of tensors with pairs; and notes on calibration that the
        time budget cut short. `placed` maps ranges to the placement."""
        if self.matched is not None:
            return self.matched.ranges, ()
        if self.prepared is None:
            return Ranges({}), ()
        in_time = SamplesInTime.of(self.prepared, self.prepared.execution.ends, observer, CALIBRATION_SHARE)
        prepared = replace(self.prepared, calibration=replace(self.prepared.calibration, produce=in_time))
        ranges = fitted(prepared, how, numbers, placed, observer, bias_samples=in_time.bias_samples, only_placed=True)
        return ranges, in_time.calibration_notes()


def _outputs(path: Path | None, name: str, options: SourceOptions) -> list[Output]:
    if path is None and not isinstance(options.model, Path):
        raise BadOption("the model lies in memory: give `output`, the file to write")
    is_named = path is not None or options.target.parent.is_dir()  # otherwise the input there is missing, too
    return model_outputs(options.target, name) if is_named else []


class SourceOptions(ScoreOption, DataOptions, CacheOption, RewriteOption, RangeOptions, ModelOption):
    output: MaybeFile = OUTPUT(
        "File to write.",
        "Output",
        "file to write",
        writes=_outputs,
        flags="-o --output",
        default_in_words="MODEL with .qdq.onnx",
    )
    precision: Precision | None = PRECISION
    time_limit: Duration = TIME_LIMIT_OPTION

    @property
    def target(self) -> Path:
        return self.output or self.model.with_suffix(".qdq.onnx")

    def precision_on(self, engine: str) -> Precision:
        return self.precision or facts_of(engine).usual_precision()

    def prepared(
        self,
        engine: str,
        fixed: Mapping[str, Any],
        opset: int,
        rewrites: Rewrites,
        execution: Execution,
        observer: Observer,
        *,
        is_run: bool,
    ) -> PreparedModel:
        """The model for an engine, and its samples or the ranges of `calibration_cache`. `fixed` has values of inputs
        to make constant; `is_run`: the command runs the model, so it needs samples even with a cache. If the option
        `precision` is not set, the model gets the usual precision of the engine, where its values allow it.
        """
        path = self.model
        observer.stage(f"reading {path.name}")
        graph, _ = load_for(path, self.precision_on(engine), fixed, opset, rewrites)
        operators = integer_operators(graph)
        if how := quantized_how(graph) or (operators and f"already has 8-bit operators ({', '.join(operators)})"):
            raise BadModel(f"{path} {how}: give the float model")
        prepared, cache = None, self.calibration_cache
        if cache is None or is_run:
            observer.stage("looking at the values")
            data = Data(
                self.calibration_data, self.calibration_samples, self.input_shapes, self.seed, folders=(path.parent,)
            )
            drawn = prepare(graph, data, execution, fixed=fixed)
            lowered, _, notes = in_half_precision(drawn, self.precision, facts_of(engine).usual_precision())
            prepared, more = lowered.sized_for(engine)
            graph, shaped, notes = prepared.model, prepared.shaped, (*notes, *lowered.hints, *more)
        else:
            graph, notes = by_ranges(graph, self.precision_on(engine), cache)
            shaped = with_input_shapes(graph, self.input_shapes)
        check_asked(self.scores, shaped)  # refuses others before the work begins
        matched = None if cache is None else ranges_of(cache, graph)
        return PreparedModel(graph, shaped, prepared, matched, (*notes, *(matched.notes() if matched else ())))


_WILDCARDS = partial(WORDS, group="Model", metavar="WILDCARD")


class QuantizeOptions(MetricOptions, FixOption, SourceOptions):
    quant_type: QuantType = choice(QuantType, "Numbers of the pairs.", "Model", "numbers of the pairs", default="int8")
    portable: bool = PORTABLE
    weight_only: str | None = TEXT(
        "Quantize weights of products alone, activations stay in float: w4 or w8, or exactly w4b32, w4b128a "
        "(blocks of 128, asymmetric) and the like. Language models gain where they read more weights than they "
        "multiply. d8 (d7 on x86 without VNNI) is dynamic quantization: products read activations in 8 bits with a "
        "scale found at run time.",
        "Model",
        "activations stay in float: w4, w8, w4b32",
        metavar="FORMAT",
    )
    report: bool = SWITCH(
        "What each rule did, and the ten tensors whose rounding alone does most to the outputs. Runs the float model "
        "once or more for each tensor with a pair, up to 400 times in all.",
        "Output",
        "tensors whose rounding does most harm",
    )
    engine: str = choice(
        sorted(ENGINES),
        "Whose numbers and rules to use. It need not be installed here.",
        "Engine",
        "whose numbers and rules to use",
        default="onnxruntime",
    )
    nodes_to_quantize: Names = _WILDCARDS("Only nodes named so. Repeatable.", short="only these nodes")
    op_types_to_quantize: Names = _WILDCARDS(
        "Only these operators. Repeatable.", metavar="OP", short="only these operators"
    )
    nodes_to_exclude: Names = _WILDCARDS(
        "Nodes to keep in float, such as '/head/*'. Repeatable.", short="nodes that stay in float"
    )
    op_types_to_exclude: Names = _WILDCARDS(
        "Operators to keep in float. Repeatable.", metavar="OP", short="operators that stay in float"
    )
    time_budget: MaybeDuration = SECONDS(
        "How long the command may take: calibration and the comparison with MODEL take fewer samples where it is "
        "short: 90s, 10m, 1h.",
        "Data",
        "for the whole run: 90s, 10m, 1h",
    )

    @property
    def is_run(self) -> bool:
        """Whether the model is run, to find ranges and to compare outputs: not if ranges come from a file, and there
        are neither data nor a metric, since random inputs say nothing about accuracy."""
        return self.calibration_cache is None or bool(self.calibration_data or self.has_metric)

    @property
    def sees_data(self) -> bool:
        return self.calibration_cache is None and self.weight_only is None

    def allowed(self, model: Model, possible: frozenset[Edge]) -> frozenset[Edge]:
        chosen = _matching(model, self.nodes_to_quantize, self.op_types_to_quantize)
        excluded = _matching(model, self.nodes_to_exclude, self.op_types_to_exclude)
        allowed = (chosen or {node.name for node in model.nodes}) - excluded
        return frozenset(edge for edge in possible if not edge.node or edge.node in allowed)


def _matching(model: Model, wildcards: Sequence[str], op_types: Sequence[str]) -> set[str]:
    names: set[str] = set()
    for wildcard in wildcards:
        matching = {n.name for n in model.nodes if fnmatchcase(n.name, wildcard)}
        if not matching:
            raise BadOption(f"no node is named {wildcard!r}: see qdqtune inspect --verbose for the names")
        names |= matching
    for op in op_types:
        matching = {n.name for n in model.nodes if n.op == op}
        if not matching:
            raise BadOption(f"the model has no {op}; it has {', '.join(sorted({n.op for n in model.nodes}))}")
        names |= matching
    return names


@dataclass(frozen=True, repr=False)
class Quantized(Shown):
    """What `quantize` has written, and its accuracy.

    `sqnr_db` is that of the worst output against the float model on `judged` samples; None if outputs are equal, not
    finite, or not compared. `agreement` is the share of integers or best classes that are as in float, if any; `scores`
    are the outputs with these classes. `measured` is the user's metric before and after. `damages` ranks tensors, the
    worst first; None without a report.
    """

    options: QuantizeOptions
    placed: PlacedByRules
    sqnr_db: float | None = None
    judged: int = 0
    is_held_out: bool = False
    measured: tuple[Score, Score] | None = None
    damages: Damages | None = None
    loudest: tuple[str, ...] = ()
    """Nodes that the report proposes to keep in float (see `to_exclude`)."""
    notes: tuple[str, ...] = ()
    agreement: float | None = None
    worst_slice: str = ""
    """The slice of an output with the least SQNR, and that SQNR."""
    scores: Scores = NO_SCORES
    is_finite: bool = True
    """Whether all outputs of both models are finite."""
    matched: CacheRanges | None = None
    """The ranges of the calibration cache that the model has tensors for; None without a cache."""
    file_bytes: tuple[int, int] = (0, 0)
    """The sizes of the float model's file and of the written one."""

    @property
    def metric(self) -> tuple[float, float] | None:
        return None if self.measured is None else (self.measured[0].value, self.measured[1].value)

    @property
    def output(self) -> Path:
        return self.options.target

    def in_words(self) -> str:
        near = closeness(self.sqnr_db, self.agreement) if self.is_finite else "not finite"
        near = near if self.judged else "not compared"
        return f"{self.output}, {placed(self.placed.placement)}, outputs {near}"

    def table(self) -> Table:
        effects = {rule.name: rule.effect for rule in engine_rules.RULES}
        rows = [(name, str(count), effects.get(name, "")) for name, count in self.placed.counts]
        return Table(("rule", "edges", ""), rows)

    def parts(self) -> Iterator[str | Table]:
        if self.options.report:
            yield self.table()
        if self.damages is not None:
            worst = self.damages.worst
            rows = [(each.tensor, ", ".join(each.nodes), decibels(each.output_db), each.reason) for each in worst]
            yield Table(("rounded alone", "read by", "output SQNR", "why"), rows, self.damages.in_words())
        if self.options.weight_only is None:
            numbers = f"{self.options.quant_type.upper()} as {self.options.engine} wants it"
            yield f"{self.output}: {placed(self.placed.placement)} ({numbers})"
        else:
            kinds = ", ".join(f"{count} as {name}" for name, count in self.placed.counts)
            yield f"{self.output}: weights stored in fewer bits: {kinds}"
        before, after = self.file_bytes
        yield f"file size {size(after)}, {after / before:.0%} of the float model's {size(before)}"
        if not self.judged:
            yield "not compared with the float model: give --calibration-data for that"
        else:
            agreement = "" if self.agreement is None else f", agreement {self.agreement:.1%}"
            near = closeness(self.sqnr_db, self.agreement) if self.is_finite else "unknown"
            is_integer = integers_differ(self.sqnr_db, self.agreement)
            told = f"outputs: {near}" if is_integer else f"output SQNR {near}{agreement}"
            yield f"{told}, on {samples(self.judged, self.is_held_out)}"
            if self.worst_slice:
                yield f"worst slice of the outputs: {self.worst_slice}"
            if self.is_finite:
                yield self.scores.told
        if self.loudest:
            yield "to keep in float what makes a tenth of the error or more, which may cost the gain:"
            yield from exclusion(self.loudest)
        elif self.damages is not None and self.sqnr_db is not None:
            yield "no node to keep in float: no tensor makes a tenth of the error, or nothing else is quantized"
        if self.measured is not None:
            yield metric_in_words(*self.measured)

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine": self.options.engine,
            "quant_type": self.options.quant_type,
            **({"weight_only": dict(self.placed.counts)} if self.options.weight_only else {}),
            "output": str(self.output),
            "file_bytes": dict(zip(("baseline", "final"), self.file_bytes, strict=True)),
            "edges": len(self.placed.placement),
            "rules": dict(self.placed.counts),
            "output_sqnr_db": self.sqnr_db,
            "agreement": self.agreement,
            "worst_slice": self.worst_slice,
            "scores": self.scores.as_json(),
            "scores_told": self.scores.told,
            "finite": self.is_finite,
            "samples": self.judged,
            "held_out": self.is_held_out,
            "metric": None if self.measured is None else metric_json(*self.measured),
            "pairs": [] if self.damages is None else [damage.to_dict() for damage in self.damages.worst],
            "examined": None if self.damages is None else self.damages.to_dict(),
            "nodes_to_exclude": self.loudest,
            "notes": list(self.notes),
            **({} if self.matched is None else {"cache": self.matched.as_json()}),
        }


def quantize(options: QuantizeOptions, observer: Observer | None = None, begun: float | None = None) -> Quantized:
    """Write a Q/DQ version of a model, its pairs placed by the rules of an engine. `begun` is the time of
    `time.monotonic` from which the time budget counts; by default now.

    Raises:
        InputError: model, data or options cannot be used, or not together.
        OutputError: the output cannot be written.
    """
    observer = observer or Silent()
    execution = execution_of(options, begun)
    with temporary_folder() as folder, ConstantFile(folder / CONSTANTS) as constants:
        return _quantized(options, observer, replace(execution, constants=constants))


def _quantized(options: QuantizeOptions, observer: Observer, execution: Execution) -> Quantized:
    _check_options(options)
    path, numbers = options.model, numeric_format(options.engine, options.quant_type)
    if options.portable:
        numbers = portable(options.engine, numbers)
    # A cache names tensors that rewrites of the engine's own kind would take away.
    merged = () if options.calibration_cache else facts_of(options.engine).merges
    rewrites = allowed(options.rewrites, ("sizes", *merged))
    fixed, is_run = options.fix_inputs, options.is_run
    ready = options.prepared(options.engine, fixed, numbers.opset, rewrites, execution, observer, is_run=is_run)
    shaped, prepared = ready.shaped, ready.prepared
    edges = every_edge(shaped)
    is_whole = options.allowed(shaped, edges) == edges  # refuses names that fit nothing, before the work begins
    metric = None if prepared is None else open_metric(options.evaluate, options, prepared)

    def placed_by_rules(ranges: Ranges, without: Sequence[str] = ()) -> PlacedByRules:
        if options.weight_only is not None:
            formats = weight_formats_like(options.engine, options.weight_only)
            chosen = start_placements.weight_only(shaped, options.allowed(shaped, weight_only_edges(shaped)), formats)
            return PlacedByRules(chosen, tuple(Counter(s.name for s in chosen.weight_formats.values()).items()))
        possible = options.allowed(shaped, possible_edges(shaped, ranges))
        possible = frozenset(e for e in possible if e.node not in without)
        return engine_rules.place(shaped, possible, options.engine, options.quant_type)

    ranges, hurried = Ranges({}), tuple[str, ...]()
    placed = placed_by_rules(some_ranges(shaped))
    if placed.placement and options.weight_only is None:
        how = options.calibration
        ranges, hurried = ready.ranges(how, numbers, lambda found: placed_by_rules(found).placement, observer)
        placed = placed_by_rules(ranges)
    if not placed.placement:
        where = "" if is_whole else " among the nodes that you chose"
        what = f"the rules of {options.engine} find nothing to quantize in {path}{where}"
        hidden = hidden_work(ready.graph, () if prepared is None else prepared.real)
        raise BadModel(what + _float_rules(placed) + (f"; {hidden}" if hidden else ""))
    quantized = Inserter(ready.graph, ranges, numbers).insert(placed.placement)
    done = Quantized(options, placed)
    with checked_output(options.target, options.engine, execution, is_run=prepared is not None) as fresh:
        save(quantized, fresh)
        if prepared is not None:
            observer.stage("comparing with the float model")
            done = _judged(done, fresh, prepared, metric, observer)
        if options.precision == "bf16":  # which ONNX Runtime cannot run
            save(converted(quantized, "bf16"), fresh)
    if prepared is not None and options.report:
        observer.stage("measuring what rounding each tensor does to the outputs")
        try:
            report = damages(ready.graph, quantized, prepared.judging, execution)
            loudest = to_exclude(report, lambda nodes: bool(placed_by_rules(ranges, nodes).placement))
            done = replace(done, damages=report, loudest=loudest)
        except EngineFailure as error:
            done = replace(done, notes=(*done.notes, f"no report of single tensors: {error}"))
    told = (f"calibration was cut short: {why}; a larger `time_budget` takes all" for why in hurried)
    notes = (*ready.notes, *done.notes, *told, *filter(None, [growth(path, options.target)]))
    return replace(done, notes=notes, matched=ready.matched, file_bytes=(nbytes(path), nbytes(options.target)))


def _check_options(options: QuantizeOptions) -> None:
    check_metric(options.evaluate, options)
    if options.report and options.time_budget is not None:
        raise BadOption("`report` runs the model up to 400 times, however long that takes: leave `time_budget` out")
    if options.weight_only is None:
        if options.report and options.calibration_data is None:
            raise BadOption("`report` says what rounding does to outputs on your data: give `calibration_data`")
        return
    weight_formats_like(options.engine, options.weight_only)
    for name in ("portable", "report", "calibration_cache"):
        if getattr(options, name):
            raise BadOption(f"`{name}` is about pairs, of which `weight_only` places none")


def _float_rules(placed: PlacedByRules) -> str:
    keepers = {r.name: r.reason for r in engine_rules.RULES if not r.places}
    counts = sorted(((count, name) for name, count in placed.counts if count and name in keepers), reverse=True)
    kept = [f"{name} ({counted(count, 'edge')}: {keepers[name]})" for count, name in counts]
    return f": kept in float by {', '.join(kept)}" if kept else ""


def _judged(done: Quantized, written: Path, prepared: Prepared, metric: Metric | None, observer: Observer) -> Quantized:
    """Compare the outputs of a file with those of the user's model on ONNX Runtime; pairs are fused if that is the
    target engine. With random inputs there is no accuracy, but the file must run."""
    options = done.options
    model = load(options.model, fix_inputs=options.fix_inputs)
    is_fused = options.engine == "onnxruntime" and len(model.nodes) <= MOST_OPTIMIZED
    spec = EngineSpec("onnxruntime", {"threads": usable_cores(), "fuse": is_fused})
    with temporary_runner(spec, prepared.execution) as runner:
        file = runner.log_dir / "float.onnx"
        save(model, file)
        measured = None
        with rewording("ONNX Runtime cannot run the model"):
            before, after = runner.load(file), runner.load(written)
            until = part_of(prepared.execution.ends, COMPARING_SHARE)
            in_time = SamplesInTime(prepared.judging, until, 2 if metric is None else 4, observer)
            expected, returned = runner.outputs(before, in_time()), runner.outputs(after, in_time())
            del expected[len(returned) :]  # time may have ended the second pass earlier
            remarks = [in_time.shortfall("compare outputs on all samples")]
            if metric is not None:
                measured, shortfall = _measured(metric, runner, before, after, until, observer)
                remarks += [shortfall, measured and doubt(measured[0])]
    notes = list(filter(None, remarks))
    judged = len(returned) if prepared.has_real_samples else 0
    if not judged:
        notes.append(f"no `calibration_data`{': scales come from random inputs' * options.sees_data}")
    elif not prepared.is_held_out and options.sees_data:
        notes.append(f"fewer than {HELD_OUT * LEAST_JUDGED} samples: the SQNR is that of the calibration data")
    is_held_out = prepared.is_held_out
    done = replace(done, judged=judged, is_held_out=is_held_out, measured=measured, notes=tuple(notes))
    if not judged:
        return done
    for outputs, whose in ((expected, "float"), (returned, "quantized")):
        if not is_finite(outputs):
            note = f"outputs of the {whose} model are NaN or infinite: the two cannot be compared"
            return replace(done, is_finite=False, notes=(*notes, note))
    scores = scores_of(expected, options.scores, copies_in(model))
    lost = accuracy(expected, returned, scores)
    worry = concern(lost)
    if worry is not None and options.quant_type == "int8" and numeric_format(options.engine, "int8").wide is not None:
        worry += f"; tune with `engine` {options.engine} finds the tensors that need 16 bits"
    return replace(
        done,
        notes=(*notes, *filter(None, [worry])),
        sqnr_db=lost.sqnr_db,
        agreement=equal_share(lost),
        worst_slice=slice_cell(lost),
        scores=scores,
    )


def _measured(
    metric: Metric, runner: Runner, before: Handle, after: Handle, until: float, observer: Observer
) -> tuple[tuple[Score, Score] | None, str | None]:
    """The metric of both models, if the time until `until` allows; and a note on what the time budget left out."""
    in_time = SamplesInTime(metric.samples if isinstance(metric, Labelled) else (), until, 2, observer)
    if isinstance(metric, Labelled):
        metric = replace(metric, samples=replace(metric.samples, produce=in_time))
    else:
        metric = replace(metric, execution=replace(metric.execution, ends=until))
    try:
        first, second = (measure(metric, runner, handle, lambda: before) for handle in (before, after))
    except EngineRefused as refused:
        if refused.failure.stage == "timeout" and until < inf:
            return None, f"{option_of(metric)} was not computed: {refused}"
        if refused.failure.stage not in ("output", "run"):
            raise
        raise BadOption(f"{option_of(metric)} cannot be used: {refused}") from refused
    if len(second.by_sample) < len(first.by_sample):  # time has ended the second pass earlier
        first = Score.of_rows(first.name, first.by_sample[: len(second.by_sample)])
    return (first, second), in_time.shortfall("compute the metric on all samples")


# `apply`


class ApplyOptions(SourceOptions):
    placement: File = FILE("placement.yaml of a tuning run.", "Model", "placement.yaml of a run", default=REQUIRED)
    engine: str | None = TEXT(
        "Engine whose numeric format to use; it need not be installed here.",
        "Engine",
        default_in_words="that of the placement",
        metavar="NAME",
    )


@dataclass(frozen=True, repr=False)
class Applied(Shown):
    """What `apply` has written. `lost` are edges of the placement that the model lacks, or that have no scale."""

    output: Path
    placement: Placement
    lost: tuple[Edge, ...]
    accuracy: Accuracy | None = None
    """The accuracy of the outputs on ONNX Runtime; None if it cannot run them, or inputs are random."""
    matched: CacheRanges | None = None
    """The ranges of the calibration cache that the model has tensors for; None without a cache."""
    notes: tuple[str, ...] = ()
    scores: Scores = NO_SCORES

    def in_words(self) -> str:
        words = f"{self.output}: {placed(self.placement)}"
        if self.accuracy is None:
            return words
        what = "outputs" if self.accuracy.sqnr_db is None else "output SQNR"
        return f"{words}, {what} against float: {closeness_of(self.accuracy)}"

    def parts(self) -> Iterator[str | Table]:
        yield self.in_words()
        if self.accuracy is not None:
            yield self.scores.told

    def to_dict(self) -> dict[str, Any]:
        accuracy = None if self.accuracy is None else asdict(self.accuracy)
        cache = {} if self.matched is None else {"cache": self.matched.as_json()}
        lost = [str(edge) for edge in self.lost]
        return {
            "output": str(self.output),
            "edges": len(self.placement),
            "lost": lost,
            "accuracy": accuracy,
            "scores": self.scores.as_json(),
            "scores_told": self.scores.told,
            **cache,
        }


def apply(options: ApplyOptions, observer: Observer | None = None) -> Applied:
    """Put the pairs of a placement file into a model, with scales calibrated anew, and write it.

    Calibration and rewrites are those of the placement file, unless options say otherwise.

    Raises:
        InputError: model, placement, data or options cannot be used, or no edge of the placement is in the model.
        EngineFailure: the engine does not load the written model.
        OutputError: the output cannot be written.
    """
    observer, path = observer or Silent(), options.model
    recorded = read_placement_file(options.placement)
    engine = options.engine or recorded.engine
    numbers = numeric_format(engine, "fp8" if recorded.quant_type == "fp8" else "int8")
    if recorded.portable and facts_of(engine).is_threaded:
        numbers = portable(engine, numbers)
    rewrites = recorded.rewrites if options.rewrites == "auto" else allowed(options.rewrites)
    execution, is_run = execution_of(options), bool(options.calibration_data)
    ready = options.prepared(engine, recorded.fix_inputs, numbers.opset, rewrites, execution, observer, is_run=is_run)

    def known(ranges: Ranges) -> tuple[Placement, tuple[Edge, ...]]:
        return existing(ready.shaped, recorded.placement, possible_edges(ready.shaped, ranges))

    if recorded.placement and not existing(ready.shaped, recorded.placement, every_edge(ready.shaped))[0]:
        count = len(recorded.placement) + len(recorded.placement.weight_only)
        raise BadModel(f"{path} has none of the {count} edges of {options.placement}: is it the same network?")
    how = options.calibration if options.has_method else recorded.calibration
    ranges, _ = ready.ranges(how, numbers, lambda ranges: replace(known(ranges)[0], wide=frozenset()), observer)
    placed, lost = known(ranges)
    if recorded.placement and not placed:
        raise BadModel(f"on none of the edges of {options.placement} can a pair stand in {path}")
    notes = [*ready.notes]
    if placed.wide and numbers.wide is None:
        notes.append(NO_WIDE.format(engine))
        placed = replace(placed, wide=frozenset())
    elif placed.wide and ready.prepared is not None:
        ranges = with_wide(ready.prepared, ranges, numbers)
    inserter = Inserter(ready.graph, ranges, numbers)
    with checked_output(options.target, engine, execution) as fresh:
        quantized = inserter.insert(placed)
        save(converted(quantized, "bf16") if options.precision_on(engine) == "bf16" else quantized, fresh)
        judged, scores, prepared = None, NO_SCORES, ready.prepared
        if prepared is not None and prepared.has_real_samples:
            given: Any = {"execution": prepared.execution, "asked": options.scores}
            try:
                with Simulation(inserter, prepared.judging, engine, **given) as simulation:
                    judged, scores = simulation.accuracy(placed), simulation.scores
            except EngineRefused as refused:
                notes.append(f"outputs were not compared: {refused}")
        elif prepared is not None:
            notes.append("no `calibration_data`: the scales come from random inputs")
    if not recorded.placement:
        notes.append("this placement holds no pair: with none was the model fastest, or within the limits")
    if lost:
        scaled = "" if ready.matched is None else " or without a scale"
        notes.append(f"{counted(len(lost), 'edge')} of the placement not in this model{scaled}, the first: {lost[0]}")
    if judged is not None and (warning := concern(judged)):
        notes.append(warning)
    return Applied(options.target, placed, lost, judged, ready.matched, tuple(notes), scores)
