"""Results that show themselves."""

from qdqtune.commands.check import Layers
from qdqtune.commands.shown import MOST_ROWS
from qdqtune.types import Layer


def test_names_from_models_are_escaped_and_long_tables_end() -> None:
    hostile = Layer("<script>alert(1)</script>", ("a&b",), "FP32", 1.0, "compute")
    html = Layers("fake", (hostile,) * (MOST_ROWS + 5))._repr_html_()
    assert "<script>" not in html
    assert "a&amp;b" in html
    assert html.count("<tr>") == MOST_ROWS + 1
    assert "and 5 more" in html
