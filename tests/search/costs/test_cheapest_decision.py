"""The cut against all decisions: with weight formats, and within a limit on noise."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from models import attention, build, conv_net, normal
from qdqtune.graph.model import Model
from qdqtune.search.costs.decisions import cut, cut_holding, cut_within, decision_of, margin
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.prices import Costs, Price
from qdqtune.search.costs.units import Decision, Partition, partition
from qdqtune.types import Edge, WeightFormat
from runs import mixed
from weight_only_nets import MODEL, SHARES, W4, W8, parts


def made_up(seed: int) -> Costs:
    """Arbitrary prices."""
    random, units = np.random.default_rng(seed), parts()
    prices = []
    for unit in units.units:
        stored = {s: float(random.random()) for s in units.weight_formats(unit)}
        prices.append(Price(*random.random(5).tolist(), by_format=stored))
    q, d = ({t: float(random.random()) / 4 for t in units.edges} for _ in range(2))
    return Costs(units, tuple(prices), q, d)


def every_decision(units: Partition) -> list[Decision]:
    able = [u for u in units.units if u.inputs]
    found = []
    for runs in product((False, True), repeat=len(able)):
        quantized = frozenset(u.number for u, r in zip(able, runs, strict=True) if r)
        kept = [t for t in units.edges if units.producer.get(t) in quantized]
        floats = [u for u in units.units if u.number not in quantized]
        for stored in product((False, True), repeat=len(kept)):
            for ways in product(*((None, *units.weight_formats(u)) for u in floats)):
                chosen = ((u.number, w) for u, w in zip(floats, ways, strict=True) if w is not None)
                found.append(Decision.of(quantized, (t for t, k in zip(kept, stored, strict=True) if k), chosen))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_cut_takes_the_cheapest_format_of_every_unit(seed: int) -> None:
    costs = made_up(seed)
    decisions = every_decision(costs.partition)
    assert len(decisions) > 300
    assert costs.total(cut(costs)) == pytest.approx(min(costs.total(d) for d in decisions))


@pytest.mark.parametrize("seed", range(4))
def test_each_weight_format_has_its_own_noise(seed: int) -> None:
    costs = made_up(seed)
    stored = {(e.tensor, s.name): 0.03 / s.bits * (1 + i) for i, e in enumerate(SHARES) for s in (W4, W8)}
    noise = Noise(MODEL, dict.fromkeys(("x", "q", "r", "w0", "w1", "w2"), 0.002), limit=0.01, weight_noise=stored)

    def value(decision: Decision, price: float) -> float:
        return costs.total(decision) + price * noise.summed(costs.partition.placement(decision))

    for price in (1.0, 20.0, 200.0):
        found = value(cut(costs, noise, price), price)
        assert found == pytest.approx(min(value(d, price) for d in every_decision(costs.partition)))
    held = cut_within(costs, noise, 0.01)
    assert noise.summed(costs.partition.placement(held)) <= 0.01


def test_a_decision_is_read_back_from_its_placement_and_margins_are_to_the_best_alternative() -> None:
    costs = made_up(1)
    units = costs.partition
    floats = Decision.of((), (), [(0, W4), (3, W8)])
    placement = units.placement(floats)
    assert placement.weight_formats == {Edge("w0", "a", 1): W4, Edge("w2", "d", 1): W8}
    assert decision_of(costs, placement) == floats
    quantized = Decision.of([0])
    prices = list(costs.prices)
    prices[0] = replace(prices[0], as_float=5.0, by_format={W4: 1.0, W8: 2.0}, disturbed=0.0)
    costs = replace(costs, prices=tuple(prices))
    assert margin(costs, quantized, units.units[0]) == pytest.approx(
        costs.total(Decision.of((), (), [(0, W4)])) - costs.total(quantized)
    )


def made_up_costs(model: Model) -> tuple[Costs, Noise]:
    """Arbitrary prices and noise; handing floats over may take less than storing 8 bits."""
    possible = frozenset(Edge(t, n.name, i) for n in model.nodes for i, t in enumerate(n.inputs)
                         if t in model.tensors and model.tensors[t].is_float)  # fmt: skip
    parts = partition(model, possible, [])
    random = np.random.default_rng(3)
    prices = tuple(Price(*((1, 0, 0, 0, -0.1) + random.random(5) / 4).tolist()) for _ in parts.units)
    q, d = ({t: float(random.random()) / 4 for t in parts.edges} for _ in range(2))
    alone = {t: float(random.lognormal(sigma=2)) for t in sorted({e.tensor for e in possible})}
    return Costs(parts, prices, q, d), Noise(model, alone)


@pytest.mark.parametrize("make", [mixed, attention, conv_net])
class TestCutWithinLimits:
    def test_no_limit_gives_the_cut_and_no_allowed_noise_the_float_model(self, make) -> None:
        costs, noise = made_up_costs(make())
        assert cut_within(costs, noise, np.inf) == cut(costs)
        silent = costs.partition.placement(cut_within(costs, noise, 1e-12))
        assert noise.summed(silent) == 0

    @pytest.mark.parametrize("per_consumer", [False, True])
    def test_nothing_is_cheaper_than_the_cut(self, make, per_consumer: bool) -> None:
        costs = replace(made_up_costs(make())[0], per_consumer=per_consumer)
        least = costs.total(cut(costs))
        assert all(least <= costs.total(other) + 1e-9 for other in _random_decisions(costs.partition, 500))

    def test_less_allowed_noise_takes_longer_and_is_kept(self, make) -> None:
        costs, noise = made_up_costs(make())
        whole = noise.summed(costs.partition.placement(cut(costs)))
        times: list[float] = []
        for share in (1.0, 0.8, 0.5, 0.3, 0.1, 0.03):
            decision = cut_within(costs, noise, share * whole)
            assert noise.summed(costs.partition.placement(decision)) <= share * whole
            times.append(costs.total(decision))
        assert times == sorted(times)
        assert times[0] < times[-1]

    def test_no_placement_with_as_little_noise_is_faster(self, make) -> None:
        """The cut lies on the convex front: whatever beats it in time makes more noise."""
        costs, noise = made_up_costs(make())
        parts = costs.partition
        whole = noise.summed(parts.placement(cut(costs)))
        found = [cut_within(costs, noise, share * whole) for share in (0.7, 0.4, 0.2)]
        for other in _random_decisions(parts, 2000):
            for decision in found:
                if noise.summed(parts.placement(other)) <= noise.summed(parts.placement(decision)):
                    assert costs.total(other) >= costs.total(decision) - 1e-6


def test_of_decisions_with_equal_time_the_one_with_less_noise_is_taken() -> None:
    """A limit that the fastest holds as well is no reason to use it up."""
    model = build("net (float[4,6] x) => (float[4,6] y) { [a] b = MatMul(x, v) [c] y = MatMul(b, w) }",
                  {"v": normal(6, 6), "w": normal(6, 6, seed=1)})  # fmt: skip
    loud, quiet = WeightFormat(4, 32), WeightFormat(8)
    ways = {Edge("v", "a", 1): {loud: 0.5, quiet: 0.5}, Edge("w", "c", 1): {loud: 0.5, quiet: 0.5}}
    parts = partition(model, frozenset(), [], ways)
    prices = tuple(Price(1.0, 1.0, by_format={loud: 0.5, quiet: ms}) for ms in (0.505, 0.7))
    noise = Noise(
        model, {}, 0.1, weight_noise={(t, s.name): n for t in "vw" for s, n in ((loud, 0.03), (quiet, 0.001))}
    )
    found = cut_holding(Costs(parts, prices, {}, {}), noise, 0.1)
    assert dict(found.weight_formats) == {0: quiet, 1: loud}


def test_nothing_is_quantized_where_values_do_not_explain_the_noise() -> None:
    costs, noise = made_up_costs(mixed())
    unknown = Noise(noise.model, {}, limit=0.1, simulate=lambda placement: 0.5 if placement else 0.0)
    assert cut_holding(costs, unknown, 0.1) == Decision()


def _random_decisions(parts: Partition, count: int) -> Sequence[Decision]:
    random = np.random.default_rng(4)
    found = []
    for _ in range(count):
        quantized = frozenset(u.number for u in parts.units if u.inputs and random.random() < 0.5)
        mine = [t for t in parts.edges if parts.producer.get(t) in quantized]
        found.append(Decision(quantized, frozenset(t for t in mine if random.random() < 0.8)))
    return found
