"""Ranges of a placement, and biases that keep its outputs close to the float model's.

Biases are corrected as in Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv
1906.04721, section 4.2): rounded weights and clipped inputs shift the mean of an output channel, and the bias
compensates that. Here the means are those of calibration samples.

Whether corrections help is judged on the outputs and, where an output comes from a Softmax or the like, also on the
input of that. Behind a confident Softmax all errors look small, and a few uncertain samples decide. In front of it
every sample counts, but so do the scores of classes that are out of the question. Both together are a stable measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.observe import MOST_OPTIMIZED, ModelRun, Outputs, Session, limited, onnxruntime_session
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import Calibration, Range, Ranges
from qdqtune.engines.execution import Execution
from qdqtune.errors import EngineFailure, EngineRefused
from qdqtune.graph.model import Constant, Model, rebuild
from qdqtune.graph.operators import COPIES, is_float, work
from qdqtune.numerics.accuracy import power
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import BiasedLayer, biased_layers
from qdqtune.types import Array, Deaf, Edge, Listener, NumericFormat, Placement, Sample

BIAS_SAMPLES = 64
"""Most calibration samples used to correct biases. `MOST_SECONDS` may allow fewer, but not below `LEAST_SAMPLES`."""

BIAS_RUNS = 4
"""Inferences for each of these samples: float; quantized; with centred means; with corrected biases."""

LEAST_SAMPLES = 4

MOST_SECONDS, WORK_A_SECOND = 15.0, 2e10
"""Seconds that all runs together may take, and how many multiplications two slow cores do in one."""

OVERHEAD = 1e6
"""Multiplications in the time that an operator with a pair takes to start and to round."""


def fitted(
    prepared: Prepared,
    how: Calibration,
    numbers: NumericFormat,
    placed: Callable[[Ranges], Placement],
    listener: Listener | None = None,
    *,
    bias_samples: Callable[[float], int] = lambda _: BIAS_SAMPLES,
    only_placed: bool = False,
    kept: Callable[[Callable[[], Ranges]], Ranges] = lambda find: find(),
) -> Ranges:
    """Ranges by `how`, with corrected biases where these bring the outputs closer to the float model's.

    `placed` gives the placement for ranges; a placement of fewer pairs uses the same ranges. With `only_placed` only
    its tensors are calibrated, which saves time. `bias_samples` returns how many samples may be used to correct biases
    if each takes so many seconds (0: no correction); it is called after calibration, and after the float model ran.
    `kept` returns what its argument finds, the ranges before biases are corrected, now or in an earlier session.
    """
    model, listener = prepared.shaped, listener or Deaf()
    tensors = None
    if only_placed:
        with_pairs = {edge.tensor for edge in placed(some_ranges(model))}
        tensors = tuple(tensor for tensor in candidate_tensors(model) if tensor in with_pairs)
    listener.stage(f"calibrating on {prepared.samples.origin}")
    ranges = kept(lambda: prepared.ranges(how, numbers, tensors))
    if tensors and not all(tensor in ranges.activations for tensor in tensors):
        ranges = prepared.ranges(how, numbers)  # rules may place others in their stead
    ranges = with_known_ranges(model, ranges, numbers)
    placement = placed(ranges)
    if not (how.bias_correction and biased_layers(model, placement) and compared_values(model)):
        return ranges
    return _with_biases(prepared, numbers, ranges, placement, listener, bias_samples)


def some_ranges(model: Model) -> Ranges:
    """Placeholder ranges before calibration, which only show which tensors can have one."""
    return Ranges(dict.fromkeys(candidate_tensors(model), Range(-1.0, 1.0)))


def with_wide(prepared: Prepared, found: Ranges, numbers: NumericFormat) -> Ranges:
    """The ranges `found`, and ranges of all values for activations in 16 bits if the engine's format has these."""
    if numbers.wide is None:
        return found
    return replace(found, wide=prepared.ranges(Calibration("minmax"), numbers).activations)


