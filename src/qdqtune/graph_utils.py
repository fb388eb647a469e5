"""ModelOpt's module of this name: what its scripts import from there."""

from typing import Any

import onnx


def get_tensor_consumer_node_indices(graph: Any) -> dict[str, list[int]]:
    """For each tensor of an ONNX or GraphSurgeon graph, the indices of the nodes that read it, one for each input."""
    graph = graph.graph if isinstance(graph, onnx.ModelProto) else graph
    is_proto = isinstance(graph, onnx.GraphProto)
    users: dict[str, list[int]] = {}
    for index, node in enumerate(graph.node if is_proto else graph.nodes):
        for tensor in node.input if is_proto else node.inputs:
            users.setdefault(getattr(tensor, "name", tensor), []).append(index)
    users.pop("", None)
    return users
