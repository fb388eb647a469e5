"""The numeric formats that each engine runs fast, known without the engine's library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from qdqtune.engines import MODULES, TENSORRT_FAMILY, THREADED
from qdqtune.engines.machine import lacks_dot_products, products_saturate
from qdqtune.engines.providers import PROVIDERS
from qdqtune.errors import BadOption
from qdqtune.types import NumericFormat, QType, QuantType, WeightFormat

ONNXRUNTIME_SHARED = frozenset({
    "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "MaxPool", "ReduceMax", "ReduceMin",
    "Reshape", "Resize", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that ONNX Runtime runs on 8-bit values between a DQ and a Q of one scale. Observed with version 1.31
(Resize: if it is nearest). Pad, SpaceToDepth and GatherND stay in float; Concat and average pools have kernels with a
scale for each side."""

MOVED_ACROSS = frozenset({
    "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice", "SpaceToDepth",
    "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators across which TensorRT and OpenVINO move a Q or a DQ. With one scale on both sides two pairs become one."""


TENSORRT = NumericFormat(QType.INT8, QType.INT8, symmetric=True, shared_scale_ops=MOVED_ACROSS)
TENSORRT_FP8 = NumericFormat(QType.FP8, QType.FP8, symmetric=True, per_channel=False, shared_scale_ops=MOVED_ACROSS)
"""Numbers of TensorRT: int8 with weights per channel, or FP8 E4M3 per tensor; biases stay in float."""


def numeric_format(engine: str, quant_type: QuantType) -> NumericFormat:
    """The numeric format of an engine with default options, as it is on this machine's processor.

    ONNX Runtime on the CPU: weights are symmetric; activations have zero points, which cost no time, and with which a
    pair can replace a Relu. On x86 int8 activations are several times slower. On ARM both are fused into the same
    operators (1.31.1 under an emulator), so MLAS's kernels decide (no times were taken there): without dot products its
    one kernel takes int8, and sums two products in 16 bits, which -128 as a weight would overflow (`insert` writes
    none); with them uint8 has kernels of its own.

    OpenVINO on the CPU (2026.4, x86 without VNNI): symmetric on both sides, as the product of two activations has an
    integer kernel only so; int8, or uint8 for tensors without negative values, as VNNI multiplies uint8 with int8. Sums
    of two products saturate: weights of 127 are off by half and more, weights of 63 exact. A clamp between a
    convolution and a pair is fused with both, and a pair behind a Concat or MaxPool is moved into the kernels in front,
    where a scale of its own rounds twice. An int8 pair between a Concat and a Conv is rounded to steps of 1 whatever
    its scale is; a uint8 pair around 128 is exact. (Times: benchmarks/findings.md.)

    Raises:
        BadOption: no engine has that name, or it has no kernels for that type.
    """
    if engine not in MODULES:
        raise BadOption(f"unknown engine {engine!r}; there are {', '.join(sorted(MODULES))}")
    if engine in TENSORRT_FAMILY or engine == "fake":
        numbers = TENSORRT if quant_type == "int8" else TENSORRT_FP8
        return replace(numbers, shared_scale_ops=frozenset()) if engine == "fake" else numbers
    if quant_type == "fp8":
        raise BadOption(f"{engine} has no FP8 kernels: use `quant_type` int8, or another engine")
    if engine in PROVIDERS:
        return PROVIDERS[engine].numbers
    saturates = products_saturate()
    if engine == "openvino":
        return replace(TENSORRT, unsigned=True, reduced_weights=saturates)
    return NumericFormat(
        QType.INT8 if lacks_dot_products() else QType.UINT8,
        QType.INT8,
        symmetric=False,
        reduced_weights=saturates,
        bias="int32",
        drop_clamps=True,
        shared_scale_ops=ONNXRUNTIME_SHARED,
    )


def tensorrt_of(quant_type: QuantType, version: str, is_strongly_typed: bool) -> NumericFormat:
    """The numbers of a version of TensorRT, which takes all precisions from the graph (strong typing) or not: 8.6 takes
    no integers as weights, which stay float in front of a Q and a DQ.

    Raises:
        BadOption: it reads no FP8.
    """
    if quant_type == "fp8" and not is_strongly_typed:
        raise BadOption(f"TensorRT {version} has no FP8: use `quant_type` int8, or TensorRT 10 or later")
    return replace(numeric_format("tensorrt", quant_type), float_weights=not is_strongly_typed)


def usual_precision(engine: str, version: str = "") -> Literal["fp32", "fp16"]:
    """The default precision of nodes that stay in float: that of a provider's table; float16 for the TensorRT family,
    which takes types from the graph.

    In float32 only quantized nodes would be fast there, and attention would not be fused: most of the gain of 8 bits
    would be that of half precision. TensorRT before 10 chooses types itself. An unknown version counts as a recent one.
    """
    if engine in PROVIDERS:
        return PROVIDERS[engine].precision
    major = version.split(".")[0]
    chooses = engine != "tensorrt-rtx" and major.isdecimal() and int(major) < 10
    return "fp16" if engine in TENSORRT_FAMILY and not chooses else "fp32"


def portable(engine: str, numbers: NumericFormat) -> NumericFormat:
    """The numbers of an engine with which a file computes the same on every processor: weights of 7 bits, with which no
    sum of products saturates, and activations that x86 runs fast.

    On ARM without dot products ONNX Runtime rewrites these activations to int8, which takes time but changes no output.

    Raises:
        BadOption: the numbers of the engine depend on no processor.
    """
    if engine not in THREADED:
        raise BadOption(f"{engine} takes the same numbers with every processor: leave `portable` out")
    activation = QType.UINT8 if engine == "onnxruntime" else numbers.activation
    return replace(numbers, activation=activation, reduced_weights=True)


def weight_formats(engine: str, *, narrow: bool | None = None) -> tuple[WeightFormat, ...]:
    """The weight formats for which an engine has kernels of products, the usual ones first; if `narrow`, those that
    compute the same on every processor, also where products saturate (None: if they do here).

    Observed, where nothing else is said:

    - ONNX Runtime 1.31 runs products with blocks of 16 to 256 weights of 4 or 8 bits as MatMulNBits, which computes on
      8-bit activations. One scale a channel becomes blocks of 32 with that scale. It has no other kernels. Zero
      points cost no time there and make 0.8 dB less noise.
    - OpenVINO 2026.4 takes the integers into FullyConnected.
    - TensorRT documents blocks of 64 and 128 of signed 4 bits. TensorRT-RTX 1.7 also takes blocks of 32, and 8 bits
      with a scale for each channel. Blocks of 8 bits get a kernel of their own; zero points are refused.
    - ONNX Runtime 1.31 fuses the nodes of dynamic quantization (d8) into MatMulIntegerToFloat, and with the
      DynamicQuantizeLinear in front into DynamicQuantizeMatMul. Where products saturate, weights have 7 bits (d7).
    - On ARM, ONNX Runtime runs blocks of 4 bits whose size is a multiple of 32 by KleidiAI if there are dot products
      (it rounds their scales to bfloat16), and with SME d8 with weights without zero points as well: both are as above
      (qnbitgemm_kernel_neon.cpp and qgemm_kleidiai.cpp of MLAS, not measured).
    """
    names = PROVIDERS[engine].weights if engine in PROVIDERS else WEIGHT_FORMATS.get(engine, ())
    known = map(WeightFormat.named, names)
    is_narrow = products_saturate() if narrow is None else narrow
    return tuple(replace(one, bits=7) if one.dynamic and is_narrow else one for one in known)


def weight_formats_like(engine: str, wanted: str, *, narrow: bool | None = None) -> tuple[WeightFormat, ...]:
    """The formats of `weight_formats` that the name `wanted` stands for, the exact one first: w8 and w4 stand for every
    format of so many bits, other names for one."""
    known = weight_formats(engine, narrow=narrow)
    exact = [s for s in known if s.name == wanted]
    alike = [s for s in known if wanted == s.family]
    return tuple(dict.fromkeys((*exact, *alike)))


def checked_weight_format(engine: str, wanted: str, *, narrow: bool | None = None) -> str:
    """The name of a weight format or of a family, if the engine has kernels of products for it.

    Raises:
        BadOption: the engine has none.
    """
    known = weight_formats(engine, narrow=narrow)
    if not weight_formats_like(engine, wanted, narrow=narrow):
        names = ", ".join(dict.fromkeys((*(s.family for s in known), *(s.name for s in known))))
        raise BadOption(f"{engine} has no kernels for weights stored as {wanted!r}; it has {names or 'none'}")
    return wanted


WEIGHT_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "onnxruntime": ("w4b32a", "w4b32", "w4b128", "w4b128a", "w8", "w8b32", "w8b128", "d8"),
        "openvino": ("w4b32", "w4b128", "w4b32a", "w4b128a", "w8", "w8b32", "w8b128"),
        "tensorrt": ("w4b64", "w4b128"),
        "tensorrt-rtx": ("w4b64", "w4b128", "w4b32", "w8"),
        "trtexec": ("w4b64", "w4b128"),
    }
)
"""Names of weight formats of products, by engine."""
