from qdqtune.errors import one_line


def test_one_line_joins_and_shortens() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line("x" * 999, limit=50)) == 50
