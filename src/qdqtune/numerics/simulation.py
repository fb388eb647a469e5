"""Runs variants of one model on ONNX Runtime in a worker process, to find out what placements do to outputs.

To simulate a placement, ONNX Runtime runs the Q/DQ model without fusing pairs. Engines round where the file says so,
and compute what they fuse at least as exactly, so their outputs differ from these far less than from the float model's.

ONNX Runtime as the target engine rounds more: between a pair in front of a convolution (or of a MaxPool and the like
before it) and one behind it, it also rounds the weights, per tensor. For this engine, the model is simulated after
these rewrites of the graph, with ONNX Runtime's integer Softmax. Weights have all 8 bits here: where products saturate
(see `engines.machine`), the engine may lose far more than predicted.
"""

from __future__ import annotations

import heapq
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from onnx import TensorProto, helper

from qdqtune.calibration import scales
from qdqtune.calibration.observe import Outputs, Session, limited, onnxruntime_session
from qdqtune.calibration.scales import Quantization, Range, Ranges
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.errors import BadModel, EngineRefused
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import Constant, Model, rebuild
from qdqtune.numerics.accuracy import accuracy, check_finite, is_finite, noisiest, sqnr_db
from qdqtune.numerics.scores import NO_SCORES, Scores, copies_in, scores_of
from qdqtune.placement.insertion import Inserter, quantized
from qdqtune.placement.possible import weight_at, weight_role
from qdqtune.placement.reading import dynamic_products_of
from qdqtune.placement.switches import (
    ERROR,
    POWER,
    SWITCH,
    Rounding,
    file_pairs,
    is_switched_at_reader,
    with_errors,
    with_file_pairs,
    with_roundings,
)
from qdqtune.placement.weight_only import BLOCK_OPSET, FormattedWeights
from qdqtune.types import (
    Accuracy,
    Deaf,
    Edge,
    Listener,
    NumericFormat,
    Placement,
    QType,
    Sample,
    WeightFormat,
    noise_of,
    sqnr_of,
)  # fmt: skip

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Sensitivities:
    """The relative noise (`search.costs.output_noise`) that rounding each tensor adds to the worst output: measured for
    those in `alone`; for others an estimate, their share of what several tensors were measured to add together."""

    noise: Mapping[str, float]
    alone: frozenset[str] = frozenset()


@dataclass
class Simulation:
    """Predicts the accuracy of placements of one model on `engine`, on some samples. A context manager; ONNX Runtime
    starts when the first accuracy is asked for. `asked` are the outputs that the user names as class scores. Methods
    raise EngineRefused if ONNX Runtime does not run a model, or outputs are not finite."""

    inserter: Inserter
    samples: Sequence[Sample]
    engine: str = ""
    execution: Execution = EXECUTION
    asked: Sequence[str] = ()
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def accuracy(self, placement: Placement) -> Accuracy:
        reference = self.reference
        outputs = self._outputs(self.inserter.insert(placement), placement.digest)
        return accuracy(reference, outputs, self.scores)

    @cached_property
    def scores(self) -> Scores:
        return scores_of(self.reference, self.asked, copies_in(self.inserter.model))

    @cached_property
    def reference(self) -> Outputs:
        return self._outputs(self.inserter.insert(Placement()), Placement().digest)

    def _outputs(self, model: Model, digest: str) -> Outputs:
        written = with_integer_softmax(model) if self.engine == "onnxruntime" else model
        outputs = self._session.outputs(written, f"simulated_{digest}", self.samples)
        check_finite(outputs)
        return outputs

    @cached_property
    def _session(self) -> Session:
        unpacked = sum(constant.nbytes for constant in self.inserter.insert(Placement()).large.values())
        options = {"fuse": False, "rewrite": self.engine == "onnxruntime"}
        return self._stack.enter_context(onnxruntime_session(self.execution, unpacked=unpacked, **options))


def with_integer_softmax(model: Model) -> Model:
    """The model with ONNX Runtime's integer Softmax in place of each DQ, Softmax, Q."""
    nodes = dict(enumerate(model.proto.graph.node))
    for node in model.nodes:
        before = model.maker(node.inputs[0]) if node.op == "Softmax" else None
        uses = model.uses(node.outputs[0])
        if before is None or len(uses) != 1 or uses[0].node < 0:
            continue
        behind = model.nodes[uses[0].node]
        if [(n.op, len(n.inputs)) for n in (before, behind)] == [("DequantizeLinear", 3), ("QuantizeLinear", 3)]:
            del nodes[node.index]
            nodes[behind.index] = helper.make_node(
                "QLinearSoftmax", [*before.inputs, *behind.inputs[1:]], [behind.outputs[0]], node.name,
                axis=node.attributes.get("axis", -1 if model.opset >= 13 else 1), opset=model.opset, domain=MICROSOFT,
            )  # fmt: skip
    if len(nodes) == len(model.nodes):
        return model
    changed = rebuild(model, list(nodes.values()), {})
    if all(o.domain != MICROSOFT for o in changed.proto.opset_import):
        changed.proto.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return Model(changed.proto, changed.large)


