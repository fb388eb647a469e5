"""ModelOpt's module of this name: what its scripts import from there."""

import onnx


def get_quantized_tensors(onnx_model: onnx.ModelProto) -> set[str]:
    """The tensors of a Q/DQ model that carry a pair: inputs of QuantizeLinear, and constants stored as integers."""
    nodes = onnx_model.graph.node
    source = {node.output[0]: node.input[0] for node in nodes if node.op_type == "QuantizeLinear"}
    return {source.get(node.input[0], node.input[0]) for node in nodes if node.op_type == "DequantizeLinear"}
