"""The tensors whose rounding alone changes the outputs of a model most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from qdqtune.calibration import scales
from qdqtune.calibration.observe import observe
from qdqtune.calibration.scales import NUMPY_TYPE, Quantization
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.graph.model import Model
from qdqtune.numerics.sensitivity import sensitivities
from qdqtune.types import Edge, Failure, Placement, Sample, sqnr_of

WORST = 10
"""Most tensors that a report lists."""

TENTH_DB = 10.0
"""A tensor makes a tenth of the error or more if its SQNR is at most `TENTH_DB` above that of the whole model."""


@dataclass(frozen=True)
class Damage:
    """The damage of one tensor, with all of its pairs.

    `output_db` is the SQNR of the worst output if only this tensor is rounded; it is at least -30, which also stands
    for outputs that are not finite. `own_db` is the SQNR of the tensor itself. None means no error. `nodes` are the
    nodes to keep in float to remove the pair: those that read the tensor through it, or else the node that makes it.
    """

    tensor: str
    nodes: tuple[str, ...]
    output_db: float | None
    own_db: float | None


def damages(
    float_model: Model,
    quantized: Model,
    placement: Placement,
    samples: Sequence[Sample],
    execution: Execution = EXECUTION,
) -> list[Damage] | Failure:
    """The `WORST` tensors of a model that `insert` has made, the largest damage first.

    Takes one build of the float model with switches (see `sensitivity`); a `Failure` if that cannot run.

    Raises:
        BadModel: ONNX Runtime cannot run the float model.
    """
    pairs = {edge: _quantization(quantized, edge) for edge in placement}
    alone = sensitivities(float_model, pairs, samples, only_worst=WORST, execution=execution)
    if isinstance(alone, Failure):
        return alone
    worst = sorted(alone, key=alone.__getitem__, reverse=True)[:WORST]
    shown = {e.tensor: how for e, how in pairs.items() if e.tensor in worst}
    own = _tensor_sqnr(float_model, shown, samples, execution)
    return [Damage(t, _nodes(float_model, placement, t), sqnr_of(alone[t]), own[t]) for t in worst]


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


def _quantization(quantized: Model, edge: Edge) -> Quantization:
    """Scale and zero point of the pair on an edge of the quantized model."""
    read = edge.tensor if edge.is_graph_output else quantized.nodes[quantized.index_of[edge.node]].inputs[edge.index]
    dq = quantized.nodes[quantized.producers[read]]
    scale, zero = (quantized.constants[name].array() for name in dq.inputs[1:3])
    qtype = next(q for q, dtype in NUMPY_TYPE.items() if np.dtype(dtype) == zero.dtype)
    axis = dq.attributes.get("axis", 1) if scale.ndim else None
    return Quantization(qtype, scale.astype(np.float32), int(zero.astype(np.float32).reshape(-1)[0]), axis)


def _nodes(model: Model, placement: Placement, tensor: str) -> tuple[str, ...]:
    readers = tuple(dict.fromkeys(e.node for e in placement if e.tensor == tensor and e.node))
    return readers or (model.nodes[model.producers[tensor]].name,)


def _tensor_sqnr(
    model: Model, pairs: Mapping[str, Quantization], samples: Sequence[Sample], execution: Execution
) -> dict[str, float | None]:
    """The SQNR of each rounded tensor against its float values, in dB; None without error."""
    fixed = {t: model.constants[t].array() for t in pairs if t in model.constants}
    computed = [t for t in pairs if t not in fixed]
    power = {tensor: np.zeros(2) for tensor in pairs}
    for tensor, exact in chain(fixed.items(), observe(model, computed, samples, execution=execution)):
        error = exact - scales.dequantize(scales.quantize(exact, pairs[tensor]), pairs[tensor])
        power[tensor] += np.square(exact.astype(np.float64)).sum(), np.square(error).sum()
    return {tensor: sqnr_of(noise / signal if noise else 0.0) for tensor, (signal, noise) in power.items()}
