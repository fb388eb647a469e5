"""Minimization of a cost over decisions by minimum s-t cuts: exact for yes or no, nearly so for more answers.

`Problem`: the cost is a sum of terms for one decision (cost if no, cost if yes) and for two (cost if one is yes and the
other no), all at least zero. Such a function is submodular, and a minimum cut is its optimum over all assignments.

`LabelProblem`: a decision is a label, namely how many bits a part of a graph computes in. The cost is a sum of terms
for one decision, and of charges for conversions between decisions with different labels. Two labels make it one
minimum cut, which is exact. With more, alpha expansion (Boykov, Veksler and Zabih, IEEE PAMI 23, 2001) lets any set of
decisions change to one label at a time, the best such set by one cut, until no label gains: no single cut improves the
result any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

CAPACITY = 2**30
"""SciPy's flows are 32-bit integers that wrap without an error: the sum of all finite capacities stays below this."""


@dataclass
class Problem:
    """A cost under construction. Decisions are numbered from 0; an infinite cost forbids. `charges[k]` is paid if
    decision `yes[k]` is yes while `no[k]` is no."""

    if_no: list[float] = field(default_factory=list)
    if_yes: list[float] = field(default_factory=list)
    yes: list[int] = field(default_factory=list)
    no: list[int] = field(default_factory=list)
    charges: list[float] = field(default_factory=list)

    def decision(self, if_no: float = 0.0, if_yes: float = 0.0) -> int:
        self.if_no.append(if_no)
        self.if_yes.append(if_yes)
        return len(self.if_no) - 1

    def charge(self, yes: int, no: int, cost: float) -> None:
        """Add a cost that is paid if decision `yes` is yes while decision `no` is no."""
        self.yes.append(yes)
        self.no.append(no)
        self.charges.append(cost)


def solve(problem: Problem) -> list[bool]:
    """The cheapest assignment; among equal ones, that with the fewest yeses.

    Costs are rounded to integers of about 1e-9 of their sum.

    Raises:
        ValueError: a cost is negative or NaN, or every assignment is forbidden.
    """
    from scipy.sparse import coo_array, csgraph, csr_array  # slow to import

    count = len(problem.if_no)
    if not count:
        return []
    source, sink = count, count + 1
    numbers = np.arange(count)
    tails = np.concatenate([np.full(count, source), numbers, problem.yes]).astype(np.int32)
    heads = np.concatenate([numbers, np.full(count, sink), problem.no]).astype(np.int32)
    costs = np.concatenate([problem.if_no, problem.if_yes, problem.charges]).astype(np.float64)
    if np.isnan(costs).any() or (costs < 0).any():
        raise ValueError("costs are at least zero")
    size = (count + 2, count + 2)
    integers, infinite = _integers(costs)
    whole = csr_array(coo_array((integers, (tails, heads)), shape=size))  # adds up what is charged twice
    capped = np.minimum(whole.data, infinite).astype(np.int32)
    capacity = csr_array((capped, whole.indices, whole.indptr), size)
    flow = csgraph.maximum_flow(capacity, source, sink).flow
    residual = csr_array(whole - flow.astype(np.int64))
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = csgraph.breadth_first_order(residual, source, return_predecessors=False)
    answers = np.zeros(count + 2, bool)
    answers[reached] = True
    paid = answers[tails] & ~answers[heads]
    if answers[sink] or np.isinf(costs[paid]).any():
        raise ValueError("the costs forbid every assignment")
    decided: list[bool] = answers[:count].tolist()
    return decided


def _integers(costs: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], int]:
    """Costs as integers whose finite part sums below `CAPACITY`, and the integer that stands for infinity: one more
    than that sum.

    The factor is a power of two, so that costs that are small whole numbers stay exact and ties stay ties.
    """
    finite = np.isfinite(costs)
    total = costs[finite].sum()
    room = CAPACITY - len(costs)  # rounding may add half a unit to each cost
    factor = 2.0 ** np.floor(np.log2(room / total)) if total > 0 else 0.0
    scaled = np.rint(np.where(finite, costs, 0.0) * factor).astype(np.int64)
    infinite = int(scaled.sum()) + 1
    return np.where(finite, scaled, infinite), infinite


LEAST_GAIN = 1e-9
"""Share of the cost that a change must save: less comes from rounding."""