LEAST_DB = 40.0
"""The least SQNR between two models that compute the same but for roundings around Casts. Chosen, not measured."""


def check_stripped(stripped: Model, given: Model, session: Session, sample: Sample, name: str, instead: str) -> None:
    """Check `stripped`, the float model recovered from the Q/DQ model `given` of the file `name`: with all pairs put
    back, its outputs must be those of `given`. Not checked if ONNX Runtime cannot run the file, if its outputs vary
    between runs or are not finite, or if activations are quantized dynamically."""
    if any(True for _ in dynamic_products_of(given)):
        return
    try:
        once, again = session.outputs(given, "given", [sample, sample])
    except EngineRefused:
        return
    if not is_finite([once, again]):
        return
    if not all(np.array_equal(once[output], again[output]) for output in once):
        return
    pairs, _ = file_pairs(stripped, given)
    # Constants that the file has as integers stay floats: they are to be the same numbers. Behind an Identity, as
    # behind a DQ, ONNX Runtime does not pack them, so that it adds up products in the same order: another order moves
    # values across the steps of pairs, and some networks turn a few such steps into other outputs.
    same = (helper.make_node("Identity", [""], [""]),)
    pairs = tuple(
        p if any(node.op_type == "QuantizeLinear" for node in p.nodes) else replace(p, nodes=same, constants={})
        for p in pairs
    )
    try:
        outputs = session.outputs(with_file_pairs(stripped, pairs, given), "put_back", [sample])
    except EngineRefused as refused:
        if refused.is_transient:
            return
        how = f"they do not run: {refused}"
    else:
        judged = accuracy([once], outputs, NO_SCORES)
        noise = max(judged.noise, 0.0 if judged.agreement is None else 1 - judged.agreement)
        if is_finite(outputs) and noise <= noise_of(LEAST_DB):
            return
        how = f"outputs have {sqnr_of(noise):.1f} dB" if is_finite(outputs) else "outputs are NaN or infinite"
    what = f"{name} cannot be read as a float model with Q/DQ pairs"
    raise BadModel(f"{what}: with the pairs taken off and put back, {how}; {instead}")


# ---- what rounding each tensor alone does to the outputs: one build of the float model with a switch at every tensor.
# Blocks of neighbouring tensors are switched on together, and the block with the most noise is halved, until a number
# of inferences is spent. The tensors of a block that was not halved share its noise by their own errors.

MEASUREMENTS, FEW, SAMPLES = 256, 64, 4
"""Most blocks to measure, whatever the size of the model, and most samples for each; fewer samples if time allows fewer
than `FEW` blocks. In a detector each sample shows the noise of other tensors: those where its objects are found.
Chosen, not measured."""

INFERENCES = 400
"""Most inferences of `debug` for all measurements together. Chosen, not measured."""

CONSIDERED = 0.1
"""Share of the inferences for finding the noisiest samples, on which blocks are then measured: most of the noise of all
samples comes from these. Chosen, not measured."""

How = Quantization | WeightFormat | None
"""How a tensor is rounded: with fixed scales; as a weight in a weight format; or (None) to uint8 with a scale computed
at run time, as by DynamicQuantizeLinear."""

Block = tuple[int, int]
"""Neighbouring tensors, by number: the first, and one past the last."""

NONE: Block = (0, 0)

UNBOUNDED_NOISE = 1e3
"""The relative noise of outputs that are not finite or are missing."""


