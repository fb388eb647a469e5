"""What users import by name, and the modules of which scripts for ModelOpt import one function each."""

import pytest

import qdqtune
from models import PLAIN, build, edges, normal, ranges
from qdqtune.graph_utils import get_tensor_consumer_node_indices
from qdqtune.op_types import get_symmetric_ops
from qdqtune.placement.insertion import insert
from qdqtune.qdq_utils import get_quantized_tensors
from qdqtune.types import Placement


def test_readers_symmetric_operators_and_tensors_with_pairs() -> None:
    model = build("net (float[4] x) => (float[4] y) { [a] t = Abs(x) [b] u = Neg(t) [c] y = Add(t, u) }")
    found = get_tensor_consumer_node_indices(model.to_proto().graph)
    assert {tensor: sorted(found[tensor]) for tensor in ("x", "t", "u")} == {"x": [0], "t": [1, 2], "u": [2]}
    assert not found.get("y")
    assert {"Add", "Mul"} <= get_symmetric_ops()
    assert not {"Sub", "Div", "MatMul"} & get_symmetric_ops()
    product = build("net (float[4,8] x) => (float[4,8] y) { [a] y = MatMul(x, w) }", {"w": normal(8, 8)})
    quantized = insert(product, Placement.of(edges("x a 0", "w a 1")), ranges(product), PLAIN).to_proto()
    carriers = get_quantized_tensors(quantized)
    assert "x" in carriers
    assert len(carriers) == 2
    assert carriers - {"x"} <= {t.name for t in quantized.graph.initializer}
    assert not get_quantized_tensors(product.to_proto())


def test_each_public_name_can_be_imported() -> None:
    assert all(getattr(qdqtune, name) for name in qdqtune.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        _ = qdqtune.no_such
