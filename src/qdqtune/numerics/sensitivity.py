"""What quantizing each value alone does to the outputs: one build of the float model with a switch at every value.

A switch is an If that hands a value on as it is, or through a Q/DQ pair; that of a weight is one around its reader, as
an If copies what it hands on. Blocks of neighbouring values are switched on together, and the loudest block is halved
until a number of inferences is spent. The values of a block that was not halved share its noise. Who asks for the
loudest values only has each measured alone, if they are not too many.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtune.calibration import scales
from qdqtune.calibration.observe import Run, running_in_several
from qdqtune.calibration.scales import Quantization, Range, Ranges
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.pool import WorkerPool
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import Constant, Model, Node
from qdqtune.numerics.accuracy import accuracy, is_finite, noisiest
from qdqtune.placement.compression import BLOCK_OPSET, Compressor
from qdqtune.placement.file_pairs import behind_switch, either
from qdqtune.placement.insertion import ONNX_TYPE, quantized
from qdqtune.placement.possible import weight_at, weight_role
from qdqtune.types import Array, Deaf, Edge, Failure, Listener, NumericFormat, Sample, WeightFormat


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A weight that alone is quantized: its parts by what they are, as `Compressor.parts` gives them, of blocks of so
    many inputs (None: one a channel), and whether its user reads it the other way round."""

    parts: Mapping[str, Constant]
    block: int | None
    turned: bool


MEASUREMENTS = 256
"""Blocks that are measured at most, whatever the size of the model."""

INFERENCES = 400
"""Small models have fewer blocks, and get several samples for each: at most `SAMPLES`."""

SAMPLES = 4

CONSIDERED = 0.1
"""Share of the inferences that may go into the choice of those samples: what rounding does to single ones differs, and
what all do together is mostly that of the noisiest."""


Block = tuple[int, int]
"""Values from one number to another, without that."""

NONE: Block = (0, 0)

UNBOUNDED_NOISE = 1e3
"""Relative noise of a block whose outputs are not finite."""


