"""Half precision: which nodes exceed the range of float16 on samples and stay in float32, and what accuracy is lost.

The accuracy of the other nodes is measured on the outputs, with every value of a float16 node rounded as an engine
stores it. bfloat16 has the range of float32: no node has to stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration.caches import ranges_of
from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.observe import Outputs, outputs_on, running, with_outputs
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.errors import ConstraintUnmet, EngineRefused, first_of
from qdqtune.graph.float16 import HALF_TYPES, HalfPrecision, Precision, blocked, converted, in_type, is_float32
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import GRAPH, Constant, Model, Node, rebuild
from qdqtune.graph.operators import ARITHMETIC, COMPUTE, COPIES, NORMALIZATIONS, elements
from qdqtune.numerics.accuracy import FLOOR_DB, accuracy, check_finite, closeness_of, is_finite
from qdqtune.types import Accuracy, Array, Sample

NAMES: Mapping[HalfPrecision, str] = MappingProxyType({"fp16": "float16", "bf16": "bfloat16"})

FLOAT16_MAX = 65504.0
"""The largest number of float16."""

HEADROOM = 2
"""By what factor values in use may exceed those on the samples. Chosen, not measured."""

FLOAT16_MIN_NORMAL = 2.0**-14
"""The smallest normal number of float16."""

MASKING = COPIES | ARITHMETIC | {"Clip", "Max", "Min", "Where"}
"""Operators that may stand between a mask and its Softmax."""

MEANS = frozenset({"GlobalAveragePool", "ReduceMean"})
RISKY = NORMALIZATIONS | MEANS | {
    "Exp", "Log", "Pow", "Reciprocal", "ReduceL2", "ReduceLogSumExp", "ReduceSum", "ReduceSumSquare", "Softmax",
    "Softplus", "Sqrt",
}  # fmt: skip
"""Operators that stay in float32 if float16 is not accurate enough otherwise: sums over long axes, and functions that
magnify rounding errors."""

HALF_SAMPLES = 8
"""Samples on which outputs are compared. Ranges are those of all samples on which a run compares outputs, and of as
many that calibration sees. Chosen, not measured."""


@dataclass(frozen=True)
class Half:
    """A model in half precision. `kept` has the nodes that stay in float32, with the reason for each. `accuracy`
    compares the outputs with those in float32; None if nothing was run, or if it failed, as `refusal` says."""

    model: Model
    precision: HalfPrecision
    kept: Mapping[str, str] = field(default_factory=dict)
    accuracy: Accuracy | None = None
    refusal: str = ""

    @property
    def db(self) -> float:
        """The SQNR of the outputs in dB; infinite if equal or not measured, -infinite if the model failed."""
        if self.refusal:
            return -math.inf
        return math.inf if self.accuracy is None or self.accuracy.sqnr_db is None else self.accuracy.sqnr_db

    def notes(self) -> tuple[str, ...]:
        """Notes for users: the precision, the accuracy it costs, and the nodes that stay in float32."""
        told = f"{NAMES[self.precision]} where no pair stands (`precision` fp32 keeps float32)"
        if self.accuracy is not None or self.refusal:
            left = f"nothing: {self.refusal}" if self.accuracy is None else closeness_of(self.accuracy)
            told += f"; alone it leaves an output SQNR of {left}"
        if not self.kept:
            return (told,)
        kept = first_of([f"{node} ({why})" for node, why in self.kept.items()], "; ")
        return told, f"nodes that stay in float32, {len(self.kept)}: {kept}"


def in_half_precision(
    prepared: Prepared, precision: Precision | None, usual: Precision, floor_db: float | None = FLOOR_DB
) -> tuple[Prepared, Half | None, tuple[str, ...]]:
    """`prepared` in `precision`; if that is None, in the `usual` one if its outputs reach `floor_db`, else in float32.
    Returns it with the conversion (None for fp32) and notes. Raises ConstraintUnmet if a `precision` that the user
    asked for does not reach the floor.

    For bfloat16 `prepared` stays float32, as ONNX Runtime has few kernels for it: it is converted when it is written.
    """
    wanted = precision or usual
    if wanted == "fp32" or not is_float32(prepared.model):
        return prepared, None, ()
    judging, execution = prepared.judging, prepared.execution
    seen = list(judging or prepared.calibration.first(HALF_SAMPLES))
    if prepared.is_held_out:
        seen += prepared.calibration.first(len(judging))
    compared = judging[:HALF_SAMPLES]
    ranges, reference = extremes(prepared.shaped, seen, execution, len(compared))
    half = lowered(prepared.model, wanted, ranges, prepared.shaped, compared, reference, execution)
    if floor_db is not None and half.db < floor_db:
        why = f"{NAMES[wanted]} alone leaves an output SQNR of {half.db:.1f} dB, below {floor_db:g} dB"
        if precision is not None:
            raise ConstraintUnmet(f"{why}: give `precision` fp32, or bf16")
        return prepared, None, (f"{why}: what carries no pair stays in float32",)
    if wanted == "bf16":
        return prepared, half, half.notes()
    shaped = with_input_shapes(half.model, prepared.sizes)
    return replace(prepared, model=half.model, shaped=shaped), half, half.notes()


def by_ranges(model: Model, precision: Precision, cache: Path) -> tuple[Model, tuple[str, ...]]:
    """`model` in half precision, by the ranges in a calibration cache alone, and notes. For bfloat16 it is still in
    float32."""
    if precision == "fp32" or not is_float32(model):
        return model, ()
    half = lowered(model, precision, ranges_of(cache, model).ranges, model)
    return model if precision == "bf16" else half.model, half.notes()


def lowered(
    model: Model,
    precision: HalfPrecision,
    ranges: Ranges,
    shaped: Model,
    samples: Sequence[Sample] = (),
    reference: Sequence[Mapping[str, Array]] = (),
    execution: Execution = EXECUTION,
) -> Half:
    """A float32 model in half precision, except for nodes that have to stay in float32 by `ranges` or by outputs on
    `samples`, which `reference` has in float32. `shaped` is the same model with the shapes of the samples; without
    samples, ranges alone decide."""
    kept = out_of_range(shaped, ranges) if precision == "fp16" else {}
    found = keeping(model, precision, shaped, kept, samples, reference, execution)
    if found.db >= FLOOR_DB or precision == "bf16":
        return found
    risky = {n.name: "float16 does not hold without" for n in shaped.nodes if n.op in RISKY and not n.domain}
    careful = keeping(model, precision, shaped, risky | kept, samples, reference, execution)
    return careful if careful.db > found.db else found


def keeping(
    model: Model,
    precision: HalfPrecision,
    shaped: Model,
    kept: Mapping[str, str],
    samples: Sequence[Sample],
    reference: Sequence[Mapping[str, Array]],
    execution: Execution = EXECUTION,
) -> Half:
    """`model` with the nodes `kept` in float32 (each with its reason). Its outputs on `samples` are compared with the
    `reference`, if there are any."""
    half = Half(converted(model, precision, kept.keys()), precision, kept)
    if not samples:
        return half
    # ONNX Runtime skips roundings between operators without kernels in half precision, so casts round.
    low = rounded(shaped, precision, kept)
    try:
        with running(low, execution, fuse=False) as halved:
            outputs = halved(samples)
        if is_finite(reference):
            check_finite(outputs)
    except EngineRefused as refused:
        return replace(half, refusal=str(refused))
    return replace(half, accuracy=accuracy(reference, outputs))


# ---- which nodes


def extremes(
    model: Model, samples: Iterable[Sample], execution: Execution = EXECUTION, compared: int = 0
) -> tuple[Ranges, Outputs]:
    """The least and the greatest value of each float32 activation on `samples`, none for what is infinite; and the
    outputs on the first `compared` samples. The extremes are found inside the inference, as the activations of a large
    model fill gigabytes. A NaN may stay unseen there."""
    tensors = [tensor for tensor in candidate_tensors(model) if model.tensors[tensor].dtype == TensorProto.FLOAT]
    nodes = [helper.make_node("Identity", [t], [f"__output_{i}"], f"__output_{i}") for i, t in enumerate(model.outputs)]
    nodes += [
        helper.make_node(op, [tensor], [f"__{op}_{i}"], f"__{op}_{i}", keepdims=0)
        for i, tensor in enumerate(tensors)
        for op in ("ReduceMin", "ReduceMax")
    ]
    lows, highs = np.full(len(tensors), np.inf), np.full(len(tensors), -np.inf)
    reference: Outputs = []
    for number, values in enumerate(outputs_on(with_outputs(model, nodes), samples, execution)):
        lows = np.minimum(lows, [values[f"__ReduceMin_{i}"] for i in range(len(tensors))])
        highs = np.maximum(highs, [values[f"__ReduceMax_{i}"] for i in range(len(tensors))])
        if number < compared:
            reference.append({tensor: values[f"__output_{i}"] for i, tensor in enumerate(model.outputs)})
    ends = zip(tensors, lows.tolist(), highs.tolist(), strict=True)
    ranges = {tensor: Range(low, high) for tensor, low, high in ends if math.isfinite(low) and math.isfinite(high)}
    return Ranges(ranges), reference


def out_of_range(model: Model, ranges: Ranges) -> dict[str, str]:
    """The nodes that make or read values out of float16's range, overflow in an inner sum, or have such weights, each
    with the reason. Masks in front of a Softmax do not count: they may be clipped."""
    kept: dict[str, str] = {}
    for tensor, values in ranges.activations.items():
        if values.magnitude * HEADROOM > FLOAT16_MAX:
            reason = f"reaches {values.magnitude:.3g}"
        elif 0 < values.magnitude < FLOAT16_MIN_NORMAL:
            reason = f"stays below {values.magnitude:.2g}"
        else:
            continue
        if _is_mask(model, tensor, values):
            continue
        around = {model.producers.get(tensor, GRAPH), *(use.node for use in model.uses(tensor))}
        kept |= {model.nodes[i].name: f"{tensor} {reason}" for i in sorted(around - {GRAPH})}
    for node in model.nodes:
        reached = _inner_sum(model, node, ranges)
        if reached * HEADROOM > FLOAT16_MAX:
            kept.setdefault(node.name, f"its inner sum reaches {reached:.3g}")
        if any(_is_large_constant(model, node, t) for t in node.inputs):
            kept.setdefault(node.name, "its weights exceed float16")
    return kept


def _is_mask(model: Model, tensor: str, values: Range) -> bool:
    """Whether only a Softmax reads a tensor and only its low end is out of range, so that clipping changes nothing."""
    if values.high * HEADROOM > FLOAT16_MAX:
        return False
    pending, seen = [tensor], set[str]()
    while pending:
        tensor = pending.pop()
        seen.add(tensor)
        for use in model.uses(tensor):
            node = None if use.node == GRAPH else model.nodes[use.node]
            if node is None or (node.op not in MASKING and node.op != "Softmax"):
                return False
            if node.op != "Softmax":
                pending += [o for o in node.outputs if o and o not in seen]
    return True


def _inner_sum(model: Model, node: Node, ranges: Ranges) -> float:
    if node.domain or not node.outputs or node.outputs[0] not in ranges.activations:
        return 0.0
    result = ranges.activations[node.outputs[0]].magnitude
    if node.op in MEANS:
        return result * elements(model, node.inputs[0]) / max(1.0, elements(model, node.outputs[0]))
    if node.op == "AveragePool":
        return result * float(math.prod(node.attributes.get("kernel_shape", ())))
    return result**2 if node.op == "ReduceL2" else 0.0


def _is_large_constant(model: Model, node: Node, tensor: str) -> bool:
    """Whether a node computes with a constant out of float16's range that cannot be clipped as bounds and masks can."""
    constant = model.constants.get(tensor)
    if constant is None or constant.dtype != TensorProto.FLOAT or node.op not in COMPUTE | ARITHMETIC or node.domain:
        return False
    values = constant.array()
    if not (np.isfinite(values.max(initial=0.0)) and np.isfinite(values.min(initial=0.0))):
        values = values[np.isfinite(values)]
    highest, lowest = float(values.max(initial=0.0)), float(values.min(initial=0.0))
    return highest > FLOAT16_MAX or (lowest < -FLOAT16_MAX and node.op in COMPUTE)


