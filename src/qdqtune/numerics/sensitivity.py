"""What rounding each tensor alone does to the outputs: one build of the float model with a switch at every tensor.

Blocks of neighbouring tensors are switched on together, and the block with the most noise is halved, until a number of
inferences is spent. The tensors of a block that was not halved share its noise.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration import scales
from qdqtune.calibration.observe import ModelRun, running_in_several
from qdqtune.calibration.scales import Quantization, Range, Ranges
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.pool import WorkerPool
from qdqtune.errors import EngineRefused, Failure
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import Constant, Model
from qdqtune.numerics.accuracy import is_finite, noisiest, sqnr_db
from qdqtune.numerics.simulation import InferenceCount, Outputs
from qdqtune.placement.insertion import quantized
from qdqtune.placement.possible import weight_at, weight_role
from qdqtune.placement.switches import SWITCH, Rounding, is_switched_at_reader, with_roundings
from qdqtune.placement.weight_only import BLOCK_OPSET, WeightOnlyWriter
from qdqtune.types import Accuracy, Deaf, Edge, Listener, NumericFormat, QType, Sample, WeightFormat


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight in a weight format: its `parts` by name, as `WeightOnlyWriter.parts` gives them, in blocks of `block`
    inputs (None: one scale a channel). `turned`: its reader takes it transposed."""

    parts: Mapping[str, Constant]
    block: int | None
    turned: bool


@dataclass(frozen=True)
class Effort:
    """How much is measured. Its numbers are chosen, not measured."""

    measurements: int = 256
    """The most blocks that are measured, whatever the size of the model."""
    inferences: int = 400
    """Inferences of all measurements together: blocks of small models, which are fewer, get up to `samples` samples."""
    samples: int = 4
    considered: float = 0.1
    """Share of the inferences that may be spent on finding the noisiest samples, on which blocks are then measured: the
    noise of all samples together is mostly that of the noisiest."""


EFFORT = Effort()

How = Quantization | QuantizedWeight | None
"""How a tensor is rounded: with fixed scales, as a weight in a weight format, or (None) to uint8 with the scale of its
own values, as DynamicQuantizeLinear finds it at run time."""

Block = tuple[int, int]
"""Neighbouring tensors, by number: the first, and one past the last."""

NONE: Block = (0, 0)

UNBOUNDED_NOISE = 1e3
"""Relative noise of a block whose outputs are not finite."""


def sensitivities(
    model: Model,
    pairs: Mapping[Edge, How],
    samples: Sequence[Sample],
    *,
    floor: float = 0.0,
    listener: Listener | None = None,
    deadline: float | None = None,
    workers: int = 1,
    budget: MemoryBudget | None = None,
    execution: Execution = EXECUTION,
    on_fewer: Callable[[], None] = lambda: None,
    effort: Effort | None = None,
) -> dict[str, float]:
    """The relative noise (`search.costs.output_noise`) that rounding each tensor of `pairs` brings to the worst output.

    Runs on ONNX Runtime, on at most `effort.samples` samples: those of the first ones whose outputs change most when
    everything is rounded.

    - `floor`: blocks with less noise are not halved.
    - `deadline`: no block is halved once `time.monotonic` is past it. Where it leaves time for fewer measurements
      than wanted, `on_fewer` is called.
    - `workers`: processes that measure a block each; the result is the same.
    - `budget`: of the memory that engines hold meanwhile.
    - `execution`: how the model is run.

    Raises:
        EngineRefused: ONNX Runtime does not run the model with switches, the float model's outputs are not finite, or
            any measurement met a transient failure, which says nothing about noise.
    """
    if not pairs:
        return {}
    if any(isinstance(how, QuantizedWeight) or (how and how.qtype is QType.UINT16) for how in pairs.values()):
        model = with_opset(model, BLOCK_OPSET)
    roundings = _roundings(model, pairs)
    switched = with_roundings(model, roundings, switched=True)
    # not fused: ONNX Runtime's fusions do not look outside of an If
    with running_in_several(switched, workers, execution, fuse=False, budget=budget) as runs:
        pool = WorkerPool(runs)
        plan = _plan(pool, len(roundings), samples, deadline, effort or EFFORT, on_fewer)
        measured = InferenceCount(listener or Deaf(), plan.measurements)
        noise = partial(_noise, pool, plan, measured)
        shares = halved(len(roundings), noise, Limits(plan.measurements, floor, deadline), workers)
    return {rounding.tensor: share for rounding, share in zip(roundings, shares, strict=True)}


