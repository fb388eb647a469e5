"""The cut search on the fake engine, whose cost model is exact, against all placements."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest

from models import INT8, attention, build, conv_net, normal, ranges
from qdqtune.engines.fake import CostModel
from qdqtune.errors import Failure
from qdqtune.graph.model import Model
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.search import best_of
from qdqtune.search.costs.decisions import decision_of
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.units import Decision, Partition, partition
from qdqtune.search.cut import CutSearch
from qdqtune.types import Layer, Measurement, Placement, Proposal, Trial, WeightFormat
from runs import mixed
from search_loop import PLAN, exact, trials_of
from weight_only_nets import MODEL, SHARES, W4, W8

BUILDS = 11

CONVS = """net (float[1,4,16,16] x) => (float[1,5] y) {
    [stem] a = Conv <pads=[1,1,1,1]> (x, w0)
    [stem_relu] b = Relu(a)
    [small] c = Conv <group=16, pads=[1,1,1,1]> (b, w1)
    [clip] d = Clip(c, zero, six)
    [wide] e = Conv <pads=[1,1,1,1]> (d, w2)
    [skip] f = Add(e, b)
    [skip_relu] g = Relu(f)
    [sigmoid] h = Sigmoid(g)
    [gate] i = Mul(g, h)
    [pool] j = GlobalAveragePool(i)
    [flat] k = Flatten(j)
    [head] y = Gemm <transB=1> (k, w3)
}"""


def convs() -> Model:
    return build(CONVS, {"w0": normal(16, 4, 3, 3), "w1": normal(16, 1, 3, 3), "w2": normal(16, 16, 3, 3),
                         "w3": normal(5, 16), "zero": np.float32(0), "six": np.float32(6)})  # fmt: skip


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

    def played(self, builds: int = BUILDS, measured: Callable[..., Trial] | None = None) -> list[Trial]:
        return trials_of(self.search(), measured or self.measured, builds)


def decisions(parts: Partition) -> Iterator[Decision]:
    """Every set of units, each output of a quantized unit stored quantized."""
    able = [u.number for u in parts.units if u.inputs]
    for chosen in chain.from_iterable(combinations(able, n) for n in range(len(able) + 1)):
        quantized = frozenset(chosen)
        yield Decision(quantized, frozenset(t for t in parts.edges if parts.producer.get(t) in quantized))


MODELS = {"mixed": mixed, "attention": attention, "convs": convs, "conv net": conv_net}


@pytest.mark.parametrize("name", ["mixed", "convs"])  # the others have too many
def test_the_best_of_all_placements_is_found(name: str) -> None:
    bench = Bench(MODELS[name]())
    history = bench.played()
    parts = partition(bench.model, bench.possible, bench.search().groups)
    assert len(parts.units) <= 12
    best = min(bench.seconds(parts.placement(d)) for d in decisions(parts))
    assert bench.seconds(best_of(history)) == pytest.approx(min(best, bench.float_seconds), rel=1e-9)


def test_every_subset_of_stored_tensors_is_beaten_too() -> None:
    bench = Bench(mixed())
    found = bench.seconds(best_of(bench.played()))
    parts = partition(bench.model, bench.possible, bench.search().groups)
    for decision in decisions(parts):
        stored = sorted(decision.stored)
        for kept in chain.from_iterable(combinations(stored, n) for n in range(len(stored) + 1)):
            assert found <= bench.seconds(parts.placement(Decision.of(decision.quantized, kept))) * (1 + 1e-9)


def test_a_fixed_point_ends_the_search() -> None:
    bench = Bench(mixed())
    history = bench.played(100)
    assert len(history) < 8
    assert bench.search().propose(history) == ()
    last = [t for t in history if t.proposal.origin == "cut"][-1]
    assert last.proposal.predicted == pytest.approx(bench.seconds(last.placement) / bench.float_seconds)


def test_failed_builds_do_not_stop_it() -> None:
    """The usual first builds fail, and so does every third after them."""
    bench = Bench(mixed())

    def flaky(number: int, proposal, against: Placement) -> Trial:
        if number in (1, 4):
            return Trial(number, proposal, against, Failure("build", "no kernel"))
        return bench.measured(number, proposal, against)

    history = bench.played(measured=flaky)
    assert len(history) > 4
    assert bench.seconds(best_of(history)) < 0.75 * bench.float_seconds


def test_when_everything_fails_it_ends() -> None:
    history = Bench(mixed()).played(100, measured=lambda n, p, a: Trial(n, p, a, Failure("crash", "gone")))
    assert 0 < len(history) < 100


def test_seeds_are_priced_in_the_first_batch() -> None:
    bench = Bench(mixed())
    seed = start_placements.compute_inputs(bench.model, bench.possible)
    search = replace(bench.search(), seeds={"mine": seed, "empty": Placement()})
    assert [p.origin for p in search.propose([])] == ["mine", "fused units"]
    assert search.propose([])[0].placement == seed


def test_a_hurried_search_builds_what_may_ship_and_then_cuts() -> None:
    bench = Bench(mixed())
    usual, few = start_placements.static, start_placements.compute_inputs
    seeds = {name: place(bench.model, bench.possible) for name, place in (("static", usual), ("compute", few))}
    search = replace(bench.search(), seeds=seeds, is_hurried=True)
    first = search.propose([])
    assert [p.origin for p in first] == ["static"]
    history = [bench.measured(1, first[0], Placement())]
    costs = search.costs(history)
    certain, hopeful, *_ = (decision_of(costs, p.placement) for p in search._later_proposals(costs, history))
    raised = search.costs(history, raised=True)
    assert raised.total(certain) == pytest.approx(costs.total(certain))  # no guess decides the first cut
    assert costs.total(hopeful) < costs.total(certain)
    assert search.propose(history)[0].origin == "cut"
    every = [p.origin for p in search._later_proposals(search.costs(history), history)]
    assert "compute" in every  # later
    assert [p.origin for p in replace(search, seeds={}).propose([])] == ["fused units"]  # else nothing has a price


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