def sensitivities(
    model: Model,
    pairs: Mapping[Edge, How],
    samples: Sequence[Sample],
    *,
    floor: float = 0.0,
    listener: Listener | None = None,
    deadline: float | None = None,
    execution: Execution = EXECUTION,
    on_fewer: Callable[[], None] = lambda: None,
) -> Sensitivities:
    """What rounding each tensor of `pairs` does to the outputs.

    Runs on ONNX Runtime, on at most `SAMPLES` samples: those of the first ones whose outputs change most when all
    tensors are rounded. Tensors are measured in blocks, which are halved while they have more noise than `floor` and
    `time.monotonic` is before the `deadline`. If that leaves too little time for all, `on_fewer` is called.

    Raises:
        EngineRefused: ONNX Runtime does not run the model with switches, the float model's outputs are not finite, or
            any measurement met a transient failure, which says nothing about noise.
    """
    if not pairs:
        return Sensitivities({})
    if any(isinstance(how, WeightFormat) or (how and how.qtype is QType.UINT16) for how in pairs.values()):
        model = with_opset(model, BLOCK_OPSET)
    roundings = _roundings(model, pairs)
    count, listener = len(roundings), listener or Deaf()
    wanted, each = min(2 * count, MEASUREMENTS), min(SAMPLES, len(samples))
    switched = with_roundings(model, roundings, switched=True)
    # not fused: ONNX Runtime's fusions do not look outside of an If
    with onnxruntime_session(limited(execution, switched), fuse=False) as session:
        own = own_errors(session, model, roundings, samples[:each])
        run = session.load(switched, "switched")

        def outputs(block: Block, chosen: Sequence[Sample]) -> Outputs:
            switches = {f"{SWITCH}{i}": np.asarray(block[0] <= i < block[1]) for i in range(count)}
            return run({**sample, **switches} for sample in chosen)

        def rounded(block: Block, chosen: Sequence[Sample]) -> Outputs | None:
            """The outputs with a block of tensors rounded; None if they are not finite or ONNX Runtime fails."""
            try:
                found = outputs(block, chosen)
            except EngineRefused as refused:
                if refused.is_transient:
                    raise
                return None
            return found if is_finite(found) else None

        if deadline is not None:
            outputs(NONE, samples[:1])  # builds the model, so that the next inferences show how long one takes
        used = samples[:each]
        begun = time.monotonic()
        reference = outputs(NONE, used)
        seconds = max(time.monotonic() - begun, sys.float_info.epsilon)  # clocks may be coarser
        possible = wanted if deadline is None else int((deadline - time.monotonic()) / seconds)
        while possible < min(wanted, FEW) and each > 1:
            possible, each = 2 * possible, each // 2
            reference, used = reference[:each], used[:each]
        if possible < wanted:
            on_fewer()
            wanted = max(1, possible)
        seen = samples[: int(CONSIDERED * each * wanted / 2)]
        if len(seen) > each:
            exact, changed = outputs(NONE, seen), rounded((0, count), seen)
            if changed is not None:
                noisy = noisiest(exact, changed, each)
                reference, used = [exact[i] for i in noisy], [seen[i] for i in noisy]
        check_finite(reference)
        done = 0

        def noise_of(block: Block) -> float:
            nonlocal done
            found = rounded(block, used)
            done += 1
            listener.progress(done, wanted)
            noise = UNBOUNDED_NOISE if found is None else Accuracy(sqnr_db(reference, found)).noise
            return min(noise, UNBOUNDED_NOISE)

        blocks = halved(count, noise_of, wanted, floor, deadline)
    tensors = [rounding.tensor for rounding in roundings]
    shares = shared(blocks, own)
    alone = frozenset(tensors[start] for start, stop in blocks if stop - start == 1)
    return Sensitivities(dict(zip(tensors, shares, strict=True)), alone)


def own_errors(session: Session, model: Model, roundings: Sequence[Rounding], samples: Sequence[Sample]) -> list[float]:
    """The error of each rounding relative to its tensor, in power, on these samples; 0 where that is no number, and for
    all if ONNX Runtime does not run the model with an output for each."""
    try:
        outputs = session.outputs(with_errors(model, roundings), "errors", samples)
    except EngineRefused as refused:
        if refused.is_transient:
            raise
        return [0.0] * len(roundings)
    errors = [sum(float(each[f"{ERROR}{i}"]) for each in outputs) for i in range(len(roundings))]
    powers = [sum(float(each[f"{POWER}{i}"]) for each in outputs) for i in range(len(roundings))]
    ratios = (error / power if power > 0 else 0.0 for error, power in zip(errors, powers, strict=True))
    return [ratio if math.isfinite(ratio) else 0.0 for ratio in ratios]


def shared(blocks: Mapping[Block, float], own: Sequence[float]) -> list[float]:
    """The noise of each tensor: that of its block, shared in proportion to the tensors' `own` errors."""
    shares = [0.0] * len(own)
    for (start, stop), noise in blocks.items():
        parts = own[start:stop] if sum(own[start:stop]) > 0 else [1.0] * (stop - start)
        whole = sum(parts)
        shares[start:stop] = [noise * (part / whole) for part in parts]
    return shares


