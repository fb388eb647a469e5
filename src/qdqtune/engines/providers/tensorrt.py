"""TensorRT inside ONNX Runtime; the engine tensorrt is TensorRT itself."""

from qdqtune.engines.providers.provider import DOCUMENTS, Provider

PROVIDER = Provider(
    name="ort-tensorrt",
    ep="TensorrtExecutionProvider",
    install="pip install onnxruntime-gpu tensorrt",
    known="from its documents",
    source=f"{DOCUMENTS}/TensorRT-ExecutionProvider.html",
    like="tensorrt",
    notes="numbers of the engine tensorrt, zero points must be 0; what it leaves goes to the CPU",
    weights=("w4b64", "w4b128"),
    options={"trt_int8_enable": "1"},
    is_gpu=True,
    memory="cuda",
    precision="fp16",
    compiles=True,
)
