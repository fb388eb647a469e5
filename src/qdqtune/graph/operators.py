"""Families of operators, by what they do to their inputs.

Names are those of ONNX, and of the operators that ONNX Runtime's optimizer creates. Facts about one engine (its
kernels, the operators that it moves conversions across) are in that engine's folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qdqtune.graph.model import Model, Node

# ---- quantization

QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""The two operators of a pair."""

INTEGER = frozenset({
    "ConvInteger", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat",
    "QAttention", "QGemm",
})  # fmt: skip
"""Integer operators of models that are already quantized; those named QLinear... also are."""

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
COMPUTE = CONVOLUTIONS | {"Gemm", "MatMul"}
"""Operators that compute in 8 bits with a pair on activation and weight."""

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
"""Operators with bodies."""

HEAVY = COMPUTE | CONTROL_FLOW | {
    "Einsum", "DeformConv", "LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention", "FusedConv", "FusedGemm",
    "FusedMatMul",
}  # fmt: skip
"""Operators that do most of the work: a fusion group starts at one."""

INTEGER_KERNELS = frozenset({"Add", "Concat", "GlobalAveragePool", "Mul"})
"""Further operators that most engines can run on 8-bit values, besides COMPUTE and MOVERS."""

# ---- operators that pass values on

REARRANGES = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose result holds each value of their input once: a rounded input needs no second rounding."""

COPIES = REARRANGES | {"Cast"}
"""Operators that pass every value on, in another order, shape or type."""

MOVERS = REARRANGES | {
    "AveragePool", "DepthToSpace", "Expand", "Gather", "MaxPool", "Resize", "Slice", "SpaceToDepth", "Split",
}  # fmt: skip
"""Operators that pass on all or some values, or means of a few: the range of the input holds for the result."""

KEEPS_SIGN = MOVERS - {"Resize"} | {"GlobalAveragePool", "Tile"}
"""Operators whose result is not negative if their input is not. (A cubic Resize overshoots.)"""

# ---- operators on single values

ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
CLAMPS = frozenset({"Relu", "Clip"})
"""Operators that the saturation of a pair's integers can replace."""

FUSED_BEHIND = CLAMPS | {"BatchNormalization", "LeakyRelu", "PRelu"}
"""Operators that engines fuse into the compute operator in front: a pair between them would prevent that."""

POINTWISE = ARITHMETIC | FUSED_BEHIND | {
    "Dropout", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "Max", "Min", "Mish", "Pow", "Selu", "Sigmoid",
    "Softplus", "Sqrt", "Tanh",
}  # fmt: skip
"""Operators on single values that are in both FUSED_POINTWISE and ELEMENTWISE."""

FUSED_POINTWISE = POINTWISE | {"Abs", "Exp", "Neg", "Reciprocal"}
"""Operators that the rules of `quantize` expect to be fused into the kernel in front."""

ELEMENTWISE = POINTWISE | {
    "Cast", "Celu", "FastGelu", "Identity", "Mean", "QuickGelu", "Sum", "Swish", "Where",
}  # fmt: skip
"""Operators that join the leaf region in front of them. Other members than FUSED_POINTWISE's only because a change
would change regions, and so the digests in caches and state files."""

COMMUTATIVE = frozenset({
    "Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum", "Mean", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
})  # fmt: skip
"""Operators whose inputs may be swapped."""

LOWER_BOUNDS: Mapping[str, float] = {
    "Relu": 0.0, "Sigmoid": 0.0, "Softmax": 0.0, "Abs": 0.0, "HardSigmoid": 0.0, "Exp": 0.0, "ReduceL2": 0.0,
    "Softplus": 0.0, "Sqrt": 0.0, "Erf": -1.0, "Tanh": -1.0,
}  # fmt: skip
"""A lower bound of an operator's results, for any input."""

# ---- operators along an axis

LAST_AXIS_NORMALIZATIONS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
NORMALIZATIONS = LAST_AXIS_NORMALIZATIONS | {
    "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LpNormalization",
    "MeanVarianceNormalization",
}  # fmt: skip
AVERAGE_POOLS = frozenset({"AveragePool", "GlobalAveragePool"})

# ---- operators whose result is no function of the values

ASKS_SHAPE = frozenset({"Shape", "Size"})
"""Operators that read the shape of their input only."""

SIZED_BY_VALUES = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
"""Operators whose results have a size that depends on values."""

RANDOM = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
})  # fmt: skip
"""Operators whose result may be random: a Dropout can be in training mode."""

# ---- inputs

SETTINGS_FROM: Mapping[str, int] = {
    "BatchNormalization": 1, "Clip": 1, "Dropout": 1, "GroupNormalization": 1, "InstanceNormalization": 1,
    "LayerNormalization": 1, "OneHot": 0, "Pad": 1, "Resize": 1, "Upsample": 1,
}  # fmt: skip
"""The first input that is a setting (a bound, a scale, a pad value) and not data."""


def is_float(model: Model, tensor: str) -> bool:
    info = model.tensors.get(tensor)
    return info is not None and info.is_float


def may_be_float(model: Model, tensor: str) -> bool:
    info = model.tensors.get(tensor)
    return info is None or info.is_float


def is_dilated(node: Node) -> bool:
    """Whether a convolution has a `dilations` attribute other than 1, even if its kernel is 1x1."""
    return node.op in CONVOLUTIONS and not node.domain and any(gap != 1 for gap in node.attributes.get("dilations", ()))


def takes_data(node: Node, slot: int) -> bool:
    """Whether input `slot` is data and not a setting, such as a shape or axes (see `SETTINGS_FROM`)."""
    return not node.domain and slot < SETTINGS_FROM.get(node.op, slot + 1)


def output_channels(node: Node, weight: Sequence[int]) -> int:
    """The number of output channels of a Conv, ConvTranspose or Gemm whose weight has this shape."""
    if node.op == "ConvTranspose":
        return weight[1] * int(node.attributes.get("group", 1))
    return weight[1 if node.op == "Gemm" and not node.attributes.get("transB", 0) else 0]


def integer_operators(model: Model) -> list[str]:
    """Names of the integer operators in a model, which show that it was quantized before."""
    return sorted({node.op for node in model.nodes if node.op in INTEGER or node.op.startswith("QLinear")})


def elements(model: Model, tensor: str) -> float:
    """The number of elements of a tensor; an unknown dimension counts as 1."""
    info = model.tensors.get(tensor)
    return float(math.prod([d or 1 for d in (info.shape if info else None) or ()]))


def work(model: Model, node: Node) -> float:
    """The number of multiplications of a Conv, MatMul or the like; for other operators the number of elements they
    write. An unknown dimension counts as 1."""
    written = elements(model, node.outputs[0]) if node.outputs else 1.0
    if node.op not in COMPUTE or len(node.inputs) < 2:
        return written
    weight = model.tensors.get(node.inputs[1])
    shape = [d or 1 for d in (weight.shape if weight else None) or ()]
    if node.op in CONVOLUTIONS:
        return written * float(math.prod(shape[1:]))
    return written * float(shape[-1 if node.attributes.get("transB", 0) else -2] if len(shape) > 1 else 1)


def reduced_axes(model: Model, node: Node) -> Sequence[int]:
    """The axes of a reduction; empty if they are not given or not constant."""
    axes = node.attributes.get("axes")
    if axes is None and len(node.inputs) > 1 and node.inputs[1] in model.constants:
        axes = model.constants[node.inputs[1]].array().tolist()
    return axes or ()
