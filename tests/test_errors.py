from qdqtune.errors import one_line, with_flags


def test_one_line_joins_and_shortens() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line("x" * 999, limit=50)) == 50


def test_only_options_are_spelled_as_flags() -> None:
    text = "`time_budget` of `object` and `null`"
    assert with_flags(text, {"time_budget": "--time-budget"}) == "--time-budget of `object` and `null`"


def test_backquotes_of_other_programs_name_no_option() -> None:
    assert one_line(ValueError("Expected `engine`, got `null`")) == "Expected 'engine', got 'null'"
