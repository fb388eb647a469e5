"""The catalogue of operator families."""

import ast
from collections.abc import Iterable
from pathlib import Path

import onnx
import pytest

from qdqtune.graph import operators

OPTIMIZED = {
    "DynamicQuantizeMatMul", "FastGelu", "FusedConv", "FusedGemm", "FusedMatMul", "MatMulIntegerToFloat",
    "MultiHeadAttention", "QAttention", "QGemm", "QuickGelu", "SimplifiedLayerNormalization",
}  # fmt: skip
"""Operators that ONNX Runtime's optimizer makes."""

SOURCES = Path(operators.__file__).parent.parent

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


def members(node: ast.expr) -> frozenset[str]:
    """The texts of a literal set or tuple; nothing for any other expression."""
    elements = node.elts if isinstance(node, ast.Set | ast.Tuple) else []
    texts = frozenset(e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str))
    return texts if len(texts) == len(elements) else frozenset()


def test_no_family_is_written_again_elsewhere() -> None:
    families = {frozenset(family): name for name, family in FAMILIES.items()}
    written = set()
    for path, text in ((path, path.read_text()) for path in sorted(SOURCES.rglob("*.py"))):
        if not any(all(f'"{op}"' in text for op in family) for family in families):
            continue  # parsing takes a while
        for node in ast.walk(ast.parse(text)):
            asked = node.comparators if isinstance(node, ast.Compare) else [node] if isinstance(node, ast.Set) else []
            written |= {(path.name, families[m]) for m in map(members, asked) if m in families}
    assert {name for name, _ in written} == {"operators.py"}
