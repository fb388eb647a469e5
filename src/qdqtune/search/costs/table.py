"""Assigns labels to the parts of a graph at the least total cost, by minimum s-t cuts.

A label says in how many bits a part computes. The total is a sum of a cost for each part, and of charges for
conversions between parts with different labels. With two labels it is one minimum cut, which is exact. With more, alpha
expansion (Boykov, Veksler and Zabih, IEEE PAMI 23, 2001) lets any set of parts change to one label at a time, the best
set by one cut, until no label gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

CAPACITY = 2**30
"""SciPy's flows are 32-bit integers that overflow silently: the sum of all finite capacities stays below this."""

LEAST_GAIN = 1e-9
"""A change must save this share of the cost; less may come from rounding."""


@dataclass(frozen=True)
class Conversion:
    """A value that part `maker` writes and parts `readers` read. It is converted once for each label that a reader has
    and the maker has not, at the cost of that label in `prices`."""

    maker: int
    readers: tuple[int, ...]
    prices: tuple[float, ...]


@dataclass
class Table:
    """The costs to minimize. `costs[part][label]` is infinite where a label is forbidden; `conversions` are charges
    between parts. All are at least zero."""

    costs: list[tuple[float, ...]] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)

    def part(self, *costs: float) -> int:
        self.costs.append(costs)
        return len(self.costs) - 1

    def convert(self, maker: int, readers: Sequence[int], *prices: float) -> None:
        self.conversions.append(Conversion(maker, tuple(readers), prices))

    def total(self, labels: Sequence[int]) -> float:
        total = sum(own[label] for own, label in zip(self.costs, labels, strict=True))
        for conversion in self.conversions:
            read = {labels[reader] for reader in conversion.readers} - {labels[conversion.maker]}
            total += sum(conversion.prices[label] for label in read)
        return total


def solve(table: Table) -> list[int]:
    """The cheapest label for each part. With two labels it is the optimum, and of several the one with the fewest parts
    of label 1; with more labels it is the best that alpha expansion finds.

    Costs are rounded to integers of about 1e-9 of their sum. Alpha expansion begins once with each label for all parts
    that may have it, and with each part's own cheapest label.

    Raises:
        ValueError: a cost is negative or NaN, or every assignment is forbidden.
    """
    if not table.costs:
        return []
    own = [min(range(len(costs)), key=costs.__getitem__) for costs in table.costs]
    if not all(isfinite(costs[label]) for costs, label in zip(table.costs, own, strict=True)):
        raise ValueError("the costs forbid every assignment")
    labels = range(len(table.costs[0]))
    if len(labels) == 2:
        return expansion(table, [0] * len(own), 1)
    both = list(zip(table.costs, own, strict=True))
    starts = [[label if isfinite(costs[label]) else mine for costs, mine in both] for label in labels]
    return min((_expanded(table, list(start)) for start in dict.fromkeys(map(tuple, [*starts, own]))), key=table.total)


def _expanded(table: Table, labels: list[int]) -> list[int]:
    """Expand one label after the other until no expansion gains."""
    count, cost, idle, label = len(table.costs[0]), table.total(labels), 0, 0
    while idle < count:
        changed = expansion(table, labels, label)
        less = table.total(changed)
        idle, label = idle + 1, (label + 1) % count
        if cost - less > LEAST_GAIN * abs(cost):
            labels, cost, idle = changed, less, 0
    return labels


def expansion(table: Table, labels: Sequence[int], alpha: int) -> list[int]:
    """The cheapest assignment in which each part keeps its label or takes `alpha`, by one minimum cut."""
    cut = _Cut()
    for costs, label in zip(table.costs, labels, strict=True):
        least = min(costs[label], costs[alpha])  # is paid either way: leaving it out keeps more digits
        least = least if isfinite(least) else 0.0
        cut.decision(inf if label == alpha else costs[label] - least, costs[alpha] - least)
    for conversion in table.conversions:
        for label, price in enumerate(conversion.prices):
            if price != 0:
                _charge(cut, conversion, labels, alpha, label)
    answers = cut.cheapest()
    return [alpha if answers[number] else label for number, label in enumerate(labels)]


def _charge(cut: _Cut, conversion: Conversion, labels: Sequence[int], alpha: int, label: int) -> None:
    """Add to a cut the charge for converting a value to `label`. Its decision number n is "part n takes `alpha`"."""
    maker, price = conversion.maker, conversion.prices[label]
    if label == alpha:  # paid if a reader takes it, and the maker does not
        some = cut.decision()
        for reader in conversion.readers:
            cut.charge(reader, some, inf)
        cut.charge(some, maker, price)
        return
    # paid if a reader keeps it, and the maker has another or takes `alpha`
    whole = cut.decision(if_no=0.0 if labels[maker] == label else price)
    for reader in conversion.readers:
        if labels[reader] == label:
            cut.charge(whole, reader, inf)
    if labels[maker] == label:
        cut.charge(maker, whole, price)


class _Cut:
    """A minimum cut over yes/no decisions: `charges[k]` is paid if decision `yes[k]` is yes and `no[k]` is no."""

    def __init__(self) -> None:
        self.if_no: list[float] = []
        self.if_yes: list[float] = []
        self.yes: list[int] = []
        self.no: list[int] = []
        self.charges: list[float] = []

    def decision(self, if_no: float = 0.0, if_yes: float = 0.0) -> int:
        self.if_no.append(if_no)
        self.if_yes.append(if_yes)
        return len(self.if_no) - 1

    def charge(self, yes: int, no: int, cost: float) -> None:
        self.yes.append(yes)
        self.no.append(no)
        self.charges.append(cost)

    def cheapest(self) -> list[bool]:
        """The answers with the least total charge; of several, those with the fewest yeses."""
        from scipy.sparse import coo_array, csgraph, csr_array  # slow to import

        count = len(self.if_no)
        source, sink = count, count + 1
        numbers = np.arange(count)
        tails = np.concatenate([np.full(count, source), numbers, self.yes]).astype(np.int32)
        heads = np.concatenate([numbers, np.full(count, sink), self.no]).astype(np.int32)
        costs = np.concatenate([self.if_no, self.if_yes, self.charges]).astype(np.float64)
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
    """Costs scaled to integers with a finite sum below `CAPACITY`, and the integer for infinity: that sum plus one.

    The scale is a power of two, so that small whole numbers stay exact and ties stay ties.
    """
    finite = np.isfinite(costs)
    total = costs[finite].sum()
    room = CAPACITY - len(costs)  # rounding may add half a unit to each cost
    factor = 2.0 ** np.floor(np.log2(room / total)) if total > 0 else 0.0
    scaled = np.rint(np.where(finite, costs, 0.0) * factor).astype(np.int64)
    infinite = int(scaled.sum()) + 1
    return np.where(finite, scaled, infinite), infinite
