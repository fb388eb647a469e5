"""The search by rule, against outputs and reports that follow from a table."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from models import build, normal, ranges
from qdqtune.errors import Failure
from qdqtune.placement import engine_rules
from qdqtune.placement.possible import possible_edges, wide_weights
from qdqtune.search import best_of
from qdqtune.search.by_rule import ALL_8, ALL_16, FRUITLESS, RuleSearch
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.rule_costs import FLOAT, W8A8, W8A16, W16A16, Rates, RuleCosts
from qdqtune.timing.ratios import Plan
from qdqtune.types import (
    Accuracy,
    CostsByRule,
    Layer,
    Measurement,
    Placement,
    Proposal,
    Trial,
    noise_of,
    sqnr_of,
)
from search_loop import trials_of

STEPS = 6
NOISE = {f"t{i}": 1e-4 * (1 + 7 * (i % 3)) for i in range(1, STEPS + 1)}
LIMIT = noise_of(30.0)


def costs(steps: int = STEPS) -> RuleCosts:
    """The costs of so many convolutions in a row."""
    text = "".join(f"[n{i}] t{i + 1} = Conv <pads=[1,1,1,1]> (t{i}, w{i})\n" for i in range(steps))
    model = build(
        f"n (float[1,4,8,8] t0) => (float[1,4,8,8] t{steps}) {{ {text} }}",
        {f"w{i}": normal(4, 4, 3, 3, seed=i) for i in range(steps)},
    )
    return RuleCosts(model, engine_rules.place(model, possible_edges(model, ranges(model)), "qnn", "int8").placement)


Answer = Callable[[RuleCosts, Placement], tuple[float, tuple[Layer, ...]] | Failure]


def noise(found: RuleCosts, narrow=NOISE, limit: float | None = LIMIT, simulate=None, wide=None) -> Noise:
    return Noise(found.model, narrow, limit, simulate=simulate, wide_noise=wide or {})


def simulated(
    search: RuleSearch, answer: Answer, limit: float = LIMIT, seconds: Callable[[Placement], float] | None = None
) -> list[Trial]:
    """The trials of a search whose outputs have the noise that `answer` gives, with the layers of its report. With
    `seconds`, builds take these each time."""
    paid = {Placement(): search.costs.cost(Placement())}

    def measured(number: int, proposal: Proposal, against: Placement) -> Trial:
        told = answer(search.costs, proposal.placement)
        if isinstance(told, Failure):
            return Trial(number, proposal, against, told)
        power, layers = told
        result: CostsByRule | Measurement
        if seconds is None:
            paid[proposal.placement] = search.costs.cost(proposal.placement, layers)
            result = CostsByRule(paid[against], paid[proposal.placement])
        else:
            result = Measurement((seconds(against),) * 20, (seconds(proposal.placement),) * 20)
        accuracy, holds = Accuracy(sqnr_of(power)), power <= limit
        return Trial(number, proposal, against, result, accuracy=accuracy, layers=layers, holds=holds)

    return trials_of(search, measured, 25, Plan())


def report(model, *elsewhere: str) -> tuple[Layer, ...]:
    names = [node.name for node in model.nodes]
    return tuple(Layer(n, (n,), "", None, "compute", elsewhere="on the CPU" if n in elsewhere else "") for n in names)


def by_table(factor: float) -> Answer:
    """Noise as the table has it, times a factor that the search does not know, and some that it knows nothing of."""

    def answer(found: RuleCosts, placement: Placement):
        return factor * noise(found).summed(placement) + 5e-5, report(found.model)

    return answer


def cheapest(found: RuleCosts, answer: Answer) -> float:
    """The cost of the cheapest of all assignments whose outputs hold the limit."""
    every = product((W8A8, W8A16), repeat=STEPS)
    return min(found.total(labels) for labels in every if answer(found, found.placement(labels))[0] <= LIMIT)


@pytest.mark.parametrize("factor", [0.4, 1.5, 3.0])
def test_the_cheapest_that_holds_is_found(factor: float) -> None:
    found, answer = costs(), by_table(factor)
    history = simulated(RuleSearch(found, noise(found)), answer)
    assert found.cost(best_of(history)) <= 1.25 * cheapest(found, answer)
    assert len(history) <= 20


@pytest.mark.parametrize("factor", [0.8, 1.5])
def test_few_builds_are_needed_where_onnx_runtime_tells_the_noise(factor: float) -> None:
    found, answer, asked = costs(), by_table(factor), list[Placement]()

    def simulate(placement: Placement) -> float:
        asked.append(placement)
        return by_table(1.0)(found, placement)[0]

    history = simulated(RuleSearch(found, noise(found, dict.fromkeys(NOISE, 1e-4), simulate=simulate)), answer)
    assert found.cost(best_of(history)) <= 1.25 * cheapest(found, answer)
    assert len(history) <= 7
    assert len(asked) > len(history)


def test_a_search_whose_builds_all_fail_ends() -> None:
    loud = noise(costs(), {**NOISE, "t3": 1.0, "w3": 1.0})
    history = simulated(RuleSearch(costs(), loud), lambda *_: Failure("build", "no memory"))
    assert 2 <= len(history) <= FRUITLESS


def test_nothing_else_is_tried_and_no_noise_asked_for_where_8_bits_hold() -> None:
    history = simulated(RuleSearch(costs(), None), by_table(0.01))  # type: ignore[arg-type]
    assert [t.proposal.origin for t in history] == [ALL_8]
    assert history[0].accepted


def test_a_node_that_is_left_in_8_bits_gets_16() -> None:
    def answer(found: RuleCosts, placement: Placement):
        labels = found.labels(placement)
        return 1e-6, report(found.model, *(["n2"] if labels[2] == W8A8 else []))

    found = costs()
    history = simulated(RuleSearch(found, noise(found)), answer)
    assert [label == W8A16 for label in found.labels(best_of(history))] == [False, False, True, False, False, False]


def test_a_node_that_is_left_in_both_becomes_float() -> None:
    def answer(found: RuleCosts, placement: Placement):
        labels = found.labels(placement)
        left = [f"n{i}" for i, label in enumerate(labels) if label != FLOAT]
        return 1e-6, report(found.model, *left)

    found = costs(3)
    history = simulated(RuleSearch(found, noise(found)), answer)
    assert all(t.proposal.placement for t in history)
    assert not any(t.accepted for t in history)  # the float model leaves none


def test_operators_that_are_refused_in_16_bits_are_not_asked_for_again() -> None:
    def answer(found: RuleCosts, placement: Placement):
        if placement.wide:
            return Failure("build", "Node 'n1' OpType:Conv with domain:x was inserted, but was not selected by that EP")
        return 1e-2, report(found.model)

    history = simulated(RuleSearch(costs(), noise(costs())), answer)
    assert [t.proposal.origin for t in history][:3] == [ALL_8, ALL_16, ALL_16]
    assert [wide_weights(costs().model, t.placement) != frozenset() for t in history[1:3]] == [True, False]
    assert sum(bool(t.placement.wide) for t in history) == 2


def test_an_engine_that_refuses_weights_in_16_bits_still_gets_activations() -> None:
    def answer(found: RuleCosts, placement: Placement):
        if wide_weights(found.model, placement):
            return Failure("build", "Node 'n1' OpType:Conv with domain:x was inserted, but was not selected by that EP")
        return by_table(1.5)(found, placement)

    history = simulated(RuleSearch(costs(), noise(costs())), answer)
    assert sum(isinstance(t.result, Failure) for t in history) == 1
    assert best_of(history).wide


def test_an_engine_without_16_bits_is_not_asked_for_them() -> None:
    search = RuleSearch(replace(costs(), has_wide=False), noise(costs()))
    assert not any(t.placement.wide for t in simulated(search, by_table(3.0)))


def test_floats_are_tried_where_16_bits_miss_the_limit() -> None:
    def answer(found: RuleCosts, placement: Placement):
        labels = found.labels(placement)
        return (1e-2 if labels[0] != FLOAT else 1e-5), report(found.model)

    found = costs(4)
    loud = noise(found, {**NOISE, "w0": 1e-2}, wide={"w0": 1e-6})
    labels = found.labels(best_of(simulated(RuleSearch(found, loud), answer)))
    assert labels[0] == FLOAT
    assert FLOAT not in labels[2:]


def test_operators_that_the_engine_alone_computes_badly_become_float() -> None:
    before = "".join(f"[c{i}] t{i + 1} = Conv(t{i}, w{i})" for i in range(2))
    text = f"{before} [l] b = Log(t2) [e] d = Exp(b) [c2] g = Conv(d, w2) [s] y = Sqrt(g)"
    model = build(
        f"n (float[1,4,8,8] t0) => (float[1,4,8,8] y) {{ {text} }}",
        {f"w{i}": np.abs(normal(4, 4, 1, 1, seed=i)) for i in range(3)},
    )
    known = ranges(model, [{"t0": np.ones((1, 4, 8, 8), np.float32)}])
    found = RuleCosts(model, engine_rules.place(model, possible_edges(model, known), "qnn", "int8").placement)
    bad = {"Log": 2 * LIMIT, "Sqrt": 1.5 * LIMIT}

    def answer(found: RuleCosts, placement: Placement):
        labels = zip(found.parts, found.labels(placement), strict=True)
        ops = [(model.nodes[node].op, label) for part, label in labels for node in part.nodes]
        power = sum(bad.get(op, 0.1 * LIMIT * (label == W8A8)) for op, label in ops if label != FLOAT)
        return 1e-5 + power, report(model)

    quiet = dict.fromkeys([*model.constants, *(e.tensor for e in found.fullest.edges)], 1e-6)
    history = simulated(RuleSearch(found, noise(found, quiet)), answer)
    *narrow, log, _, _, root = found.labels(best_of(history))
    assert (log, root) == (FLOAT, FLOAT)
    assert narrow == [W8A8] * 2
    assert len(history) <= 20


def test_at_the_end_several_parts_get_fewer_bits_at_once() -> None:
    found = costs(40)
    search = RuleSearch(found, noise(found, {}))
    wide = found.placement(found.everywhere(W16A16))
    trial = Trial(1, Proposal(ALL_16, wide), Placement(), CostsByRule(2.0, 1.0), accuracy=Accuracy(30.5), accepted=True)
    narrowed = [labels.count(W8A16) for _, labels in search._narrowed(found, [trial])]
    assert narrowed[:3] == [5, 2, 1]


@pytest.mark.parametrize(("rates", "limit"), [
    (Rates(), 2e-3),
    (Rates(4.0, 9.0, 0.2), 1.2e-3),  # conversions are cheap
    (Rates(3.0, 1.0, 1.0), 6e-4),  # floats are fast
])  # fmt: skip
def test_by_time_16_bits_stand_where_they_cost_least(rates: Rates, limit: float) -> None:
    found = costs()
    real = replace(found, rates=rates)

    def simulate(placement: Placement) -> float:
        return noise(found).summed(placement) + 1e-6

    def seconds(placement: Placement) -> float:
        return 1e-3 + 1e-7 * real.total(found.labels(placement))

    search = RuleSearch(found, noise(found, limit=limit, simulate=simulate), Plan())
    history = simulated(search, lambda _, p: (simulate(p), report(found.model)), limit, seconds)
    every = map(found.placement, product((W8A8, W8A16, FLOAT), repeat=STEPS))
    least = min(seconds(placement) for placement in every if simulate(placement) <= limit)
    assert seconds(best_of(history)) <= 1.03 * least
    learned = search.learned(history).rates
    assert learned.floats / learned.wide == pytest.approx(rates.floats / rates.wide, rel=0.5)


def test_rates_are_those_by_rule_until_builds_tell() -> None:
    assert costs().fitted({Placement(): 1.0, costs().fullest: 0.5}).rates == Rates()
