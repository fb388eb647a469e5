"""The catalogue of operator families: what operators do to their inputs, said once for every stage that needs to know.

Names are those of ONNX, and of the operators that ONNX Runtime's optimizer makes. What only one engine does (which
kernels it has, what it moves conversions across) stands with that engine. A family that another one nearly is says so:
it is written as that one, with the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from qdqtune.graph.model import Model, Node

# ---- what quantization is about

QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""The two halves of a pair."""

INTEGER = frozenset({
    "ConvInteger", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat",
    "QAttention", "QGemm",
})  # fmt: skip
"""Operators that dynamic and operator-wise quantization leave, besides those called QLinear..."""

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
COMPUTE = CONVOLUTIONS | {"Gemm", "MatMul"}
"""Operators whose arithmetic itself runs in 8 bits, with a pair on activation and weight."""

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
"""Operators with bodies."""

HEAVY = COMPUTE | CONTROL_FLOW | {
    "Einsum", "DeformConv", "LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention", "FusedConv", "FusedGemm",
    "FusedMatMul",
}  # fmt: skip
"""Operators that carry most of the work: a fusion group starts at them."""

INTEGER_KERNELS = frozenset({"Add", "Concat", "GlobalAveragePool", "Mul"})
"""Operators that most engines can run on 8-bit values, besides COMPUTE and MOVERS: they join quantized values."""

# ---- what hands values on

REARRANGES = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose result holds each value of their input once: rounding both is no worse than rounding one."""

COPIES = REARRANGES | {"Cast"}
"""Operators that hand every value on, in another order, shape or type."""

MOVERS = REARRANGES | {
    "AveragePool", "DepthToSpace", "Expand", "Gather", "MaxPool", "Resize", "Slice", "SpaceToDepth", "Split",
}  # fmt: skip
"""Operators that hand values on, or some of them, or means of a few: the range of the input serves for the result."""

KEEPS_SIGN = MOVERS - {"Resize"} | {"GlobalAveragePool", "Tile"}
"""Operators whose result is not negative where their input is not. A cubic Resize overshoots."""

# ---- what works value by value

ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
CLAMPS = frozenset({"Relu", "Clip"})
"""Operators that saturation can stand for."""

FUSED_BEHIND = CLAMPS | {"BatchNormalization", "LeakyRelu", "PRelu"}
"""Operators that engines draw into the compute operator in front of them: a pair between would break the fusion."""

POINTWISE = ARITHMETIC | FUSED_BEHIND | {
    "Dropout", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "Max", "Min", "Mish", "Pow", "Selu", "Sigmoid",
    "Softplus", "Sqrt", "Tanh",
}  # fmt: skip
"""Operators that work on each value alone, as both families below have them."""

FUSED_POINTWISE = POINTWISE | {"Abs", "Exp", "Neg", "Reciprocal"}
"""Operators that the rules of `quantize` take to join the kernel in front of them."""

ELEMENTWISE = POINTWISE | {
    "Cast", "Celu", "FastGelu", "Identity", "Mean", "QuickGelu", "Sum", "Swish", "Where",
}  # fmt: skip
"""Operators that join the leaf region in front of them. Another member would change the regions of models, and with
them the digests that caches and state files hold: it differs from FUSED_POINTWISE for this reason only."""

COMMUTATIVE = frozenset({
    "Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum", "Mean", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
})  # fmt: skip
"""Operators whose inputs may stand in any order."""

LOWER_BOUNDS: Mapping[str, float] = {
    "Relu": 0.0, "Sigmoid": 0.0, "Softmax": 0.0, "Abs": 0.0, "HardSigmoid": 0.0, "Exp": 0.0, "ReduceL2": 0.0,
    "Softplus": 0.0, "Sqrt": 0.0, "Erf": -1.0, "Tanh": -1.0,
}  # fmt: skip
"""The least that these operators give, whatever they get."""

# ---- what works along an axis

LAST_AXIS_NORMALIZATIONS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
NORMALIZATIONS = LAST_AXIS_NORMALIZATIONS | {
    "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LpNormalization",
    "MeanVarianceNormalization",
}  # fmt: skip
AVERAGE_POOLS = frozenset({"AveragePool", "GlobalAveragePool"})

# ---- what is no function of the values

ASKS_SHAPE = frozenset({"Shape", "Size"})
"""Operators that read the shape of their input and none of its values."""

RANDOM = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
})  # fmt: skip
"""Operators whose result is not a function of their inputs, or may be none: a Dropout can be one that trains."""

# ---- inputs

SETTINGS_FROM: Mapping[str, int] = {
    "BatchNormalization": 1, "Clip": 1, "Dropout": 1, "GroupNormalization": 1, "InstanceNormalization": 1,
    "LayerNormalization": 1, "OneHot": 0, "Pad": 1, "Resize": 1, "Upsample": 1,
}  # fmt: skip
"""First input that is a setting (a bound, a scale, a pad value), not data."""


def is_float(model: Model, tensor: str) -> bool:
    """Whether a tensor is known to be of a float type."""
    info = model.tensors.get(tensor)
    return info is not None and info.is_float


def may_be_float(model: Model, tensor: str) -> bool:
    """Whether a tensor holds floats as far as one knows: an unknown type may be float."""
    info = model.tensors.get(tensor)
    return info is None or info.is_float


def takes_data(node: Node, slot: int) -> bool:
    """Whether input `slot` is data, not a setting such as a bound, a scale or a pad value."""
    return not node.domain and slot < SETTINGS_FROM.get(node.op, slot + 1)


def integer_operators(model: Model) -> list[str]:
    """Names of the operators of a model that compute on integers since it was quantized."""
    return sorted({node.op for node in model.nodes if node.op in INTEGER or node.op.startswith("QLinear")})


def elements(model: Model, tensor: str) -> float:
    """Size of a tensor; an unknown dimension counts as 1."""
    info = model.tensors.get(tensor)
    return float(math.prod([d or 1 for d in (info.shape if info else None) or ()]))


def work(model: Model, node: Node) -> float:
    """Multiplications of a compute operator, elements written by any other; an unknown dimension counts as 1."""
    written = elements(model, node.outputs[0]) if node.outputs else 1.0
    if node.op not in COMPUTE or len(node.inputs) < 2:
        return written
    weight = model.tensors.get(node.inputs[1])
    shape = [d or 1 for d in (weight.shape if weight else None) or ()]
    if node.op in CONVOLUTIONS:
        return written * float(math.prod(shape[1:]))
    return written * float(shape[-1 if node.attributes.get("transB", 0) else -2] if len(shape) > 1 else 1)
