"""Random problems with several labels, small enough to try every assignment, and the cost of one with two."""

import random
from collections.abc import Sequence
from itertools import product

from qdqtune.search.costs.mincut import Conversion, LabelProblem, Problem


def label_problem(seed: int, decisions: int, labels: int, dearest: float = 3.0) -> LabelProblem:
    """A chain with branches: each decision but the last writes a value that one to three later ones read; conversions
    cost up to `dearest`, where decisions alone cost up to 10."""
    draw, problem = random.Random(seed), LabelProblem()
    for _ in range(decisions):
        problem.decision([draw.random() * draw.choice([3, 10]) for _ in range(labels)])
    for maker in range(decisions - 1):
        later = range(maker + 1, decisions)
        readers = {draw.choice(later) for _ in range(draw.choice([1, 1, 2, 3]))}
        prices = tuple(draw.random() * dearest for _ in range(labels))
        problem.conversions.append(Conversion(maker, tuple(sorted(readers)), prices))
    return problem


def least_cost(problem: LabelProblem) -> float:
    """The least cost of all assignments."""
    labels = range(len(problem.costs[0]))
    return min(map(problem.cost, product(labels, repeat=len(problem.costs))))


def cost_of(problem: Problem, answers: Sequence[bool]) -> float:
    """The cost of an assignment of yes and no."""
    single = sum(y if a else n for a, n, y in zip(answers, problem.if_no, problem.if_yes, strict=True))
    charged = zip(problem.yes, problem.no, problem.charges, strict=True)
    return float(single + sum(c for i, j, c in charged if answers[i] and not answers[j]))
