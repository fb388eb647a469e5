"""What qdqtune knows of each engine without loading the vendor's library: a record for each engine, in `ENGINES`.

Execution providers of ONNX Runtime that have been tried are engines of their own; the engine onnxruntime runs any other
with the option `provider`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from qdqtune.errors import BadOption
from qdqtune.types import FixedScale, NumericFormat, QType

DOCUMENTS = "https://onnxruntime.ai/docs/execution-providers"

CPU_PROVIDER = "CPUExecutionProvider"

ONNXRUNTIME_SHARED = frozenset({
    "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "MaxPool", "ReduceMax", "ReduceMin",
    "Reshape", "Resize", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that ONNX Runtime runs on 8-bit values between a DQ and a Q of one scale. Observed with version 1.31
(Resize only in mode nearest). Pad, SpaceToDepth and GatherND stay in float; Concat and average pools have kernels with
different scales for input and output."""

COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})

ONNXRUNTIME_LACKS = COMPARISONS | {
    "ConvTranspose", "Div", "Erf", "GatherND", "Gelu", "HardSigmoid", "HardSwish", "InstanceNormalization",
    "LayerNormalization", "Pad", "ReduceMean", "SpaceToDepth", "Sub", "Tanh",
}  # fmt: skip
"""Operators that ONNX Runtime computes in float also between pairs (as ONNXRUNTIME_SHARED)."""

