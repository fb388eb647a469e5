"""What scripts for ModelOpt import from a module of this name."""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model


class QuantizedTensors(set[str]):
    """Names of tensors that carry a pair, and the model with them: names alone do not say on which uses pairs stand."""

    def __init__(self, names: Iterable[str], model: Model) -> None:
        super().__init__(names)
        self.model = model


def get_quantized_tensors(onnx_model: onnx.ModelProto) -> QuantizedTensors:
    """The tensors of a Q/DQ model that carry a pair: what QuantizeLinear reads, and constants that are integers there.

    Raises:
        BadModel: the model is invalid.
    """
    model = load_proto(onnx_model)
    source = {node.outputs[0]: node.inputs[0] for node in model.nodes if node.op == "QuantizeLinear"}
    pairs = (node.inputs[0] for node in model.nodes if node.op == "DequantizeLinear")
    return QuantizedTensors((source.get(tensor, tensor) for tensor in pairs), model)
