"""`qdqtune debug`: which tensor breaks the outputs of a quantized model, or which nodes an engine computes wrongly.

First it measures what the pairs do as ONNX defines them: one build of the float model, with a switch at every pair,
serves all sets of pairs. Then it measures whether the engine computes what the pairs define, which takes a build for
each set. If the engine is wrong without any pair, parts of the float model are compared instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from qdqtune.calibration.equalization import scaled
from qdqtune.calibration.inputs import fixed_inputs
from qdqtune.calibration.observe import observe
from qdqtune.calibration.options import DataOptions, FixOption, samples_option
from qdqtune.calibration.prepare import prepare
from qdqtune.commands.diagnosis import Cause, Diagnosis, Suspect
from qdqtune.commands.inputs import MODEL, ModelLike, ModelOption, SamplesLike, execution_of
from qdqtune.commands.probes import CutOff, Probe, WrongPart, reference_spec, wrong_parts
from qdqtune.commands.source import data_of
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.options import EngineOptions
from qdqtune.engines.runner import Runner
from qdqtune.engines.tensorrt.options import check_inputs
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.float16 import Precision, kept_in, load_for, to_float16
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.operators import REARRANGES
from qdqtune.graph.rewrites import Rewrites, between
from qdqtune.numerics.accuracy import FLOOR_DB
from qdqtune.numerics.bisection import BisectionResult, Culprit, Parts, culprits
from qdqtune.options import Anything, Number, Option, option
from qdqtune.placement.file_pairs import FilePair, file_pairs, representable
from qdqtune.placement.reading import dynamic_products_of, is_quantized, placement_in, tables_of, twins_of
from qdqtune.placement.stripping import moved_channels, strip_pairs
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.types import Placement, Sample, noise_of

# The limits below are chosen, not measured.

FLOAT_LIMIT = 30.0
"""Output SQNR in dB that a float model has to reach: engines that compute in 16 bits do. Chosen, not measured."""


MOST_EXAMINED = 4
"""Most samples that the search for guilty tensors uses: those with the largest error."""

RANKED = 400
"""Most pairs that are measured one by one if no pair stands out."""

NAMED = 5
"""How many pairs are named if none stands out: those with the most noise alone."""

WORSE = 2.0
"""The engine is at fault if its noise is this many times that of the pairs as ONNX defines them: 3 dB."""


@dataclass(kw_only=True)
class DebugOptions(EngineOptions, DataOptions, FixOption, ModelOption):
    """The options of `debug`."""

    quantized: Option[ModelLike | None, ModelLike | None] = option(
        Anything(MODEL), None, "The quantized model.", is_positional=True, metavar="[QUANTIZED]"
    )
    min_sqnr: Option[float | None, float | None] = option(
        Number(),
        None,
        "Output SQNR from which on the outputs count as healthy, in dB; 20 is an error of a tenth.",
        "Accuracy",
        short="least signal to error at the outputs",
        default_in_words=f"{FLOOR_DB:g}; {FLOAT_LIMIT:g} for a float model alone",
        metavar="DB",
    )
    calibration_data: Option[SamplesLike | None, SamplesLike | None] = samples_option()

    @property
    def model_file(self) -> Path:
        """The file of the first model, float or quantized."""
        return Path(str(self.model))

    @property
    def quantized_file(self) -> Path | None:
        """The file of the second model, if there is one."""
        return None if self.quantized is None else Path(str(self.quantized))


def debug(options: DebugOptions, observer: Observer | None = None) -> Diagnosis:
    """Find what breaks the outputs of a quantized model, or of a float one. Models and samples lie in files (see
    `on_disk`).

    Raises:
        InputError: models or data cannot be used, or not together, or there are no data.
        EngineFailure: an engine does not run the float model, or ONNX Runtime not the pairs.
        EngineUnavailable: the engine is missing.
    """
    observer, model = observer or Silent(), options.model_file
    observer.stage(f"reading {model.name}")
    plain, file, quantized = _models(options)
    pairs, unmatched = file_pairs(plain, quantized) if quantized is not None else ((), ())
    is_alone = quantized is not None and options.quantized is None
    if is_alone:
        every, pairs = pairs, tuple(p for p in pairs if p.kind == "activation")
        if every and not pairs:
            raise BadModel(f"{file} has its weights alone quantized: to examine them, give the float model first")
    if quantized is not None and not pairs and any(True for _ in dynamic_products_of(quantized)):
        raise BadModel(
            f"{file} has dynamic quantization alone, which is not examined: exclude nodes from it, and compare"
        )
    if quantized is not None and not pairs:
        raise BadModel(f"{file} has no pair on a tensor of the float model: is it a version of {model}?")
    engine = options.spec(options.input_shapes)
    check_inputs(engine, plain)
    execution = execution_of(options)
    data = data_of(options, execution, options.quantized_file, model)
    prepared = prepare(plain, data, execution, fixed=options.fix_inputs)
    if not prepared.has_real_samples:
        raise BadOption("random inputs say nothing of a model's outputs: give `calibration_data`")
    fixed = fixed_inputs(model, options.fix_inputs)
    samples = [sample | fixed for sample in prepared.judging]
    with _probe(engine, execution, plain, quantized or plain, pairs, samples) as probe:
        if is_alone and quantized is not None:
            probe.check_stripped(file)
        done = _Debugging(probe, file, engine.name, options.min_sqnr, observer, execution).done(unmatched)
    placement = Placement() if quantized is None else placement_in(plain, quantized)
    done = replace(done, placement=placement, is_held_out=prepared.is_held_out)
    if quantized is not None and not done.is_healthy:
        done = replace(done, notes=(*done.notes, *_unexamined(quantized)))
        products = sum(1 for _ in dynamic_products_of(quantized))
        done = replace(done, unexamined=len(unmatched) + sum(1 for _ in tables_of(quantized)) + products)
    return replace(done, file=file, engine=engine.name)


def _unexamined(quantized: Model) -> Iterator[str]:
    """Notes on what is quantized without pairs."""
    if tables := sum(1 for _ in tables_of(quantized)):
        how = "quantize with `op_types_to_exclude` Gather keeps them in float"
        yield f"tables of Gather stay unexamined ({tables}): {how}"
    if products := sum(1 for _ in dynamic_products_of(quantized)):
        how = "quantize with `nodes_to_exclude` keeps some in float"
        yield f"products with dynamic quantization stay unexamined ({products}): {how}"


def _models(options: DebugOptions) -> tuple[Model, Path, Model | None]:
    """The float model, the file to examine, and the quantized model in that file; None if it holds a float one."""
    model, file = options.model_file, options.quantized_file or options.model_file
    given = load(file)
    if here := {name: value for name, value in options.fix_inputs.items() if name in given.inputs}:
        given = load(file, fix_inputs=here)
    if not is_quantized(given):
        if options.quantized is not None:
            if is_quantized(load(model)):
                raise BadModel(f"{file} has no Q/DQ pairs: give the quantized model second, the float model first")
            either = "neither file has" if file != model else f"{file}, given twice, has no"
            raise BadModel(f"{either} Q/DQ pairs: nothing is quantized that could break the outputs")
        return given, file, None
    if options.quantized is None:
        return strip_pairs(given), file, given
    given = Rewrites().of(given)
    scales = {given.tensors[n.inputs[1]].dtype for n in given.nodes if n.op == "DequantizeLinear"}
    precision: Precision = "fp16" if TensorProto.FLOAT16 in scales else "fp32"
    plain = load_for(model, precision, options.fix_inputs, given.opset)
    names = between({n.op for n in plain.nodes}, {n.op for n in given.nodes})
    plain, folded = (
        load_for(model, precision, options.fix_inputs, given.opset, rewrites=Rewrites(fold, names))
        for fold in (False, True)
    )
    gone = plain.index_of.keys() - folded.index_of.keys()
    if not gone & {twin.name for twin in twins_of(plain, given).values()}:  # they were folded before quantization, too
        plain = folded
    if precision == "fp16":
        plain = to_float16(plain, kept_in(given, plain))
    if is_quantized(plain):
        raise BadModel(f"{model} has Q/DQ pairs: give the float model first, or the quantized model alone")
    plain = scaled(plain, moved_channels(plain, given))
    if plain.inputs != given.inputs and set(plain.inputs) != set(given.inputs):
        raise BadModel(f"{file} takes other inputs than {model}")
    return plain, file, given


@contextmanager
def _probe(
    spec: EngineSpec,
    execution: Execution,
    plain: Model,
    quantized: Model,
    pairs: Sequence[FilePair],
    samples: Sequence[Sample],
) -> Iterator[Probe]:
    with (
        temporary_folder() as folder,
        Runner(spec, execution=execution, log_dir=folder / "engine") as engine,
        Runner(reference_spec(), execution=execution, log_dir=folder / "exact") as exact,
    ):
        yield Probe(plain, quantized, pairs, samples, engine, exact, folder)


class _Debugging:
    """Makes one diagnosis, and collects `_notes` on the way."""

    def __init__(
        self,
        probe: Probe,
        file: Path,
        engine: str,
        min_sqnr: float | None,
        observer: Observer,
        execution: Execution,
    ) -> None:
        self._probe, self._file, self._observer = probe, file, observer
        self._name, self._execution = engine, execution
        usual = FLOOR_DB if probe.pairs else FLOAT_LIMIT
        self._limit = noise_of(usual if min_sqnr is None else min_sqnr)
        self._all: Parts = tuple(range(len(probe.pairs)))
        self._judged, self._loss = len(probe.samples), 0.0
        self._notes: list[str] = []

    def done(self, unmatched: Sequence[str]) -> Diagnosis:
        probe, whole = self._probe, self._all
        self._observer.stage(f"running {self._file.name} on {self._name}")
        self._loss = loss = probe.of_file(self._file)
        if unmatched:
            many = f"{len(unmatched)} pairs are" if len(unmatched) > 1 else "a pair is"
            self._notes.append(f"{many} on no tensor of the float model, and not examined, the first: {unmatched[0]}")
        if probe.failures:
            self._notes.append(f"{self._name} does not run {self._file.name}: {probe.failures[0].reason}")
        if (part := probe.lost_part()) is not None:
            self._notes.append(part)
        if loss <= self._limit:
            return self._diagnosis(loss)
        loss = probe.narrow(MOST_EXAMINED, self._limit)
        if whole and all(pair.kind == "activation" for pair in probe.pairs):
            self._notes.append(
                "constants are taken as the file has them: give the float model as well, to have them examined"
            )
        if not whole:
            return self._diagnosis(loss, wrong_parts=self._wrong_parts())
        self._observer.stage("switching pairs")
        numbers = probe.by_numbers(whole)
        found = BisectionResult((), whole, numbers)
        if numbers > self._limit:
            found = culprits(whole, lambda on: numbers if on == whole else probe.by_numbers(on), self._limit)
        guilty = self._suspects(found.culprits, "numbers")
        left = loss if not guilty else probe.on_engine(found.rest) if found.rest else 0.0
        if left <= self._limit:
            return self._diagnosis(loss, numbers, left, guilty=guilty)
        bound = max(self._limit, WORSE * found.damage)
        if left > bound:
            return self._engine_faults(loss, numbers, left, guilty, found, bound)
        return self._diagnosis(loss, numbers, left, guilty=guilty, largest=self._largest(found.rest))

    def _engine_faults(
        self,
        loss: float,
        numbers: float,
        left: float,
        guilty: tuple[Suspect, ...],
        before: BisectionResult,
        bound: float,
    ) -> Diagnosis:
        """Search `before.rest`, pairs that make more noise on the engine than as ONNX defines them, for wrong ones."""
        probe, rest = self._probe, before.rest
        self._observer.stage(f"building with some of the pairs on {self._name}")
        if probe.on_engine(rest) <= bound:
            differ = "" if probe.failures else ": the two graphs differ otherwise"
            self._notes.append(f"the same pairs on the float model are healthy there{differ}")
            return self._diagnosis(loss, numbers, left, guilty=guilty)
        found = culprits(rest, probe.on_engine, bound)
        blamed = self._suspects(found.culprits, "engine")
        if found.damage > bound and probe.on_engine(()) > self._limit:
            self._notes.append(f"{self._name} is wrong without any pair: nodes of the float model are to blame")
            return self._diagnosis(loss, numbers, left, guilty=guilty, wrong_parts=self._wrong_parts())
        if not blamed:
            self._notes.append(f"{self._name} makes more noise of the pairs than ONNX defines, but none alone does")
        elif found.damage > self._limit:
            largest = self._largest(found.rest)
            return self._diagnosis(loss, numbers, found.damage, guilty=(*guilty, *blamed), largest=largest)
        return self._diagnosis(loss, numbers, found.damage, guilty=(*guilty, *blamed))

    def _wrong_parts(self) -> tuple[WrongPart, ...]:
        probe = self._probe
        self._observer.stage(f"comparing parts of the float model with {self._name}")
        cut = CutOff(probe.float_model, probe.samples, probe.engine, probe.exact, probe.folder)
        found = wrong_parts(cut, self._limit)
        probe.runs += cut.runs
        if not found:
            self._notes.append(f"every part of the model that was tried alone is right on {self._name}")
        return found

    def _suspects(self, found: Sequence[Culprit], cause: Cause) -> tuple[Suspect, ...]:
        model, pairs = self._probe.float_model, [self._probe.pairs[c.part] for c in found]
        joined = {pair.tensor: _joined(model, pair.tensor) for pair in pairs}
        ranges = self._float_ranges(list(dict.fromkeys([*joined, *chain(*joined.values())])))
        return tuple(
            Suspect(
                pair.tensor,
                pair.kind,
                cause,
                _nodes(model, pair),
                culprit.damage,
                culprit.without,
                culprit.tested,
                ranges[pair.tensor],
                representable(pair),
                _min_max(pair.scale),
                _min_max(pair.zero_point),
                {name: ranges[name] for name in joined[pair.tensor]},
            )
            for culprit, pair in zip(found, pairs, strict=True)
        )

    def _float_ranges(self, tensors: Sequence[str]) -> Mapping[str, tuple[float, float]]:
        """The least and the largest value of each tensor on the samples."""
        model = self._probe.float_model
        found = {name: _min_max(model.constants[name].array()) for name in tensors if name in model.constants}
        if computed := [name for name in tensors if name not in found]:
            self._probe.runs += 1
            for tensor, values in observe(model, computed, self._probe.samples, execution=self._execution):
                low, high = _min_max(values)
                before = found.get(tensor, (low, high))
                found[tensor] = min(low, before[0]), max(high, before[1])
        return found

    def _largest(self, rest: Parts) -> tuple[Suspect, ...]:
        """The pairs that make most noise alone, for when no pair stands out."""
        if len(rest) > RANKED:
            self._notes.append(f"{len(rest)} pairs are too many to measure one by one: see `report` of quantize")
            return ()
        self._observer.stage("measuring the pairs one by one")
        alone = {part: self._probe.by_numbers((part,)) for part in rest}
        order = sorted(rest, key=lambda part: -alone[part])
        total, summed, half = sum(alone.values()), 0.0, 0
        while half < len(order) and summed < total / 2:
            summed += alone[order[half]]
            half += 1
        self._notes.append(f"half of the damage that is left is spread over {half} of {len(rest)} pairs")
        return self._suspects([Culprit(part, alone[part], 0.0, 1) for part in order[:NAMED]], "numbers")

    def _diagnosis(
        self, loss: float, numbers: float | None = None, rest: float | None = None, **found: Any
    ) -> Diagnosis:
        """The diagnosis. `found` are its fields `guilty`, `largest` and `wrong_parts`."""
        probe = self._probe
        return Diagnosis(
            pairs=len(probe.pairs),
            samples=self._judged,
            runs=probe.runs,
            limit=self._limit,
            noise=self._loss,
            examined=len(probe.samples),
            noise_there=loss,
            by_numbers=numbers,
            rest=rest,
            notes=tuple(self._notes),
            **found,
        )


def _nodes(model: Model, pair: FilePair) -> tuple[str, ...]:
    readers = tuple(dict.fromkeys(e.node for e in pair.edges if e.node))
    return readers or (model.nodes[model.producers[pair.tensor]].name,)


def _joined(model: Model, tensor: str) -> tuple[str, ...]:
    """The tensors that a Concat joins to this one, whose pair gives all of them one scale; empty without a Concat."""
    maker = model.maker(tensor)
    while maker is not None and maker.op in REARRANGES:
        maker = model.maker(maker.inputs[0])
    return maker.inputs if maker is not None and maker.op == "Concat" else ()


def _min_max(values: np.ndarray) -> tuple[float, float]:
    wide = values.astype(np.float64)
    return float(wide.min()), float(wide.max())
