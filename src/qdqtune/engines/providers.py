"""The execution providers of ONNX Runtime that are engines, each with a table of all that qdqtune knows of it.

`provider` NAME of the engine onnxruntime runs any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from qdqtune.types import FixedScale, NumericFormat, QType

DOCUMENTS = "https://onnxruntime.ai/docs/execution-providers"

SYMMETRIC = NumericFormat(QType.INT8, QType.INT8, symmetric=True)
"""Numbers that every provider computes with, if only after it has made floats of them."""

PLAIN_VALUE = re.compile("[A-Za-z0-9_:,.]+")
"""Values of plain options: no path leads out of a folder without a slash."""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An execution provider of ONNX Runtime, as an engine.

    name: what `engine` calls it.
    ep: what ONNX Runtime calls it.
    numbers: the format of int8 pairs.
    install: the command or the build that brings it.
    source: the address of its documents; "" for a provider of which nobody has looked at what it leaves to others.
    like: the engine whose placement rules hold for it.
    weights: weight formats of products.
    plugin: the Python module of its plug-in package, whose `get_library_path` names the library; "" if it is built into
        ONNX Runtime. The engine's option `library` names another library.
    options: its own options by default.
    plain: its own options that name no file, library or address in memory: only these are taken from folders that may
        come from elsewhere.
    is_gpu: whether each worker needs a GPU of its own.
    memory: what ONNX Runtime calls the memory of its device; by default that of the CPU.
    precision: the usual precision of what stays in float.
    has_fixed_sizes: whether it takes models only whose sizes are all fixed.
    compiles: whether it runs many nodes as one, so that ONNX Runtime cannot write its graph or time single nodes.
    simulated_on: processors (as `platform.machine` names them) on which it is a simulator: outputs and partitions are
        those of the device, times mean nothing.
    simulated_as: options that say which chip the simulator stands for.
    words: patterns of its log with a group `nodes`, a text with names of nodes in it, and a group `reason`. For each
        node the first pattern that tells of it counts.
    """

    name: str
    ep: str
    numbers: NumericFormat
    install: str = ""
    source: str = ""
    like: str = "onnxruntime"
    weights: tuple[str, ...] = ()
    plugin: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    plain: frozenset[str] = frozenset()
    is_gpu: bool = False
    memory: str = "cpu"
    precision: Literal["fp32", "fp16"] = "fp32"
    has_fixed_sizes: bool = False
    compiles: bool = False
    simulated_on: tuple[str, ...] = ()
    simulated_as: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


CUDA = Provider(
    name="cuda",
    ep="CUDAExecutionProvider",
    install="pip install onnxruntime-gpu",
    source=f"{DOCUMENTS}/CUDA-ExecutionProvider.html",
    like="tensorrt",
    numbers=SYMMETRIC,
    weights=("w4b32", "w4b128", "w4b32a", "w4b128a", "w8b32", "w8b128"),
    is_gpu=True,
    memory="cuda",
    precision="fp16",
    plain=frozenset({
        "use_tf32", "prefer_nhwc", "cudnn_conv_use_max_workspace", "device_id",
        "gpu_mem_limit", "sdpa_kernel", "cudnn_conv_algo_search",
    }),
)  # fmt: skip
"""CUDA: NVIDIA's GPUs, a kernel for each node. Tried with onnxruntime-gpu 1.31.1 on an H200."""

QNN = Provider(
    name="qnn",
    ep="QNNExecutionProvider",
    install="pip install 'qdqtune[qnn]'",
    source=f"{DOCUMENTS}/QNN-ExecutionProvider.html",
    like="qnn",
    numbers=NumericFormat(
        QType.UINT8,
        QType.INT8,
        symmetric=False,
        bias="int32",
        drop_clamps=True,
        wide=QType.UINT16,
        wide_scales=(FixedScale("Sigmoid", 2**-16, 0), FixedScale("Tanh", 2**-15, 2**15), FixedScale("Log", 4 / 65535)),
    ),
    plugin="onnxruntime_qnn",
    options={"backend_type": "htp"},
    plain=frozenset({
        "backend_type", "soc_model", "htp_arch", "vtcm_mb", "device_id", "enable_htp_fp16_precision",
        "offload_graph_io_quantization", "htp_graph_finalization_optimization_mode", "htp_performance_mode",
    }),
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
of its output is below 2^-14, and of a product of two activations the second is rounded to 8 bits.

Without the model of a chip the simulator stands for one of 2021: it computes floats in 32 bits, which no chip does, and
refuses some graphs with QNN_COMMON_ERROR_MEM_ALLOC (LeakyRelu, Max, Conv). `soc_model` 57 is Snapdragon 8 Gen 3; 43 (8
Gen 2) and 69 (8 Elite) give the same outputs. There floats have 16 bits: of dtln_2 as a float model 21 dB are left.
"""

PROVIDERS: Mapping[str, Provider] = MappingProxyType({table.name: table for table in (CUDA, QNN)})
"""Execution providers by the name that `engine` has for them."""

OF_EP: Mapping[str, Provider] = MappingProxyType({table.ep: table for table in PROVIDERS.values()})
"""Execution providers by ONNX Runtime's name."""


def table_of(ep: str) -> Provider:
    """The table of an execution provider by ONNX Runtime's name; for the CPU's, and for one that nobody has tried, one
    with the usual values."""
    return OF_EP.get(ep) or Provider(name="onnxruntime", ep=ep, numbers=SYMMETRIC)
