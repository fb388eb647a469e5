"""DirectML: any GPU on Windows."""

from qdqtune.engines.providers.provider import DOCUMENTS, NUMBER, Provider
from qdqtune.types import NumericFormat, QType

PROVIDER = Provider(
    name="directml",
    ep="DmlExecutionProvider",
    install="pip install onnxruntime-directml (on Windows)",
    known="from its documents",
    source=f"{DOCUMENTS}/DirectML-ExecutionProvider.html",
    like="onnxruntime",
    numbers=NumericFormat(QType.UINT8, QType.INT8, symmetric=False, bias="int32"),
    notes="opset 20 at most; no memory patterns, one inference at a time",
    weights=("w4b32", "w4b128"),
    plain={"device_id": NUMBER},
    systems=("win32",),
    is_gpu=True,
)
