"""Operators by family: what they do to their inputs, as every stage needs to know."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qdqtune.graph.model import Model, Node

COMPUTE = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators whose arithmetic itself runs in 8 bits."""


FUSED_BEHIND = frozenset({"BatchNormalization", "Relu", "Clip", "LeakyRelu", "PRelu"})
"""Operators that engines draw into the compute operator in front of them: a pair between would break the fusion."""


MOVERS = frozenset({"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Gather",
                    "Resize", "AveragePool", "Expand", "Identity", "DepthToSpace", "SpaceToDepth"})  # fmt: skip
"""Operators that hand values on, so that integers pass through them."""


SETTINGS_FROM = {"Clip": 1, "Resize": 1, "Upsample": 1, "Pad": 1, "BatchNormalization": 1, "LayerNormalization": 1,
                 "InstanceNormalization": 1, "GroupNormalization": 1, "Dropout": 1, "OneHot": 0}  # fmt: skip
"""First input that is a setting (a bound, a scale, a pad value), not data."""


def is_float(model: Model, tensor: str) -> bool:
    """Whether a tensor is known to be of a float type."""
    return tensor in model.tensors and model.tensors[tensor].is_float


def takes_data(node: Node, slot: int) -> bool:
    """Whether input `slot` is data, not a setting such as a bound, a scale or a pad value."""
    return not node.domain and slot < SETTINGS_FROM.get(node.op, slot + 1)


def work(model: Model, node: Node) -> float:
    """Multiplications of a compute operator, elements written by any other; an unknown dimension counts as 1."""
    info = model.tensors.get(node.outputs[0]) if node.outputs else None
    elements = float(np.prod([d or 1 for d in (info.shape if info else None) or ()]))
    if node.op not in COMPUTE or len(node.inputs) < 2:
        return elements
    weight = model.tensors.get(node.inputs[1])
    shape = [d or 1 for d in (weight.shape if weight else None) or ()]
    if node.op in ("Conv", "ConvTranspose"):
        return elements * float(np.prod(shape[1:]))
    return elements * float(shape[-1 if node.attributes.get("transB", 0) else -2] if len(shape) > 1 else 1)


HEAVY = frozenset({
    "Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "DeformConv", "LSTM", "GRU", "RNN", "Attention",
    "MultiHeadAttention", "FusedConv", "FusedGemm", "FusedMatMul", "If", "Loop", "Scan",
})  # fmt: skip
"""Operators that carry most of the work: a fusion group starts at them."""


COMMUTATIVE = frozenset({
    "Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum", "Mean", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
})  # fmt: skip
"""Operators whose inputs may stand in any order."""


PARAMETERS: Mapping[str, frozenset[int]] = {
    "BatchNormalization": frozenset({1, 2, 3, 4}),
    "Clip": frozenset({1, 2}),
    "Conv": frozenset({2}),
    "ConvTranspose": frozenset({2}),
    "Dropout": frozenset({1, 2}),
    "Gemm": frozenset({2}),
    "GroupNormalization": frozenset({1, 2}),
    "GRU": frozenset({3}),
    "InstanceNormalization": frozenset({1, 2}),
    "LSTM": frozenset({3, 7}),
    "LayerNormalization": frozenset({1, 2}),
    "NonMaxSuppression": frozenset({2, 3, 4}),
    "OneHot": frozenset({0, 1, 2}),
    "Pad": frozenset({1, 2, 3}),
    "QuantizeLinear": frozenset({1, 2}),
    "DequantizeLinear": frozenset({0, 1, 2}),
    "RNN": frozenset({3}),
    "Range": frozenset({0, 1, 2}),
    "Resize": frozenset({1, 2, 3}),
    "Shape": frozenset({0}),
    "Size": frozenset({0}),
    "Upsample": frozenset({1}),
}
"""Inputs that are no data: limits, scales, statistics, and biases (which follow from the other two inputs)."""


TAKES_CONSTANT_DATA = HEAVY | {"Add", "Sub", "Mul", "Div", "Concat", "Gather"}
"""Operators of which a constant input can carry a pair: engines have integer kernels for them."""


def may_be_float(model: Model, tensor: str) -> bool:
    """Whether a tensor holds floats as far as one knows: an unknown type may be float."""
    info = model.tensors.get(tensor)
    return info is None or info.is_float


ELEMENTWISE = frozenset({
    "Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "Pow", "Where", "PRelu", "Relu", "LeakyRelu", "Clip",
    "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Gelu", "Elu", "Selu", "Celu", "Mish", "Softplus", "Erf", "Sqrt",
    "Swish", "QuickGelu", "FastGelu", "BatchNormalization", "Cast", "Dropout", "Identity",
})  # fmt: skip
"""Operators that engines run in the same kernel as the node before them."""
