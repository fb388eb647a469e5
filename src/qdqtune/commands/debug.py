"""`qdqtune debug`: which tensor breaks the outputs of a quantized model. `quantize --report` shows the same ranking.

It ranks tensors by the error that their pairs alone cause, as ONNX defines pairs, and removes the worst until the
outputs are healthy. Then it compares that with what the engine computes.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from qdqtune.calibration.inputs import fixed_inputs
from qdqtune.calibration.observe import ModelRun, Outputs, observe, onnxruntime_session, running
from qdqtune.calibration.options import DataOptions, FixOption
from qdqtune.commands.inputs import MODEL, ModelOption, execution_of, prepared_for
from qdqtune.commands.shown import Shown, Table
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.options import EngineOptions
from qdqtune.engines.runner import Runner, temporary_runner
from qdqtune.errors import BadModel, BadOption, ConstraintUnmet, EngineFailure, EngineRefused, rewording
from qdqtune.explanation.formatting import counted, samples
from qdqtune.graph.float16 import Precision, converted, kept_in, load_for
from qdqtune.graph.loading import load, with_opset
from qdqtune.graph.model import Model
from qdqtune.graph.operators import REARRANGES
from qdqtune.graph.rewrites import Rewrites, between
from qdqtune.graph.saving import ConstantFile
from qdqtune.numerics.accuracy import ANOTHER_SIZE, FLOOR_DB, accuracy, is_finite, loss_of_slice
from qdqtune.numerics.scores import NO_SCORES
from qdqtune.numerics.simulation import INFERENCES, SAMPLES, UNBOUNDED_NOISE, check_stripped, halved, shared
from qdqtune.options import MaybeFile, number
from qdqtune.placement.reading import is_quantized, twins_of
from qdqtune.placement.stripping import strip_pairs
from qdqtune.placement.switches import SWITCH, FilePair, Kind, file_pairs, representable, with_file_pairs
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.types import Array, Sample, noise_of, sqnr_of

# The limits are chosen, not measured.

WORST = 10
"""Most tensors that a report lists, or that `debug` removes to find the guilty ones."""

TENTH_DB = 10.0
"""A tensor makes a tenth of the error or more if its SQNR is at most `TENTH_DB` above that of all pairs together."""

LOUDEST = 999.0
"""The largest noise of finite outputs."""

OFF = 0.05
"""Two ranges count as equal if they differ by less than this share of the tensor's range."""

COARSE = 3.0
"""A pair's range is too wide if it is this many times that of the float tensor: it wastes more than a bit."""

SENSITIVE = "its range fits: the network is sensitive there"