def rounded(model: Model, precision: HalfPrecision, kept: Collection[str]) -> Model:
    """The float32 model with every value that nodes outside `kept` read or write rounded to half precision."""
    full = blocked(model) | {n.index for n in model.nodes if n.name in kept}
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, Constant] = {}
    read_low: dict[str, str] = {}
    """What nodes in half precision read instead: rounded tensors by original name."""

    def is_read_low(tensor: str, dtype: int) -> bool:
        uses = model.uses(tensor)
        return dtype == TensorProto.FLOAT and any(use.node != GRAPH and use.node not in full for use in uses)

    def add_casts(source: str, target: str) -> None:
        half, names = f"{target}__half", (f"{target}__to_half", f"{target}__to_float")
        nodes.append(helper.make_node("Cast", [source], [half], names[0], to=HALF_TYPES[precision]))
        nodes.append(helper.make_node("Cast", [half], [target], names[1], to=TensorProto.FLOAT))

    # Casts keep files small; but they make tiny values 0 and large ones infinite, which matters for bounds and masks.
    weights = {t for n in model.nodes if n.op in COMPUTE and n.index not in full for t in n.inputs} & model.large.keys()
    for tensor, constant in model.constants.items():
        if is_read_low(tensor, constant.dtype) and tensor not in weights:
            read_low[tensor] = f"{tensor}__rounded"
            constants[read_low[tensor]] = _rounded(constant, precision)
    for tensor in sorted(weights.union(model.inputs)):
        if is_read_low(tensor, model.constants[tensor].dtype if tensor in weights else model.tensors[tensor].dtype):
            read_low[tensor] = f"{tensor}__rounded"
            add_casts(tensor, read_low[tensor])
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        copy = deepcopy(proto)
        nodes.append(copy)
        for i, tensor in enumerate(node.inputs) if node.index not in full else ():
            copy.input[i] = read_low.get(tensor, tensor)
        for i, tensor in enumerate(node.outputs):
            dtype = model.tensors[tensor].dtype if tensor in model.tensors else TensorProto.UNDEFINED
            if node.index not in full and dtype == TensorProto.FLOAT:
                copy.output[i] = f"{tensor}__exact"
                add_casts(copy.output[i], tensor)
            elif is_read_low(tensor, dtype):
                read_low[tensor] = f"{tensor}__rounded"
                add_casts(tensor, read_low[tensor])
    return rebuild(model, nodes, constants)


def _rounded(constant: Constant, precision: HalfPrecision) -> Constant:
    half = in_type(constant, HALF_TYPES[precision])
    key = f"{half.key}:rounded"
    return Constant(key, TensorProto.FLOAT, constant.shape, lambda: half.array().astype(np.float32))
