"""`qdqtune quantize`: a float model to a Q/DQ model by placement rules, in one pass and without measuring latency.

Load, calibrate, place by the engine's rules, insert, save, and say what it cost: on samples that calibration has not
seen, where there are enough of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from qdqtune.calibration.equalization import scaled
from qdqtune.calibration.matching import Matched
from qdqtune.calibration.observe import MOST_OPTIMIZED
from qdqtune.calibration.prepare import LEAST_JUDGED, Prepared, hidden_work
from qdqtune.calibration.rounding import moments
from qdqtune.calibration.samples import HELD_OUT
from qdqtune.calibration.scales import Ranges
from qdqtune.commands.quantize_options import Request, Selection
from qdqtune.commands.shown import Shown, Table
from qdqtune.commands.worst_tensors import Damage, damages, to_exclude
from qdqtune.engines import EngineSpec
from qdqtune.engines.acceptance import accepted
from qdqtune.engines.cpu import cores
from qdqtune.engines.formats import numeric_format, storages_like, usual_precision, wanted_storage
from qdqtune.engines.runner import Handle, Runner, insist
from qdqtune.errors import BadModel, BadOption
from qdqtune.explanation.words import decibels, placed
from qdqtune.graph.float16 import Precision, load_for
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.operators import elements, integer_operators
from qdqtune.graph.rewrites import allowed
from qdqtune.graph.saving import one_constant_file, save
from qdqtune.numerics.accuracy import accuracy, concern, cosine, is_finite
from qdqtune.numerics.half_precision import finished
from qdqtune.numerics.metric import Evaluation, evaluate, load_evaluation
from qdqtune.placement import engine_rules, implicit, rules
from qdqtune.placement.engine_rules import Placed
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import met_by_weights, possible_edges, storable_edges
from qdqtune.placement.reading import is_quantized
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.types import Array, Failure, NumericFormat, Placement

REFUSED = "ONNX Runtime cannot run the model"


@dataclass(frozen=True, repr=False)
class Quantized(Shown):
    """What was written, and what it cost.

    SQNR in dB and cosine are of the worst output against the float model on `judged` samples; None where nothing is
    lost, or where outputs are not finite. `metric` is that of `--evaluate`, before and after. `damages` is the report,
    the worst tensor first.
    """

    output: Path
    placed: Placed
    sqnr_db: float | None
    cosine: float | None
    judged: int
    is_held_out: bool
    metric: tuple[float, float] | None = None
    damages: tuple[Damage, ...] = ()
    loudest: tuple[str, ...] = ()
    """The nodes that the report names to keep in float (see `to_exclude`)."""
    notes: tuple[str, ...] = ()
    is_finite: bool = True
    """Whether the outputs of both models are."""
    matched: Matched | None = None
    """What the calibration cache had for the model, if one was given."""

    def in_words(self) -> str:
        """Where it lies, and how near its outputs are."""
        near = "not compared" if not self.judged else decibels(self.sqnr_db) if self.is_finite else "not finite"
        return f"{self.output}, {placed(self.placed.placement)}, outputs {near}"

    def table(self) -> Table:
        """What each rule did."""
        return ("rule", "edges"), [(name, str(count)) for name, count in self.placed.counts]

    def to_dict(self) -> dict[str, Any]:
        """The result for machines."""
        return {
            "output": str(self.output),
            "edges": len(self.placed.placement),
            "rules": dict(self.placed.counts),
            "output_sqnr_db": self.sqnr_db,
            "output_cosine": self.cosine,
            "finite": self.is_finite,
            "samples": self.judged,
            "held_out": self.is_held_out,
            "metric": None if self.metric is None else dict(zip(("before", "after"), self.metric, strict=True)),
            "pairs": [asdict(damage) for damage in self.damages],
            "nodes_to_exclude": self.loudest,
            "notes": list(self.notes),
            **({} if self.matched is None else {"cache": self.matched.as_json()}),
        }


def quantize(request: Request, observer: Observer | None = None) -> Quantized:
    """Write a Q/DQ version of a model, its pairs placed by the rules of an engine.

    Raises:
        InputError: model, data or options cannot be used, or not together.
        OutputError: the output cannot be written.
    """
    observer = observer or Silent()
    with temporary_folder() as folder, one_constant_file(folder):
        return _quantized(request, observer)


def _quantized(request: Request, observer: Observer) -> Quantized:
    _check_options(request)
    numbers, made = _numbers(request), allowed(request.rewrites)
    metric = None if request.evaluate is None else load_evaluation(request.evaluate)
    observer.stage(f"reading {request.model.name}")
    usual = usual_precision(request.engine)
    precision: Precision = request.precision or usual
    graph = load_for(request.model, precision, request.fix_inputs, numbers.opset, rewrites=made)
    if present := _quantized_parts(graph):
        raise BadModel(f"{request.model} already has {present}: give the float model")
    request.selection.allowed(graph, frozenset())  # refuses names that fit nothing, before the work begins
    if request.is_fed:
        observer.stage("looking at the values")
    ready = request.ready(graph, request.fix_inputs, usual, is_fed=request.is_fed)
    shaped, prepared = ready.shaped, ready.prepared

    def placed_by_rules(ranges: Ranges, without: Sequence[str] = ()) -> Placed:
        if request.weight_only is not None:
            return _weights_only(request, shaped, request.weight_only)
        possible = request.selection.allowed(shaped, possible_edges(shaped, ranges))
        possible = frozenset(e for e in possible if e.node not in without)
        if request.placement_like == "implicit":
            return implicit.place(shaped, possible, request.quant_type)
        return engine_rules.place(shaped, possible, request.engine, request.quant_type)

    ranges = Ranges({})
    if request.weight_only is None:
        how = request.calibration
        ranges = ready.ranges(how, numbers, lambda found: placed_by_rules(found).placement, observer)
    placed = placed_by_rules(ranges)
    if not placed.placement:
        chosen = " among the nodes that you chose" if request.selection != Selection() else ""
        what = f"the rules of {request.engine} find nothing to quantize in {request.model}{chosen}"
        hidden = None if prepared is None else hidden_work(ready.graph, prepared.samples)
        raise BadModel(what + _keepers(placed) + (f"; {hidden}" if hidden else ""))
    met = _moments(request, shaped, placed.placement, prepared, observer)
    notes = (*ready.notes, *_few_rows(request, shaped, placed.placement, prepared))
    quantized = Inserter(ready.graph, ranges, numbers, lambda _: met).insert(placed.placement)
    done = Quantized(request.output, placed, None, None, 0, False)
    with accepted(request.output, request.engine, is_run=prepared is not None) as fresh:
        save(quantized, fresh)
        if prepared is not None:
            observer.stage("comparing with the float model")
            done = _compared(request, fresh, placed, prepared, metric)
        if precision == "bf16":  # which ONNX Runtime cannot run
            save(finished(quantized, precision), fresh)
    if prepared is not None and request.report:
        observer.stage("measuring what rounding each tensor does to the outputs")
        plain = scaled(ready.graph, ranges.factors)  # whose values have the scales of the pairs
        report = damages(plain, quantized, placed.placement, prepared.judging)
        done = _reported(done, report, lambda nodes: bool(placed_by_rules(ranges, nodes).placement))
    return replace(done, output=request.output, notes=(*notes, *done.notes), matched=ready.matched)


def _check_options(request: Request) -> None:
    """Refuse a weight format that the engine has no kernels for, and options that are about pairs or need data."""
    if request.weight_only is None:
        if request.report and request.calibration_data is None:
            raise BadOption("--report says what rounding does to outputs on your data: give --calibration-data")
        if request.weight_rounding != "nearest":
            raise BadOption(f"--weight-rounding {request.weight_rounding} goes with --weight-only")
        return
    wanted_storage(request.engine, request.weight_only)
    if request.weight_rounding == "gptq" and request.calibration_data is None:
        raise BadOption("--weight-rounding gptq makes up for errors on your data: give --calibration-data")
    if request.report:
        raise BadOption("--report is about pairs, of which --weight-only places none")
    if request.calibration_cache is not None or request.placement_like == "implicit":
        raise BadOption("--weight-only takes no scales of activations, and places no pairs: leave the other option out")


def _moments(
    request: Request, model: Model, placement: Placement, prepared: Prepared | None, observer: Observer
) -> Mapping[str, Array]:
    """What the products meet whose weights are stored, where rounding is to account for it."""
    if request.weight_rounding == "nearest" or prepared is None:
        return {}
    observer.stage(f"looking at what products meet on {prepared.samples.origin}")
    return moments(model, sorted(met_by_weights(model, placement.weight_formats)), prepared.calibration)


def _few_rows(request: Request, model: Model, placement: Placement, prepared: Prepared | None) -> tuple[str, ...]:
    """What to say where the data have fewer rows than products have inputs: rounding learns little from them."""
    met = {} if request.weight_rounding == "nearest" else met_by_weights(model, placement.weight_formats)
    if not met or prepared is None:
        return ()
    tensor = max(met, key=lambda name: met[name])
    if any(not size for size in model.tensors[tensor].shape or (None,)):  # as long as each sample has it
        return ()
    rows = sum(1 for _ in prepared.calibration) * max(1, int(elements(model, tensor)) // met[tensor])
    if rows >= met[tensor]:
        return ()
    told = f"--weight-rounding gptq met {rows} rows (tokens) where products have up to {met[tensor]} inputs"
    return (f"{told}: it gains little below as many; give more samples, or longer ones",)


def _weights_only(request: Request, model: Model, wanted: str) -> Placed:
    """Every weight among the chosen nodes as `wanted` says, by the operators that read them."""
    edges = request.selection.allowed(model, storable_edges(model))
    placement = rules.weights_only(model, edges, partial(storages_like, request.engine, wanted))
    return Placed(placement, tuple(Counter(s.name for s in placement.weight_formats.values()).items()))


def _compared(
    request: Request, written: Path, placed: Placed, prepared: Prepared, metric: Evaluation | None
) -> Quantized:
    """The written file against the float model."""
    with temporary_folder() as folder:
        done = _judged(request, written, placed, prepared, metric, folder)
    notes = [*done.notes]
    if not prepared.has_real_samples:
        scaled = ": scales come from random inputs" if request.sees_data else ""
        notes.append(f"no --calibration-data{scaled}")
    elif not prepared.is_held_out and request.sees_data:
        notes.append(f"fewer than {HELD_OUT * LEAST_JUDGED} samples: the SQNR is that of the calibration data")
    return replace(done, is_held_out=prepared.is_held_out, notes=tuple(notes))


def _reported(
    done: Quantized, report: Sequence[Damage] | Failure, leaves_some: Callable[[tuple[str, ...]], bool]
) -> Quantized:
    """The result with what rounding single tensors does."""
    if isinstance(report, Failure):
        told = f"no report of single tensors, as the model with switches fails: {report.reason}"
        return replace(done, notes=(*done.notes, told))
    return replace(done, damages=tuple(report), loudest=to_exclude(report, done.sqnr_db, leaves_some))


def _quantized_parts(model: Model) -> str:
    """What shows that a model is quantized already, for people; empty if nothing does."""
    if is_quantized(model):
        return "Q/DQ pairs"
    operators = integer_operators(model)
    return f"8-bit operators ({', '.join(operators)})" if operators else ""


def _keepers(placed: Placed) -> str:
    """The rules that kept edges in float, the one that kept most first, for people."""
    keepers = {r.name: r.reason for r in engine_rules.RULES if isinstance(r, engine_rules.KeepFloat)}
    counts = sorted(((count, name) for name, count in placed.counts if count and name in keepers), reverse=True)
    kept = [f"{name} ({count} edge{'s' * (count != 1)}: {keepers[name]})" for count, name in counts]
    return f": kept in float by {', '.join(kept)}" if kept else ""


def _numbers(request: Request) -> NumericFormat:
    numbers = numeric_format(request.engine, request.quant_type)
    if request.per_channel is None:
        return numbers
    if request.per_channel and request.quant_type == "fp8":
        raise BadOption("--per-channel is for int8: FP8 weights have one scale")
    return replace(numbers, per_channel=request.per_channel)


def _judged(
    request: Request, written: Path, placed: Placed, prepared: Prepared, metric: Evaluation | None, folder: Path
) -> Quantized:
    """A file against the user's model: pairs fused where ONNX Runtime is the target, else as they stand. It has to run
    on random inputs as well, which tell no accuracy."""
    plain, model = folder / "float.onnx", load(request.model, fix_inputs=request.fix_inputs)
    save(model, plain)
    samples = prepared.judging
    is_fused = request.engine == "onnxruntime" and len(model.nodes) <= MOST_OPTIMIZED
    spec = EngineSpec("onnxruntime", {"threads": cores(), "fuse": is_fused})
    with Runner(spec, log_dir=folder) as runner:
        before, after = (insist(runner.load(file), REFUSED) for file in (plain, written))
        expected, returned = (insist(runner.outputs(handle, samples), REFUSED) for handle in (before, after))
        measured = None
        if metric is not None:
            measured = _measured(metric, runner, before), _measured(metric, runner, after)
    judged = len(samples) if prepared.has_real_samples else 0
    done = Quantized(request.output, placed, None, None, judged, True, measured)
    if not judged:
        return done
    for outputs, whose in ((expected, "float"), (returned, "quantized")):
        if not is_finite(outputs):
            note = f"outputs of the {whose} model are NaN or infinite: the two cannot be compared"
            return replace(done, is_finite=False, notes=(note,))
    lost = accuracy(expected, returned)
    notes = tuple(filter(None, [concern(lost)]))
    return replace(done, notes=notes, sqnr_db=lost.sqnr_db, cosine=cosine(expected, returned))


def _measured(metric: Evaluation, runner: Runner, handle: Handle) -> float:
    """The user's metric of one model.

    Raises:
        BadOption: it is not finite, or asks for what the model cannot do.
        EngineFailure: the engine crashed or hung.
    """
    value = evaluate(metric, runner, handle)
    if isinstance(value, Failure) and value.stage in ("output", "run"):
        raise BadOption(f"--evaluate {metric.source} cannot be used: {value.reason}")
    return insist(value, REFUSED)
