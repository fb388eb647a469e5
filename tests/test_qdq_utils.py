"""Tensors that carry a pair, as scripts for ModelOpt ask for them."""

from models import PLAIN, build, edges, normal, ranges
from qdqtune.placement.insertion import insert
from qdqtune.qdq_utils import get_quantized_tensors
from qdqtune.types import Placement


def test_tensors_with_pairs_are_found_by_their_float_names_and_integer_constants_by_their_own() -> None:
    net = "net (float[4,8] x) => (float[4,8] y) { [a] t = MatMul(x, w) [b] y = MatMul(t, v) }"
    model = build(net, {"w": normal(8, 8), "v": normal(8, 8, seed=1)})
    quantized = insert(model, Placement.of(edges("x a 0", "w a 1")), ranges(model), PLAIN).to_proto()
    found = get_quantized_tensors(quantized)
    assert "x" in found
    assert len(found) == 2
    assert found - {"x"} <= {t.name for t in quantized.graph.initializer}
    assert not get_quantized_tensors(model.to_proto())
