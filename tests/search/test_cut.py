"""The cut search on the fake engine, whose cost model is exact, against all placements."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from models import INT8, build, normal, ranges
from qdqtune.engines.fake import CostModel
from qdqtune.errors import Failure
from qdqtune.graph.model import Model
from qdqtune.placement import engine_rules, start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges, wide_weights
from qdqtune.search import best_of
from qdqtune.search.by_rule import ALL_8, ALL_16, FRUITLESS, RuleSearch
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.rule_costs import FLOAT, W8A8, W8A16, W16A16, RuleCosts
from qdqtune.search.cut import CutSearch
from qdqtune.search.front import NEAR, NEAREST, Tradeoff, farthest, unbeaten
from qdqtune.timing.ratios import Plan
from qdqtune.types import (
    Accuracy,
    CostsByRule,
    Edge,
    Layer,
    Measurement,
    Placement,
    Proposal,
    Trial,
    WeightFormat,
    noise_of,
    sqnr_of,
)
from runs import mixed
from search_loop import PLAN, exact, trials_of
from weight_only_nets import MODEL, SHARES, W4, W8


@dataclass
class Bench:
    """Builds placements on the cost model, and remembers."""

    model: Model

    def __post_init__(self) -> None:
        self.possible = possible_edges(self.model, ranges(self.model))
        self.inserter = Inserter(self.model, ranges(self.model), INT8)
        self.float_seconds = self.seconds(Placement())

    def costs(self, placement: Placement) -> CostModel:
        return CostModel(self.inserter.insert(placement).to_proto(), 1)

    def seconds(self, placement: Placement) -> float:
        return self.costs(placement).seconds

    def layers(self, placement: Placement) -> tuple[Layer, ...]:
        return self.costs(placement).layers()

    def search(self) -> CutSearch:
        return CutSearch(self.model, self.possible, self.layers(Placement()), plan=PLAN)

    def measured(self, number: int, proposal: Proposal, against: Placement) -> Trial:
        return exact(number, proposal, against, self.seconds, layers=self.layers(proposal.placement))

    def played(self, builds: int = 11, measured: Callable[..., Trial] | None = None) -> list[Trial]:
        return trials_of(self.search(), measured or self.measured, builds)


def test_a_fixed_point_ends_the_search() -> None:
    bench = Bench(mixed())
    history = bench.played(100)
    assert len(history) < 8
    assert bench.search().propose(history) == ()
    last = [t for t in history if t.proposal.origin == "cut"][-1]
    assert bench.search().costs(history).ms(last.placement) == pytest.approx(1e3 * bench.seconds(last.placement))
    assert not [*bench.search().optima(history)], "nothing is predicted to be clearly faster than the best"
    assert [*bench.search().optima(history[:1])]


def test_of_what_several_builds_show_the_fastest_counts_whatever_their_order() -> None:
    bench = Bench(mixed())
    slow, fast, *_ = bench.played()
    slow = replace(exact(1, slow.proposal, Placement(), lambda p: 0.9 if p else 1.0), layers=slow.layers)
    fast = replace(exact(2, fast.proposal, Placement(), lambda p: 0.5 if p else 1.0), layers=fast.layers)
    assert bench.search().costs([fast, slow]) == bench.search().costs([slow, fast])


def test_when_everything_fails_it_ends() -> None:
    history = Bench(mixed()).played(100, measured=lambda n, p, a: Trial(n, p, a, Failure("crash", "gone")))
    assert 0 < len(history) < 100


def test_a_hurried_search_builds_what_may_ship_and_then_cuts() -> None:
    bench = Bench(mixed())
    usual, few = start_placements.static, start_placements.compute_inputs
    seeds = {name: place(bench.model, bench.possible) for name, place in (("static", usual), ("compute", few))}
    product = next(edge for edge in bench.possible if edge.tensor in bench.model.constants)
    own = Placement.of((), [(product, WeightFormat(8, dynamic=True))])  # of the user's file, where it seems not to pay
    assert replace(bench.search(), seeds={"imported": own, **seeds}, is_hurried=True).propose([])[0].placement == own
    search = replace(bench.search(), seeds=seeds, is_hurried=True)
    first = search.propose([])
    assert [p.origin for p in first] == ["static"]
    history = [bench.measured(1, first[0], Placement())]
    costs = search.costs(history)
    certain, hopeful, *_ = search._later_proposals(costs, history)
    raised = search.costs(history, raised=True)
    assert raised.ms(certain.placement) == pytest.approx(costs.ms(certain.placement))  # no guess decides the first cut
    assert hopeful.predicted < certain.predicted
    assert search.propose(history)[0].origin == "cut"
    every = [p.origin for p in search._later_proposals(search.costs(history), history)]
    assert "compute" in every  # later
    assert [p.origin for p in replace(search, seeds={}).propose([])] == ["fused units"]  # else nothing has a price


def test_what_the_engine_fuses_is_decided_in_parts_where_a_build_ran_it_faster_so() -> None:
    """The seed has pairs inside both fusions, and the first product is slower in 8 bits: all but its pairs remain."""
    model = build(
        "net (float[8,64] x) => (float[8,16] y) "
        "{ [p] a = MatMul(x, w0) [s] b = Softmax(a) [e] d = Exp(b) [q] c = MatMul(d, w1) [r] y = Softmax(c) }",
        {"w0": normal(64, 32), "w1": normal(32, 16)},
    )

    def layers(*times: tuple[str, float]) -> tuple[Layer, ...]:
        return tuple(Layer(names, tuple(names.split()), "", ms, "compute") for names, ms in times)

    seed = Placement.of([*(Edge(t, n, 0) for t, n in ("xp", "as", "dq", "cr")), Edge("w0", "p", 1), Edge("w1", "q", 1)])
    floats = layers(("p s", 10.0), ("e", 1.0), ("q r", 10.0))
    search = CutSearch(model, seed.edges, floats, seeds={"static": seed}, plan=PLAN, is_hurried=True)
    built = layers(("p", 11.0), ("s", 1.0), ("e", 1.0), ("q", 3.0), ("r", 1.0))
    trial = exact(1, search.propose([])[0], Placement(), lambda p: 0.017 if p else 0.021, layers=built, accepted=True)
    parts = search.costs([trial]).partition
    assert parts.placement(parts.decision(seed)) == seed
    assert search.propose([trial])[0].placement == seed.paired(e for e in seed.edges if e.node in "qr")


def weights_search(**changes: Any) -> CutSearch:
    layers = [Layer(n.name, (n.name,), "FP32", 1.0, "compute") for n in MODEL.nodes]
    search = CutSearch(MODEL, possible_edges(MODEL, ranges(MODEL)), layers, format_shares=SHARES)
    return replace(search, **changes)


def by_origin(search: CutSearch, *history: Trial) -> dict[str, Placement]:
    return {p.origin: p.placement for p in search.propose(history)}


def test_the_first_builds_have_every_weight_in_4_and_in_8_bits() -> None:
    first = by_origin(weights_search())
    assert list(first) == ["weights in 4 bits", "fused units", "weights in 8 bits"]  # as promised, alone
    assert first["weights in 4 bits"] == Placement.of((), dict.fromkeys(SHARES, W4).items())
    assert list(by_origin(weights_search(format_shares={}))) == ["fused units"]


def missed(placement: Placement) -> Trial:
    """A candidate that missed a limit: only then does a search ask what single tensors do to the outputs."""
    same = Measurement((1.0,) * 12, (1.0,) * 12)
    return Trial(1, Proposal("rules", placement), Placement(), same, holds=False)


def test_dynamic_quantization_is_taken_where_it_pays_within_the_limit() -> None:
    """The product whose activation it rounds too coarsely keeps floats or gets pairs."""
    dynamic = WeightFormat(8, dynamic=True)
    search = weights_search(format_shares={edge: {dynamic: 0.3} for edge in SHARES})
    weight_noise = {(f"w{i}", "d8"): (0.001, 0.5)[i == 1] for i in range(3)}
    noise = Noise(MODEL, {e.tensor: 1.0 for e in search.possible}, 0.01, weight_noise=weight_noise)
    everywhere = by_origin(search)["dynamic quantization"]
    assert everywhere == Placement.of((), dict.fromkeys(SHARES, dynamic).items())
    limited = replace(search, noise=replace(noise, simulate=noise.summed))
    chosen = limited.propose([missed(everywhere)])[0].placement
    assert [chosen.weight_formats.get(edge) for edge in SHARES] == [dynamic, None, dynamic]
    assert not chosen.edges


def test_where_4_bits_miss_the_limits_the_noisiest_weights_have_8() -> None:
    stored = {(f"w{i}", s.name): power * 2.0**-s.bits for i, power in enumerate((0.01, 0.2, 0.01)) for s in (W4, W8)}
    noise = Noise(MODEL, {}, 0.01, weight_noise=stored)
    noise = replace(noise, simulate=noise.summed)
    trial = missed(Placement.of((), dict.fromkeys(SHARES, W4).items()))
    first = by_origin(weights_search(noise=noise), trial)
    assert list(first) == ["weights in fewer bits", "fused units", "weights in 8 bits"]
    assert [first["weights in fewer bits"].weight_formats[edge] for edge in SHARES] == [W4, W8, W4]
    alone = {edge: {W4: 0.5, W8: 0.45} for edge in SHARES}  # where 8 bits are as fast in a product alone
    assert by_origin(weights_search(noise=noise, format_shares=alone), trial) == first


def test_an_optimum_that_is_slower_in_no_context_comes_before_that_of_all_calls() -> None:
    model = build(
        "net (float[8,64] x) => (float[8,16] y, float[8,32] z) { [left] y = MatMul(x, w0) [right] z = MatMul(x, w1) }",
        {"w0": normal(64, 16), "w1": normal(64, 32)},
    )
    shares = {"all calls": (0.2, 0.8), "one thread": (1.0, 0.0), "four threads": (0.0, 1.0)}

    def layers(left: tuple[float, float], right: tuple[float, float]) -> tuple[Layer, ...]:
        times = {"left": left, "right": right}
        return tuple(Layer(n, (n,), "", float(np.dot(shares["all calls"], t)), "compute", t) for n, t in times.items())

    floats = layers((10.0, 1.0), (10.0, 1.0))
    contexts = (shares["one thread"], shares["four threads"])
    search = CutSearch(model, possible_edges(model, ranges(model)), floats, plan=PLAN, contexts=contexts)
    (everything,) = search.propose([])
    a, b = ((20.0,) * 12, (2.0,) * 12), ((6.0,) * 12, (3.5,) * 12)
    parts = tuple(Measurement(before, after) for before, after in zip(a, b, strict=True))
    together = (tuple(0.2 * x + 0.8 * y for x, y in zip(*side, strict=True)) for side in (a, b))
    measured = Measurement(*together, parts)
    trial = Trial(1, everything, Placement(), measured, layers=layers((1.0, 3.0), (5.0, 0.5)))
    chosen = search.propose([trial])[0]
    assert {edge.node for edge in chosen.placement} == {"right"}
    assert all(p.placement != chosen.placement for p in replace(search, contexts=()).propose([trial]))


# Where points of a front may lie: far from each other
def points(*pairs: tuple[float, float]) -> dict[Placement, Tradeoff]:
    """Some placements with these ratios and SQNRs."""
    return {Placement.of([Edge(f"{pair}")]): Tradeoff(*pair) for pair in pairs}


@pytest.mark.parametrize(
    ("candidates", "near", "chosen"),
    [
        ([(0.51, 40), (0.8, 40), (0.8, 20.5)], NEAREST, (0.8, 40)),  # in time and accuracy
        ([(0.8, 20.5)], NEAREST, (0.8, 20.5)),
        ([(0.51, 20.2)], NEAREST, (0.51, 20.2)),
        ([(0.51, 20.2)], NEAR, None),
        ([(0.5, 21)], NEAREST, None),
        ([], NEAREST, None),
    ],
)
def test_the_farthest_point_comes_next(candidates, near: float, chosen: tuple[float, float] | None) -> None:
    found = farthest(points(*candidates), [Tradeoff(0.5, 20)], near)
    assert found == next(iter(points(chosen))) if chosen else found is None


def test_beaten_points_are_left_out() -> None:
    kept = unbeaten(points((0.9, 50), (0.6, 30), (0.7, 29), (0.6, 28)))
    assert list(kept.values()) == [Tradeoff(0.6, 30), Tradeoff(0.9, 50)]


# The search by rule, against outputs and reports that follow from a table
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


@pytest.mark.parametrize("factor", [0.4, 3.0])
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
    history = simulated(RuleSearch(costs(), None), by_table(0.01))
    assert [t.proposal.origin for t in history] == [ALL_8]
    assert history[0].accepted


def test_a_node_that_is_left_in_8_bits_gets_16() -> None:
    def answer(found: RuleCosts, placement: Placement):
        labels = found.labels(placement)
        return 1e-6, report(found.model, *(["n2"] if labels[2] == W8A8 else []))

    found = costs()
    history = simulated(RuleSearch(found, noise(found)), answer)
    assert [label == W8A16 for label in found.labels(best_of(history))] == [False, False, True, False, False, False]


def test_operators_that_are_refused_in_16_bits_are_not_asked_for_again() -> None:
    def answer(found: RuleCosts, placement: Placement):
        if placement.wide:
            return Failure("build", "Node 'n1' OpType:Conv with domain:x was inserted, but was not selected by that EP")
        return 1e-2, report(found.model)

    history = simulated(RuleSearch(costs(), noise(costs())), answer)
    assert [t.proposal.origin for t in history][:3] == [ALL_8, ALL_16, ALL_16]
    assert [wide_weights(costs().model, t.placement) != frozenset() for t in history[1:3]] == [True, False]
    assert sum(bool(t.placement.wide) for t in history) == 2


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


def test_at_the_end_several_parts_get_fewer_bits_at_once() -> None:
    found = costs(40)
    search = RuleSearch(found, noise(found, {}))
    wide = found.placement(found.everywhere(W16A16))
    trial = Trial(1, Proposal(ALL_16, wide), Placement(), CostsByRule(2.0, 1.0), accuracy=Accuracy(30.5), accepted=True)
    narrowed = [labels.count(W8A16) for labels in search._narrowed(found, [trial])]
    assert narrowed[:3] == [5, 2, 1]


def test_by_time_16_bits_stand_where_they_cost_least() -> None:
    found, limit = costs(), 2e-3

    def simulate(placement: Placement) -> float:
        return noise(found).summed(placement) + 1e-6

    def seconds(placement: Placement) -> float:
        return 1e-3 + 1e-7 * found.total(found.labels(placement))

    search = RuleSearch(found, noise(found, limit=limit, simulate=simulate), is_timed=True)
    history = simulated(search, lambda _, p: (simulate(p), report(found.model)), limit, seconds)
    every = map(found.placement, product((W8A8, W8A16, FLOAT), repeat=STEPS))
    least = min(seconds(placement) for placement in every if simulate(placement) <= limit)
    assert seconds(best_of(history)) <= 1.03 * least
