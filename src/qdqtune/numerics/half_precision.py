"""Half precision that holds: which nodes leave float16's range on the samples and stay in float32, and what is lost.

Ranges of the values say most: what comes near the largest number of float16, or stays below its normal ones, is kept in
float32 together with what reads it, and so are means whose inner sum overflows although they do not. Whether the rest
holds is seen on the outputs, with every value of a float16 node rounded as such an engine stores it. bfloat16 has the
range of float32: nothing needs to stay there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.matching import from_file
from qdqtune.calibration.observe import running
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import Calibration, Range, Ranges
from qdqtune.errors import ConstraintUnmet
from qdqtune.graph.float16 import (
    HALF_TYPES,
    HalfPrecision,
    Precision,
    blocked,
    converted,
    is_float32,
    rounded_to_float16,
)
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import GRAPH, Constant, Model, Node, rebuild
from qdqtune.graph.operators import ARITHMETIC, COMPUTE, CONTROL_FLOW, COPIES, FUSED_POINTWISE, NORMALIZATIONS, elements
from qdqtune.numerics.accuracy import FLOOR_DB, accuracy, is_finite
from qdqtune.types import Accuracy, Array, Failure, Sample

NAMES: Mapping[HalfPrecision, str] = MappingProxyType({"fp16": "float16", "bf16": "bfloat16"})

LARGEST = 65504.0
"""The largest number of float16."""

HEADROOM = 2
"""How many times larger than on the samples values may become."""

SMALLEST = 2.0**-14
"""The smallest number that float16 holds with all its bits."""

MASKING = COPIES | ARITHMETIC | {"Clip", "Max", "Min", "Where"}
"""Operators between a mask and the Softmax that it is for."""

MEANS = frozenset({"GlobalAveragePool", "ReduceMean"})
RISKY = NORMALIZATIONS | MEANS | {
    "Exp", "Log", "Pow", "Reciprocal", "ReduceL2", "ReduceLogSumExp", "ReduceSum", "ReduceSumSquare", "Softmax",
    "Softplus", "Sqrt",
}  # fmt: skip
"""Operators that stay in float32 where float16 does not hold otherwise: sums over long axes, and functions that magnify
what rounding leaves."""


SAMPLES = 8
"""Samples on which outputs are compared."""

LISTED = 5
"""Nodes that a note has room for."""


@dataclass(frozen=True)
class Half:
    """A model in half precision. `kept` says of each node that stays in float32 on account of its values why that is;
    `accuracy` is of the outputs against the float32 model's, None where nothing was run."""

    model: Model
    precision: HalfPrecision
    kept: Mapping[str, str] = field(default_factory=dict)
    accuracy: Accuracy | Failure | None = None

    @property
    def db(self) -> float:
        """The SQNR of the outputs, in dB; infinite where they are equal or unknown, or where there are none."""
        if isinstance(self.accuracy, Failure):
            return -math.inf
        return math.inf if self.accuracy is None or self.accuracy.sqnr_db is None else self.accuracy.sqnr_db

    def notes(self) -> tuple[str, ...]:
        """For people: that it is in half precision, what that costs, and what stays in float32."""
        name = NAMES[self.precision]
        left = f"nothing: {self.accuracy.reason}" if isinstance(self.accuracy, Failure) else str(self.accuracy)
        lost = "" if self.accuracy is None else f"; alone it leaves an output SQNR of {left}"
        told = f"{name} where no pair stands (--precision fp32 keeps float32){lost}"
        if not self.kept:
            return (told,)
        shown = "; ".join(f"{node} ({why})" for node, why in islice(self.kept.items(), LISTED))
        more = f"; and {len(self.kept) - LISTED} more" if len(self.kept) > LISTED else ""
        return told, f"nodes that stay in float32, {len(self.kept)}: {shown}{more}"


def in_half(
    prepared: Prepared, precision: Precision | None, usual: Precision, floor_db: float | None = FLOOR_DB
) -> tuple[Prepared, Half | None, tuple[str, ...]]:
    """The model of `prepared` (float32) in a precision, None being the `usual` one if its outputs hold `floor_db`.

    In bfloat16, for which ONNX Runtime has few kernels, it is what is written in the end: `prepared` stays float32.

    Raises:
        BadModel: the model cannot be converted, or ONNX Runtime cannot run it.
        ConstraintUnmet: the user has asked for that precision, and its outputs do not hold the floor.
    """
    wanted = precision or usual
    if wanted == "fp32" or not is_float32(prepared.model):
        return prepared, None, ()
    ranges = calibrate(prepared.shaped, prepared.calibration, Calibration())
    half = lowered(prepared.model, wanted, ranges, prepared.shaped, prepared.judging[:SAMPLES])
    if floor_db is not None and half.db < floor_db:
        why = f"{NAMES[wanted]} alone leaves an output SQNR of {half.db:.1f} dB, below {floor_db:g} dB"
        if precision is not None:
            raise ConstraintUnmet(f"{why}: give --precision fp32, or bf16")
        return prepared, None, (f"{why}: what carries no pair stays in float32",)
    if wanted == "bf16":
        return prepared, half, half.notes()
    shaped = with_input_shapes(half.model, prepared.sizes)
    return replace(prepared, model=half.model, shaped=shaped), half, half.notes()


