"""The cheapest labels of a table against every assignment."""

import random
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtune.search.costs.table import Table, expansion, solve

COSTS = st.integers(0, 6).map(float) | st.just(inf)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Two labels with small whole costs, so that ties are common and exact. Some forbid; conversions repeat."""
    count = draw(st.integers(1, 6))
    numbers = st.integers(0, count - 1)
    table = Table(draw(st.lists(st.tuples(COSTS, COSTS), min_size=count, max_size=count)))
    readers = st.lists(numbers, min_size=1, max_size=3)
    for conversion in draw(st.lists(st.tuples(numbers, readers, COSTS, COSTS), max_size=8)):
        table.convert(*conversion)
    return table


@given(tables())
def test_two_labels_have_the_optimum_with_the_fewest_ones(table: Table) -> None:
    options = product((0, 1), repeat=len(table.costs))
    cost, _, labels = min((table.total(labels), sum(labels), labels) for labels in options)
    if cost == inf:
        with pytest.raises(ValueError, match="forbid"):
            solve(table)
    else:
        assert tuple(solve(table)) == labels  # it is unique: optima are closed under "and"


def drawn(seed: int, parts: int, labels: int) -> Table:
    """A chain with branches: each part but the last writes a value that one to three later ones read."""
    draw, table = random.Random(seed), Table()
    for _ in range(parts):
        table.part(*(draw.random() * draw.choice([3, 10]) for _ in range(labels)))
    for maker in range(parts - 1):
        readers = {draw.choice(range(maker + 1, parts)) for _ in range(draw.choice([1, 1, 2, 3]))}
        table.convert(maker, sorted(readers), *(draw.random() * 3 for _ in range(labels)))
    return table


@pytest.mark.parametrize("seed", range(12))
def test_three_labels_are_decided_nearly_exactly(seed: int) -> None:
    table = drawn(seed, 7, 3)
    labels = solve(table)
    assert table.total(labels) <= 1.05 * min(map(table.total, product(range(3), repeat=7)))
    for number, label in product(range(7), range(3)):
        assert table.total([*labels[:number], label, *labels[number + 1 :]]) >= table.total(labels) - 1e-6


def test_an_expansion_is_the_best_of_all_sets_that_change() -> None:
    table = drawn(3, 7, 3)
    start = [0, 1, 2, 1, 0, 2, 1]
    every = product(*((label, 1) for label in start))
    assert table.total(expansion(table, start, 1)) == pytest.approx(min(map(table.total, every)), rel=1e-6)


def test_a_value_is_converted_once_for_all_readers_with_a_label() -> None:
    table = Table([(0.0, 1.0)] * 3)
    table.convert(0, (1, 2), 5.0, 7.0)
    assert table.total([0, 1, 1]) == 2 + 7
    assert table.total([1, 0, 1]) == 2 + 5
    assert table.total([0, 0, 0]) == 0


def test_labels_that_are_forbidden_are_not_chosen() -> None:
    table = Table([(inf, 4.0, inf), (0.0, 9.0, 2.0)])
    table.convert(0, (1,), 1.0, 1.0, 1.0)
    assert solve(table) == [1, 0]
    with pytest.raises(ValueError, match="forbid"):
        solve(Table([(inf, inf)]))
    assert solve(Table()) == []


def test_huge_and_tiny_costs_do_not_wrap() -> None:
    """In 32-bit integers the sum of such costs is below zero, and an infinite cost is the cheapest."""
    table = Table([(1e12, 3e11)] * 500)
    forbidden, tiny = table.part(1e12, inf), table.part(1e-12, 0.0)
    for number in range(500):
        table.convert(number, (forbidden,), 0.0, 2e12)
        table.convert(tiny, (number,), 0.0, inf)
    assert solve(table) == [*[1] * 500, 0, 1]


@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**40])
def test_ties_stay_ties_at_every_scale(scale: float) -> None:
    table = Table([(3 * scale, 1 * scale), (0.0, 2 * scale)])
    table.convert(1, (0,), 0.0, 5 * scale)
    assert solve(table) == [0, 0]


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_negative_costs_are_refused(bad: float) -> None:
    table = Table([(0.0, 0.0)] * 2)
    table.convert(0, (1,), 0.0, bad)
    with pytest.raises(ValueError, match="zero"):
        solve(table)


def test_ten_thousand_parts() -> None:
    """A chain whose first part is label 0: it pays to convert once, right behind it."""
    table = Table([(1.0, inf), *[(3.0, 2.0)] * 9_999])
    for number in range(1, 10_000):
        table.convert(number - 1, (number,), 5.0, 7.0)
    assert solve(table) == [0, *[1] * 9_999]
