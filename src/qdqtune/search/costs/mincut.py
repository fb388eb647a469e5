"""Exact minimization of a pairwise cost over yes/no decisions, as a minimum s-t cut.

The cost is a sum of terms for one decision (cost if no, cost if yes) and for two (cost if one is yes and the other no),
all at least zero: such a function is submodular, and a minimum cut is its optimum over all assignments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
        """A new decision; returns its number."""
        self.if_no.append(if_no)
        self.if_yes.append(if_yes)
        return len(self.if_no) - 1

    def charge(self, yes: int, no: int, cost: float) -> None:
        """Add a cost that is paid if decision `yes` is yes while decision `no` is no."""
        self.yes.append(yes)
        self.no.append(no)
        self.charges.append(cost)

    def cost(self, answers: Sequence[bool]) -> float:
        """The cost of an assignment."""
        single = sum(y if a else n for a, n, y in zip(answers, self.if_no, self.if_yes, strict=True))
        charged = zip(self.yes, self.no, self.charges, strict=True)
        return float(single + sum(c for i, j, c in charged if answers[i] and not answers[j]))


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