def by_ranges(model: Model, precision: Precision, cache: Path, file: Path) -> tuple[Model, tuple[str, ...]]:
    """A float32 model in a precision as the ranges of a calibration cache want it, and notes on that; see `in_half`.

    Raises:
        BadData: the cache cannot be read, or is another model's.
        BadModel: the model cannot be converted.
    """
    if precision == "fp32" or not is_float32(model):
        return model, ()
    half = lowered(model, precision, from_file(cache, model, file).ranges, model)
    return model if precision == "bf16" else half.model, half.notes()


def lowered(
    model: Model, precision: HalfPrecision, ranges: Ranges, shaped: Model, samples: Sequence[Sample] = ()
) -> Half:
    """`model` (float32) in half precision, with the nodes in float32 that `ranges` and the outputs on `samples` want
    there. `shaped` is the same model with the shapes of the samples; without samples ranges alone decide.

    Raises:
        BadModel: the model cannot be converted, or ONNX Runtime cannot run it.
    """
    kept = out_of_range(shaped, ranges) if precision == "fp16" else {}
    found = keeping(model, precision, shaped, kept, samples)
    if found.db >= FLOOR_DB or precision == "bf16":
        return found
    risky = {n.name: "float16 does not hold without" for n in shaped.nodes if n.op in RISKY and not n.domain}
    careful = keeping(model, precision, shaped, risky | kept, samples)
    return careful if careful.db > found.db else found


def keeping(
    model: Model, precision: HalfPrecision, shaped: Model, kept: Mapping[str, str], samples: Sequence[Sample]
) -> Half:
    """`model` in half precision but for `kept` and what is cheaper in float32 between these."""
    whole = {**kept, **dict.fromkeys(cheaper_in_float32(shaped, kept), "casts around it would cost more")}
    half = converted(model, precision, whole.keys())
    return Half(half, precision, whole, _lost(shaped, precision, whole, samples) if samples else None)


def finished(quantized: Model, precision: Precision) -> Model:
    """A model with pairs as it is written: in bfloat16 from here on, if it is to be that.

    Raises:
        BadModel: the model cannot be converted.
    """
    return converted(quantized, precision) if precision == "bf16" else quantized


# ---- which nodes


def out_of_range(model: Model, ranges: Ranges) -> dict[str, str]:
    """The nodes whose values float16 does not hold, each with the reason: those that make or read such a tensor, sum up
    more than it holds, or have such weights. Masks in front of a Softmax may be cut off."""
    kept: dict[str, str] = {}
    for tensor, values in ranges.activations.items():
        if (reason := _beyond(values)) is None or _is_mask(model, tensor, values):
            continue
        nodes = [model.producers.get(tensor, GRAPH), *(use.node for use in model.uses(tensor))]
        kept |= {model.nodes[i].name: f"{tensor} {reason}" for i in nodes if i != GRAPH}
    for node in model.nodes:
        reached = _inner_sum(model, node, ranges)
        if reached * HEADROOM > LARGEST:
            kept.setdefault(node.name, f"its inner sum reaches {reached:.3g}")
        if any(_is_large(model, node, t) for t in node.inputs):
            kept.setdefault(node.name, "its weights exceed float16")
    return kept


def _beyond(values: Range) -> str | None:
    if values.magnitude * HEADROOM > LARGEST:
        return f"reaches {values.magnitude:.3g}"
    if 0 < values.magnitude < SMALLEST:
        return f"stays below {values.magnitude:.2g}"
    return None


def _is_mask(model: Model, tensor: str, values: Range) -> bool:
    """Whether only the low end is too large, and only a Softmax sees it: as much as float16 holds does as well."""
    if values.high * HEADROOM > LARGEST:
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
    """The largest sum on the way to a mean or a norm; 0 where there is none, or where it is the result itself."""
    if node.domain or not node.outputs or node.outputs[0] not in ranges.activations:
        return 0.0
    result = ranges.activations[node.outputs[0]].magnitude
    if node.op in MEANS:
        return result * elements(model, node.inputs[0]) / max(1.0, elements(model, node.outputs[0]))
    if node.op == "AveragePool":
        return result * float(math.prod(node.attributes.get("kernel_shape", ())))
    return result**2 if node.op == "ReduceL2" else 0.0


def _is_large(model: Model, node: Node, tensor: str) -> bool:
    """Whether a node computes with a constant beyond float16: as a bound, or as a mask, it may be cut off."""
    constant = model.constants.get(tensor)
    if constant is None or constant.dtype != TensorProto.FLOAT or node.op not in COMPUTE | ARITHMETIC or node.domain:
        return False
    values = constant.array()
    values = values[np.isfinite(values)]
    highest, lowest = float(values.max(initial=0.0)), float(values.min(initial=0.0))
    return highest > LARGEST or (lowest < -LARGEST and node.op in COMPUTE)


