"""The tensors whose pairs change the outputs of a quantized model most: the ranking of `quantize` and `debug`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from qdqtune.calibration.observe import ModelRun, Outputs, observe, running
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.errors import EngineFailure, rewording
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import Model
from qdqtune.graph.operators import REARRANGES
from qdqtune.numerics.accuracy import ANOTHER_SIZE, accuracy, is_finite
from qdqtune.numerics.scores import NO_SCORES
from qdqtune.numerics.simulation import Block, halved
from qdqtune.placement.switches import SWITCH, FilePair, Kind, file_pairs, representable, with_file_pairs
from qdqtune.types import Array, Sample, noise_of, sqnr_of

# The limits are chosen, not measured.

WORST = 10
"""Most tensors that a report lists, and that are suspected of a fault."""

TENTH_DB = 10.0
"""A tensor makes a tenth of the error or more if its SQNR is at most `TENTH_DB` above that of the whole model."""

MOST_INFERENCES = 400
"""Up to so many tensors are measured one by one, on as many samples as that leaves; more are halved in blocks."""

MOST_SAMPLES = 4
"""Most samples that tensors are measured on: those with the largest error."""

UNKNOWN_NOISE = 1e3
"""The noise that stands for outputs which are NaN or infinite, have other shapes, or are missing."""

LOUDEST = 999.0
"""The largest noise of finite outputs."""

OFF = 0.05
"""Two ranges are alike if they differ by less than this share of the tensor's range."""

COARSE = 3.0
"""A pair's range is too wide if it is this many times that of the float tensor: it wastes more than a bit."""

SENSITIVE = "its range fits: the network is sensitive there"


@dataclass(frozen=True)
class Damage:
    """What the pairs of one tensor do to the outputs.

    `nodes` are the nodes to keep in float: those that read the tensor through the pairs, or the node that makes a graph
    output. `noise` is that of the outputs with these pairs alone, `without` that of the pairs that are left without
    them, where that was measured. `float_range` are the values of the float tensor on the samples, `quantized_range`
    those that the pairs can represent. `joined` are the ranges of the tensors that a Concat joins to this one.
    """

    tensor: str
    kind: Kind
    nodes: tuple[str, ...]
    noise: float
    float_range: tuple[float, float]
    quantized_range: tuple[float, float]
    scale: tuple[float, float]
    zero_point: tuple[float, float]
    joined: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    without: float | None = None

    @property
    def output_db(self) -> float | None:
        """The SQNR of the worst output with these pairs alone; -30 if outputs are not finite, None without error."""
        return sqnr_of(self.noise)

    @property
    def reason(self) -> str:
        """In words, what is wrong with the pairs, judged by their range and that of the float tensor."""
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
        if high - low > COARSE * max(most - least, most, -least):
            return f"its pair spends its steps on a range {(high - low) / width:.3g} times as wide"
        sizes = {name: max(map(abs, ends)) for name, ends in self.joined.items()}
        if sizes and max(sizes.values()) > ANOTHER_SIZE * min(sizes.values()):
            told = ", ".join(f"{name} up to {size:.4g}" for name, size in sizes.items())
            return f"a Concat gives one scale to parts of unlike size: {told}"
        return SENSITIVE

    def to_dict(self) -> dict[str, Any]:
        """The tensor as JSON values; NaN and infinite ends of ranges are text, since JSON has no such numbers."""
        row = {name: value for name, value in asdict(self).items() if name not in ("noise", "without")}
        for name in ("float_range", "quantized_range", "scale", "zero_point"):
            row[name] = [end if np.isfinite(end) else str(end) for end in row[name]]
        without = {} if self.without is None else {"without_db": sqnr_of(self.without)}
        return row | {"output_db": self.output_db, **without, "reason": self.reason}


def noise(reference: Outputs, outputs: Outputs) -> float:
    """The power of the error relative to that of the signal, for the worst output, or for a slice of one that is lost.

    For integer outputs, such as class numbers, the share of values that differ, if that is larger.
    """
    if not is_finite(outputs):
        return UNKNOWN_NOISE
    shapes = ((r[name].shape, o[name].shape) for r, o in zip(reference, outputs, strict=True) for name in r)
    if any(a != b for a, b in shapes):
        return UNKNOWN_NOISE
    judged = accuracy(reference, outputs, NO_SCORES)
    of_slice = noise_of(judged.slice_db) if judged.slice_is_lost and judged.slice_db is not None else 0.0
    wrong = min(max(judged.noise, of_slice), LOUDEST)
    return wrong if judged.agreement is None else max(wrong, 1 - judged.agreement)


def errors_by_sample(reference: Outputs, outputs: Outputs) -> list[float]:
    """How much of the error each sample makes, in the worst output: its power relative to that of the signal of all
    samples, so that one whose outputs are next to nothing counts for nothing. Of integers the share that differs."""
    errors = []
    signals = {
        name: sum(float(np.sum(np.square(r[name], dtype=np.float64))) for r in reference)
        for name, array in reference[0].items()
        if array.dtype.kind == "f"
    }
    for r, o in zip(reference, outputs, strict=True):
        if not is_finite([o]) or any(r[name].shape != o[name].shape for name in r):
            errors.append(UNKNOWN_NOISE)
            continue
        parts = []
        for name, wanted in r.items():
            if wanted.dtype.kind == "f":
                error = float(np.sum(np.square(wanted.astype(np.float64) - o[name])))
                parts.append(error / signals[name] if signals[name] else error)
            else:
                parts.append(float(np.mean(wanted != o[name])))
        errors.append(max(parts))
    return errors


