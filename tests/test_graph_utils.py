"""Readers of a tensor, as scripts for ModelOpt ask for them."""

from models import build
from qdqtune.graph_utils import get_tensor_consumer_node_indices


def test_readers_of_tensors_by_number() -> None:
    graph = (
        build("net (float[4] x) => (float[4] y) { [a] t = Abs(x) [b] u = Neg(t) [c] y = Add(t, u) }").to_proto().graph
    )
    found = get_tensor_consumer_node_indices(graph)
    assert {tensor: sorted(found[tensor]) for tensor in ("x", "t", "u")} == {"x": [0], "t": [1, 2], "u": [2]}
    assert not found.get("y")
