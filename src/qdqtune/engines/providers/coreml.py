"""CoreML: the GPU and the Neural Engine of Apple's processors."""

from qdqtune.engines.providers.provider import DOCUMENTS, SYMMETRIC, Provider

NO_PAIRS = "CoreML's provider has no Q and DQ: pairs split the model, and 8 bits gain nothing"

PROVIDER = Provider(
    name="coreml",
    ep="CoreMLExecutionProvider",
    install="pip install onnxruntime (on macOS)",
    known="from its documents",
    source=f"{DOCUMENTS}/CoreML-ExecutionProvider.html",
    like="onnxruntime",
    numbers=SYMMETRIC,
    notes="float32 and float16; static shapes",
    options={"ModelFormat": "MLProgram"},
    plain=dict.fromkeys(("ModelFormat", "MLComputeUnits", "SpecializationStrategy"), "[A-Za-z]+"),
    systems=("darwin",),
    compiles=True,
    refuses=dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), NO_PAIRS),
)
