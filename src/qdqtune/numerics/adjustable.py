"""What ranges and biases do to the outputs of one placement: its model is built once for all of them that are tried.

Two things are compared: the outputs, and the values in front of a Softmax or the like at the end. Behind a confident
Softmax all errors look small, and a few uncertain samples decide. In front of it every sample counts, but so do the
scores of classes that are out of the question. Both together are a stable measure.

Biases are corrected as in Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv
1906.04721, section 4.2): rounded weights and clipped inputs move the mean of an output channel, which the bias takes
back. Here the means are those of calibration samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np

from qdqtune.calibration.observe import MOST_OPTIMIZED
from qdqtune.calibration.scales import Ranges
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.memory import MemoryBudget
from qdqtune.errors import EngineFailure
from qdqtune.graph.model import Model
from qdqtune.graph.operators import COPIES, is_float
from qdqtune.numerics.adjustable_model import CHANNELS, MOVES, Mode, adjustable_model, feeds
from qdqtune.numerics.sessions import Loaded, Outputs, Session, onnxruntime_session
from qdqtune.placement.possible import biased_layers
from qdqtune.placement.quantizations import Quantizer
from qdqtune.types import Array, Edge, Failure, NumericFormat, Placement, Sample

T = TypeVar("T")

SQUASHES = frozenset({"ArgMax", "ArgMin", "HardSigmoid", "Hardmax", "LogSoftmax", "Sigmoid", "Softmax", "TopK"})
"""Operators that turn scores into probabilities or decisions."""


@dataclass(frozen=True, eq=False)
class OutputNoise:
    """Signal and noise power, [samples, compared values]; noise is infinite where values are not finite. The values of
    each output are neighbours: `parts` says how many there are of each."""

    signal: Array
    noise: Array
    parts: tuple[int, ...]

    def db(self) -> float:
        """SQNR in dB over all samples: for each output the mean over its values, then the least of all outputs;
        infinite where nothing is lost."""
        signal, noise = (a.sum(axis=0) for a in (self.signal, self.noise))
        with np.errstate(divide="ignore", invalid="ignore"):
            single = 10 * np.log10(np.maximum(signal, np.finfo(np.float64).tiny) / noise)
        return min(float(np.mean(part)) for part in np.split(single, np.cumsum(self.parts)[:-1]))


class NotRunnableError(Exception):
    """ONNX Runtime does not run the model with pairs."""


class AdjustablePlacement:
    """A placement of one model, run on some samples with any ranges and biases.

    `ranges` only decide how constants are rounded. Offsets of biases are arrays [samples, channels]: a row for each
    sample, and in it the channels of all `layers` that can have a bias, one after the other. `ran` is told
    the number of inferences after each run on all samples.

    Raises:
        NotRunnableError: from all methods that run the model.
    """

    def __init__(
        self, session: Session, model: Model, placement: Placement, numbers: NumericFormat, ranges: Ranges,
        samples: Sequence[Sample], ran: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.layers = biased_layers(model, placement)
        self._session, self._ran = session, ran
        self._model, self._placement, self._samples = model, placement, samples
        groups = compared_values(model)
        self._shown, self._parts = tuple(chain.from_iterable(groups)), tuple(map(len, groups))
        self._quantizer = Quantizer(model, ranges, numbers)
        self._activations, self._constants = self._quantizer.scales(placement)
        self._loaded: dict[Mode, Loaded] = {}
        self._exact = _checked(session.outputs(self._written("means"), "means", samples))
        ran(len(samples))
        self._signals = [{n: _power(e) for n, e in outputs.items() if n != MOVES} for outputs in self._exact]
        self._means = [outputs.pop(MOVES) for outputs in self._exact] if self.layers else []

    @property
    def has_outputs(self) -> bool:
        """Whether an output is float: else there is nothing to compare."""
        return bool(self._shown)

    def noise(self, ranges: Ranges, offsets: Array | None = None) -> OutputNoise:
        """The noise that `ranges` bring to the outputs. With `offsets`, the biases for each sample are corrected by the
        offsets of all others."""
        given = self._scales(ranges)
        found = self._run("shifted", [given | {CHANNELS: shift} for shift in self._shifts_by_others(offsets)])
        rows = []
        for exact, signals, actual in zip(self._exact, self._signals, found, strict=True):
            with np.errstate(all="ignore"):
                rows.append([(signals[n], _power(exact[n], actual[n])) for n in exact])
        signal, noise = np.moveaxis(np.array(rows), 2, 0)
        return OutputNoise(signal, np.where(np.isfinite(noise), noise, np.inf), self._parts)

    def offsets(self, ranges: Ranges) -> Array:
        """By how much the means of channels are off with `ranges`, [samples, channels]."""
        if not self.layers:
            return np.zeros((len(self._samples), 0), np.float32)
        given = self._scales(ranges)
        means = [given | {CHANNELS: mean} for mean in self._means]
        return np.stack([outputs[MOVES] for outputs in self._run("centred", means)])

    def shifts(self, offsets: Array) -> Mapping[str, tuple[float, ...]]:
        """The corrections that the offsets of all samples give, as `Ranges` hold them."""
        shift = shrunk_mean(offsets.astype(np.float64)).astype(np.float32)
        ends = np.cumsum([layer.channels for layer in self.layers])
        parts = zip(self.layers, np.split(shift, ends[:-1]), strict=True) if self.layers else ()
        return {layer.node: tuple(part.tolist()) for layer, part in parts if np.isfinite(part).all()}

    def _shifts_by_others(self, offsets: Array | None) -> list[Array]:
        count = len(self._samples)
        if offsets is None:
            return [np.zeros(sum(layer.channels for layer in self.layers), np.float32)] * count
        exact = offsets.astype(np.float64)
        others = [np.delete(exact, i, axis=0) if count > 1 else exact for i in range(count)]
        return [np.nan_to_num(shrunk_mean(o)).astype(np.float32) for o in others]

    def _scales(self, ranges: Ranges) -> dict[str, Array]:
        activations, _ = self._quantizer.with_ranges(ranges).scales(self._placement)
        return feeds({tensor: activations[tensor] for tensor in self._activations})

    def _run(self, mode: Mode, added: Sequence[Mapping[str, Array]]) -> Outputs:
        if mode not in self._loaded:
            self._loaded[mode] = _checked(self._session.load(self._written(mode), mode))
        given = [{**sample, **more} for sample, more in zip(self._samples, added, strict=True)]
        outputs = _checked(self._loaded[mode](given))
        self._ran(len(outputs))
        return outputs

    def _written(self, mode: Mode) -> Model:
        shown = () if mode == "centred" else self._shown
        if mode == "means":
            return adjustable_model(self._model, {}, {}, frozenset(), self.layers, mode, shown)
        paired = self._placement.edges
        return adjustable_model(self._model, self._activations, self._constants, paired, self.layers, mode, shown)


@contextmanager
def adjustable_placement(
    model: Model,
    placement: Placement,
    numbers: NumericFormat,
    ranges: Ranges,
    samples: Sequence[Sample],
    ran: Callable[[int], None] = lambda _: None,
    execution: Execution = EXECUTION,
) -> Iterator[AdjustablePlacement]:
    """An `AdjustablePlacement` on ONNX Runtime.

    Raises:
        NotRunnableError: ONNX Runtime does not run the float model.
    """
    written = len(model.nodes) + 2 * len(placement)
    memory = MemoryBudget.for_model(sum(constant.nbytes for constant in model.large.values()))
    options = {"fuse": written <= MOST_OPTIMIZED, "fuse_pairs": False}
    with onnxruntime_session(execution, memory=memory, **options) as session:
        yield AdjustablePlacement(session, model, placement, numbers, ranges, samples, ran)


def _checked(found: T | Failure) -> T:
    """What was found.

    Raises:
        NotRunnableError: ONNX Runtime refuses the model.
        EngineFailure: it crashed, took too long, or ran out of memory: ranges must not depend on that.
    """
    if not isinstance(found, Failure):
        return found
    if not found.is_transient:
        raise NotRunnableError(found.reason)
    raise EngineFailure(f"biases cannot be corrected: {found.reason}. Try again, or switch `bias_correction` off")


def _power(values: Array, others: Array | None = None) -> float:
    """The sum of squares, or of squared differences, in float64 without copies in that type of both."""
    exact = values.astype(np.float64) if others is None else np.subtract(values, others, dtype=np.float64)
    flat = exact.reshape(-1)
    return float(flat @ flat)


def shrunk_mean(offsets: Array) -> Array:
    """What to add to a bias, from the offset of each sample: [samples, channels] to [channels].

    The mean of few samples is partly chance: it is shrunk by the share of its square that its own standard error
    explains (the positive-part estimator of James and Stein, 1961, channel by channel).
    """
    shift = offsets.mean(axis=0)
    if len(offsets) > 1:
        error = offsets.var(axis=0, ddof=1) / len(offsets)
        with np.errstate(divide="ignore", invalid="ignore"):
            kept = np.where(shift == 0, 0.0, np.maximum(1 - error / np.square(shift), 0))
        shift = shift * kept
    return np.asarray(shift)


def compared_values(model: Model) -> tuple[tuple[Edge, ...], ...]:
    """The float values that are compared for each output: itself, and the input of squashing operators at its end.
    Outputs without float values are left out."""
    found = []
    for slot, output in enumerate(model.outputs):
        edge = Edge(output, "", slot)
        found.append(tuple(e for e in dict.fromkeys((edge, _scores(model, edge))) if is_float(model, e.tensor)))
    return tuple(edges for edges in found if edges)


def _scores(model: Model, edge: Edge) -> Edge:
    """The input of the first in a row of squashing operators that ends at `edge`; itself if there is none."""
    best = edge
    while (node := model.maker(edge.tensor)) is not None:
        if node.op == "ZipMap":  # it makes maps of a tensor
            edge = best = node.into[0]
            continue
        if node.domain or node.op not in COPIES | SQUASHES | {"Div"}:
            break
        if node.op == "Div":  # a Softmax written as Exp and Div
            node = model.maker(node.inputs[0])
            if node is None or node.op != "Exp":
                break
        edge = node.into[0]
        best = edge if node.op in SQUASHES | {"Exp"} else best
    return best
