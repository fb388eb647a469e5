"""Weight-only quantization: the integers and scales of weights in weight formats, and which weights can have them.

The matrix of a product is stored as [in, out], as kernels of ONNX Runtime, OpenVINO and TensorRT take it.
"""

from __future__ import annotations

from functools import cache, cached_property, lru_cache, partial

import numpy as np
from onnx import TensorProto, helper

from qdqtune.calibration.scales import INTEGER_TYPE, rounded_weight
from qdqtune.graph.model import Constant, Model
from qdqtune.placement.possible import Weight, can_have, weight_at, weight_only_edges
from qdqtune.types import Array, Edge, Placement, WeightFormat

BLOCK_OPSET = 21
"""The first opset whose DequantizeLinear has scales for blocks, and 4-bit integers."""


class FormattedWeights:
    """The weights of one model in weight formats; caches scales, which all placements share."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._parts: dict[str, dict[str, Constant]] = {}
        # the integers and scales of a weight are written one after the other
        self._rounded = lru_cache(maxsize=1)(lambda weight, how: rounded_weight(weight.array(), how))

    @cached_property
    def _able(self) -> frozenset[Edge]:
        return weight_only_edges(self._model)

    def can_have(self, edge: Edge, weight_format: WeightFormat) -> bool:
        """Whether there is a weight of finite values at an edge, and the format fits its shape."""
        weight = weight_at(self._model, edge)
        return weight is not None and edge in self._able and can_have(weight, weight_format)

    def opset(self, placement: Placement) -> int:
        """The least opset that the weight formats of a placement need; 0 for none."""
        opsets = [0]
        for edge, weight_format in placement.weight_only:
            weight = weight_at(self._model, edge)
            is_half = weight is not None and weight.constant.dtype != TensorProto.FLOAT
            opsets.append(max(weight_format.opset, 19 if is_half else 13))
        return max(opsets)

    def superfluous(self, placement: Placement) -> frozenset[int]:
        """Indices of the Transposes of constants that nothing reads any more once weights have weight formats."""
        producers, written = self._model.producers, placement.weight_formats.keys()
        turned = {edge.tensor for edge in written} & producers.keys()
        return frozenset(producers[t] for t in turned if written >= set(self._model.edges(t)))

    def parts(self, weight: Weight, weight_format: WeightFormat) -> dict[str, Constant]:
        """Integers, scales and, if asymmetric, zero points, in the shapes that their node reads; computed when read."""
        source = weight.constant
        key = f"{source.key}:{weight_format.name}:{weight.transposed:d}"
        if key in self._parts:
            return self._parts[key]
        integers = helper.np_dtype_to_tensor_dtype(np.dtype(INTEGER_TYPE[weight_format.bits, weight_format.symmetric]))
        rows, columns = weight.shape
        scaled = (rows // weight_format.block, columns) if weight_format.block else (columns,)
        described = [("quantized", integers, (rows, columns)), ("scale", source.dtype, scaled)]
        described += [] if weight_format.symmetric else [("zero_point", integers, scaled)]
        self._parts[key] = {}
        for what, dtype, shape in described:
            read = partial(self._part, what, weight, weight_format, shape)
            kept = read if what == "quantized" else cache(read)
            self._parts[key][what] = Constant(f"{key}:{what}", dtype, shape, kept)
        return self._parts[key]

    def _part(self, what: str, weight: Weight, weight_format: WeightFormat, shape: tuple[int, ...]) -> Array:
        rounded = self._rounded(weight, weight_format)
        values = {"quantized": rounded.integers, "scale": rounded.scale, "zero_point": rounded.zero_point}[what]
        assert values is not None  # a symmetric weight format has no third part
        return np.ascontiguousarray(values.reshape(shape))