class SwitchedPairs:
    """The float model with a switch at every pair of a file, on ONNX Runtime without optimization, which computes pairs
    as ONNX defines them. One build serves all sets of pairs.

    Raises:
        EngineFailure: ONNX Runtime does not run it, or outputs of the float model are not finite.
    """

    def __init__(self, pairs: Sequence[FilePair], samples: Sequence[Sample], run: ModelRun) -> None:
        self._pairs, self.samples, self._run = pairs, samples, run
        self.tensors = tuple(dict.fromkeys(pair.tensor for pair in pairs))
        self.reference = self.outputs(())
        if not is_finite(self.reference):
            raise EngineFailure(
                "outputs of the float model are NaN or infinite on ONNX Runtime without optimization: nothing can be "
                "compared with them"
            )

    def outputs(self, on: Iterable[str]) -> Outputs:
        """The outputs with the pairs of some tensors."""
        tensors = set(on)
        switches = {f"{SWITCH}{i}": np.asarray(pair.tensor in tensors) for i, pair in enumerate(self._pairs)}
        with rewording("ONNX Runtime cannot run the model with a switch at every pair"):
            return self._run(sample | switches for sample in self.samples)

    def noise(self, on: Iterable[str]) -> float:
        """The noise that the pairs of some tensors make."""
        return noise(self.reference, self.outputs(on))

    def narrow(self, outputs: Outputs, limit: float = 0.0) -> float:
        """Keep only the samples that make most of the error in these outputs, if the noise on them is above `limit`.
        The noise of the outputs on the samples that are kept."""
        reference, most = self.reference, max(1, min(MOST_SAMPLES, MOST_INFERENCES // len(self.tensors)))
        errors = errors_by_sample(reference, outputs)
        worst = sorted(sorted(range(len(errors)), key=lambda i: -errors[i])[:most])
        kept = [reference[i] for i in worst]
        there = noise(kept, [outputs[i] for i in worst])
        if there <= limit:
            return noise(reference, outputs)
        self.samples, self.reference = [self.samples[i] for i in worst], kept
        return there

    def ranking(self) -> dict[str, float]:
        """The noise that each tensor makes alone, the largest first."""

        def of_block(block: Block) -> float:
            start, stop = block
            return self.noise(self.tensors[start:stop])

        count = len(self.tensors)
        if count <= MOST_INFERENCES:
            alone = [of_block((i, i + 1)) for i in range(count)]
        else:
            alone = halved(count, of_block, MOST_INFERENCES)
        order = sorted(range(count), key=lambda i: -alone[i])
        return {self.tensors[i]: alone[i] for i in order}


@contextmanager
def switched_pairs(
    float_model: Model,
    quantized: Model,
    pairs: Sequence[FilePair],
    samples: Sequence[Sample],
    execution: Execution = EXECUTION,
) -> Iterator[SwitchedPairs]:
    """The `pairs` of `quantized` on its float model, each with a switch."""
    model = with_file_pairs(float_model, pairs, quantized, switched=True)
    with running(model, execution, fuse=False) as run:  # ONNX Runtime's fusions do not look outside of an If
        yield SwitchedPairs(pairs, samples, run)


def damages(
    float_model: Model, quantized: Model, samples: Sequence[Sample], execution: Execution = EXECUTION
) -> list[Damage]:
    """The `WORST` tensors of a quantized model, the largest damage first; biases apart.

    Raises:
        EngineFailure: ONNX Runtime cannot run the float model with switches.
    """
    float_model = with_opset(float_model, quantized.opset)
    pairs = [pair for pair in file_pairs(float_model, quantized)[0] if pair.kind != "bias"]
    with switched_pairs(float_model, quantized, pairs, samples, execution) as switched:
        switched.narrow(switched.outputs(switched.tensors))
        worst = dict(list(switched.ranking().items())[:WORST])
        return described(float_model, pairs, worst, switched.samples, execution)


def described(
    model: Model,
    pairs: Sequence[FilePair],
    noises: Mapping[str, float],
    samples: Sequence[Sample],
    execution: Execution,
) -> list[Damage]:
    """The tensors of `noises`, in order, with what `samples` and the file tell of them."""
    joined = {tensor: _joined(model, tensor) for tensor in noises}
    ranges = _float_ranges(model, list(dict.fromkeys([*joined, *chain(*joined.values())])), samples, execution)
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
                _min_max(np.concatenate([pair.scale.ravel() for pair in own])),
                _min_max(np.concatenate([pair.zero_point.ravel() for pair in own])),
                {name: ranges[name] for name in joined[tensor]},
            )
        )
    return damaged


def to_exclude(
    found: Sequence[Damage], output_db: float | None, leaves_some: Callable[[tuple[str, ...]], bool]
) -> tuple[str, ...]:
    """The nodes of the tensors that make a tenth or more of the error of a model with `output_db`, the worst first.

    `leaves_some` says whether anything stays quantized without some nodes; tensors are added as long as something does.
    """
    chosen: tuple[str, ...] = ()
    for damage in found:
        if output_db is None or damage.output_db is None or damage.output_db > output_db + TENTH_DB:
            continue
        more = tuple(dict.fromkeys((*chosen, *damage.nodes)))
        if not leaves_some(more):
            break
        chosen = more
    return chosen


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
    """The tensors that a Concat joins to this one, whose pair gives all of them one scale; empty without a Concat."""
    maker = model.maker(tensor)
    while maker is not None and maker.op in REARRANGES:
        maker = model.maker(maker.inputs[0])
    return maker.inputs if maker is not None and maker.op == "Concat" else ()


def _min_max(values: Array) -> tuple[float, float]:
    wide = values.astype(np.float64)
    return float(wide.min()), float(wide.max())
