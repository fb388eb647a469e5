"""XNNPACK: the CPU of phones, in builds of ONNX Runtime for them."""

from qdqtune.engines.providers.provider import DOCUMENTS, NUMBER, Provider
from qdqtune.types import NumericFormat, QType

PROVIDER = Provider(
    name="xnnpack",
    ep="XnnpackExecutionProvider",
    install="a build of ONNX Runtime with --use_xnnpack: the packages for Android and iOS have it",
    known="from its documents",
    source=f"{DOCUMENTS}/Xnnpack-ExecutionProvider.html",
    like="onnxruntime",
    numbers=NumericFormat(QType.INT8, QType.INT8, symmetric=True, bias="int32"),
    notes="convolutions, pools, Softmax and Resize; channels need int8 activations",
    plain={"intra_op_num_threads": NUMBER},
    uses_threads=True,
    threads_option="intra_op_num_threads",
)