# ---- measuring


@dataclass(frozen=True, eq=False)
class _Plan:
    """The samples to measure on, the float model's outputs for them, and how many blocks may be measured."""

    count: int
    samples: Sequence[Sample]
    reference: Outputs
    measurements: int


def _plan(
    pool: WorkerPool[ModelRun],
    count: int,
    samples: Sequence[Sample],
    deadline: float | None,
    effort: Effort,
    on_fewer: Callable[[], None],
) -> _Plan:
    wanted = min(2 * count, effort.measurements)
    each = max(1, min(effort.samples, effort.inferences // wanted))
    outputs = partial(_outputs, run=pool.first)
    if deadline is not None:
        outputs(count, NONE, samples[:1])  # builds the model, so that the next inferences show how long one takes
    begun = time.monotonic()
    reference = outputs(count, NONE, used := samples[:each])
    seconds = max(time.monotonic() - begun, sys.float_info.epsilon)  # clocks may be coarser
    possible = wanted if deadline is None else len(pool) * int((deadline - time.monotonic()) / seconds)
    if possible < wanted:
        on_fewer()
        wanted = max(1, possible)
    elif len(seen := samples[: int(effort.considered * each * wanted / 2)]) > each:
        try:
            exact, changed = outputs(count, NONE, seen), outputs(count, (0, count), seen)
        except EngineRefused as refused:
            if refused.is_transient:
                raise
        else:
            if is_finite(changed):
                chosen = noisiest(exact, changed, each)
                reference, used = [exact[i] for i in chosen], [seen[i] for i in chosen]
    if not is_finite(reference):
        raise EngineRefused(Failure("output", "outputs of the float model are NaN or infinite"))
    return _Plan(count, used, reference, wanted)


def _outputs(count: int, block: Block, samples: Iterable[Sample], run: ModelRun) -> Outputs:
    """The outputs of the model with the switches of a block on and the others of all `count` off."""
    switches = {f"{SWITCH}{i}": np.asarray(block[0] <= i < block[1]) for i in range(count)}
    return run({**sample, **switches} for sample in samples)


def _noise(pool: WorkerPool[ModelRun], plan: _Plan, measured: InferenceCount, blocks: Sequence[Block]) -> list[float]:
    """The relative noise of each block, measured side by side."""
    noises = [UNBOUNDED_NOISE] * len(blocks)
    jobs = [partial(_noise_of, plan, block) for block in blocks]
    for number, noise in pool.results(jobs):
        measured.add(1)
        noises[number] = noise
    return noises


def _noise_of(plan: _Plan, block: Block, run: ModelRun) -> float:
    try:
        rounded = _outputs(plan.count, block, plan.samples, run)
    except EngineRefused as refused:
        if refused.is_transient:
            raise
        return UNBOUNDED_NOISE
    return (
        min(Accuracy(sqnr_db(plan.reference, rounded)).noise, UNBOUNDED_NOISE)
        if is_finite(rounded)
        else UNBOUNDED_NOISE
    )


@dataclass(frozen=True)
class Limits:
    """When halving ends: after so many `measurements`, below the noise `floor`, or when `time.monotonic` is past
    `deadline`."""

    measurements: int
    floor: float = 0.0
    deadline: float | None = None


def halved(
    count: int, noise: Callable[[Sequence[Block]], Sequence[float]], limits: Limits, width: int = 1
) -> list[float]:
    """The noise of each of `count` tensors, by halving the block with the most noise until `limits` end it.

    Where `width` blocks are measured at a time, the halves of blocks that are likely next are measured as well; those
    that turn out not to be needed do not count as measurements.
    """
    blocks = [(-noise([(0, count)])[0], 0, count)]
    single: list[tuple[float, int, int]] = []
    known: dict[Block, float] = {}
    done = 1
    while blocks and done + 2 <= limits.measurements and -blocks[0][0] > limits.floor:
        if limits.deadline is not None and time.monotonic() > limits.deadline:
            break
        if not known.keys() >= (halves := _halves(blocks[0])):
            ahead = min(-(-width // 2), (limits.measurements - done) // 2)
            likely = (half for block in heapq.nsmallest(ahead, blocks) for half in sorted(_halves(block)))
            wanted = [half for half in likely if half not in known]
            known |= dict(zip(wanted, noise(wanted), strict=True))
        block = heapq.heappop(blocks)
        if not halves:
            single.append(block)
            continue
        for half in halves:
            heapq.heappush(blocks, (-known[half], *half))
        done += 2
    shares = [0.0] * count
    for negative, start, stop in (*blocks, *single):
        shares[start:stop] = [-negative / (stop - start)] * (stop - start)
    return shares


def _halves(block: tuple[float, int, int]) -> set[Block]:
    """The halves of a block, which comes with its noise; none of a single tensor."""
    _, start, stop = block
    middle = (start + stop) // 2
    return {(start, middle), (middle, stop)} if stop - start > 1 else set()


# ---- roundings


def quantization(
    model: Model, ranges: Ranges, numbers: NumericFormat, edge: Edge, *, wide: bool = False
) -> Quantization:
    """The quantization of an edge by its own range, if `wide` in 16 bits; in `placement.quantizations` some tensors
    share a scale."""
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


def quantized_weights(model: Model, weight_formats: Mapping[Edge, WeightFormat]) -> dict[Edge, QuantizedWeight]:
    """By edge, the weight as candidates have it in its weight format."""
    writer, found = WeightOnlyWriter(model), {}
    for edge, weight_format in weight_formats.items():
        weight = weight_at(model, edge)
        assert weight is not None  # only weights have weight formats
        turned = weight.transposed != (edge.tensor in model.producers)
        found[edge] = QuantizedWeight(writer.parts(weight, weight_format), weight_format.block, turned)
    return found


def _roundings(model: Model, pairs: Mapping[Edge, How]) -> tuple[Rounding, ...]:
    """A rounding for each tensor, as its first edge has it, in graph order: neighbours share blocks."""
    edges: dict[str, list[Edge]] = {}
    for node in model.nodes:
        found = [edge for edge in node.into if edge in pairs]
        last = next((edge for edge in found if is_switched_at_reader(model, edge)), None)
        for edge in (*(e for e in found if e != last), *([] if last is None else [last])):
            edges.setdefault(edge.tensor, []).append(edge)
    for slot, tensor in enumerate(model.outputs):
        if (edge := Edge(tensor, "", slot)) in pairs:
            edges.setdefault(tensor, []).append(edge)
    return tuple(_rounding(model, tensor, tuple(at), pairs[at[0]]) for tensor, at in edges.items())


def _rounding(model: Model, tensor: str, edges: tuple[Edge, ...], how: How) -> Rounding:
    """Nodes that round a tensor as a candidate does, where a large weight comes as integers, too."""
    if how is None:
        parts = ["integers", "scale", "zero_point"]
        both = (
            helper.make_node("DynamicQuantizeLinear", [""], parts),
            helper.make_node("DequantizeLinear", parts, ["floats"]),
        )
        return Rounding(tensor, tensor, edges, both, {})
    if isinstance(how, QuantizedWeight):
        return Rounding(tensor, tensor, edges, tuple(_from_integers(how)), how.parts)
    zeros = np.full(how.scale.shape, how.zero_point, scales.NUMPY_TYPE[how.qtype])
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


def _from_integers(weight: QuantizedWeight) -> list[onnx.NodeProto]:
    """Nodes that make floats of a weight's integers."""
    nodes = [helper.make_node("DequantizeLinear", list(weight.parts), [""], axis=1 if weight.block is None else 0)]
    if weight.block is not None:
        nodes[0].attribute.append(helper.make_attribute("block_size", weight.block))
    if weight.turned:
        nodes.append(helper.make_node("Transpose", [""], [""], perm=[1, 0]))
    return nodes