@dataclass(frozen=True)
class Damage:
    """What the pairs of one tensor do to the outputs.

    `nodes` are the nodes to keep in float: those that read the tensor with its pairs, or the node that makes a graph
    output. `noise` is the error with these pairs alone, `without` the error once they are removed as well, if measured.
    `float_range` is that of the float tensor on the examined samples, `quantized_range` what the pairs can represent;
    `whole_range` is that on all samples, if the pairs are too wide for the examined ones. `joined` are the ranges of
    the tensors that a Concat joins with this one.
    """

    tensor: str
    kind: Kind
    nodes: tuple[str, ...]
    noise: float
    float_range: tuple[float, float]
    quantized_range: tuple[float, float]
    joined: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    without: float | None = None
    whole_range: tuple[float, float] | None = None

    def is_too_wide(self, least: float, most: float) -> bool:
        """Whether the pair of an activation is too wide for these ends of its values."""
        low, high = self.quantized_range
        return self.kind == "activation" and high - low > COARSE * max(most - least, most, -least)

    @property
    def output_db(self) -> float | None:
        """The SQNR of the worst output with these pairs alone; -30 if outputs are not finite, None without error."""
        return sqnr_of(self.noise)

    @property
    def reason(self) -> str:
        low, high = self.quantized_range
        least, most = self.float_range
        if not np.isfinite(self.quantized_range).all():
            return "its scale is no finite number"
        if low == high:
            return "its pair can give one value only"
        width = max(most - least, np.finfo(np.float64).tiny)
        if self.kind != "activation":
            off = max(abs(low - least), abs(high - most)) > OFF * width
            return "its constant has other values than the float one" if off else SENSITIVE
        cut = max(low - least, most - high, 0.0) / width
        if cut > OFF:
            return f"its pair cuts off {100 * min(cut, 1):.0f} % of the range"
        if self.is_too_wide(least, most):
            wide = f"a range {(high - low) / width:.3g} times as wide"
            if self.whole_range is None or self.is_too_wide(*self.whole_range):
                return f"its pair spends its steps on {wide}"
            return f"these samples are quiet, and share a scale with loud ones ({wide}): leave the node in float"
        sizes = {name: max(map(abs, ends)) for name, ends in self.joined.items()}
        if sizes and max(sizes.values()) > ANOTHER_SIZE * min(sizes.values()):
            told = ", ".join(f"{name} up to {size:.4g}" for name, size in sizes.items())
            return f"a Concat gives one scale to parts of unlike size: {told}"
        return SENSITIVE

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; NaN and infinite ends of ranges become text, since JSON has no such numbers."""
        row = {name: value for name, value in asdict(self).items() if name not in ("noise", "without", "whole_range")}
        for name in ("float_range", "quantized_range"):
            row[name] = [end if np.isfinite(end) else str(end) for end in row[name]]
        without = {} if self.without is None else {"without_db": sqnr_of(self.without)}
        return row | {"output_db": self.output_db, **without, "reason": self.reason}


def noise(reference: Outputs, outputs: Outputs, of_slices: bool | None = None) -> float:
    """The power of the error relative to the signal, for the worst output or a destroyed slice of one; `of_slices`: for
    any slice, or (False) for none. For integer outputs, such as class numbers: the share of values that differ, if that
    is larger. `UNBOUNDED_NOISE` if values are not finite."""
    if not is_finite(outputs):
        return UNBOUNDED_NOISE
    judged = accuracy(reference, outputs, NO_SCORES)
    counts = judged.slice_is_lost if of_slices is None else of_slices
    of_slice = noise_of(judged.slice_db) if counts and judged.slice_db is not None else 0.0
    wrong = min(max(judged.noise, of_slice), LOUDEST)
    return wrong if judged.agreement is None else max(wrong, 1 - judged.agreement)


def errors_by_sample(reference: Outputs, outputs: Outputs) -> list[float]:
    """How much of the error each sample causes: its noise times the power of its signal, so that samples with outputs
    near zero count little; for integer outputs alone, its noise."""
    errors = []
    for wanted, values in zip(reference, outputs, strict=True):
        floats = [array for array in wanted.values() if array.dtype.kind == "f"]
        signal = sum(float(np.sum(np.square(array, dtype=np.float64))) for array in floats) if floats else 1.0
        errors.append(noise([wanted], [values]) * signal)
    return errors


class SwitchedPairs:
    """The float model with a switch at every pair of a file, on ONNX Runtime without optimization, which computes pairs
    as ONNX defines them. One build serves all sets of pairs."""

    def __init__(self, pairs: Sequence[FilePair], samples: Sequence[Sample], run: ModelRun) -> None:
        self._pairs, self.samples, self._run = pairs, samples, run
        self.tensors = tuple(dict.fromkeys(pair.tensor for pair in pairs))
        self.of_slices: bool | None = None
        self.reference = self.outputs(())
        if not is_finite(self.reference):
            raise EngineFailure(
                "outputs of the float model are NaN or infinite on ONNX Runtime without optimization: nothing can be "
                "compared with them"
            )

    def outputs(self, on: Iterable[str]) -> Outputs:
        tensors = set(on)
        switches = {f"{SWITCH}{i}": np.asarray(pair.tensor in tensors) for i, pair in enumerate(self._pairs)}
        with rewording("ONNX Runtime cannot run the model with a switch at every pair"):
            return self._run(sample | switches for sample in self.samples)

    def noise(self, on: Iterable[str]) -> float:
        return noise(self.reference, self.outputs(on), self.of_slices)

    def judge_alike(self) -> float:
        """From now on judge all sets of pairs by the worst slice if all pairs together destroy one, else by none.
        Returns the noise of all pairs together."""
        outputs = self.outputs(self.tensors)
        self.of_slices = accuracy(self.reference, outputs, NO_SCORES).slice_is_lost
        return noise(self.reference, outputs, self.of_slices)

    def narrow(self, outputs: Outputs, limit: float = 0.0) -> float:
        """Keep only the samples with the largest errors in these outputs, if the noise on them is above `limit`.
        Returns the noise on the samples that are left."""
        reference, most = self.reference, max(1, min(SAMPLES, INFERENCES // len(self.tensors)))
        errors = errors_by_sample(reference, outputs)
        worst = sorted(sorted(range(len(errors)), key=lambda i: -errors[i])[:most])
        kept = [reference[i] for i in worst]
        there = noise(kept, [outputs[i] for i in worst])
        if there <= limit:
            return noise(reference, outputs)
        self.samples, self.reference = [self.samples[i] for i in worst], kept
        return there

    def ranking(self) -> dict[str, float]:
        """The noise that each tensor's pairs cause alone, the largest first; if there are many, estimated
        (`halved`)."""
        if len(self.tensors) <= INFERENCES:
            alone = [self.noise([tensor]) for tensor in self.tensors]
        else:
            blocks = halved(len(self.tensors), lambda block: self.noise(self.tensors[slice(*block)]), INFERENCES)
            alone = shared(blocks, [1.0] * len(self.tensors))
        return dict(sorted(zip(self.tensors, alone, strict=True), key=lambda ranked: -ranked[1]))


@contextmanager
def switched_pairs(
    float_model: Model,
    quantized: Model,
    pairs: Sequence[FilePair],
    samples: Sequence[Sample],
    execution: Execution = EXECUTION,
) -> Iterator[SwitchedPairs]:
    model = with_file_pairs(float_model, pairs, quantized, switched=True)
    with running(model, execution, fuse=False) as run:  # ONNX Runtime's fusions do not look outside of an If
        yield SwitchedPairs(pairs, samples, run)


@dataclass(frozen=True)
class Damages:
    """The `WORST` tensors of a quantized model, the largest noise first, and the noise of all pairs `together` (without
    those of biases), on the `samples` samples with the largest errors; all `of_slices` if these destroy one."""

    worst: tuple[Damage, ...]
    together: float
    samples: int
    of_slices: bool | None = None

    def in_words(self) -> str:
        where = f"{'the worst slice of an output on ' if self.of_slices else ''}the {counted(self.samples, 'sample')}"
        return f"measured on {where} with the largest errors, where all pairs together give {level(self.together)}"

    def to_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "output_sqnr_db": sqnr_of(self.together)}


def damages(
    float_model: Model, quantized: Model, samples: Sequence[Sample], execution: Execution = EXECUTION
) -> Damages:
    float_model = with_opset(float_model, quantized.opset)
    pairs = [pair for pair in file_pairs(float_model, quantized)[0] if pair.kind != "bias"]
    with switched_pairs(float_model, quantized, pairs, samples, execution) as switched:
        switched.narrow(switched.outputs(switched.tensors))
        together = switched.judge_alike()
        worst = dict(list(switched.ranking().items())[:WORST])
        rows = described(float_model, pairs, worst, switched.samples, samples, execution)
        return Damages(tuple(rows), together, len(switched.samples), switched.of_slices)


def described(
    model: Model,
    pairs: Sequence[FilePair],
    noises: Mapping[str, float],
    examined: Sequence[Sample],
    samples: Sequence[Sample],
    execution: Execution,
) -> list[Damage]:
    """The `Damage` of each tensor in `noises`, in order; `examined` are the samples with the largest errors."""
    joined = {tensor: _joined(model, tensor) for tensor in noises}
    ranges = _float_ranges(model, list(dict.fromkeys([*joined, *chain(*joined.values())])), examined, execution)
    damaged = []
    for tensor, alone in noises.items():
        own = [pair for pair in pairs if pair.tensor == tensor]
        readers = tuple(dict.fromkeys(e.node for pair in own for e in pair.edges if e.node))
        damaged.append(
            Damage(
                tensor,
                own[0].kind,
                readers or (model.nodes[model.producers[tensor]].name,),
                alone,
                ranges[tensor],
                _min_max(np.array([representable(pair) for pair in own])),
                {name: ranges[name] for name in joined[tensor]},
            )
        )
    wide = [damage.tensor for damage in damaged if damage.is_too_wide(*damage.float_range)]
    whole = _float_ranges(model, wide, samples, execution) if wide else {}
    return [replace(damage, whole_range=whole.get(damage.tensor)) for damage in damaged]


def to_exclude(found: Damages, leaves_some: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    """The nodes that read the tensors whose pairs cause a tenth or more of the whole error, the worst first.

    `leaves_some(nodes)` says whether anything stays quantized without these nodes; the list ends before nothing would.
    """
    chosen: tuple[str, ...] = ()
    for damage in found.worst:
        if not damage.noise or damage.noise < found.together * noise_of(TENTH_DB):
            continue
        more = tuple(dict.fromkeys((*chosen, *damage.nodes)))
        if not leaves_some(more):
            break
        chosen = more
    return chosen


def exclusion(nodes: Sequence[str]) -> list[str]:
    """The options of `quantize` that keep nodes in float, a line each, as a shell continues lines."""
    options = [f"--nodes-to-exclude {shlex.quote(glob.escape(node))}" for node in nodes]
    return [f"  {option} \\" for option in options[:-1]] + [f"  {option}" for option in options[-1:]]


def _float_ranges(
    model: Model, tensors: Sequence[str], samples: Sequence[Sample], execution: Execution
) -> dict[str, tuple[float, float]]:
    ranges = {name: _min_max(model.constants[name].array()) for name in tensors if name in model.constants}
    computed = [name for name in tensors if name not in ranges]
    for tensor, values in observe(model, computed, samples, execution=execution):
        low, high = _min_max(values)
        before = ranges.get(tensor, (low, high))
        ranges[tensor] = min(low, before[0]), max(high, before[1])
    return ranges


def _joined(model: Model, tensor: str) -> tuple[str, ...]:
    """The tensors that a Concat joins with this one, so that one pair gives them all the same scale; else empty."""
    maker = model.maker(tensor)
    while maker is not None and maker.op in REARRANGES:
        maker = model.maker(maker.inputs[0])
    return maker.inputs if maker is not None and maker.op == "Concat" else ()


def _min_max(values: Array) -> tuple[float, float]:
    wide = values.astype(np.float64)
    return float(wide.min()), float(wide.max())


# The command


WORSE = 2.0
"""The engine is at fault if its noise is this many times that of the pairs as ONNX defines them: 3 dB.
Chosen, not measured."""


class DebugOptions(EngineOptions, DataOptions, FixOption, ModelOption):
    quantized: MaybeFile = MODEL("The quantized model.", metavar="[QUANTIZED]")
    min_sqnr: float | None = number(
        "Output SQNR from which on the outputs count as healthy, in dB; 20 is an error of a tenth.",
        "Accuracy",
        "least signal to error at the outputs",
        default_in_words=f"{FLOOR_DB:g}",
        metavar="DB",
    )


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The result of `debug`. Noise is that of the worst output, relative to the signal.

    `noise` is that of `file` on the `engine` on all `samples`. Further values were measured on the `examined` samples
    with the largest errors: `noise_there` of the file, `by_numbers` of its pairs as ONNX defines them, and `rest`
    without the guilty pairs. `suspects` are the guilty tensors, whose `without` is known; if there are none, the worst
    ones. `pairs` counts examined pairs, with those on biases; `unexamined` those on no tensor of the float model.
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
    is_held_out: bool = False
    file: Path = Path()
    engine: str = ""

    @property
    def guilty(self) -> tuple[Damage, ...]:
        return tuple(damage for damage in self.suspects if damage.without is not None)

    @property
    def is_healthy(self) -> bool:
        return self.noise <= self.limit

    @property
    def excluded(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node for damage in self.guilty for node in damage.nodes))

    @property
    def exit_code(self) -> int:
        return 0 if self.is_healthy else ConstraintUnmet.exit_code

    def in_words(self) -> str:
        state = "healthy" if self.is_healthy else "not healthy"
        on = samples(self.samples, self.is_held_out)
        return f"output SQNR {level(self.noise)} on {self.engine}, on {on}: {state} at a limit of {level(self.limit)}"

    def table(self) -> Table:
        rows = [
            (
                damage.tensor,
                "" if damage.without is None else "guilty",
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
        return Table(columns, rows)

    def parts(self) -> Iterator[str | Table]:
        yield self.in_words()
        if self.is_healthy:
            return
        if self.examined < self.samples:
            where = counted(self.examined, "sample")
            yield f"examined on the {where} with most of the error: {level(self.noise_there)} there"
        if self.by_numbers is not None:
            yield f"as ONNX defines its arithmetic: {level(self.by_numbers)}"
        yield self.table()
        if self.guilty:
            state = "healthy" if self.rest is not None and self.rest <= self.limit else "still not healthy"
            yield f"without them on {self.engine}: {level(self.rest or 0.0)}, {state}"
            yield "to keep them in float: qdqtune quantize MODEL \\"
            yield from exclusion(self.excluded)
        elif self.suspects or self.unexamined:
            where = f", and {counted(self.unexamined, 'pair')} not examined" if self.unexamined else ""
            yield f"no single tensor is guilty{where}: calibrate otherwise, or exclude several"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values. SQNR in dB: None for equal outputs, -30 if outputs are not finite."""
        return {
            "model": str(self.file),
            "engine": self.engine,
            "pairs": self.pairs,
            "unexamined": self.unexamined,
            "samples": self.samples,
            "held_out": self.is_held_out,
            "min_sqnr_db": sqnr_of(self.limit),
            "healthy": self.is_healthy,
            "output_sqnr_db": sqnr_of(self.noise),
            "examined": {"samples": self.examined, "output_sqnr_db": sqnr_of(self.noise_there)},
            "sqnr_db_as_defined": None if self.by_numbers is None else sqnr_of(self.by_numbers),
            "rest_sqnr_db": None if self.rest is None else sqnr_of(self.rest),
            "guilty": [damage.to_dict() for damage in self.guilty],
            "suspects": [damage.to_dict() for damage in self.suspects],
            "nodes_to_exclude": self.excluded,
            "notes": self.notes,
        }


