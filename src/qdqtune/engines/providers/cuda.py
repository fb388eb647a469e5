"""CUDA: NVIDIA's GPUs, a kernel for each node."""

from qdqtune.engines.providers.provider import DOCUMENTS, NUMBER, SWITCH, SYMMETRIC, Provider

PROVIDER = Provider(
    name="cuda",
    ep="CUDAExecutionProvider",
    install="pip install onnxruntime-gpu",
    known="tried with onnxruntime-gpu 1.31.1 on an H200",
    source=f"{DOCUMENTS}/CUDA-ExecutionProvider.html",
    like="tensorrt",
    numbers=SYMMETRIC,
    notes="Q and DQ run as kernels of their own; 8-bit convolutions have none. Weights alone: blocks of 4 and 8 bits",
    weights=("w4b32", "w4b128", "w4b32a", "w4b128a", "w8b32", "w8b128"),
    plain={
        **dict.fromkeys(("enable_cuda_graph", "use_tf32", "prefer_nhwc", "cudnn_conv_use_max_workspace"), SWITCH),
        **dict.fromkeys(("device_id", "gpu_mem_limit", "sdpa_kernel"), NUMBER),
        "cudnn_conv_algo_search": "[A-Z]+",
    },
    is_gpu=True,
    memory="cuda",
    precision="fp16",
    recording="enable_cuda_graph",
)
