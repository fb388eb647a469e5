"""OpenVINO inside ONNX Runtime; the engine openvino is OpenVINO itself."""

from qdqtune.engines.providers.provider import DOCUMENTS, NUMBER, Provider

PROVIDER = Provider(
    name="ort-openvino",
    ep="OpenVINOExecutionProvider",
    install="pip install onnxruntime-openvino, in an environment without onnxruntime",
    known="tried with onnxruntime-openvino 1.24.1 on the CPU",
    source=f"{DOCUMENTS}/OpenVINO-ExecutionProvider.html",
    like="openvino",
    notes="numbers of the engine openvino",
    options={"device_type": "CPU"},
    plain={
        "device_type": "[A-Z0-9:,.]+",
        "precision": "[A-Z0-9]+",
        **dict.fromkeys(("num_of_threads", "num_streams"), NUMBER),
        **dict.fromkeys(("disable_dynamic_shapes", "enable_qdq_optimizer"), "[A-Za-z]+"),
    },
    uses_threads=True,
    threads_option="num_of_threads",
    compiles=True,
)