@dataclass(frozen=True)
class Conversion:
    """A value that decision `maker` writes with its label, and `readers` read with theirs. For each label that a reader
    has and the maker has not, the value is converted once, at the price of that label in `prices`."""

    maker: int
    readers: tuple[int, ...]
    prices: tuple[float, ...]


@dataclass
class LabelProblem:
    """A cost under construction. `costs` has for each decision the cost of each label, infinite where it is forbidden;
    `conversions` has the charges between decisions. All are at least zero."""

    costs: list[tuple[float, ...]] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)

    def decision(self, costs: Sequence[float]) -> int:
        self.costs.append(tuple(costs))
        return len(self.costs) - 1

    def cost(self, labels: Sequence[int]) -> float:
        single = sum(own[label] for own, label in zip(self.costs, labels, strict=True))
        return single + sum(
            price
            for c in self.conversions
            for label, price in enumerate(c.prices)
            if labels[c.maker] != label and any(labels[r] == label for r in c.readers)
        )


def cheapest(problem: LabelProblem) -> list[int]:
    """The cheapest assignment of labels that alpha expansion finds; the exact one if each decision has the same one or
    two labels to choose from.

    It begins with each decision's own cheapest label, and once with each label for all that may have it.

    Raises:
        ValueError: a cost is negative or NaN, or a decision has no label that is allowed.
    """
    if not problem.costs:
        return []
    found = (_expanded(problem, start) for start in _starts(problem))
    return min(found, key=problem.cost)


def _starts(problem: LabelProblem) -> Iterator[list[int]]:
    own = [min(range(len(costs)), key=costs.__getitem__) for costs in problem.costs]
    if any(not isfinite(costs[label]) for costs, label in zip(problem.costs, own, strict=True)):
        raise ValueError("a decision has no label that is allowed")
    seen: list[list[int]] = []
    for label in range(len(problem.costs[0])):
        start = [label if isfinite(c[label]) else mine for c, mine in zip(problem.costs, own, strict=True)]
        if start not in seen:
            seen.append(start)
            yield start
    if own not in seen:
        yield own


def _expanded(problem: LabelProblem, labels: list[int]) -> list[int]:
    """The labels after expanding one label after the other until none of them gains."""
    count, cost, idle, label = len(problem.costs[0]), problem.cost(labels), 0, 0
    while idle < count:
        changed = expansion(problem, labels, label)
        saved = cost - (fresh := problem.cost(changed))
        idle, label = idle + 1, (label + 1) % count
        if saved > LEAST_GAIN * abs(cost):
            labels, cost, idle = changed, fresh, 0
    return labels


def expansion(problem: LabelProblem, labels: Sequence[int], alpha: int) -> list[int]:
    """The best assignment in which each decision keeps its label or takes `alpha`: one minimum cut."""
    cut = Problem()
    moves = []
    for own, label in zip(problem.costs, labels, strict=True):
        least = min(own[label], own[alpha])  # is paid either way: leaving it out keeps more digits of what differs
        moves.append(cut.decision(inf if label == alpha else own[label] - least, own[alpha] - least))
    for conversion in problem.conversions:
        for label, price in enumerate(conversion.prices):
            if price > 0:
                _charge(cut, moves, labels, alpha, conversion, label)
    answers = solve(cut)
    return [alpha if answers[move] else label for move, label in zip(moves, labels, strict=True)]


def _charge(
    cut: Problem, moves: Sequence[int], labels: Sequence[int], alpha: int, conversion: Conversion, label: int
) -> None:
    """Charge the conversion of a value to one label, where a yes is a decision that takes `alpha`."""
    maker, price = moves[conversion.maker], conversion.prices[label]
    if label == alpha:  # paid if a reader takes it, and the maker does not
        some = cut.decision()
        for reader in conversion.readers:
            cut.charge(moves[reader], some, inf)
        cut.charge(some, maker, price)
        return
    readers = [reader for reader in conversion.readers if labels[reader] == label]
    if not readers:
        return
    # paid if a reader keeps it, and the maker has another or takes `alpha`
    whole = cut.decision(if_no=0.0 if labels[conversion.maker] == label else price)
    for reader in readers:
        cut.charge(whole, moves[reader], inf)
    if labels[conversion.maker] == label:
        cut.charge(maker, whole, price)
