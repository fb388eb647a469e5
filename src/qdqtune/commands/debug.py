"""`qdqtune debug`: which tensor breaks the outputs of a quantized model on an engine, or which nodes an engine does.

Two questions, in this order. What do the pairs do by the arithmetic of ONNX? One build of the float model with a switch
at every pair answers for any set of them. And does the engine compute what the pairs say? That takes a build for each
set. Where it is wrong without any pair, parts of the float model are compared instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from onnx import TensorProto

from qdqtune.calibration.equalization import scaled
from qdqtune.calibration.inputs import fixed_inputs
from qdqtune.calibration.observe import observe
from qdqtune.calibration.prepare import prepare
from qdqtune.commands.cut_off import CutOff, WrongPart, wrong_parts
from qdqtune.commands.debug_options import FLOAT_LIMIT, LIMIT, Request
from qdqtune.commands.probes import Probe, reference_spec
from qdqtune.engines.runner import Runner
from qdqtune.engines.shapes import check_inputs
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.float16 import Precision, kept_in, load_for, to_float16
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import Rewrites, between
from qdqtune.numerics.bisection import Culprit, Parts, Verdict, culprits
from qdqtune.placement.grafting import Kind, StandingPair, representable, standing_pairs
from qdqtune.placement.moved_channels import moved_channels
from qdqtune.placement.reading import is_quantized, placement_in, strip_pairs, twins_of
from qdqtune.placement.stored import tables_of
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.types import Placement, Sample, noise_of

SAMPLES = 4
"""Samples that the search for what is guilty takes, at most: those on which the file loses most."""

RANKED = 400
"""Pairs that are measured one by one, at most, where none stands out."""

NAMED = 5
"""Pairs that are named then."""

WORSE = 2.0
"""The engine is to blame if its noise is so many times that of the pairs: 3 dB."""

OFF = 0.05
"""The share of a tensor's range by which two ranges may differ."""

MOVED = 8.0
"""Steps of a bias by which rounding alone does not move it."""

COARSE = 3.0
"""How many times wider than the float tensor's a range is that wastes more than a bit."""

SENSITIVE = "its range fits: the network is sensitive there"

Cause = Literal["numbers", "engine"]


@dataclass(frozen=True)
class Suspect:
    """A tensor whose pair is to blame, or that hurts most where none is.

    `cause`: its numbers, or what the engine makes of them. `nodes` are those to keep in float: they read the tensor
    through the pair, or make it where only the graph does. Noise is relative to the signal at the outputs; `alone` in a
    `company` of so many pairs, all others in float: with this one, and `without` it. Ranges are what the float tensor
    takes on the samples, and what its pair can give.
    """

    tensor: str
    kind: Kind
    cause: Cause
    nodes: tuple[str, ...]
    noise: float
    without: float
    company: int
    float_range: tuple[float, float]
    quantized_range: tuple[float, float]
    scale: tuple[float, float]
    zero_point: tuple[float, float]

    @property
    def reason(self) -> str:
        """What the two ranges tell, for people."""
        if self.cause == "engine":
            return "the engine computes other values than the pair says"
        low, high = self.quantized_range
        least, most = self.float_range
        if not np.isfinite(self.quantized_range).all():
            return "its scale is no finite number"
        if low == high:
            return "its pair can give one value only"
        if self.kind == "bias" and max(abs(low - least), abs(high - most)) > MOVED * max(map(abs, self.scale)):
            return "it was moved to make up for what other pairs do (bias correction), and does harm where they do not"
        width = max(most - least, np.finfo(np.float64).tiny)
        if self.kind != "activation":
            off = max(abs(low - least), abs(high - most)) > OFF * width
            return "its constant has other values than the float one" if off else SENSITIVE
        cut = max(low - least, most - high, 0.0) / width
        if cut > OFF:
            return f"its pair cuts off {100 * min(cut, 1):.0f} % of the range"
        if high - low > COARSE * max(most - least, most, -least):
            return f"its pair spends its steps on a range {(high - low) / width:.3g} times as wide"
        return SENSITIVE


