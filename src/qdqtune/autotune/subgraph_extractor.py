"""Parts of a graph as models of their own, for scripts."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx.utils import Extractor

from qdqtune.autotune.graphs import GraphLike, NotInGraphError, as_model, as_proto
from qdqtune.graph.model import Model
from qdqtune.tuning.subgraphs.groups import borders


def extract_subgraph(graph: GraphLike, input_tensor_names: Sequence[str], output_tensor_names: Sequence[str]) -> bytes:
    """What lies between some tensors, as the bytes of a model.

    Raises:
        NotInGraphError: the graph has no such tensor.
    """
    proto = graph.to_proto() if isinstance(graph, Model) else as_proto(graph)
    known = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    if lacking := {*input_tensor_names, *output_tensor_names} - known:
        raise NotInGraphError(f"tensor {min(lacking)!r} is not found in the graph")
    inferred = onnx.shape_inference.infer_shapes(proto)
    found = Extractor(inferred).extract_model([*input_tensor_names], [*output_tensor_names])
    return found.SerializeToString()


def extract_subgraph_by_nodes(graph: GraphLike, node_names: Sequence[str]) -> bytes:
    """Some nodes, by the tensors that they read from others and others from them, as the bytes of a model.

    Raises:
        NotInGraphError: the graph has none of them.
    """
    model = as_model(graph)
    nodes = [model.index_of[name] for name in node_names if name in model.index_of]
    if not nodes:
        raise NotInGraphError("None of the specified nodes is in the graph")
    return extract_subgraph(model, *borders(model, nodes))
