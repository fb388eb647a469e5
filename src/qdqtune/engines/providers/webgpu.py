"""WebGPU: any GPU with Vulkan, Metal or Direct3D 12, as a plug-in."""

from qdqtune.engines.providers.provider import DOCUMENTS, SYMMETRIC, Provider

PROVIDER = Provider(
    name="webgpu",
    ep="WebGpuExecutionProvider",
    install="pip install 'qdqtune[webgpu]'",
    known="from its documents; onnxruntime-ep-webgpu 0.4.0 loads here and finds no GPU",
    source=f"{DOCUMENTS}/WebGPU-ExecutionProvider.html",
    like="onnxruntime",
    numbers=SYMMETRIC,
    notes="float32 and float16; no 8-bit kernels. Weights alone: blocks of 4 bits",
    weights=("w4b32", "w4b128"),
    plugin="onnxruntime_ep_webgpu",
    plain={"preferredLayout": "[A-Z]+", "enableGraphCapture": "[01]"},
    is_gpu=True,
    refuses={"QuantizeLinear": "WebGPU has no 8-bit kernels: pairs split the model"},
)