MOVED_ACROSS = frozenset({
    "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice", "SpaceToDepth",
    "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators across which TensorRT and OpenVINO move a Q or a DQ, so that with equal scales two pairs become one."""

SYMMETRIC = NumericFormat(QType.INT8, QType.INT8, symmetric=True)
"""Symmetric int8, which every provider accepts, if only by converting it to floats."""

ASYMMETRIC = NumericFormat(QType.UINT8, QType.INT8, symmetric=False, bias="int32", drop_clamps=True)
"""Asymmetric uint8 activations: the zero point lets a pair clamp like a Relu, which is then removed."""

SYMMETRIC_FP8 = NumericFormat(QType.FP8, QType.FP8, symmetric=True, per_channel=False)

OPTIMIZED = "an optimized ONNX file"


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What is known of an engine or an execution provider. Fields from `ep` on are for providers only."""

    name: str  # what `engine` calls it
    module: str = "qdqtune.engines.onnxruntime"  # its `create` takes a dataclass of options, and returns the engine
    script: str = "onnxruntime"  # the script of `engines.deployed` that runs a file on it
    packages: tuple[str, ...] = ()  # the Python packages without which it cannot be opened, the vendor's first
    install: str = ""  # the command or the build that brings it
    numbers: NumericFormat = SYMMETRIC  # of int8 pairs
    fp8: NumericFormat | None = None  # of FP8 pairs; None: it has no kernels
    has_pair_kernels: bool = True  # without, mode cut of `tune` tries weight formats alone, unless asked for pairs
    weights: tuple[str, ...] = ()  # weight formats of products, the usual ones first
    lacks: frozenset[str] = COMPARISONS  # operators that it computes in float also between pairs
    like: str = ""  # the engine whose placement rules hold for it; "" is itself
    merges: tuple[str, ...] = ()
    """The rewrites (`graph.rewrites`) that the engine makes by itself in a float model, but not, or worse, where Q/DQ
    pairs stand in front of the nodes."""
    rewrites: tuple[str, ...] = ()  # the others that make models faster on it: `tune` makes them unless told otherwise
    precision: Literal["fp32", "fp16"] = "fp32"  # the usual one of what stays in float
    types_since: int = 0  # the first major version that takes types from the graph; earlier ones choose them
    loaded_by: str = "onnxruntime"
    """The engine that checks a written file by loading it: one that loads any model in seconds without options. "":
    ONNX's checker, as TensorRT builds for minutes and may need shapes and plug-ins."""
    saves: str = ""  # the format of its own, if it has one; a plan runs on one version and one kind of GPU
    constants: str = ""  # the suffix of the file that a saved model has beside it
    ahead_of_time: Mapping[str, Any] = field(default_factory=dict)  # options to build for a device that is not present
    is_tensorrt: bool = False  # of NVIDIA's TensorRT family: these build for given input sizes
    is_gpu: bool = False  # each worker needs a GPU of its own
    is_threaded: bool = False  # it computes on threads of the CPU, on whose processor its numbers depend
    is_launched: bool = False  # its models are `Launched`: a process takes longer to start than to time a model
    is_modelled: bool = False  # its times come from a cost model, on every processor
    has_timing_cache: bool = False  # builds share times of kernels in a file

    ep: str = ""  # what ONNX Runtime calls the provider; "" for other engines
    source: str = ""  # the address of its documents; "" where nobody has looked at what it leaves to others
    plugin: str = ""
    """The Python module of the provider's plug-in, whose `get_library_path` gives the library; "" if it is built in."""
    options: Mapping[str, str] = field(default_factory=dict)  # its own options by default
    memory: str = "cpu"  # what ONNX Runtime calls the memory of its device
    has_fixed_sizes: bool = False  # it takes models only whose sizes are all fixed
    compiles: bool = False  # it runs many nodes as one: ONNX Runtime cannot write its graph or time single nodes
    simulated_on: tuple[str, ...] = ()
    """Processors (as `platform.machine` names them) on which it only simulates its device: outputs and partitions are
    right, times mean nothing."""
    simulated_as: Mapping[str, str] = field(default_factory=dict)  # options that name the simulator's chip
    words: tuple[str, ...] = ()
    """Regular expressions for the provider's log lines about nodes that it does not run: group `nodes` holds their
    names, group `reason` the reason. The first that matches a node counts."""

    @property
    def usual_rewrites(self) -> tuple[str, ...]:
        """The rewrites that are made for it unless the user says otherwise."""
        return (*self.merges, *self.rewrites)

    @property
    def unwatched(self) -> str | None:
        """A warning about a provider without a record here: what it leaves to the CPU is not checked; else None."""
        if not self.ep or self.ep in OF_EP:
            return None
        return f"{self.ep} has no table in qdqtune: nobody looks at what it leaves to the CPU"

    def usual_precision(self, version: str = "") -> Literal["fp32", "fp16"]:
        """The default precision of nodes that stay in float; an unknown version counts as recent.

        It is float16 for the TensorRT family, which takes types from the graph: in float32 only quantized nodes would
        be fast there, attention would not be fused, and most of the gain of 8 bits would be that of half precision.
        """
        major = version.partition(".")[0]
        return "fp32" if major.isdecimal() and int(major) < self.types_since else self.precision


FAKE = EngineFacts(
    name="fake", module="qdqtune.engines.fake", fp8=SYMMETRIC_FP8, is_modelled=True, rewrites=("hardswish",)
)

ONNXRUNTIME = EngineFacts(
    name="onnxruntime",
    packages=("onnxruntime",),
    install="pip install onnxruntime",
    numbers=replace(ASYMMETRIC, shared_scale_ops=ONNXRUNTIME_SHARED),
    weights=("w4b32a", "w4b32", "w4b128", "w4b128a", "w8", "w8b32", "w8b128", "d8"),
    lacks=ONNXRUNTIME_LACKS,
    merges=("gelu",),
    rewrites=("sizes", "hardswish"),
    saves=OPTIMIZED,
    is_threaded=True,
    ep=CPU_PROVIDER,
)
"""ONNX Runtime on the CPU: weights are symmetric; activations have zero points, which cost no time, and with which a
pair can replace a Relu. On x86 int8 activations are several times slower. On ARM both are fused into the same operators
(1.31.1 under an emulator), so MLAS's kernels decide (no times were taken there): without dot products its one kernel
takes int8, and sums two products in 16 bits, which -128 as a weight would overflow (`insert` writes none); with them
uint8 has kernels of its own.

It copies a DequantizeLinear for each reader. Then Div and Mul of a decomposed Gelu read different tensors, so that it
is not fused, and five nodes run in place of one.

Weights, observed with 1.31: products with blocks of 16 to 256 weights of 4 or 8 bits run as MatMulNBits, which computes
on 8-bit activations. One scale a channel becomes blocks of 32 with that scale. It has no other kernels. Zero points
cost no time there and make 0.8 dB less noise. The nodes of dynamic quantization (d8) are fused into
MatMulIntegerToFloat, and with the DynamicQuantizeLinear in front into DynamicQuantizeMatMul. Where products saturate,
weights have 7 bits (d7). On ARM, blocks of 4 bits whose size is a multiple of 32 run by KleidiAI if there are dot
products (it rounds their scales to bfloat16), and with SME d8 with weights without zero points as well: both are as
above (qnbitgemm_kernel_neon.cpp and qgemm_kleidiai.cpp of MLAS, not measured).
"""

OPENVINO = EngineFacts(
    name="openvino",
    module="qdqtune.engines.openvino",
    script="openvino",
    packages=("openvino",),
    install="pip install 'qdqtune[openvino]'",
    numbers=replace(SYMMETRIC, unsigned=True, shared_scale_ops=MOVED_ACROSS),
    weights=("w4b32", "w4b128", "w4b32a", "w4b128a", "w8", "w8b32", "w8b128"),
    lacks=COMPARISONS | {"HardSigmoid", "Softmax", "SpaceToDepth"},
    loaded_by="openvino",
    saves="an OpenVINO IR",
    constants=".bin",
    is_threaded=True,
)
"""OpenVINO on the CPU (2026.4, x86 without VNNI): symmetric on both sides, as the product of two activations has an
integer kernel only so; int8, or uint8 for tensors without negative values, as VNNI multiplies uint8 with int8. Sums of
two products saturate: weights of 127 are off by half and more, weights of 63 exact. A clamp between a convolution and a
pair is fused with both, and a pair behind a Concat or MaxPool is moved into the kernels in front, where a scale of its
own rounds twice. An int8 pair between a Concat and a Conv is rounded to steps of 1 whatever its scale is; a uint8 pair
around 128 is exact. (Times: benchmarks/findings.md.) FullyConnected takes stored weights as integers.
"""

TENSORRT = EngineFacts(
    name="tensorrt",
    module="qdqtune.engines.tensorrt.api",
    script="tensorrt",
    packages=("tensorrt", "cuda"),
    install="pip install 'qdqtune[tensorrt]'",
    numbers=replace(SYMMETRIC, shared_scale_ops=MOVED_ACROSS),
    fp8=replace(SYMMETRIC_FP8, shared_scale_ops=MOVED_ACROSS),
    weights=("w4b64", "w4b128"),
    precision="fp16",
    types_since=10,
    loaded_by="",
    saves="a TensorRT plan",
    is_tensorrt=True,
    is_gpu=True,
    has_timing_cache=True,
)
"""TensorRT: int8 with weights per channel, or FP8 E4M3 per tensor; biases stay in float. It documents blocks of 64 and
128 weights of signed 4 bits."""

TENSORRT_RTX = replace(
    TENSORRT,
    name="tensorrt-rtx",
    module="qdqtune.engines.tensorrt.rtx",
    packages=("tensorrt_rtx_bindings",),
    install="pip install 'qdqtune[tensorrt-rtx]'",
    weights=("w4b64", "w4b128", "w4b32", "w8"),
    types_since=0,
    saves="a TensorRT-RTX plan",
    ahead_of_time={"target": "sm89"},
    has_timing_cache=False,
)
"""TensorRT-RTX 1.7 also takes blocks of 32, and 8 bits with a scale for each channel. Blocks of 8 bits get a kernel of
their own; zero points are refused."""

TRTEXEC = replace(
    TENSORRT,
    name="trtexec",
    module="qdqtune.engines.tensorrt.trtexec",
    script="trtexec",
    packages=(),
    install="",
    is_launched=True,
)

CUDA = EngineFacts(
    name="cuda",
    ep="CUDAExecutionProvider",
    install="pip install onnxruntime-gpu",
    source=f"{DOCUMENTS}/CUDA-ExecutionProvider.html",
    like="tensorrt",
    has_pair_kernels=False,
    weights=("w4b32", "w4b128", "w4b32a", "w4b128a", "w8b32", "w8b128"),
    saves=OPTIMIZED,
    is_gpu=True,
    memory="cuda",
    precision="fp16",
)
"""CUDA: NVIDIA's GPUs, a kernel for each node. Tried with onnxruntime-gpu 1.31.1 on an H200."""

QNN = EngineFacts(
    name="qnn",
    ep="QNNExecutionProvider",
    packages=("onnxruntime_qnn",),
    install="pip install 'qdqtune[qnn]'",
    source=f"{DOCUMENTS}/QNN-ExecutionProvider.html",
    numbers=replace(
        ASYMMETRIC,
        wide=QType.UINT16,
        wide_scales=(FixedScale("Sigmoid", 2**-16, 0), FixedScale("Tanh", 2**-15, 2**15), FixedScale("Log", 4 / 65535)),
    ),
    lacks=frozenset(),
    merges=("gelu", "dilations", "division"),
    plugin="onnxruntime_qnn",
    options={"backend_type": "htp"},
    has_fixed_sizes=True,
    compiles=True,
    simulated_on=("x86_64", "AMD64"),
    simulated_as={"soc_model": "57"},
    words=(
        r"(?P<reason>QNN\.backendValidateOpConfig\(\) failed for node `(?P<nodes>[^`\n]*)`[^\n\x1b]*)",
        r"Validation FAILED[^\n]*\n(?P<nodes>(?:\s*Operator type:[^\n]*\n)+)\s*REASON : (?P<reason>[^\n]*)",
    ),
)  # fmt: skip
"""QNN: the NPU of Qualcomm's processors, and on x86 its simulator. Tried on that of 2.7.0, not on a chip.

Observed on the simulator of 2.7.0: with a Relu between a padded convolution and a Q around 128, the values at the edges
of the picture are wrong; without the Relu (`drop_clamps`), they are right. Of a convolution's results 1 to 5 % are one
step below those by ONNX's definition, and next to none above: the shift adds up over layers. Weights of 16 bits run
beside activations of 16 alone: with activations of 8 a Conv fails, and MatMul and Gemm go to the CPU. A Reciprocal
becomes a division of 1 in the scale of its input, by the provider's source: of inputs up to 0.1 it gives a tenth of
1/x. A Div with a constant is right (`division` in `graph.rewrites`). In 16 bits a Log is wrong (-5 dB) where the scale
of its output is below 2^-14, and of a product of two activations the second is rounded to 8 bits. Erf is not among its
operators, Gelu is; and dilated convolutions lose weights of 16 bits (`search.costs.rule_costs`).

Without the model of a chip the simulator stands for one of 2021: it computes floats in 32 bits, which no chip does, and
refuses some graphs with QNN_COMMON_ERROR_MEM_ALLOC (LeakyRelu, Max, Conv). `soc_model` 57 is Snapdragon 8 Gen 3; 43 (8
Gen 2) and 69 (8 Elite) give the same outputs. There floats have 16 bits: of dtln_2 as a float model 21 dB are left.
"""

ENGINES: Mapping[str, EngineFacts] = {
    facts.name: facts for facts in (FAKE, ONNXRUNTIME, OPENVINO, TENSORRT, TENSORRT_RTX, TRTEXEC, CUDA, QNN)
}

PROVIDERS = tuple(name for name, facts in ENGINES.items() if facts.source)

OF_EP: Mapping[str, EngineFacts] = {facts.ep: facts for facts in ENGINES.values() if facts.ep}
"""The records of execution providers, by ONNX Runtime's name."""


def facts_of(engine: str) -> EngineFacts:
    if engine not in ENGINES:
        raise BadOption(f"unknown engine {engine!r}; there are {', '.join(sorted(ENGINES))}")
    return ENGINES[engine]


def facts_of_provider(ep: str) -> EngineFacts:
    """The record of an execution provider, by ONNX Runtime's name; one with defaults if it is not in `ENGINES`."""
    return OF_EP.get(ep) or EngineFacts(name="onnxruntime", ep=ep, saves=OPTIMIZED)