def level(noise: float) -> str:
    if noise >= UNBOUNDED_NOISE:
        return "NaN or no outputs"
    return "exact" if noise == 0 else f"{sqnr_of(noise):.1f} dB"


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.4g} .. {ends[1]:.4g}"


def debug(options: DebugOptions, observer: Observer | None = None) -> Diagnosis:
    """Find what breaks the outputs of a quantized model. Models and samples lie in files (see `on_disk`). Raises
    BadModel if there is no pair to examine, BadOption without samples, EngineFailure if a model does not run."""
    observer, model = observer or Silent(), options.model
    observer.stage(f"reading {model.name}")
    plain, file, quantized = _models(options)
    pairs, unmatched = file_pairs(plain, quantized)
    is_alone = options.quantized is None
    if is_alone:
        pairs = tuple(p for p in pairs if p.kind == "activation")
    if not pairs:
        raise BadModel(f"{file} has no pair to examine: give the float model first, and the version with pairs second")
    spec = options.spec(options.input_shapes)
    execution = execution_of(options)
    prepared = prepared_for(plain, spec, options, execution, (file, model), fixed=options.fix_inputs)
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
        temporary_runner(spec, execution) as runner,
        switched_pairs(plain, quantized, pairs, judging, execution) as switched,
    ):
        observer.stage(f"running {file.name} on {spec.name}")
        with rewording(f"{spec.name} does not run {file.name}"):
            outputs = _outputs(runner, file, switched)
        loss = noise(switched.reference, outputs)
        if loss < UNBOUNDED_NOISE and (part := loss_of_slice(accuracy(switched.reference, outputs, NO_SCORES))):
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
        for tensor, alone in list(ranking.items())[:WORST]:
            if defined > limit and alone >= defined * noise_of(TENTH_DB):
                rest = switched.noise(set(switched.tensors) - without.keys() - {tensor})
                if rest <= defined:  # a corrected bias makes up for other pairs
                    without[tensor] = defined = rest
        if without:  # what the other pairs do on the engine
            others = [pair for pair in pairs if pair.tensor not in without]
            left = 0.0
            if others:
                rest_file = runner.log_dir / "rest.onnx"
                with ConstantFile(rest_file.with_suffix(".bin")) as constants:
                    constants.save(with_file_pairs(plain, others, quantized), rest_file)
                try:
                    left = noise(switched.reference, _outputs(runner, rest_file, switched))
                except EngineRefused:
                    left = UNBOUNDED_NOISE
        if left > max(limit, WORSE * defined):
            levels = " where these have ".join(level(value) for value in (left, defined))
            notes.append(f"{spec.name} computes other values than the pairs define: {levels}")
        noises = {tensor: ranking[tensor] for tensor in without or list(ranking)[:WORST]}
        suspects = described(plain, pairs, noises, switched.samples, judging, execution)
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
    model = options.model
    file = options.quantized or model
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
