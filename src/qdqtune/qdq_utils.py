"""What scripts for ModelOpt import from a module of this name."""

import onnx


def get_quantized_tensors(onnx_model: onnx.ModelProto) -> set[str]:
    """The tensors of a Q/DQ model that carry a pair: what QuantizeLinear reads, and constants stored as integers."""
    nodes = onnx_model.graph.node
    source = {node.output[0]: node.input[0] for node in nodes if node.op_type == "QuantizeLinear"}
    return {source.get(node.input[0], node.input[0]) for node in nodes if node.op_type == "DequantizeLinear"}