def _with_biases(
    prepared: Prepared, numbers: NumericFormat, ranges: Ranges, placement: Placement, listener: Listener,
    bias_samples: Callable[[float], int],
) -> Ranges:  # fmt: skip
    """`ranges` with corrected biases, if there is time and the outputs gain. To judge that, each sample runs with
    biases that were computed from the other samples."""
    model = prepared.shaped
    most = bias_samples(_bias_seconds(model))
    if not most:
        return ranges
    listener.stage("correcting biases")
    samples = prepared.calibration.spread(_affordable_samples(model, most))
    try:
        with bias_session(model, placement, prepared.execution) as session:
            begun = time.monotonic()
            biased = BiasedPlacement(session, model, placement, numbers, ranges, samples, listener)
            if not bias_samples(BIAS_RUNS * (time.monotonic() - begun) / len(samples)):
                return ranges
            offsets = biased.offsets()
            return replace(ranges, shifts=biased.shifts(offsets)) if biased.db(offsets) > biased.db() else ranges
    except EngineRefused as refused:
        if refused.is_transient:  # biases must not depend on a crash, a timeout or a lack of memory
            text = f"biases cannot be corrected: {refused}. Try again, or switch `bias_correction` off"
            raise EngineFailure(text) from refused
        return ranges


def bias_session(model: Model, placement: Placement, execution: Execution) -> AbstractContextManager[Session]:
    is_fused = len(model.nodes) + 2 * len(placement) <= MOST_OPTIMIZED
    return onnxruntime_session(limited(execution, model), fuse=is_fused, fuse_pairs=False)


def inferences(model: Model, how: Calibration, samples: int) -> int:
    """About how many inferences of the quantized model `fitted` needs, besides calibration on `samples` samples."""
    return BIAS_RUNS * min(samples, _affordable_samples(model, BIAS_SAMPLES)) if how.bias_correction else 0


def _affordable_samples(model: Model, most: int) -> int:
    return max(LEAST_SAMPLES, min(most, int(MOST_SECONDS / _bias_seconds(model))))


def _bias_seconds(model: Model) -> float:
    return BIAS_RUNS * sum(work(model, node) + OVERHEAD for node in model.nodes) / WORK_A_SECOND


def with_known_ranges(model: Model, ranges: Ranges, numbers: NumericFormat) -> Ranges:
    """`ranges` with [0, 1] for outputs of Softmax that reach 0.5 on the samples, in uint8: as most values are near
    zero, calibration would clip the few large ones, which matter. Where attention spreads over hundreds of positions,
    no value comes near 1, and steps of 1/255 would be too coarse."""
    if numbers.symmetric:
        return ranges
    made = {n.outputs[0] for n in model.nodes if n.op == "Softmax" and not n.domain}
    known = {t: Range(0.0, 1.0) for t, r in ranges.activations.items() if t in made and r.high >= 0.5}
    return replace(ranges, activations={**ranges.activations, **known})


SQUASHES = frozenset({"ArgMax", "ArgMin", "HardSigmoid", "Hardmax", "LogSoftmax", "Sigmoid", "Softmax", "TopK"})
"""Operators that turn scores into probabilities or decisions."""

SHIFTS, MOVES = "__shifts", "__moves"
"""An input and an output with a number for each channel of all layers, one layer after the other."""

Mode = Literal["means", "centred", "shifted"]
"""What a model does to the channels of layers.

- means: nothing; moves are their means.
- shifted: it adds the shifts.
- centred: it changes their means to the shifts, sample by sample; moves are by how much. Later layers then see right
  means, so one run over a sample serves all layers.
"""


