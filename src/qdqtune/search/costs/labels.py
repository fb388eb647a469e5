"""Near-exact minimization of a cost over decisions with several answers, by minimum cuts.

A decision is a label: how many bits a part of a graph computes in. The cost is a sum of terms for one decision, and of
charges for conversions between decisions with different labels. Two labels make it one minimum cut, which is exact.
With more, alpha expansion (Boykov, Veksler and Zabih, IEEE PAMI 23, 2001) lets any set of decisions change to one label
at a time, the best such set by one cut, until no label gains: no single cut improves the result any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from qdqtune.search.costs.mincut import Problem, solve

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
        """A new decision, with the cost of each label; returns its number."""
        self.costs.append(tuple(costs))
        return len(self.costs) - 1

    def cost(self, labels: Sequence[int]) -> float:
        """The cost of an assignment of labels."""
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
