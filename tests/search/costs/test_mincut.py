"""The minimum cut against every assignment."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from label_problems import cost_of
from qdqtune.search.costs.mincut import CAPACITY, Problem, solve

COSTS = st.integers(0, 6).map(float) | st.just(inf)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small whole costs, so that ties are common and exact. Some forbid; pairs repeat, also of one decision."""
    count = draw(st.integers(1, 7))
    numbers = st.integers(0, count - 1)
    problem = Problem()
    for if_no, if_yes in draw(st.lists(st.tuples(COSTS, COSTS), min_size=count, max_size=count)):
        problem.decision(if_no, if_yes)
    for yes, no, cost in draw(st.lists(st.tuples(numbers, numbers, COSTS), max_size=14)):
        problem.charge(yes, no, cost)
    return problem


def best_answers(problem: Problem) -> tuple[bool, ...] | None:
    """By trying all: the cheapest, and among those the one with the fewest yeses; None if all are forbidden."""
    options = product((False, True), repeat=len(problem.if_no))
    cost, _, answers = min((cost_of(problem, a), sum(a), a) for a in options)
    return None if cost == inf else answers


@given(problems())
def test_it_finds_the_optimum_with_the_fewest_yeses(problem: Problem) -> None:
    expected = best_answers(problem)
    if expected is None:
        with pytest.raises(ValueError, match="forbid"):
            solve(problem)
    else:
        assert tuple(solve(problem)) == expected  # the smallest set of yeses is unique: optima are closed under "and"


@given(st.lists(st.floats(1e-9, 1e9), min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_costs_of_any_size_are_minimized_up_to_rounding(costs: list[float], random: object) -> None:
    problem = Problem()
    for k in range(4):
        problem.decision(costs[k], costs[7 - k])
    for k in range(4):
        problem.charge(k, (k + 1) % 4, costs[k])
    lowest = min(cost_of(problem, a) for a in product((False, True), repeat=4))
    assert cost_of(problem, solve(problem)) <= lowest + 1e-7 * sum(costs)


def test_huge_and_tiny_costs_do_not_wrap() -> None:
    """In 32-bit integers the sum of such costs is below zero, and an infinite cost is the cheapest."""
    problem = Problem()
    for _ in range(500):
        problem.decision(if_no=1e12, if_yes=3e11)
    forbidden = problem.decision(if_no=1e12, if_yes=inf)
    tiny = problem.decision(if_no=1e-12)
    for k in range(500):
        problem.charge(forbidden, k, 2e12)
        problem.charge(k, tiny, inf)
    answers = solve(problem)
    assert all(answers[:500])
    assert not answers[forbidden]
    assert answers[tiny]


@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**40])
def test_ties_stay_ties_at_every_scale(scale: float) -> None:
    problem = Problem()
    first, second = problem.decision(if_no=3 * scale, if_yes=1 * scale), problem.decision(if_yes=2 * scale)
    problem.charge(first, second, 5 * scale)
    assert solve(problem) == [False, False]


def test_what_is_charged_twice_costs_twice() -> None:
    problem = Problem()
    gain, other = problem.decision(if_no=5.0), problem.decision(if_yes=inf)
    problem.charge(gain, other, 3.0)
    assert solve(problem) == [True, False]
    problem.charge(gain, other, 3.0)
    assert solve(problem) == [False, False]


def test_many_infinite_costs_on_one_pair_are_one() -> None:
    problem = Problem()
    wanted, needed = problem.decision(if_no=4.0), problem.decision(if_yes=1.0)
    for _ in range(10_000):
        problem.charge(wanted, needed, inf)
    assert solve(problem) == [True, True]


def test_free_decisions_are_no() -> None:
    problem = Problem()
    problem.decision()
    problem.decision(if_no=0.0, if_yes=inf)
    assert solve(problem) == [False, False]
    assert solve(Problem()) == []


def test_a_contradiction_is_refused() -> None:
    problem = Problem()
    must, cannot = problem.decision(if_no=inf), problem.decision(if_yes=inf)
    assert solve(problem) == [True, False]
    problem.charge(must, cannot, inf)
    with pytest.raises(ValueError, match="forbid"):
        solve(problem)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_negative_costs_are_refused(bad: float) -> None:
    problem = Problem()
    problem.decision(if_yes=bad)
    with pytest.raises(ValueError, match="zero"):
        solve(problem)


def test_ten_thousand_decisions() -> None:
    """A chain, where dynamic programming knows the optimum."""
    random = np.random.default_rng(0)
    singles, steps = random.integers(0, 50, (10_000, 2)), random.integers(0, 20, (10_000, 2))
    problem = Problem()
    for k, (if_no, if_yes) in enumerate(singles.tolist()):
        problem.decision(if_no, if_yes)
        if k:
            problem.charge(k - 1, k, float(steps[k, 0]))
            problem.charge(k, k - 1, float(steps[k, 1]))
    no, yes = 0, 0
    for k, (if_no, if_yes) in enumerate(singles.tolist()):
        down, up = steps[k].tolist() if k else (0, 0)
        no, yes = min(no, yes + down) + if_no, min(yes, no + up) + if_yes
    assert singles.sum() < CAPACITY
    assert cost_of(problem, solve(problem)) == min(no, yes)
