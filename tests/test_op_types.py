"""Operators whose inputs may change places, as scripts for ModelOpt ask for them."""

from qdqtune.op_types import get_symmetric_ops


def test_operators_whose_inputs_may_change_places() -> None:
    found = get_symmetric_ops()
    assert {"Add", "Mul"} <= found
    assert not {"Sub", "Div", "MatMul"} & found
