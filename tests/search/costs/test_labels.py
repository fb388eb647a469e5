"""Several labels for each decision: against every assignment, where these can be tried."""

from math import inf

import pytest

from label_problems import label_problem, least_cost
from qdqtune.search.costs.mincut import Conversion, LabelProblem, cheapest, expansion


@pytest.mark.parametrize("seed", range(12))
def test_two_labels_are_decided_exactly(seed: int) -> None:
    problem = label_problem(seed, 9, 2)
    assert problem.cost(cheapest(problem)) == pytest.approx(least_cost(problem), rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_three_labels_are_decided_nearly_exactly(seed: int) -> None:
    problem = label_problem(seed, 7, 3)
    assert problem.cost(cheapest(problem)) <= 1.05 * least_cost(problem)


@pytest.mark.parametrize("seed", range(6))
def test_no_single_change_of_a_label_gains(seed: int) -> None:
    problem = label_problem(seed, 30, 3)
    found = cheapest(problem)
    for number in range(30):
        for label in range(3):
            assert problem.cost([*found[:number], label, *found[number + 1 :]]) >= problem.cost(found) - 1e-6


def test_an_expansion_is_the_best_of_all_sets_that_change() -> None:
    problem = label_problem(3, 7, 3)
    start = [0, 1, 2, 1, 0, 2, 1]
    sets = (
        problem.cost([1 if mask >> n & 1 else label for n, label in enumerate(start)])
        for mask in range(2 ** len(start))
    )
    assert problem.cost(expansion(problem, start, 1)) == pytest.approx(min(sets), rel=1e-6)


def test_a_value_is_converted_once_for_all_readers_with_a_label() -> None:
    problem = LabelProblem([(0.0, 1.0)] * 3, [Conversion(0, (1, 2), (5.0, 7.0))])
    assert problem.cost([0, 1, 1]) == 2 + 7
    assert problem.cost([1, 0, 1]) == 2 + 5
    assert problem.cost([0, 0, 0]) == 0


def test_labels_that_are_forbidden_are_not_chosen() -> None:
    problem = LabelProblem([(inf, 4.0, inf), (0.0, 9.0, 2.0)], [Conversion(0, (1,), (1.0, 1.0, 1.0))])
    assert cheapest(problem) == [1, 0]


def test_a_decision_without_a_label_is_refused() -> None:
    with pytest.raises(ValueError, match="no label that is allowed"):
        cheapest(LabelProblem([(inf, inf)]))


def test_nothing_to_decide() -> None:
    assert cheapest(LabelProblem()) == []
