"""What rounding each tensor alone does to the outputs: one build of the float model with a switch at every tensor.

Blocks of neighbouring tensors are switched on together, and the block with the most noise is halved, until a number of
inferences is spent. The tensors of a block that was not halved share its noise.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from qdqtune.calibration import scales
from qdqtune.calibration.observe import Outputs, running
from qdqtune.calibration.scales import Quantization, Range, Ranges
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.memory import MemoryBudget
from qdqtune.errors import EngineRefused
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import Constant, Model
from qdqtune.numerics.accuracy import check_finite, is_finite, noisiest, sqnr_db
from qdqtune.placement.insertion import quantized
from qdqtune.placement.possible import weight_at, weight_role
from qdqtune.placement.switches import SWITCH, Rounding, is_switched_at_reader, with_roundings
from qdqtune.placement.weight_only import BLOCK_OPSET, FormattedWeights
from qdqtune.types import Accuracy, Deaf, Edge, Listener, NumericFormat, QType, Sample, WeightFormat

MEASUREMENTS = 256
"""The most blocks that are measured, whatever the size of the model. Chosen, not measured."""

INFERENCES, SAMPLES = 400, 4
"""Inferences of all measurements together: blocks of small models, which are fewer, get up to so many samples. Chosen,
not measured."""

CONSIDERED = 0.1
"""Share of the inferences that may be spent on finding the noisiest samples, on which blocks are then measured: the
noise of all samples together is mostly that of the noisiest. Chosen, not measured."""

How = Quantization | WeightFormat | None
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
    budget: MemoryBudget | None = None,
    execution: Execution = EXECUTION,
    on_fewer: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The relative noise (`search.costs.output_noise`) that rounding each tensor of `pairs` brings to the worst output.

    Runs on ONNX Runtime, on at most `SAMPLES` samples: those of the first ones whose outputs change most when
    everything is rounded.

    - `floor`: blocks with less noise are not halved.
    - `deadline`: no block is halved once `time.monotonic` is past it. Where it leaves time for fewer measurements
      than wanted, `on_fewer` is called.
    - `budget`: of the memory that engines hold meanwhile.

    Raises:
        EngineRefused: ONNX Runtime does not run the model with switches, the float model's outputs are not finite, or
            any measurement met a transient failure, which says nothing about noise.
    """
    if not pairs:
        return {}
    if any(isinstance(how, WeightFormat) or (how and how.qtype is QType.UINT16) for how in pairs.values()):
        model = with_opset(model, BLOCK_OPSET)
    roundings = _roundings(model, pairs)
    count, listener = len(roundings), listener or Deaf()
    wanted = min(2 * count, MEASUREMENTS)
    each = max(1, min(SAMPLES, INFERENCES // wanted))
    switched = with_roundings(model, roundings, switched=True)
    # not fused: ONNX Runtime's fusions do not look outside of an If
    with running(switched, execution, fuse=False, budget=budget) as run:

        def outputs(block: Block, chosen: Sequence[Sample]) -> Outputs:
            """With the switches of a block on, and all others off."""
            switches = {f"{SWITCH}{i}": np.asarray(block[0] <= i < block[1]) for i in range(count)}
            return run({**sample, **switches} for sample in chosen)

        def rounded(block: Block, chosen: Sequence[Sample]) -> Outputs | None:
            """The outputs with a block rounded; None if they are not finite, or ONNX Runtime does not run the model."""
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
        seen = samples[: int(CONSIDERED * each * wanted / 2)]
        if possible < wanted:
            on_fewer()
            wanted = max(1, possible)
        elif len(seen) > each:
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

        shares = halved(count, noise_of, wanted, floor, deadline)
    return {rounding.tensor: share for rounding, share in zip(roundings, shares, strict=True)}


def halved(
    count: int, noise: Callable[[Block], float], most: int, floor: float = 0.0, deadline: float | None = None
) -> list[float]:
    """The noise of each of `count` tensors, by halving the block with the most noise until `most` blocks are measured,
    none has more noise than `floor`, or `time.monotonic` is past `deadline`."""
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
    shares = [0.0] * count
    for negative, start, stop in (*blocks, *single):
        shares[start:stop] = [-negative / (stop - start)] * (stop - start)
    return shares


# ---- roundings


def quantization(model: Model, ranges: Ranges, numbers: NumericFormat, edge: Edge, *, wide: bool) -> Quantization:
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


def _roundings(model: Model, pairs: Mapping[Edge, How]) -> tuple[Rounding, ...]:
    """A rounding for each tensor, as its first edge has it, in graph order: neighbours share blocks."""
    edges: dict[str, list[Edge]] = {}
    for node in model.nodes:
        found = [edge for edge in node.into if edge in pairs]
        last = next((edge for edge in found if is_switched_at_reader(model, edge)), None)
        for edge in sorted(found, key=lambda edge: edge == last):
            edges.setdefault(edge.tensor, []).append(edge)
    for slot, tensor in enumerate(model.outputs):
        if (edge := Edge(tensor, "", slot)) in pairs:
            edges.setdefault(tensor, []).append(edge)
    return tuple(_rounding(model, tensor, tuple(at), pairs[at[0]]) for tensor, at in edges.items())


def _rounding(model: Model, tensor: str, edges: tuple[Edge, ...], how: How) -> Rounding:
    """Nodes that round a tensor as a candidate does, where a large weight comes as integers, too."""
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
