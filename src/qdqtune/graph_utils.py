"""What scripts for ModelOpt import from a module of this name."""

from typing import Any

import onnx


def get_tensor_consumer_node_indices(graph: Any) -> dict[str, list[int]]:
    """By tensor, the indices of the nodes of an ONNX or GraphSurgeon graph that read it, once for each input."""
    graph = graph.graph if isinstance(graph, onnx.ModelProto) else graph
    is_proto = isinstance(graph, onnx.GraphProto)
    users: dict[str, list[int]] = {}
    for index, node in enumerate(graph.node if is_proto else graph.nodes):
        for tensor in node.input if is_proto else node.inputs:
            users.setdefault(getattr(tensor, "name", tensor), []).append(index)
    users.pop("", None)
    return users
