"""`qdqtune debug`: which tensor breaks the outputs of a quantized model.

It ranks tensors by what their pairs alone do to the outputs, as ONNX defines them, and takes the worst out until the
outputs are healthy. Then it measures what the engine computes of the pairs that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx import TensorProto

from qdqtune.calibration.inputs import fixed_inputs
from qdqtune.calibration.observe import Outputs, onnxruntime_session
from qdqtune.calibration.options import DataOptions, FixOption
from qdqtune.calibration.prepare import prepare
from qdqtune.commands.inputs import MODEL, ModelLike, ModelOption, execution_of
from qdqtune.commands.shown import Shown, Table
from qdqtune.commands.source import data_of
from qdqtune.commands.worst_tensors import (
    UNKNOWN_NOISE,
    WORST,
    Damage,
    SwitchedPairs,
    described,
    noise,
    switched_pairs,
)
from qdqtune.engines.options import EngineOptions
from qdqtune.engines.runner import Runner
from qdqtune.engines.tensorrt.options import check_inputs
from qdqtune.errors import BadModel, BadOption, EngineFailure, EngineRefused, rewording
from qdqtune.explanation.formatting import counted, samples
from qdqtune.graph.float16 import Precision, converted, kept_in, load_for
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import Rewrites, between
from qdqtune.graph.saving import ConstantFile
from qdqtune.numerics.accuracy import FLOOR_DB, accuracy, loss_of_slice
from qdqtune.numerics.scores import NO_SCORES
from qdqtune.numerics.simulation import check_stripped
from qdqtune.options import MaybeNumber, Option, anything, in_range, option
from qdqtune.placement.reading import dynamic_products_of, is_quantized, placement_in, twins_of
from qdqtune.placement.stripping import strip_pairs
from qdqtune.placement.switches import file_pairs, with_file_pairs
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.types import Placement, noise_of, sqnr_of

# The limits below are chosen, not measured.

NAMED = 5
"""How many pairs are named if none stands out: those with the most noise alone."""

LEFT_SHARE = 0.5
"""A tensor is guilty if without it at most this share of the noise is left: 3 dB."""

EXACT = 1e-20
"""Noise below it is told as this: it has a logarithm."""

WORSE = 2.0
"""The engine is at fault if its noise is this many times that of the pairs as ONNX defines them: 3 dB."""


@dataclass(kw_only=True)
class DebugOptions(EngineOptions, DataOptions, FixOption, ModelOption):
    """The options of `debug`."""

    quantized: Option[ModelLike | None, ModelLike | None] = option(
        anything(MODEL), None, "The quantized model.", is_positional=True, metavar="[QUANTIZED]"
    )
    min_sqnr: MaybeNumber = option(
        in_range(),
        None,
        "Output SQNR from which on the outputs count as healthy, in dB; 20 is an error of a tenth.",
        "Accuracy",
        short="least signal to error at the outputs",
        default_in_words=f"{FLOOR_DB:g}",
        metavar="DB",
    )


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The result of `debug`. Noise is relative to the signal, of the worst output; see `worst_tensors.noise`.

    `noise` is that of `file` on the `engine` on all `samples`. The next values are measured on the `examined` worst
    samples: `noise_there` of the file, `by_numbers` of its pairs as ONNX defines them, and `rest` without the guilty
    pairs. Of the `suspects` those are guilty whose `without` is known; the others are the largest, where `rest` is
    above the limit and no pair stands out. `pairs` counts examined pairs, those on biases included, and `unexamined`
    those on no tensor of the float model.
    """

    pairs: int
    samples: int
    limit: float
    noise: float
    examined: int = 0
    noise_there: float = 0.0
    by_numbers: float | None = None
    rest: float | None = None
    suspects: tuple[Damage, ...] = ()
    unexamined: int = 0
    notes: tuple[str, ...] = ()
    placement: Placement = field(default_factory=Placement)
    is_held_out: bool = False
    file: Path = Path()
    engine: str = ""

    @property
    def guilty(self) -> tuple[Damage, ...]:
        """The tensors that break the outputs."""
        return tuple(damage for damage in self.suspects if damage.without is not None)

    @property
    def largest(self) -> tuple[Damage, ...]:
        """The tensors with the most noise among those that are not guilty."""
        return tuple(damage for damage in self.suspects if damage.without is None)

    @property
    def is_healthy(self) -> bool:
        """Whether the outputs are as close as asked for."""
        return self.noise <= self.limit

    @property
    def excluded(self) -> tuple[str, ...]:
        """The nodes to keep in float, which removes all guilty pairs."""
        return tuple(dict.fromkeys(node for damage in self.guilty for node in damage.nodes))

    def in_words(self) -> str:
        """How close the outputs are, and whether that is healthy."""
        state = "healthy" if self.is_healthy else "not healthy"
        on = samples(self.samples, self.is_held_out)
        return f"output SQNR {level(self.noise)} on {self.engine}, on {on}: {state} at a limit of {level(self.limit)}"

    def table(self) -> Table:
        """The suspects, the largest damage first."""
        rows = [
            (
                damage.tensor,
                "largest" if damage.without is None else "guilty",
                ", ".join(damage.nodes),
                _range(damage.float_range),
                _range(damage.quantized_range),
                level(damage.noise),
                "" if damage.without is None else level(damage.without),
                damage.reason,
            )
            for damage in self.suspects
        ]
        columns = ("tensor", "", "nodes to exclude", "float", "pair", "SQNR alone", "without", "why")
        return Table(columns, rows, least_widths={"why": 20})

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values. SQNR in dB, None for equal outputs, -30 if outputs are not finite."""
        return {
            "model": str(self.file),
            "engine": self.engine,
            "edges": len(self.placement),
            "weights": len(self.placement.weight_only),
            "pairs": self.pairs,
            "unexamined": self.unexamined,
            "samples": self.samples,
            "held_out": self.is_held_out,
            "min_sqnr_db": sqnr_of(self.limit),
            "healthy": self.is_healthy,
            "output_sqnr_db": sqnr_of(self.noise),
            "finite": self.noise < UNKNOWN_NOISE,
            "examined": {"samples": self.examined, "output_sqnr_db": sqnr_of(self.noise_there)},
            "sqnr_db_as_defined": None if self.by_numbers is None else sqnr_of(self.by_numbers),
            "rest_sqnr_db": None if self.rest is None else sqnr_of(self.rest),
            "guilty": [damage.to_dict() for damage in self.guilty],
            "largest": [damage.to_dict() for damage in self.largest],
            "nodes_to_exclude": self.excluded,
            "notes": self.notes,
        }


def level(noise: float) -> str:
    """A noise as an SQNR in words."""
    if noise >= UNKNOWN_NOISE:
        return "NaN or no outputs"
    return "exact" if noise == 0 else f"{sqnr_of(noise):.1f} dB"


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.4g} .. {ends[1]:.4g}"


def debug(options: DebugOptions, observer: Observer | None = None) -> Diagnosis:
    """Find what breaks the outputs of a quantized model. Models and samples lie in files (see `on_disk`).

    Raises:
        InputError: models or data cannot be used, or not together, or there are no data.
        EngineFailure: an engine does not run the float model, or ONNX Runtime not the pairs.
        EngineUnavailable: the engine is missing.
    """
    observer, model = observer or Silent(), Path(str(options.model))
    observer.stage(f"reading {model.name}")
    plain, file, quantized = _models(options)
    pairs, unmatched = file_pairs(plain, quantized)
    is_alone = options.quantized is None
    if is_alone:
        every, pairs = pairs, tuple(p for p in pairs if p.kind == "activation")
        if every and not pairs:
            raise BadModel(f"{file} has its weights alone quantized: to examine them, give the float model first")
    if not pairs and any(True for _ in dynamic_products_of(quantized)):
        raise BadModel(
            f"{file} has dynamic quantization alone, which is not examined: exclude nodes from it, and compare"
        )
    if not pairs:
        raise BadModel(f"{file} has no pair on a tensor of the float model: is it a version of {model}?")
    spec = options.spec(options.input_shapes)
    check_inputs(spec, plain)
    execution = execution_of(options)
    data = data_of(options, execution, None if is_alone else file, model)
    prepared = prepare(plain, data, execution, fixed=options.fix_inputs)
    if not prepared.has_real_samples:
        raise BadOption("random inputs say nothing of a model's outputs: give `calibration_data`")
    fixed = fixed_inputs(model, options.fix_inputs)
    judging = [sample | fixed for sample in prepared.judging]
    if is_alone:
        instead = "give the float model first, and this file second"
        with onnxruntime_session(execution, fuse=False) as session:
            check_stripped(plain, quantized, session, judging[0], str(file), instead)
    notes = list[str]()
    if unmatched:
        many = f"{counted(len(unmatched), 'pair')} on no tensor of the float model, and not examined"
        notes.append(f"{many}, the first: {unmatched[0]}")
    limit = noise_of(FLOOR_DB if options.min_sqnr is None else options.min_sqnr)
    with (
        temporary_folder() as folder,
        Runner(spec, execution=execution, log_dir=folder) as runner,
        switched_pairs(plain, quantized, pairs, judging, execution) as switched,
    ):
        observer.stage(f"running {file.name} on {spec.name}")
        with rewording(f"{spec.name} does not run {file.name}"):
            outputs = _outputs(runner, file, switched)
        loss = noise(switched.reference, outputs)
        if loss < UNKNOWN_NOISE and (part := loss_of_slice(accuracy(switched.reference, outputs, NO_SCORES))):
            notes.append(part)
        done = Diagnosis(
            pairs=len(pairs),
            samples=len(judging),
            limit=limit,
            noise=loss,
            examined=len(judging),
            noise_there=loss,
            unexamined=len(unmatched),
            notes=tuple(notes),
            placement=placement_in(plain, quantized),
            is_held_out=prepared.is_held_out,
            file=file,
            engine=spec.name,
        )
        if done.is_healthy:
            return done
        observer.stage("measuring the pairs of each tensor alone")
        left = loss = switched.narrow(outputs, limit)
        defined = numbers = switched.noise(switched.tensors)
        ranking = switched.ranking() if WORSE * numbers > limit else {}
        without: dict[str, float] = {}
        biases = {pair.tensor for pair in pairs if pair.kind == "bias"}
        for tensor in list(ranking)[:WORST]:
            if defined <= limit:
                break
            rest = switched.noise(set(switched.tensors) - without.keys() - {tensor})
            breaks_limit = ranking[tensor] > limit and tensor not in biases  # a corrected one makes up for other pairs
            if rest <= LEFT_SHARE * defined or (breaks_limit and rest <= defined):
                without[tensor] = defined = rest
        if without:  # what the other pairs do on the engine
            others = [pair for pair in pairs if pair.tensor not in without]
            left = 0.0
            if others:
                with ConstantFile(folder / "rest.bin") as constants:
                    constants.save(with_file_pairs(plain, others, quantized), folder / "rest.onnx")
                try:
                    left = noise(switched.reference, _outputs(runner, folder / "rest.onnx", switched))
                except EngineRefused:
                    left = UNKNOWN_NOISE
        largest = list[str]()
        if left > max(limit, WORSE * defined):
            levels = " where these have ".join(f"{sqnr_of(max(value, EXACT)):.1f} dB" for value in (left, defined))
            notes.append(f"{spec.name} computes other values than the pairs define: {levels}")
        elif left > limit:
            largest = [tensor for tensor in ranking if tensor not in without and tensor not in biases][:NAMED]
        noises = {tensor: ranking[tensor] for tensor in [*without, *largest]}
        suspects = described(plain, pairs, noises, switched.samples, execution)
    if all(pair.kind == "activation" for pair in pairs):
        notes.append("constants are taken as the file has them: give the float model as well, to have them examined")
    return replace(
        done,
        examined=len(switched.samples),
        noise_there=loss,
        by_numbers=numbers,
        rest=left,
        suspects=tuple(replace(each, without=without.get(each.tensor)) for each in suspects),
        notes=tuple(notes),
    )


def _outputs(runner: Runner, file: Path, switched: SwitchedPairs) -> Outputs:
    outputs, first = runner.outputs_of(file, switched.samples), switched.reference[0]
    if missing := first.keys() - outputs[0].keys():
        raise EngineFailure(f"{file.name} has no output {sorted(missing)[0]!r} as the float model has")
    return [{name: each[name] for name in first} for each in outputs]


def _models(options: DebugOptions) -> tuple[Model, Path, Model]:
    """The float model, the file to examine, and the quantized model in that file."""
    model = Path(str(options.model))
    file = model if options.quantized is None else Path(str(options.quantized))
    given = load(file)
    if here := {name: value for name, value in options.fix_inputs.items() if name in given.inputs}:
        given = load(file, fix_inputs=here)
    if not is_quantized(given):
        if options.quantized is None or (file != model and is_quantized(load(model))):
            raise BadModel(f"{file} has no Q/DQ pairs: give the quantized model second, the float model first")
        either = "neither file has" if file != model else f"{file} has no"
        raise BadModel(f"{either} Q/DQ pairs: nothing is quantized that could break the outputs")
    if options.quantized is None:
        return strip_pairs(given), file, given
    given = Rewrites().of(given)
    scales = {given.tensors[n.inputs[1]].dtype for n in given.nodes if n.op == "DequantizeLinear"}
    precision: Precision = "fp16" if TensorProto.FLOAT16 in scales else "fp32"
    plain, _ = load_for(model, precision, options.fix_inputs, given.opset)
    names = between({n.op for n in plain.nodes}, {n.op for n in given.nodes})
    plain, folded = (
        load_for(model, precision, options.fix_inputs, given.opset, Rewrites(fold, names))[0] for fold in (False, True)
    )
    gone = plain.index_of.keys() - folded.index_of.keys()
    if not gone & {twin.name for twin in twins_of(plain, given).values()}:  # they were folded before quantization, too
        plain = folded
    if precision == "fp16":
        plain = converted(plain, "fp16", kept_in(given, plain))
    if is_quantized(plain):
        raise BadModel(f"{model} has Q/DQ pairs: give the float model first, or the quantized model alone")
    if plain.inputs != given.inputs and set(plain.inputs) != set(given.inputs):
        raise BadModel(f"{file} takes other inputs than {model}")
    return plain, file, given
