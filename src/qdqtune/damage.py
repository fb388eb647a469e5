"""What rounding costs, pair by pair: for who asks which node hurts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from qdqtune import scales
from qdqtune.calibration import observed
from qdqtune.data import Sample
from qdqtune.graph import Model, Node
from qdqtune.scales import NUMPY_TYPE, Quantization


@dataclass(frozen=True)
class Damage:
    """One pair. `own_db` is the SQNR of its rounding alone, `reached_db` that of its values in the quantized model.

    None where nothing is lost; a weight has no other error than its own. `node` makes the tensor, or reads the weight.
    """

    tensor: str
    node: str
    own_db: float | None
    reached_db: float | None = None


@dataclass(frozen=True)
class _Pair:
    """A DQ node: the float tensor or constant in front of it, by the float model's name, and its numbers."""

    tensor: str
    dq: Node
    numbers: Quantization


def damages(float_model: Model, quantized: Model, samples: Iterable[Sample]) -> list[Damage]:
    """The pairs of a model that `insert` has made, the worst rounding first.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run one of the models.
    """
    pairs = [
        p for node in quantized.nodes if node.op == "DequantizeLinear" and (p := _pair(float_model, quantized, node))
    ]
    weights = [p for p in pairs if p.tensor in float_model.constants]
    found = [
        Damage(
            p.tensor,
            quantized.nodes[quantized.uses(p.dq.outputs[0])[0].node].name,
            _weight_db(float_model, quantized, p),
        )
        for p in weights
    ]
    activations = [p for p in pairs if p.tensor not in float_model.constants]
    if activations:
        found += _activations(float_model, quantized, activations, samples)
    return sorted(found, key=lambda d: np.finfo(np.float64).max if d.own_db is None else d.own_db)


def _activations(
    float_model: Model, quantized: Model, pairs: list[_Pair], samples: Iterable[Sample]
) -> Iterator[Damage]:
    kept = list(samples)
    exact = observed(float_model, [p.tensor for p in pairs], kept)
    reached = observed(quantized, [p.dq.outputs[0] for p in pairs], kept)
    power = np.zeros((len(pairs), 3))
    for before, after in zip(exact, reached, strict=True):
        for i, pair in enumerate(pairs):
            values = before[pair.tensor].astype(np.float64)
            own = scales.dequantize(scales.quantize(values, pair.numbers), pair.numbers)
            errors = (values, values - own, values - after[pair.dq.outputs[0]])
            power[i] += [float(np.square(e).sum()) for e in errors]
    for pair, (signal, own_noise, noise) in zip(pairs, power, strict=True):
        maker = float_model.producers.get(pair.tensor)
        name = "" if maker is None else float_model.nodes[maker].name
        yield Damage(pair.tensor, name, _db(signal, own_noise), _db(signal, noise))


def _weight_db(float_model: Model, quantized: Model, pair: _Pair) -> float | None:
    exact = float_model.constants[pair.tensor].array().astype(np.float64)
    rounded = scales.dequantize(quantized.constants[pair.dq.inputs[0]].array(), pair.numbers)
    return _db(float(np.square(exact).sum()), float(np.square(exact - rounded.reshape(exact.shape)).sum()))


def _db(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise); None where nothing is lost."""
    return None if noise == 0 else float(10 * np.log10(max(signal, np.finfo(np.float64).tiny) / noise))


def _pair(float_model: Model, quantized: Model, dq: Node) -> _Pair | None:
    """The pair of a DQ node; None for an int32 bias, and for what nobody reads."""
    scale, zero = (quantized.constants[name].array() for name in dq.inputs[1:3])
    qtype = next((q for q, dtype in NUMPY_TYPE.items() if np.dtype(dtype) == zero.dtype), None)
    if qtype is None:
        return None
    axis = dq.attributes.get("axis", 1) if scale.ndim else None
    numbers = Quantization(qtype, scale.astype(np.float32), int(zero.astype(np.float32).reshape(-1)[0]), axis)
    source = dq.inputs[0]
    if source in quantized.producers:
        return _Pair(quantized.nodes[quantized.producers[source]].inputs[0], dq, numbers)
    use = next((u for u in quantized.uses(dq.outputs[0]) if u.node >= 0), None)
    if use is None:
        return None
    twin = float_model.nodes[float_model.index_of[quantized.nodes[use.node].name]]
    return _Pair(twin.inputs[use.slot], dq, numbers)
