"""Explanations of nodes, added up by decision and reason."""

from dataclasses import replace

from qdqtune.explanation.explanations import Explanation, origin_in_words, tally, total

ROW = Explanation("a", "MatMul", ("a", "b"), True, "int8", "faster", "", 2.0, 4.0, 1.0, measured=True)


def test_units_count_once_and_the_most_time_comes_first() -> None:
    rows = [ROW, replace(ROW, node="b"), replace(ROW, node="c", unit=("c",), ms=1.0, measured=False)]
    rows.append(replace(ROW, node="d", unit=("d",), quantized=False, why="slower", ms=9.0, margin_ms=None))
    slower, faster = tally(rows, lambda units: float(len(units)))
    assert (slower.runs_in, slower.nodes, slower.ms, slower.margin_ms) == ("float", 1, 9.0, None)
    assert (faster.runs_in, faster.nodes, faster.ms, faster.float_ms) == ("8 bits", 3, 3.0, 8.0)
    assert (faster.margin_ms, faster.measured, faster.example) == (2.0, False, "a")


def test_what_is_not_known_adds_nothing() -> None:
    assert total([1.0, None, 2.0]) == 3.0
    assert total([None]) is None


def test_every_origin_has_words() -> None:
    assert origin_in_words("cut") == "the cut of the prices"
    assert origin_in_words("compute") == "the rule 'compute'"
    assert origin_in_words("mine") == "the candidate 'mine'"
