"""The catalogue of operator families."""

from collections.abc import Iterable

import onnx
import pytest

from qdqtune.graph import operators

OPTIMIZED = {
    "DynamicQuantizeMatMul", "FastGelu", "FusedConv", "FusedGemm", "FusedMatMul", "MatMulIntegerToFloat",
    "MultiHeadAttention", "QAttention", "QGemm", "QuickGelu", "SimplifiedLayerNormalization",
}  # fmt: skip
"""Operators that ONNX Runtime's optimizer makes."""

FAMILIES: dict[str, Iterable[str]] = {
    name: value for name, value in vars(operators).items() if name.isupper() and isinstance(value, frozenset | dict)
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operator_of_a_family_exists(family: str) -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()} | OPTIMIZED
    assert FAMILIES[family]
    assert not set(FAMILIES[family]) - known


def test_settings_are_inputs_that_their_operators_have() -> None:
    for op, first in operators.SETTINGS_FROM.items():
        versions = [s for s in onnx.defs.get_all_schemas_with_history() if s.name == op]
        assert max(len(schema.inputs) for schema in versions) > first
