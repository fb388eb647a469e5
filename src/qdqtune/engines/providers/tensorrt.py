"""TensorRT inside ONNX Runtime; the engine tensorrt is TensorRT itself."""

from qdqtune.engines.providers.provider import DOCUMENTS, NUMBER, SWITCH, Provider

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
    plain={
        **dict.fromkeys(
            (
                "trt_int8_enable",
                "trt_fp16_enable",
                "trt_bf16_enable",
                "trt_cuda_graph_enable",
                "trt_sparsity_enable",
                "trt_layer_norm_fp32_fallback",
            ),
            SWITCH,
        ),
        **dict.fromkeys(
            ("device_id", "trt_max_workspace_size", "trt_min_subgraph_size", "trt_builder_optimization_level"), NUMBER
        ),
        **dict.fromkeys(("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes"), ".*"),
    },
    is_gpu=True,
    memory="cuda",
    precision="fp16",
    compiles=True,
)