def cheaper_in_float32(model: Model, kept: Collection[str]) -> set[str]:
    """Nodes that only move or change values one by one, which cost less in float32 between kept ones than the casts.

    A cast writes each value of a tensor once for all readers of the other type; a node in float32 writes twice the
    bytes. One node after the other changes sides as long as that gains.
    """
    full = {n.index for n in model.nodes if n.name in kept or n.index in blocked(model)}
    free = [n for n in model.nodes if n.op in FUSED_POINTWISE | COPIES and not n.domain and n.index not in full]
    before, grows = set(full), bool(kept)
    while grows:
        grows = False
        for node in free:
            if node.index not in full and _gain(model, node, full) > 0:
                full.add(node.index)
                grows = True
    return {model.nodes[i].name for i in full - before}


def _gain(model: Model, node: Node, full: set[int]) -> float:
    """Values less to write with a node in float32."""
    around = [t for t in dict.fromkeys((*node.inputs, *node.outputs)) if t and t not in model.constants]
    around = [t for t in around if t in model.tensors and model.tensors[t].dtype == TensorProto.FLOAT]
    now, then = (sum(_cast(model, t, side) for t in around) for side in (full, full | {node.index}))
    return now - then - 0.5 * sum(elements(model, t) for t in node.outputs if t)


def _cast(model: Model, tensor: str, full: Collection[int]) -> float:
    """Values that the cast of a tensor writes; 0 if all that make and read it have one type. The graph has float32."""
    made = model.producers.get(tensor, GRAPH)
    sides = {made == GRAPH or made in full, *(use.node == GRAPH or use.node in full for use in model.uses(tensor))}
    return elements(model, tensor) if len(sides) == 2 else 0.0


# ---- what is lost


def _lost(
    model: Model, precision: HalfPrecision, kept: Collection[str], samples: Sequence[Sample]
) -> Accuracy | Failure:
    """Outputs against those of the float32 model, with the values of all other nodes rounded to half precision.

    ONNX Runtime leaves out roundings between operators that it has no kernels for in half precision, so the float32
    model gets explicit ones.
    """
    with running(model, fuse=False) as exact, running(rounded(model, precision, kept), fuse=False) as halved:
        reference, outputs = exact(samples), halved(samples)
    if isinstance(reference, Failure):
        return reference
    if isinstance(outputs, Failure):
        return outputs
    if is_finite(reference) and not is_finite(outputs):
        return Failure("output", "outputs are NaN or infinite in half precision")
    return accuracy(reference, outputs)


def rounded(model: Model, precision: HalfPrecision, kept: Collection[str]) -> Model:
    """The float32 model with everything rounded to half precision that other nodes than `kept` make or read."""
    full = blocked(model) | {n.index for n in model.nodes if n.name in kept or n.op in CONTROL_FLOW}
    dtype = HALF_TYPES[precision]
    floats = {t: c for t, c in model.constants.items() if c.dtype == TensorProto.FLOAT and _read_low(model, t, full)}
    constants = {f"{t}__rounded": _rounded(c, precision) for t, c in floats.items()}
    nodes: list[onnx.NodeProto] = []
    seen = {t for t in model.inputs if model.tensors[t].dtype == TensorProto.FLOAT and _read_low(model, t, full)}
    for tensor in sorted(seen):
        nodes += _casts(tensor, f"{tensor}__rounded", dtype)
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        copy = deepcopy(proto)
        nodes.append(copy)
        for i, tensor in enumerate(node.inputs) if node.index not in full else ():
            if tensor in seen or f"{tensor}__rounded" in constants:
                copy.input[i] = f"{tensor}__rounded"
        for i, tensor in enumerate(node.outputs):
            if not tensor or tensor not in model.tensors or model.tensors[tensor].dtype != TensorProto.FLOAT:
                continue
            if node.index not in full:
                copy.output[i] = f"{tensor}__exact"
                nodes += _casts(f"{tensor}__exact", tensor, dtype)
            elif _read_low(model, tensor, full):
                seen.add(tensor)
                nodes += _casts(tensor, f"{tensor}__rounded", dtype)
    return rebuild(model, nodes, constants)


def _casts(source: str, target: str, dtype: int) -> Iterator[onnx.NodeProto]:
    yield helper.make_node("Cast", [source], [f"{target}__half"], f"{target}__to_half", to=dtype)
    yield helper.make_node("Cast", [f"{target}__half"], [target], f"{target}__to_float", to=TensorProto.FLOAT)


def _read_low(model: Model, tensor: str, full: Collection[int]) -> bool:
    return any(use.node != GRAPH and use.node not in full for use in model.uses(tensor))


def _rounded(constant: Constant, precision: HalfPrecision) -> Constant:
    """A constant with the values that the conversion leaves: finite ones stay finite, and none becomes zero."""

    def read() -> Array:
        values = constant.array()
        half = rounded_to_float16(values) if precision == "fp16" else values.astype(ml_dtypes.bfloat16)
        return np.asarray(half.astype(np.float32))

    return Constant(f"{constant.key}:{precision}:rounded", TensorProto.FLOAT, constant.shape, read)
