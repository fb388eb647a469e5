"""How the weights of float units are stored, in the cut: the least of a unit's ways, against all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from models import build, normal, ranges
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.attribution import BuildTimes
from qdqtune.search.costs.decisions import decision_of, margin
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.optimum import cut, cut_within
from qdqtune.search.costs.prices import Costs, Price, learn
from qdqtune.search.costs.units import Decision, Partition, partition, weights_by_bits
from qdqtune.search.cut import CutSearch
from qdqtune.types import Edge, Layer, Placement, WeightFormat

NET = """net (float[4,64] x) => (float[4,64] y) {
    [a] p = MatMul(x, w0)
    [b] q = Tanh(p)
    [c] r = MatMul(q, w1)
    [d] y = MatMul(r, w2)
}"""
MODEL = build(NET, {f"w{i}": normal(64, 64, seed=i) for i in range(3)})
W4, W8 = WeightFormat(4, 32), WeightFormat(8)
SHARES = {Edge(f"w{i}", node, 1): {W4: 0.4, W8: 0.6} for i, node in enumerate("acd")}


def parts() -> Partition:
    return partition(MODEL, possible_edges(MODEL, ranges(MODEL)), [], SHARES)


def made_up(seed: int) -> Costs:
    """Arbitrary prices."""
    random, units = np.random.default_rng(seed), parts()
    prices = []
    for unit in units.units:
        stored = {s: float(random.random()) for s in units.weight_formats(unit)}
        prices.append(Price(*random.random(5).tolist(), stored=stored))
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
def test_the_cut_takes_the_least_way_of_every_unit(seed: int) -> None:
    costs = made_up(seed)
    decisions = every_decision(costs.partition)
    assert len(decisions) > 300
    assert costs.total(cut(costs)) == pytest.approx(min(costs.total(d) for d in decisions))


@pytest.mark.parametrize("seed", range(4))
def test_with_a_price_on_noise_each_way_has_its_own(seed: int) -> None:
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


def test_a_decision_survives_as_a_placement_and_its_margin_asks_for_the_best_other_way() -> None:
    costs = made_up(1)
    units = costs.partition
    floats = Decision.of((), (), [(0, W4), (3, W8)])
    placement = units.placement(floats)
    assert placement.weight_formats == {Edge("w0", "a", 1): W4, Edge("w2", "d", 1): W8}
    assert decision_of(costs, placement) == floats
    quantized = Decision.of([0])
    prices = list(costs.prices)
    prices[0] = replace(prices[0], as_float=5.0, stored={W4: 1.0, W8: 2.0}, disturbed=0.0)
    costs = replace(costs, prices=tuple(prices))
    assert margin(costs, quantized, units.units[0]) == pytest.approx(
        costs.total(Decision.of((), (), [(0, W4)])) - costs.total(quantized)
    )


def test_prices_come_from_builds_and_for_what_was_not_built_from_products_alone() -> None:
    """Equal units share what was measured; a DQ that no kernel drew in is the unit's own."""
    units, (first, *_) = parts(), SHARES
    nodes = {"a": 1.0, "b": 0.1, "c": 1.0, "d": 1.0}
    floats = BuildTimes(Placement(), nodes, {}, {}, {})
    built = BuildTimes(Placement.of((), [(first, W4)]), nodes | {"a": 0.3}, {}, {"w0": 0.2}, {"w0": 1})
    costs = learn(units, [floats, built])
    assert [price.stored.get(W4) for price in costs.prices] == pytest.approx([0.5, None, 0.5, 0.5])
    assert [price.stored.get(W8) for price in costs.prices] == pytest.approx([0.6, None, 0.6, 0.6])
    assert costs.prices[0].as_float == pytest.approx(1.0)
    assert not costs.prices[0].seen


def test_the_first_builds_have_every_weight_in_4_and_in_8_bits() -> None:
    layers = [Layer(n.name, (n.name,), "FP32", 1.0, "compute") for n in MODEL.nodes]
    search = CutSearch(MODEL, possible_edges(MODEL, ranges(MODEL)), layers, format_shares=SHARES)
    first = {p.origin: p.placement for p in search.propose([])}
    assert list(first) == ["weights in 4 bits", "fused units", "weights in 8 bits"]  # as promised, alone
    assert first["weights in 4 bits"] == Placement.of((), dict.fromkeys(SHARES, W4).items())
    assert [p.origin for p in replace(search, format_shares={}).propose([])] == ["fused units"]


def test_what_does_not_hold_the_limits_in_4_bits_has_the_loudest_in_8() -> None:
    layers = [Layer(n.name, (n.name,), "FP32", 1.0, "compute") for n in MODEL.nodes]
    stored = {(f"w{i}", s.name): power * 2.0**-s.bits for i, power in enumerate((0.01, 0.2, 0.01)) for s in (W4, W8)}
    noise = Noise(MODEL, {}, 0.01, weight_noise=stored)
    noise = replace(noise, simulate=noise.summed)
    search = CutSearch(MODEL, possible_edges(MODEL, ranges(MODEL)), layers, format_shares=SHARES, noise=noise)
    first = {p.origin: p.placement for p in search.propose([])}
    assert list(first) == ["weights in fewer bits", "fused units", "weights in 8 bits"]
    assert [first["weights in fewer bits"].weight_formats[edge] for edge in SHARES] == [W4, W8, W4]
    alone = {edge: {W4: 0.5, W8: 0.45} for edge in SHARES}  # where 8 bits are as fast in a product alone
    assert _named(replace(search, format_shares=alone)) == {
        name: first[name] for name in first if name.startswith("weights")
    }


def _named(search: CutSearch) -> dict[str, Placement]:
    return {p.origin: p.placement for p in search.propose([]) if p.origin.startswith("weights")}


def test_of_storages_that_take_as_long_the_one_that_keeps_more_is_built() -> None:
    shares = {WeightFormat(4, 128): 0.30, WeightFormat(4, 32): 0.32, WeightFormat(4, 32, symmetric=False): 0.50}
    (found,) = weights_by_bits({Edge("w0", "a", 1): shares}).values()
    assert found.weight_formats == {Edge("w0", "a", 1): WeightFormat(4, 32)}
    assert weights_by_bits({Edge("w0", "a", 1): {WeightFormat(8): 0.95}}) == {}


def test_what_holds_no_limit_is_stored_more_exactly() -> None:
    edge = Edge("w0", "a", 1)
    ways = {edge: {WeightFormat(4, 128): 0.30, WeightFormat(4, 32, symmetric=False): 0.50}}
    fast, exact = (Placement.of((), [(edge, weight_format)]) for weight_format in ways[edge])
    assert weights_by_bits(ways, lambda p: p == fast) == {"weights in 4 bits": fast}
    assert weights_by_bits(ways, lambda p: p == exact) == {"weights in 4 bits": exact}