class BiasedPlacement:
    """A placement of one model with ranges, run on some samples with variable biases; methods may raise EngineRefused.

    Offsets of biases are [samples, channels]: the channels of all `layers` (at least one) that can have a bias."""

    def __init__(
        self, session: Session, model: Model, placement: Placement, numbers: NumericFormat, ranges: Ranges,
        samples: Sequence[Sample], listener: Listener,
    ) -> None:  # fmt: skip
        self.layers = biased_layers(model, placement)
        self._session, self._samples, self._listener, self._inferences = session, samples, listener, 0
        self._model, self._quantized = model, Inserter(model, ranges, numbers).insert(placement)
        self._groups = compared_values(model)
        self._exact = self._ran(session.outputs(self._written("means"), "means", samples))
        self._means = np.stack([outputs.pop(MOVES) for outputs in self._exact])

    def db(self, offsets: Array | None = None) -> float:
        """SQNR in dB over all samples: the mean over an output's compared values (see `compared_values`), then the
        least of all outputs; infinite if equal. With `offsets`, biases for a sample are corrected by those of the
        others."""
        shifts = np.zeros_like(self._means) if offsets is None else shifts_by_others(offsets)
        actual = self._ran(self._shifted(self._fed(shifts)))
        signal, noise = np.zeros((2, sum(map(len, self._groups))))
        with np.errstate(all="ignore"):
            for expected, outputs in zip(self._exact, actual, strict=True):
                signal += [power(values) for values in expected.values()]
                noise += [power(values, outputs[name]) for name, values in expected.items()]
            noise = np.where(np.isfinite(noise), noise, np.inf)
            single = 10 * np.log10(np.maximum(signal, np.finfo(np.float64).tiny) / noise)
        ends = np.cumsum([len(group) for group in self._groups])
        return min(float(np.mean(part)) for part in np.split(single, ends[:-1]))

    def offsets(self) -> Array:
        """The difference of each channel's mean from the float model, by sample: [samples, channels]."""
        found = self._ran(self._session.outputs(self._written("centred"), "centred", self._fed(self._means)))
        return np.stack([outputs[MOVES] for outputs in found])

    def shifts(self, offsets: Array) -> Mapping[str, tuple[float, ...]]:
        """The corrections of biases that follow from the offsets of all samples, as `Ranges` hold them."""
        ends = np.cumsum([layer.channels for layer in self.layers])
        parts = np.split(shrunk_mean(offsets.astype(np.float64)).astype(np.float32), ends[:-1])
        by_layer = zip(self.layers, parts, strict=True)
        return {layer.node: tuple(part.tolist()) for layer, part in by_layer if np.isfinite(part).all()}

    @cached_property
    def _shifted(self) -> ModelRun:
        return self._session.load(self._written("shifted"), "shifted")

    def _ran(self, outputs: Outputs) -> Outputs:
        self._inferences += len(outputs)
        self._listener.progress(self._inferences, BIAS_RUNS * len(self._samples))
        return outputs

    def _fed(self, shifts: Iterable[Array]) -> list[Sample]:
        fed = zip(self._samples, shifts, strict=True)
        return [{**sample, SHIFTS: shift.astype(np.float32)} for sample, shift in fed]

    def _written(self, mode: Mode) -> Model:
        model = self._model if mode == "means" else self._quantized
        shown = [
            model.nodes[model.index_of[edge.node]].inputs[edge.index] if edge.node else edge.tensor
            for edge in (chain.from_iterable(self._groups) if mode != "centred" else ())
        ]
        dtypes = [self._model.tensors[layer.result].dtype for layer in self.layers]
        return _with_moves(model, self.layers, dtypes, mode, shown)