@dataclass(frozen=True)
class Diagnosis:
    """What was found. Noise is relative to the signal, of the worst output; see `probes.noise`.

    `noise` is that of the file on the engine, on `samples`. What follows is of those that were `examined`, the worst of
    them: the noise of the file there, that of its pairs as ONNX defines them `by_numbers` (None: not needed), and what
    remains without the guilty ones, `rest`. `largest` are named where that is above the limit and nobody stands out.
    `pairs` counts those that were examined, of biases as well; `runs`, how often samples went through a model.
    """

    placement: Placement
    pairs: int
    samples: int
    is_held_out: bool
    runs: int
    limit: float
    noise: float
    examined: int
    noise_there: float
    by_numbers: float | None = None
    rest: float | None = None
    guilty: tuple[Suspect, ...] = ()
    largest: tuple[Suspect, ...] = ()
    wrong_parts: tuple[WrongPart, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether there was nothing to find."""
        return self.noise <= self.limit

    @property
    def unexplained(self) -> bool:
        """Whether the outputs are broken and nothing was found that breaks them."""
        return not (self.is_healthy or self.guilty or self.wrong_parts)

    @property
    def excluded(self) -> tuple[str, ...]:
        """The nodes to keep in float, so that none of the guilty pairs is there."""
        return tuple(dict.fromkeys(node for suspect in self.guilty for node in suspect.nodes))


def debug(request: Request, observer: Observer | None = None) -> Diagnosis:
    """Find what breaks the outputs.

    Raises:
        InputError: models or data cannot be used, or not together, or there are no data.
        EngineFailure: an engine does not run the float model, or ONNX Runtime not the pairs.
        EngineUnavailable: the engine is missing.
    """
    observer = observer or Silent()
    observer.stage(f"reading {request.model.name}")
    plain, file, quantized = _models(request)
    pairs, unmatched = standing_pairs(plain, quantized) if quantized is not None else ((), ())
    if request.quantized is None:
        every, pairs = pairs, tuple(p for p in pairs if p.kind == "activation")
        if every and not pairs:
            raise BadModel(f"{file} has its weights alone quantized: to examine them, give the float model first")
    if quantized is not None and not pairs:
        raise BadModel(f"{file} has no pair on a tensor of the float model: is it a version of {request.model}?")
    check_inputs(request.engine, plain)
    prepared = prepare(plain, request.data, fixed=request.fix_inputs)
    if not prepared.has_real_samples:
        raise BadOption("random inputs say nothing of a model's outputs: give debug --calibration-data")
    fixed = fixed_inputs(request.model, request.fix_inputs)
    fed = [sample | fixed for sample in prepared.judging]
    with _probe(request, plain, quantized or plain, pairs, fed) as probe:
        done = _Debugging(probe, request, file, observer).done(unmatched)
    placement = Placement() if quantized is None else placement_in(plain, quantized)
    done = replace(done, placement=placement, is_held_out=prepared.is_held_out)
    if quantized is not None and not done.is_healthy and (tables := sum(1 for _ in tables_of(quantized))):
        told = f"tables of Gather stay unexamined ({tables}): quantize --op-types-to-exclude Gather keeps them in float"
        done = replace(done, notes=(*done.notes, told))
    return done


def _models(request: Request) -> tuple[Model, Path, Model | None]:
    """The float model, the file to run, and the quantized model in it if it is one."""
    file = request.quantized or request.model
    given = load(file)
    if here := {name: value for name, value in request.fix_inputs.items() if name in given.inputs}:
        given = load(file, fix_inputs=here)
    if not is_quantized(given):
        if request.quantized is not None:
            if is_quantized(load(request.model)):
                raise BadModel(f"{file} has no Q/DQ pairs: give the quantized model second, the float model first")
            either = "neither file has" if file != request.model else f"{file}, given twice, has no"
            raise BadModel(f"{either} Q/DQ pairs: nothing is quantized that could break the outputs")
        return given, file, None
    if request.quantized is None:
        return strip_pairs(given), file, given
    scales = {given.tensors[n.inputs[1]].dtype for n in given.nodes if n.op == "DequantizeLinear"}
    precision: Precision = "fp16" if TensorProto.FLOAT16 in scales else "fp32"
    plain = load_for(request.model, precision, request.fix_inputs, given.opset)
    names = between({n.op for n in plain.nodes}, {n.op for n in given.nodes})
    plain, folded = (
        load_for(request.model, precision, request.fix_inputs, given.opset, rewrites=Rewrites(fold, names))
        for fold in (False, True)
    )
    gone = plain.index_of.keys() - folded.index_of.keys()
    if not gone & {twin.name for twin in twins_of(plain, given).values()}:  # who quantized has folded them, too
        plain = folded
    if precision == "fp16":
        plain = to_float16(plain, kept_in(given, plain))
    if is_quantized(plain):
        raise BadModel(f"{request.model} has Q/DQ pairs: give the float model first, or the quantized model alone")
    plain = scaled(plain, moved_channels(plain, given))
    if plain.inputs != given.inputs and set(plain.inputs) != set(given.inputs):
        raise BadModel(f"{file} takes other inputs than {request.model}")
    return plain, file, given


@contextmanager
def _probe(
    request: Request, plain: Model, quantized: Model, pairs: Sequence[StandingPair], samples: Sequence[Sample]
) -> Iterator[Probe]:
    with (
        temporary_folder() as folder,
        Runner(request.engine, time_limit_s=request.time_limit_s, log_dir=folder / "engine") as engine,
        Runner(reference_spec(), time_limit_s=request.time_limit_s, log_dir=folder / "exact") as exact,
    ):
        yield Probe(plain, quantized, pairs, samples, engine, exact, folder)


class _Debugging:
    """One diagnosis while it is made."""

    def __init__(self, probe: Probe, request: Request, file: Path, observer: Observer) -> None:
        self._probe, self._file, self._observer = probe, file, observer
        self._name = request.engine.name
        usual = LIMIT if probe.pairs else FLOAT_LIMIT
        self._limit = noise_of(usual if request.min_sqnr is None else request.min_sqnr)
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
        if loss <= self._limit:
            return self._diagnosis(loss)
        loss = probe.narrow(SAMPLES, self._limit)
        if whole and all(pair.kind == "activation" for pair in probe.pairs):
            self._notes.append(
                "constants are taken as the file has them: give the float model as well, to have them examined"
            )
        if not whole:
            return self._diagnosis(loss, parts=self._wrong_parts())
        self._observer.stage("switching pairs")
        numbers = probe.by_numbers(whole)
        found = Verdict((), whole, numbers)
        if numbers > self._limit:
            found = culprits(whole, lambda on: numbers if on == whole else probe.by_numbers(on), self._limit)
        guilty = self._suspects(found.culprits, "numbers")
        left = loss if not guilty else probe.on_engine(found.rest) if found.rest else 0.0
        if left <= self._limit:
            return self._diagnosis(loss, numbers, left, guilty)
        bound = max(self._limit, WORSE * found.damage)
        if left > bound:
            return self._engine_faults(loss, numbers, left, guilty, found, bound)
        return self._diagnosis(loss, numbers, left, guilty, self._largest(found.rest))

    def _engine_faults(
        self, loss: float, numbers: float, left: float, guilty: tuple[Suspect, ...], before: Verdict, bound: float
    ) -> Diagnosis:
        """The engine makes more noise of the `rest` of the pairs than ONNX does."""
        probe, rest = self._probe, before.rest
        self._observer.stage(f"building with some of the pairs on {self._name}")
        if probe.on_engine(rest) <= bound:
            self._notes.append("the same pairs on the float model are healthy there: the two graphs differ otherwise")
            return self._diagnosis(loss, numbers, left, guilty)
        found = culprits(rest, probe.on_engine, bound)
        blamed = self._suspects(found.culprits, "engine")
        if found.damage > bound and probe.on_engine(()) > self._limit:
            self._notes.append(f"{self._name} is wrong without any pair: nodes of the float model are to blame")
            return self._diagnosis(loss, numbers, left, guilty, parts=self._wrong_parts())
        if not blamed:
            self._notes.append(f"{self._name} makes more noise of the pairs than ONNX defines, but none alone does")
        elif found.damage > self._limit:
            return self._diagnosis(loss, numbers, found.damage, (*guilty, *blamed), self._largest(found.rest))
        return self._diagnosis(loss, numbers, found.damage, (*guilty, *blamed))

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
        pairs = [self._probe.pairs[c.part] for c in found]
        ranges = self._float_ranges(pairs)
        return tuple(
            Suspect(
                pair.tensor,
                pair.kind,
                cause,
                _nodes(self._probe.float_model, pair),
                culprit.damage,
                culprit.without,
                culprit.company,
                ranges[pair.tensor],
                representable(pair),
                _ends(pair.scale),
                _ends(pair.zero_point),
            )
            for culprit, pair in zip(found, pairs, strict=True)
        )

    def _float_ranges(self, pairs: Sequence[StandingPair]) -> Mapping[str, tuple[float, float]]:
        """Least and largest value of each tensor on the samples."""
        model = self._probe.float_model
        found = {p.tensor: _ends(model.constants[p.tensor].array()) for p in pairs if p.tensor in model.constants}
        if computed := [p.tensor for p in pairs if p.tensor not in found]:
            self._probe.runs += 1
            for tensor, values in observe(model, list(dict.fromkeys(computed)), self._probe.samples):
                low, high = _ends(values)
                before = found.get(tensor, (low, high))
                found[tensor] = min(low, before[0]), max(high, before[1])
        return found

    def _largest(self, rest: Parts) -> tuple[Suspect, ...]:
        """Of pairs none of which stands out, those that make most noise alone."""
        if len(rest) > RANKED:
            self._notes.append(f"{len(rest)} pairs are too many to measure one by one: see quantize --report")
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
        self,
        loss: float,
        numbers: float | None = None,
        rest: float | None = None,
        guilty: tuple[Suspect, ...] = (),
        largest: tuple[Suspect, ...] = (),
        parts: tuple[WrongPart, ...] = (),
    ) -> Diagnosis:
        probe = self._probe
        return Diagnosis(
            Placement(),
            len(probe.pairs),
            self._judged,
            False,
            probe.runs,
            self._limit,
            self._loss,
            len(probe.samples),
            loss,
            numbers,
            rest,
            guilty,
            largest,
            parts,
            tuple(self._notes),
        )


def _nodes(model: Model, pair: StandingPair) -> tuple[str, ...]:
    readers = tuple(dict.fromkeys(e.node for e in pair.edges if e.node))
    return readers or (model.nodes[model.producers[pair.tensor]].name,)


def _ends(values: np.ndarray) -> tuple[float, float]:
    wide = values.astype(np.float64)
    return float(wide.min()), float(wide.max())