def sensitivities(
    model: Model,
    pairs: Mapping[Edge, Quantization | StoredWeight],
    samples: Sequence[Sample],
    *,
    floor: float = 0.0,
    only_worst: int | None = None,
    listener: Listener | None = None,
    deadline: float | None = None,
    workers: int = 1,
    budget: MemoryBudget | None = None,
    on_fewer: Callable[[int, int, float], None] = lambda fewer, wanted, seconds: None,
) -> dict[str, float] | Failure:
    """Relative noise power that rounding each tensor of `pairs` brings to the worst output (see `search.costs.noise`).

    Runs on ONNX Runtime, on at most `SAMPLES` samples: those of the first ones whose outputs all rounding together
    changes most. Blocks whose noise is below `floor` are not divided further, and none is once `time.monotonic` is past
    `deadline`: where that has room for fewer measurements, `on_fewer` is told how many, of how many, and the seconds of
    one. If only the `only_worst` so many count, up to `INFERENCES` tensors are measured one by one, on as many samples
    as that leaves; among more, the blocks are halved until so many stand alone. So many blocks as `workers` says are
    measured at a time, each in a process of its own; what is found is the same. `budget` is that of what engines hold
    meanwhile. A failure if ONNX Runtime does not run the model with switches, or the float model's outputs are not
    finite.
    """
    if not pairs:
        return {}
    switched, values = _switched(model, pairs)
    count = len(values)
    measurements = min(2 * count, MEASUREMENTS) if only_worst is None else min(count, INFERENCES)
    most = len(samples) if only_worst is not None else SAMPLES
    asked, heard = 0, listener or Deaf()
    each = max(1, min(most, INFERENCES // measurements))
    with (
        # not fused: ONNX Runtime's fusions do not look outside of an If
        running_in_several(switched, workers, fuse=False, budget=budget) as runs,
        WorkerPool(runs, repeat_after=None) as pool,
    ):

        def outputs(block: Block, on: Sequence[Sample], run: Run = pool.first) -> list[dict[str, Array]] | Failure:
            switches = {_switch(i): np.asarray(block[0] <= i < block[1]) for i in range(count)}
            return run({**sample, **switches} for sample in on)

        if deadline is not None:
            outputs(NONE, samples[:1])  # builds it
        begun = time.monotonic()
        reference = outputs(NONE, used := samples[:each])
        took = time.monotonic() - begun
        fitting = measurements if deadline is None else workers * int((deadline - time.monotonic()) / took)
        if fitting < measurements:
            on_fewer(max(1, fitting), measurements, took)
            measurements = max(1, fitting)
        elif len(seen := samples[: int(CONSIDERED * each * measurements / 2)]) > each:
            exact, changed = outputs(NONE, seen), outputs((0, count), seen)
            if not isinstance(exact, Failure) and not isinstance(changed, Failure) and is_finite(changed):
                chosen = noisiest(exact, changed, each)
                reference, used = [exact[i] for i in chosen], [seen[i] for i in chosen]
        if isinstance(reference, Failure):
            return reference
        if not is_finite(reference):
            return Failure("output", "outputs of the float model are NaN or infinite")

        def is_late() -> bool:
            return deadline is not None and time.monotonic() > deadline

        def noise(blocks: Sequence[Block]) -> list[float]:
            nonlocal asked
            found = [UNBOUNDED_NOISE] * len(blocks)
            for number, rounded in pool.results([partial(outputs, block, used) for block in blocks]):
                asked += 1
                heard.progress(min(asked, measurements), measurements)
                if not isinstance(rounded, Failure) and is_finite(rounded):
                    found[number] = min(accuracy(reference, rounded).noise, UNBOUNDED_NOISE)
            return found

        if only_worst is not None and count <= measurements:
            shares = noise([(i, i + 1) for i in range(count)])
        else:
            shares = _shares(count, noise, measurements, floor, only_worst, is_late, workers)
    return dict(zip(values, shares, strict=True))


def _shares(
    count: int,
    noise: Callable[[Sequence[Block]], Sequence[float]],
    measurements: int,
    floor: float = 0.0,
    only_worst: int | None = None,
    is_late: Callable[[], bool] = lambda: False,
    width: int = 1,
) -> list[float]:
    """The noise of each of `count` values, by halving the loudest block, until `only_worst` values stand alone, or it
    `is_late`. Where `width` blocks are measured at a time, halves of the next ones are foreseen: those that are not
    needed in the end do not count."""
    blocks = [(-noise([(0, count)])[0], 0, count)]
    final: list[tuple[float, int, int]] = []
    known: dict[Block, float] = {}
    done = 1
    while blocks and done + 2 <= measurements and -blocks[0][0] > floor and len(final) != only_worst and not is_late():
        if not known.keys() >= (halves := _halves(blocks[0])):
            ahead = min(-(-width // 2), (measurements - done) // 2)
            foreseen = (half for block in heapq.nsmallest(ahead, blocks) for half in sorted(_halves(block)))
            wanted = [half for half in foreseen if half not in known]
            known |= dict(zip(wanted, noise(wanted), strict=True))
        block = heapq.heappop(blocks)
        if not halves:
            final.append(block)
            continue
        for half in halves:
            heapq.heappush(blocks, (-known[half], *half))
        done += 2
    shares = [0.0] * count
    for loudness, start, stop in (*blocks, *final):
        shares[start:stop] = [-loudness / (stop - start)] * (stop - start)
    return shares


def _halves(block: tuple[float, int, int]) -> set[Block]:
    """The halves of a block of more than one value, which comes with its noise."""
    _, start, stop = block
    middle = (start + stop) // 2
    return {(start, middle), (middle, stop)} if stop - start > 1 else set()


def _switched(model: Model, pairs: Mapping[Edge, Quantization | StoredWeight]) -> tuple[Model, tuple[str, ...]]:
    """The model with switches, and the value behind each, in graph order."""
    if any(isinstance(how, StoredWeight) for how in pairs.values()):
        model = with_opset(model, BLOCK_OPSET)
    proto = deepcopy(model.proto)
    del proto.graph.node[:]
    large, made = dict(model.large), dict[str, str]()

    def switched(edge: Edge) -> str:
        """The tensor that the user of an edge reads instead."""
        if edge not in pairs:
            return edge.tensor
        if edge.tensor not in made:
            switch, dtype = _switch(len(made)), model.tensors[edge.tensor].dtype
            rounding = _behind_switch(proto.graph, model, len(made), edge.tensor, pairs[edge], large)
            made[edge.tensor] = f"{switch}_out"
            proto.graph.node.append(behind_switch(switch, rounding, edge.tensor, dtype, made[edge.tensor], switch))
        return made[edge.tensor]

    for node, original in zip(model.nodes, model.proto.graph.node, strict=True):
        copy = deepcopy(original)
        weight = next((e for e in node.into if e in pairs and _is_of_one_reader(model, e, node)), None)
        for edge in node.into:
            if edge != weight:
                copy.input[edge.index] = switched(edge)
        if weight is not None:
            rounding = _behind_switch(proto.graph, model, len(made), weight.tensor, pairs[weight], large)
            dtype = model.tensors[node.outputs[0]].dtype
            copy = _switched_reader(_switch(len(made)), copy, weight.index, dtype, rounding)
            made[weight.tensor] = weight.tensor
        proto.graph.node.append(copy)
    for index, output in enumerate(proto.graph.output):
        output.name = switched(Edge(output.name, "", index))
    return Model(proto, large), tuple(made)


def _is_of_one_reader(model: Model, edge: Edge, node: Node) -> bool:
    """Whether an edge is the only use of a large constant, by a node that makes one tensor."""
    is_alone = edge.tensor in model.large and len(model.uses(edge.tensor)) == 1
    return is_alone and len(node.outputs) == 1 and node.outputs[0] in model.tensors


def quantization(model: Model, ranges: Ranges, numbers: NumericFormat, edge: Edge) -> Quantization:
    """As `placement.insertion` does it, but for scales that several values share."""
    constant = model.constants.get(edge.tensor)
    if constant is None:
        return scales.of_range(ranges.activations[edge.tensor], numbers)
    role = weight_role(model, edge)
    values = constant.array()
    if role is not None:
        return scales.of_weight(values.astype(np.float32), role.axis, numbers, ranges.weights.get(edge.tensor))
    own = Range(float(values.min(initial=0.0)), float(values.max(initial=0.0)))
    return scales.of_range(ranges.activations.get(edge.tensor, own), numbers)


def _switch(number: int) -> str:
    return f"__switch_{number}"


def stored_weights(model: Model, weight_formats: Mapping[Edge, WeightFormat]) -> dict[Edge, StoredWeight]:
    """Weights as candidates store them."""
    compressor, found = Compressor(model), {}
    for edge, weight_format in weight_formats.items():
        weight = weight_at(model, edge)
        assert weight is not None  # only weights have weight formats
        turned = weight.transposed != (edge.tensor in model.producers)
        found[edge] = StoredWeight(compressor.parts(weight, weight_format), weight_format.block, turned)
    return found


def _behind_switch(
    graph: onnx.GraphProto,
    model: Model,
    number: int,
    tensor: str,
    how: Quantization | StoredWeight,
    large: dict[str, Constant],
) -> list[onnx.NodeProto]:
    """The nodes that round a tensor where a switch is on, an input of its own. Weights are stored as in candidates."""
    switch, constant = _switch(number), model.large.get(tensor)
    graph.input.append(helper.make_tensor_value_info(switch, TensorProto.BOOL, []))
    if isinstance(how, StoredWeight):
        parts = {f"{switch}_{what}": part for what, part in how.parts.items()}
        large.update(parts)
        return _from_stored(switch, list(parts), how)
    if constant is None or constant.dtype != TensorProto.FLOAT:
        return _rounded(graph, switch, tensor, model.tensors[tensor].dtype, how)
    large[integers := f"{switch}_integers"] = quantized(constant, how)
    names, result = (integers, *_parameters(graph, switch, how)), f"{switch}_floats"
    return [helper.make_node("DequantizeLinear", names, [result], result, **_axis(how))]


def _switched_reader(
    switch: str, reader: onnx.NodeProto, slot: int, dtype: int, rounding: Sequence[onnx.NodeProto]
) -> onnx.NodeProto:
    """An If between two copies of the only reader of a weight: of what is `rounding` it, and of its floats."""
    copies = []
    for name in ("rounded", "plain"):
        copies.append(copy := deepcopy(reader))
        copy.name = copy.output[0] = f"{switch}_{name}"
    copies[0].input[slot] = rounding[-1].output[0]
    return either(switch, [*rounding, copies[0]], copies[1:], dtype, reader.output[0], switch)


def _from_stored(switch: str, names: Sequence[str], weight: StoredWeight) -> list[onnx.NodeProto]:
    """The nodes that make floats of a stored weight."""
    result, turned = f"{switch}_floats", f"{switch}_turned"
    nodes = [helper.make_node("DequantizeLinear", names, [result], result, axis=1 if weight.block is None else 0)]
    if weight.block is not None:
        nodes[0].attribute.append(helper.make_attribute("block_size", weight.block))
    if weight.turned:
        nodes.append(helper.make_node("Transpose", [result], [turned], turned, perm=[1, 0]))
    return nodes


def _rounded(graph: onnx.GraphProto, switch: str, tensor: str, dtype: int, how: Quantization) -> list[onnx.NodeProto]:
    """The nodes of a pair, which rounds in float32 whatever the tensor's type."""
    parameters = _parameters(graph, switch, how)
    rounding: list[onnx.NodeProto] = []
    value = tensor

    def node(op: str, *parameters: str, **attributes: Any) -> None:
        nonlocal value
        result = f"{switch}_{op}_{len(rounding)}"
        rounding.append(helper.make_node(op, [value, *parameters], [result], result, **attributes))
        value = result

    if dtype != TensorProto.FLOAT:
        node("Cast", to=TensorProto.FLOAT)
    for op in ("QuantizeLinear", "DequantizeLinear"):
        node(op, *parameters, **_axis(how))
    if dtype != TensorProto.FLOAT:
        node("Cast", to=dtype)
    return rounding


def _parameters(graph: onnx.GraphProto, switch: str, how: Quantization) -> tuple[str, str]:
    """The scale and the zero point of a switch, written into the graph."""
    zeros = np.full(how.scale.shape, how.zero_point, scales.NUMPY_TYPE[how.qtype])
    scale, zero = f"{switch}_scale", f"{switch}_zero"
    graph.initializer.append(numpy_helper.from_array(how.scale, scale))
    graph.initializer.append(
        onnx.TensorProto(name=zero, dims=zeros.shape, raw_data=zeros.tobytes(), data_type=ONNX_TYPE[how.qtype])
    )
    return scale, zero


def _axis(how: Quantization) -> dict[str, Any]:
    return {} if how.axis is None else {"axis": how.axis}