def _with_moves(
    model: Model, layers: Sequence[BiasedLayer], dtypes: Sequence[int], mode: Mode, shown: Sequence[str]
) -> Model:
    """`model` with bias corrections as an input; outputs are the values of the tensors `shown`, then the means or
    offsets of channels, see `Mode`. `dtypes` are the types of the layers' results."""
    numbers = {layer.node: i for i, layer in enumerate(layers)}
    ends = np.cumsum([layer.channels for layer in layers]).tolist()
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, Constant] = {}
    moves: list[str] = []

    def add(op: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        result = result or f"__{op}_{len(nodes)}"
        nodes.append(helper.make_node(op, inputs, [result], f"__node_{len(nodes)}", **attributes))
        return result

    def integers(values: Sequence[int]) -> str:
        name = f"__integers_{len(constants)}"
        constants[name] = Constant.of(np.asarray(values, np.int64))
        return name

    def mean(layer: BiasedLayer, dtype: int, values: str) -> str:
        if dtype != TensorProto.FLOAT:
            values = add("Cast", values, to=TensorProto.FLOAT)
        if layer.rank is None:
            values = add("Reshape", values, integers([-1, layer.channels]))
        axes = [i for i in range(layer.rank or 2) if i != 1]
        if model.opset >= 18:
            return add("ReduceMean", values, integers(axes), keepdims=0)
        return add("ReduceMean", values, axes=axes, keepdims=0)

    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        copy = deepcopy(proto)
        nodes.append(copy)
        if node.name not in numbers:
            continue
        number, result = numbers[node.name], node.outputs[0]
        layer, dtype = layers[number], dtypes[number]
        if mode == "means":
            moves.append(mean(layer, dtype, result))
            continue
        copy.output[0] = f"__before_{number}"
        move = add("Slice", SHIFTS, integers([ends[number] - layer.channels]), integers([ends[number]]))
        if mode == "centred":
            move = add("Sub", move, mean(layer, dtype, copy.output[0]))
            moves.append(move)
        if layer.rank is not None:
            move = add("Reshape", move, integers([1, layer.channels] + [1] * (layer.rank - 2)))
        if dtype != TensorProto.FLOAT:
            move = add("Cast", move, to=dtype)
        add("Add", copy.output[0], move, result=result)
    outputs = [add("Identity", tensor, result=f"__shown_{i}") for i, tensor in enumerate(shown)]
    if moves:
        outputs.append(add("Concat", *moves, result=MOVES, axis=0))
    written = rebuild(model, nodes, constants)
    graph = written.proto.graph
    if mode != "means":
        graph.input.append(helper.make_tensor_value_info(SHIFTS, TensorProto.FLOAT, ends[-1:]))
    del graph.output[:]
    for name in outputs:
        graph.output.add(name=name)  # ONNX Runtime infers the rest
    written.proto.ir_version = max(written.proto.ir_version, 7)
    return Model(written.proto, written.large)


def shifts_by_others(offsets: Array) -> list[Array]:
    """For each sample, the corrections of biases that follow from the offsets of all other samples, [channels]."""
    exact = offsets.astype(np.float64)
    others = [np.delete(exact, i, axis=0) if len(exact) > 1 else exact for i in range(len(exact))]
    return [np.nan_to_num(shrunk_mean(o)) for o in others]


def shrunk_mean(offsets: Array) -> Array:
    """What to add to biases, [channels], from the offsets [samples, channels]. The mean of few samples is partly
    chance, so it is shrunk by the share of its square that its own standard error explains (positive-part estimator of
    James and Stein, 1961, for each channel)."""
    shift = offsets.mean(axis=0)
    if len(offsets) > 1:
        error = offsets.var(axis=0, ddof=1) / len(offsets)
        with np.errstate(divide="ignore", invalid="ignore"):
            kept = np.where(shift == 0, 0.0, np.maximum(1 - error / np.square(shift), 0))
        shift = shift * kept
    return np.asarray(shift)


def compared_values(model: Model) -> tuple[tuple[Edge, ...], ...]:
    """The float values to compare for each output: itself, and the input of a squashing operator (Softmax ...) at its
    end. Outputs without float values are left out."""
    found = []
    for slot, output in enumerate(model.outputs):
        edge = Edge(output, "", slot)
        found.append(tuple(e for e in dict.fromkeys((edge, _scores(model, edge))) if is_float(model, e.tensor)))
    return tuple(edges for edges in found if edges)


def _scores(model: Model, edge: Edge) -> Edge:
    """The input of the chain of squashing operators that ends at `edge`; `edge` itself if there is none."""
    best = edge
    while (node := model.maker(edge.tensor)) is not None:
        if node.domain or node.op not in COPIES | SQUASHES | {"Div"}:
            break
        if node.op == "Div":  # a Softmax written as Exp and Div
            node = model.maker(node.inputs[0])
            if node is None or node.op != "Exp":
                break
        edge = node.into[0]
        best = edge if node.op in SQUASHES | {"Exp"} else best
    return best
