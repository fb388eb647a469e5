"""QNN: the NPU of Qualcomm's processors, and on x86 its simulator.

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

from qdqtune.engines.providers.provider import DOCUMENTS, NUMBER, SWITCH, Provider
from qdqtune.types import FixedScale, NumericFormat, QType

PROVIDER = Provider(
    name="qnn",
    ep="QNNExecutionProvider",
    install="pip install 'qdqtune[qnn]'",
    known="tried with onnxruntime-qnn 2.7.0: the simulator, not the chip",
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
    notes="8 or 16 bits by tensor; what carries no pair runs in float16; static shapes; int4 weights run, not offered",
    plugin="onnxruntime_qnn",
    options={"backend_type": "htp"},
    plain={
        "backend_type": "htp|cpu|gpu",
        **dict.fromkeys(("soc_model", "htp_arch", "vtcm_mb", "device_id"), NUMBER),
        **dict.fromkeys(("enable_htp_fp16_precision", "offload_graph_io_quantization"), SWITCH),
        "htp_graph_finalization_optimization_mode": NUMBER,
        "htp_performance_mode": "[a-z_]+",
    },
    has_fixed_sizes=True,
    compiles=True,
    simulated_on=("x86_64", "AMD64"),
    simulated_as={"soc_model": "57"},
    words=(
        r"(?P<reason>QNN\.backendValidateOpConfig\(\) failed for node `(?P<nodes>[^`\n]*)`[^\n\x1b]*)",
        r"Validation FAILED[^\n]*\n(?P<nodes>(?:\s*Operator type:[^\n]*\n)+)\s*REASON : (?P<reason>[^\n]*)",
    ),
)