def halved(
    count: int, noise: Callable[[Block], float], most: int, floor: float = 0.0, deadline: float | None = None
) -> dict[Block, float]:
    """The noise of blocks that together have all of `count` tensors: the block with the most noise is halved until
    `most` blocks are measured, none has more noise than `floor`, or `time.monotonic` is past `deadline`."""
    blocks = [(-noise((0, count)), 0, count)]
    single: list[tuple[float, int, int]] = []
    done = 1
    while blocks and done + 2 <= most and -blocks[0][0] > floor:
        if deadline is not None and time.monotonic() > deadline:
            break
        block = heapq.heappop(blocks)
        _, start, stop = block
        if stop - start == 1:
            single.append(block)
            continue
        middle = (start + stop) // 2
        for half in ((start, middle), (middle, stop)):
            heapq.heappush(blocks, (-noise(half), *half))
        done += 2
    return {(start, stop): -negative for negative, start, stop in (*blocks, *single)}


# ---- roundings


def quantization(model: Model, ranges: Ranges, numbers: NumericFormat, edge: Edge, *, wide: bool) -> Quantization:
    """The quantization of an edge by its own range, even if placements share a scale there; in 16 bits if `wide`."""
    constant = model.constants.get(edge.tensor)
    if constant is None and wide:
        return scales.of_range(ranges.wide.get(edge.tensor, ranges.activations[edge.tensor]), numbers, wide=True)
    if constant is None:
        return scales.of_range(ranges.activations[edge.tensor], numbers)
    role = weight_role(model, edge)
    values = constant.array()
    if role is not None:
        return scales.of_weight(values.astype(np.float32), role.axis, numbers, ranges.weights.get(edge.tensor))
    own = Range(float(values.min(initial=0.0)), float(values.max(initial=0.0)))
    return scales.of_range(ranges.activations.get(edge.tensor, own), numbers)


def _roundings(model: Model, pairs: Mapping[Edge, How]) -> tuple[Rounding, ...]:
    """A rounding for each tensor, as its first edge has it; in graph order, so that neighbours share blocks."""
    edges: dict[str, list[Edge]] = {}
    for node in model.nodes:
        found = [edge for edge in node.into if edge in pairs]
        last = next((edge for edge in found if is_switched_at_reader(model, edge)), None)
        for edge in sorted(found, key=lambda edge: edge == last):
            edges.setdefault(edge.tensor, []).append(edge)
    for slot, tensor in enumerate(model.outputs):
        edge = Edge(tensor, "", slot)
        if edge in pairs:
            edges.setdefault(tensor, []).append(edge)
    return tuple(_rounding(model, tensor, tuple(at), pairs[at[0]]) for tensor, at in edges.items())


def _rounding(model: Model, tensor: str, edges: tuple[Edge, ...], how: How) -> Rounding:
    """Nodes that round a tensor as a Q/DQ model does; large weights are also stored as integers."""
    if how is None:
        results = ["integers", "scale", "zero_point"]
        dynamic = helper.make_node("DynamicQuantizeLinear", [""], results)
        return Rounding(tensor, tensor, edges, (dynamic, helper.make_node("DequantizeLinear", results, ["floats"])), {})
    if isinstance(how, WeightFormat):
        weight = weight_at(model, edges[0])
        assert weight is not None  # only weights have weight formats
        parts = FormattedWeights(model).parts(weight, how)
        back = helper.make_node("DequantizeLinear", list(parts), [""], axis=1 if how.block is None else 0)
        if how.block is not None:
            back.attribute.append(helper.make_attribute("block_size", how.block))
        is_turned = weight.transposed != (tensor in model.producers)
        turn = [helper.make_node("Transpose", [""], [""], perm=[1, 0])] if is_turned else []
        return Rounding(tensor, tensor, edges, (back, *turn), parts)
    zeros = np.full(how.scale.shape, how.zero_point, how.qtype.dtype)
    constants = {"scale": Constant.of(how.scale), "zero_point": Constant.of(zeros)}
    constant, dtype = model.large.get(tensor), model.tensors[tensor].dtype
    axis: dict[str, Any] = {} if how.axis is None else {"axis": how.axis}
    from_integers = helper.make_node("DequantizeLinear", ["integers", *constants], ["floats"], **axis)
    if constant is not None and constant.dtype == TensorProto.FLOAT:
        return Rounding(tensor, tensor, edges, (from_integers,), {"integers": quantized(constant, how), **constants})
    nodes = [helper.make_node("QuantizeLinear", ["", *constants], ["integers"], **axis), from_integers]
    if dtype != TensorProto.FLOAT:  # pairs round in float32 whatever the tensor's type
        ends = (helper.make_node("Cast", [""], [""], to=to) for to in (TensorProto.FLOAT, dtype))
        nodes = [next(ends), *nodes, next(ends)]
    return Rounding(tensor, tensor, edges, tuple(nodes), constants)
